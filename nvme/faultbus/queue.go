package faultbus

import (
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/internal/faultinject"
	"helios/nvme"
)

// squeue is a submission queue: the client's ring and the controller's. Bus.mu guards it.
type squeue struct {
	id      uint16
	c       *cqueue
	base    unsafe.Pointer // the client's ring, entries × 64 bytes
	entries uint32
	head    uint32  // the client's entries before it were fetched
	tailDB  *uint32 // the client's
	badTail uint32  // 1 + the invalid value that was passed on, 0 = none

	ring    ring // the controller's
	ringDB  *uint32
	tail    uint32 // of the controller's ring
	taken   uint32 // its head, as the controller last told
	rung    uint32 // the tail that the controller was told
	torn    bool   // the doorbell holds a value that is none
	tornAt  uint32 // the client's tail then: another one mends it
	ignored bool   // the controller does not see the tail doorbell any more
	closing bool   // the controller is deleting the queue

	cmds map[uint16]*cmd // outstanding, by CID
}

// place shows where an outstanding command is.
type place uint8

const (
	sent     place = iota // the controller has it
	late                  // held back; its timer runs
	due                   // its timer ran out: to be sent as soon as there is room
	swallow               // it will never complete by itself: lost or dropped
	complete              // its completion is held back
)

// cmd is an outstanding command.
type cmd struct {
	q     *squeue
	sqe   nvme.Command
	act   faultinject.Action
	at    place
	begun time.Time
	timer *time.Timer
	own   bool   // an entry of the completion queue is reserved for it
	kept  []byte // short: what the memory behind the bytes that arrive held before
	cqe   nvme.Completion
	newCQ *cqueue // Create I/O Completion Queue
	newSQ *squeue // Create I/O Submission Queue
}

// entry is a completion to be posted.
type entry struct {
	q   *squeue
	cid uint16
	dw  [2]uint32
	st  nvme.Status
	act faultinject.Action // what is wrong with it
}

// echo is a completion that is posted again after others of its queue.
type echo struct {
	e     entry
	left  int // others
	timer *time.Timer
}

// cqueue is a completion queue with the submission queues that complete to it.
type cqueue struct {
	b       *Bus
	id      uint16
	base    unsafe.Pointer // the client's ring, entries × 16 bytes
	entries uint32
	tail    uint32
	phase   bool
	head    uint32 // the client's, as last read
	headDB  *uint32
	deaf    bool // it is not read any more
	// entries that are neither used nor reserved; below 0 when additional ones took them
	free int
	sqs  []*squeue

	ring   ring // the controller's
	ringDB *uint32
	rhead  uint32
	rphase bool
	taken  uint64 // the controller's completions so far

	out     int     // commands that the controller has
	backlog []entry // completions without an entry yet
	echoes  []*echo // dup: to be posted once more
	held    []*cmd  // reorder
	flush   *time.Timer
	toSend  []*cmd // due, oldest first
	dead    bool
	wake    chan struct{} // for the goroutine that watches the controller's ring
	quit    chan struct{}
	posted  uint64
	fresh   bool          // something was posted in this turn
	seen    uint64        // posted at the end of the last wait
	waiting int           // in WaitCQ
	news    chan struct{} // closed at news while somebody is
	group   *group        // that waits for it; nil: none
}

func (b *Bus) newCQ(id uint16, mem []byte, entries uint32) (*cqueue, error) {
	if err := b.shadows(); err != nil {
		return nil, err
	}
	db, err := b.inner.Doorbell(2*uint32(id) + 1)
	if err != nil {
		return nil, err
	}
	r, err := b.alloc(int(entries) * nvme.CompletionBytes)
	if err != nil {
		return nil, err
	}
	return &cqueue{b: b, id: id, base: unsafe.Pointer(&mem[0]), entries: entries, phase: true,
		free:   int(entries) - 1,
		headDB: b.doorbell(2*uint32(id) + 1), ring: r, ringDB: db, rphase: true,
		wake: make(chan struct{}, 1), quit: make(chan struct{}), news: make(chan struct{})}, nil
}

