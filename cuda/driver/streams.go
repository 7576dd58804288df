package driver

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/cuda/kernels"
)

const (
	// maxParams limits a kernel's own block: 4096 bytes of parameters less hx_launch.
	maxParams = 4096 - kernels.LaunchBytes
	// inFlight bounds the marks of a stream, which are launches (three commands: two events around
	// a kernel; or one after it) or a few copies and waits with an event after them. It keeps the
	// driver's own queue from filling up, for then a call blocks in the driver without a limit.
	// That queue has about a thousand places (measured by many, documented nowhere).
	inFlight = 192
	ringSize = inFlight + 1 // of the ring: a chained mark needs the one before it
	// markEvery is after how many commands without a launch a mark is set.
	markEvery = 4
	// mostLoad bounds the commands in all marks of a stream: graphs are many in one.
	mostLoad = 3 * inFlight
	// A launch that follows another sooner than together is one stretch of work with it: the event
	// behind the first stands before the second, too, and Busy counts the gap.
	together = 20 * time.Microsecond
	// maxWaits bounds the recordings that a stream has waited for and not looked at since.
	maxWaits = 64
)

// hxLaunch is hx_launch of cuda/kernels/device.h, the second parameter of every kernel.
type hxLaunch struct {
	Fault cuda.DevicePtr
	Seq   uint64
}

const _ = -(unsafe.Sizeof(hxLaunch{}) ^ kernels.LaunchBytes)

// launchArgs holds what a launch points the driver to. It is one heap object for the stream's life:
// the driver follows pointers in it, and Go must neither move nor forget what they name.
type launchArgs struct {
	params [2]unsafe.Pointer
	hx     hxLaunch
	block  [maxParams / 8]uint64
	node   nodeParams
}

// mark is a place in a stream's work; an event shows that it is done.
type mark struct {
	kernel     *kernel   // nil: after copies, fills and waits; of a graph, its label
	steps      []*kernel // of a graph, in order; nil for one launch
	first, seq uint64    // launches first … seq
	load       int       // commands
	start, end event     // start only around kernels; both stay with the place in the ring
	chained    bool      // it starts with the end of the mark before, not with start
}

// launched is the kernel of launch number seq, or nil when that is not of this mark.
func (m *mark) launched(seq uint64) *kernel {
	switch {
	case m.kernel == nil || seq < m.first || seq > m.seq:
		return nil
	case m.steps != nil:
		return m.steps[seq-m.first]
	}
	return m.kernel
}

// gpuStream is cuda.Stream.
//
// Large: cuda.Stream asks for a method for each operation that a stream orders.
type gpuStream struct {
	d        *Device
	opt      cuda.StreamOptions
	h        stream
	green    *green     // the partition that it runs in, or nil
	events   *eventPool // without times
	timed    *eventPool // of marks
	slot     *faultSlot
	err      atomic.Pointer[error]  // sticky
	reported atomic.Bool            // some call has returned err
	running  atomic.Pointer[kernel] // of the oldest mark that is not known to be done

	mu       sync.Mutex // never two streams' at one time, and never with poll called under it
	closing  bool
	closed   bool
	args     *launchArgs
	seq      uint64 // of the latest launch
	faultSeq uint64 // launch that failed, or 0
	faultErr error
	ring     []mark // marks head … tail-1, each at its number modulo the size
	head     uint64
	tail     uint64
	unmarked int       // commands since the latest mark
	apart    bool      // copies, fills or waits are among them
	launched time.Time // the latest mark of a launch was closed
	load     int       // commands in marks that are not known to be done
	oldest   uint64    // mark that watch has seen started, plus 1
	since    time.Time // when it first did
	graphs   graphCache
	busy     time.Duration
	waits    []*recording // waited for, not known to have gone well; held
}

