// Package dynamic keeps lines in GPU memory that come and go with what mini-batches access, over a
// constant buffer of rows in CPU memory: modes bam (Qureshi et al., ASPLOS 2023) and gids (Park et
// al., VLDB 2024).
package dynamic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/cache"
	"helios/cache/policy"
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/dynamic/spec"
	"helios/sched/walk"
)

// Run is the system on an engine.
var Run = engine.System{New: New}

// The dynamic GPU tier in a run. Its lines come and go in the order of lookups (cache.Dynamic), so
// what a batch finds depends on the batches before it and, with a window, on those that are sampled
// beyond it; never on time. Reads land in the staging buffer of a group: the lines of one
// lookup or, under the accumulator, of several batches. When a group's reads are whole its lookups
// are finished one after the other: rows go to the batch's feature tensor and lines to the tier. So
// a batch needs a feature tensor (a credit) only from there on, and samples and reads may run ahead
// of them.

// readGroup is a set of reads and the lookups that it is for.
type readGroup struct {
	plan    *cache.ReadPlan
	staging cuda.Growable
	segs    []*admitted // in order
	lines   int64       // to be read
	batches int

	pending   gpuio.Pending // nil when nothing is in flight
	submitted time.Time
}

// admitted is a segment that was looked up in dynamic tiers.
type admitted struct {
	*engine.Segment
	group  *readGroup
	ticket *cache.Ticket
	out    int    // segFree, segAdmitted or segFinished
	seq    uint64 // the number of its admission
	slot   *engine.Slot
	last   bool  // the batch's last
	nlines int64 // to be read
}

// Tiers are a GPU tier whose lines come and go over a constant CPU buffer.
type Tiers struct {
	engine.Base
	tier   *cache.Dynamic // nil until the tiers are placed
	lines  cache.Lines
	of     gpuio.Layout // of the lines: what the reader reads
	byRow  bool         // lines are rows, in the features' own layout
	groups []*readGroup
	// lines that a group may aim at: its staging has room for these and a batch beside them
	limit int64
	xs    []cuda.Growable // feature tensors, by credit
	seq   uint64          // of admitted segments
	acc   report.AccumulatorInfo
}

// New settles the geometry of the lines.
func New(e *engine.Engine) (engine.Tiers, error) {
	d := &Tiers{Base: engine.Base{Engine: e}}
	var err error
	if d.lines, d.of, err = prepare.LayLines(e.Store.Layout, e.Rows,
		e.Config.CacheLine); err != nil {
		return nil, err
	}
	d.byRow = d.of == e.Store.Layout
	if asked, is := e.Config.CacheLine, d.lines.LineBytes; asked != spec.LineRow && asked != is {
		e.Observer.TellNote(
			"cache lines: %s in place of %s: lines are whole rows of %d bytes, and of whole LBAs of %d or a single one that rows do not fill",
			units.FormatBytes(is), units.FormatBytes(asked), e.RowBytes,
			e.Store.Layout.LBABytes)
	}
	return d, nil
}

// slotsIn returns how many lines a GPU tier of so many bytes holds.
func (d *Tiers) slotsIn(bytes int64) int64 {
	e := d.Engine
	return min(bytes/d.lines.LineBytes, d.lines.Count(e.Rows))
}

// onGPU reports whether the directory is in a GPU's memory.
func (d *Tiers) onGPU() bool {
	return d.Engine.OnGPU() && d.Engine.Config.Directory == policy.InSets
}

// besideDirectory returns the bytes of lines in a room of the GPU's memory that lines and their
// directory share.
func (d *Tiers) besideDirectory(room int64) (int64, error) {
	if !d.onGPU() {
		return room, nil
	}
	slots := d.slotsIn(room)
	bytes, err := cache.GPUSetsBytes(d.Engine.Config.Policy, slots, d.Engine.Config.Window > 0)
	return max(min(room, room-bytes), 0), err
}

// Layout implements engine.Tiers.
func (d *Tiers) Layout() gpuio.Layout { return d.of }

