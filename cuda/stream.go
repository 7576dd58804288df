package cuda

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/internal/hostcpu"
)

type opKind uint8

const (
	opLaunch opKind = iota
	opCopy
	opFill
	opRecord
	opWait
)

type op struct {
	kind     opKind
	value    byte
	g        *grid
	dst, src DevicePtr
	bytes    int64
	rec      *recording
}

// hostStream is an ordered queue and the goroutine that works it off.
type hostStream struct {
	h         *Host
	opt       StreamOptions
	block     Block
	gridDone  chan struct{} // cap 1: the running grid's last block is done
	ended     chan struct{} // the goroutine is gone
	err       atomic.Pointer[error]
	reported  atomic.Bool // some call has returned err
	kernel    atomic.Pointer[hostKernel]
	pending   atomic.Int64 // enqueued and not finished
	fullWaits atomic.Int32

	mu      sync.Mutex
	work    sync.Cond // queue is not empty, or closing
	space   sync.Cond // queue has room
	queue   []op
	closing bool

	// The scheduler's, under its lock.
	held, budget      int   // slots
	since             int64 // when held rose from 0
	busy              time.Duration
	parked, maxParked int // blocks that wait without a slot
}

// NewStream implements Device.
func (h *Host) NewStream(opt StreamOptions) (Stream, error) {
	if opt.SMs < 0 {
		return nil, fmt.Errorf("stream %q: budget of %d SMs: want 1 to %d, or 0 for all", opt.Name,
			opt.SMs, h.info.SMs)
	}
	budget := h.info.SMs
	if opt.SMs > 0 {
		budget = min(opt.SMs, budget)
	}
	s := &hostStream{
		h: h, opt: opt,
		gridDone: make(chan struct{}, 1), ended: make(chan struct{}),
		budget: budget, maxParked: max(64, residentPerSM*budget),
	}
	s.work.L, s.space.L = &s.mu, &s.mu
	s.block.init(&h.sched)
	h.streamMu.Lock()
	defer h.streamMu.Unlock()
	if h.closed.Load() {
		return nil, h.errClosed()
	}
	h.streams[s] = struct{}{}
	go s.loop()
	return s, nil
}

// failed returns the sticky error.
func (s *hostStream) failed() error {
	if p := s.err.Load(); p != nil {
		s.reported.Store(true)
		return *p
	}
	return nil
}

func (s *hostStream) setErr(err error) { s.err.CompareAndSwap(nil, &err) }

func (s *hostStream) running() string {
	if k := s.kernel.Load(); k != nil {
		return fmt.Sprintf("kernel %q", k.name)
	}
	return "no kernel"
}

// enqueue adds o. A full queue blocks, as a launch on a GPU does, but not for ever.
func (s *hostStream) enqueue(o op) error {
	if err := s.failed(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending.Load() >= int64(s.h.opt.QueueDepth) && !s.closing {
		if err := s.awaitSpace(); err != nil {
			return err
		}
	}
	if s.closing {
		return fmt.Errorf("stream %q: %w", s.opt.Name, ErrClosed)
	}
	s.pending.Add(1)
	s.queue = append(s.queue, o)
	if len(s.queue) == 1 {
		s.work.Signal()
	}
	return nil
}

func (s *hostStream) awaitSpace() error {
	deadline := time.Now().Add(s.h.opt.QueueTimeout)
	t := time.AfterFunc(s.h.opt.QueueTimeout, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.space.Broadcast()
	})
	defer t.Stop()
	s.fullWaits.Add(1)
	defer s.fullWaits.Add(-1)
	for s.pending.Load() >= int64(s.h.opt.QueueDepth) && !s.closing {
		if !time.Now().Before(deadline) {
			return fmt.Errorf("stream %q: its queue of %d has been full for %v while it runs %s",
				s.opt.Name, s.h.opt.QueueDepth, s.h.opt.QueueTimeout, s.running())
		}
		s.space.Wait()
	}
	return nil
}

