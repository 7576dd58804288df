// Package conformance is what a compute device has to do, as tests. Every backend of package
// cuda runs it.
package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Feature is something that not every backend can do.
type Feature string

// The features that a backend may lack.
const (
	// FaultIsolation: a kernel that touches memory which is not the device's fails its stream
	// only. On a GPU it takes the context along; failures that a kernel reports itself are
	// isolated everywhere.
	FaultIsolation Feature = "isolation of memory faults by stream"
	// Budgets: a stream's budget holds whatever the grid. Drivers without green contexts
	// only have the grid's size for it.
	Budgets Feature = "SM budgets"
	// Loss: a device can be lost, and the test can make it so. Goroutines are not.
	Loss Feature = "loss of the device"
)

// Backend is a device to test and what there is to know about it.
type Backend struct {
	// Open gives a fresh device for each test, which the test closes.
	Open  func(t *testing.T) cuda.Device
	Lacks []Feature // tests of these are skipped
	// Threads is a size of block, and BlocksPerSM how many of that size one SM holds at
	// most. 0: any size, and one.
	Threads, BlocksPerSM int
	// StreamSMs holds what a stream's budget of want SMs came to, where the device deals them out
	// in steps. nil: exactly to want.
	StreamSMs func(st cuda.Stream, want int) int
	// Lose makes the device fail for good, as a GPU that falls off the bus. Needed unless
	// Loss is lacking.
	Lose func(t *testing.T)
	// Ended looks, after a test has closed its device, for what it left behind. Optional.
	Ended func(t *testing.T)
}

const (
	patience = 20 * time.Second       // nothing here takes that long unless it hangs
	short    = 30 * time.Millisecond  // a wait that is meant to run out
	step     = 20 * time.Millisecond  // between two looks at something that should change
	longGate = 15 * time.Second       // limit of a kernel that waits for the test
	hold     = 300 * time.Microsecond // how long a counted block stays
)

type suite struct {
	*testing.T
	dev cuda.Device
	b   Backend
}

// Run tests the devices that a backend opens.
func Run(t *testing.T, b Backend) {
	if b.Threads == 0 {
		b.Threads = 64
	}
	b.BlocksPerSM = max(b.BlocksPerSM, 1)
	if b.StreamSMs == nil {
		b.StreamSMs = func(_ cuda.Stream, want int) int { return want }
	}
	tests := []struct {
		name string
		need Feature
		run  func(s *suite)
	}{
		{"Info", "", testInfo},
		{"Memory", "", testMemory},
		{"OutOfMemory", "", testOutOfMemory},
		{"OutOfMemoryMidway", "", testOutOfMemoryMidway},
		{"FreeMemory", "", testFreeMemory},
		{"Growable", "", testGrowable},
		{"GrowableOutOfMemory", "", testGrowableOutOfMemory},
		{"Register", "", testRegister},
		{"Copies", "", testCopies},
		{"CopyBounds", "", testCopyBounds},
		{"Grid", "", testGrid},
		{"Clock", "", testClock},
		{"Prices", "", testPrices},
		{"Parameters", "", testParameters},
		{"ParametersAreCopied", "", testParametersAreCopied},
		{"LaunchErrors", "", testLaunchErrors},
		{"StreamOrder", "", testStreamOrder},
		{"CrossStreamEvents", "", testCrossStreamEvents},
		{"EventRecordedTwice", "", testEventRecordedTwice},
		{"EventTimes", "", testEventTimes},
		{"StreamsRunTogether", "", testStreamsRunTogether},
		{"Priorities", "", testPriorities},
		{"Budgets", Budgets, testBudgets},
		{"BlocksThatYield", "", testBlocksThatYield},
		{"ManyLaunches", "", testManyLaunches},
		{"Steps", "", testSteps},
		{"StepsThatFail", "", testStepsThatFail},
		{"StickyErrors", "", testStickyErrors},
		{"ErrorsAreIsolated", "", testErrorsAreIsolated},
		{"ErrorsTravelWithEvents", "", testErrorsTravelWithEvents},
		{"WildAddress", "", testWildAddress},
		{"WildAddressIsIsolated", FaultIsolation, testWildAddressIsIsolated},
		{"Loss", Loss, testLoss},
		{"Timeouts", "", testTimeouts},
		{"Busy", "", testBusy},
		{"StreamClose", "", testStreamClose},
		{"CloseReportsLeaks", "", testCloseReportsLeaks},
		{"UnfreedBuffers", "", testUnfreedBuffers},
		{"Concurrency", "", testConcurrency},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			for _, f := range b.Lacks {
				if f == c.need {
					t.Skipf("the backend lacks %s", f)
				}
			}
			s := &suite{t, b.Open(t), b}
			c.run(s)
			if err := s.dev.Close(); err != nil && !t.Failed() {
				t.Errorf("close: %v", err)
			}
			if b.Ended != nil && !t.Failed() {
				b.Ended(t)
			}
		})
	}
}

// Helpers. Each fails the test.

func (s *suite) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// fails wants an error that names all of what.
func (s *suite) fails(err error, what ...string) {
	s.Helper()
	if err == nil {
		s.Fatalf("no error; want one that names %q", what)
	}
	for _, w := range what {
		if !strings.Contains(err.Error(), w) {
			s.Fatalf("error %q does not name %q", err, w)
		}
	}
}

func (s *suite) ctx(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	s.Cleanup(cancel)
	return ctx
}

func (s *suite) alloc(kind cuda.MemKind, size int64, purpose string) cuda.Buffer {
	s.Helper()
	b, err := s.dev.Alloc(kind, size, purpose)
	s.ok(err)
	return b
}

func (s *suite) free(bs ...cuda.Buffer) {
	s.Helper()
	for _, b := range bs {
		s.ok(b.Free())
	}
}

func (s *suite) stream(o cuda.StreamOptions) cuda.Stream {
	s.Helper()
	st, err := s.dev.NewStream(o)
	s.ok(err)
	return st
}

func (s *suite) event() cuda.Event {
	s.Helper()
	e, err := s.dev.NewEvent()
	s.ok(err)
	return e
}

func (s *suite) kernel(name string) cuda.Kernel {
	s.Helper()
	k, err := s.dev.Kernel(name)
	s.ok(err)
	return k
}

func (s *suite) sync(sts ...cuda.Stream) {
	s.Helper()
	for _, st := range sts {
		s.ok(st.Synchronize(s.ctx(patience)))
	}
}

func (s *suite) close(sts ...cuda.Stream) {
	s.Helper()
	for _, st := range sts {
		s.ok(st.Close())
	}
}

func launch[T any](s *suite, st cuda.Stream, name string, blocks int, p T) {
	s.Helper()
	s.ok(cuda.Launch(st, s.kernel(name), cuda.LaunchConfig{Blocks: blocks, Threads: 64}, p))
}

