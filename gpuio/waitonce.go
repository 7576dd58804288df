package gpuio

import (
	"context"
	"errors"
	"slices"

	"helios/cuda"
)

// WaitOnce waits once for sets in flight and for an event, where kernels read the sets and check
// their rows: on a stream the checks follow the kernels that read, and the event follows the
// checks. Then Wait of a set whose rows are right returns at once. false: WaitOnce waited for
// nothing, or failed; Wait then says why.
func WaitOnce(ctx context.Context, after cuda.Event, sets []Pending) bool {
	for _, s := range sets {
		if p, ok := s.(*checkedPending); ok && p.c.chains {
			return p.c.waitOnce(ctx, after, sets)
		}
	}
	return false
}

// jointCheck is one check of several sets, enqueued behind the kernels that read them.
type jointCheck struct {
	on   cuda.Stream
	sets []*checkedPending
	// stops counts, for each set, the stops before its kernel was waited for (asyncPending.chain).
	stops []int64
	got   cuda.Buffer // checksums of all
	bad   cuda.Buffer // a count for each set, in the CPU's memory
	done  cuda.Event
	users int // who enqueued it, and sets that have yet to leave it; guarded by mu
}

func (l *jointCheck) free() error {
	err := freeBuffers(&l.got, &l.bad)
	if l.done != nil {
		err = errors.Join(err, l.done.Close())
	}
	return err
}

// maxJoint bounds the sets of one joint check.
const maxJoint = 64

func (c *checked) waitOnce(ctx context.Context, after cuda.Event, sets []Pending) bool {
	var own []*checkedPending
	for _, s := range sets {
		if p, ok := s.(*checkedPending); ok && p.c == c && len(own) < maxJoint {
			own = append(own, p)
		}
	}
	l, err := c.enqueue(ctx, after, own)
	if l == nil || err != nil {
		return false
	}
	defer c.drop(l)
	if l.done.Synchronize(ctx) != nil {
		return false
	}
	for i, p := range l.sets {
		select {
		case p.turn <- struct{}{}:
		default: // somebody waits for it
			continue
		}
		if p.joint == l { // else somebody has waited for it
			// A wrong row is looked for, and read again, by Wait.
			p.right = p.inner.(*asyncPending).chained(l.stops[i]) && words(l.bad.Bytes())[i] == 0
			_ = c.leave(ctx, p, true)
		}
		<-p.turn
	}
	return true
}

// enqueue makes the checks of sets follow their kernels. nil: no set takes part.
func (c *checked) enqueue(ctx context.Context, after cuda.Event,
	sets []*checkedPending) (*jointCheck, error) {
	if err := c.takeTurn(ctx); err != nil {
		return nil, err
	}
	defer func() { <-c.turn }()
	if c.broken != nil {
		return nil, c.broken
	}
	l, err := c.takeJoint(sets)
	if err != nil {
		return nil, err
	}
	got, bad := l.got.Ptr(), l.bad.Ptr()
	for _, p := range sets {
		stops, ok := p.chain(l)
		if !ok {
			continue
		}
		words(l.bad.Bytes())[len(l.sets)] = 0
		l.sets, l.stops = append(l.sets, p), append(l.stops, stops)
		err = errors.Join(err, c.launch(&p.rs, p.n, got, bad))
		got, bad = got+cuda.DevicePtr(p.n*4), bad+4
	}
	if len(l.sets) == 0 {
		return nil, nil
	}
	if err == nil && after != nil {
		err = l.on.Wait(after)
	}
	if err == nil {
		err = l.on.Record(l.done)
	}
	if err != nil { // l.done says nothing of what is enqueued
		c.renew()
		return nil, err
	}
	c.use(l)
	return l, nil
}

// use keeps a joint check from being taken again, and from being freed, until as many drop it.
func (c *checked) use(l *jointCheck) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.users++
}

func (c *checked) drop(l *jointCheck) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.users--; l.users == 0 && c.freed {
		_ = l.free()
	}
}

func (c *checked) unused(l *jointCheck) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return l.users == 0
}

// chain makes a joint check's stream wait for the set's kernel.
func (p *checkedPending) chain(l *jointCheck) (stops int64, ok bool) {
	select {
	case p.turn <- struct{}{}:
	default: // somebody waits for it
		return 0, false
	}
	defer func() { <-p.turn }()
	in, ok := p.inner.(*asyncPending)
	if !ok || p.read || p.joint != nil || p.n == 0 {
		return 0, false
	}
	if stops, ok = in.chain(l.on); ok {
		p.joint = l
		p.c.use(l)
		p.c.hold(p.rs.Dst, 1)
	}
	return stops, ok
}

// takeJoint returns one that no set uses, with room for some. Needs c.turn.
func (c *checked) takeJoint(sets []*checkedPending) (*jointCheck, error) {
	i := slices.IndexFunc(c.joints, c.unused)
	if i < 0 {
		i = len(c.joints)
		c.joints = append(c.joints, &jointCheck{})
	}
	l, n, err := c.joints[i], int64(0), error(nil)
	for _, p := range sets {
		n += p.n
	}
	if err = c.room(&l.got, n); err == nil && l.bad == nil {
		l.bad, err = c.dev.Alloc(cuda.MemPinned, 4*maxJoint, "gpuio check result")
	}
	if err == nil && l.done == nil {
		l.done, err = c.dev.NewEvent()
	}
	l.on, l.sets, l.stops = c.stream, l.sets[:0], l.stops[:0]
	return l, err
}

// leave ends a set's part in its joint check, if it has one, once that is over; over: it went well.
// Its error is ctx's. Needs p.turn.
func (c *checked) leave(ctx context.Context, p *checkedPending, over bool) (err error) {
	l := p.joint
	if l == nil {
		return nil
	}
	if !over {
		if c.takeTurn(ctx) != nil { // until all of it is enqueued
			return p.interrupted(ctx)
		}
		<-c.turn
		if err = l.done.Synchronize(ctx); err != nil && ctx.Err() != nil {
			return p.interrupted(ctx)
		}
	}
	if c.takeTurn(ctx) != nil {
		return p.interrupted(ctx)
	}
	defer func() { <-c.turn }()
	if err != nil && l.on == c.stream {
		// A set that has failed may name rows that there are not: the kernel fails, and the stream
		// with it. The sets behind it have another.
		c.renew()
	}
	p.joint = nil
	c.drop(l)
	c.hold(p.rs.Dst, -1)
	return nil
}

// takeTurn waits for c.turn. Its error is ctx's.
func (c *checked) takeTurn(ctx context.Context) error {
	select {
	case c.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
