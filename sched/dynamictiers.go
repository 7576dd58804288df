package sched

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/cache"
	"helios/cache/policy"
	"helios/cache/trace"
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// The dynamic GPU tier in a run. Its lines come and go in the order of lookups (cache.Dynamic), so
// what a batch finds depends on the batches before it and, with a window, on those that are sampled
// beyond it; never on time. What is read lands in the staging buffer of a group: the lines of one
// lookup or, under the accumulator, of several batches. When a group's reads are whole its lookups
// are finished one after the other: rows go to the batch's feature tensor and lines to the tier. So
// a batch needs a feature tensor (a credit) only from there on, and samples and reads may run ahead
// of them.

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

// dynamicPart is of a segment over dynamic tiers.
type dynamicPart struct {
	ticket *cache.Ticket
	out    int    // where it is
	seq    uint64 // among all that were admitted
	slot   *slot
	last   bool  // the batch's last
	nlines int64 // to be read
}

// dynamicTiers are a GPU tier whose lines come and go over a constant CPU buffer.
type dynamicTiers struct {
	tier   *cache.Dynamic // nil until the tiers are placed
	e      *engine
	lines  cache.Lines
	of     gpuio.Layout // of the lines: what the reader reads
	byRow  bool         // lines are rows, in the features' own layout
	groups []*readGroup
	// lines that a group may aim at: its staging has room for these and a batch beside them
	most int64
	xs   []cuda.Growable // feature tensors, by credit
	seq  uint64          // of admitted segments
	acc  report.AccumulatorInfo
}

// newDynamicTiers settles the geometry of the lines.
func newDynamicTiers(e *engine) (d *dynamicTiers, err error) {
	d = &dynamicTiers{e: e}
	if d.lines, d.of, err = prepare.LayLines(e.store.layout, e.Rows,
		e.Config.CacheLine); err != nil {
		return nil, err
	}
	d.byRow = d.of == e.store.layout
	if asked, is := e.Config.CacheLine, d.lines.LineBytes; asked != plan.LineRow && asked != is {
		e.Observer.TellNote(
			fmt.Sprintf(
				"cache lines: %s in place of %s: lines are whole rows of %d bytes, and of whole LBAs of %d or a single one that rows do not fill",
				units.FormatBytes(is), units.FormatBytes(asked), e.RowBytes,
				e.store.layout.LBABytes))
	}
	return d, nil
}

// slotsIn returns how many lines a GPU tier of so many bytes holds.
func (d *dynamicTiers) slotsIn(bytes int64) int64 {
	e := d.e
	return min(bytes/d.lines.LineBytes, d.lines.Count(e.Rows))
}

// onGPU tells whether the directory is in a GPU's memory.
func (d *dynamicTiers) onGPU() bool {
	return d.e.OnGPU() && d.e.Config.Directory == policy.InSets
}

// besideDirectory is how much of the GPU's memory lines get, where they and their directory have
// that room.
func (d *dynamicTiers) besideDirectory(room int64) (int64, error) {
	if !d.onGPU() {
		return room, nil
	}
	slots := d.slotsIn(room)
	bytes, err := cache.GPUSetsBytes(d.e.Config.Policy, slots, d.e.Config.Window > 0)
	return max(min(room, room-bytes), 0), err
}

func (d *dynamicTiers) layout() gpuio.Layout { return d.of }