func (b *Bus) newSQ(id uint16, mem []byte, entries uint32, c *cqueue) (*squeue, error) {
	db, err := b.inner.Doorbell(2 * uint32(id))
	if err != nil {
		return nil, err
	}
	r, err := b.alloc(int(entries) * nvme.CommandBytes)
	if err != nil {
		return nil, err
	}
	return &squeue{id: id, c: c, base: unsafe.Pointer(&mem[0]), entries: entries,
		tailDB: b.doorbell(2 * uint32(id)),
		ring:   r, ringDB: db, cmds: map[uint16]*cmd{}}, nil
}

// addCQ makes a queue that the controller has live.
func (b *Bus) addCQ(c *cqueue) {
	atomic.StoreUint32(c.headDB, 0)
	b.cqs[c.id] = c
	b.work.Go(c.watch)
}

func (b *Bus) addSQ(q *squeue) {
	atomic.StoreUint32(q.tailDB, 0)
	b.sqs[q.id] = q
	q.c.sqs = append(q.c.sqs, q)
}

// endSQ ends a queue that the controller does not have any more, or is about to lose.
func (b *Bus) endSQ(q *squeue) {
	for _, m := range q.cmds {
		if m.at == sent {
			q.c.out--
		}
		q.forget(m)
	}
	q.c.backlog = slices.DeleteFunc(q.c.backlog, func(e entry) bool { return e.q == q })
	q.c.dropEchoes(func(x *echo) bool { return x.e.q == q })
	q.c.sqs = slices.DeleteFunc(q.c.sqs, func(s *squeue) bool { return s == q })
	delete(b.sqs, q.id)
	b.remains = append(b.remains, q.ring)
}

func (b *Bus) endCQ(c *cqueue) {
	c.dead = true
	close(c.quit)
	if c.flush != nil {
		c.flush.Stop()
	}
	c.dropEchoes(func(*echo) bool { return true })
	delete(b.cqs, c.id)
	b.remains = append(b.remains, c.ring)
	c.changed() // whoever waits looks again
	c.tell()
}

// forget ends a command without a completion.
func (q *squeue) forget(m *cmd) {
	if m.timer != nil {
		m.timer.Stop()
	}
	c := q.c
	c.toSend = slices.DeleteFunc(c.toSend, func(o *cmd) bool { return o == m })
	c.held = slices.DeleteFunc(c.held, func(o *cmd) bool { return o == m })
	c.unreserve(m)
	delete(q.cmds, m.sqe.CID)
	c.b.dropRings(m)
}

func (c *cqueue) reserve(m *cmd) {
	if !m.own {
		m.own = true
		c.free--
	}
}

func (c *cqueue) unreserve(m *cmd) {
	if m.own {
		m.own = false
		c.free++
	}
}

// room reports whether there is an entry for another completion.
func (c *cqueue) room() bool {
	if c.deaf {
		return c.free > 0
	}
	h := atomic.LoadUint32(c.headDB)
	// The head moves forward over entries that were posted, and not beyond (section 3.3.1.2).
	used := (c.tail + c.entries - c.head) % c.entries
	if moved := (h + c.entries - c.head) % c.entries; h < c.entries && moved <= used {
		c.free += int(moved)
		c.head = h
	}
	return c.free > 0
}

// unused returns how many entries the client has left for the controller, reserved ones included.
func (c *cqueue) unused() int {
	c.room() // looks at the client's head
	return int(c.entries - 1 - (c.tail+c.entries-c.head)%c.entries)
}

// ringFull reports whether the controller's ring has no entry left.
func (q *squeue) ringFull() bool { return (q.tail+1)%q.entries == q.taken }

// waits reports whether the client's ring holds commands.
func (q *squeue) waits() bool {
	t := atomic.LoadUint32(q.tailDB)
	return t != q.head && t < q.entries && !q.ignored && !q.closing
}