func (s *hostStream) loop() {
	defer close(s.ended)
	debug.SetPanicOnFault(true)
	var batch []op
	for {
		s.mu.Lock()
		for len(s.queue) == 0 && !s.closing {
			s.work.Wait()
		}
		if len(s.queue) == 0 {
			s.mu.Unlock()
			return
		}
		batch, s.queue = s.queue, batch[:0]
		s.mu.Unlock()
		for i := range batch {
			s.do(&batch[i])
			batch[i] = op{}
			s.pending.Add(-1)
			if s.fullWaits.Load() > 0 {
				s.mu.Lock()
				s.space.Broadcast()
				s.mu.Unlock()
			}
		}
	}
}

func (s *hostStream) do(o *op) {
	if p := s.err.Load(); p != nil {
		if o.kind == opRecord { // whoever waits for it must hear of the failure
			o.rec.happen(*p)
		}
		return
	}
	switch o.kind {
	case opLaunch:
		s.kernel.Store(o.g.kernel)
		s.h.sched.launch(o.g, &s.block)
		s.kernel.Store(nil)
		if e := o.g.fail.Load(); e != nil {
			s.setErr(e)
		}
	case opCopy, opFill:
		section := hostcpu.Begin()
		err := s.move(o)
		section.End(hostcpu.Spender{Stage: s.opt.Name, Operator: "copies and fills"})
		if err != nil {
			s.setErr(fmt.Errorf("stream %q: %w", s.opt.Name, err))
		}
	case opRecord:
		o.rec.happen(nil)
	case opWait:
		o.rec.wait()
		if o.rec.err != nil {
			s.setErr(fmt.Errorf("stream %q waited for an event of a failed stream: %w", s.opt.Name,
				o.rec.err))
		}
	}
}

// move copies or fills. A GPU does it on its copy engines, so it takes no worker slot.
func (s *hostStream) move(o *op) (err error) {
	defer func() {
		if r := recover(); r != nil { // memory that was freed or unmapped meanwhile
			err = fmt.Errorf("copy or fill of %d bytes: %v", o.bytes, r)
		}
	}()
	// Again: a buffer may have been freed since the call.
	if err := s.checkMove(o); err != nil {
		return err
	}
	dst := unsafe.Slice((*byte)(pointer(o.dst)), o.bytes)
	if o.kind == opCopy {
		copy(dst, unsafe.Slice((*byte)(pointer(o.src)), o.bytes))
		return nil
	}
	if o.value == 0 {
		clear(dst)
		return nil
	}
	// Doubling copies run at the speed of memmove.
	dst[0] = o.value
	for n := 1; n < len(dst); n *= 2 {
		copy(dst[n:], dst[:n])
	}
	return nil
}

func (s *hostStream) checkMove(o *op) error {
	if o.kind == opFill {
		return s.h.regions.Check("fill", "destination", uint64(o.dst), o.bytes)
	}
	if err := s.h.regions.Check("copy", "destination", uint64(o.dst), o.bytes); err != nil {
		return err
	}
	return s.h.regions.Check("copy", "source", uint64(o.src), o.bytes)
}

// LaunchRaw implements Stream.
func (s *hostStream) LaunchRaw(k Kernel, cfg LaunchConfig, params unsafe.Pointer,
	size uintptr) error {
	hk, ok := k.(*hostKernel)
	if !ok || hk == nil {
		return fmt.Errorf("stream %q: launch: the kernel is not of the host device", s.opt.Name)
	}
	if size != hk.size {
		return fmt.Errorf(
			"stream %q: launch of kernel %q: parameter block of %d bytes, the kernel's has %d",
			s.opt.Name, hk.name, size, hk.size)
	}
	if cfg.Blocks < 1 || cfg.Blocks > math.MaxInt32 || cfg.Threads < 1 || cfg.Threads > 1024 {
		return fmt.Errorf(
			"stream %q: launch of kernel %q: %d blocks of %d threads: want 1 or more blocks of 1 to 1024 threads",
			s.opt.Name, hk.name, cfg.Blocks, cfg.Threads)
	}
	g := &grid{stream: s, kernel: hk, blocks: int32(cfg.Blocks), thread: int32(cfg.Threads)}
	if err := g.setParams(params, size); err != nil {
		return fmt.Errorf("stream %q: launch of kernel %q: %w", s.opt.Name, hk.name, err)
	}
	return s.enqueue(op{kind: opLaunch, g: g})
}

