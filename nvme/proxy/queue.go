package proxy

import (
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/iouring"
	"helios/nvme"
)

// serveBatch bounds the commands that one turn at a queue executes, so that completions in
// flight are seen to in between.
const serveBatch = 256

// drainTime bounds how long a reset, a queue deletion or an unmapping waits for transfers
// that the kernel has begun.
const drainTime = 20 * time.Second

// squeue is a submission queue as the controller sees it. Its completion queue's lock
// guards it.
type squeue struct {
	id      uint16
	cq      *cqueue
	base    unsafe.Pointer // entries × 64 bytes
	entries uint32
	head    uint32
	tailDB  *uint32

	out  int           // commands that were fetched and are not complete
	cids *[1024]uint64 // their CIDs, a bit each; made when first needed
}

func (q *squeue) hold(cid uint16) {
	if q.cids == nil {
		q.cids = new([1024]uint64)
	}
	q.cids[cid>>6] |= 1 << (cid & 63)
	q.out++
}

func (q *squeue) unhold(cid uint16) {
	q.cids[cid>>6] &^= 1 << (cid & 63)
	q.out--
}

// held reports whether a command with this CID is outstanding.
func (q *squeue) held(cid uint16) bool { return q.out != 0 && q.cids[cid>>6]>>(cid&63)&1 != 0 }

// slot is a command in the io_uring.
type slot struct {
	busy   bool // it is there; false: the slot is free
	dsync  bool
	sq     *squeue
	cmd    nvme.Command
	due    int64 // Config.Model: not complete before
	off    int64 // byte offset and length on the medium
	bytes  int64
	segs   []seg
	iov    []iouring.Iovec
	bounce []byte // whole O_DIRECT units around [off, off+bytes)
	skip   int64  // where off is in bounce
}

// touches reports whether the transfer of s works on memory between lo and hi.
func (s *slot) touches(lo, hi uintptr) bool {
	for _, g := range s.segs {
		if p := uintptr(g.ptr); p < hi && lo < p+uintptr(g.n) {
			return true
		}
	}
	return false
}

// entry is a completion that waits to be posted.
type entry struct {
	sq  *squeue
	cid uint16
	dw0 uint32
	st  nvme.Status
}

// counters are the SMART counters that one completion queue's commands add to.
type counters struct {
	reads, writes         uint64 // commands
	bytesRead, bytesWrite uint64
	mediaErrors           uint64
}

func (t *counters) add(c counters) {
	t.reads += c.reads
	t.writes += c.writes
	t.bytesRead += c.bytesRead
	t.bytesWrite += c.bytesWrite
	t.mediaErrors += c.mediaErrors
}

// cqueue is a completion queue with the submission queues that complete to it: the unit of
// the controller's work.
type cqueue struct {
	bus *Bus
	id  uint16

	// posted counts the entries posted so far; it is published after a batch. Its owner's
	// waiter compares it with seen.
	posted atomic.Uint64
	seen   uint64 // belongs to the waiting party
	waiter atomic.Pointer[waiter]
	r      atomic.Pointer[reactor]
	kicks  atomic.Uint32

	mu      *sync.Mutex // guards all below; the admin queue's is Bus.mu
	ownMu   sync.Mutex
	dead    bool // deleted: do nothing
	base    unsafe.Pointer
	entries uint32
	tail    uint32
	phase   uint64 // 1 or 0
	head    uint32 // the host's head as last read
	headDB  *uint32
	free    int // entries that are neither used nor promised to a command
	nposted uint64
	sqs     []*squeue
	backlog []entry // completions without an entry yet
	held    []entry // OutOfOrder: completions of this turn
	rng     uint64

	timed    timedHeap // Config.Model: completions whose time has not come
	timedSeq uint64
	next     atomic.Int64 // nextDue(), published after a turn

	index    uint32 // in the reactor's table
	slots    []slot
	freeSlot []int32
	inKernel int
	drained  chan struct{} // closed when a slot leaves the kernel; nil = nobody asks
	ringHeld bool          // the reactor's submission lock is taken for this turn

	tlb  tlb
	segs []seg
	// The command that is being copied from or to a RAM SSD, for turnOverRAM.
	copying *squeue
	copyCmd nvme.Command
	copyDue int64

	count counters
}

// memoryIn reports whether one of the rings lies between lo and hi.
func (c *cqueue) memoryIn(lo, hi uintptr) bool {
	in := func(p unsafe.Pointer, n uintptr) bool { return uintptr(p) < hi && lo < uintptr(p)+n }
	if in(c.base, uintptr(c.entries)*nvme.CompletionBytes) {
		return true
	}
	for _, q := range c.sqs {
		if in(q.base, uintptr(q.entries)*nvme.CommandBytes) {
			return true
		}
	}
	return false
}

