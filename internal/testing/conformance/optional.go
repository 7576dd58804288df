package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"

	"helios/cuda"
	"helios/internal/errs"
)

// Devices with a memory of their own report its free bytes, which follow what is taken and given
// back; others may take some meanwhile.
func testFreeMemory(s *suite) {
	m, ok := s.dev.(cuda.MemoryMeter)
	if !ok {
		s.Skip("the device does not know what memory is free")
	}
	read := func() int64 {
		s.Helper()
		free, total, err := m.FreeMemory()
		s.ok(err)
		if free < 0 || free > total || total > s.dev.Info().MemTotal {
			s.Fatalf("%d bytes free of %d on a device of %d", free, total, s.dev.Info().MemTotal)
		}
		return free
	}
	before := read()
	size := min(before/4, 256<<20)
	b := s.alloc(cuda.MemDevice, size, "taken")
	if now := read(); now > before-size/2 {
		s.Errorf("%d bytes free before and %d after %d were taken", before, now, size)
	}
	s.free(b)
	if now := read(); now < before-size/2 {
		s.Errorf("%d bytes free before and %d after %d were given back", before, now, size)
	}
	s.ok(s.dev.Close())
	if _, _, err := m.FreeMemory(); err == nil {
		s.Error("a closed device reports free memory")
	}
}

// all reports whether b has nothing but v.
func all(b []byte, v byte) bool { return bytes.Count(b, []byte{v}) == len(b) }

func (s *suite) reserve(size int64, purpose string) cuda.Growable {
	s.Helper()
	g, err := cuda.Reserve(s.dev, size, purpose)
	s.ok(err)
	return g
}

// growSize is no multiple of a page.
const growSize = 8<<20 + 12345

// growing is a test of a buffer that grows.
type growing struct {
	*suite
	st   cuda.Stream
	g    cuda.Growable
	pos  cuda.DevicePtr // of g, which never moves
	lazy bool           // it had less than all of its memory in the beginning
}

// Memory that grows never moves, keeps its content, is zero where it is new, and is memory like any
// other.
func testGrowable(s *suite) {
	t := &growing{suite: s, st: s.stream(cuda.StreamOptions{Name: "growing"}),
		g: s.reserve(growSize, "slot")}
	g, st := t.g, t.st
	t.pos, t.lazy = g.Ptr(), g.Backed() < growSize
	if g.Size() != growSize || g.Kind() != cuda.MemDevice || g.Purpose() != "slot" || t.pos == 0 ||
		t.pos%4096 != 0 || g.Backed() < 0 || g.Backed() > growSize {
		s.Fatalf("%d of %d bytes at %#x, kind %d for %s", g.Backed(), g.Size(), t.pos, g.Kind(),
			g.Purpose())
	}
	t.usage()
	if t.lazy {
		s.fails(st.Fill(t.pos, 1, g.Backed()+1), "slot", "grow it first")
		s.fails(st.Copy(t.pos, t.pos, g.Backed()+1), "slot", "grow it first")
	}
	t.growsZeroed()
	t.runsKernels()
	s.fails(g.Grow(growSize+1), "slot", fmt.Sprint(growSize+1), fmt.Sprint(growSize))
	s.fails(g.Grow(-1), "slot")
	s.ok(st.Fill(t.pos, 0xa5, growSize))
	s.sync(st)
	s.free(g)
	s.free(g)
	if u := s.dev.MemUsage(); len(u) != 0 {
		s.Fatalf("usage %v after free", u)
	}
	s.fails(st.Fill(t.pos, 1, 8))
	s.growBeside()
	s.close(st)
}

func (t *growing) usage() {
	t.Helper()
	if got := t.dev.MemUsage()["slot"]; got != t.g.Backed() {
		t.Fatalf("usage %d with %d bytes behind it", got, t.g.Backed())
	}
}

func (t *growing) growsZeroed() {
	var written int64
	for _, want := range []int64{0, 1, 4096, 100_000, 3 << 20, 1000, 3<<20 + 1, growSize} {
		had := t.g.Backed()
		t.ok(t.g.Grow(want))
		now := t.g.Backed()
		if t.g.Ptr() != t.pos || now < want || now < had || now > growSize {
			t.Fatalf("grown to %d: %d bytes at %#x, %d at %#x before", want, now, t.g.Ptr(), had, t.pos)
		}
		t.usage()
		if now > written { // what is new is zero, what was there is there
			b := t.read(t.st, t.pos, now)
			if !all(b[:written], 0xa5) || !all(b[written:], 0) {
				t.Fatalf(
					"grown to %d: not all of the %d bytes that were written are there, with zeroes behind",
					want, written)
			}
			t.ok(t.st.Fill(t.pos, 0xa5, now))
			t.sync(t.st)
			written = now
		}
	}
}

