package proxy

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A party that waits for a modelled completion sleeps while it is far away and spins at the end.
// The timers of Go do not serve for that: where all goroutines sleep they are a millisecond late.
// A futex with the thread's timer slack taken away comes back 20 to 30 µs late (half of them within
// 22, measured on a virtual machine), so it is told to come back that much earlier.
const (
	napAbove = 100 * time.Microsecond // what is nearer is spun for
	napAhead = 40 * time.Microsecond  // how much of a sleep is spun
)

// restUntil returns how long a party may sleep when the next completion is due at a time; 0: it
// looks again at once. fake is time in a bubble of testing/synctest, which passes only in sleep.
func restUntil(due int64, fake bool) time.Duration {
	gap := time.Duration(due - nanotime())
	switch {
	case fake:
		return max(gap, 0)
	case gap < napAbove:
		return 0
	}
	return gap - napAhead
}

// Futex operations, private to the process (linux/futex.h).
const (
	futexWaitPrivate = 128
	futexWakePrivate = 129
)

// noSlack makes the sleeps of this thread, whichever it is, end in time: the kernel adds 50 µs
// otherwise. It stays so, and nobody misses the slack.
func noSlack() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) } // ns; 0 would be the default

// futexWait sleeps for d, or until futexWake, if word still has the value; it may come back early.
func futexWait(word *atomic.Int32, value int32, d time.Duration) {
	noSlack()
	ts := unix.NsecToTimespec(int64(d))
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWaitPrivate,
		uintptr(uint32(value)), uintptr(unsafe.Pointer(&ts)), 0, 0)
}

func futexWake(word *atomic.Int32) {
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWakePrivate, 1,
		0, 0, 0)
}

// rest lets the background goroutine sleep until d has passed, there is service to do, or quit is
// closed.
func (r *reactor) rest(d time.Duration, quit <-chan struct{}) {
	if d <= 0 {
		runtime.Gosched()
		return
	}
	if r.fake {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-quit:
		case <-r.svc: // the caller looks at everything anyway
		case <-t.C:
		}
		return
	}
	r.resting.Store(1)
	select {
	case <-quit:
	default:
		if len(r.svc) == 0 { // whoever sends after this look sees resting
			futexWait(&r.resting, 1, d)
		}
	}
	r.resting.Store(0)
}

// disturb ends the background goroutine's rest.
func (r *reactor) disturb() {
	if r.resting.Load() != 0 && r.resting.CompareAndSwap(1, 0) {
		futexWake(&r.resting)
	}
}