// NewStream implements cuda.Device. A budget of SMs becomes a green context where the driver has
// them; elsewhere it only bounds the grids that the caller launches.
func (d *Device) NewStream(opt cuda.StreamOptions) (_ cuda.Stream, err error) {
	if opt.SMs < 0 {
		return nil, fmt.Errorf("stream %q: budget of %d SMs: want 1 to %d, or 0 for all", opt.Name,
			opt.SMs, d.info.SMs)
	}
	if err := d.accepting(); err != nil {
		return nil, err
	}
	s := &gpuStream{d: d, opt: opt, args: &launchArgs{}, events: &d.events, timed: &d.timed,
		ring: make([]mark, ringSize)}
	s.args.params = [2]unsafe.Pointer{unsafe.Pointer(&s.args.block), unsafe.Pointer(&s.args.hx)}
	fail := func(err error) (cuda.Stream, error) {
		s.free()
		return nil, fmt.Errorf("stream %q: %w", opt.Name, err)
	}
	if opt.SMs > 0 && opt.SMs < d.info.SMs && d.caps.GreenContexts {
		if s.green, err = d.green.take(opt.SMs); err != nil {
			return fail(err)
		}
		s.events, s.timed = &s.green.events, &s.green.timed
	}
	if opt.Untimed {
		s.timed = s.events
	}
	if s.slot, err = d.faults.take(d); err != nil {
		return fail(err)
	}
	if err := s.enter(); err != nil {
		return fail(err)
	}
	// A lower number is a higher priority (cuStreamCreateWithPriority).
	priority := min(max(d.priority.least-opt.Priority, d.priority.greatest), d.priority.least)
	r, call := success, "cuStreamCreateWithPriority"
	if s.green != nil {
		call = "cuGreenCtxStreamCreate"
		s.h, r = d.api.GreenCtxStreamCreate(s.green.h, streamNonBlocking, priority)
	} else {
		s.h, r = d.api.StreamCreateWithPriority(streamNonBlocking, priority)
	}
	if r == success {
		call = "cuMemcpyAsync"
		r = d.api.MemcpyAsync(s.slot.dev, s.slot.first, faultBytes, s.h) // the stream's first work
	}
	s.leave()
	if r != success {
		return fail(d.failed(call, r))
	}
	s.args.hx.Fault = cuda.DevicePtr(s.slot.dev)
	d.streamMu.Lock()
	late := d.closing.Load()
	if !late {
		d.streams[s] = struct{}{}
	}
	d.streamMu.Unlock()
	if late {
		return fail(d.errClosed())
	}
	return s, nil
}

// free gives back what the stream holds in the context. Its work is done, or there was none.
func (s *gpuStream) free() {
	d := s.d
	if s.h != 0 && d.enterToFree() {
		holdGreen(s.green, nil)
		s.graphs.close(d)
		d.api.StreamDestroy(s.h)
		s.leave()
	}
	for i := range s.ring {
		for _, e := range []event{s.ring[i].start, s.ring[i].end} {
			if e != 0 {
				s.timed.give(e)
			}
		}
	}
	s.ring, s.h = nil, 0
	for _, r := range s.waits {
		r.drop()
	}
	s.waits = nil
	if s.slot != nil {
		d.faults.give(s.slot)
		s.slot = nil
	}
	if s.green != nil {
		s.green.drop()
	}
}

// enter is Device.enter for what uses the stream or its events: it holds their green context, too.
func (s *gpuStream) enter() error { return s.d.enterWith(s.green, nil) }

func (s *gpuStream) leave() { s.d.leaveWith(s.green, nil) }

// failed returns the sticky error, or that the device is gone.
func (s *gpuStream) failed() error {
	if p := s.err.Load(); p != nil {
		s.reported.Store(true)
		return *p
	}
	return s.d.usableNow()
}

func (s *gpuStream) setErr(err error) { s.err.CompareAndSwap(nil, &err) }

func (s *gpuStream) runningText() string {
	if k := s.running.Load(); k != nil {
		return fmt.Sprintf("kernel %q", k.name)
	}
	return "no kernel"
}

// lock takes the mutex for new work, or returns the reason against it.
func (s *gpuStream) lock() error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return fmt.Errorf("stream %q: %w", s.opt.Name, cuda.ErrClosed)
	}
	s.look()
	if err := s.failed(); err != nil {
		s.mu.Unlock()
		return err
	}
	return nil
}

// look reads the stream's fault record, which costs one load from CPU memory. s.mu is held.
func (s *gpuStream) look() {
	if s.slot != nil && s.faultSeq == 0 {
		if seq := s.slot.mirror.seq(); seq != 0 {
			s.fault(seq)
		}
	}
}