// Copy implements Stream. Both ranges must lie in live buffers; a range that does not is an
// error of the call and leaves the stream as it was.
func (s *hostStream) Copy(dst, src DevicePtr, bytes int64) error {
	return s.enqueueMove(op{kind: opCopy, dst: dst, src: src, bytes: bytes})
}

// Fill implements Stream, with the rules of Copy.
func (s *hostStream) Fill(dst DevicePtr, value byte, bytes int64) error {
	return s.enqueueMove(op{kind: opFill, dst: dst, value: value, bytes: bytes})
}

func (s *hostStream) enqueueMove(o op) error {
	if err := s.failed(); err != nil {
		return err
	}
	if err := s.checkMove(&o); err != nil {
		return fmt.Errorf("stream %q: %w", s.opt.Name, err)
	}
	if o.bytes == 0 {
		return nil
	}
	return s.enqueue(o)
}

// Synchronize implements Stream.
func (s *hostStream) Synchronize(ctx context.Context) error {
	rec := &recording{}
	if err := s.enqueue(op{kind: opRecord, rec: rec}); err != nil {
		if s.err.Load() == nil {
			return err
		}
		return s.settle(ctx, err)
	}
	if err := rec.waitCtx(ctx); err != nil {
		return fmt.Errorf("stream %q: waiting while it runs %s: %w", s.opt.Name, s.running(), err)
	}
	return s.failed()
}

// settle waits until a failed stream has dropped its work, so that after Synchronize nothing of
// it runs any more.
func (s *hostStream) settle(ctx context.Context, failure error) error {
	rec := &recording{}
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return failure
	}
	s.pending.Add(1)
	s.queue = append(s.queue, op{kind: opRecord, rec: rec})
	if len(s.queue) == 1 {
		s.work.Signal()
	}
	s.mu.Unlock()
	if err := rec.waitCtx(ctx); err != nil {
		return errors.Join(failure, fmt.Errorf("stream %q: waiting while it runs %s: %w",
			s.opt.Name, s.running(), err))
	}
	return failure
}

// Busy implements Stream.
func (s *hostStream) Busy() time.Duration {
	sched := &s.h.sched
	sched.mu.Lock()
	defer sched.mu.Unlock()
	if s.held > 0 {
		return s.busy + time.Duration(now()-s.since)
	}
	return s.busy
}

// Close implements Stream. It lets work already enqueued finish, for CloseTimeout at most, and
// returns the stream's error when no other call has.
func (s *hostStream) Close() error {
	s.h.streamMu.Lock()
	_, open := s.h.streams[s]
	s.h.streamMu.Unlock()
	if !open {
		return nil
	}
	if !s.shutdown(s.h.opt.CloseTimeout) {
		// It stays with the device, whose Close must know that a kernel still uses memory.
		return fmt.Errorf("stream %q: close: %w %s after %v", s.opt.Name, ErrStillRuns,
			s.running(), s.h.opt.CloseTimeout)
	}
	s.h.streamMu.Lock()
	delete(s.h.streams, s)
	s.h.streamMu.Unlock()
	if !s.reported.Load() {
		return s.failed()
	}
	return nil
}

func (s *hostStream) shutdown(limit time.Duration) bool {
	s.mu.Lock()
	s.closing = true
	s.work.Signal()
	s.space.Broadcast()
	s.mu.Unlock()
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-s.ended:
		return true
	case <-t.C:
		return false
	}
}