// serve carries on a completion queue and all that completes to it. The caller holds mu.
func (b *Bus) serve(c *cqueue) {
	for again := true; again && !c.dead && !b.stopped(); {
		again = c.collect()
		for len(c.backlog) > 0 && c.room() {
			e := c.backlog[0]
			c.backlog = c.backlog[1:]
			c.free--
			c.post(e)
		}
		for len(c.toSend) > 0 && c.room() && !c.toSend[0].q.ringFull() && !c.toSend[0].q.closing &&
			!b.stopped() {
			m := c.toSend[0]
			c.toSend = c.toSend[1:]
			c.reserve(m)
			c.send(m)
			again = true
		}
		for _, q := range slices.Clone(c.sqs) {
			again = q.fetch() || again
		}
		for _, q := range c.sqs {
			q.announce()
		}
	}
	b.watchRoom(c)
}

// fetch takes commands from the client's ring.
func (q *squeue) fetch() (any bool) {
	c, b := q.c, q.c.b
	tail := atomic.LoadUint32(q.tailDB)
	if tail >= q.entries {
		if !q.ignored && q.badTail != tail+1 { // the controller shall see it too
			q.badTail = tail + 1
			nvme.StoreDoorbell(q.ringDB, tail)
			b.kick(q.id)
		}
		return false
	}
	if q.badTail != 0 {
		q.badTail = 0
		nvme.StoreDoorbell(q.ringDB, q.rung)
	}
	if q.torn && tail != q.tornAt {
		q.torn = false
		q.rung = q.entries // told nothing valid
	}
	for q.head != tail && !q.ignored && !q.closing && c.room() && !q.ringFull() && !b.stopped() &&
		!c.dead {
		sqe := *(*nvme.Command)(unsafe.Add(q.base, uintptr(q.head)*nvme.CommandBytes))
		m := &cmd{q: q, sqe: sqe, begun: time.Now()}
		m.act, _ = b.match(q, &sqe)
		if m.act.Stuck {
			q.ignored = true
			return any
		}
		if q.head++; q.head == q.entries {
			q.head = 0
		}
		any = true
		c.reserve(m)
		c.begin(m)
	}
	return any
}

// announce rings the controller's doorbell for what was copied.
func (q *squeue) announce() {
	if q.torn || q.rung == q.tail {
		return
	}
	q.rung = q.tail
	nvme.StoreDoorbell(q.ringDB, q.tail)
	q.c.b.kick(q.id)
	select {
	case q.c.wake <- struct{}{}:
	default:
	}
}

func (b *Bus) kick(qid uint16) {
	if b.kicker != nil {
		b.kicker.Kick(qid)
	}
}

// begin starts a fetched command, whose entry is reserved.
func (c *cqueue) begin(m *cmd) {
	q, b, act := m.q, c.b, m.act
	if _, taken := q.cmds[m.sqe.CID]; taken {
		m.own = false // its reservation goes to the refusal
		c.post(entry{q: q, cid: m.sqe.CID, st: nvme.StatusCommandIDConflict.WithDNR()})
		return
	}
	q.cmds[m.sqe.CID] = m
	if act.CQStuck {
		c.room() // what the client freed so far counts
		c.deaf = true
	}
	switch {
	case act.Gone:
		b.gone.Store(true)
		b.left = true
		m.at = swallow
	case act.CFS:
		b.cfs = true
		m.at = swallow
	case act.Drop:
		m.at = swallow
	case act.Delay > 0:
		m.at = late
		m.timer = time.AfterFunc(act.Delay, func() { b.expired(m, late) })
	default:
		c.send(m)
		return
	}
	c.unreserve(m)
}

// expired moves a command on whose timer ran out.
func (b *Bus) expired(m *cmd, from place) {
	b.mu.Lock()
	defer b.unlock()
	c := m.q.c
	if c.dead || m.q.cmds[m.sqe.CID] != m || m.at != from {
		return
	}
	if from == late {
		m.at = due
		c.toSend = append(c.toSend, m)
	} else {
		c.conclude(m)
	}
	b.serve(c)
}