// room reports whether another command may be fetched: its completion needs an entry.
func (c *cqueue) room() bool {
	if c.free > 0 {
		return true
	}
	h := atomic.LoadUint32(c.headDB)
	if h == c.head {
		return false
	}
	// The head moves forward over entries that were posted, and not beyond (section 3.3.1.2).
	n := c.entries
	used := (c.tail + n - c.head) % n
	if h >= n || (h+n-c.head)%n > used {
		return false
	}
	c.free += int((h + n - c.head) % n)
	c.head = h
	return c.free > 0
}

// serve executes what the submission queues hold, as far as there is room for completions.
// The caller holds the lock and releases it with unlock.
func (c *cqueue) serve() {
	if c.dead || c.bus.stopped() {
		return
	}
	if c.bus.back.mem == nil && c.bus.back.calc == nil {
		c.turn()
		return
	}
	for c.turnOverRAM() {
	}
}

// turnOverRAM is a turn whose copies may fault, over memory or computed content: a page of the file
// is not there any more when somebody truncated it, or when its filesystem is full (SIGBUS). That
// is an error of the command, after which the turn goes on (true), and not the end of the process.
func (c *cqueue) turnOverRAM() (again bool) {
	old := debug.SetPanicOnFault(true) // of this goroutine
	defer func() {
		debug.SetPanicOnFault(old)
		x := recover()
		if x == nil {
			return
		}
		off, fault := x.(interface{ Addr() uintptr })
		q := c.copying
		if !fault || q == nil {
			panic(x)
		}
		var err error = unix.EFAULT // the host took its memory away
		if mem := c.bus.back.mem; len(mem) > 0 &&
			off.Addr()-uintptr(unsafe.Pointer(&mem[0])) < uintptr(len(mem)) {
			err = io.ErrUnexpectedEOF
		}
		cmd, due := c.copyCmd, c.copyDue
		c.copying = nil
		c.finish(q, &cmd, 0, c.bus.mediaStatus(cmd.Opcode, err), due)
		again = true
	}()
	c.turn()
	return false
}

func (c *cqueue) turn() {
	c.catchUp()
	c.postTimed()
	budget := serveBatch
	for _, q := range c.sqs {
		tail := atomic.LoadUint32(q.tailDB)
		if tail >= q.entries { // no place in the queue: not heard
			continue
		}
		for q.head != tail && budget > 0 && c.room() && !c.ringFull() {
			cmd := (*nvme.Command)(unsafe.Add(q.base, uintptr(q.head)*nvme.CommandBytes))
			if q.head++; q.head == q.entries {
				q.head = 0
			}
			c.free--
			if budget--; budget%16 == 0 {
				c.postTimed()
			}
			if c.id == 0 {
				c.bus.admin(q, *cmd)
			} else {
				c.fetch(q, cmd)
			}
		}
	}
}

// catchUp posts completions that had to wait for an entry.
func (c *cqueue) catchUp() {
	for len(c.backlog) > 0 && c.room() {
		e := c.backlog[0]
		c.backlog = c.backlog[1:]
		c.free--
		c.post(e)
	}
}

// pending reports whether a turn would find something to do now, whether the kernel works for this
// queue, and when the next completion is due. The caller holds the lock.
func (c *cqueue) pending() (work, kernel bool, due int64) {
	if c.dead || c.bus.stopped() {
		return false, c.inKernel > 0, never
	}
	kernel, due = c.inKernel > 0, c.nextDue()
	work = due != never && due <= nanotime()
	if c.ringFull() {
		return work, kernel, due
	}
	more := len(c.backlog) != 0
	for _, q := range c.sqs {
		if t := atomic.LoadUint32(q.tailDB); t != q.head && t < q.entries {
			more = true
		}
	}
	return work || more && c.room(), kernel, due
}

// stuck reports whether commands wait for the host to consume completions. A host that frees
// entries rings only the head doorbell, which nobody has to announce. The caller holds the
// lock.
func (c *cqueue) stuck() bool {
	if c.dead || c.bus.stopped() {
		return false
	}
	for _, q := range c.sqs {
		if t := atomic.LoadUint32(q.tailDB); t != q.head && t < q.entries {
			return true
		}
	}
	return len(c.backlog)|len(c.timed) != 0
}