// place makes the tiers of a run whose GPU tier is dynamic: empty but for the constant CPU buffer.
func (d *dynamicTiers) place(ctx context.Context) (err error) {
	e := d.e
	rows := d.of // what the CPU buffer is filled by
	if e.tiers.CPURows > 0 && !d.byRow {
		rows = e.store.layout
		if err := e.store.close(); err != nil { // after a shrink it reads lines
			return untiered{err}
		}
	}
	if err := e.store.open(ctx, rows); err != nil {
		return untiered{err}
	}
	b := e.tiers
	if b.Auto {
		if b, err = e.autoTiers(ctx, b); err != nil {
			return untiered{err}
		}
	}
	if e.placement, err = e.Choose(ctx, plan.TierSizes{CPURows: b.CPURows}, e.hooks()); err != nil {
		return untiered{err}
	}
	if bytes := b.GPURows * e.RowBytes; d.slotsIn(bytes) == 0 {
		e.Observer.TellNote(
			fmt.Sprintf(
				"the GPU tier of %s has no room for a line of %s, so policy %s keeps nothing; raise option gpu-cache",
				units.FormatBytes(bytes), units.FormatBytes(d.lines.LineBytes), e.Config.Policy))
	}
	cpu := slices.Clone(e.placement.CPU)
	slices.Sort(cpu)
	e.tiers = plan.TierSizes{GPURows: b.GPURows, CPURows: int64(len(cpu))}
	d.tier, err = cache.NewDynamic(e.Device, cache.DynamicConfig{
		Rows: e.Rows, RowBytes: e.RowBytes, Lines: d.lines,
		Slots: d.slotsIn(b.GPURows * e.RowBytes), Policy: e.Config.Policy,
		Directory: e.Config.Directory, Seed: e.Config.Seed,
		CPU: cpu,
	})
	if err != nil {
		return err
	}
	start := time.Now()
	if err := e.store.fill(ctx, cpu, d.tier.CPUBuffer(), "fill cpu cache"); err != nil {
		return err
	}
	e.filled(start)
	if len(cpu) > 0 && !d.byRow {
		if err := e.store.renew(ctx, d.of); err != nil {
			return err
		}
	}
	if err := d.newGroups(); err != nil {
		return err
	}
	return d.calibrate(ctx)
}

// close frees the tier and what is in use with it. Nothing may be in flight.
func (d *dynamicTiers) close() error {
	e := d.e
	var all []error
	for _, s := range e.slots {
		for i := range s.segs {
			if t := s.segs[i].ticket; t != nil {
				all = append(all, t.Close())
				s.segs[i].ticket = nil
			}
		}
	}
	for _, g := range d.groups {
		if g.plan != nil {
			all = append(all, g.plan.Close())
		}
		if g.staging != nil {
			if e.store.reader != nil {
				all = append(all, gpuio.Forget(e.store.reader, g.staging))
			}
			all = append(all, g.staging.Free())
		}
	}
	d.groups = nil
	if d.tier != nil {
		all = append(all, d.tier.Close())
		d.tier = nil
	}
	return errors.Join(all...)
}

// newGroups makes the groups: under a serial pipeline one, under the accumulator one in work while
// another is read, else as many as lookups are under way.
func (d *dynamicTiers) newGroups() error {
	e := d.e
	n := e.plan.Credits
	switch {
	case e.plan.Serial:
		n = 1
	case e.plan.Group:
		n = 2
	case e.plan.PerHop:
		n *= len(e.Config.Fanouts) + 1
	}
	lines, err := d.stagingLines(n)
	if err != nil {
		return err
	}
	for len(d.groups) < n {
		g := &readGroup{}
		d.groups = append(d.groups, g)
		if g.plan, err = d.tier.NewReadPlan(); err != nil {
			return err
		}
		if g.staging, err = cuda.Reserve(e.Device, lines*d.lines.LineBytes,
			"lines that are read"); err != nil {
			return fmt.Errorf(
				"staging of %d lines of %d bytes (%s of address space): %w; lower option batch-size, option fanout or option prefetch-depth",
				lines, d.lines.LineBytes, units.FormatBytes(lines*d.lines.LineBytes), err)
		}
	}
	return nil
}

