package hier

import (
	"context"
	"errors"
	"fmt"
	"helios/sched/tiers/static"
	"helios/sched/virtual"
	"time"

	"helios/dataset/parted"
	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/graph/induced"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Mega-batches on the virtual clock. The graph is partitioned for real, a mega-batch's topology is
// induced for real and its mini-batches are sampled from it, so that pages, requests, rows and
// memory are those of a run whose pages are striped over the machine's SSDs; no layout is made, and
// nothing is read. Its times:
//
//   - A load reads the pages of rows and then those of lists, set behind set, in long commands,
// into
//     the CPU's memory: nothing of it takes the link to the GPU.
//   - Then all cores induce the topology, which takes one core cpu.induce_ns for an edge of the
//     parts and the static nodes.
//   - The next load begins when a mega-batch begins to train, and has the SSDs for itself. Its CPU
//     time takes nothing from other threads.
//   - Mini-batches are sampled from the CPU's memory, static rows are gathered from the tier that
// has
//     them, all others from the CPU's memory over the link.
//
// Evaluation samples the whole graph from the CPU's memory and reads rows. Partitioning and laying
// out by part are taken to have been done.

// Simulate is the system on the virtual clock.
var Simulate = virtual.System{New: func(v *virtual.Player) virtual.Tiers {
	t := &simulation{Simulation: static.Simulation{Base: virtual.Base{Player: v}},
		rounds: newRounds(&v.Config)}
	t.Self = t
	return t
}, Refuse: refuse}

// refuse refuses what has no times.
func refuse(c *plan.Config) error {
	if c.Topology == plan.TopologySSD {
		return errs.New(errs.Capability,
			"%v virtual partitions the graph of mega-batches in memory; use %v %s",
			errs.Key("clock"), errs.Key("topology"), plan.TopologyMemory)
	}
	return virtual.RefuseTuning(c)
}

// simulation has mega-batches on the virtual clock.
type simulation struct {
	static.Simulation // of evaluation: no row is in a tier
	training          bool
	parts             *MegaParts
	planned           *parted.Planned // nil: no graph is there, and nothing is sampled
	rounds

	rows, pages gpuio.Layout
	onGPU       bool          // the static rows
	lists       induced.Lists // of the static nodes
	raw         []byte        // edges of the mega-batch that is loaded
	mem         [][]byte
	seeds       []int64 // scratch
	slabs       []*megaBatch
	now         *megaBatch // that trains; nil: none
	next        *simLoad
	// idle is the end of the pass before: the next one begins then, though the clock is ahead where
	// a load outlasted it.
	idle     int64
	loadTime time.Duration // of the mega-batch that trains
}

// simLoad is a mega-batch on its way. Its figures are whole once the clock has passed its end.
type simLoad struct {
	slab       *megaBatch
	begin      int64
	there, end int64 // when its pages are there, and when it can train
	taken
}

// Open implements Tiers: it partitions the graph and plays the reads of the part of every
// mega-batch; b has the rows that the GPU tier has room for.
func (t *simulation) Open(ctx context.Context, b plan.TierSizes) (err error) {
	v := t.Player
	t.rows = v.Layout
	v.OnClose(t.close)
	if t.split, err = prepare.TrainSplit(v.In); err != nil {
		return err
	}
	t.labels = v.Targets.Classes(t.split)
	if err := t.planParts(ctx); err != nil {
		return err
	}
	if err := t.open(b); err != nil {
		return err
	}
	if err := t.openGraph(); err != nil {
		return err
	}
	if err := t.fill(); err != nil {
		return err
	}
	return prepare.Interrupted(ctx)
}

// OpenWork implements Tiers.
func (t *simulation) OpenWork(_ context.Context, w *virtual.Work) error {
	v := t.Player
	t.parts = w.Own.(*MegaParts)
	t.rows, t.split = v.Layout, t.parts.Train
	v.Hardware.Batches, v.Hardware.Warm = w.Batches, 0
	if err := t.open(w.Tiers); err != nil {
		return err
	}
	return t.fill()
}

// PlayWork implements Tiers.
func (t *simulation) PlayWork(ctx context.Context, w *virtual.Work) (*virtual.Played, error) {
	return t.playMega(ctx, func(i int) (*cost.Shape, error) {
		b, err := w.DrawMega(len(t.order.IDs(i)))
		if err != nil {
			return nil, err
		}
		return t.Player.LookUpDrawn(i, b)
	})
}

// Find implements Tiers: all rows are in memory, and static nodes have the lowest numbers.
func (t *simulation) Find(rows, _ []int64, part *cost.Part) { t.count(rows, part) }

// count counts rows by their tiers.
func (t *simulation) count(nodes []int64, part *cost.Part) {
	statics := t.parts.StaticNodes()
	for _, id := range nodes {
		if t.onGPU && id < statics {
			part.NGPU++
		} else {
			part.NCPU++
		}
	}
}

// Order implements Tiers.
func (t *simulation) Order(_ []int64, sampleEpoch int) prepare.Order {
	return t.orderOf(sampleEpoch).Order
}

// Before implements Tiers: batches that are not played fill nothing.
func (t *simulation) Before(_ context.Context, _ *virtual.Pass, _ int, train bool) error {
	t.training = train
	return nil
}

// Shape implements Tiers.
func (t *simulation) Shape(ctx context.Context, i int) (*cost.Shape, error) {
	if !t.training {
		return t.Simulation.Shape(ctx, i)
	}
	return t.shape(ctx, i)
}

// GPUBytes implements Tiers.
func (t *simulation) GPUBytes() int64 {
	if !t.onGPU {
		return t.Simulation.GPUBytes()
	}
	return t.parts.StaticFeatures.Pages * t.parts.Spec.PageBytes
}

// CPUBytes implements Tiers.
func (t *simulation) CPUBytes() int64 { return t.room.Total() }

// Describe implements Tiers.
func (t *simulation) Describe(r *report.RunInfo) {
	if t.parts != nil {
		r.Mega = t.describe(&t.Player.Config, t.parts, t.onGPU)
	}
}

// open makes room for mega-batches of the parts.
func (t *simulation) open(b plan.TierSizes) (err error) {
	v, p := t.Player, t.parts
	t.onGPU = p.StaticNodes() > 0 && p.StaticNodes() <= b.GPURows
	t.info.PagesOn = plan.PagesSSDs
	if err = t.size(&v.Config, p, t.onGPU); err != nil {
		return err
	}
	if t.pages, err = gpuio.NewLayout(p.Spec.Pages, int(p.Spec.PageBytes), int(v.Layout.SSDs),
		int(v.Layout.LBABytes)); err != nil {
		return err
	}
	for range t.room.Slabs {
		t.slabs = append(t.slabs, &megaBatch{})
	}
	return nil
}

// openGraph takes what mini-batches are sampled from.
func (t *simulation) openGraph() error {
	v, p := t.Player, t.parts
	static, err := t.alloc(p.StaticEdges.Pages * p.Spec.PageBytes)
	if err != nil {
		return err
	}
	s, err := t.planned.StaticNodeEdges(static)
	if err != nil {
		return err
	}
	t.lists = induced.Lists{Degrees: s.Degrees, Neighbors: s.Neighbors}
	if t.raw, err = t.alloc(t.room.Edges); err != nil {
		return err
	}
	return t.Hold(v.Layout.SSDs)
}

// fill plays the reads of what is in every mega-batch.
func (t *simulation) fill() error {
	v, p := t.Player, t.parts
	if err := t.turnToParts(true); err != nil {
		return err
	}
	begin := v.Machine.Sim.Now()
	for _, r := range []parted.Run{p.StaticFeatures, p.StaticEdges} {
		t.readRuns([]prepare.PageRun{{Run: r}}, func(took gpuio.ReadStats) {
			t.info.AddReads(took)
			t.info.StaticBytes += took.Bytes
		})
		v.Machine.Sim.Run()
	}
	v.FillNS = v.Machine.Sim.Now() - begin
	v.Span("fill tiers", begin)
	return nil
}

// planParts partitions the graph and works out where everything would lie.
func (t *simulation) planParts(ctx context.Context) error {
	v := t.Player
	given, o, err := partitionOf(ctx, v.Sampling, t.split)
	if err != nil {
		return err
	}
	if given == nil {
		o.Progress = func(stage string, done, total int64) {
			v.Observer.TellStep(stage, int(done), int(total))
		}
		if given, err = partition.Make(ctx, v.Topology, o); err != nil {
			if stopped := prepare.Interrupted(ctx); stopped != nil {
				return stopped
			}
			return err
		}
		given.Info.Dataset = v.In.Dataset.Meta.UUID
	}
	t.planned, err = parted.Plan(ctx, v.In.Dataset, v.Topology, parted.Options{Partition: given,
		StaticShare: v.Config.StaticNodes.Fraction(), RowType: v.RowType})
	if err = errors.Join(err, given.Close()); err != nil {
		return err
	}
	t.parts, err = NewMegaParts(t.planned.Layout, v.Config.PartOrder)
	return err
}

func (t *simulation) alloc(bytes int64) ([]byte, error) {
	if bytes == 0 {
		return nil, nil
	}
	b, err := hostmem.Alloc(bytes, "edges of parts")
	if err == nil {
		t.mem = append(t.mem, b)
	}
	return b, err
}

func (t *simulation) close() error {
	var all []error
	for _, s := range t.slabs {
		all = append(all, s.close())
	}
	for _, b := range t.mem {
		all = append(all, hostmem.Free(b))
	}
	if t.planned != nil {
		all = append(all, t.planned.Close())
	}
	return errors.Join(all...)
}

// readRuns plays reads of runs of pages, set behind set, and calls done with their cost.
func (t *simulation) readRuns(runs []prepare.PageRun, done func(took gpuio.ReadStats)) {
	v := t.Player
	sets, _ := prepare.CutPages(runs, int64(t.pages.RowBytes))
	var took gpuio.ReadStats
	var next func()
	next = func() {
		if len(sets) == 0 {
			done(took)
			return
		}
		var ids []int64
		for _, r := range sets[0] {
			for page := range r.Pages {
				ids = append(ids, r.Page+page)
			}
		}
		sets = sets[1:]
		reads, per, size := v.StripedReads(ids)
		for _, r := range reads {
			took.Commands += r.Commands
			took.Bytes += r.Bytes
		}
		v.Machine.Stack.SubmitSized(per, size, func(times iosim.Times) {
			v.Machine.Gpu.Changed()
			took.Submit += time.Duration(times.SubmitEndNS - times.SubmitNS)
			next()
		})
		v.Machine.Gpu.Changed()
	}
	next()
}

// turnToParts has the stack read pages of parts, or rows. No load is under way.
func (t *simulation) turnToParts(parts bool) error {
	v := t.Player
	v.Paged, v.ToHost = parts, parts
	if parts {
		return v.Turn(t.pages)
	}
	return v.Turn(t.rows)
}

// Pass implements Tiers: an epoch, or an evaluation, which waits for what is being loaded. It
// begins when the one before it ended.
func (t *simulation) Pass(ctx context.Context, p *virtual.Pass, sum *report.Partial, train bool,
	_ func(ctx context.Context) error) (err error) {
	v := t.Player
	if err := t.turnToParts(train); err != nil {
		return err
	}
	p.Begin()
	p.Began = min(p.Began, max(t.idle, v.PresampleNS+v.FillNS))
	p.Ended = p.Began
	if train {
		err = t.play(ctx, p, sum)
	} else {
		p.Waited += v.Machine.Sim.Now() - p.Began
		err = p.Walk(ctx)
	}
	t.idle = p.Ended
	return err
}

// fetch begins to load a mega-batch into a slab that nothing uses.
func (t *simulation) fetch(ctx context.Context, parts []int, slab *megaBatch, ahead bool) error {
	v, m := t.Player, t.Player.Machine
	places := t.parts.Place(parts, slab.at)
	if err := slab.close(); err != nil {
		return err
	}
	slab.at = places.At
	if err := t.induce(ctx, slab, &places); err != nil {
		return err
	}
	slab.parts = parts
	edges := t.parts.StaticEdgeCount
	for _, p := range parts {
		edges += t.parts.Edges[p]
	}
	cpu := &m.Model.Profile.CPU
	inducing := int64(float64(edges) * cpu.InduceNS.Value / max(cpu.Cores.Value, 1))
	n := &simLoad{slab: slab, begin: m.Sim.Now(), taken: taken{ahead: ahead}}
	t.next = n
	t.readRuns(places.Features, func(took gpuio.ReadStats) {
		n.took, n.bytes[0] = took, took.Bytes
		t.readRuns(places.Edges, func(took gpuio.ReadStats) {
			n.took, n.bytes[1] = report.AddReadStats(n.took, took), took.Bytes
			n.there = m.Sim.Now()
			m.Sim.After(inducing, func() {
				n.end = m.Sim.Now()
				n.load, n.induce = time.Duration(n.end-n.begin), time.Duration(n.end-n.there)
				v.Draw(report.TrackSuper, "load mega-batch", n.begin, n.end)
				v.Draw(report.TrackInspect, "induce topology", n.there, n.end)
			})
		})
	})
	return prepare.Interrupted(ctx)
}

// induce makes a mega-batch's topology, and a sampler over it.
func (t *simulation) induce(ctx context.Context, slab *megaBatch,
	places *MegaPlaces) (err error) {
	v := t.Player
	if t.planned == nil {
		return nil
	}
	for i := range places.Parts {
		q := &places.Parts[i]
		s, err := t.planned.PartEdges(q.Part, places.Section(i, t.raw))
		if err != nil {
			return err
		}
		q.Lists = induced.Lists{Degrees: s.Degrees, Neighbors: s.Neighbors}
	}
	if slab.places, err = induced.NewPlaces(t.parts.Numbering, t.room.Rows,
		places.Parts); err != nil {
		return err
	}
	if err = slab.induce(ctx, v.Sampling, t.lists, places.Parts, 0); err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
	}
	return err
}

