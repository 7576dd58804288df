package virtual

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/cache"
	"helios/dataset/parted"
	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/graph"
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
//   - A load reads the pages of rows and then those of lists, set behind set, in long commands, into
//     the CPU's memory: nothing of it takes the link to the GPU.
//   - Then all cores induce the topology, which takes one core cpu.induce_ns for an edge of the
//     parts and the static nodes.
//   - The next load begins when a mega-batch begins to train, and has the SSDs for itself. Its CPU
//     time takes nothing from other threads.
//   - Mini-batches are sampled from the CPU's memory, static rows are gathered from the tier that has
//     them, all others from the CPU's memory over the link.
//
// Evaluation samples the whole graph from the CPU's memory and reads rows. Partitioning and laying
// out by part are taken to have been done.

// mega is what a run over mega-batches has of them.
type mega struct {
	v       *run
	parts   *prepare.MegaParts
	planned *parted.Planned // nil: no graph is there, and nothing is sampled
	room    prepare.MegaRoom
	batches *prepare.MegaBatches
	split   []int64 // the training nodes, in the dataset
	order   *prepare.MegaOrder
	ordered int // the sample epoch of order
	passes  int // 0: not chosen yet

	rows, pages gpuio.Layout
	onGPU       bool          // the static rows
	lists       induced.Lists // of the static nodes
	raw         []byte        // edges of the mega-batch that is loaded
	mem         [][]byte
	seeds       []int64 // scratch
	slabs       []*vslab
	now         *vslab // that trains; nil: none
	next        *vload
	// idle is when the pass before ended: the next one begins then, though the clock is ahead where
	// a load went on behind it.
	idle     int64
	loadTime time.Duration // of the mega-batch that trains
	info     report.MegaInfo
}

// vslab is room for a mega-batch, and the one that is in it.
type vslab struct {
	at      map[int]int64 // as prepare.MegaPlaces has it
	parts   []int         // nil: none is there
	places  *induced.Places
	topo    *graph.Topology
	dtopo   *graph.DeviceTopology
	sampler *graph.Sampler
}

// close lets go of the mega-batch, its place aside.
func (s *vslab) close() error {
	var all []error
	if s.sampler != nil {
		all = append(all, s.sampler.Close())
	}
	if s.dtopo != nil {
		all = append(all, s.dtopo.Close())
	}
	if s.topo != nil {
		all = append(all, s.topo.Close())
	}
	*s = vslab{at: s.at}
	return errors.Join(all...)
}

func (s *vslab) holds(parts []int) bool {
	return s != nil && s.parts != nil && slices.Equal(s.parts, parts)
}

// vload is a mega-batch on its way. What it took is whole once the clock has passed its end.
type vload struct {
	slab       *vslab
	ahead      bool
	begin      int64
	there, end int64 // when its pages are there, and when it can train
	took       gpuio.ReadStats
	bytes      [2]int64 // of features, of edges
}