// stagingLines is the room of each of n groups: what a batch can need and, under the accumulator,
// the most that one aims at beside it. Pages that no group touches cost nothing; but the bound of a
// batch may be the whole graph.
func (d *dynamicTiers) stagingLines(n int) (int64, error) {
	e := d.e
	batch := max(min(e.MaxFrontier(e.Config.Batch), d.lines.Count(e.Rows)), 1)
	lines := batch
	if e.plan.Group {
		most, err := d.mostGrouped()
		if err != nil {
			return 0, err
		}
		d.most = most
		lines += most
	}
	if e.OnGPU() { // of addresses
		return min(lines, max(e.Device.Info().MemTotal/d.lines.LineBytes, 1)), nil
	}
	avail, err := hostmem.AvailableBytes()
	return min(lines, max(avail/2/int64(n)/d.lines.LineBytes, 1)), err
}

// newTicket makes a segment's ticket where it has none.
func (d *dynamicTiers) newTicket(g *segment) (err error) {
	if g.ticket == nil {
		g.ticket, err = d.tier.NewTicket()
	}
	return err
}

// dynamicStages are the stages of a walk over dynamic tiers: a window makes lookups wait for the
// samples of coming batches, the accumulator merges their reads, and what is read is gathered when
// it is whole:
//
//	sample ──work──▶ announce, look up, submit ──group──▶ complete, gather ──slot──▶ train
type dynamicStages struct {
	*dynamicTiers
	w       *walk
	unused  chan *readGroup // groups
	reading chan *readGroup // groups with reads under way
	spare   chan cuda.Growable
	open    *readGroup   // being filled; nil: none
	held    []*readGroup // whose staging the gather stream may still read
}

func (d *dynamicTiers) begin(w *walk) stages {
	a := &dynamicStages{
		dynamicTiers: d, w: w, unused: make(chan *readGroup, len(d.groups)),
		reading: make(chan *readGroup, len(d.groups)),
		spare:   make(chan cuda.Growable, len(d.xs)),
	}
	for _, g := range d.groups {
		a.unused <- g
	}
	for _, x := range d.xs[:min(len(d.xs), d.e.plan.Credits)] {
		a.spare <- x
	}
	return a
}

// room does nothing: a batch gets its feature tensor when its rows have arrived.
func (a *dynamicStages) room(*slot, int64) error { return nil }

func (a *dynamicStages) release(s *slot) {
	a.spare <- s.own
	s.x, s.own = nil, nil
}

// deliver gathers what groups have read, and hands on the batches that are whole by that.
func (a *dynamicStages) deliver(ctx context.Context, ready chan<- *slot) error {
	for g := range a.reading {
		if ctx.Err() != nil {
			continue
		}
		if err := a.finish(ctx, g, ready); err != nil {
			return err
		}
	}
	return nil
}

