package driver

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"helios/cuda"
)

// eventPool keeps the CUevents of one context: an event is recorded in streams of the context
// that it was made in (cuEventRecord: "hEvent and hStream must be from the same context").
// A record takes one and gives it back when nobody asks for the record any more. Using it again
// is safe then even if a stream still waits for it, since a wait is for what the event was at the
// time of the call (cuStreamWaitEvent).
type eventPool struct {
	d     *Device
	green *green // nil: the primary context
	timed bool   // its events have a time, for which the GPU writes more
	mu    sync.Mutex
	free  []event
}

// flags are those of the events (CUevent_flags).
func (p *eventPool) flags() uint32 {
	if p.timed {
		return 0
	}
	return eventDisableTiming
}

// take runs within enterWith of the pool's context. An event that is out keeps that.
func (p *eventPool) take() (e event, err error) {
	p.mu.Lock()
	if n := len(p.free); n > 0 {
		e = p.free[n-1]
		p.free = p.free[:n-1]
	}
	p.mu.Unlock()
	if e == 0 {
		if p.green != nil {
			e, err = p.green.makeEvent(p.flags())
		} else {
			var r result
			e, r = p.d.api.EventCreate(p.flags())
			err = p.d.check("cuEventCreate", r)
		}
	}
	if err == nil && p.green != nil {
		p.green.refs.Add(1)
	}
	return e, err
}

// give may end a green context, so it does not run within enter unless a stream holds that.
func (p *eventPool) give(e event) {
	p.mu.Lock()
	p.free = append(p.free, e)
	p.mu.Unlock()
	if p.green != nil {
		p.green.drop()
	}
}

// close destroys the free events.
func (p *eventPool) close() {
	p.mu.Lock()
	free := p.free
	p.free = nil
	p.mu.Unlock()
	if len(free) == 0 || !p.d.enterToFree() {
		return
	}
	holdGreen(p.green, nil)
	for _, e := range free {
		p.d.api.EventDestroy(e)
	}
	p.d.leaveWith(p.green, nil)
}

// recording is one time that an event was recorded. Waiters hold the recording, not the event,
// which may be recorded anew meanwhile.
type recording struct {
	s      *gpuStream
	ev     event
	pool   *eventPool
	refs   atomic.Int32
	serial uint64
	seq    uint64 // launches of s before it

	mu      sync.Mutex
	settled bool         // done, and err is final
	err     error        // the stream's, when work before the record failed
	deps    []*recording // what s had waited for; each is held
}

// green is the green context of the event, or nil.
func (r *recording) green() *green {
	if r.pool == nil {
		return nil
	}
	return r.pool.green
}

// hold takes a reference to a recording that the caller knows to be live.
func (r *recording) hold() *recording {
	r.refs.Add(1)
	return r
}

func (r *recording) drop() {
	if r.refs.Add(-1) != 0 {
		return
	}
	for _, d := range r.deps {
		d.drop()
	}
	r.deps = nil
	if r.ev != 0 {
		r.pool.give(r.ev)
	}
}

// poll looks whether the recording has happened, and then with which error.
func (r *recording) poll() (done bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.settled {
		return true, r.err
	}
	d := r.s.d
	if err := d.enterWith(r.green(), nil); err != nil {
		return true, err
	}
	q := d.api.EventQuery(r.ev)
	d.leaveWith(r.green(), nil)
	switch q {
	case success:
	case errNotReady:
		return false, nil
	default:
		return true, d.failed("cuEventQuery", q)
	}
	err = r.s.failureUpTo(r.seq)
	for _, dep := range r.deps {
		// It has happened: the stream waited for it before it came here. The stream's own failure
		// comes first.
		if _, derr := dep.poll(); err == nil && derr != nil {
			err = waitedFor(r.s, derr)
		}
		dep.drop()
	}
	r.deps = nil
	r.settled, r.err = true, err
	return true, err
}

func waitedFor(s *gpuStream, err error) error {
	return fmt.Errorf("stream %q waited for an event of a failed stream: %w", s.opt.Name, err)
}

// wait polls until the recording has happened or ctx ends, or some kernel is found not to end. It
// never blocks in the driver, which has no waits with a limit.
func (r *recording) wait(ctx context.Context) error { return r.pollUntil(ctx, true) }

// waitOnly is wait for who only asks whether it has happened.
func (r *recording) waitOnly(ctx context.Context) error { return r.pollUntil(ctx, false) }

func (r *recording) pollUntil(ctx context.Context, watch bool) error {
	var b backoff
	for {
		if done, err := r.poll(); done {
			return err
		}
		if err := b.pause(ctx); err != nil {
			return &waitError{err}
		}
		if watch && b.looks > quickLooks {
			if err := r.s.d.watch(); err != nil {
				return err
			}
		}
	}
}

