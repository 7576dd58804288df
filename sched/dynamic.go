package sched

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
)

// The dynamic GPU tier in a run. Its lines come and go in the order of lookups (cache.Dynamic), so what a batch finds
// depends on the batches before it and, with a window, on those that are sampled beyond it; never on time. What is read
// lands in the staging buffer of a group: the lines of one lookup or, under the accumulator, of several batches. When a
// group's reads are whole its lookups are finished one after the other: rows go to the batch's feature tensor and lines to
// the tier. So a batch needs a feature tensor (a credit) only from there on, and samples and reads may run ahead of them.

// readGroup is a set of reads and the lookups that it is for.
type readGroup struct {
	plan    *cache.ReadPlan
	staging cuda.Growable
	segs    []*segment // admitted, in order
	lines   int64      // to be read
	batches int

	pending   gpuio.Pending // nil when nothing is in flight
	submitted time.Time
}

// dynTier is what an engine with a dynamic tier has. Its zero value is one without.
type dynTier struct {
	*cache.Dynamic
	lines  cache.Lines
	layout gpuio.Layout // of the lines: what the reader reads
	byRow  bool         // lines are rows, in the features' own layout
	groups []*readGroup
	most   int64           // lines that a group may aim at: its staging has room for these and a batch beside them
	xs     []cuda.Growable // feature tensors, by credit
	seq    uint64          // of admitted segments
}

// setLines settles the geometry.
func (e *engine) setLines() (err error) {
	if e.dyn.lines, e.dyn.layout, err = linesOf(e.layout, e.rows, e.cfg.CacheLine); err != nil {
		return err
	}
	e.dyn.byRow = e.dyn.layout == e.layout
	if asked, is := e.cfg.CacheLine, e.dyn.lines.LineBytes; asked != LineRow && asked != is {
		e.obs.note(fmt.Sprintf("cache lines: %s in place of %s: lines are whole rows of %d bytes, and of whole LBAs of %d or a single one that rows do not fill",
			units.FormatBytes(is), units.FormatBytes(asked), e.rowBytes, e.layout.LBABytes))
	}
	return nil
}

// slots is how many lines a GPU tier of so many bytes holds.
func (e *engine) lineSlots(bytes int64) int64 {
	return min(bytes/e.dyn.lines.LineBytes, e.dyn.lines.Count(e.rows))
}

// placeDynamic makes the tiers of a run whose GPU tier is dynamic: empty but for the constant CPU buffer.
func (e *engine) placeDynamic(ctx context.Context) (err error) {
	d := &e.dyn
	if e.reader != nil && e.tiers.cpuRows > 0 && !d.byRow { // it reads lines, and the CPU buffer needs rows
		if err := e.closeReader(); err != nil {
			return untiered{err}
		}
	}
	if e.reader == nil {
		layout := d.layout
		if e.tiers.cpuRows > 0 {
			layout = e.layout
		}
		if e.reader, err = e.openReader(ctx, e.in, layout); err != nil {
			return untiered{err}
		}
	}
	b := e.tiers
	if b.auto {
		if b, err = e.measuredDynamic(ctx, b); err != nil {
			return untiered{err}
		}
	}
	if e.placement, err = e.choose(ctx, budgets{cpuRows: b.cpuRows}, e.in); err != nil {
		return untiered{err}
	}
	if bytes := b.gpuRows * e.rowBytes; e.lineSlots(bytes) == 0 {
		e.obs.note(fmt.Sprintf("the GPU tier of %s has no room for a line of %s, so policy %s keeps nothing; give a larger --gpu-cache",
			units.FormatBytes(bytes), units.FormatBytes(d.lines.LineBytes), e.cfg.Policy))
	}
	cpu := slices.Clone(e.placement.CPU)
	slices.Sort(cpu)
	e.tiers = budgets{gpuRows: b.gpuRows, cpuRows: int64(len(cpu))}
	d.Dynamic, err = cache.NewDynamic(e.dev, cache.DynamicConfig{
		Rows: e.rows, RowBytes: e.rowBytes, Lines: d.lines, Slots: e.lineSlots(b.gpuRows * e.rowBytes), Policy: e.cfg.Policy, Seed: e.cfg.Seed, CPU: cpu,
	})
	if err != nil {
		return err
	}
	start := time.Now()
	if err := e.fillRowsTo(ctx, cpu, d.CPUBuffer(), "fill cpu cache"); err != nil {
		return err
	}
	e.fill += time.Since(start)
	e.trace.run("fill tiers", start)
	if len(cpu) > 0 && !d.byRow {
		if err := e.closeReader(); err != nil {
			return err
		}
		if e.reader, err = e.openReader(ctx, e.in, d.layout); err != nil {
			return err
		}
	}
	if err := e.newGroups(); err != nil {
		return err
	}
	if err := e.calibrate(ctx); err != nil {
		return err
	}
	return e.beginTrace()
}