// wide launches blocks of the size of which the test knows how many an SM holds.
func wide[T any](s *suite, st cuda.Stream, name string, blocks int, p T) {
	s.Helper()
	s.ok(cuda.Launch(st, s.kernel(name), cuda.LaunchConfig{Blocks: blocks, Threads: s.b.Threads},
		p))
}

// words is pinned memory that the test reads and writes while kernels do.
type words struct {
	cuda.Buffer
	v []uint64
}

func (s *suite) words(n int, purpose string) words {
	s.Helper()
	b := s.alloc(cuda.MemPinned, int64(n)*8, purpose)
	return words{b, hostmem.View[uint64](b.Bytes())}
}

func (w words) at(i int) cuda.DevicePtr { return w.Ptr() + cuda.DevicePtr(8*i) }
func (w words) get(i int) uint64        { return atomic.LoadUint64(&w.v[i]) }
func (w words) set(i int, v uint64)     { atomic.StoreUint64(&w.v[i], v) }

// await waits until word i is at least v.
func (s *suite) await(w words, i int, v uint64) {
	s.Helper()
	for end := time.Now().Add(patience); w.get(i) < v; {
		if time.Now().After(end) {
			s.Fatalf("word %d is %d after %v; want %d", i, w.get(i), patience, v)
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// gate starts kernels that wait for words: 0 gate, 1 arrived, 2 left, 3 late.
func (s *suite) gate(st cuda.Stream, w words, blocks int, perBlock uint64, yield bool) {
	s.Helper()
	wide(s, st, "conf_gate", blocks, s.gateParams(w, perBlock, yield))
}

func (s *suite) gateParams(w words, perBlock uint64, yield bool) gateParams {
	p := gateParams{Gate: w.at(0), Arrived: w.at(1), Left: w.at(2), Late: w.at(3), Step: perBlock,
		LimitNS: int64(longGate)}
	if yield {
		p.Yield = 1
	}
	return p
}

// read copies device memory to the CPU through a stream.
func (s *suite) read(st cuda.Stream, p cuda.DevicePtr, n int64) []byte {
	s.Helper()
	stage := s.alloc(cuda.MemPinned, n, "read back")
	defer s.free(stage)
	s.ok(st.Copy(stage.Ptr(), p, n))
	s.sync(st)
	return bytes.Clone(stage.Bytes())
}

func (s *suite) readWords(st cuda.Stream, p cuda.DevicePtr, n int) []uint64 {
	s.Helper()
	b := s.read(st, p, int64(n)*8)
	return append([]uint64(nil), unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), n)...)
}

// The tests.

func testInfo(s *suite) {
	i := s.dev.Info()
	if i.Name == "" || i.Backend == "" || i.SMs < 1 || i.MemTotal <= 0 {
		s.Fatalf("%+v", i)
	}
}

func testMemory(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "memory"})
	for _, kind := range []cuda.MemKind{cuda.MemDevice, cuda.MemPinned} {
		for _, size := range []int64{1, 100, 4096, 4097, 5 << 20} {
			for range 2 { // the second finds memory that was written and freed
				b := s.alloc(kind, size, "rows")
				if b.Size() != size || b.Kind() != kind || b.Purpose() != "rows" || b.Ptr() == 0 ||
					b.Ptr()%4096 != 0 {
					s.Fatalf("%d bytes: %d bytes at %#x, kind %d for %s", size, b.Size(), b.Ptr(),
						b.Kind(), b.Purpose())
				}
				if kind == cuda.MemPinned && int64(len(b.Bytes())) != size {
					s.Fatalf("the CPU sees %d bytes of %d pinned ones", len(b.Bytes()), size)
				}
				if got := s.dev.MemUsage()["rows"]; got != size {
					s.Fatalf("usage %d with %d allocated", got, size)
				}
				for i, c := range s.read(st, b.Ptr(), size) {
					if c != 0 {
						s.Fatalf("byte %d of %d is %d before the first write", i, size, c)
					}
				}
				s.ok(st.Fill(b.Ptr(), 0xa5, size))
				s.sync(st)
				s.free(b)
				s.free(b) // a later call does nothing
				if got, there := s.dev.MemUsage()["rows"]; there {
					s.Fatalf("usage %d after free", got)
				}
			}
		}
	}
	a, b := s.alloc(cuda.MemDevice, 1000, "one"), s.alloc(cuda.MemDevice, 2000, "one")
	c := s.alloc(cuda.MemPinned, 500, "other")
	if u := s.dev.MemUsage(); u["one"] != 3000 || u["other"] != 500 {
		s.Fatalf("usage %v", u)
	}
	none := s.alloc(cuda.MemDevice, 0, "nothing")
	if none.Size() != 0 {
		s.Fatalf("an empty buffer of %d bytes", none.Size())
	}
	s.ok(st.Copy(none.Ptr(), none.Ptr(), 0))
	s.ok(st.Fill(none.Ptr(), 1, 0))
	s.sync(st)
	s.free(a, b, c, none)
	if u := s.dev.MemUsage(); len(u) != 0 {
		s.Fatalf("usage %v after all is free", u)
	}
	_, err := s.dev.Alloc(cuda.MemDevice, -1, "minus one")
	s.fails(err, "minus one")
	_, err = s.dev.Alloc(cuda.MemKind(77), 1, "odd kind")
	s.fails(err, "odd kind")
	s.close(st)
}

func testOutOfMemory(s *suite) {
	kept := s.alloc(cuda.MemDevice, 4096, "kept")
	want := s.dev.Info().MemTotal + 1
	_, err := s.dev.Alloc(cuda.MemDevice, want, "too big a cache")
	s.fails(err, "too big a cache", fmt.Sprint(want))
	var oom *cuda.OutOfMemoryError
	if !errors.As(err, &oom) || oom.Purpose != "too big a cache" || oom.Want != want ||
		oom.Free >= want {
		s.Fatalf("not an OutOfMemoryError with the facts: %#v", err)
	}
	if u := s.dev.MemUsage(); len(u) != 1 || u["kept"] != 4096 {
		s.Fatalf("usage %v after a refusal", u)
	}
	s.free(kept, s.alloc(cuda.MemDevice, 4096, "still works"))
}

