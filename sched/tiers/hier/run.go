// Package hier divides the graph into parts that lie on disk in one piece each, loads a few of them
// at a time, and samples mini-batches within these: modes hier (HierBatching) and marius
// (MariusGNN, Waleffe et al., EuroSys 2023).
package hier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/dataset/parted"
	"helios/gpuio"
	"helios/graph"
	"helios/graph/induced"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// Run is the system on an engine.
var Run = engine.System{New: New,
	Prepares: true, Loads: Loads, Resume: Resume}

// Tiers of mega-batches, as those of HierBatching and MariusGNN. The graph is in parts on disk
// (package dataset/parted). A few parts are in memory together, with the static nodes, which are in
// every mega-batch; mini-batches are sampled from the graph that these induce, so that no row is
// read for a mini-batch. While one mega-batch trains the next is loaded, in long sequential reads,
// into the other of two slabs.
//
// In a mega-batch nodes are numbered anew: the static ones first, then a slab of the parts' rows as
// they lie in their pages. A node's number is the place of its row, so that the index of the tiers
// is the same for every mega-batch.
//
// Evaluation samples the whole graph, and reads rows from where the features are, as static tiers
// do. The I/O stack turns from parts to rows and back between passes.
type Tiers struct {
	static.Tiers              // of evaluation: no row is in a tier
	train        static.Tiers // of a walk over the mega-batch that is there
	parts        *megaParts
	rounds
	lastLoad time.Duration

	// Of the tiers that are placed.
	spans       *cache.Spans
	static      cuda.Buffer // rows of the static nodes
	staticLists cuda.Buffer // their lists
	lists       induced.Lists
	staticOld   []uint32    // their numbers in the dataset
	raw         cuda.Buffer // edges of the mega-batch that is being loaded
	slabs       []*slab
	now         *slab // that trains; nil: none
	next        *coming
}

// coming is a mega-batch that is loaded.
type coming struct {
	parts  []int
	slab   *slab
	cancel context.CancelFunc
	begin  time.Time
	done   chan struct{}
	taken  // valid once done is closed, as what follows
	err    error
}

// New makes the tiers of an engine.
func New(e *engine.Engine) (engine.Tiers, error) {
	t := &Tiers{Tiers: static.Tiers{Base: engine.Base{Engine: e}},
		train: static.Tiers{Base: engine.Base{Engine: e}}, rounds: newRounds(&e.Config)}
	e.OnClose(t.closeParts) // first, so that it comes last
	return t, nil
}

// Pages implements engine.Tiers.
func (t *Tiers) Pages() string { return "pages of parts" }

// Layout implements engine.Tiers.
func (t *Tiers) Layout() gpuio.Layout { return t.Engine.Store.ReadLayout() }

// Place opens the parts, which are made where they are not there yet, and makes room for
// mega-batches. The static nodes' rows and lists are read.
func (t *Tiers) Place(ctx context.Context) (err error) {
	e := t.Engine
	if t.parts == nil {
		if err := t.openParts(ctx); err != nil {
			return engine.Untiered(err)
		}
		// Before the stack closes and the tiers go, no load may be under way.
		e.OnClose(func() error { t.stop(); return nil })
	}
	if err := t.Engine.Store.TurnTo(ctx, t.parts.pages); err != nil {
		return engine.Untiered(err)
	}
	onGPU := t.statics() <= e.Sizes.GPURows && t.statics() > 0
	all := e.Rows * e.RowBytes
	if given, is := e.Config.CPUCache.Of(all), budget(&e.Config, all); given < is &&
		t.room.Loaded == 0 {
		e.Observer.TellNote(
			"{cpu-cache} of %s counts as %s: parts are whole pages, and fewer would hold none",
			units.FormatBytes(given), units.FormatBytes(is))
	}
	if err := t.size(&e.Config, t.parts.MegaParts, onGPU); err != nil {
		return engine.Untiered(err)
	}
	e.Sizes = plan.TierSizes{}
	kind := cuda.MemPinned
	if onGPU {
		e.Sizes.GPURows, kind = t.statics(), cuda.MemDevice
	}
	if t.Hetero, err = cache.NewHetero(e.Device, e.Rows, e.RowBytes, len(e.Store.SSDs),
		cache.Placement{}); err != nil {
		return err
	}
	if err := t.Fill(ctx); err != nil { // the buckets of lookups; no row is in a tier
		return err
	}
	t.train.FirstOnHost = !onGPU
	if err := t.placeStatics(ctx, kind); err != nil {
		return err
	}
	return t.makeSlabs()
}