// runsKernels launches at both ends of it, and where the first pages end.
func (t *growing) runsKernels() {
	t.ok(t.st.Fill(t.pos, 1, growSize))
	const some = 2048
	for _, off := range []cuda.DevicePtr{0, 4096 - 8*some/2 + 8*some, 2<<20 - 8*some/2,
		growSize/8*8 - 8*some} {
		launch(t.suite, t.st, "conf_affine", 3, affineParams{t.pos + off, some, 3, 1})
		v := t.readWords(t.st, t.pos+off, some)
		for _, i := range []int{some / 2, some - 1} {
			if v[i] != 0x0101010101010101*3+1 {
				t.Fatalf("word %d from %d is %#x", i, off, v[i])
			}
		}
		t.ok(t.st.Fill(t.pos+off, 1, 8*some))
	}
}

// growBeside grows buffers beside work that uses what is there, and others that do the same.
func (s *suite) growBeside() {
	var wg sync.WaitGroup
	failed := make([]error, 3)
	const tail = 256 // words at the end of what is there
	k := s.kernel("conf_affine")
	for i := range failed {
		own, st := s.reserve(1<<20, "own"),
			s.stream(cuda.StreamOptions{Name: fmt.Sprint("own ", i)})
		defer func() { s.close(st); s.free(own) }()
		wg.Go(func() {
			failed[i] = func() error {
				for n := int64(1); n <= 16; n++ {
					if err := own.Grow(n << 16); err != nil {
						return err
					}
					if err := cuda.Launch(st, k, cuda.LaunchConfig{Blocks: 2, Threads: 64},
						affineParams{own.Ptr() + cuda.DevicePtr(n<<16) - 8*tail, tail, 1,
							uint64(n)}); err != nil {
						return err
					}
				}
				return st.Synchronize(s.ctx(patience))
			}()
		})
		defer func() {
			for i, v := range s.readWords(st, own.Ptr(), 1<<17) {
				want := uint64(0)
				if i%(1<<13) >= 1<<13-tail {
					want = uint64(i>>13) + 1
				}
				if v != want {
					s.Errorf("word %d is %d, want %d", i, v, want)
					return
				}
			}
		}()
	}
	wg.Wait()
	s.ok(errors.Join(failed...))
}

// Memory runs out while it grows: the error says so, and the buffer is as it was.
func testGrowableOutOfMemory(s *suite) {
	total := s.dev.Info().MemTotal
	g, err := cuda.Reserve(s.dev, 2*total, "too much in the worst case")
	var oom *cuda.OutOfMemoryError
	if err != nil { // a device without it
		if !errors.As(err, &oom) || errs.ClassOf(err) != errs.Capability {
			s.Fatalf("not an OutOfMemoryError: %v", err)
		}
		return
	}
	st := s.stream(cuda.StreamOptions{Name: "midway"})
	s.ok(g.Grow(4096))
	s.ok(st.Fill(g.Ptr(), 3, 4096))
	s.sync(st)
	had := g.Backed()
	if err := g.Grow(2 * total); !errors.As(err, &oom) || errs.ClassOf(err) != errs.Capability ||
		!strings.Contains(err.Error(), "too much in the worst case") {
		s.Fatalf("not an OutOfMemoryError with the facts: %v", err)
	}
	if oom.Want > 2*total || oom.Want < total || oom.Free >= oom.Want {
		s.Fatalf("%d bytes wanted and %d free, says the error", oom.Want, oom.Free)
	}
	if g.Backed() != had || s.dev.MemUsage()["too much in the worst case"] != had {
		s.Fatalf("%d bytes behind it after a refusal, %d before", g.Backed(), had)
	}
	if b := s.read(st, g.Ptr(), had); b[0] != 3 || b[4095] != 3 {
		s.Fatal("what was there has changed")
	}
	s.ok(g.Grow(max(had, min(1<<20, total/16))))
	s.free(g, s.alloc(cuda.MemDevice, min(1<<20, total/16), "still works"))
	s.close(st)
}

