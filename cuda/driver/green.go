package driver

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// greenPool splits the GPU's SMs into groups of the smallest size that the driver makes, and
// gives streams with a budget a green context of whole groups. All splits come from one call:
// a descriptor takes groups of one split only, and two splits would overlap (cuda.h,
// cuDevResourceGenerateDesc and cuDevSmResourceSplitByCount).
type greenPool struct {
	d      *Device
	mu     sync.Mutex
	groups []devResource
	used   []int // streams on each group
	live   map[*green]struct{}
	made   uint64 // contexts so far
}

// green is one green context. Streams and events that are out hold it.
//
// "A green context can be current to only one thread at a time. There is no internal
// synchronization to make API calls accessing the same green context from multiple threads work"
// (cuGreenCtxCreate). Its streams and events are used by whoever enqueues, waits or looks, so each
// use is between Device.enterWith, which holds the context, and leaveWith.
type green struct {
	d      *Device
	serial uint64 // in which order two are held at a time
	h      greenCtx
	ctx    cuContext // the same, as a context to make current
	sms    int
	groups []int
	refs   atomic.Int32
	events eventPool // without times
	timed  eventPool
	use    sync.Mutex // held by the thread that uses it, within enter
}

// enterWith is enter for what uses streams and events of green contexts: each of these that is not
// nil is held until leaveWith of the same.
func (d *Device) enterWith(a, b *green) error {
	if err := d.enter(); err != nil {
		return err
	}
	holdGreen(a, b)
	return nil
}

func (d *Device) leaveWith(a, b *green) {
	releaseGreen(a, b)
	d.leave()
}

// holdGreen locks one or two green contexts, in the order of their serials.
func holdGreen(a, b *green) {
	if a != nil && b != nil && b.serial < a.serial {
		a, b = b, a
	}
	if a != nil {
		a.use.Lock()
	}
	if b != nil && b != a {
		b.use.Lock()
	}
}

func releaseGreen(a, b *green) {
	if a != nil {
		a.use.Unlock()
	}
	if b != nil && b != a {
		b.use.Unlock()
	}
}

// split finds the groups. p.mu is held, and it runs within enter.
func (p *greenPool) split() error {
	if p.groups != nil {
		return nil
	}
	d := p.d
	var all devResource
	if r := d.api.DeviceGetDevResource(d.ord, &all, resourceSM); r != success {
		return d.failed("cuDeviceGetDevResource", r)
	}
	n, r := d.api.DevSmResourceSplitByCount(nil, &all, 0, 1)
	if r != success {
		return d.failed("cuDevSmResourceSplitByCount", r)
	}
	if n < 1 || n > 4096 {
		return fmt.Errorf("cuDevSmResourceSplitByCount: %d groups of SMs", n)
	}
	groups := make([]devResource, n)
	if n, r = d.api.DevSmResourceSplitByCount(groups, &all, 0, 1); r != success {
		return d.failed("cuDevSmResourceSplitByCount", r)
	}
	groups = groups[:min(n, len(groups))]
	if len(groups) == 0 || groups[0].SMs == 0 {
		return fmt.Errorf("cuDevSmResourceSplitByCount: %d groups, and the first has no SMs",
			len(groups))
	}
	p.groups, p.used, p.live = groups, make([]int, len(groups)), map[*green]struct{}{}
	return nil
}

// granularity is the SMs in a group; 0 when there are no green contexts.
func (p *greenPool) granularity() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.d.enter() != nil {
		return 0
	}
	defer p.d.leave()
	if p.split() != nil {
		return 0
	}
	return int(p.groups[0].SMs)
}

// take makes a green context for a budget: as many whole groups as fit into it and at least one,
// those that the fewest streams are on.
func (p *greenPool) take(budget int) (_ *green, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.d
	if err := d.enter(); err != nil {
		return nil, err
	}
	defer d.leave()
	if err := p.split(); err != nil {
		return nil, fmt.Errorf("budget of %d SMs: %w", budget, err)
	}
	want := max(1, min(budget/int(p.groups[0].SMs), len(p.groups)))
	order := make([]int, len(p.groups))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(p.used[a], p.used[b]) })
	p.made++
	g := &green{d: d, groups: order[:want], serial: p.made}
	g.events = eventPool{d: d, green: g}
	g.timed = eventPool{d: d, green: g, timed: true}
	res := make([]devResource, want)
	for i, group := range g.groups {
		res[i] = p.groups[group]
		g.sms += int(res[i].SMs)
	}
	desc, r := d.api.DevResourceGenerateDesc(res)
	if r != success {
		return nil, fmt.Errorf("budget of %d SMs: %w", budget,
			d.failed("cuDevResourceGenerateDesc", r))
	}
	if g.h, r = d.api.GreenCtxCreate(desc, d.ord, greenDefault); r != success {
		return nil, fmt.Errorf("budget of %d SMs: %w", budget, d.failed("cuGreenCtxCreate", r))
	}
	if g.ctx, r = d.api.CtxFromGreenCtx(g.h); r != success {
		d.api.GreenCtxDestroy(g.h)
		return nil, fmt.Errorf("budget of %d SMs: %w", budget, d.failed("cuCtxFromGreenCtx", r))
	}
	for _, group := range g.groups {
		p.used[group]++
	}
	p.live[g] = struct{}{}
	g.refs.Store(1)
	return g, nil
}

// makeEvent makes an event of this context, which is current only meanwhile. It runs within
// enterWith.
func (g *green) makeEvent(flags uint32) (event, error) {
	d := g.d
	if r := d.api.CtxSetCurrent(g.ctx); r != success {
		return 0, d.failed("cuCtxSetCurrent", r)
	}
	e, r := d.api.EventCreate(flags)
	if back := d.api.CtxSetCurrent(d.ctx); r == success && back != success {
		r = back
	}
	if r != success {
		return 0, d.failed("cuEventCreate", r)
	}
	return e, nil
}

// drop gives up a reference; with the last one the context goes.
func (g *green) drop() {
	if g.refs.Add(-1) == 0 {
		g.d.green.destroy(g)
	}
}

func (p *greenPool) destroy(g *green) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, there := p.live[g]; !there {
		return
	}
	delete(p.live, g)
	for _, group := range g.groups {
		p.used[group]--
	}
	g.events.close()
	g.timed.close()
	if p.d.enterToFree() {
		holdGreen(g, nil)
		p.d.api.GreenCtxDestroy(g.h)
		p.d.leaveWith(g, nil)
	}
}

// close destroys contexts that only events of the caller still hold.
func (p *greenPool) close() {
	p.mu.Lock()
	all := slices.Collect(maps.Keys(p.live))
	p.mu.Unlock()
	for _, g := range all {
		p.destroy(g)
	}
}
