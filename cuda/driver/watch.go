package driver

import (
	"maps"
	"slices"
	"time"

	"helios/internal/errs"
)

const (
	watchEvery   = 20 * time.Millisecond  // how often waits look for kernels that do not end
	hungPatience = 100 * time.Millisecond // how long anything waits for a stream once one is known
)

// watch looks whether a kernel has been running for longer than KernelTimeout. All waits call it,
// and end with what it finds: what they wait for may never come. No stream's mutex is held.
func (d *Device) watch() error {
	if d.opt.KernelTimeout < 0 {
		return nil
	}
	now := time.Now()
	if last := d.watched.Load(); now.UnixNano()-last < int64(watchEvery) ||
		!d.watched.CompareAndSwap(last, now.UnixNano()) {
		return d.hangs()
	}
	d.streamMu.Lock()
	list := slices.Collect(maps.Keys(d.streams))
	d.streamMu.Unlock()
	for _, s := range list {
		if !s.mu.TryLock() { // somebody works with it: the next look will do
			continue
		}
		e := s.overdue(now)
		s.mu.Unlock()
		if e != nil {
			d.hung.CompareAndSwap(nil, e)
			s.setErr(errs.With(errs.Device, e))
		}
	}
	return d.hangs()
}

// hangs is the kernel that does not end, or nil.
func (d *Device) hangs() error {
	if h := d.hung.Load(); h != nil {
		return errs.With(errs.Device, h)
	}
	return nil
}

// overdue returns an error for a kernel that the stream has run for too long. A kernel that waits
// for other streams has not started, as far as its event shows. s.mu is held.
func (s *gpuStream) overdue(now time.Time) *TimeoutError {
	if s.closed || s.enter() != nil {
		return nil
	}
	defer s.leave()
	if s.reap() != nil || s.head == s.tail {
		return nil
	}
	m := &s.ring[s.head%ringSize]
	if m.kernel == nil || !m.chained && s.d.api.EventQuery(m.start) != success {
		return nil
	}
	if s.oldest != s.head+1 {
		s.oldest, s.since = s.head+1, now
		return nil
	}
	if ran := now.Sub(s.since); ran > s.d.opt.KernelTimeout {
		return &TimeoutError{Device: s.d.info.Name, Stream: s.opt.Name, Kernel: m.kernel.name,
			After: ran.Round(time.Millisecond)}
	}
	return nil
}