// steps sends one sequence: each of the launches makes *3+add of the words.
func (s *suite) steps(st cuda.Stream, q *cuda.Steps, p cuda.DevicePtr, n int64,
	adds ...uint64) error {
	q.Reset()
	k := s.kernel("conf_affine")
	for i, a := range adds {
		cuda.Add(q, k, cuda.LaunchConfig{Blocks: 1 + i%3, Threads: 32 * (1 + i%4)},
			affineParams{p, n, 3, a})
	}
	return cuda.LaunchSteps(st, q)
}

// Steps run in order, with the parameters of their time, between other work; again and again, and
// in many lengths.
func testSteps(s *suite) {
	for _, sms := range []int{0, 1} { // a stream with a budget, too
		st := s.stream(cuda.StreamOptions{Name: "steps", SMs: sms})
		const n = 40
		b, c := s.alloc(cuda.MemDevice, n*8, "steps"), s.alloc(cuda.MemDevice, n*8, "copy")
		var q cuda.Steps
		want := uint64(0)
		for round := range uint64(60) {
			adds := make([]uint64, 1+round%7)
			for i := range adds {
				adds[i] = 10*round + uint64(i)
				want = want*3 + adds[i]
			}
			s.ok(s.steps(st, &q, b.Ptr(), n, adds...))
			if round%5 == 0 {
				launch(s, st, "conf_move", 2, moveParams{c.Ptr(), b.Ptr(), n, 1})
				s.ok(st.Copy(b.Ptr(), c.Ptr(), n*8))
				want++
			}
		}
		for i, v := range s.readWords(st, b.Ptr(), n) {
			if v != want {
				s.Fatalf("word %d is %#x, want %#x", i, v, want)
			}
		}
		if st.Busy() <= 0 {
			s.Error("not busy with steps")
		}
		q.Reset()
		s.ok(cuda.LaunchSteps(st, &q))
		// More than a queue holds.
		adds := make([]uint64, 50)
		s.ok(st.Fill(b.Ptr(), 0, n*8))
		for i := range uint64(40) {
			adds[7] = i
			s.ok(s.steps(st, &q, b.Ptr(), 1, adds...))
		}
		s.sync(st)
		s.close(st)
		s.fails(s.steps(st, &q, b.Ptr(), n, 1, 2, 3, 4), "steps")
		s.free(b, c)
	}
}

// A kernel in the middle fails, the third time: the error names it, what stands behind it is
// dropped, what was recorded before is good, and other streams go on.
func testStepsThatFail(s *suite) {
	st, other := s.stream(cuda.StreamOptions{Name: "doomed"}),
		s.stream(cuda.StreamOptions{Name: "other"})
	b, w := s.alloc(cuda.MemDevice, 8, "sum"), s.words(1, "ran")
	ka, kf := s.kernel("conf_affine"), s.kernel("conf_fail")
	one := cuda.LaunchConfig{Blocks: 1, Threads: 32}
	var q cuda.Steps
	send := func(at int64) error {
		q.Reset()
		cuda.Add(&q, ka, one, affineParams{b.Ptr(), 1, 1, 1})
		cuda.Add(&q, kf, one, failParams{w.Ptr(), at})
		cuda.Add(&q, ka, one, affineParams{b.Ptr(), 1, 1, 100})
		return cuda.LaunchSteps(st, &q)
	}
	e := s.event()
	for range 3 {
		s.ok(send(5))
	}
	s.ok(st.Record(e))
	err := send(0)
	if err == nil {
		err = st.Synchronize(s.ctx(patience))
	}
	var ke *cuda.KernelError
	if !errors.As(err, &ke) || ke.Kernel != "conf_fail" || ke.Stream != "doomed" {
		s.Fatalf("not a KernelError with the facts: %v", err)
	}
	s.ok(e.Synchronize(s.ctx(patience)))
	s.fails(send(5), "conf_fail")
	if got := s.readWords(other, b.Ptr(), 1)[0]; got != 3*101+1 || w.get(0) != 4 {
		s.Fatalf("sum %d after %d runs", got, w.get(0))
	}
	if err := st.Close(); err != nil {
		s.Logf("close of the failed stream: %v", err)
	}
	s.close(other)
	s.ok(e.Close())
	s.free(b, w)
}