// Place makes the tiers of a run whose GPU tier is dynamic: empty but for the constant CPU buffer.
func (d *Tiers) Place(ctx context.Context) (err error) {
	e := d.Engine
	rows := d.of // what the CPU buffer is filled by
	if e.Sizes.CPURows > 0 && !d.byRow {
		rows = e.Store.Layout
		if err := e.Store.Close(); err != nil { // after a shrink it reads lines
			return engine.Untiered(err)
		}
	}
	if err := e.Store.Open(ctx, rows); err != nil {
		return engine.Untiered(err)
	}
	if err := d.choose(ctx); err != nil {
		return engine.Untiered(err)
	}
	b := e.Sizes
	if bytes := b.GPURows * e.RowBytes; d.slotsIn(bytes) == 0 {
		e.Observer.TellNote(
			"the GPU tier of %s has no room for a line of %s, so policy %s keeps nothing; raise {gpu-cache}",
			units.FormatBytes(bytes), units.FormatBytes(d.lines.LineBytes), e.Config.Policy)
	}
	cpu := slices.Clone(e.Placement.CPU)
	slices.Sort(cpu)
	e.Sizes = plan.TierSizes{GPURows: b.GPURows, CPURows: int64(len(cpu))}
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
	if err := e.Store.Fill(ctx, cpu, d.tier.CPUBuffer(), "fill cpu cache"); err != nil {
		return err
	}
	e.Filled(start)
	if len(cpu) > 0 && !d.byRow {
		if err := e.Store.Renew(ctx, d.of); err != nil {
			return err
		}
	}
	if err := d.newGroups(); err != nil {
		return err
	}
	return d.calibrate(ctx)
}

// choose sizes the GPU tier, and chooses the rows of the CPU buffer.
func (d *Tiers) choose(ctx context.Context) (err error) {
	e := d.Engine
	b := e.Sizes
	if b.Auto {
		room, err := e.AutoRoom(ctx)
		if err == nil && room > 0 {
			room, err = d.besideDirectory(room)
		}
		if err != nil {
			return err
		}
		b.GPURows, b.Auto = min(room, e.Rows*e.RowBytes)/e.RowBytes, false
	}
	e.Placement, err = e.Choose(ctx, plan.TierSizes{CPURows: b.CPURows}, e.Hooks())
	if err == nil {
		e.Sizes = b
	}
	return err
}

