package faultbus

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"helios/nvme"
)

// changed notes that a queue has news.
func (c *cqueue) changed() {
	c.posted++
	c.fresh = true
}

// unlock ends a turn: it stops a controller that has gone, and wakes who waits for completions.
func (b *Bus) unlock() {
	if b.left {
		b.left = false
		_ = b.stop() // what it reaches stays mapped if this fails; Close tries again and says so
	}
	for _, c := range b.cqs {
		c.tell()
	}
	b.mu.Unlock()
}

// tell wakes who waits for a queue with news.
func (c *cqueue) tell() {
	if !c.fresh {
		return
	}
	c.fresh = false
	if c.waiting > 0 {
		close(c.news)
		c.news = make(chan struct{})
		c.waiting = 0
	}
	if c.group != nil {
		c.group.notify()
	}
}

// The sleeps of a completion queue's goroutine: where the controller can wake it, and between looks
// at its ring.
const (
	watchTime = 100 * time.Millisecond
	lookFirst = 20 * time.Microsecond
	lookMost  = time.Millisecond
)

// watch waits for the controller's completions as long as commands are out.
func (c *cqueue) watch() {
	b := c.b
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	nap := func(d time.Duration) bool {
		timer.Reset(d)
		select {
		case <-timer.C:
		case <-c.wake:
		case <-c.quit:
			return false
		}
		return true
	}
	look := lookFirst
	seen := uint64(0)
	for idle := 0; ; {
		b.mu.Lock()
		if !c.dead {
			b.serve(c)
		}
		news := c.taken != seen
		seen = c.taken
		dead, out := c.dead, c.out > 0
		b.unlock()
		if dead {
			return
		}
		if news {
			idle, look = 0, lookFirst
		}
		switch {
		case !out:
			select {
			case <-c.wake:
			case <-c.quit:
				return
			}
		case b.waiter == nil:
			if !nap(look) {
				return
			}
			look = min(2*look, lookMost)
		default:
			b.waiter.WaitCQ(c.id, watchTime)
			// A bus that returns at once with nothing, again and again, must not make this spin.
			if idle++; idle > 8 {
				if !nap(look) {
					return
				}
				look = min(2*look, lookMost)
			}
		}
	}
}

// Kick implements nvme.Kicker.
func (b *Bus) Kick(qid uint16) {
	if b.closed.Load() || b.gone.Load() {
		return
	}
	b.mu.Lock()
	q := b.sqs[qid]
	if q != nil {
		b.serve(q.c)
	}
	b.unlock()
	if q == nil {
		b.kick(qid) // of a queue that does not exist: the controller shall know
	}
}

// tickTime separates two looks at a queue that waits for the client to free completion entries,
// which the client announces to nobody.
const tickTime = time.Millisecond

// starved reports whether the queue has something to do as soon as the client frees entries.
func (c *cqueue) starved() bool {
	if c.dead || c.deaf || c.free > 0 {
		return false
	}
	return len(c.backlog)+len(c.toSend) > 0 || slices.ContainsFunc(c.sqs, (*squeue).waits)
}

// watchRoom sees to it that somebody looks again at a queue that is starved.
func (b *Bus) watchRoom(c *cqueue) {
	if b.ticking || b.closed.Load() || b.stopped() || !c.starved() {
		return
	}
	b.ticking = true
	if b.tick == nil {
		b.tick = time.AfterFunc(tickTime, b.onTick)
	} else {
		b.tick.Reset(tickTime)
	}
}

func (b *Bus) onTick() {
	b.mu.Lock()
	defer b.unlock()
	b.ticking = false
	for _, c := range b.queues() {
		if c.starved() {
			b.serve(c)
		}
	}
}

// queues are the live completion queues; serving one may end another.
func (b *Bus) queues() []*cqueue {
	list := make([]*cqueue, 0, len(b.cqs))
	for _, c := range b.cqs {
		list = append(list, c)
	}
	return list
}

