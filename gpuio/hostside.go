package gpuio

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/nvme"
)

// hostSide holds what host kernels need that is not device memory: the buses' doorbell kicks and
// waits. A parameter block names it by a handle. On a GPU kernels ring and poll by themselves.
type hostSide struct {
	kickers []nvme.Kicker // by SSD; nil: the controller sees doorbells by itself
	parks   []blockPark   // by block of the complete kernel
	sync    *syncSide     // of the sync stack
	sums    []uint32      // that rows are held against as they land; nil: they are not
	crcs    int           // setShape.crcs
}

// blockPark describes how one block of the complete kernel waits. fn is made once, so that a wait
// allocates nothing.
type blockPark struct {
	group   nvme.CQGroup  // nil: the bus cannot wait for several queues
	waiters []queueWaiter // then: each queue's own way
	poll    bool          // a queue has none
	d       time.Duration
	fn      func()
}

type queueWaiter struct {
	w   nvme.Waiter // nil: the queue must be looked at
	q   *queueState
	qid *uint32
}

// pollSlice bounds a wait for one queue while others of the block may complete.
const pollSlice = 200 * time.Microsecond

func (p *blockPark) init() {
	for _, w := range p.waiters {
		p.poll = p.poll || w.w == nil
	}
	p.fn = func() {
		switch {
		case p.group != nil:
			p.group.Wait(p.d)
			return
		case p.poll:
			p.pollQueues()
			return
		}
		d := p.d
		if len(p.waiters) > 1 {
			d = min(d, pollSlice)
		}
		for _, w := range p.waiters {
			w.w.WaitCQ(uint16(atomic.LoadUint32(w.qid)), d)
		}
	}
}

// wait lets the controllers of the block's queues work, and for d > 0 gives the SM slot up until a
// completion may be there.
func (h *hostSide) wait(b *cuda.Block, d time.Duration) { h.waitAt(b, b.Index, d) }

// waitAt waits for the queues of block i of the complete kernel, for which one block at a time may.
func (h *hostSide) waitAt(b *cuda.Block, i int, d time.Duration) {
	p := &h.parks[i]
	p.d = d
	switch {
	case d > 0:
		b.Park(p.fn)
	case p.group != nil:
		b.Pause() // the controllers' work
		p.group.Wait(0)
		b.Resume()
	default:
		b.Yield()
	}
}

func (h *hostSide) kick(ssd uint32, qid uint16) {
	if k := h.kickers[ssd]; k != nil {
		k.Kick(qid)
	}
}

var hostSides struct {
	sync.RWMutex
	next uint64
	m    map[uint64]*hostSide
}

func registerHostSide(h *hostSide) uint64 {
	hostSides.Lock()
	defer hostSides.Unlock()
	if hostSides.m == nil {
		hostSides.m = map[uint64]*hostSide{}
	}
	hostSides.next++
	hostSides.m[hostSides.next] = h
	return hostSides.next
}

func dropHostSide(handle uint64) {
	hostSides.Lock()
	defer hostSides.Unlock()
	delete(hostSides.m, handle)
}

func hostSideOf(handle uint64) (*hostSide, error) {
	hostSides.RLock()
	defer hostSides.RUnlock()
	if h := hostSides.m[handle]; h != nil {
		return h, nil
	}
	return nil, fmt.Errorf("gpuio: no engine has handle %d", handle)
}

var clockEpoch = time.Now()

// nanotime is monotonic time in nanoseconds, the clock of command deadlines. It is never negative,
// not even in a bubble of testing/synctest, where it is 2000.
func nanotime() int64 { return int64(time.Since(clockEpoch)) + clockStart }

const clockStart = 1 << 61 // 73 years