// fault puts a kernel's failure into words. The launch's mark is still in the ring, for reap
// looks here before it gives a mark up.
func (s *gpuStream) fault(seq uint64) {
	f := *s.slot.mirror
	name := "(unknown)"
	for i := s.head; i != s.tail; i++ {
		if k := s.ring[i%ringSize].launched(seq); k != nil {
			name = k.name
		}
	}
	s.faultSeq = seq
	s.faultErr = &cuda.KernelError{Kernel: name, Stream: s.opt.Name, Block: int(f.Block),
		Err: errors.New(kernels.FaultText(name, f.Code, f.A, f.B, f.C))}
	s.setErr(s.faultErr)
}

// failureUpTo is the error of the launches up to number seq.
func (s *gpuStream) failureUpTo(seq uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.look(); s.faultSeq != 0 && s.faultSeq <= seq {
		return s.faultErr
	}
	return nil
}

// reap takes the marks that are done off the ring and adds up how long the kernels ran. s.mu is
// held, and it runs within enter.
func (s *gpuStream) reap() error {
	d := s.d
	for s.head != s.tail {
		m := &s.ring[s.head%ringSize]
		switch r := d.api.EventQuery(m.end); r {
		case success:
		case errNotReady:
			return nil
		default:
			return d.failed("cuEventQuery", r)
		}
		if m.kernel != nil {
			if !s.opt.Untimed {
				from := m.start
				if m.chained {
					from = s.before(s.head).end
				}
				ms, r := d.api.EventElapsedTime(from, m.end)
				if r != success {
					return d.failed("cuEventElapsedTime", r)
				}
				s.busy += time.Duration(float64(ms) * float64(time.Millisecond))
			}
			// The kernel wrote the record with a fence for the system before it ended.
			if seq := s.slot.mirror.seq(); s.faultSeq == 0 && m.launched(seq) != nil {
				s.fault(seq)
			}
		}
		s.load -= m.load
		s.head++
		s.showRunning()
	}
	return nil
}

// before is the mark before number n, whose place no other takes until n is off the ring (room).
func (s *gpuStream) before(n uint64) *mark { return &s.ring[(n-1)%ringSize] }

func (s *gpuStream) showRunning() {
	var k *kernel
	for i := s.head; i != s.tail && k == nil; i++ {
		k = s.ring[i%ringSize].kernel
	}
	s.running.Store(k)
}

// room waits until the ring has a place, for so many commands. s.mu is held and given up meanwhile.
// A full queue blocks its caller, but not for ever.
func (s *gpuStream) room(load int) error {
	fits := func() bool {
		return s.tail-s.head < inFlight && (s.load+load <= mostLoad || s.head == s.tail)
	}
	if fits() {
		return nil
	}
	var b backoff
	ctx, cancel := context.WithTimeout(context.Background(), s.d.opt.QueueTimeout)
	defer cancel()
	for {
		if err := s.enter(); err != nil {
			return err
		}
		err := s.reap()
		s.leave()
		if err == nil {
			s.look()
			err = s.failed()
		}
		if err != nil || fits() {
			return err
		}
		s.mu.Unlock()
		perr := b.pause(ctx)
		if b.looks > quickLooks {
			err = s.d.watch()
		}
		s.mu.Lock()
		if err != nil {
			return err
		}
		if s.closing {
			return fmt.Errorf("stream %q: %w", s.opt.Name, cuda.ErrClosed)
		}
		if perr != nil && !fits() {
			return fmt.Errorf("stream %q: its queue of %d has been full for %v while it runs %s",
				s.opt.Name, inFlight, s.d.opt.QueueTimeout, s.runningText())
		}
	}
}

// place is the ring's next mark with its events made. s.mu is held and there is room; it runs
// within enter. The mark counts once tail is raised.
func (s *gpuStream) place(timed bool) (*mark, error) {
	m := &s.ring[s.tail%ringSize]
	var err error
	if timed && m.start == 0 {
		if m.start, err = s.timed.take(); err != nil {
			return nil, err
		}
	}
	if m.end == 0 {
		m.end, err = s.timed.take()
	}
	m.kernel, m.steps, m.load, m.chained = nil, nil, markEvery, false
	return m, err
}