// measuredDynamic are the budgets of --gpu-cache auto: batches are sampled for what they need of the device's memory.
func (e *engine) measuredDynamic(ctx context.Context, b budgets) (budgets, error) {
	if e.seen.hopEnd == nil {
		train, err := e.in.Dataset.Split("train")
		if err != nil {
			return b, err
		}
		if err := e.presampleBatches(ctx, train, false, 1, sampledForAuto, nil); err != nil {
			return b, err
		}
	}
	free, err := deviceFree(e.dev)
	if err != nil {
		return b, err
	}
	if e.seen.hopEnd == nil { // nothing to train on, which is told later
		return budgets{cpuRows: b.cpuRows}, nil
	}
	room := max(free-e.workingSet(&e.seen)-deviceSlack(e.dev.Info().MemTotal), 0)
	b.gpuRows, b.auto = min(room, e.rows*e.rowBytes)/e.rowBytes, false
	return b, nil
}

// closeDynamic frees the tier and what is in use with it. Nothing may be in flight.
func (e *engine) closeDynamic() error {
	var all []error
	for _, s := range e.slots {
		for i := range s.segs {
			if t := s.segs[i].ticket; t != nil {
				all = append(all, t.Close())
				s.segs[i].ticket = nil
			}
		}
	}
	for _, g := range e.dyn.groups {
		if g.plan != nil {
			all = append(all, g.plan.Close())
		}
		if g.staging != nil {
			if e.reader != nil {
				all = append(all, gpuio.Forget(e.reader, g.staging))
			}
			all = append(all, g.staging.Free())
		}
	}
	e.dyn.groups = nil
	if e.dyn.Dynamic != nil {
		all = append(all, e.dyn.Close())
		e.dyn.Dynamic = nil
	}
	return errors.Join(all...)
}

// newGroups makes the groups: under a serial pipeline one, under the accumulator one in work while another is read, else
// as many as lookups are under way.
func (e *engine) newGroups() error {
	d := &e.dyn
	n := e.plan.credits
	switch {
	case e.plan.serial:
		n = 1
	case e.plan.group:
		n = 2
	case e.plan.perHop:
		n *= len(e.cfg.Fanouts) + 1
	}
	lines, err := e.stagingLines(n)
	if err != nil {
		return err
	}
	for len(d.groups) < n {
		g := &readGroup{}
		d.groups = append(d.groups, g)
		if g.plan, err = d.NewReadPlan(); err != nil {
			return err
		}
		if g.staging, err = cuda.Reserve(e.dev, lines*d.lines.LineBytes, "lines that are read"); err != nil {
			return fmt.Errorf("staging of %d lines of %d bytes (%s of address space): %w; lower --batch-size, --fanout or --prefetch-depth",
				lines, d.lines.LineBytes, units.FormatBytes(lines*d.lines.LineBytes), err)
		}
	}
	return nil
}

// stagingLines is the room of each of n groups: what a batch can need and, under the accumulator, the most that one aims
// at beside it. Pages that no group touches cost nothing; but the bound of a batch may be the whole graph.
func (e *engine) stagingLines(n int) (int64, error) {
	batch := max(min(e.maxFrontier(e.cfg.Batch), e.dyn.lines.Count(e.rows)), 1)
	lines := batch
	if e.plan.group {
		most, err := e.mostGrouped()
		if err != nil {
			return 0, err
		}
		e.dyn.most = most
		lines += most
	}
	if e.onGPU() { // of addresses
		return min(lines, max(e.dev.Info().MemTotal/e.dyn.lines.LineBytes, 1)), nil
	}
	avail, err := hostmem.AvailableBytes()
	return min(lines, max(avail/2/int64(n)/e.dyn.lines.LineBytes, 1)), err
}

