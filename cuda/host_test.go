package cuda

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/hostcpu"
	"helios/internal/hostmem"
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
	require.NoError(t, err)
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
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func kernel(t testing.TB, h *Host, name string) Kernel {
	t.Helper()
	k, err := h.Kernel(name)
	require.NoError(t, err)
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
		require.NoError(t, err)
		k := kernel(t, h, "test_add")
		for i := range 300 {
			if err := Launch(s, k, LaunchConfig{1 + i%7, 32},
				addParams{b.Ptr(), 1000, 1}); err != nil {
				t.Fatal(err)
			}
		}
		require.NoError(t, s.Synchronize(limit(t)))
		for i, v := range View[uint64](b.Ptr(), 1000) {
			if v != 300 {
				t.Fatalf("%d SMs: element %d is %d", sms, i, v)
			}
		}
		require.NoError(t, b.Free())
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
			if err := Launch(complete, kernel(t, h, "test_hook"), LaunchConfig{blocks, 32},
				struct{}{}); err != nil {
				t.Fatal(err)
			}
			if err := Launch(submit, kernel(t, h, "test_hook2"), LaunchConfig{blocks, 32},
				struct{}{}); err != nil {
				t.Fatal(err)
			}
			for _, s := range []Stream{complete, submit} {
				require.NoError(t, s.Synchronize(limit(t)))
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
	err := errors.Join(Launch(s, kernel(t, h, "test_wild"), LaunchConfig{1, 32},
		addParams{Dst: 0x10000}),
		s.Synchronize(limit(t)))
	var ke *KernelError
	if !errors.As(err, &ke) || ke.Kernel != "test_wild" ||
		!strings.Contains(ke.Stack, "host_test.go") {
		t.Fatalf("got %v", err)
	}
}

func TestRegisterHostRefusesGoPointers(t *testing.T) {
	for name, reg := range map[string]func(){
		"slice": func() {
			RegisterHost("t1", func(*Block, *struct{ A []int }) error { return nil })
		},
		"nested": func() {
			RegisterHost("t2", func(*Block, *struct{ A [2]struct{ P *int } }) error { return nil })
		},
		"string": func() {
			RegisterHost("t3", func(*Block, *struct{ S string }) error { return nil })
		},
		"unsafe": func() {
			RegisterHost("t4", func(*Block, *struct{ P unsafe.Pointer }) error { return nil })
		},
		"duplicate": func() {
			RegisterHost("test_nop", func(*Block, *struct{}) error { return nil })
		},
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

func TestPanicKeepsItsStack(t *testing.T) {
	h := open(t, HostOptions{SMs: 2})
	s := stream(t, h, StreamOptions{Name: "panicking"})
	cause := errors.New("the cause")
	hook(t, &tBlock, func(b *Block) {
		if b.Index == 3 {
			b.Park(func() { panic(cause) }) // without a slot, too
		}
	})
	for _, blocks := range []int{4, 4} { // the second launch is refused
		_ = Launch(s, kernel(t, h, "test_hook"), LaunchConfig{blocks, 32}, struct{}{})
	}
	err := s.Synchronize(limit(t))
	var ke *KernelError
	if !errors.As(err, &ke) || !errors.Is(err, cause) || ke.Block != 3 || ke.Stream != "panicking" {
		t.Fatalf("got %v", err)
	}
	if !strings.Contains(ke.Stack, "host_test.go") || strings.Contains(ke.Error(), "\n") {
		t.Fatalf("stack %q of %q", ke.Stack, ke)
	}
	// The slot is back: the device goes on.
	other := stream(t, h, StreamOptions{})
	require.NoError(t, Launch(other, kernel(t, h, "test_nop"), LaunchConfig{9, 32}, struct{}{}))
	require.NoError(t, other.Synchronize(limit(t)))
}

func TestKernelReadsPastABuffer(t *testing.T) {
	h := open(t, HostOptions{SMs: 1})
	s := stream(t, h, StreamOptions{})
	b, err := h.Alloc(MemDevice, 80, "ten words")
	require.NoError(t, err)
	if err := Launch(s, kernel(t, h, "test_add"), LaunchConfig{1, 32},
		addParams{b.Ptr(), 11, 1}); err != nil {
		t.Fatal(err)
	}
	if err := s.Synchronize(limit(t)); err == nil || !strings.Contains(err.Error(), "ten words") ||
		!strings.Contains(err.Error(), "out of bounds") {
		t.Errorf("got %v", err)
	}
	if err := b.Free(); err != nil {
		t.Error(err)
	}
}

func TestViewRefuses(t *testing.T) {
	for name, f := range map[string]func(){
		"nil":      func() { View[uint64](0, 1) },
		"negative": func() { View[uint64](4096, -1) },
		"aligned":  func() { View[uint64](4097, 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: accepted", name)
				}
			}()
			f()
		}()
	}
	if View[uint64](0, 0) != nil {
		t.Error("a view of nothing")
	}
}

func TestRange(t *testing.T) {
	for blocks := 1; blocks < 9; blocks++ {
		for n := int64(0); n < 40; n++ {
			next := int64(0)
			for i := range blocks {
				b := Block{Index: i, Blocks: blocks}
				lo, hi := b.Range(n)
				if lo != next || hi < lo || hi-lo > n/int64(blocks)+1 || hi-lo < n/int64(blocks) {
					t.Fatalf("block %d of %d, %d items: %d to %d", i, blocks, n, lo, hi)
				}
				next = hi
			}
			if next != n {
				t.Fatalf("%d blocks cover %d of %d", blocks, next, n)
			}
		}
	}
}

// Two workers are seen busy when two blocks run at once, and time in Park is not counted.
func TestBusyWorkers(t *testing.T) {
	h := open(t, HostOptions{SMs: 3})
	s := stream(t, h, StreamOptions{SMs: 2})
	var arrived atomic.Int64
	hook(t, &tBlock, func(b *Block) {
		for arrived.Add(1); arrived.Load() < 2; { // no Yield: both hold a slot at one time
			continue
		}
		for end := time.Now().Add(3 * time.Millisecond); time.Now().Before(end); {
			continue
		}
		b.Park(func() { time.Sleep(20 * time.Millisecond) })
	})
	began := time.Now()
	require.NoError(t, Launch(s, kernel(t, h, "test_hook"), LaunchConfig{2, 32}, struct{}{}))
	require.NoError(t, s.Synchronize(limit(t)))
	took := time.Since(began)
	busy := h.BusyWorkers()
	if len(busy) != 3 || busy[2] != 0 {
		t.Fatalf("busy %v: the budget was two of three", busy)
	}
	for i, d := range busy[:2] {
		if d < 3*time.Millisecond || d > took-20*time.Millisecond {
			t.Errorf("worker %d busy for %v of %v", i, d, took)
		}
	}
}

// A value that is there, one that comes and the end of a channel are each received, at once and
// after the receiver has parked.
func TestAwait(t *testing.T) {
	for _, after := range []time.Duration{0, 20 * linger} {
		c := make(chan int, 1)
		later := func(do func()) {
			began := now()
			go func() {
				for now()-began < int64(after) {
					runtime.Gosched()
				}
				do()
			}()
		}
		c <- 1
		for want := 1; want <= 3; want++ {
			if v, ok := await(c); v != want || !ok {
				t.Fatalf("after %v: got %d, %v, want %d", after, v, ok, want)
			}
			if want < 3 {
				later(func() { c <- want + 1 })
			}
		}
		later(func() { close(c) })
		if v, ok := await(c); ok {
			t.Fatalf("after %v: got %d of a closed channel", after, v)
		}
	}
}

// In a bubble, where time passes when all goroutines wait, the device's wait as well.
func TestBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := open(t, HostOptions{SMs: 4})
		s := stream(t, h, StreamOptions{Name: "s"})
		for range 3 {
			if err := Launch(s, kernel(t, h, "test_nop"), LaunchConfig{64, 32},
				struct{}{}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Hour)
			require.NoError(t, s.Synchronize(limit(t)))
		}
	})
}