// send hands a command to the controller, or completes it in its place.
func (c *cqueue) send(m *cmd) {
	q, b, act := m.q, c.b, m.act
	m.at = sent
	c.out++
	answer := func(dw0 uint32, st nvme.Status) {
		c.answered(m, nvme.Completion{DW0: dw0, CID: m.sqe.CID, StatusPhase: nvme.StatusPhase(st,
			false)})
	}
	if act.Fail {
		st := nvme.NewStatus(act.SCT, act.SC, act.DNR)
		if q.id != 0 {
			b.failed.count(m.sqe.Opcode, st)
		}
		answer(0, st)
		return
	}
	sqe := m.sqe
	if q.id == 0 {
		if done, dw0, st := b.admin(m, &sqe); done {
			answer(dw0, st)
			return
		}
	} else if !b.divert(m, &sqe) { // nothing of it lands
		answer(0, nvme.StatusSuccess)
		return
	}
	*(*nvme.Command)(unsafe.Pointer(&q.ring.mem[q.tail*nvme.CommandBytes])) = sqe
	if q.tail++; q.tail == q.entries {
		q.tail = 0
	}
	if act.TornDoorbell {
		q.torn, q.tornAt = true, atomic.LoadUint32(q.tailDB)
		nvme.StoreDoorbell(q.ringDB, q.entries+0x5a5a)
		b.kick(q.id)
	}
}

// collect takes the controller's completions.
func (c *cqueue) collect() (any bool) {
	for {
		p := (*nvme.Completion)(unsafe.Pointer(&c.ring.mem[c.rhead*nvme.CompletionBytes]))
		e, ok := nvme.LoadCompletion(p, c.rphase)
		if !ok {
			break
		}
		if c.rhead++; c.rhead == c.entries {
			c.rhead, c.rphase = 0, !c.rphase
		}
		any = true
		c.taken++
		q := c.b.sqs[e.SQID]
		if q == nil || q.c != c {
			continue // of a queue that was deleted meanwhile
		}
		if uint32(e.SQHead) < q.entries {
			q.taken = uint32(e.SQHead)
		}
		if m := q.cmds[e.CID]; m != nil && m.at == sent {
			c.answered(m, e)
			if c.dead {
				return false
			}
		}
	}
	if any {
		nvme.StoreDoorbell(c.ringDB, c.rhead)
	}
	return any
}

// answered takes a command's completion by the controller, or what stands for one.
func (c *cqueue) answered(m *cmd, e nvme.Completion) {
	q, b, act := m.q, c.b, m.act
	c.out--
	m.at = complete
	m.cqe = e
	if q.id == 0 {
		b.adminDone(m)
		if c.dead {
			return
		}
	}
	if st := e.Status(); st.OK() && q.id != 0 {
		b.spoil(m)
	}
	wait := act.Slow - time.Since(m.begun)
	switch {
	case act.Lost:
		m.at = swallow
		c.unreserve(m)
	case act.Slow > 0 && wait > 0:
		m.timer = time.AfterFunc(wait, func() { b.expired(m, complete) })
	default:
		c.conclude(m)
	}
}

// conclude posts a command's completion, or holds it for others to come first.
func (c *cqueue) conclude(m *cmd) {
	if n := m.act.Reorder; n > 1 {
		m.act.Reorder = 0
		c.held = append(c.held, m)
		if len(c.held) >= n {
			c.letGo()
		} else if len(c.held) == 1 {
			if c.flush == nil {
				c.flush = time.AfterFunc(reorderTime, c.flushed)
			} else {
				c.flush.Reset(reorderTime)
			}
		}
		return
	}
	e := entry{q: m.q, cid: m.sqe.CID, dw: [2]uint32{m.cqe.DW0, m.cqe.DW1}, st: m.cqe.Status(),
		act: m.act}
	reserved := m.own
	m.own = false // its reservation goes to the entry
	delete(m.q.cmds, m.sqe.CID)
	if !reserved {
		c.postUnreserved(e)
		return
	}
	c.post(e)
}

// reorderTime bounds how long completions are held back to change their order.
const reorderTime = 2 * time.Millisecond

func (c *cqueue) flushed() {
	c.b.mu.Lock()
	defer c.b.unlock()
	if !c.dead && !c.b.stopped() {
		c.letGo()
		c.b.serve(c)
	}
}

// letGo posts what reorder held back, the last first.
func (c *cqueue) letGo() {
	held := c.held
	c.held = nil
	c.flush.Stop()
	for _, m := range slices.Backward(held) {
		c.conclude(m)
	}
}

