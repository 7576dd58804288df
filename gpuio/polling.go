package gpuio

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"helios/nvme"
)

// Real SSDs neither wait nor wake: whoever wants their completions looks at the queues. A look
// costs a read of memory, so it is repeated at once for as long as a read usually takes, with the
// goroutine's turn given away in between. After that come naps in proportion to the time that has
// passed: a wait is at most an eighth longer than it need be, and takes next to no CPU once it is
// long.
//
// A nap is a system call of its own: Go's timers are up to a millisecond late when all goroutines
// wait.
const (
	pollFor  = 100 * time.Microsecond
	napLeast = 10 * time.Microsecond
	napMost  = time.Millisecond
)

// napper paces the looks of one wait.
type napper struct{ began int64 }

// pause comes between two looks; it takes no longer than d.
func (n *napper) pause(d time.Duration) {
	now := nanotime()
	if n.began == 0 {
		n.began = now
	}
	waited := time.Duration(now - n.began)
	if waited < pollFor {
		runtime.Gosched()
		return
	}
	d = min(d, max(waited/8, napLeast), napMost)
	if d <= 0 {
		return
	}
	// of this thread, whichever it is: 50 µs otherwise
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	ts := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&ts, nil) // a signal may end it early
}

// waitCQ waits until a queue may have a completion. A bus that cannot wait has its queue looked at
// after a pause.
func waitCQ(w nvme.Waiter, qid uint16, d time.Duration, n *napper) {
	if w != nil {
		w.WaitCQ(qid, d)
		return
	}
	n.pause(d)
}

// pollQueues looks at the block's queues until one has a new entry, or is frozen, or d has passed.
func (p *blockPark) pollQueues() {
	var n napper
	end := nanotime() + int64(p.d)
	frozen := p.frozen()
	for {
		for i := range p.waiters {
			w := &p.waiters[i]
			if w.w != nil { // beside others: a bus with faults in front of it
				w.w.WaitCQ(uint16(atomic.LoadUint32(w.qid)), 0)
			}
			if w.q.arrived() {
				return
			}
		}
		left := end - nanotime()
		if left <= 0 || p.frozen() != frozen {
			return
		}
		n.pause(time.Duration(left))
	}
}

// frozen counts the block's queues that kernels leave alone.
func (p *blockPark) frozen() int {
	n := 0
	for i := range p.waiters {
		if atomic.LoadUint32(&p.waiters[i].q.Frozen) != frozenNo {
			n++
		}
	}
	return n
}

// arrived reports whether a queue has a new completion, or somebody is just looking. Of a queue
// that is frozen not even the memory may be left.
func (q *queueState) arrived() bool {
	if !atomic.CompareAndSwapUint32(&q.Reap, 0, 1) {
		return atomic.LoadUint32(&q.Frozen) == frozenNo
	}
	yes := false
	if atomic.LoadUint32(&q.Frozen) == frozenNo {
		yes = q.completion(q.Head)>>16&1 == q.Phase
	}
	atomic.StoreUint32(&q.Reap, 0)
	return yes
}