// play plays an epoch, one mega-batch after the other.
func (t *simulation) play(ctx context.Context, p *virtual.Pass, sum *report.Partial) error {
	v, o := t.Player, t.orderOf(t.Player.Source.Key)
	end := p.End
	for pos := p.First; pos < end; {
		k, stop := o.Mega(pos), end
		if t.passes == 0 { // the first mega-batch trains once, and decides the passes
			var err error
			if stop, err = t.firstPass(o, pos); err != nil {
				return err
			}
		}
		if err := t.swap(ctx, p, o.Parts[k], sum); err != nil {
			return err
		}
		if err := t.ahead(ctx, p, o, k, end); err != nil {
			return err
		}
		p.First, p.End = pos, min(o.Ends[k], stop, end)
		begin := v.Machine.Sim.Now()
		if err := p.Walk(ctx); err != nil {
			return err
		}
		pos = p.End
		if t.passes == 0 {
			took := time.Duration(p.Ended - begin)
			t.choose(t.loadTime, took*time.Duration(o.First[0])/time.Duration(p.End-p.First))
			o = t.orderOf(v.Source.Key)
			p.Steps(v.Config.Shards, o.Len())
			_, end = v.Hardware.Limit(o.Len())
		}
	}
	return nil
}

// firstPass returns where the first pass over the first mega-batch ends, in whole steps.
func (t *simulation) firstPass(o *MegaOrder, pos int) (end int, err error) {
	n, of := o.First[0], t.Player.Config.Shards
	if end = n / of * of; pos >= end {
		return 0, errs.New(errs.Usage,
			"%v auto: the first mega-batch has %d mini-batches, and what is played of them from number %d on is no whole step of %v %d, so that no pass can be measured; give a number",
			errs.Key("passes"), n, pos, errs.Key("shards"), of)
	}
	return end, nil
}