// newTicket makes a segment's ticket where it has none.
func (e *engine) newTicket(g *segment) (err error) {
	if g.ticket == nil {
		g.ticket, err = e.dyn.NewTicket()
	}
	return err
}

// hostRows is part of a frontier where the CPU reads it, after the work of st so far; valid until the next call with
// the same stager.
func (e *engine) hostRows(ctx context.Context, g *stager, st cuda.Stream, nodes cuda.DevicePtr, first, count int64) ([]int64, error) {
	if count == 0 {
		return nil, nil
	}
	if !e.onGPU() {
		return cuda.View[int64](nodes, first+count)[first:], st.Synchronize(ctx)
	}
	mem, err := g.copy(ctx, e.dev, st, nodes+cuda.DevicePtr(first*8), count*8)
	return hostmem.View[int64](mem), err
}

// admission is the lookup stage over a dynamic tier.
type admission struct {
	e      *engine
	p      *pass
	end    int               // batches of this walk
	free   chan<- *slot      // for slots that are made later
	groups chan *readGroup   // not in use
	out    chan<- *readGroup // with reads under way
	open   *readGroup        // being filled; nil: none
}

// run looks up what the sampler hands on. Each batch is announced when all of it is sampled, and looked up when so many
// as the window is deep are announced after it, or the pass has no more.
func (a *admission) run(ctx context.Context, parts <-chan work) error {
	e, p := a.e, a.p
	if e.cfg.Window == 0 {
		for w := range parts {
			if ctx.Err() == nil {
				if err := a.admit(ctx, w); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for {
		for p.announced > 0 && p.waiting[0].s.index < a.end && (p.announced > e.cfg.Window || p.sampled == p.n) {
			for last := false; !last; {
				w := p.waiting[0]
				p.waiting, last = p.waiting[1:], w.last
				if err := a.admit(ctx, w); err != nil || ctx.Err() != nil {
					return err
				}
			}
			p.announced--
		}
		w, ok := <-parts
		if !ok || ctx.Err() != nil {
			return nil
		}
		p.waiting = append(p.waiting, w)
		if !w.last {
			continue
		}
		op, cancel := e.opCtx(ctx)
		rows, err := e.hostRows(op, &e.ahead, e.lookupS, w.nodes, 0, w.first+w.count)
		if err == nil {
			err = e.dyn.Announce(rows)
		}
		cancel()
		if err != nil {
			return fmt.Errorf("batch %d: %w", w.s.index, err)
		}
		p.announced++
		p.sampled = w.s.index + 1
	}
}

// admit looks a part up, and has the group's reads go out when it is whole.
func (a *admission) admit(ctx context.Context, w work) error {
	e, s := a.e, w.s
	if a.open == nil {
		select {
		case a.open = <-a.groups:
		case <-ctx.Done():
			return nil
		}
		a.open.segs, a.open.lines, a.open.batches = a.open.segs[:0], 0, 0
	}
	if !e.takeTurn(ctx) {
		return nil
	}
	defer e.endTurn()
	op, cancel := e.opCtx(ctx)
	defer cancel()
	first := s.used == 0
	if w.count > 0 || w.last {
		g := &s.segs[s.used]
		s.used++
		*g = segment{buckets: g.buckets, ticket: g.ticket, slot: s, first: w.first, count: w.count, last: w.last, gatherFrom: g.gatherFrom, gatherTo: g.gatherTo}
		if err := e.newTicket(g); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		if first {
			e.dyn.NextBatch()
			if err := e.traceBegin(a.p, s.index); err != nil {
				return err
			}
		}
		if w.count > 0 {
			if err := e.tracePart(op, w.nodes, w.first, w.count); err != nil {
				return fmt.Errorf("batch %d: %w", s.index, err)
			}
		}
		begin := time.Now()
		before := e.dyn.Stats()
		if err := e.dyn.Admit(op, e.lookupS, w.nodes, w.first, w.count, g.ticket); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		a.p.clock.lookedUp(time.Since(begin))
		after := e.dyn.Stats()
		g.out, g.seq = segAdmitted, e.dyn.seq
		e.dyn.seq++
		t := g.ticket
		g.ngpu, g.ncpu, g.nmiss, g.nlines = t.NGPU, t.NCPU, t.NMiss, t.NLines
		g.inserted, g.evicted, g.bypassed = after.Inserted-before.Inserted, after.Evicted-before.Evicted, after.Bypassed-before.Bypassed
		e.trace.op(trackLookup, "L", begin, a.p, s.index, w.count)
		a.open.segs = append(a.open.segs, g)
		a.open.lines += g.nlines
	}
	if w.last {
		a.open.batches++
	}
	if e.plan.group && (!w.last || a.open.lines < e.acc.Target && a.open.batches < maxGroup && s.index+1 < a.end) {
		if w.last {
			return a.more()
		}
		return nil
	}
	return a.flush(ctx)
}

// more sees to it that the sampler has a slot for another batch of the open group.
func (a *admission) more() error {
	e := a.e
	for len(e.slots) < a.open.batches+1+e.cfg.Window+e.plan.credits {
		s, err := e.newSlot()
		if err != nil {
			return err
		}
		a.free <- s
	}
	return nil
}

// flush sends the reads of the open group out.
func (a *admission) flush(ctx context.Context) error {
	e, g := a.e, a.open
	if len(g.segs) == 0 {
		return nil
	}
	index := g.segs[0].slot.index
	if g.lines > 0 {
		if e.reader == nil {
			return fmt.Errorf("batch %d: %d lines are in no tier and no SSD is open", index, g.lines)
		}
		bytes := g.lines * e.dyn.lines.LineBytes
		if bytes > g.staging.Size() {
			return errs.New(errs.Capability, "batch %d reads %d lines of %d bytes, the staging buffer has room for %d; lower --batch-size, --fanout, --cache-line or --accumulate",
				index, g.lines, e.dyn.lines.LineBytes, g.staging.Size()/e.dyn.lines.LineBytes)
		}
		if err := g.staging.Grow(bytes); err != nil {
			return fmt.Errorf("batch %d: staging of %d lines: %w", index, g.lines, err)
		}
		tickets := make([]*cache.Ticket, len(g.segs))
		for i, x := range g.segs {
			tickets[i] = x.ticket
		}
		if err := e.dyn.Plan(g.plan, tickets...); err != nil {
			return fmt.Errorf("batch %d: %w", index, err)
		}
		rd, end := e.readCtx(ctx)
		defer end()
		var err error
		g.submitted = time.Now()
		g.pending, err = e.reader.Submit(rd, &gpuio.ReadSet{
			Rows: g.plan.Rows.Ptr(), Pos: g.plan.Pos.Ptr(), SSDOffset: g.plan.SSDOffset,
			Dst: g.staging, DstStride: e.dyn.lines.LineBytes, DstBytes: bytes,
		})
		if err != nil {
			return fmt.Errorf("batch %d: %w", index, readError(err))
		}
		e.trace.read(g.lines)
		if e.plan.serial {
			if err := e.waitGroup(rd, a.p, g); err != nil {
				return err
			}
		}
	}
	a.open = nil
	a.out <- g
	return nil
}

// waitGroup runs C for a group and deals out what its reads took: by lines, so that the sum is exact.
func (e *engine) waitGroup(op context.Context, p *pass, g *readGroup) error {
	if g.pending == nil {
		return nil
	}
	index := g.segs[0].slot.index
	st, err := g.pending.Wait(op)
	if err != nil && op.Err() != nil {
		return errs.New(errs.Device, "batch %d: reads of %d lines did not end within %v: %w", index, g.lines, e.cfg.OpTimeout, err)
	}
	g.pending = nil
	e.trace.read(-g.lines)
	if err != nil {
		return fmt.Errorf("batch %d: %w", index, readError(err))
	}
	if st.Rows != g.lines {
		return errs.New(errs.Device, "batch %d: %d lines were asked for, %d were read", index, g.lines, st.Rows)
	}
	p.clock.read(g.submitted, st)
	e.trace.span(trackSubmit, "I", g.submitted, st.Submit, p, index, g.lines)
	e.trace.span(trackComplete, "C", g.submitted.Add(st.Submit), st.Complete, p, index, g.lines)
	var done int64
	share := func(v, lines int64) int64 { return muldiv(v, done+lines, g.lines) - muldiv(v, done, g.lines) }
	for _, x := range g.segs {
		x.stats = gpuio.ReadStats{
			Rows: x.nlines, Commands: share(st.Commands, x.nlines), Bytes: share(st.Bytes, x.nlines),
			Retries: share(st.Retries, x.nlines), Timeouts: share(st.Timeouts, x.nlines),
		}
		done += x.nlines
	}
	return nil
}

// muldiv is a*b/c without overflow for shares (b <= c).
func muldiv(a, b, c int64) int64 { return a/c*b + a%c*b/c }

// finish gives the lookups of a group what they need once its reads are whole, and hands on the batches that are whole
// by that.
func (e *engine) finish(ctx context.Context, p *pass, g *readGroup, xs <-chan cuda.Growable, free chan<- *readGroup, ready chan<- *slot, held *[]*readGroup) error {
	rd, end := e.readCtx(ctx)
	defer end()
	if err := e.waitGroup(rd, p, g); err != nil {
		return err
	}
	p.clock.group(g)
	for i, x := range g.segs {
		s := x.slot
		if s.x == nil {
			select {
			case s.x = <-xs:
			case <-ctx.Done():
				return nil
			}
		}
		err := e.finishOne(ctx, p, g, x)
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		if i == len(g.segs)-1 {
			*held = append(*held, g) // its staging is in use until the stream is done
		}
		if !x.last {
			continue
		}
		for _, h := range *held {
			free <- h
		}
		*held = (*held)[:0]
		ready <- s
	}
	return nil
}

// finishOne runs G for one lookup. With the batch's last one it waits until all rows are in place.
func (e *engine) finishOne(ctx context.Context, p *pass, g *readGroup, x *segment) error {
	if !e.takeTurn(ctx) {
		return nil
	}
	defer e.endTurn()
	op, cancel := e.opCtx(ctx)
	defer cancel()
	s := x.slot
	bytes := (x.first + x.count) * e.rowBytes
	if err := e.fits(s.index, x.first+x.count, s.x.Size()); err != nil {
		return err
	}
	if err := s.x.Grow(bytes); err != nil {
		return fmt.Errorf("features of %d rows: %w", x.first+x.count, err)
	}
	err := e.mark(x.gatherFrom)
	if err == nil {
		err = e.dyn.Finish(e.gatherS, x.ticket, g.staging, s.x.Ptr(), e.rowBytes)
	}
	if err != nil {
		return err
	}
	x.out = segFinished
	if err := e.mark(x.gatherTo); err != nil || !x.last {
		return err
	}
	if err := e.gatherS.Record(s.ready); err != nil {
		return err
	}
	if err := s.ready.Synchronize(op); err != nil {
		return fmt.Errorf("gather: %w", err)
	}
	for i := range s.segs[:s.used] {
		y := &s.segs[i]
		if err := e.dyn.Release(y.ticket); err != nil {
			return err
		}
		y.out = segFree
	}
	return e.drawGathers(p, s)
}

// settleTickets ends what a walk left admitted or finished, when nothing is in flight any more.
func (e *engine) settleTickets() error {
	var out []*segment
	for _, s := range e.slots {
		for i := range s.segs {
			if s.segs[i].out != segFree {
				out = append(out, &s.segs[i])
			}
		}
	}
	slices.SortFunc(out, func(a, b *segment) int { return int(int64(a.seq) - int64(b.seq)) })
	var all []error
	abandoned := false
	for _, x := range out {
		switch {
		case x.out == segFinished:
			all = append(all, e.dyn.Release(x.ticket))
		case !abandoned: // with it go all that were admitted later
			all = append(all, e.dyn.Abandon(x.ticket))
			abandoned = true
		}
		x.out = segFree
	}
	return errors.Join(all...)
}

// Where a segment's ticket is.
const (
	segFree = iota
	segAdmitted
	segFinished
)

// takeTurn waits until no other operator runs, under a pipeline that runs one at a time. False: the walk has ended.
func (e *engine) takeTurn(ctx context.Context) bool {
	if !e.plan.serial {
		return true
	}
	select {
	case e.turn <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (e *engine) endTurn() {
	if e.plan.serial {
		<-e.turn
	}
}