// launchable checks what a launch is given.
func (s *gpuStream) launchable(k cuda.Kernel, cfg cuda.LaunchConfig, params unsafe.Pointer,
	size uintptr) (*kernel, error) {
	gk, ok := k.(*kernel)
	if !ok || gk == nil || gk.d != s.d {
		return nil, fmt.Errorf("stream %q: launch: the kernel is not of this device", s.opt.Name)
	}
	if size != gk.size {
		return nil,
			fmt.Errorf(
				"stream %q: launch of kernel %q: parameter block of %d bytes, the kernel's has %d",
				s.opt.Name, gk.name, size, gk.size)
	}
	if cfg.Blocks < 1 || cfg.Blocks > math.MaxInt32 || cfg.Threads < 1 ||
		cfg.Threads > gk.maxThreads {
		return nil,
			fmt.Errorf(
				"stream %q: launch of kernel %q: %d blocks of %d threads: want 1 or more blocks of 1 to %d threads",
				s.opt.Name, gk.name, cfg.Blocks, cfg.Threads, gk.maxThreads)
	}
	if params == nil && size > 0 {
		return nil, fmt.Errorf("stream %q: launch of kernel %q: no parameters", s.opt.Name, gk.name)
	}
	return gk, nil
}

// setParams writes what a launch points the driver to. s.mu is held.
func (s *gpuStream) setParams(params unsafe.Pointer, size uintptr, seq uint64) {
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&s.args.block)), maxParams),
		unsafe.Slice((*byte)(params), size))
	s.args.hx.Seq = seq
}

// launchLoad is the commands of a launch, with its events.
const launchLoad = 3

// LaunchRaw implements cuda.Stream.
func (s *gpuStream) LaunchRaw(k cuda.Kernel, cfg cuda.LaunchConfig, params unsafe.Pointer,
	size uintptr) error {
	gk, err := s.launchable(k, cfg, params, size)
	if err != nil {
		return err
	}
	fn := gk.fn
	if s.green != nil {
		if fn, err = gk.contextless(); err != nil {
			return fmt.Errorf("stream %q: launch of kernel %q: %w", s.opt.Name, gk.name, err)
		}
	}
	if err := s.lock(); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if err := s.room(launchLoad); err != nil {
		return err
	}
	d := s.d
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	m, err := s.openMark()
	if err == nil {
		s.setParams(params, size, s.seq+1)
		err = d.check("cuLaunchKernel", d.api.LaunchKernel(fn, uint32(cfg.Blocks),
			uint32(cfg.Threads), 0, s.h, &s.args.params[0]))
	}
	launched := err == nil
	if launched {
		err = s.closeMark(m, gk, nil, 1, launchLoad)
	}
	if err != nil {
		err = fmt.Errorf("stream %q: launch of kernel %q: %w", s.opt.Name, gk.name, err)
		if launched {
			s.setErr(err)
		}
		return err
	}
	return s.reapHalf()
}

// openMark is the next mark with its start on the stream, unless that is the end of the mark
// before. s.mu is held and there is room; it runs within enter.
func (s *gpuStream) openMark() (*mark, error) {
	chained := s.tail > 0 && !s.apart && s.before(s.tail).kernel != nil &&
		time.Since(s.launched) < s.d.soon
	m, err := s.place(!chained)
	if err != nil {
		return nil, err
	}
	if m.chained = chained; !chained {
		err = s.d.check("cuEventRecord", s.d.api.EventRecord(m.start, s.h))
	}
	return m, err
}

// closeMark ends the mark of n launches, which have happened. After an error nobody can tell when
// they end or whether they went well: it is the stream's, too.
func (s *gpuStream) closeMark(m *mark, label *kernel, steps []*kernel, n, load int) error {
	m.kernel, m.steps, m.load = label, steps, load
	m.first, m.seq = s.seq+1, s.seq+uint64(n)
	s.seq = m.seq
	s.running.CompareAndSwap(nil, label)
	if err := s.d.check("cuEventRecord", s.d.api.EventRecord(m.end, s.h)); err != nil {
		return err
	}
	s.tail++
	s.load += m.load
	s.unmarked, s.apart, s.launched = 0, false, time.Now()
	return nil
}

// reapHalf reaps marks once the ring is half full.
func (s *gpuStream) reapHalf() error {
	if s.tail-s.head >= inFlight/2 || s.load > mostLoad/2 {
		return s.reap()
	}
	return nil
}