// swap makes parts the mega-batch that trains.
func (t *simulation) swap(ctx context.Context, p *virtual.Pass, parts []int,
	sum *report.Partial) error {
	v := t.Player
	if t.now.holds(parts) {
		return nil
	}
	if t.next != nil && !t.next.slab.holds(parts) { // a part of an epoch is played
		t.next = nil
	}
	idle := p.Ended
	if t.next == nil {
		t.now = nil
		if err := t.fetch(ctx, parts, t.slabs[0], false); err != nil {
			return err
		}
		v.Machine.Sim.Run()
	}
	n := t.next
	t.next, t.now, t.loadTime = nil, n.slab, n.load
	waited := v.Machine.Sim.Now() - idle
	p.Waited += waited
	t.countLoad(&n.taken, time.Duration(waited))
	sum.BytesSSD += n.took.Bytes
	sum.Commands += n.took.Commands
	p.Submit += int64(n.took.Submit)
	// Time that passed before belongs to no epoch.
	from := func(ns int64) int64 { return max(ns, p.Began) }
	p.Completes = append(p.Completes, [2]int64{from(n.begin), from(n.there)})
	v.Machine.Inspected += from(n.end) - from(n.there)
	return nil
}

// ahead begins to load what trains after mega-batch k of an epoch that is played up to end: the
// next one, or the first of the next epoch.
func (t *simulation) ahead(ctx context.Context, p *virtual.Pass, o *MegaOrder, k,
	end int) error {
	v, c := t.Player, &t.Player.Config
	if t.next != nil || len(t.slabs) < 2 {
		return nil
	}
	var parts []int
	switch {
	case o.Ends[k] < end || t.passes == 0 && k+1 < len(o.Parts):
		parts = o.Parts[k+1]
	case p.Epoch+1 < c.Epochs:
		next := t.batches.Order(t.split, c.SampleEpoch(p.Epoch+1), max(t.passes, 1))
		if first, n := v.Hardware.Limit(next.Len()); first < n {
			parts = next.Parts[next.Mega(first)]
		}
	}
	if parts == nil || t.now.holds(parts) {
		return nil
	}
	slab := t.slabs[0]
	if slab == t.now {
		slab = t.slabs[1]
	}
	return t.fetch(ctx, parts, slab, true)
}

// shape samples mini-batch i within the mega-batch that is there.
func (t *simulation) shape(ctx context.Context, i int) (*cost.Shape, error) {
	v, mb := t.Player, t.Player.Batches[0]
	t.seeds = t.seeds[:0]
	for _, id := range t.order.IDs(i) {
		t.seeds = append(t.seeds, t.now.places.Of(id))
	}
	whole := v.Sampler
	v.Sampler = t.now.sampler
	err := v.SampleWhole(ctx, mb, v.Source.Key, i, t.seeds)
	v.Sampler = whole
	if err != nil {
		return nil, fmt.Errorf("batch %d: %w", i, err)
	}
	s, nodes := cost.ShapeOf(mb), hostmem.View[int64](mb.Nodes.Bytes())
	s.At = i
	if v.Config.Method().WholeLists {
		s.CountLists(t.now.topo.Indptr, nodes)
	}
	err = v.Parts(&s, func(from int64, part *cost.Part) error {
		t.count(nodes[from:from+part.Count], part)
		return nil
	})
	return &s, err
}