// Memory runs out in the middle of a job: what was there before stays good, and the device goes
// on when some is given back.
func testOutOfMemoryMidway(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "midway"})
	const n = 1000
	kept := s.alloc(cuda.MemDevice, n*8, "kept")
	s.ok(st.Fill(kept.Ptr(), 1, n*8))
	chunk := max(s.dev.Info().MemTotal/8, 1<<20)
	var chunks []cuda.Buffer
	var oom *cuda.OutOfMemoryError
	for {
		b, err := s.dev.Alloc(cuda.MemDevice, chunk, "chunks")
		if err != nil {
			if !errors.As(err, &oom) {
				s.Fatalf("after %d chunks: not an OutOfMemoryError: %#v", len(chunks), err)
			}
			s.fails(err, "chunks", fmt.Sprint(chunk))
			break
		}
		if chunks = append(chunks, b); len(chunks) > 8 {
			s.Fatalf("%d chunks of %d bytes on a device of %d", len(chunks), chunk,
				s.dev.Info().MemTotal)
		}
	}
	if oom.Want != chunk || oom.Free >= chunk || oom.Free < 0 {
		s.Fatalf("%d bytes wanted and %d free, says the error", oom.Want, oom.Free)
	}
	if u := s.dev.MemUsage(); u["kept"] != n*8 || u["chunks"] != int64(len(chunks))*chunk {
		s.Fatalf("usage %v with %d chunks of %d", u, len(chunks), chunk)
	}
	launch(s, st, "conf_affine", 2, affineParams{kept.Ptr(), n, 3, 1})
	if len(chunks) > 0 {
		s.free(chunks[len(chunks)-1])
		chunks = chunks[:len(chunks)-1]
	}
	again := s.alloc(cuda.MemDevice, n*8, "again") // what was given back is there for others
	launch(s, st, "conf_move", 3, moveParams{again.Ptr(), kept.Ptr(), n, 0})
	for i, v := range s.readWords(st, again.Ptr(), n) {
		if v != 0x0101010101010101*3+1 {
			s.Fatalf("word %d is %#x after memory ran out", i, v)
		}
	}
	s.free(append(chunks, kept, again)...)
	s.close(st)
}

func testRegister(s *suite) {
	mem, err := hostmem.Alloc(64<<10, "conformance")
	s.ok(err)
	defer func() { s.ok(hostmem.Free(mem)) }()
	v := hostmem.View[uint64](mem)
	for i := range v {
		v[i] = uint64(i)
	}
	r, err := s.dev.Register(mem, "topology")
	s.ok(err)
	if r.Size() != int64(len(mem)) || r.Kind() != cuda.MemPinned || r.Purpose() != "topology" ||
		s.dev.MemUsage()["topology"] != int64(len(mem)) {
		s.Fatalf("%d bytes of kind %d for %s, usage %v", r.Size(), r.Kind(), r.Purpose(),
			s.dev.MemUsage())
	}
	st := s.stream(cuda.StreamOptions{})
	dst := s.alloc(cuda.MemDevice, r.Size(), "copy")
	launch(s, st, "conf_move", 3, moveParams{dst.Ptr(), r.Ptr(), int64(len(v)), 5})
	launch(s, st, "conf_affine", 2, affineParams{r.Ptr(), int64(len(v)), 2, 1})
	s.sync(st)
	for i, x := range s.readWords(st, dst.Ptr(), len(v)) {
		if x != uint64(i)+5 || v[i] != uint64(2*i+1) {
			s.Fatalf("word %d: kernel read %d, CPU reads %d", i, x-5, v[i])
		}
	}
	s.close(st)
	s.free(r, dst)
	if _, there := s.dev.MemUsage()["topology"]; there {
		s.Fatal("usage after the registration ended")
	}
	v[0] = 1 // the memory stays
	again, err := s.dev.Register(mem, "again")
	s.ok(err)
	s.free(again)
	_, err = s.dev.Register(nil, "empty slice")
	s.fails(err, "empty slice")
}

func testCopies(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "copies"})
	const size = 3<<20 + 17
	rng := rand.New(rand.NewPCG(1, 2))
	in, dev, dev2, out := s.alloc(cuda.MemPinned, size, "in"), s.alloc(cuda.MemDevice, size, "dev"),
		s.alloc(cuda.MemDevice, size, "dev2"), s.alloc(cuda.MemPinned, size, "out")
	for i := range in.Bytes() {
		in.Bytes()[i] = byte(rng.Uint32())
	}
	s.ok(st.Copy(dev.Ptr(), in.Ptr(), size))
	s.ok(st.Copy(dev2.Ptr(), dev.Ptr(), size))
	s.ok(st.Copy(out.Ptr(), dev2.Ptr(), size))
	s.sync(st)
	if !bytes.Equal(in.Bytes(), out.Bytes()) {
		s.Fatal("a round trip changed the bytes")
	}
	// Odd pieces, against the same done by hand.
	want := bytes.Clone(out.Bytes())
	for range 300 {
		n := rng.Int64N(5000)
		from, to := rng.Int64N(size-n), rng.Int64N(size-n)
		if rng.IntN(3) == 0 {
			v := byte(rng.Uint32())
			s.ok(st.Fill(dev2.Ptr()+cuda.DevicePtr(to), v, n))
			for i := range n {
				want[to+i] = v
			}
			continue
		}
		s.ok(st.Copy(dev2.Ptr()+cuda.DevicePtr(to), in.Ptr()+cuda.DevicePtr(from), n))
		copy(want[to:to+n], in.Bytes()[from:from+n])
	}
	if !bytes.Equal(s.read(st, dev2.Ptr(), size), want) {
		s.Fatal("pieces went astray")
	}
	s.close(st)
	s.free(in, dev, dev2, out)
}

func testCopyBounds(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "bounds"})
	a, b := s.alloc(cuda.MemDevice, 1000, "small buffer"), s.alloc(cuda.MemPinned, 5000,
		"large buffer")
	s.fails(st.Copy(a.Ptr(), b.Ptr(), 1001), "small buffer", "out of bounds")
	s.fails(st.Copy(b.Ptr()+4500, a.Ptr(), 501), "large buffer", "out of bounds")
	s.fails(st.Copy(b.Ptr(), a.Ptr()+1, 1000), "small buffer", "source")
	s.fails(st.Fill(a.Ptr()+999, 0, 2), "small buffer", "out of bounds")
	s.fails(st.Fill(a.Ptr(), 0, 1<<62), "small buffer")
	s.fails(st.Copy(a.Ptr(), 0, 1), "source")
	s.fails(st.Fill(0, 0, 1), "destination")
	s.fails(st.Copy(a.Ptr(), b.Ptr(), -1), "negative")
	s.ok(st.Copy(b.Ptr()+4000, a.Ptr(), 1000))
	s.ok(st.Fill(a.Ptr()+999, 0, 1))
	s.sync(st) // and none of the refusals has stuck
	old := a.Ptr()
	s.free(a)
	s.fails(st.Fill(old, 0, 1000), "no live buffer")
	s.close(st)
	s.free(b)
}

func testGrid(s *suite) {
	st := s.stream(cuda.StreamOptions{})
	for _, blocks := range []int{1, 2, 3, 31, 32, 1000} {
		b := s.alloc(cuda.MemDevice, int64(blocks)*32, "grid")
		launch(s, st, "conf_grid", blocks, gridParams{b.Ptr()})
		v := s.readWords(st, b.Ptr(), 4*blocks)
		for i := range blocks {
			if v[4*i] != uint64(i) || v[4*i+1] != uint64(blocks) || v[4*i+2] != 64 ||
				v[4*i+3] != 1 {
				s.Fatalf("block %d of %d: index %d, blocks %d, threads %d, runs %d", i, blocks,
					v[4*i], v[4*i+1], v[4*i+2], v[4*i+3])
			}
		}
		s.free(b)
	}
	s.close(st)
}