// admit looks up what the sampler hands on. Each batch is announced when all of it is sampled, and
// looked up when so many as the window is deep are announced after it, or the pass has no more.
func (a *dynamicStages) admit(ctx context.Context, parts <-chan work) error {
	defer close(a.reading)
	e, p := a.e, a.w.p
	if e.Config.Window == 0 {
		for w := range parts {
			if ctx.Err() == nil {
				if err := a.lookup(ctx, w); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for {
		for p.announced > 0 && p.waiting[0].s.index < a.w.end && (p.announced > e.Config.Window ||
			p.heard == p.n) {
			for last := false; !last; {
				w := p.waiting[0]
				p.waiting, last = p.waiting[1:], w.last
				if err := a.lookup(ctx, w); err != nil || ctx.Err() != nil {
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
		op, cancel := e.OperatorContext(ctx)
		begin, section := time.Now(), hostcpu.Begin()
		err := a.tier.Announce(op, e.lookupS, w.nodes, w.first+w.count)
		section.End(hostcpu.Lookups)
		if !a.tier.OnGPU() { // else its stream tells
			p.clock.lookedUp(time.Since(begin))
		}
		cancel()
		if err != nil {
			return fmt.Errorf("batch %d: %w", w.s.index, err)
		}
		p.announced++
		p.heard = w.s.index + 1
	}
}

// lookup looks a part up, and has the group's reads go out when it is whole.
func (a *dynamicStages) lookup(ctx context.Context, w work) error {
	e, s := a.e, w.s
	if a.open == nil {
		select {
		case a.open = <-a.unused:
		case <-ctx.Done():
			return nil
		}
		a.open.segs, a.open.lines, a.open.batches = a.open.segs[:0], 0, 0
	}
	if !e.turn.take(ctx) {
		return nil
	}
	defer e.turn.end()
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	first := s.used == 0
	if w.count > 0 || w.last {
		g := &s.segs[s.used]
		s.used++
		g.begin(w)
		g.slot, g.last, g.moved = s, w.last, w.count
		if err := a.newTicket(g); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		if first {
			a.tier.NextBatch()
			if err := e.rec.Begin(a.w.p.kind, a.w.p.number, s.index); err != nil {
				return err
			}
		}
		if w.count > 0 {
			if err := e.rec.Part(op, e.lookupS, w.nodes, w.first, w.count); err != nil {
				return fmt.Errorf("batch %d: %w", s.index, err)
			}
		}
		begin := time.Now()
		before, section := a.tier.Stats(), hostcpu.Begin()
		err := a.tier.Admit(op, e.lookupS, w.nodes, w.first, w.count, g.ticket)
		section.End(hostcpu.Lookups)
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		if !a.tier.OnGPU() {
			a.w.p.clock.lookedUp(time.Since(begin))
		}
		after := a.tier.Stats()
		g.out, g.seq = segAdmitted, a.seq
		a.seq++
		t := g.ticket
		g.ngpu, g.ncpu, g.nmiss, g.nlines = t.NGPU, t.NCPU, t.NMiss, t.NLines
		g.inserted, g.evicted, g.bypassed = after.Inserted-before.Inserted,
			after.Evicted-before.Evicted, after.Bypassed-before.Bypassed
		e.trace.op(report.TrackLookup, plan.OperatorName("L", w.hop), begin, a.w.p, s.index,
			w.count)
		a.open.segs = append(a.open.segs, g)
		a.open.lines += g.nlines
	}
	if w.last {
		a.open.batches++
	}
	if e.plan.Group && (!w.last || a.open.lines < a.acc.Target && a.open.batches < plan.MaxGroup &&
		s.index+1 < a.w.end) {
		if w.last {
			return a.more()
		}
		return nil
	}
	return a.flush(ctx)
}

// more sees to it that the sampler has a slot for another batch of the open group.
func (a *dynamicStages) more() error {
	e := a.e
	for len(e.slots) < a.open.batches+1+e.Config.Window+e.plan.Credits {
		s, err := e.newSlot()
		if err != nil {
			return err
		}
		a.w.free <- s
	}
	return nil
}

// flush sends the reads of the open group out.
func (a *dynamicStages) flush(ctx context.Context) error {
	e, g := a.e, a.open
	if len(g.segs) == 0 {
		return nil
	}
	index := g.segs[0].slot.index
	if g.lines > 0 {
		if e.store.reader == nil {
			return fmt.Errorf("batch %d: %d lines are in no tier and no SSD is open", index,
				g.lines)
		}
		bytes := g.lines * a.lines.LineBytes
		if bytes > g.staging.Size() {
			return errs.New(errs.Capability,
				"batch %d reads %d lines of %d bytes, the staging buffer has room for %d; lower option batch-size, option fanout, option cache-line or option accumulate",
				index, g.lines, a.lines.LineBytes, g.staging.Size()/a.lines.LineBytes)
		}
		if err := g.staging.Grow(bytes); err != nil {
			return fmt.Errorf("batch %d: staging of %d lines: %w", index, g.lines, err)
		}
		tickets := make([]*cache.Ticket, len(g.segs))
		for i, x := range g.segs {
			tickets[i] = x.ticket
		}
		section := hostcpu.Begin()
		err := a.tier.Plan(g.plan, tickets...)
		section.End(hostcpu.Lookups)
		if err != nil {
			return fmt.Errorf("batch %d: %w", index, err)
		}
		rd, end := e.ReadContext(ctx)
		defer end()
		g.submitted = time.Now()
		g.pending, err = e.store.reader.Submit(rd, &gpuio.ReadSet{
			Rows: g.plan.Rows, Pos: g.plan.Pos, SSDOffset: g.plan.SSDOffset,
			Dst: g.staging, DstStride: a.lines.LineBytes, DstBytes: bytes, Ready: g.plan.Ready,
		})
		if err != nil {
			return fmt.Errorf("batch %d: %w", index, readError(err))
		}
		e.trace.read(g.lines)
		if e.plan.Serial {
			if err := a.waitGroup(rd, a.w.p, g); err != nil {
				return err
			}
		}
	}
	a.open = nil
	a.reading <- g
	return nil
}

// waitGroup runs C for a group and deals out what its reads took: by lines, so that the sum is
// exact.
func (a *dynamicStages) waitGroup(op context.Context, p *pass, g *readGroup) error {
	e := a.e
	if g.pending == nil {
		return nil
	}
	index := g.segs[0].slot.index
	st, err := g.pending.Wait(op)
	if err != nil && op.Err() != nil {
		return errs.New(errs.Device, "batch %d: reads of %d lines did not end within %v: %w", index,
			g.lines, e.Config.OpTimeout, err)
	}
	g.pending = nil
	e.trace.read(-g.lines)
	if err != nil {
		return fmt.Errorf("batch %d: %w", index, readError(err))
	}
	if st.Rows != g.lines {
		return errs.New(errs.Device, "batch %d: %d lines were asked for, %d were read", index,
			g.lines, st.Rows)
	}
	p.clock.read(g.submitted, st)
	hop := g.segs[0].hop
	e.trace.set(report.TrackSubmit, plan.OperatorName("I", hop), g.submitted, st.Submit, p, index,
		g.batches, g.lines)
	e.trace.set(report.TrackComplete, plan.OperatorName("C", hop), g.submitted.Add(st.Submit),
		st.Complete, p, index, g.batches, g.lines)
	var done int64
	share := func(v,
		lines int64) int64 {
		return muldiv(v, done+lines, g.lines) - muldiv(v, done, g.lines)
	}
	for _, x := range g.segs {
		x.stats = gpuio.ReadStats{
			Rows: x.nlines, Commands: share(st.Commands, x.nlines),
			Bytes:   share(st.Bytes, x.nlines),
			Retries: share(st.Retries, x.nlines), Timeouts: share(st.Timeouts, x.nlines),
		}
		done += x.nlines
	}
	return nil
}

// muldiv is a*b/c without overflow for shares (b <= c).
func muldiv(a, b, c int64) int64 { return a/c*b + a%c*b/c }

// finish gives the lookups of a group what they need once its reads are whole, and hands on the
// batches that are whole by that.
func (a *dynamicStages) finish(ctx context.Context, g *readGroup, ready chan<- *slot) error {
	rd, end := a.e.ReadContext(ctx)
	defer end()
	p := a.w.p
	if err := a.waitGroup(rd, p, g); err != nil {
		return err
	}
	p.clock.group(g)
	for i, x := range g.segs {
		s := x.slot
		if s.x == nil {
			select {
			case x := <-a.spare:
				s.x = p.placeOf(s.index, x)
				s.own = x
			case <-ctx.Done():
				return nil
			}
		}
		if err := a.finishOne(ctx, g, x); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		if i == len(g.segs)-1 {
			a.held = append(a.held, g) // its staging is in use until the stream is done
		}
		if !x.last {
			continue
		}
		for _, h := range a.held {
			a.unused <- h
		}
		a.held = a.held[:0]
		ready <- s
	}
	return nil
}

// finishOne runs G for one lookup. With the batch's last one it waits until all rows are in place.
func (a *dynamicStages) finishOne(ctx context.Context, g *readGroup, x *segment) error {
	e := a.e
	if !e.turn.take(ctx) {
		return nil
	}
	defer e.turn.end()
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	s := x.slot
	bytes := (x.first + x.count) * e.RowBytes
	if err := e.fits(s.index, x.first+x.count, s.x.Size()); err != nil {
		return err
	}
	if err := s.x.Grow(bytes); err != nil {
		return fmt.Errorf("features of %d rows: %w", x.first+x.count, err)
	}
	err := e.trace.mark(e.gatherS, x.gatherFrom)
	if err == nil {
		err = a.tier.Finish(e.gatherS, x.ticket, g.staging, s.x.Ptr(), e.RowBytes)
	}
	if err != nil {
		return err
	}
	x.out = segFinished
	if err := e.trace.mark(e.gatherS, x.gatherTo); err != nil || !x.last {
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
		if err := a.tier.Release(y.ticket); err != nil {
			return err
		}
		y.out = segFree
	}
	return e.trace.gathers(a.w.p, s)
}

// drain waits for merged reads that are in flight.
func (d *dynamicTiers) drain(rd context.Context) error {
	var all []error
	for _, g := range d.groups {
		if g.pending != nil {
			_, err := g.pending.Wait(rd)
			if err != nil && rd.Err() != nil {
				all = append(all, fmt.Errorf("merged reads still in flight: %w", err))
			}
			g.pending = nil
		}
	}
	return errors.Join(all...)
}

// settle ends what a walk left admitted or finished, when nothing is in flight any more.
func (d *dynamicTiers) settle() error {
	e := d.e
	var out []*segment
	for _, s := range e.slots {
		s.x, s.own = nil, nil
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
			all = append(all, d.tier.Release(x.ticket))
		case !abandoned: // with it go all that were admitted later
			all = append(all, d.tier.Abandon(x.ticket))
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

// Of dynamic tiers, for results, traces and measurements:

func (d *dynamicTiers) lookahead() int { return d.e.Config.Window }

func (d *dynamicTiers) forget() {
	if d.tier != nil {
		d.tier.Forget()
	}
}

func (d *dynamicTiers) credit(x cuda.Growable) error {
	d.xs = append(d.xs, x)
	return nil
}

func (d *dynamicTiers) places() bool { return true }

func (d *dynamicTiers) gpuBytes() int64 {
	if d.tier == nil {
		return int64(len(d.e.placement.GPU)) * d.e.RowBytes
	}
	return d.tier.Config().Slots * d.lines.LineBytes
}

func (d *dynamicTiers) cpuBytes() int64 { return int64(len(d.e.placement.CPU)) * d.e.RowBytes }

func (d *dynamicTiers) prepare(_ context.Context, _ *pass, end int) (int, error) { return end, nil }

func (d *dynamicTiers) batchBytes(rows int64) (bytes, samples int64) {
	// In the worst case each row is on a line of its own. Of what the accumulator reads beside a
	// batch, and of the tier's own lists (pinned memory), there is nothing here: its staging grows
	// later, and the tier then shrinks.
	return int64(d.e.plan.Credits) * rows * d.lines.LineBytes, int64(d.e.plan.Samples)
}

func (d *dynamicTiers) describe(r *report.RunInfo) {
	r.CacheLineBytes = d.lines.LineBytes
	if d.tier != nil {
		r.PolicyBytes = d.tier.MetadataBytes()
	}
	if d.acc.MaxBatches > 0 {
		a := d.acc
		r.Accumulator = &a
	}
}

func (d *dynamicTiers) record(h *trace.Header) cache.Placement {
	c := d.tier.Config()
	h.GPULines, h.LineBytes, h.RowsPerLine = c.Slots, d.lines.LineBytes, d.lines.RowsPerLine
	h.Directory = c.Directory
	return cache.Placement{CPU: c.CPU}
}

func (d *dynamicTiers) beside() report.StageSeconds { return report.StageSeconds{} }

func (d *dynamicTiers) shuffled(train []int64, sampleEpoch int) prepare.Order {
	return d.e.Shuffled(train, sampleEpoch)
}