// command enqueues what is not a launch: f, which runs within enter.
func (s *gpuStream) command(f func() error) error {
	if err := s.lock(); err != nil {
		return err
	}
	defer s.mu.Unlock()
	s.apart = true
	return s.locked(nil, f)
}

// locked is command with s.mu held. f uses other's streams or events, too, where other is not nil.
func (s *gpuStream) locked(other *green, f func() error) error {
	if err := s.room(markEvery); err != nil {
		return err
	}
	d := s.d
	if err := d.enterWith(s.green, other); err != nil {
		return err
	}
	defer d.leaveWith(s.green, other)
	if err := f(); err != nil {
		return fmt.Errorf("stream %q: %w", s.opt.Name, err)
	}
	if s.unmarked++; s.unmarked < markEvery {
		return nil
	}
	m, err := s.place(false)
	if err != nil {
		return fmt.Errorf("stream %q: %w", s.opt.Name, err)
	}
	if r := d.api.EventRecord(m.end, s.h); r != success {
		return fmt.Errorf("stream %q: %w", s.opt.Name, d.failed("cuEventRecord", r))
	}
	s.tail++
	s.unmarked = 0
	return nil
}

// check is nil for success, else the error of a call.
func (d *Device) check(call string, r result) error {
	if r == success {
		return nil
	}
	return d.failed(call, r)
}

// Copy implements cuda.Stream. Both ranges must lie in live buffers; a range that does not is an
// error of the call and leaves the stream as it was.
func (s *gpuStream) Copy(dst, src cuda.DevicePtr, bytes int64) error {
	if err := s.failed(); err != nil {
		return err
	}
	err := s.d.regions.Check("copy", "destination", uint64(dst), bytes)
	if err == nil {
		err = s.d.regions.Check("copy", "source", uint64(src), bytes)
	}
	if err != nil {
		return fmt.Errorf("stream %q: %w", s.opt.Name, err)
	}
	if bytes == 0 {
		return nil
	}
	return s.d.pieces(uint64(dst), uint64(src), uint64(bytes), func(offset, n uint64) error {
		return s.command(func() error {
			return s.d.check("cuMemcpyAsync", s.d.api.MemcpyAsync(devicePtr(uint64(dst)+offset),
				devicePtr(uint64(src)+offset), int64(n), s.h))
		})
	})
}

// Fill implements cuda.Stream, with the rules of Copy.
func (s *gpuStream) Fill(dst cuda.DevicePtr, value byte, bytes int64) error {
	if err := s.failed(); err != nil {
		return err
	}
	if err := s.d.regions.Check("fill", "destination", uint64(dst), bytes); err != nil {
		return fmt.Errorf("stream %q: %w", s.opt.Name, err)
	}
	if bytes == 0 {
		return nil
	}
	return s.d.pieces(uint64(dst), uint64(dst), uint64(bytes), func(offset, n uint64) error {
		return s.command(func() error {
			return s.d.check("cuMemsetD8Async", s.d.api.MemsetD8Async(devicePtr(uint64(dst)+offset),
				value, int64(n), s.h))
		})
	})
}

func (s *gpuStream) event(e cuda.Event) (*gpuEvent, error) {
	ge, ok := e.(*gpuEvent)
	if !ok || ge == nil || ge.d != s.d {
		return nil, fmt.Errorf("stream %q: the event is not of this device", s.opt.Name)
	}
	ge.mu.Lock()
	defer ge.mu.Unlock()
	if ge.closed {
		return nil, fmt.Errorf("stream %q: event: %w", s.opt.Name, cuda.ErrClosed)
	}
	return ge, nil
}

// record makes a recording of the work so far, with one reference. s.mu is held.
func (s *gpuStream) record(timed bool) (*recording, error) {
	rec := &recording{s: s, pool: s.events}
	if timed {
		rec.pool = &s.d.timed
		if s.green != nil {
			rec.pool = &s.green.timed
		}
	}
	rec.refs.Store(1)
	err := s.locked(nil, func() (err error) {
		if rec.ev, err = rec.pool.take(); err != nil {
			return err
		}
		return s.d.check("cuEventRecord", s.d.api.EventRecord(rec.ev, s.h))
	})
	if err != nil {
		rec.drop()
		return nil, err
	}
	rec.seq, rec.serial = s.seq, s.d.serial.Add(1)
	for _, w := range s.waits {
		rec.deps = append(rec.deps, w.hold())
	}
	return rec, nil
}