// openMega partitions the graph and plays the reads of what is in every mega-batch; b says how many
// rows the GPU tier has room for.
func (v *run) openMega(ctx context.Context, b plan.TierSizes) (err error) {
	t := &mega{v: v, ordered: -1, rows: v.layout}
	v.mega = t
	v.OnClose(func() error { return t.close() })
	if p := v.Config.Passes; p != plan.PassesAuto {
		t.passes = p
	}
	if t.split, err = prepare.TrainSplit(v.In); err != nil {
		return err
	}
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

// open makes room for mega-batches of the parts.
func (t *mega) open(b plan.TierSizes) (err error) {
	v, p := t.v, t.parts
	t.onGPU = p.StaticNodes() > 0 && p.StaticNodes() <= b.GPURows
	if t.room, err = p.Room(&v.Config, 0, t.onGPU); err != nil {
		return err
	}
	t.batches = p.Batches(&v.Config, t.room)
	if t.pages, err = gpuio.NewLayout(p.Spec.Pages, int(p.Spec.PageBytes), int(v.layout.SSDs),
		int(v.layout.LBABytes)); err != nil {
		return err
	}
	for range t.room.Slabs {
		t.slabs = append(t.slabs, &vslab{})
	}
	return nil
}

// openGraph takes what mini-batches are sampled from.
func (t *mega) openGraph() error {
	v, p := t.v, t.parts
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
	// Evaluation finds no row in a tier.
	if v.hetero, err = cache.NewHetero(v.Device, v.Rows, 1, int(v.layout.SSDs),
		v.placement); err != nil {
		return err
	}
	v.OnClose(v.hetero.Close)
	if v.buckets, err = v.hetero.NewBuckets(); err != nil {
		return err
	}
	v.OnClose(v.buckets.Close)
	return nil
}

// fill plays the reads of what is in every mega-batch.
func (t *mega) fill() error {
	v, p := t.v, t.parts
	if err := t.turnToParts(true); err != nil {
		return err
	}
	begin := v.m.sim.Now()
	for _, r := range []parted.Run{p.StaticFeatures, p.StaticEdges} {
		t.readRuns([]prepare.PageRun{{Run: r}}, func(took gpuio.ReadStats) {
			t.info.AddReads(took)
			t.info.StaticBytes += took.Bytes
		})
		v.m.sim.Run()
	}
	v.fillNS = v.m.sim.Now() - begin
	v.span("fill tiers", begin)
	return nil
}

// planParts partitions the graph and works out where everything would lie.
func (t *mega) planParts(ctx context.Context) error {
	v := t.v
	given, o, err := v.Partition(ctx, t.split)
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
	t.parts, err = prepare.NewMegaParts(t.planned.Layout, v.Config.PartOrder)
	return err
}

func (t *mega) alloc(bytes int64) ([]byte, error) {
	if bytes == 0 {
		return nil, nil
	}
	b, err := hostmem.Alloc(bytes, "edges of parts")
	if err == nil {
		t.mem = append(t.mem, b)
	}
	return b, err
}

func (t *mega) close() error {
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

// readRuns plays reads of runs of pages, set behind set, and tells done what they took.
func (t *mega) readRuns(runs []prepare.PageRun, done func(took gpuio.ReadStats)) {
	v := t.v
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
		striped, off := make([]int64, len(ids)), make([]int64, v.layout.SSDs+1)
		stripe(ids, striped, off)
		reads, per, size := v.commands(striped, off)
		for _, r := range reads {
			took.Commands += r.Commands
			took.Bytes += r.Bytes
		}
		v.m.stack.SubmitSized(per, size, func(at iosim.Times) {
			v.m.gpu.changed()
			took.Submit += time.Duration(at.SubmitEndNS - at.SubmitNS)
			next()
		})
		v.m.gpu.changed()
	}
	next()
}

// turnToParts has the stack read pages of parts, or rows. No load is under way.
func (t *mega) turnToParts(parts bool) error {
	v := t.v
	v.paged, v.toHost = parts, parts
	if parts {
		return v.turn(t.pages)
	}
	return v.turn(t.rows)
}

// pass plays a pass: an epoch, or an evaluation, which waits for what is being loaded. It begins
// when the one before it ended.
func (t *mega) pass(ctx context.Context, p *vpass, sum *report.Partial, train bool) (err error) {
	v := t.v
	if err := t.turnToParts(train); err != nil {
		return err
	}
	p.begin()
	p.start = min(p.start, max(t.idle, v.presampleNS+v.fillNS))
	p.end = p.start
	if train {
		err = t.play(ctx, p, sum)
	} else {
		p.waited += v.m.sim.Now() - p.start
		err = p.walk(ctx)
	}
	t.idle = p.end
	return err
}

// orderOf is the order of an epoch by the number of its samples.
func (t *mega) orderOf(sampleEpoch int) *prepare.MegaOrder {
	if t.ordered != sampleEpoch {
		t.order, t.ordered = t.batches.Order(t.split, sampleEpoch, max(t.passes, 1)), sampleEpoch
	}
	return t.order
}

// fetch begins to load a mega-batch into a slab that nothing uses.
func (t *mega) fetch(ctx context.Context, parts []int, slab *vslab, ahead bool) error {
	v, m := t.v, t.v.m
	places := t.parts.Place(parts, slab.at)
	if err := slab.close(); err != nil {
		return err
	}
	slab.at = places.At
	if err := t.induce(ctx, slab, &places); err != nil {
		return fmt.Errorf("mega-batch of parts %v: %w", parts, err)
	}
	slab.parts = parts
	edges := t.parts.StaticEdgeCount
	for _, p := range parts {
		edges += t.parts.Edges[p]
	}
	cpu := &m.m.Profile.CPU
	inducing := int64(float64(edges) * cpu.InduceNS.Value / max(cpu.Cores.Value, 1))
	n := &vload{slab: slab, ahead: ahead, begin: m.sim.Now()}
	t.next = n
	t.readRuns(places.Features, func(took gpuio.ReadStats) {
		n.took, n.bytes[0] = took, took.Bytes
		t.readRuns(places.Edges, func(took gpuio.ReadStats) {
			n.took, n.bytes[1] = report.AddReadStats(n.took, took), took.Bytes
			n.there = m.sim.Now()
			m.sim.After(inducing, func() {
				n.end = m.sim.Now()
				v.draw(report.TrackSuper, "load mega-batch", n.begin, n.end)
				v.draw(report.TrackInspect, "induce topology", n.there, n.end)
			})
		})
	})
	return prepare.Interrupted(ctx)
}

// induce makes a mega-batch's topology, and a sampler over it.
func (t *mega) induce(ctx context.Context, slab *vslab, places *prepare.MegaPlaces) (err error) {
	v := t.v
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
	if slab.topo, err = induced.Build(ctx, slab.places, t.lists, places.Parts, 0); err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	if slab.dtopo, err = graph.Attach(v.Device, slab.topo); err != nil {
		return err
	}
	slab.sampler, err = v.SamplerOver(slab.dtopo)
	return err
}

// play plays an epoch, one mega-batch after the other.
func (t *mega) play(ctx context.Context, p *vpass, sum *report.Partial) error {
	v, o := t.v, t.orderOf(t.v.src.key)
	end := p.n
	for at := p.first; at < end; {
		k, stop := o.Mega(at), end
		if t.passes == 0 { // the first mega-batch trains once, and tells how often
			var err error
			if stop, err = t.firstPass(o, at); err != nil {
				return err
			}
		}
		if err := t.swap(ctx, p, o.Parts[k], sum); err != nil {
			return err
		}
		if err := t.ahead(ctx, p, o, k, end); err != nil {
			return err
		}
		p.first, p.n = at, min(o.Ends[k], stop, end)
		begin := v.m.sim.Now()
		if err := p.walk(ctx); err != nil {
			return err
		}
		at = p.n
		if t.passes == 0 {
			took := time.Duration(p.end - begin)
			t.passes = prepare.ChoosePasses(t.loadTime, took*time.Duration(o.First[0])/
				time.Duration(p.n-p.first))
			t.ordered = -1
			o = t.orderOf(v.src.key)
			p.steps(v.Config.Shards, o.Len())
			_, end = v.hw.Limit(o.Len())
		}
	}
	return nil
}

// firstPass returns where the first pass over the first mega-batch ends, in whole steps.
func (t *mega) firstPass(o *prepare.MegaOrder, at int) (end int, err error) {
	n, of := o.First[0], t.v.Config.Shards
	if end = n / of * of; at >= end {
		return 0, errs.New(errs.Usage,
			"%v auto: the first mega-batch has %d mini-batches, and what is played of them from number %d on is no whole step of %v %d, so that no pass can be measured; give a number",
			errs.Key("passes"), n, at, errs.Key("shards"), of)
	}
	return end, nil
}

// swap makes parts the mega-batch that trains.
func (t *mega) swap(ctx context.Context, p *vpass, parts []int, sum *report.Partial) error {
	v := t.v
	if t.now.holds(parts) {
		return nil
	}
	if t.next != nil && !t.next.slab.holds(parts) { // not all of an epoch is played
		t.next = nil
	}
	idle := p.end
	if t.next == nil {
		t.now = nil
		if err := t.fetch(ctx, parts, t.slabs[0], false); err != nil {
			return err
		}
		v.m.sim.Run()
	}
	n, i := t.next, &t.info
	t.next, t.now, t.loadTime = nil, n.slab, time.Duration(n.end-n.begin)
	waited := v.m.sim.Now() - idle
	p.waited += waited
	i.AddReads(n.took)
	i.FeatureBytes += n.bytes[0]
	i.EdgeBytes += n.bytes[1]
	i.MegaBatches++
	i.LoadSeconds += t.loadTime.Seconds()
	i.InduceSeconds += float64(n.end-n.there) / 1e9
	i.WaitSeconds += float64(waited) / 1e9
	if waited > int64(time.Millisecond) {
		i.Waits++
	}
	if n.ahead {
		i.Ahead++
	}
	sum.BytesSSD += n.took.Bytes
	sum.Commands += n.took.Commands
	p.submit += int64(n.took.Submit)
	from := func(ns int64) int64 { return max(ns, p.start) } // what passed before is of no epoch
	p.completes = append(p.completes, [2]int64{from(n.begin), from(n.there)})
	v.m.inspected += from(n.end) - from(n.there)
	return nil
}

// ahead begins to load what trains after mega-batch k of an epoch that is played up to end: the
// next one, or the first of the next epoch.
func (t *mega) ahead(ctx context.Context, p *vpass, o *prepare.MegaOrder, k, end int) error {
	v, c := t.v, &t.v.Config
	if t.next != nil || len(t.slabs) < 2 {
		return nil
	}
	var parts []int
	switch {
	case o.Ends[k] < end || t.passes == 0 && k+1 < len(o.Parts):
		parts = o.Parts[k+1]
	case p.epoch+1 < c.Epochs:
		next := t.batches.Order(t.split, c.SampleEpoch(p.epoch+1), max(t.passes, 1))
		if first, n := v.hw.Limit(next.Len()); first < n {
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
func (t *mega) shape(ctx context.Context, i int) (*cost.Shape, error) {
	v, mb := t.v, t.v.mbs[0]
	t.seeds = t.seeds[:0]
	for _, id := range t.order.IDs(i) {
		t.seeds = append(t.seeds, t.now.places.Of(id))
	}
	whole := v.Sampler
	v.Sampler = t.now.sampler
	err := v.SampleWhole(ctx, mb, v.src.key, i, t.seeds)
	v.Sampler = whole
	if err != nil {
		return nil, fmt.Errorf("batch %d: %w", i, err)
	}
	s, nodes := cost.ShapeOf(mb), hostmem.View[int64](mb.Nodes.Bytes())
	s.At = i
	if v.Config.Method().WholeLists {
		s.CountLists(t.now.topo.Indptr, nodes)
	}
	statics := t.parts.StaticNodes()
	err = v.parts(&s, func(from int64, part *cost.Part) error {
		for _, id := range nodes[from : from+part.Count] {
			if t.onGPU && id < statics {
				part.NGPU++
			} else {
				part.NCPU++
			}
		}
		return nil
	})
	return &s, err
}

// describe says what the parts are, and what loading them has taken.
func (t *mega) describe(c *plan.Config) *report.MegaInfo {
	p, i := t.parts, t.info
	i.PagesOn, i.Parts, i.Loaded, i.Order = plan.PagesSSDs, p.Parts, t.room.Loaded, c.PartOrder
	i.Passes, i.PassesAuto = t.passes, c.Passes == plan.PassesAuto
	i.StaticRows, i.StaticOnGPU = p.StaticNodes(), t.onGPU
	i.PageBytes, i.DiskBytes, i.EpochBytes = p.Spec.PageBytes, p.DiskBytes(),
		p.EpochBytes(t.room.Loaded)
	i.CPUBytes, i.Budget = t.room.Total(), t.room.Budget
	i.Settle()
	return &i
}