// The device's clock, by which kernels keep their deadlines, rises by steps.
func testClock(s *suite) {
	const n = 64
	st := s.stream(cuda.StreamOptions{})
	b := s.alloc(cuda.MemDevice, 8*(1+n), "clock")
	launch(s, st, "conf_clock", 2, clockParams{Dst: b.Ptr(), N: n, Looks: 10_000_000})
	v := s.readWords(st, b.Ptr(), 1+n)
	if v[0] != n {
		s.Fatalf("the clock took %d values, want %d", v[0], n)
	}
	for i := 2; i <= n; i++ {
		if step := int64(v[i] - v[i-1]); step <= 0 || step > int64(patience) {
			s.Fatalf("value %d of the clock is %d ns after the one before", i, step)
		}
	}
	launch(s, st, "conf_clock", 1, clockParams{Dst: b.Ptr(), N: n, Looks: 0})
	if v := s.readWords(st, b.Ptr(), 1); v[0] != 0 {
		s.Errorf("%d values in no looks", v[0])
	}
	s.free(b)
	s.close(st)
}

// The kernel that prices trips does what it is timed for.
func testPrices(s *suite) {
	const n, words, blocks, threads = 40, 512, 2, 64
	st := s.stream(cuda.StreamOptions{})
	src := s.alloc(cuda.MemPinned, 8*words, "priced")
	dst := s.alloc(cuda.MemDevice, 8*blocks*(2+threads), "prices")
	v := cuda.View[uint64](src.Ptr(), words)
	run := func(kind, width uint32) []uint64 {
		for i := range v {
			v[i] = uint64(i*5+3) % words
		}
		if kind == PriceAtomic {
			v[0] = 0
		}
		launch(s, st, "conf_price", blocks, PriceParams{Dst: dst.Ptr(), Src: src.Ptr(),
			N: n, Kind: kind, Width: width, Lines: words * 8 / max(width, 1)})
		got := s.readWords(st, dst.Ptr(), blocks*(2+threads))
		for b := range blocks {
			if took := int64(got[2*b+1] - got[2*b]); took < 0 || took > int64(patience) {
				s.Fatalf("kind %d: block %d took %d ns", kind, b, took)
			}
		}
		return got[2*blocks:]
	}
	step := uint64(0)
	for range n {
		step = (step*5 + 3) % words
	}
	for kind, want := range []struct{ last, left uint64 }{{step, 3}, {n - 1, n}, {n, n}, {n, n}} {
		if got := run(uint32(kind), 0); got[0] != want.last || uint32(v[0]) != uint32(want.left) {
			s.Errorf("kind %d found %d and left %d, want %d and %d", kind, got[0], v[0], want.last,
				want.left)
		}
	}
	for _, width := range []uint32{32, 64, 128} {
		for t, got := range run(PriceRead, width) {
			p := PriceParams{Src: src.Ptr(), N: n, Width: width, Lines: words * 8 / width}
			if want := priceReads(&p, t, blocks*threads/32); got != want {
				s.Fatalf("lines of %d bytes: thread %d summed %d, want %d", width, t, got, want)
			}
		}
	}
	s.free(src)
	s.free(dst)
	s.close(st)
}

func testParameters(s *suite) {
	st := s.stream(cuda.StreamOptions{})
	b := s.alloc(cuda.MemDevice, 4096, "parameters")
	p := packParams{
		Dst: b.Ptr(), U8: 200, I8: -100, U16: 60000, I16: -30000, B: true, U32: 4e9, I32: -2e9,
		F32: 1.5e-30, U64: 1 << 63, I64: -1 << 62, F64: -2.25e300,
		In: packInner{7, 0xdeadbeef, [3]int16{-1, 2, -3}}, Arr: [5]uint64{11, 12, 13, 14, 15},
		End: 255,
	}
	launch(s, st, "conf_pack", 2, p)
	want := packed(&p)
	if len(want) != packWords {
		s.Fatalf("%d words", len(want))
	}
	for i, v := range s.readWords(st, b.Ptr(), packWords) {
		if v != want[i] {
			s.Errorf("field %d: %#x, want %#x", i, v, want[i])
		}
	}
	big := bigParams{Dst: b.Ptr()}
	var sum uint64
	for i := range big.V {
		big.V[i] = uint64(i)*0x9e3779b97f4a7c15 + 1
		sum += uint64(i+1) * big.V[i]
	}
	launch(s, st, "conf_big", 1, big)
	if got := s.readWords(st, b.Ptr(), 1)[0]; got != sum {
		s.Errorf("a block of %d bytes: sum %#x, want %#x", unsafe.Sizeof(big), got, sum)
	}
	if k := s.kernel("conf_big"); k.ParamSize() != unsafe.Sizeof(big) || k.Name() != "conf_big" {
		s.Errorf("kernel %s with %d bytes of parameters", k.Name(), k.ParamSize())
	}
	s.close(st)
	s.free(b)
}

// A launch takes its own copy of the parameters: the caller may change them at once.
func testParametersAreCopied(s *suite) {
	st := s.stream(cuda.StreamOptions{})
	w := s.words(4, "gate")
	b := s.alloc(cuda.MemDevice, 4096, "parameters")
	s.gate(st, w, 1, 1, true) // holds the launches back
	k, big := s.kernel("conf_affine"), s.kernel("conf_big")
	p, q := affineParams{b.Ptr() + 8, 1, 10, 0}, bigParams{Dst: b.Ptr()}
	for i := range 9 {
		p.Add = uint64(i + 1)
		s.ok(st.LaunchRaw(k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, unsafe.Pointer(&p),
			unsafe.Sizeof(p)))
		p.Add = 99
	}
	q.V[0] = 5
	s.ok(st.LaunchRaw(big, cuda.LaunchConfig{Blocks: 1, Threads: 32}, unsafe.Pointer(&q),
		unsafe.Sizeof(q)))
	q.V[0] = 6
	w.set(0, 1)
	if got := s.readWords(st, b.Ptr(), 2); got[0] != 5 || got[1] != 123456789 {
		s.Fatalf("%d, want 5 and 123456789", got)
	}
	s.close(st)
	s.free(b, w)
}

func testLaunchErrors(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "errors"})
	_, err := s.dev.Kernel("conf_missing")
	s.fails(err, "conf_missing")
	k := s.kernel("conf_grid")
	b := s.alloc(cuda.MemDevice, 4096, "grid")
	s.fails(cuda.Launch(st, k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, affineParams{}),
		"conf_grid", "32 bytes", "8")
	for _, c := range []cuda.LaunchConfig{{Blocks: 0, Threads: 32}, {Blocks: -1, Threads: 32},
		{Blocks: 1, Threads: 0}, {Blocks: 1, Threads: 1025}, {Blocks: 1 << 31, Threads: 32}} {
		s.fails(cuda.Launch(st, k, c, gridParams{b.Ptr()}), "conf_grid")
	}
	s.fails(cuda.Launch(st, nil, cuda.LaunchConfig{Blocks: 1, Threads: 32}, gridParams{b.Ptr()}),
		"kernel")
	launch(s, st, "conf_grid", 1, gridParams{b.Ptr()}) // errors of the call do not stick
	s.sync(st)
	_, err = s.dev.NewStream(cuda.StreamOptions{Name: "minus", SMs: -1})
	s.fails(err, "minus")
	s.close(st)
	s.free(b)
}