// placeStatics reads the rows and the lists of the static nodes.
func (t *Tiers) placeStatics(ctx context.Context, kind cuda.MemKind) (err error) {
	e, begin := t.Engine, time.Now()
	if t.spans, err = cache.NewSpans(e.Device, t.statics(), t.room.Rows); err != nil {
		return err
	}
	page := t.parts.Spec.PageBytes
	if t.static, err = e.Device.Alloc(kind, t.parts.StaticFeatures.Pages*page,
		"rows of static nodes"); err != nil {
		return err
	}
	if t.staticLists, err = e.Device.Alloc(cuda.MemPinned, t.parts.StaticEdges.Pages*page,
		"lists of static nodes"); err != nil {
		return err
	}
	for _, f := range []struct {
		run  parted.Run
		to   cuda.Buffer
		name string
	}{{t.parts.StaticFeatures, t.static, "fill static rows"},
		{t.parts.StaticEdges, t.staticLists, "fill static lists"}} {
		took, err := e.Store.ReadPages(ctx, []prepare.PageRun{{Run: f.run}}, f.to, f.name, true)
		t.info.AddReads(took)
		t.info.StaticBytes += took.Bytes
		if err != nil {
			return err
		}
	}
	if t.lists, t.staticOld, err = lists(t.parts.StaticSection(
		t.staticLists.Bytes())); err != nil {
		return engine.Untiered(err)
	}
	e.Filled(begin)
	return nil
}

// makeSlabs makes room for mega-batches.
func (t *Tiers) makeSlabs() (err error) {
	e := t.Engine
	if t.raw, err = e.Device.Alloc(cuda.MemPinned, t.room.Edges,
		"edges of parts"); err != nil {
		return err
	}
	for range t.room.Slabs {
		m := &slab{}
		t.slabs = append(t.slabs, m)
		if m.rows, err = e.Device.Alloc(cuda.MemPinned, t.room.Slab,
			"rows of a mega-batch"); err != nil {
			return err
		}
		if e.Store.ScaleTable != nil && !engine.NamesNodes(e) {
			if m.scales, err = e.Device.Alloc(cuda.MemPinned, t.room.Rows*4,
				"scales of a mega-batch"); err != nil {
				return err
			}
		}
		if m.hetero, err = t.spans.Over(e.Device, e.RowBytes, len(e.Store.SSDs), t.static,
			m.rows); err != nil {
			return err
		}
	}
	return nil
}

// statics returns the number of static nodes.
func (t *Tiers) statics() int64 { return t.parts.StaticNodes() }

// Close frees the tiers. The parts stay open for the next place.
func (t *Tiers) Close() error {
	t.stop()
	e := t.Engine
	var all []error
	for _, m := range t.slabs {
		all = append(all, m.close())
	}
	buffers := []*cuda.Buffer{&t.static, &t.staticLists, &t.raw}
	for _, m := range t.slabs {
		buffers = append(buffers, &m.rows, &m.scales)
	}
	for _, b := range buffers {
		if *b == nil {
			continue
		}
		if e.Store.Reader != nil {
			all = append(all, gpuio.Forget(e.Store.Reader, *b))
		}
		all = append(all, (*b).Free())
		*b = nil
	}
	t.slabs, t.now, t.train.Hetero = nil, nil, nil
	t.lists, t.staticOld = induced.Lists{}, nil
	if t.spans != nil {
		all = append(all, t.spans.Close())
		t.spans = nil
	}
	return errors.Join(append(all, t.Tiers.Close())...)
}

