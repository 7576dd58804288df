// Package hostcpu tells on how many processors the process may compute and what its threads have
// spent, and lets goroutines that wait in the kernel have a place of their own beside those that
// compute.
package hostcpu

import (
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// waiters is the number of GOMAXPROCS's places for goroutines that wait.
var waiters atomic.Int32

// Count is the number of goroutines that can compute at one time: GOMAXPROCS, which counts the
// processors of the machine, or fewer where a control group or the environment has a limit, without
// the place that AddWaiter has added.
func Count() int { return runtime.GOMAXPROCS(0) - int(waiters.Load()) }

// AddWaiter makes room for one goroutine that waits in the kernel while others compute on all
// processors. A goroutine in a system call keeps its place in Go's scheduler until a monitor takes
// it away, which looks every 20 us at the earliest and needs two looks. Waits for reads are shorter
// than that and follow one another, so the place is as good as gone, and with it a processor. With
// one place more the kernel decides who runs. A GOMAXPROCS in the environment stays as it is.
//
// It is for the program's main function, once, before anybody counts.
func AddWaiter() {
	if os.Getenv("GOMAXPROCS") == "" && waiters.CompareAndSwap(0, 1) {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	}
}

// waiting is set while a goroutine waits in AddWaiter's place.
var waiting atomic.Bool

// TakePlace gives the caller the place that AddWaiter has made, until FreePlace: false when there
// is none, or another has it. It may then wait in the kernel for some milliseconds by a raw system
// call, of which Go's scheduler knows nothing. Its monitor otherwise takes the place from each wait
// that is longer than 20 us, gives it to another thread, and looks again every 20 us from then on:
// where reads follow one another that is a third of all switches of threads. A collection of
// garbage or a goroutine that computes too long still ends the wait, by a signal (EINTR).
func TakePlace() bool { return waiters.Load() != 0 && waiting.CompareAndSwap(false, true) }

// FreePlace ends what TakePlace began.
func FreePlace() { waiting.Store(false) }

// ThreadTime is the CPU time of the calling thread. A goroutine that compares two of them locks
// itself to its thread in between (runtime.LockOSThread).
func ThreadTime() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// InBubble reports whether the caller runs in a bubble of testing/synctest, where time passes only
// when all goroutines wait: a loop that polls for a time never ends there. There, time.Now has no
// monotonic reading.
func InBubble() bool {
	t := time.Now()
	return t == t.Round(0)
}