func testStreamOrder(s *suite) {
	st := s.stream(cuda.StreamOptions{})
	const n = 100
	b, c := s.alloc(cuda.MemDevice, n*8, "order"), s.alloc(cuda.MemDevice, n*8, "order")
	want := uint64(0)
	for i := range 1000 {
		launch(s, st, "conf_affine", 1+i%5, affineParams{b.Ptr(), n, 3, uint64(i)})
		want = want*3 + uint64(i)
		switch i % 100 {
		case 30: // copies and fills are in order too
			s.ok(st.Copy(c.Ptr(), b.Ptr(), n*8))
			s.ok(st.Fill(b.Ptr(), 0, n*8))
			launch(s, st, "conf_move", 2, moveParams{b.Ptr(), c.Ptr(), n, 1})
			want++
		case 60:
			s.ok(st.Fill(b.Ptr(), 1, n*8))
			want = 0x0101010101010101
		}
	}
	for i, v := range s.readWords(st, b.Ptr(), n) {
		if v != want {
			s.Fatalf("word %d is %#x, want %#x", i, v, want)
		}
	}
	s.close(st)
	s.free(b, c)
}

func testCrossStreamEvents(s *suite) {
	a, b := s.stream(cuda.StreamOptions{Name: "a"}), s.stream(cuda.StreamOptions{Name: "b"})
	w := s.words(4, "gate")
	x, y := s.alloc(cuda.MemDevice, 8, "x"), s.alloc(cuda.MemDevice, 8, "y")
	e, f := s.event(), s.event()
	if !e.Done() {
		s.Fatal("an event without a record is not done")
	}
	s.ok(b.Wait(e)) // nothing recorded: no wait
	s.ok(e.Synchronize(s.ctx(short)))
	want := uint64(0)
	for i := range uint64(20) { // the value goes to and fro
		w.set(0, 0)
		s.gate(a, w, 1, 1, true)
		launch(s, a, "conf_move", 1, moveParams{x.Ptr(), y.Ptr(), 1, i})
		s.ok(a.Record(e))
		s.ok(b.Wait(e))
		launch(s, b, "conf_affine", 1, affineParams{x.Ptr(), 1, 2, 0})
		launch(s, b, "conf_move", 1, moveParams{y.Ptr(), x.Ptr(), 1, 1})
		s.ok(b.Record(f))
		s.ok(a.Wait(f))
		s.await(w, 1, i+1)
		if e.Done() || f.Done() {
			s.Fatal("an event is done before the work before it")
		}
		if err := e.Synchronize(s.ctx(time.Millisecond)); !errors.Is(err,
			context.DeadlineExceeded) {
			s.Fatalf("waiting for an event of held work: %v", err)
		}
		w.set(0, 1)
		s.ok(f.Synchronize(s.ctx(patience)))
		if !e.Done() || !f.Done() {
			s.Fatal("an event is not done after Synchronize")
		}
		want = (want+i)*2 + 1
	}
	if got := s.readWords(a, y.Ptr(), 1)[0]; got != want {
		s.Fatalf("%d, want %d", got, want)
	}
	s.ok(e.Close())
	s.ok(f.Close())
	s.close(a, b)
	s.free(x, y, w)
}

// A wait is for the record that was the latest when Wait was called.
func testEventRecordedTwice(s *suite) {
	a, b := s.stream(cuda.StreamOptions{Name: "a"}), s.stream(cuda.StreamOptions{Name: "b"})
	w := s.words(4, "gate")
	e := s.event()
	s.ok(a.Record(e))
	s.ok(b.Wait(e))
	s.gate(a, w, 1, 1, true)
	s.ok(a.Record(e)) // not done before the gate opens
	s.sync(b)         // but b waits for the first
	if e.Done() {
		s.Fatal("the second record is done before its work")
	}
	w.set(0, 1)
	s.ok(e.Synchronize(s.ctx(patience)))
	s.ok(e.Close())
	s.close(a, b)
	s.free(w)
}

func testEventTimes(s *suite) {
	st := s.stream(cuda.StreamOptions{})
	w := s.words(2, "count")
	e, err := s.dev.NewTimer()
	s.ok(err)
	f, err := s.dev.NewTimer()
	s.ok(err)
	_, err = f.Since(e)
	s.fails(err)
	s.ok(st.Record(e))
	untimed := s.event()
	s.ok(st.Record(untimed))
	launch(s, st, "conf_count", 1, countParams{w.at(0), w.at(1), int64(4 * time.Millisecond)})
	s.ok(st.Record(f))
	s.ok(f.Synchronize(s.ctx(patience)))
	d, err := f.Since(e)
	s.ok(err)
	if d < 4*time.Millisecond || d > patience {
		s.Fatalf("%v around a kernel of 4ms", d)
	}
	if back, err := e.Since(f); err != nil || back != -d {
		s.Fatalf("backwards: %v %v", back, err)
	}
	_, err = f.Since(untimed)
	s.fails(err)
	s.ok(untimed.Close())
	s.ok(e.Close())
	s.ok(f.Close())
	s.close(st)
	s.free(w)
}

// Kernels on different streams run at one time: each of two waits for the other.
func testStreamsRunTogether(s *suite) {
	a, b := s.stream(cuda.StreamOptions{Name: "a"}),
		s.stream(cuda.StreamOptions{Name: "b", Priority: 1})
	w := s.words(4, "gates")
	// Each kernel's gate is the other's count of arrivals.
	p := gateParams{Gate: w.at(0), Arrived: w.at(1), Left: w.at(2), Late: w.at(3), Step: 1,
		LimitNS: int64(longGate), Yield: 1}
	q := p
	q.Gate, q.Arrived = p.Arrived, p.Gate
	launch(s, a, "conf_gate", 1, p)
	launch(s, b, "conf_gate", 1, q)
	s.sync(a, b)
	if w.get(2) != 2 || w.get(3) != 0 {
		s.Fatalf("%d kernels ended, late: %d", w.get(2), w.get(3))
	}
	s.close(a, b)
	s.free(w)
}