// waitError is the end of a context, as against an error of the work.
type waitError struct{ err error }

func (e *waitError) Error() string { return e.err.Error() }
func (e *waitError) Unwrap() error { return e.err }

// gpuEvent is cuda.Event: the latest of its recordings.
type gpuEvent struct {
	d      *Device
	timed  bool
	mu     sync.Mutex
	latest *recording // held
	closed bool
}

// NewEvent implements cuda.Device.
func (d *Device) NewEvent() (cuda.Event, error) { return d.newEvent(false) }

// NewTimer implements cuda.Device.
func (d *Device) NewTimer() (cuda.Event, error) { return d.newEvent(true) }

func (d *Device) newEvent(timed bool) (cuda.Event, error) {
	if err := d.accepting(); err != nil {
		return nil, err
	}
	return &gpuEvent{d: d, timed: timed}, nil
}

// get returns the latest recording, held, or nil.
func (e *gpuEvent) get() *recording {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.latest == nil {
		return nil
	}
	return e.latest.hold()
}

// set takes over the caller's reference.
func (e *gpuEvent) set(r *recording) {
	e.mu.Lock()
	old := e.latest
	e.latest = r
	e.mu.Unlock()
	if old != nil {
		old.drop()
	}
}

// Synchronize implements cuda.Event: it waits for the latest record and returns the error of the
// stream that it was made on.
func (e *gpuEvent) Synchronize(ctx context.Context) error {
	r := e.get()
	if r == nil {
		return e.d.usableNow()
	}
	defer r.drop()
	err := r.wait(ctx)
	if w := (*waitError)(nil); errors.As(err, &w) {
		return fmt.Errorf("event of stream %q, which runs %s: %w", r.s.opt.Name,
			r.s.runningText(), w.err)
	}
	return err
}

// Done implements cuda.Event. A device that is lost has nothing left to wait for.
func (e *gpuEvent) Done() bool {
	r := e.get()
	if r == nil {
		return true
	}
	defer r.drop()
	done, _ := r.poll()
	return done
}

// Since implements cuda.Event.
func (e *gpuEvent) Since(earlier cuda.Event) (time.Duration, error) {
	o, ok := earlier.(*gpuEvent)
	if !ok || o == nil || o.d != e.d {
		return 0, errors.New("event: time since an event of another device")
	}
	if !o.timed || !e.timed {
		return 0, errors.New("event: time between events that NewTimer did not make")
	}
	a, b := o.get(), e.get()
	for _, r := range []*recording{a, b} {
		if r == nil {
			return 0, errors.New("event: time between events that are not both recorded and done")
		}
		defer r.drop()
		if done, err := r.poll(); err != nil {
			return 0, err
		} else if !done {
			return 0, errors.New("event: time between events that are not both recorded and done")
		}
	}
	// In the order of the records: the driver documents no negative times.
	sign := time.Duration(1)
	if a.serial > b.serial {
		a, b, sign = b, a, -1
	}
	d, err := e.d.elapsed(a, b)
	return sign * d, err
}

// elapsed is the time between two recordings, which resolves about half a microsecond.
func (d *Device) elapsed(a, b *recording) (time.Duration, error) {
	if err := d.enterWith(a.green(), b.green()); err != nil {
		return 0, err
	}
	ms, r := d.api.EventElapsedTime(a.ev, b.ev)
	d.leaveWith(a.green(), b.green())
	if r != success {
		return 0, d.failed("cuEventElapsedTime", r)
	}
	return time.Duration(float64(ms) * float64(time.Millisecond)), nil
}

// Close implements cuda.Event.
func (e *gpuEvent) Close() error {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.set(nil)
	return nil
}

// backoff waits between looks at the device: a few quick ones, since most waits are short, then
// longer and longer ones, so that a long wait does not hold a processor. A pause is an eighth of
// the wait so far: so much longer it takes at most than what it waits for.
type backoff struct {
	looks int
	began time.Time // the first pause
}

const (
	quickLooks   = 32
	firstPause   = 10 * time.Microsecond
	longestPause = time.Millisecond
)

// pause returns when it is time for the next look, or with the context's error.
func (b *backoff) pause(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.looks++; b.looks <= quickLooks {
		runtime.Gosched()
		return nil
	}
	if b.began.IsZero() {
		b.began = time.Now()
	}
	next := min(max(time.Since(b.began)/8, firstPause), longestPause)
	if next < longestPause/4 {
		time.Sleep(next) // shorter than it takes to be told of a cancellation
		return nil
	}
	t := time.NewTimer(next)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