func (c *cqueue) postUnreserved(e entry) {
	if len(c.backlog) == 0 && c.room() {
		c.free--
		c.post(e)
		return
	}
	c.backlog = append(c.backlog, e)
}

// post writes a completion, for which an entry is reserved, with all that is wrong with it.
// Additional entries may take those that others have reserved, which then wait.
func (c *cqueue) post(e entry) {
	act := e.act
	e.act.Foreign, e.act.Dup = false, false
	if act.Dup && act.DupAfter > 0 {
		act.Dup = false
		c.again(e, act.DupAfter)
	}
	unused := c.unused()
	if act.Foreign && unused > 0 {
		c.free--
		unused--
		c.write(entry{q: e.q, cid: act.ForeignCID})
	} else if act.Foreign {
		c.backlog = append(c.backlog, entry{q: e.q, cid: act.ForeignCID})
	}
	if unused > 0 {
		defer c.passed()
	}
	switch {
	case unused == 0:
		c.free++ // its reservation is worth nothing now
		c.backlog = append(c.backlog, e)
		if act.Dup {
			c.backlog = append(c.backlog, e)
		}
	case act.Dup && unused > 1:
		c.free--
		c.twice(e)
	default:
		c.write(e)
		if act.Dup {
			c.backlog = append(c.backlog, e)
		}
	}
}

// echoWait is Options.EchoWait where that is not set.
const echoWait = 2 * time.Millisecond

// again has an entry posted once more, after n others; it counts as the first itself.
func (c *cqueue) again(e entry, n int) {
	x := &echo{e: e, left: n + 1}
	x.timer = time.AfterFunc(c.b.opt.EchoWait, func() {
		c.b.mu.Lock()
		defer c.b.unlock()
		if c.dead || c.b.stopped() || !slices.Contains(c.echoes, x) {
			return
		}
		x.left = 0
		c.letEchoes()
		c.b.serve(c)
	})
	c.echoes = append(c.echoes, x)
}

// passed notes that a completion was posted.
func (c *cqueue) passed() {
	for _, x := range c.echoes {
		x.left--
	}
	c.letEchoes()
}

// letEchoes posts the echoes whose time has come, as additional entries.
func (c *cqueue) letEchoes() {
	c.dropEchoes(func(x *echo) bool {
		if x.left > 0 {
			return false
		}
		if len(c.backlog) == 0 && c.unused() > 0 {
			c.free--
			c.write(x.e)
		} else {
			c.backlog = append(c.backlog, x.e)
		}
		return true
	})
}

// dropEchoes takes out the echoes that gone is true of.
func (c *cqueue) dropEchoes(gone func(*echo) bool) {
	c.echoes = slices.DeleteFunc(c.echoes, func(x *echo) bool {
		if !gone(x) {
			return false
		}
		x.timer.Stop()
		return true
	})
}

// twice writes an entry twice, the second one first: the client sees both or none.
func (c *cqueue) twice(e entry) {
	tail, phase := c.tail, c.phase
	c.advance()
	c.store(e)
	next, nextPhase := c.tail, c.phase
	c.tail, c.phase = tail, phase
	c.store(e)
	c.tail, c.phase = next, nextPhase
	c.advance()
}

// write fills the next entry.
func (c *cqueue) write(e entry) {
	c.store(e)
	c.advance()
}

func (c *cqueue) store(e entry) {
	v := nvme.Completion{DW0: e.dw[0], DW1: e.dw[1], SQHead: uint16(e.q.head), SQID: e.q.id,
		CID:         e.cid,
		StatusPhase: nvme.StatusPhase(e.st, c.phase != e.act.Phase)}
	if e.act.SQHead {
		v.SQHead = uint16(e.q.entries) + 7
	}
	if e.act.SQID {
		v.SQID += 1
	}
	nvme.StoreCompletion((*nvme.Completion)(unsafe.Add(c.base,
		uintptr(c.tail)*nvme.CompletionBytes)), v)
}

func (c *cqueue) advance() {
	if c.tail++; c.tail == c.entries {
		c.tail, c.phase = 0, !c.phase
	}
	c.changed()
}