// A kernel of high priority does not wait until a grid of low priority that came first has
// started its last block. The test lets one block of the low grid end at a time.
func testPriorities(s *suite) {
	low, high := s.stream(cuda.StreamOptions{Name: "low"}),
		s.stream(cuda.StreamOptions{Name: "high", Priority: 5})
	w, n := s.words(4, "gate"), s.words(2, "count")
	sms, places := s.dev.Info().SMs, s.dev.Info().SMs*s.b.BlocksPerSM
	blocks := places*2 + 16
	s.gate(low, w, blocks, 1, false)
	s.await(w, 1, uint64(sms)) // every SM holds a block at the least
	wide(s, high, "conf_count", 1, countParams{n.at(0), n.at(1), 0})
	done := s.event()
	s.ok(high.Record(done))
	ended := 0
	for ; ended < blocks && !done.Done(); ended++ {
		w.set(0, uint64(ended+1))
		s.await(w, 2, uint64(ended+1))
		for end := time.Now().Add(step); !done.Done() && time.Now().Before(end); {
			time.Sleep(100 * time.Microsecond)
		}
	}
	if !done.Done() || blocks-ended <= places {
		s.Errorf(
			"the kernel of high priority ran after %d of %d blocks of the low one (%d at one time)",
			ended, blocks, places)
	}
	w.set(0, uint64(blocks))
	s.sync(low, high)
	s.ok(done.Close())
	s.close(low, high)
	s.free(w, n)
}

func testBudgets(s *suite) {
	sms := s.dev.Info().SMs
	for _, budget := range []int{1, 2, 3, 0, sms + 5} {
		w := s.words(2, "count")
		st := s.stream(cuda.StreamOptions{Name: "budget", SMs: budget})
		other := s.stream(cuda.StreamOptions{Name: "other"}) // takes nothing from it
		w2 := s.words(2, "count")
		wide(s, other, "conf_count", 8, countParams{w2.at(0), w2.at(1), int64(hold)})
		got := sms
		if budget > 0 && budget < sms {
			got = s.b.StreamSMs(st, budget)
		}
		if got < 1 || got > sms {
			s.Errorf("a budget of %d of %d SMs came to %d", budget, sms, got)
		}
		limit := got * s.b.BlocksPerSM
		for range 4 {
			wide(s, st, "conf_count", limit+8, countParams{w.at(0), w.at(1), int64(hold)})
		}
		s.sync(st, other)
		if w.get(1) < 1 || w.get(1) > uint64(limit) || w.get(0) != 0 {
			s.Errorf("budget %d of %d SMs: %d blocks at once on %d SMs, %d left over", budget, sms,
				w.get(1), got, w.get(0))
		}
		s.close(st, other)
		s.free(w, w2)
	}
	// A budget of two really gives two: two blocks that wait for each other and do not yield.
	if sms >= 2 {
		st := s.stream(cuda.StreamOptions{Name: "two", SMs: 2})
		w := s.words(4, "gate")
		p := gateParams{Gate: w.at(1), Arrived: w.at(1), Left: w.at(2), Late: w.at(3), Step: 1,
			LimitNS: int64(longGate)}
		wide(s, st, "conf_gate", 2, p) // block 1 goes on when both have arrived
		s.sync(st)
		if w.get(2) != 2 || w.get(3) != 0 {
			s.Errorf("two blocks of a budget of two: %d ended, late %d", w.get(2), w.get(3))
		}
		s.close(st)
		s.free(w)
	}
}

// More blocks than SMs, all waiting for the last of them to start: they make way for each other.
func testBlocksThatYield(s *suite) {
	blocks := min(64, 4*s.dev.Info().SMs+4)
	st := s.stream(cuda.StreamOptions{Name: "poll"})
	w := s.words(4, "gate")
	p := gateParams{Gate: w.at(1), Arrived: w.at(1), Left: w.at(2), Late: w.at(3), Step: 1,
		LimitNS: int64(longGate), Yield: 1}
	launch(s, st, "conf_gate", blocks, p)
	s.sync(st)
	if w.get(2) != uint64(blocks) || w.get(3) != 0 {
		s.Fatalf("%d of %d blocks ended, late %d", w.get(2), blocks, w.get(3))
	}
	s.close(st)
	s.free(w)
}

func testManyLaunches(s *suite) {
	const streams, launches = 4, 6000 // more than a queue holds
	var wg sync.WaitGroup
	k := s.kernel("conf_affine")
	failed := make([]error, streams)
	for i := range streams {
		st := s.stream(cuda.StreamOptions{Name: fmt.Sprint("many ", i), Priority: i})
		b := s.alloc(cuda.MemDevice, 64, "many")
		wg.Go(func() {
			failed[i] = func() error {
				for range launches {
					if err := cuda.Launch(st, k, cuda.LaunchConfig{Blocks: 1 + i, Threads: 32},
						affineParams{b.Ptr(), 8, 1, 1}); err != nil {
						return err
					}
				}
				return st.Synchronize(s.ctx(patience))
			}()
		})
		defer func() {
			if s.Failed() {
				return
			}
			for _, v := range s.readWords(st, b.Ptr(), 8) {
				if v != launches {
					s.Errorf("stream %d: %d of %d launches", i, v, launches)
				}
			}
			s.close(st)
			s.free(b)
		}()
	}
	wg.Wait()
	s.ok(errors.Join(failed...))
}

func testStickyErrors(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "doomed"})
	w := s.words(2, "ran")
	b := s.alloc(cuda.MemDevice, 8, "untouched")
	launch(s, st, "conf_fail", 40, failParams{w.at(0), 7})
	err := st.Synchronize(s.ctx(patience))
	s.fails(err, "conf_fail", "doomed")
	var ke *cuda.KernelError
	if !errors.As(err, &ke) || ke.Kernel != "conf_fail" || ke.Stream != "doomed" {
		s.Fatalf("not a KernelError with the facts: %#v", err)
	}
	if ran := w.get(0); ran < 1 || ran > 40 {
		s.Fatalf("%d blocks of 40 ran", ran)
	}
	e := s.event()
	for name, err := range map[string]error{
		"launch": cuda.Launch(st, s.kernel("conf_affine"),
			cuda.LaunchConfig{Blocks: 1, Threads: 32}, affineParams{b.Ptr(), 1, 1, 1}),
		"copy":        st.Copy(b.Ptr(), w.Ptr(), 8),
		"fill":        st.Fill(b.Ptr(), 1, 8),
		"record":      st.Record(e),
		"wait":        st.Wait(e),
		"synchronize": st.Synchronize(s.ctx(patience)),
	} {
		if err == nil || !strings.Contains(err.Error(), "conf_fail") {
			s.Errorf("%s on a failed stream: %v", name, err)
		}
	}
	if err := st.Close(); err != nil && !strings.Contains(err.Error(), "conf_fail") {
		s.Error(err)
	}
	s.ok(e.Close())
	s.free(w, b)
}