// ringFull reports whether the io_uring has as many operations in flight as it can complete.
func (c *cqueue) ringFull() bool {
	r := c.r.Load()
	return r.ring != nil && r.inflight.Load() >= int64(r.ring.CQEntries())
}

// complete finishes a command whose completion queue entry is reserved.
func (c *cqueue) complete(q *squeue, cid uint16, dw0 uint32, st nvme.Status) {
	c.settle(entry{q, cid, dw0, st})
}

// settle posts a completion, or lets it change places with others of this turn.
func (c *cqueue) settle(e entry) {
	if c.bus.cfg.OutOfOrder && c.id != 0 {
		c.held = append(c.held, e)
		return
	}
	c.post(e)
}

// post writes the next completion queue entry, which is free.
func (c *cqueue) post(e entry) {
	hi := uint64(e.sq.head) | uint64(e.sq.id)<<16 | uint64(e.cid)<<32 |
		(uint64(e.st)<<1|c.phase)<<48
	storeEntry((*[2]uint64)(unsafe.Add(c.base, uintptr(c.tail)*nvme.CompletionBytes)),
		uint64(e.dw0), hi)
	if c.tail++; c.tail == c.entries {
		c.tail = 0
		c.phase ^= 1
	}
	c.nposted++
}

// unlock ends a turn: it publishes submissions and completions and wakes who waits for them.
func (c *cqueue) unlock() {
	for len(c.held) > 0 { // a fixed pseudo-random order (xorshift)
		c.rng ^= c.rng << 13
		c.rng ^= c.rng >> 7
		c.rng ^= c.rng << 17
		i, last := int(c.rng%uint64(len(c.held))), len(c.held)-1
		c.post(c.held[i])
		c.held[i] = c.held[last]
		c.held = c.held[:last]
	}
	if c.ringHeld {
		c.ringHeld = false
		r := c.r.Load()
		r.ring.Flush()
		r.sqMu.Unlock()
	}
	news := c.nposted != c.posted.Load()
	if news {
		c.posted.Store(c.nposted)
	}
	if due := c.nextDue(); due != c.next.Load() {
		news = news || due < c.next.Load() // a party that sleeps does so for too long
		c.next.Store(due)
	}
	c.mu.Unlock()
	if news {
		if w := c.waiter.Load(); w != nil {
			w.wake()
		}
	}
}

// sqe takes the reactor's submission side for the rest of the turn and returns an entry, or
// nil when the kernel takes no more.
func (c *cqueue) sqe() *iouring.SQE {
	r := c.r.Load()
	if !c.ringHeld {
		r.sqMu.Lock()
		c.ringHeld = true
	}
	e := r.ring.SQE()
	if e == nil {
		r.ring.Flush()
		if err := r.ring.Submit(); err != nil {
			return nil
		}
		if e = r.ring.SQE(); e == nil {
			return nil
		}
	}
	r.inflight.Add(1)
	return e
}

// take returns a free slot for a command.
func (c *cqueue) take(q *squeue, cmd *nvme.Command) int32 {
	if len(c.freeSlot) == 0 {
		// Commands outstanding have distinct CIDs, which bounds the table.
		c.slots = append(c.slots, slot{})
		c.freeSlot = append(c.freeSlot, int32(len(c.slots)-1))
	}
	i := c.freeSlot[len(c.freeSlot)-1]
	c.freeSlot = c.freeSlot[:len(c.freeSlot)-1]
	s := &c.slots[i]
	s.sq, s.cmd = q, *cmd
	return i
}

func (c *cqueue) release(i int32) {
	s := &c.slots[i]
	if s.bounce != nil {
		c.bus.putBounce(s.bounce)
	}
	*s = slot{segs: s.segs[:0], iov: s.iov[:0]}
	c.freeSlot = append(c.freeSlot, i)
}

// dropAll forgets the completions of a submission queue (nil: of all) whose time has not come.
func (c *cqueue) dropAll(q *squeue) { c.free += c.timed.remove(q) }

// drain waits until no transfer in the kernel is one that matters. The caller does not hold
// the lock.
func (c *cqueue) drain(deadline time.Time, matters func(*slot) bool) error {
	for {
		c.mu.Lock()
		busy := false
		for i := range c.slots {
			busy = busy || c.slots[i].busy && matters(&c.slots[i])
		}
		if !busy {
			c.mu.Unlock()
			return nil
		}
		if c.drained == nil {
			c.drained = make(chan struct{})
		}
		done := c.drained
		c.mu.Unlock()
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("queue %d: transfers in progress did not end in %v", c.id, drainTime)
		}
		c.r.Load().help(done, min(left, 100*time.Millisecond))
	}
}
