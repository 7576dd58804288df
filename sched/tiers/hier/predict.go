package hier

import (
	"context"
	"helios/sched/planner"
	"math"

	"helios/dataset/parted"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/tiers/hier/spec"
	"helios/sched/virtual"
)

// assumedCut is the share of the edges that an unknown partition is assumed to cut.
const assumedCut = 0.5

// maxMegaTrain bounds the training nodes that are dealt to mega-batches here.
const maxMegaTrain = 1 << 27

// Whole epochs are played of so many bytes, or as many mega-batches as have them, and draws of
// drawnMegas mini-batches stand for all.
const (
	playMegaBytes = 8 << 40
	drawnMegas    = 8
)

// megas are mega-batches that are made up.
type megas struct {
	ctx     context.Context
	j       *planner.Job
	parts   *MegaParts
	room    MegaRoom
	onGPU   bool
	cut     float64
	source  string
	statics int64
	local   int64   // nodes of a mega-batch, the static ones among them, which are its hottest
	mass    float64 // share of the draws that meet static nodes
	kept    float64
	seeds   int64 // training nodes of a mega-batch
	per     []float64
	drawn   map[int][]*planner.Batch // by the number of seeds
	asked   int
}

// megaDataset has the facts of a dataset whose mega-batches are played.
func megaDataset(c plan.Config, in prepare.Inputs) *planner.Accesses {
	m := in.Dataset.Meta
	a := &planner.Accesses{By: "samples of mega-batches of dataset " + m.Name, Rows: m.Nodes,
		Edges: m.Edges, Batches: 1, Most: math.MaxInt32}
	a.Topology, a.Wide = planner.TopologyBytes(m.Nodes, m.Edges)
	a.Draw = func(context.Context, int) (*planner.Batch,
		error) { // unknown before it is played
		n := int64(c.Batch)
		return &planner.Batch{Shape: cost.MadeUp([]int64{n}, nil), Rows: make([]int64, n),
			Ranks: make([]int64, n)}, nil
	}
	return a
}

// Predict is the system in a plan.
var Predict = planner.System{New: func(j *planner.Job) planner.Tiers {
	return &prediction{Base: planner.Base{Job: j}}
},
	Simulate: &Simulate, Hotness: plan.HotnessPresample, Dataset: megaDataset}

// prediction foresees mega-batches. Once they have been played it has their description, and the
// bytes of the parts on disk, of mega-batches in CPU memory, and of what is in all of them.
type prediction struct {
	planner.Base
	mega                   *planner.Mega
	disk, memoryOf, static int64
}

// Pace implements Tiers: whole mega-batches, of an epoch behind another.
func (t *prediction) Pace(n int) (from, to int) { return -1, n - 1 }

// Prepare implements Tiers.
func (t *prediction) Prepare(p *planner.Plan, b planner.Before) {
	p.Preparation.Pack = float64(b.Stored)/b.Read + float64(t.disk)/b.Write
	p.Preparation.Fill = float64(t.static) / b.Read
	p.Disk["parts"] = t.disk
}

// Memory implements Tiers.
func (t *prediction) Memory(p *planner.Plan) {
	p.CPUMemory = map[string]int64{"mega-batches": t.memoryOf}
	p.CPUCacheBytes = t.memoryOf
}

// Describe implements Tiers.
func (t *prediction) Describe(p *planner.Plan) { p.Mega = t.mega }

// Play implements Tiers: it plays mega-batches, of a dataset or made up.
func (t *prediction) Play(ctx context.Context) (r *virtual.Played, err error) {
	j := t.Job
	// The second epoch counts: its first mega-batch is loaded while the one before trains.
	epochs := 2
	if n := j.Options.Config.Epochs; n > 0 {
		epochs = min(n, epochs)
	}
	j.Config.Epochs = epochs
	var x *megas
	if j.Options.Inputs.Dataset != nil {
		c, hw := j.Options.Config, j.Options.Hardware
		c.Topology, c.Epochs, c.NoEval, c.HotnessDir = plan.TopologyMemory, epochs, true,
			plan.NoFolder
		c.GPUCache, c.GPUCacheAuto, c.CPUCache = j.Config.GPUCache, false, j.Config.CPUCache
		if c, err = c.Filled(); err != nil {
			return nil, err
		}
		if j.Options.Batches > 0 {
			return nil, errs.New(errs.Usage,
				"%v %d: a dataset's mega-batches are played for whole epochs; leave it out",
				errs.Key("batches"), j.Options.Batches)
		}
		r, err = PlayMega(ctx, j.Options.Find.Simulation, c, j.Options.Inputs, hw, j.Observer)
	} else {
		if x, err = t.make(ctx); err != nil {
			return nil, err
		}
		j.Work.Config, j.Work.Own, j.Work.Tiers = j.Config, x.parts, j.Sizes
		j.Work.Batches = x.batches()
		j.Work.DrawMega = x.batch
		r, err = virtual.Play(ctx, j.Options.Find.Simulation, j.Work, j.Options.Hardware)
	}
	if err != nil {
		return nil, err
	}
	j.Accesses.Batches = r.Batches
	t.mega = t.describe(r, x)
	j.Work.Batches = len(r.Ends)
	return r, nil
}