// Close frees the tier and what is in use with it. Nothing may be in flight.
func (d *Tiers) Close() error {
	e := d.Engine
	var all []error
	for _, s := range e.Slots {
		for i := range s.Segments {
			if a, ok := s.Segments[i].Part.(*admitted); ok && a.ticket != nil {
				all = append(all, a.ticket.Close())
			}
			s.Segments[i].Part = nil
		}
	}
	for _, g := range d.groups {
		if g.plan != nil {
			all = append(all, g.plan.Close())
		}
		if g.staging != nil {
			if e.Store.Reader != nil {
				all = append(all, gpuio.Forget(e.Store.Reader, g.staging))
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
func (d *Tiers) newGroups() error {
	e := d.Engine
	n := e.Plan.Credits
	switch {
	case e.Plan.Serial:
		n = 1
	case e.Plan.Group:
		n = 2
	case e.Plan.PerHop:
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
			return errs.Errorf(
				"staging of %d lines of %d bytes (%s of address space): %w; lower {batch-size}, {fanout} or {prefetch-depth}",
				lines, d.lines.LineBytes, units.FormatBytes(lines*d.lines.LineBytes), err)
		}
	}
	return nil
}

// stagingLines is the room of each of n groups: what a batch can need and, under the accumulator,
// the most that one aims at beside it. Pages that no group touches cost nothing; but the bound of a
// batch may be the whole graph.
func (d *Tiers) stagingLines(n int) (int64, error) {
	e := d.Engine
	batch := max(min(e.MaxFrontier(e.Config.Batch), d.lines.Count(e.Rows)), 1)
	lines := batch
	if e.Plan.Group {
		limit, err := d.mostGrouped()
		if err != nil {
			return 0, err
		}
		d.limit = limit
		lines += limit
	}
	if e.OnGPU() { // of addresses
		return min(lines, max(e.Device.Info().MemTotal/d.lines.LineBytes, 1)), nil
	}
	avail, err := hostmem.AvailableBytes()
	return min(lines, max(avail/2/int64(n)/d.lines.LineBytes, 1)), err
}

// admission makes what a segment needs to be looked up, with a ticket where it has none.
func (d *Tiers) admission(g *engine.Segment, s *engine.Slot, last bool) (a *admitted, err error) {
	a, ok := g.Part.(*admitted)
	if !ok {
		a = &admitted{Segment: g}
		g.Part = a
	}
	a.out, a.slot, a.last, a.nlines = segFree, s, last, 0
	if a.ticket == nil {
		a.ticket, err = d.tier.NewTicket()
	}
	return a, err
}

// stages are the stages of a walk over dynamic tiers. A batch gets its feature tensor when its rows
// have arrived.
type stages struct {
	*Tiers
	w      *engine.Walk
	unused chan *readGroup // groups
	spare  chan cuda.Growable
	open   *readGroup   // being filled; nil: none
	held   []*readGroup // whose staging the gather stream may still read
}

// Begin implements engine.Tiers.
func (d *Tiers) Begin(w *engine.Walk) engine.Stages {
	a := &stages{
		Tiers: d, w: w, unused: make(chan *readGroup, len(d.groups)),
		spare: make(chan cuda.Growable, len(d.xs)),
	}
	for _, g := range d.groups {
		a.unused <- g
	}
	for _, x := range d.xs[:min(len(d.xs), d.Engine.Plan.Credits)] {
		a.spare <- x
	}
	return a
}

// Room implements engine.Stages.
func (a *stages) Room(*engine.Slot, int64) error { return nil }

// Release implements engine.Stages.
func (a *stages) Release(s *engine.Slot) {
	a.spare <- s.Own
	s.Features, s.Own = nil, nil
}

// Announce implements engine.Stages.
func (a *stages) Announce(ctx context.Context, w *engine.Work) error {
	e := a.Engine
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	begin, section := time.Now(), hostcpu.Begin()
	err := a.tier.Announce(op, e.LookupStream, w.Nodes, w.First+w.Count)
	section.End(hostcpu.Lookups)
	if !a.tier.OnGPU() { // else its stream tells
		a.w.Pass.Clock.LookedUp(time.Since(begin))
	}
	if err != nil {
		return fmt.Errorf("batch %d: %w", w.Slot.Index, err)
	}
	return nil
}

// Lookup implements engine.Stages.
func (a *stages) Lookup(ctx context.Context, w *engine.Work) error {
	e, s := a.Engine, w.Slot
	if a.open == nil {
		select {
		case a.open = <-a.unused:
		case <-ctx.Done():
			return walk.ErrStopped
		}
		a.open.segs, a.open.lines, a.open.batches = a.open.segs[:0], 0, 0
	}
	if w.Count == 0 && !w.Last {
		return nil
	}
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	first := s.Used == 0
	seg := &s.Segments[s.Used]
	s.Used++
	seg.Begin(w)
	seg.Moved = w.Count
	g, err := a.admission(seg, s, w.Last)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	if first {
		a.tier.NextBatch()
	}
	begin := time.Now()
	before, section := a.tier.Stats(), hostcpu.Begin()
	err = a.tier.Admit(op, e.LookupStream, w.Nodes, w.First, w.Count, g.ticket)
	section.End(hostcpu.Lookups)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	if !a.tier.OnGPU() {
		a.w.Pass.Clock.LookedUp(time.Since(begin))
	}
	after := a.tier.Stats()
	g.out, g.seq = segAdmitted, a.seq
	a.seq++
	t := g.ticket
	g.RowsGPU, g.RowsCPU, g.RowsSSD, g.nlines = t.NGPU, t.NCPU, t.NMiss, t.NLines
	g.Inserted, g.Evicted, g.Bypassed = after.Inserted-before.Inserted,
		after.Evicted-before.Evicted, after.Bypassed-before.Bypassed
	e.Trace.Op(report.TrackLookup, plan.OperatorName("L", w.Hop), begin, a.w.Pass, s.Index,
		w.Count)
	g.group = a.open
	a.open.segs = append(a.open.segs, g)
	a.open.lines += g.nlines
	if w.Last {
		a.open.batches++
	}
	return nil
}

// Closes implements engine.Stages.
func (a *stages) Closes(s *engine.Set) bool {
	if !s.Newest().Last {
		return false
	}
	return a.open.lines >= a.acc.Target || a.open.batches >= plan.MaxGroup ||
		s.Newest().Batch.Index+1 >= a.w.End
}

// Submit implements engine.Stages.
func (a *stages) Submit(ctx context.Context, _ *engine.Set) error {
	e, g := a.Engine, a.open
	if len(g.segs) == 0 { // a hop that found no new node; the group takes the next
		return nil
	}
	index := g.segs[0].slot.Index
	if g.lines > 0 {
		if e.Store.Reader == nil {
			return fmt.Errorf("batch %d: %d lines are in no tier and no SSD is open", index,
				g.lines)
		}
		bytes := g.lines * a.lines.LineBytes
		if bytes > g.staging.Size() {
			return errs.New(errs.Capability,
				"batch %d reads %d lines of %d bytes, the staging buffer has room for %d; lower {batch-size}, {fanout}, {cache-line} or {accumulate}",
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
		g.pending, err = e.Store.Reader.Submit(rd, &gpuio.ReadSet{
			Rows: g.plan.Rows, Pos: g.plan.Pos, SSDOffset: g.plan.SSDOffset,
			Dst: g.staging, DstStride: a.lines.LineBytes, DstBytes: bytes, Ready: g.plan.Ready,
		})
		if err != nil {
			return fmt.Errorf("batch %d: %w", index, engine.ReadError(err))
		}
		e.Trace.Read(g.lines)
	}
	a.open = nil
	return nil
}

// Complete implements engine.Stages.
func (a *stages) Complete(ctx context.Context, set *engine.Set) error {
	for _, p := range set.Parts {
		if w := engine.WorkOf(p); w.Segment != nil {
			g := w.Segment.Part.(*admitted).group
			if err := a.waitGroup(ctx, a.w.Pass, g); err != nil {
				return err
			}
			a.w.Pass.Clock.Group(g.batches)
			return nil
		}
	}
	return nil
}

// waitGroup waits for a group's reads (operator C) and divides their time among its batches by
// lines, so that the sum is exact.
func (a *stages) waitGroup(ctx context.Context, p *engine.Pass, g *readGroup) error {
	e := a.Engine
	if g.pending == nil {
		return nil
	}
	index := g.segs[0].slot.Index
	op, end := e.ReadContext(ctx)
	defer end()
	st, err := g.pending.Wait(op)
	if err != nil && op.Err() != nil {
		return errs.New(errs.Device, "batch %d: reads of %d lines did not end within %v: %w", index,
			g.lines, e.Config.OpTimeout, err)
	}
	g.pending = nil
	e.Trace.Read(-g.lines)
	if err != nil {
		return fmt.Errorf("batch %d: %w", index, engine.ReadError(err))
	}
	if st.Rows != g.lines {
		return errs.New(errs.Device, "batch %d: %d lines were asked for, %d were read", index,
			g.lines, st.Rows)
	}
	p.Clock.Read(g.submitted, st)
	hop := g.segs[0].Hop
	e.Trace.Set(report.TrackSubmit, plan.OperatorName("I", hop), g.submitted, st.Submit, p, index,
		g.batches, g.lines)
	e.Trace.Set(report.TrackComplete, plan.OperatorName("C", hop), g.submitted.Add(st.Submit),
		st.Complete, p, index, g.batches, g.lines)
	var done int64
	share := func(v,
		lines int64) int64 {
		return muldiv(v, done+lines, g.lines) - muldiv(v, done, g.lines)
	}
	for _, x := range g.segs {
		x.Stats = gpuio.ReadStats{
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

// Gather implements engine.Stages: rows go to the batch's feature tensor, and lines to the tier.
func (a *stages) Gather(ctx context.Context, w *engine.Work) error {
	e, s := a.Engine, w.Slot
	if s.Features == nil {
		s.Own = <-a.spare // as many as the walk lets batches have
		s.Features = a.w.Pass.PlaceOf(s.Index, s.Own)
	}
	if w.Segment == nil {
		return nil
	}
	x := w.Segment.Part.(*admitted)
	rows := x.First + x.Count
	if err := e.Fits(s.Index, rows, s.Features.Size()); err != nil {
		return err
	}
	if err := s.Features.Grow(rows * e.RowBytes); err != nil {
		return fmt.Errorf("features of %d rows: %w", rows, err)
	}
	if err := a.tier.Finish(e.GatherStream, x.ticket, x.group.staging, s.Features.Ptr(),
		e.RowBytes); err != nil {
		return err
	}
	x.out = segFinished
	if g := x.group; g.segs[len(g.segs)-1] == x {
		a.held = append(a.held, g) // its staging is in use until the stream is done
	}
	return nil
}

// Change implements engine.Stages.
func (a *stages) Change(*engine.Slot) error { return nil }

// Placed implements engine.Stages.
func (a *stages) Placed(s *engine.Slot) error {
	for i := range s.Segments[:s.Used] {
		y := s.Segments[i].Part.(*admitted)
		if err := a.tier.Release(y.ticket); err != nil {
			return err
		}
		y.out = segFree
	}
	for _, h := range a.held {
		a.unused <- h
	}
	a.held = a.held[:0]
	return nil
}

// Drain waits for merged reads that are in flight.
func (d *Tiers) Drain(rd context.Context) error {
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

// Settle ends what a walk left admitted or finished, when nothing is in flight any more.
func (d *Tiers) Settle() error {
	e := d.Engine
	var out []*admitted
	for _, s := range e.Slots {
		s.Features, s.Own = nil, nil
		for i := range s.Segments {
			if a, ok := s.Segments[i].Part.(*admitted); ok && a.out != segFree {
				out = append(out, a)
			}
		}
	}
	slices.SortFunc(out, func(a, b *admitted) int { return int(int64(a.seq) - int64(b.seq)) })
	var all []error
	abandoned := false
	for _, x := range out {
		switch {
		case x.out == segFinished:
			all = append(all, d.tier.Release(x.ticket))
		case !abandoned: // ends all later ones as well
			all = append(all, d.tier.Abandon(x.ticket))
			abandoned = true
		}
		x.out = segFree
	}
	return errors.Join(all...)
}

// The states of a segment's ticket.
const (
	segFree = iota
	segAdmitted
	segFinished
)

// The rest of engine.Tiers, for results and measurements:

// Lookahead implements engine.Tiers.
func (d *Tiers) Lookahead() int { return d.Engine.Config.Window }

// Forget implements engine.Tiers.
func (d *Tiers) Forget() {
	if d.tier != nil {
		d.tier.Forget()
	}
}

// Credit implements engine.Tiers.
func (d *Tiers) Credit(x cuda.Growable) error {
	d.xs = append(d.xs, x)
	return nil
}

// GPUBytes implements engine.Tiers.
func (d *Tiers) GPUBytes() int64 {
	if d.tier == nil {
		return d.Base.GPUBytes()
	}
	return d.tier.Config().Slots * d.lines.LineBytes
}

// BatchBytes implements engine.Tiers.
func (d *Tiers) BatchBytes(rows int64) (bytes, samples int64) {
	// In the worst case each row is on a line of its own. The accumulator's reads beside a batch
	// and the tier's own lists (pinned memory) are not counted: the staging grows later, and the
	// tier then shrinks.
	credits := int64(d.Engine.Plan.Credits)
	bytes = credits * rows * d.lines.LineBytes
	if d.onGPU() {
		bytes += credits*rows*(cache.GPUTicketBytes-prepare.BucketBytes)*9/8 +
			cache.GPUSetsWork(rows, d.Engine.Config.Window)
	}
	return bytes, int64(d.Engine.Plan.Samples)
}

// Describe implements engine.Tiers.
func (d *Tiers) Describe(r *report.RunInfo) {
	r.CacheLineBytes = d.lines.LineBytes
	if d.tier != nil {
		r.PolicyBytes = d.tier.MetadataBytes()
	}
	if d.acc.MaxBatches > 0 {
		a := d.acc
		r.Accumulator = &a
	}
}
