package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// recording is one time that an event was recorded. Waiters hold the recording, not the event,
// which may be recorded anew meanwhile.
type recording struct {
	done  atomic.Bool
	mu    sync.Mutex
	ch    chan struct{} // made by the first waiter
	nanos int64
	err   error // the recording stream's; set before done
}

func (r *recording) happen(err error) {
	r.mu.Lock()
	r.nanos, r.err = now(), err
	r.done.Store(true)
	if r.ch != nil {
		close(r.ch)
	}
	r.mu.Unlock()
}

func (r *recording) waiter() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ch == nil {
		r.ch = make(chan struct{})
		if r.done.Load() {
			close(r.ch)
		}
	}
	return r.ch
}

// wait is for streams: the recording stream works its queue off in bounded time, or its kernel
// is what hangs and Synchronize on either stream says so.
func (r *recording) wait() {
	if !r.done.Load() {
		<-r.waiter()
	}
}

func (r *recording) waitCtx(ctx context.Context) error {
	if r.done.Load() {
		return nil
	}
	select {
	case <-r.waiter():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

type hostEvent struct {
	h      *Host
	timed  bool
	latest atomic.Pointer[recording]
	closed atomic.Bool
}

// NewEvent implements Device.
func (h *Host) NewEvent() (Event, error) { return h.newEvent(false) }

// NewTimer implements Device.
func (h *Host) NewTimer() (Event, error) { return h.newEvent(true) }

func (h *Host) newEvent(timed bool) (Event, error) {
	if h.closed.Load() {
		return nil, h.errClosed()
	}
	return &hostEvent{h: h, timed: timed}, nil
}

func (s *hostStream) event(e Event) (*hostEvent, error) {
	he, ok := e.(*hostEvent)
	if !ok || he == nil || he.h != s.h {
		return nil, fmt.Errorf("stream %q: the event is not of this device", s.opt.Name)
	}
	if he.closed.Load() {
		return nil, fmt.Errorf("stream %q: event: %w", s.opt.Name, ErrClosed)
	}
	return he, nil
}

// Record implements Stream. On a failed stream the event happens with the stream's error, so
// that no other stream takes what came before it for done.
func (s *hostStream) Record(e Event) error {
	he, err := s.event(e)
	if err != nil {
		return err
	}
	rec := &recording{}
	if err := s.enqueue(op{kind: opRecord, rec: rec}); err != nil {
		if s.err.Load() != nil {
			rec.happen(err)
			he.latest.Store(rec)
		}
		return err
	}
	he.latest.Store(rec)
	return nil
}

// Wait implements Stream.
func (s *hostStream) Wait(e Event) error {
	he, err := s.event(e)
	if err != nil {
		return err
	}
	rec := he.latest.Load()
	if rec == nil {
		return s.failed()
	}
	return s.enqueue(op{kind: opWait, rec: rec})
}

// Synchronize waits for the latest record and returns the error of the stream it was made on.
func (e *hostEvent) Synchronize(ctx context.Context) error {
	rec := e.latest.Load()
	if rec == nil {
		return nil
	}
	if err := rec.waitCtx(ctx); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	return rec.err
}

func (e *hostEvent) Done() bool {
	rec := e.latest.Load()
	return rec == nil || rec.done.Load()
}

func (e *hostEvent) Since(earlier Event) (time.Duration, error) {
	o, ok := earlier.(*hostEvent)
	if !ok || o == nil {
		return 0, errors.New("event: time since an event of another device")
	}
	if !o.timed || !e.timed {
		return 0, errors.New("event: time between events that NewTimer did not make")
	}
	a, b := o.latest.Load(), e.latest.Load()
	if a == nil || b == nil || !a.done.Load() || !b.done.Load() {
		return 0, errors.New("event: time between events that are not both recorded and done")
	}
	return time.Duration(b.nanos - a.nanos), nil
}

func (e *hostEvent) Close() error {
	e.closed.Store(true)
	return nil
}