// describe says in a plan what mega-batches were played.
func (t *prediction) describe(r *virtual.Played, x *megas) *planner.Mega {
	j, i := t.Job, r.Info.Mega
	scale := float64(r.Batches) / float64(len(r.Ends))
	m := &planner.Mega{Parts: i.Parts, Loaded: i.Loaded, Order: i.Order, Passes: i.Passes,
		MegaBatches: i.MegaBatches, StaticRows: i.StaticRows, StaticOnGPU: i.StaticOnGPU,
		PageBytes: i.PageBytes, FeatureBytes: planner.Scaled(i.FeatureBytes, scale),
		EdgeBytes: planner.Scaled(i.EdgeBytes, scale), EpochBytes: i.EpochBytes,
		RequestBytes: i.RequestBytes, WaitSeconds: i.WaitSeconds * scale}
	if i.MegaBatches > 0 {
		m.LoadSeconds = i.LoadSeconds / float64(i.MegaBatches)
	}
	if x == nil { // a mini-batch's rows were unknown before
		gpu, cpu, ssd := r.Epoch.RowsGPU, r.Epoch.RowsCPU, r.Epoch.RowsSSD
		j.First.Rows = make([]int64, (gpu+cpu+ssd)/int64(len(r.Ends)))
	} else {
		m.Cut, m.CutSource, m.Kept = x.cut, x.source, x.kept
	}
	t.disk, t.memoryOf, t.static = i.DiskBytes, i.CPUBytes, i.StaticBytes
	if i.StaticOnGPU {
		j.Sizes.GPURows = i.StaticRows
	} else {
		j.Sizes.GPURows = 0
	}
	j.Sizes.CPURows = 0
	return m
}

// make makes parts of equal size, and the mini-batches of a mega-batch of them.
func (t *prediction) make(ctx context.Context) (*megas, error) {
	j := t.Job
	g, c, pop := &j.Options.Graph, &j.Config, j.Accesses.Popularity
	x := &megas{ctx: ctx, j: j, drawn: map[int][]*planner.Batch{}}
	if c.PartitionFile != "" {
		return nil, errs.New(errs.Usage,
			"%v %s is of a dataset's nodes, and here none are known; give %v instead",
			errs.Key("partition"), c.PartitionFile, errs.Key("cut"))
	}
	train := max(int64(float64(g.Nodes)*g.Train), 1)
	if g.Nodes > math.MaxUint32 || train > maxMegaTrain {
		return nil, errs.New(errs.Capability,
			"mega-batches of a graph of %d nodes, %d of which train: at most 2^32 and %d can be planned for, as no run takes more nodes",
			g.Nodes, train, maxMegaTrain)
	}
	parts := partsOf(c, g.Nodes*j.RowBytes, g.Nodes)
	x.statics = int64(c.StaticNodes.Fraction() * float64(g.Nodes))
	mean := float64(g.Edges) / float64(g.Nodes)
	even := parted.Even{Nodes: g.Nodes, Edges: g.Edges, RowBytes: j.RowBytes, Parts: parts,
		Statics: x.statics, StaticEdges: int64(pop.EdgesOf(x.statics, mean)), Train: train,
		First: c.PartOrder == spec.PartsSequential}
	l, err := even.Layout()
	if err != nil {
		return nil, err
	}
	if x.parts, err = NewMegaParts(l, c.PartOrder); err != nil {
		return nil, err
	}
	x.onGPU = x.statics > 0 && x.statics <= j.Sizes.GPURows
	if x.room, err = x.parts.Room(c, 0, x.onGPU); err != nil {
		return nil, err
	}
	x.settle(mean, train)
	return x, nil
}

