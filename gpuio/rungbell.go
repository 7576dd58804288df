package gpuio

import (
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/nvme"
)

// Rung pinned-cpubell: kernels store tails and heads to bells in pinned memory, and one CPU thread
// for each engine hands them on to the SSDs' doorbells, which the device cannot reach.
//
// None is missed, although a bell holds only its last value: a tail moves on by less than a ring's
// length beyond what the SSD was told of, since the commands between have not completed, and a head
// likewise. So a bell that was rung since the last look differs from then. (The kernel's stores
// before the bell are fenced, and the SSD reads them after its doorbell.)
//
// While sets are in flight the thread looks at all bells without a break for as long as something
// rings, and for a while longer; then it naps, so that a bell waits bellNap at most. Without sets
// it sleeps until there is one.

// bellNap bounds how long a bell waits, beside the time of a nap's end.
const bellNap = 200 * time.Microsecond

// bellBytes is a queue's place in the memory of bells: SQ tail and CQ head. One cache line each,
// since that is what the device's store takes from the CPU.
const bellBytes = 64

// bells are the bells of an engine.
type bells struct {
	buf  cuda.Buffer
	stop chan struct{}
	wake chan struct{} // one token
	done chan struct{}
	once sync.Once
	sets atomic.Int64 // in flight

	mu     sync.Mutex // doorbells are stored to under it
	queues []bellQueue

	rung  atomic.Int64 // doorbells stored to
	looks atomic.Int64 // passes over the bells
}

// bellQueue is one queue's way to its doorbells.
type bellQueue struct {
	sq, cq         *uint32 // nil: the queue pair does not exist, or its controller is being reset
	kicker         nvme.Kicker
	qid            uint16
	sqSeen, cqSeen uint32 // what the SSD was told
}

// newBells starts the thread for so many queues.
func newBells(s *side, queues int) (*bells, error) {
	buf, err := s.alloc(int64(queues*bellBytes), "gpuio bells")
	if err != nil {
		return nil, err
	}
	b := &bells{buf: buf, stop: make(chan struct{}), wake: make(chan struct{}, 1),
		done: make(chan struct{}), queues: make([]bellQueue, queues)}
	go b.run()
	return b, nil
}

// at is the address of a queue's SQ bell; its CQ bell follows.
func (b *bells) at(g int) cuda.DevicePtr { return b.buf.Ptr() + cuda.DevicePtr(g*bellBytes) }

// bell returns what the CPU sees of them.
func (b *bells) bell(g int) (sq, cq *uint32) {
	p := unsafe.Pointer(&b.buf.Bytes()[g*bellBytes])
	return (*uint32)(p), (*uint32)(unsafe.Add(p, 4))
}

// attach connects a queue's bells with the doorbells of a fresh queue pair. No kernel uses the
// queue.
func (b *bells) attach(g int, qp *nvme.QueuePair, k nvme.Kicker) {
	b.mu.Lock()
	defer b.mu.Unlock()
	sq, cq := b.bell(g)
	atomic.StoreUint32(sq, 0)
	atomic.StoreUint32(cq, 0)
	b.queues[g] = bellQueue{sq: qp.SQDoorbell, cq: qp.CQDoorbell, kicker: k, qid: qp.ID}
}

// detach disconnects them. When it returns, the queue pair's doorbells are stored to no more.
func (b *bells) detach(g int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queues[g] = bellQueue{}
}

// begin and end count sets in flight.
func (b *bells) begin() {
	if b.sets.Add(1) == 1 {
		select {
		case b.wake <- struct{}{}:
		default: // it is awake, or will be
		}
	}
}

func (b *bells) end() { b.sets.Add(-1) }

// close ends the thread.
func (b *bells) close() {
	b.once.Do(func() { close(b.stop) })
	<-b.done
}

func (b *bells) run() {
	defer close(b.done)
	var nap napper
	for {
		select {
		case <-b.stop:
			return
		default:
		}
		idle := b.sets.Load() == 0 // before the look, which is the last then
		switch {
		case b.pass():
			nap = napper{}
		case idle:
			select {
			case <-b.stop:
				return
			case <-b.wake:
			}
			nap = napper{}
		default:
			nap.pause(bellNap)
		}
	}
}

// pass hands on what has rung, and reports whether anything has.
func (b *bells) pass() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.looks.Add(1)
	n := int64(0)
	for g := range b.queues {
		q := &b.queues[g]
		if q.sq == nil {
			continue
		}
		sqBell, cqBell := b.bell(g)
		// First the room for completions, then the commands that cause some. The SQ bell is loaded
		// first: the kernel has rung the CQ bell before it gives CIDs back, so the CQ bell that is
		// loaded after it tells of the room for all commands that it tells of.
		tail := atomic.LoadUint32(sqBell) // litmus: bell-pass
		head := atomic.LoadUint32(cqBell) // litmus: bell-pass
		if head != q.cqSeen {
			q.cqSeen = head
			nvme.StoreDoorbell(q.cq, head) // litmus: bell-pass
			n++
		}
		if tail != q.sqSeen {
			q.sqSeen = tail
			nvme.StoreDoorbell(q.sq, tail) // litmus: bell-pass
			if q.kicker != nil {
				q.kicker.Kick(q.qid)
			}
			n++
		}
	}
	if n > 0 {
		b.rung.Add(n)
	}
	return n > 0
}