// closeParts is close for the end of the run.
func (t *Tiers) closeParts() error {
	if t.parts == nil {
		return nil
	}
	p := t.parts
	t.parts = nil
	return p.pages.Close()
}

// stop ends a load that is under way and no longer needed.
func (t *Tiers) stop() {
	if n := t.next; n != nil {
		n.cancel()
		<-n.done
		t.next = nil
	}
}

// Shuffled is the order of an epoch of training.
func (t *Tiers) Shuffled(_ []int64, sampleEpoch int) prepare.Order {
	return t.orderOf(sampleEpoch).Order
}

// LoadTime rounds the time of a load. Tests replace it.
var LoadTime = func(took time.Duration) time.Duration { return took }

// Unmeasured implements PartSampler.
func (t *Tiers) Unmeasured(p *engine.Pass) int {
	if t.passes != 0 {
		return 0
	}
	first := t.orderOf(p.Epoch).First
	if len(first) == 0 {
		return 0
	}
	return first[0]
}

// Choose sets how often a mega-batch trains, which the next order has.
func (t *Tiers) Choose(train time.Duration) {
	load := t.lastLoad
	t.choose(LoadTime(load), train)
	over := "1 pass"
	if t.passes > 1 {
		over = fmt.Sprintf("%d passes", t.passes)
	}
	t.Engine.Observer.TellNote(
		"{passes} auto: a mega-batch loads in %v and trains in %v: %s over each",
		load.Round(time.Microsecond), train.Round(time.Microsecond), over)
}

// Prepare has the mega-batch that p.first is in ready, and ends the walk with it. An evaluation
// turns the I/O stack to rows, once what is being loaded for training is there.
func (t *Tiers) Prepare(ctx context.Context, p *engine.Pass, end int) (int, error) {
	e := t.Engine
	if p.First >= end { // a pass that an earlier run has finished
		return end, nil
	}
	if !p.Training {
		if n := t.next; n != nil {
			<-n.done
		}
		return end, e.Store.TurnTo(ctx, nil)
	}
	o := t.orderOf(p.Epoch)
	k := o.Mega(p.Order.Index(p.First))
	parts := o.Parts[k]
	if t.now == nil || !t.now.holds(parts) {
		if err := t.swap(ctx, p, parts); err != nil {
			return end, err
		}
	}
	p.Sampler, t.train.Hetero = t.now.sampler, t.now.hetero
	p.IDs = megaIDs{t, o}
	if err := t.ahead(ctx, p, o, k); err != nil {
		return end, err
	}
	return min(p.Order.Before(o.Ends[k]), end), nil
}

// swap makes parts the mega-batch that trains.
func (t *Tiers) swap(ctx context.Context, p *engine.Pass, parts []int) error {
	began := time.Now()
	if n := t.next; n != nil && !slices.Equal(n.parts, parts) {
		t.stop() // another one: the run continues elsewhere
	}
	if t.next == nil {
		t.now, t.train.Hetero = nil, nil
		if err := t.fetch(ctx, parts, t.slabs[0], false); err != nil {
			return err
		}
	}
	n := t.next
	<-n.done
	t.next = nil
	n.cancel()
	if n.err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
		return n.err
	}
	t.now, t.lastLoad = n.slab, n.load
	t.countLoad(&n.taken, time.Since(began))
	s := &p.Stats
	s.BytesSSD += n.took.Bytes
	s.Commands += n.took.Commands
	s.Retries += n.took.Retries
	s.Timeouts += n.took.Timeouts
	p.Clock.Read(n.begin, n.took)
	return nil
}