func testErrorsAreIsolated(s *suite) {
	bad, good := s.stream(cuda.StreamOptions{Name: "bad"}),
		s.stream(cuda.StreamOptions{Name: "good"})
	w, gate := s.words(2, "ran"), s.words(4, "gate")
	b := s.alloc(cuda.MemDevice, 8, "sum")
	// Work enqueued behind the failing kernel is dropped, work of others is not.
	s.gate(bad, gate, 1, 1, true)
	launch(s, bad, "conf_fail", 3, failParams{w.at(0), 0})
	for range 10 {
		launch(s, bad, "conf_affine", 1, affineParams{b.Ptr(), 1, 1, 1000})
		launch(s, good, "conf_affine", 1, affineParams{b.Ptr(), 1, 1, 1})
	}
	gate.set(0, 1)
	s.fails(bad.Synchronize(s.ctx(patience)), "conf_fail")
	launch(s, good, "conf_affine", 1, affineParams{b.Ptr(), 1, 1, 1})
	if got := s.readWords(good, b.Ptr(), 1)[0]; got != 11 {
		s.Fatalf("sum %d, want 11", got)
	}
	fresh := s.stream(cuda.StreamOptions{Name: "fresh"})
	launch(s, fresh, "conf_affine", 1, affineParams{b.Ptr(), 1, 1, 1})
	s.sync(fresh)
	if err := bad.Close(); err != nil {
		s.Logf("close of the failed stream: %v", err)
	}
	s.close(good, fresh)
	s.free(w, gate, b)
}

// A stream that waits for work that failed must not go on as if it were there.
func testErrorsTravelWithEvents(s *suite) {
	for _, before := range []bool{true, false} { // is Wait called before the failure?
		bad, next := s.stream(cuda.StreamOptions{Name: "bad"}),
			s.stream(cuda.StreamOptions{Name: "next"})
		w, gate := s.words(2, "ran"), s.words(4, "gate")
		e := s.event()
		s.gate(bad, gate, 1, 1, true)
		launch(s, bad, "conf_fail", 1, failParams{w.at(0), 0})
		s.ok(bad.Record(e))
		if !before {
			gate.set(0, 1)
			s.fails(bad.Synchronize(s.ctx(patience)), "conf_fail")
		}
		if err := next.Wait(e); err == nil { // a backend may refuse already here
			gate.set(0, 1)
			s.fails(next.Synchronize(s.ctx(patience)), "conf_fail")
		}
		s.fails(e.Synchronize(s.ctx(patience)), "conf_fail")
		for _, st := range []cuda.Stream{bad, next} {
			if err := st.Close(); err != nil {
				s.Logf("close of a failed stream: %v", err)
			}
		}
		s.ok(e.Close())
		s.free(w, gate)
	}
}

// A kernel that touches an address which is nobody's fails; the program does not, and a new
// device works.
func testWildAddress(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "wild"})
	// A device may fail so fast that the launch itself says so.
	if cuda.Launch(st, s.kernel("conf_affine"), cuda.LaunchConfig{Blocks: 2, Threads: 64},
		affineParams{0, 100, 1, 1}) == nil {
		s.fails(st.Synchronize(s.ctx(patience)))
	}
	s.fails(cuda.Launch(st, s.kernel("conf_affine"), cuda.LaunchConfig{Blocks: 1, Threads: 32},
		affineParams{0, 1, 1, 1}))
	if err := st.Close(); err != nil {
		s.Logf("close of the failed stream: %v", err)
	}
	if err := s.dev.Close(); err != nil {
		s.Logf("close: %v", err)
	}
	s.dev = s.b.Open(s.T)
	s.works()
}

// works runs a little of everything.
func (s *suite) works() {
	s.Helper()
	st := s.stream(cuda.StreamOptions{Name: "works"})
	b := s.alloc(cuda.MemDevice, 80, "works")
	s.ok(st.Fill(b.Ptr(), 1, 80))
	launch(s, st, "conf_affine", 2, affineParams{b.Ptr(), 10, 2, 7})
	if v := s.readWords(st, b.Ptr(), 10)[9]; v != 0x0101010101010101*2+7 {
		s.Fatalf("a fresh device computes %#x", v)
	}
	s.close(st)
	s.free(b)
}

func testWildAddressIsIsolated(s *suite) {
	bad, good := s.stream(cuda.StreamOptions{Name: "bad"}),
		s.stream(cuda.StreamOptions{Name: "good"})
	launch(s, bad, "conf_affine", 2, affineParams{0, 100, 1, 1})
	s.fails(bad.Synchronize(s.ctx(patience)), "conf_affine", "bad")
	b := s.alloc(cuda.MemDevice, 8, "sum")
	launch(s, good, "conf_affine", 1, affineParams{b.Ptr(), 1, 1, 4})
	if got := s.readWords(good, b.Ptr(), 1)[0]; got != 4 {
		s.Fatalf("%d, want 4", got)
	}
	if err := bad.Close(); err != nil {
		s.Logf("close of the failed stream: %v", err)
	}
	s.close(good)
	s.free(b)
}

// The device goes away under running work. All calls say so, none hangs or crashes, what the CPU
// sees stays mapped until it is freed, and the next device works.
func testLoss(s *suite) {
	a, b := s.stream(cuda.StreamOptions{Name: "a"}),
		s.stream(cuda.StreamOptions{Name: "b", Priority: 1})
	w := s.words(4, "gate")
	buf := s.alloc(cuda.MemDevice, 4096, "rows")
	e := s.event()
	s.gate(a, w, 1, 1, true)
	s.await(w, 1, 1)
	s.ok(a.Record(e))
	s.ok(b.Wait(e))
	launch(s, b, "conf_affine", 1, affineParams{buf.Ptr(), 1, 1, 1})
	s.b.Lose(s.T)
	w.set(0, 1)
	k := s.kernel("conf_affine")
	for name, call := range map[string]func() error{
		"synchronize a":     func() error { return a.Synchronize(s.ctx(patience)) },
		"synchronize b":     func() error { return b.Synchronize(s.ctx(patience)) },
		"synchronize event": func() error { return e.Synchronize(s.ctx(patience)) },
		"launch": func() error {
			return cuda.Launch(b, k, cuda.LaunchConfig{Blocks: 1, Threads: 32},
				affineParams{buf.Ptr(), 1, 1, 1})
		},
		"copy":   func() error { return a.Copy(buf.Ptr(), w.Ptr(), 8) },
		"fill":   func() error { return b.Fill(buf.Ptr(), 1, 8) },
		"record": func() error { return b.Record(e) },
		"alloc": func() error {
			_, err := s.dev.Alloc(cuda.MemDevice, 4096, "late")
			return err
		},
		"stream": func() error {
			_, err := s.dev.NewStream(cuda.StreamOptions{Name: "late"})
			return err
		},
	} {
		err := call()
		if err == nil {
			s.Errorf("%s on a lost device works", name)
		} else if errs.ClassOf(err) != errs.Device {
			s.Errorf("%s on a lost device: class %d, not that of a failed device: %v", name,
				errs.ClassOf(err), err)
		}
	}
	w.set(1, 5) // the CPU's memory is the CPU's
	for _, err := range []error{a.Close(), b.Close(), e.Close(), buf.Free(), w.Free(),
		s.dev.Close()} {
		if err != nil {
			s.Logf("on a lost device: %v", err)
		}
	}
	s.ok(s.dev.Close()) // the second time, as on any device
	s.dev = s.b.Open(s.T)
	s.works()
}