// Record implements cuda.Stream. On a failed stream the event happens with the stream's error, so
// that no other stream takes what came before it for done.
func (s *gpuStream) Record(e cuda.Event) error {
	ge, err := s.event(e)
	if err != nil {
		return err
	}
	if err := s.lock(); err != nil {
		if p := s.err.Load(); p != nil {
			rec := &recording{s: s, settled: true, err: *p}
			rec.refs.Store(1)
			ge.set(rec)
		}
		return err
	}
	rec, err := s.record(ge.timed)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	ge.set(rec)
	return nil
}

// Wait implements cuda.Stream. The GPU holds the stream's later work back; that the event's
// stream had failed is found out afterwards, by Synchronize or by who waits for this stream.
func (s *gpuStream) Wait(e cuda.Event) error {
	ge, err := s.event(e)
	if err != nil {
		return err
	}
	rec := ge.get()
	if rec == nil {
		return s.failed()
	}
	defer rec.drop()
	if done, err := rec.poll(); err != nil {
		if s.failed() == nil {
			s.setErr(waitedFor(s, err))
		}
		return s.failed()
	} else if done {
		return s.failed()
	}
	if err := s.pruneWaits(); err != nil {
		return err
	}
	if err := s.lock(); err != nil {
		return err
	}
	defer s.mu.Unlock()
	s.apart = true
	if err := s.locked(rec.green(), func() error {
		return s.d.check("cuStreamWaitEvent", s.d.api.StreamWaitEvent(s.h, rec.ev, 0))
	}); err != nil {
		return err
	}
	if rec.s != s { // its own failures a stream sees anyway
		s.waits = append(s.waits, rec.hold())
	}
	return nil
}

// pruneWaits keeps the list of waits short: it looks at them when there are many, and when all are
// still to come it waits for the oldest, as an enqueue on a full stream does.
func (s *gpuStream) pruneWaits() error {
	var b backoff
	ctx, cancel := context.WithTimeout(context.Background(), s.d.opt.QueueTimeout)
	defer cancel()
	for {
		s.mu.Lock()
		n := len(s.waits)
		s.mu.Unlock()
		if n < maxWaits {
			return nil
		}
		s.settleWaits()
		if err := s.failed(); err != nil {
			return err
		}
		s.mu.Lock()
		n = len(s.waits)
		s.mu.Unlock()
		if n < maxWaits {
			return nil
		}
		if b.pause(ctx) != nil {
			return fmt.Errorf("stream %q: %d events that it waits for have not happened for %v",
				s.opt.Name, n, s.d.opt.QueueTimeout)
		}
	}
}

// settleWaits looks at what the stream has waited for: recordings that went well are let go, one
// that did not fails the stream.
func (s *gpuStream) settleWaits() {
	s.mu.Lock()
	list := make([]*recording, len(s.waits))
	for i, r := range s.waits {
		list[i] = r.hold()
	}
	s.mu.Unlock()
	done := map[*recording]bool{}
	for _, r := range list {
		ok, err := r.poll()
		if err != nil && s.err.Load() == nil && s.d.lost.Load() == nil {
			s.setErr(waitedFor(s, err))
		}
		done[r] = ok
	}
	s.mu.Lock()
	keep := s.waits[:0:0]
	var gone []*recording
	for _, r := range s.waits {
		if done[r] {
			gone = append(gone, r)
		} else {
			keep = append(keep, r)
		}
	}
	s.waits = keep
	s.mu.Unlock()
	for _, r := range append(gone, list...) {
		r.drop()
	}
}

// Synchronize implements cuda.Stream. It also waits out the work of a failed stream, which its
// kernels drop, so that after it nothing of the stream runs any more.
func (s *gpuStream) Synchronize(ctx context.Context) error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		if err := s.failed(); err != nil {
			return err
		}
		return fmt.Errorf("stream %q: %w", s.opt.Name, cuda.ErrClosed)
	}
	if err := s.d.usableNow(); err != nil {
		s.mu.Unlock()
		return s.orLost(err)
	}
	rec, err := s.fence()
	s.mu.Unlock()
	if err != nil {
		return err
	}
	defer rec.drop()
	err = rec.wait(ctx)
	if w := (*waitError)(nil); errors.As(err, &w) {
		late := fmt.Errorf("stream %q: waiting while it runs %s: %w", s.opt.Name,
			s.runningText(), w.err)
		return errors.Join(s.failed(), late)
	}
	if ferr := s.finish(); ferr != nil {
		return s.orLost(ferr)
	}
	if ferr := s.failed(); ferr != nil {
		return ferr
	}
	return err
}