// poll serves a client whose doorbells nobody hears.
func (b *Bus) poll(quit <-chan struct{}) {
	t := time.NewTimer(lookFirst)
	defer t.Stop()
	for d := lookFirst; ; {
		select {
		case <-quit:
			return
		case <-t.C:
		}
		b.mu.Lock()
		worked := false
		for _, c := range b.queues() {
			if slices.ContainsFunc(c.sqs, (*squeue).waits) || c.starved() {
				worked = true
				b.serve(c)
			}
		}
		b.unlock()
		if d = min(2*d, 5*lookFirst); worked {
			d = lookFirst
		}
		t.Reset(d)
	}
}

// WaitCQ implements nvme.Waiter.
func (b *Bus) WaitCQ(qid uint16, d time.Duration) {
	b.mu.Lock()
	c := b.cqs[qid]
	if c != nil {
		b.serve(c)
	}
	if c == nil || b.gone.Load() {
		b.unlock()
		if d > 0 { // nothing will ever come
			time.Sleep(d)
		}
		return
	}
	if g := c.group; g != nil {
		b.unlock()
		g.Wait(d)
		return
	}
	if c.posted != c.seen || d <= 0 {
		c.seen = c.posted
		b.unlock()
		return
	}
	c.waiting++
	news := c.news
	b.unlock()
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-news:
	case <-t.C:
	}
	b.mu.Lock()
	c.seen = c.posted
	b.mu.Unlock()
}

// group implements nvme.CQGroup. Locks are taken in the order mu, Bus.mu, newsMu.
type group struct {
	mu     sync.Mutex
	closed bool
	cqs    []*cqueue

	newsMu sync.Mutex
	news   chan struct{} // closed at news; nil: nobody waits
}

// GroupCQs makes a group of completion queues of this bus and others with faults.
func (b *Bus) GroupCQs(refs []nvme.CQRef) (nvme.CQGroup, error) {
	g := &group{}
	for _, ref := range refs {
		if err := g.Rejoin(ref); err != nil {
			_ = g.Close()
			return nil, err
		}
	}
	return g, nil
}

// listen returns a channel that the next news closes.
func (g *group) listen() <-chan struct{} {
	g.newsMu.Lock()
	defer g.newsMu.Unlock()
	if g.news == nil {
		g.news = make(chan struct{})
	}
	return g.news
}

func (g *group) notify() {
	g.newsMu.Lock()
	defer g.newsMu.Unlock()
	if g.news != nil {
		close(g.news)
		g.news = nil
	}
}

// Rejoin adds a completion queue that is in no group.
func (g *group) Rejoin(ref nvme.CQRef) error {
	fail := func(what string) error {
		return fmt.Errorf("%s: completion queue %d: %s", ref.Bus.Name(), ref.QID, what)
	}
	b, ok := nvme.As[*Bus](ref.Bus)
	if !ok {
		return fail(
			"has no faults in front of it, unlike others of its group: give all buses or none")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return fail("its group is closed")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.cqs[ref.QID]
	switch {
	case c == nil || ref.QID == 0:
		return fail("there is no such I/O queue")
	case c.group != nil:
		return fail("is in a group already")
	}
	c.group = g
	c.seen = c.posted - 1 // whatever was posted before counts as new
	g.cqs = append(g.cqs, c)
	g.notify()
	return nil
}

// look carries the queues on and reports whether one has news.
func (g *group) look() (any bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cqs = slices.DeleteFunc(g.cqs, func(c *cqueue) bool {
		b := c.b
		b.mu.Lock()
		defer b.unlock()
		if !c.dead {
			b.serve(c)
		}
		if c.posted != c.seen {
			c.seen = c.posted
			any = true
		}
		return c.dead
	})
	return any
}

// Wait implements nvme.CQGroup.
func (g *group) Wait(d time.Duration) {
	if d <= 0 {
		g.look()
		return
	}
	news := g.listen() // before the look, so that nothing comes unseen in between
	if g.look() {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-news:
		g.look()
	case <-t.C:
	}
}

// Close implements nvme.CQGroup.
func (g *group) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for _, c := range g.cqs {
		c.b.mu.Lock()
		c.group = nil
		c.b.mu.Unlock()
	}
	g.cqs = nil
	return nil
}