func testTimeouts(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "held"})
	w := s.words(4, "gate")
	s.gate(st, w, 1, 1, true)
	s.await(w, 1, 1)
	began := time.Now()
	err := st.Synchronize(s.ctx(short))
	if !errors.Is(err, context.DeadlineExceeded) {
		s.Fatalf("got %v", err)
	}
	s.fails(err, "held")
	if d := time.Since(began); d < short || d > patience/2 {
		s.Fatalf("a limit of %v took %v", short, d)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := st.Synchronize(ctx); !errors.Is(err, context.Canceled) {
		s.Fatalf("got %v", err)
	}
	w.set(0, 1)
	s.sync(st) // running out of patience does no harm to the stream
	s.close(st)
	s.free(w)
}

func testBusy(s *suite) {
	st, idle := s.stream(cuda.StreamOptions{}), s.stream(cuda.StreamOptions{})
	w := s.words(4, "count")
	if st.Busy() != 0 {
		s.Fatalf("busy %v before any work", st.Busy())
	}
	const each = 2 * time.Millisecond
	began := time.Now()
	for range 3 {
		launch(s, st, "conf_count", 1, countParams{w.at(0), w.at(1), int64(each)})
	}
	s.sync(st)
	took := time.Since(began)
	if d := st.Busy(); d < 3*each || d > took {
		s.Fatalf("busy %v with kernels of %v in %v", d, 3*each, took)
	}
	s.ok(st.Copy(w.at(2), w.at(3), 8))
	before := st.Busy()
	s.sync(st)
	if st.Busy() != before || idle.Busy() != 0 {
		s.Fatal("busy without kernels")
	}
	s.close(st, idle)
	s.free(w)
}

func testStreamClose(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "closing"})
	b := s.words(1, "sum")
	for range 500 {
		launch(s, st, "conf_affine", 1, affineParams{b.Ptr(), 1, 1, 1})
	}
	s.ok(st.Close()) // lets the work finish
	if b.get(0) != 500 {
		s.Fatalf("%d of 500 launches ran", b.get(0))
	}
	s.ok(st.Close())
	s.fails(cuda.Launch(st, s.kernel("conf_affine"), cuda.LaunchConfig{Blocks: 1, Threads: 32},
		affineParams{b.Ptr(), 1, 1, 1}), "closing")
	s.fails(st.Synchronize(s.ctx(patience)), "closing")
	s.free(b)
}

func testCloseReportsLeaks(s *suite) {
	st := s.stream(cuda.StreamOptions{Name: "forgotten stream"})
	w := s.words(4, "forgotten buffer")
	s.gate(st, w, 1, 1, true)
	s.await(w, 1, 1)
	w.set(0, 1)
	err := s.dev.Close()
	s.fails(err, "forgotten stream", "forgotten buffer")
	s.ok(s.dev.Close())
	_, err = s.dev.Alloc(cuda.MemDevice, 1, "late")
	s.fails(err)
	_, err = s.dev.NewStream(cuda.StreamOptions{Name: "late"})
	s.fails(err)
	_, err = s.dev.NewEvent()
	s.fails(err)
	s.ok(w.Free()) // released already: a no-op
	s.ok(st.Close())
	if u := s.dev.MemUsage(); len(u) != 0 {
		s.Errorf("usage %v after close", u)
	}
}

// Everything that a program forgets is named, with its size, and given back.
func testUnfreedBuffers(s *suite) {
	mem, err := hostmem.Alloc(64<<10, "conformance")
	s.ok(err)
	defer func() { s.ok(hostmem.Free(mem)) }()
	reg, err := s.dev.Register(mem, "registered memory")
	s.ok(err)
	var open []cuda.Buffer
	for i := range 5 {
		open = append(open, s.alloc(cuda.MemDevice, int64(1000+i), fmt.Sprint("device ", i)),
			s.alloc(cuda.MemPinned, int64(2000+i), fmt.Sprint("pinned ", i)))
	}
	s.free(open[4], open[5])
	st := s.stream(cuda.StreamOptions{Name: "unclosed"})
	e := s.event()
	s.ok(st.Fill(open[0].Ptr(), 1, 1000))
	s.ok(st.Record(e))
	err = s.dev.Close()
	s.fails(err, "unclosed", "registered memory", "65536", "device 0", "1000", "device 4", "1004",
		"pinned 3", "2003")
	if strings.Contains(err.Error(), "device 2") || strings.Contains(err.Error(), "pinned 2") {
		s.Fatalf("buffers that were freed are called open: %v", err)
	}
	if u := s.dev.MemUsage(); len(u) != 0 {
		s.Fatalf("usage %v after close", u)
	}
	s.free(append(open, reg)...) // no-ops
	s.ok(e.Close())
	mem[0] = 1 // the registered memory was never the device's
}

// Everything from many goroutines at one time, each with memory and a stream of its own.
func testConcurrency(s *suite) {
	const workers, rounds, n = 8, 20, 500
	k, km := s.kernel("conf_affine"), s.kernel("conf_move")
	one := func(id int) (err error) {
		st, err := s.dev.NewStream(cuda.StreamOptions{Name: fmt.Sprint("worker ", id),
			Priority: id % 3, SMs: id % 4})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, st.Close()) }()
		for r := range rounds {
			a, err := s.dev.Alloc(cuda.MemDevice, n*8, fmt.Sprint("work ", id))
			if err != nil {
				return err
			}
			out, err := s.dev.Alloc(cuda.MemPinned, n*8, fmt.Sprint("work ", id))
			if err != nil {
				return errors.Join(err, a.Free())
			}
			e, err := s.dev.NewEvent()
			if err != nil {
				return errors.Join(err, a.Free(), out.Free())
			}
			err = errors.Join(
				st.Fill(a.Ptr(), 0, n*8),
				cuda.Launch(st, k, cuda.LaunchConfig{Blocks: 1 + r%4, Threads: 32},
					affineParams{a.Ptr(), n, 1, uint64(id*1000 + r)}),
				cuda.Launch(st, km, cuda.LaunchConfig{Blocks: 3, Threads: 32},
					moveParams{a.Ptr(), a.Ptr(), n, 1}),
				st.Copy(out.Ptr(), a.Ptr(), n*8),
				st.Record(e),
				e.Synchronize(s.ctx(patience)),
			)
			if err == nil {
				for i, v := range hostmem.View[uint64](out.Bytes()) {
					if v != uint64(id*1000+r+1) {
						err = fmt.Errorf("worker %d, round %d: word %d is %d", id, r, i, v)
						break
					}
				}
			}
			if err = errors.Join(err, e.Close(), a.Free(), out.Free()); err != nil {
				return err
			}
		}
		return nil
	}
	failed := make([]error, workers)
	var wg sync.WaitGroup
	for id := range workers {
		wg.Go(func() { failed[id] = one(id) })
	}
	wg.Wait()
	s.ok(errors.Join(failed...))
	if u := s.dev.MemUsage(); len(u) != 0 {
		s.Errorf("usage %v in the end", u)
	}
}