// ahead begins to load what trains after mega-batch k of an epoch: the next one, or the first of
// the next epoch.
func (t *Tiers) ahead(ctx context.Context, p *engine.Pass, o *MegaOrder, k int) error {
	if t.next != nil || len(t.slabs) < 2 {
		return nil
	}
	var parts []int
	c := &t.Engine.Config
	switch {
	case k+1 < len(o.Parts):
		parts = o.Parts[k+1]
	case p.Number+1 < c.Epochs:
		if all := t.batches.Parts(c.SampleEpoch(p.Number + 1)); len(all) > 0 {
			parts = all[0]
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

// fetch begins to load parts into a slab.
func (t *Tiers) fetch(ctx context.Context, parts []int, slab *slab, ahead bool) error {
	if err := t.Engine.Store.TurnTo(ctx, t.parts.pages); err != nil {
		return err
	}
	inner, cancel := context.WithCancel(ctx)
	n := &coming{parts: parts, slab: slab, cancel: cancel, done: make(chan struct{}),
		begin: time.Now(), taken: taken{ahead: ahead}}
	t.next = n
	go func() {
		defer close(n.done)
		n.err = t.load(inner, n, !ahead)
		n.load = time.Since(n.begin)
		t.Engine.Trace.Beside(report.TrackSuper, "load mega-batch", n.begin)
	}()
	return nil
}

// Begin makes the stages of a walk.
func (t *Tiers) Begin(w *engine.Walk) engine.Stages {
	if !w.Pass.Training {
		return t.Tiers.Begin(w)
	}
	return t.train.Begin(w)
}

// Beside is the time that inducing topologies has taken, mostly beside training.
func (t *Tiers) Beside() report.StageSeconds {
	return report.StageSeconds{Inspect: t.info.InduceSeconds}
}

// GPUBytes implements engine.Tiers.
func (t *Tiers) GPUBytes() int64 {
	if t.train.FirstOnHost || t.static == nil {
		return 0
	}
	return t.static.Size()
}

// CPUBytes bounds the memory of mega-batches.
func (t *Tiers) CPUBytes() int64 { return t.room.Total() }

// Describe implements engine.Tiers.
func (t *Tiers) Describe(r *report.RunInfo) {
	if t.parts != nil {
		r.Mega = t.describe(&t.Engine.Config, t.parts.MegaParts, !t.train.FirstOnHost)
	}
}

// megaIDs translate between the numbers of nodes in the dataset and in the mega-batch that is
// there.
type megaIDs struct {
	t *Tiers
	o *MegaOrder
}

// Seeds are those of mini-batch i of the whole pass, as the sampler numbers them.
func (m megaIDs) Seeds(i int, to []int64) []int64 {
	to = to[:0]
	for _, id := range m.o.IDs(i) {
		to = append(to, m.t.now.places.Of(id))
	}
	return to
}

// Scales are those of the mega-batch that is there.
func (m megaIDs) Scales() cache.Scales {
	s := m.t.now.scales
	if s == nil {
		return cache.Scales{}
	}
	return cache.Scales{Table: s.Ptr(), Rows: m.t.room.Rows}
}

// Name turns the frontier of a mini-batch into nodes of the dataset, in place: no lookup follows.
func (m megaIDs) Name(op context.Context, e *engine.Engine, mb *graph.MiniBatch, n int64) error {
	mem, err := e.Look[0].View(op, e.Device, e.TrainStream, mb.Nodes, 0, n*8)
	if err != nil {
		return err
	}
	nodes := hostmem.View[int64](mem)
	now := m.t.now
	for i, v := range nodes {
		if nodes[i] = int64(now.old[v]); nodes[i] >= e.Rows {
			return fmt.Errorf("row %d of a mega-batch is of no node", v)
		}
	}
	if mb.Nodes.Bytes() != nil {
		return nil
	}
	if err := e.TrainStream.Copy(mb.Nodes.Ptr(), e.Look[0].Ptr(), n*8); err != nil {
		return err
	}
	return e.TrainStream.Synchronize(op)
}
