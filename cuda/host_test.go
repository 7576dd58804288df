package cuda

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

type addParams struct {
	Dst DevicePtr
	N   int64
	Add uint64
}

// Tests reach Go values that a parameter block cannot carry through these.
var (
	tBlock  atomic.Pointer[func(b *Block)]
	tBlock2 atomic.Pointer[func(b *Block)]
)

func init() {
	RegisterHost("test_add", func(b *Block, p *addParams) error {
		lo, hi := b.Range(p.N)
		v := View[uint64](p.Dst, p.N)
		for i := lo; i < hi; i++ {
			v[i] += p.Add
		}
		return nil
	})
	RegisterHost("test_nop", func(*Block, *struct{}) error { return nil })
	RegisterHost("test_hook", func(b *Block, _ *struct{}) error {
		(*tBlock.Load())(b)
		return nil
	})
	RegisterHost("test_hook2", func(b *Block, _ *struct{}) error {
		(*tBlock2.Load())(b)
		return nil
	})
	RegisterHost("test_wild", func(_ *Block, p *addParams) error {
		*(*byte)(pointer(p.Dst)) = 1
		return nil
	})
}

func open(t testing.TB, opt HostOptions) *Host {
	t.Helper()
	h, err := NewHost(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	return h
}

func stream(t testing.TB, h *Host, opt StreamOptions) Stream {
	t.Helper()
	s, err := h.NewStream(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func kernel(t testing.TB, h *Host, name string) Kernel {
	t.Helper()
	k, err := h.Kernel(name)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func limit(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func hook(t testing.TB, p *atomic.Pointer[func(b *Block)], f func(b *Block)) {
	p.Store(&f)
	t.Cleanup(func() { p.Store(nil) })
}

func TestHostAdd(t *testing.T) {
	for _, sms := range []int{1, 2, 4} {
		h := open(t, HostOptions{SMs: sms})
		s := stream(t, h, StreamOptions{Name: "add"})
		b, err := h.Alloc(MemDevice, 8000, "sums")
		if err != nil {
			t.Fatal(err)
		}
		k := kernel(t, h, "test_add")
		for i := range 300 {
			if err := Launch(s, k, LaunchConfig{1 + i%7, 32}, addParams{b.Ptr(), 1000, 1}); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Synchronize(limit(t)); err != nil {
			t.Fatal(err)
		}
		for i, v := range View[uint64](b.Ptr(), 1000) {
			if v != 300 {
				t.Fatalf("%d SMs: element %d is %d", sms, i, v)
			}
		}
		if err := b.Free(); err != nil {
			t.Fatal(err)
		}
	}
}

// Two blocks that wait for each other end even on one slot, when they say that they wait.
func TestOneSlotTwoStreams(t *testing.T) {
	for name, wait := range map[string]func(b *Block, ready *atomic.Int64, until int64){
		"yield": func(b *Block, ready *atomic.Int64, until int64) {
			for ready.Load() < until {
				b.Yield()
			}
		},
		"park": func(b *Block, ready *atomic.Int64, until int64) {
			b.Park(func() {
				for ready.Load() < until {
					time.Sleep(time.Microsecond)
				}
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := open(t, HostOptions{SMs: 1})
			complete := stream(t, h, StreamOptions{Name: "complete", Priority: 9})
			submit := stream(t, h, StreamOptions{Name: "submit"})
			var turns [2]atomic.Int64
			const rounds, blocks = 50, 8
			hook(t, &tBlock, func(b *Block) { // waits for submit, round by round
				for i := range int64(rounds) {
					wait(b, &turns[1], (i+1)*blocks)
					turns[0].Add(1)
				}
			})
			hook(t, &tBlock2, func(b *Block) {
				for i := range int64(rounds) {
					turns[1].Add(1)
					wait(b, &turns[0], (i+1)*blocks)
				}
			})
			if err := Launch(complete, kernel(t, h, "test_hook"), LaunchConfig{blocks, 32}, struct{}{}); err != nil {
				t.Fatal(err)
			}
			if err := Launch(submit, kernel(t, h, "test_hook2"), LaunchConfig{blocks, 32}, struct{}{}); err != nil {
				t.Fatal(err)
			}
			for _, s := range []Stream{complete, submit} {
				if err := s.Synchronize(limit(t)); err != nil {
					t.Fatal(err)
				}
			}
			if turns[0].Load() != rounds*blocks || turns[1].Load() != rounds*blocks {
				t.Fatal("a block ended early")
			}
		})
	}
}

func TestWildPointerIsAnError(t *testing.T) {
	h := open(t, HostOptions{SMs: 2})
	s := stream(t, h, StreamOptions{Name: "wild"})
	err := errors.Join(Launch(s, kernel(t, h, "test_wild"), LaunchConfig{1, 32}, addParams{Dst: 0x10000}),
		s.Synchronize(limit(t)))
	var ke *KernelError
	if !errors.As(err, &ke) || ke.Kernel != "test_wild" || !strings.Contains(ke.Detail(), "host_test.go") {
		t.Fatalf("got %v", err)
	}
}

func TestRegisterHostRefusesGoPointers(t *testing.T) {
	for name, reg := range map[string]func(){
		"slice":     func() { RegisterHost("t1", func(*Block, *struct{ A []int }) error { return nil }) },
		"nested":    func() { RegisterHost("t2", func(*Block, *struct{ A [2]struct{ P *int } }) error { return nil }) },
		"string":    func() { RegisterHost("t3", func(*Block, *struct{ S string }) error { return nil }) },
		"unsafe":    func() { RegisterHost("t4", func(*Block, *struct{ P unsafe.Pointer }) error { return nil }) },
		"duplicate": func() { RegisterHost("test_nop", func(*Block, *struct{}) error { return nil }) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: accepted", name)
				}
			}()
			reg()
		}()
	}
}

func benchLaunch(b *testing.B, blocks int) {
	h := open(b, HostOptions{})
	s := stream(b, h, StreamOptions{})
	k := kernel(b, h, "test_nop")
	b.ReportAllocs()
	for b.Loop() {
		if err := Launch(s, k, LaunchConfig{blocks, 32}, struct{}{}); err != nil {
			b.Fatal(err)
		}
	}
	if err := s.Synchronize(context.Background()); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkLaunch1(b *testing.B)  { benchLaunch(b, 1) }
func BenchmarkLaunch2(b *testing.B)  { benchLaunch(b, 2) }
func BenchmarkLaunch32(b *testing.B) { benchLaunch(b, 32) }

func BenchmarkLaunchSync(b *testing.B) {
	h := open(b, HostOptions{})
	s := stream(b, h, StreamOptions{})
	k := kernel(b, h, "test_nop")
	for b.Loop() {
		if err := Launch(s, k, LaunchConfig{1, 32}, struct{}{}); err != nil {
			b.Fatal(err)
		}
		if err := s.Synchronize(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}