// fence is record for a stream that may have failed.
func (s *gpuStream) fence() (*recording, error) {
	rec := &recording{s: s, pool: s.events, seq: s.seq, serial: s.d.serial.Add(1)}
	rec.refs.Store(1)
	if err := s.enter(); err != nil {
		return nil, s.orLost(err)
	}
	defer s.leave()
	e, err := s.events.take()
	if err != nil {
		return nil, fmt.Errorf("stream %q: %w", s.opt.Name, err)
	}
	rec.ev = e
	if r := s.d.api.EventRecord(e, s.h); r != success {
		rec.drop()
		return nil, fmt.Errorf("stream %q: %w", s.opt.Name, s.d.failed("cuEventRecord", r))
	}
	return rec, nil
}

// finish collects errors after the stream's work is done. Those of kernels and waits become the
// stream's error; it returns the device's.
func (s *gpuStream) finish() error {
	s.mu.Lock()
	err := s.enter()
	if err == nil {
		err = s.reap()
		s.leave()
	}
	s.look()
	s.mu.Unlock()
	s.settleWaits()
	return err
}

// orLost joins an error of the device to the stream's own.
func (s *gpuStream) orLost(err error) error {
	if p := s.err.Load(); p != nil {
		s.reported.Store(true)
		return errors.Join(*p, err)
	}
	return err
}

// Busy implements cuda.Stream: the time between the events around each kernel that is done. It
// holds the time that a kernel waits for SMs which others have, for events do not tell it apart.
func (s *gpuStream) Busy() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.enter() == nil {
		_ = s.reap() // an error stays with the device or the stream, which say so at the next call
		s.leave()
	}
	return s.busy
}

// Close implements cuda.Stream. It lets work already enqueued finish, for CloseTimeout at most, and
// returns the stream's error when no other call has.
func (s *gpuStream) Close() error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil
	}
	if !s.shutdown(s.d.opt.CloseTimeout) {
		// It stays with the device, whose Close must know that a kernel still uses memory.
		return fmt.Errorf("stream %q: close: %w %s after %v", s.opt.Name, cuda.ErrStillRuns,
			s.runningText(), s.d.opt.CloseTimeout)
	}
	if !s.reported.Load() {
		if p := s.err.Load(); p != nil {
			return *p
		}
	}
	return nil
}

// idle waits for the stream's work where no event can be recorded to tell: what the stream holds
// must not go to others while a kernel writes to it.
func (s *gpuStream) idle(limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var b backoff
	for {
		if s.enter() != nil {
			return true // nothing runs on a lost device
		}
		r := s.d.api.StreamQuery(s.h)
		s.leave()
		if r != errNotReady {
			if r != success {
				_ = s.d.failed("cuStreamQuery", r) // noted
			}
			return true
		}
		if b.pause(ctx) != nil {
			return false
		}
	}
}

// shutdown waits until the stream's work is done and frees it. On a lost device nothing runs.
func (s *gpuStream) shutdown(limit time.Duration) bool {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return true
	}
	s.closing = true
	if s.d.usableNow() == nil {
		rec, err := s.fence()
		s.mu.Unlock()
		if err == nil {
			if s.d.hung.Load() != nil {
				limit = min(limit, hungPatience)
			}
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			err = rec.waitOnly(ctx)
			cancel()
			rec.drop()
			if w := (*waitError)(nil); errors.As(err, &w) {
				return false
			}
			_ = s.finish() // Close tells of err
		} else if !s.idle(limit) {
			return false
		}
		s.mu.Lock()
	}
	if !s.closed {
		s.closed = true
		s.free()
	}
	s.mu.Unlock()
	s.d.streamMu.Lock()
	delete(s.d.streams, s)
	s.d.streamMu.Unlock()
	return true
}