// A stream is busy while it holds a slot: of two that share the only one, each for its part.
func TestBusyIsTimeOnASlot(t *testing.T) {
	h := open(t, HostOptions{SMs: 1})
	low, high := stream(t, h, StreamOptions{Name: "low"}),
		stream(t, h, StreamOptions{Name: "high", Priority: 1})
	hook(t, &tBlock, func(*Block) {
		for end := time.Now().Add(time.Millisecond); time.Now().Before(end); {
			continue
		}
	})
	began := time.Now()
	for range 5 {
		for _, s := range []Stream{low, high} {
			if err := Launch(s, kernel(t, h, "test_hook"), LaunchConfig{10, 32},
				struct{}{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, s := range []Stream{low, high} {
		require.NoError(t, s.Synchronize(limit(t)))
	}
	took := time.Since(began)
	if l, h := low.Busy(), high.Busy(); l < 50*time.Millisecond || h < 50*time.Millisecond ||
		l+h > took {
		t.Fatalf("busy %v and %v in %v on one slot", l, h, took)
	}
}

// Streams of one priority share a slot by time: a long grid lets a short one in before its end.
func TestEqualPrioritiesShare(t *testing.T) {
	h := open(t, HostOptions{SMs: 1})
	long, short := stream(t, h, StreamOptions{Name: "long"}),
		stream(t, h, StreamOptions{Name: "short"})
	var started, shortAt atomic.Int64
	const blocks = 400
	first, begun := make(chan struct{}), make(chan struct{})
	hook(t, &tBlock, func(*Block) {
		if started.Add(1) == 1 {
			close(first)
			<-begun // until the short one is enqueued; the slot stays taken
		}
		for end := time.Now().Add(time.Millisecond); shortAt.Load() == 0 &&
			time.Now().Before(end); {
			continue
		}
	})
	hook(t, &tBlock2, func(*Block) { shortAt.Store(started.Load()) })
	if err := Launch(long, kernel(t, h, "test_hook"), LaunchConfig{blocks, 32},
		struct{}{}); err != nil {
		t.Fatal(err)
	}
	<-first
	if err := Launch(short, kernel(t, h, "test_hook2"), LaunchConfig{1, 32},
		struct{}{}); err != nil {
		t.Fatal(err)
	}
	close(begun)
	for _, s := range []Stream{short, long} {
		require.NoError(t, s.Synchronize(limit(t)))
	}
	if ran := shortAt.Load(); ran == 0 || ran == blocks {
		t.Errorf("the short kernel ran after %d of %d blocks", ran, blocks)
	}
}

func TestFullQueueHasADeadline(t *testing.T) {
	h := open(t, HostOptions{SMs: 1, QueueDepth: 4, QueueTimeout: 20 * time.Millisecond})
	s := stream(t, h, StreamOptions{Name: "full"})
	gate := make(chan struct{})
	hook(t, &tBlock, func(b *Block) { b.Park(func() { <-gate }) })
	k, nop := kernel(t, h, "test_hook"), kernel(t, h, "test_nop")
	require.NoError(t, Launch(s, k, LaunchConfig{1, 32}, struct{}{}))
	var err error
	for range 4 {
		err = Launch(s, nop, LaunchConfig{1, 32}, struct{}{})
	}
	if err == nil || !strings.Contains(err.Error(), "full") || !strings.Contains(err.Error(),
		"test_hook") {
		t.Errorf("got %v", err)
	}
	close(gate)
	if err := s.Synchronize(limit(t)); err != nil {
		t.Error(err)
	}
}

// A kernel that hangs makes Close late and loud, not hang with it, and its memory stays mapped.
func TestCloseWithAStuckKernel(t *testing.T) {
	h, err := NewHost(HostOptions{SMs: 1, CloseTimeout: 20 * time.Millisecond})
	require.NoError(t, err)
	s, err := h.NewStream(StreamOptions{Name: "stuck"})
	require.NoError(t, err)
	buf, err := h.Alloc(MemDevice, 8, "in use")
	require.NoError(t, err)
	gate, end := make(chan struct{}), make(chan struct{})
	hook(t, &tBlock, func(b *Block) {
		b.Park(func() { <-gate })
		View[uint64](buf.Ptr(), 1)[0] = 7
		close(end)
	})
	require.NoError(t, Launch(s, kernel(t, h, "test_hook"), LaunchConfig{1, 32}, struct{}{}))
	if err := s.Close(); err == nil || !strings.Contains(err.Error(), "test_hook") {
		t.Errorf("stream: %v", err)
	}
	if err := h.Close(); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("device: %v", err)
	}
	close(gate)
	<-end
	if err := buf.Free(); err != nil {
		t.Error(err)
	}
}

func TestRegisterRules(t *testing.T) {
	h := open(t, HostOptions{SMs: 1})
	if _, err := h.Register(make([]byte, 4096), "go memory"); err == nil ||
		!strings.Contains(err.Error(), "go memory") {
		t.Errorf("memory of Go's heap: %v", err)
	}
	mem, err := hostmem.Alloc(1<<16, "test")
	require.NoError(t, err)
	whole, err := h.Register(mem[4096:40960], "whole")
	require.NoError(t, err)
	part, err := h.Register(mem[8192:12288], "part")
	require.NoError(t, err)
	if _, err := h.Register(mem[:8192], "crossing"); err == nil || !strings.Contains(err.Error(),
		"whole") {
		t.Errorf("an overlap: %v", err)
	}
	if u := h.MemUsage(); u["whole"] != 36864 || u["part"] != 0 {
		t.Errorf("usage %v", u)
	}
	s := stream(t, h, StreamOptions{})
	require.NoError(t, whole.Free())
	if err := s.Fill(part.Ptr(), 1, 4096); err != nil {
		t.Errorf("a part outlives the whole's registration: %v", err)
	}
	require.NoError(t, s.Synchronize(limit(t)))
	require.NoError(t, part.Free())
	if err := s.Fill(part.Ptr(), 1, 1); err == nil {
		t.Error("a fill of memory that is registered no more")
	}
	require.NoError(t, hostmem.Free(mem))
}

// Random grids whose blocks yield, park and run, on streams of random priorities and budgets:
// everything ends, every block runs once, no stream exceeds its budget.
func TestSchedulerStress(t *testing.T) {
	for _, sms := range []int{1, 2, 5} {
		seed := uint64(time.Now().UnixNano())
		rng := rand.New(rand.NewPCG(seed, 0))
		h := open(t, HostOptions{SMs: sms})
		k := kernel(t, h, "test_hook")
		var ran, running, over atomic.Int64
		check := func() {
			if running.Add(1) > int64(sms) {
				over.Add(1)
			}
		}
		hook(t, &tBlock, func(b *Block) {
			ran.Add(1)
			check()
			for i := range 3 {
				running.Add(-1)
				switch (b.Index + i) % 4 {
				case 0:
					b.Yield()
				case 1:
					b.Park(runtime.Gosched)
				case 2:
					b.Park(func() { time.Sleep(10 * time.Microsecond) })
				}
				check()
			}
			running.Add(-1)
		})
		want := int64(0)
		var streams []Stream
		for i := range 6 {
			streams = append(streams,
				stream(t, h, StreamOptions{Priority: rng.IntN(3), SMs: rng.IntN(3),
					Name: string(rune('a' + i))}))
		}
		for range 300 {
			blocks := 1 + rng.IntN(6)
			if rng.IntN(20) == 0 {
				blocks = 100 // more than may be resident
			}
			want += int64(blocks)
			if err := Launch(streams[rng.IntN(len(streams))], k, LaunchConfig{blocks, 32},
				struct{}{}); err != nil {
				t.Fatal(err)
			}
		}
		for _, s := range streams {
			if err := s.Synchronize(limit(t)); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		if ran.Load() != want || over.Load() != 0 || running.Load() != 0 {
			t.Fatalf("seed %d, %d SMs: %d of %d blocks ran, %d times too many at once, %d left",
				seed, sms, ran.Load(), want, over.Load(), running.Load())
		}
		// A grid ends with its last block; a worker gives its slot back right after that.
		settled := func() bool {
			h.sched.mu.Lock()
			defer h.sched.mu.Unlock()
			return len(h.sched.free) == sms
		}
		for end := time.Now().Add(10 * time.Second); !settled() && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		h.sched.mu.Lock()
		if len(h.sched.free) != sms || h.sched.waiting.Load() != 0 || len(h.sched.claims)+
			len(h.sched.returns) != 0 {
			t.Errorf("seed %d: %d of %d slots free, %d waiting", seed, len(h.sched.free), sms,
				h.sched.waiting.Load())
		}
		for _, s := range streams {
			if hs := s.(*hostStream); hs.held != 0 || hs.parked != 0 {
				t.Errorf("seed %d: stream %q holds %d, parks %d", seed, hs.opt.Name, hs.held,
					hs.parked)
			}
		}
		h.sched.mu.Unlock()
	}
}

func benchLaunch(b *testing.B, blocks int) {
	h := open(b, HostOptions{})
	s := stream(b, h, StreamOptions{})
	k := kernel(b, h, "test_nop")
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, Launch(s, k, LaunchConfig{blocks, 32}, struct{}{}))
	}
	require.NoError(b, s.Synchronize(context.Background()))
}

func BenchmarkLaunch1(b *testing.B)  { benchLaunch(b, 1) }
func BenchmarkLaunch2(b *testing.B)  { benchLaunch(b, 2) }
func BenchmarkLaunch32(b *testing.B) { benchLaunch(b, 32) }

func BenchmarkLaunchSync(b *testing.B) {
	h := open(b, HostOptions{})
	s := stream(b, h, StreamOptions{})
	k := kernel(b, h, "test_nop")
	for b.Loop() {
		require.NoError(b, Launch(s, k, LaunchConfig{1, 32}, struct{}{}))
		require.NoError(b, s.Synchronize(context.Background()))
	}
}

// One block that parks or yields, with another stream's spinning block as company.
func benchWait(b *testing.B, wait func(*Block)) {
	h := open(b, HostOptions{SMs: 1})
	s, other := stream(b, h, StreamOptions{}), stream(b, h, StreamOptions{})
	var stop atomic.Bool
	hook(b, &tBlock, func(blk *Block) {
		for b.Loop() {
			wait(blk)
		}
		stop.Store(true)
	})
	hook(b, &tBlock2, func(blk *Block) {
		for !stop.Load() {
			blk.Yield()
		}
	})
	if err := errors.Join(Launch(other, kernel(b, h, "test_hook2"), LaunchConfig{1, 32},
		struct{}{}),
		Launch(s, kernel(b, h, "test_hook"), LaunchConfig{1, 32}, struct{}{}),
		s.Synchronize(context.Background()), other.Synchronize(context.Background())); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkYield(b *testing.B) { benchWait(b, (*Block).Yield) }
func BenchmarkPark(b *testing.B)  { benchWait(b, func(blk *Block) { blk.Park(func() {}) }) }

// spin uses CPU time of its own thread.
func spin(d time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for from := hostcpu.ThreadTime(); hostcpu.ThreadTime()-from < d; {
	}
}

func TestMeterCPU(t *testing.T) {
	const own, other = time.Millisecond, 15 * time.Millisecond
	h := open(t, HostOptions{SMs: 1})
	s := stream(t, h, StreamOptions{Name: "metered"})
	run := func() time.Duration {
		by := hostcpu.Spender{Stage: "metered", Operator: "test_hook"}
		before := hostcpu.Spent()[by]
		hook(t, &tBlock, func(b *Block) {
			spin(own)
			b.Park(func() { spin(other) })
			b.Pause()
			spin(other)
			b.Resume()
			spin(own)
		})
		require.NoError(t, Launch(s, kernel(t, h, "test_hook"), LaunchConfig{2, 32}, struct{}{}))
		require.NoError(t, s.Synchronize(limit(t)))
		return hostcpu.Spent()[by] - before
	}
	if d := run(); d != 0 {
		t.Fatalf("%v counted though nobody asked", d)
	}
	stop := hostcpu.Meter()
	if d := run(); d < 4*own || d >= other {
		t.Fatalf("%v counted: want four times %v, and nothing of %v", d, own, other)
	}
	stop()
	stop() // has no effect
	if d := run(); d != 0 {
		t.Fatalf("%v counted after the end", d)
	}
}