// settle works out how many of a mini-batch's draws stay in a mega-batch.
func (x *megas) settle(mean float64, train int64) {
	j := x.j
	of, loaded := float64(x.parts.Parts), float64(x.room.Loaded)
	switch {
	case j.Options.Cut != nil:
		x.cut, x.source = *j.Options.Cut, "given"
	case Partitioner(&j.Config) == partition.Random:
		x.cut, x.source = 1-1/of, "that of random parts"
	default:
		x.cut, x.source = assumedCut, "assumed"
	}
	inside := 1.0
	if of > 1 {
		inside = 1 - x.cut + x.cut*(loaded-1)/(of-1)
	}
	n := j.Options.Graph.Nodes
	x.mass = j.Accesses.Popularity.Below(x.statics, n)
	x.kept = x.mass + (1-x.mass)*inside
	x.local = x.statics + max(int64(float64(n-x.statics)*loaded/of), 1)
	x.local = min(x.local, n)
	x.seeds = train
	if x.parts.Fixed == 0 {
		x.seeds = max(int64(float64(train)*loaded/of), 1)
	}
	x.seeds = min(x.seeds, x.local)
	for _, f := range j.Config.Fanouts {
		x.per = append(x.per, j.Accesses.Popularity.DrawnOf(f, mean, x.kept))
	}
}

// batches is the number of mini-batches of an epoch that are played: those of whole mega-batches,
// 0: of all.
func (x *megas) batches() int {
	c := &x.j.Config
	if c.Passes == spec.PassesAuto {
		return 0
	}
	b, n := x.parts.Batches(c, x.room, nil), 0
	for epoch := range c.Epochs {
		o := b.Order(x.parts.Train, c.SampleEpoch(epoch), c.Passes)
		whole := len(o.Ends)
		if all := x.parts.EpochBytes(x.room.Loaded) * int64(c.Epochs); all > playMegaBytes {
			whole = max(int(float64(whole)*playMegaBytes/float64(all)), 1)
		}
		if asked := x.j.Options.Batches; asked > 0 {
			whole = min(o.Mega(min(asked, o.Len())-1)+1, len(o.Ends))
		}
		if end := o.Ends[whole-1]; n == 0 || end < n {
			n = end
		}
	}
	return n
}

// batch returns a mini-batch of so many seeds.
func (x *megas) batch(seeds int) (*planner.Batch, error) {
	if err := prepare.Interrupted(x.ctx); err != nil {
		return nil, err
	}
	all := x.drawn[seeds]
	x.asked++
	if len(all) < drawnMegas {
		b := x.draw(seeds, philox.Mix(x.j.Config.Seed^philox.Mix(uint64(x.asked))))
		if len(all) == 0 {
			x.j.First = b
		}
		all = append(all, b)
		x.drawn[seeds] = all
	}
	return all[x.asked%len(all)], nil
}

// draw draws a mini-batch: its nodes are numbered within a mega-batch, the hottest first.
func (x *megas) draw(seeds int, key uint64) *planner.Batch {
	count := uint64(0)
	uniform := func() float64 {
		count++
		return float64(philox.Mix(key+count)>>11) / (1 << 53)
	}
	pop, n := x.j.Accesses.Popularity, x.j.Options.Graph.Nodes
	met, ranks := planner.NewSet(4*seeds), make([]int64, 0, 4*seeds)
	// Training nodes are any, here one after the other from a random one on.
	for i, first := int64(0), int64(uniform()*float64(x.seeds)); len(ranks) < seeds &&
		i < x.seeds; i++ {
		r := int64(float64((first+i)%x.seeds) / float64(x.seeds) * float64(x.local))
		if met.Add(r) {
			ranks = append(ranks, r)
		}
	}
	hopEnd, edges := []int64{int64(len(ranks))}, []int64(nil)
	rest := float64(x.local-x.statics) / float64(max(n-x.statics, 1))
	for _, k := range x.per {
		drawn := int64(math.Round(float64(len(ranks)) * k))
		for range drawn {
			var r int64
			if uniform()*x.kept < x.mass {
				r = min(pop.Rank(uniform()*x.mass, n), x.statics-1)
			} else {
				r = max(pop.Rank(x.mass+uniform()*(1-x.mass), n)-x.statics, 0)
				r = min(x.statics+int64(float64(r)*rest), x.local-1)
			}
			if met.Add(r) {
				ranks = append(ranks, r)
			}
		}
		edges, hopEnd = append(edges, drawn), append(hopEnd, int64(len(ranks)))
	}
	return &planner.Batch{Shape: cost.MadeUp(hopEnd, edges), Ranks: ranks, Rows: ranks}
}
