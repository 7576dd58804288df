package planner

import (
	"context"
	"math"
	"slices"

	"helios/dataset/parted"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/virtual"
)

// Mega says what a plan of mega-batches has of them, in an epoch.
type Mega struct {
	Parts  int    `json:"parts"`
	Loaded int    `json:"parts_in_memory"`
	Order  string `json:"part_order"`
	Passes int    `json:"passes"`
	// Cut is the share of the edges that lead from part to part, and CutSource where it is from;
	// of a dataset, which is partitioned, neither is there. Kept is the share of the edges whose
	// other end is in the same mega-batch or static.
	Cut       float64 `json:"cut,omitempty"`
	CutSource string  `json:"cut_source,omitempty"`
	Kept      float64 `json:"edges_kept,omitempty"`

	MegaBatches  int     `json:"megabatches"` // that are played
	StaticRows   int64   `json:"static_rows"`
	StaticOnGPU  bool    `json:"static_on_gpu"`
	PageBytes    int64   `json:"page_bytes"`
	FeatureBytes int64   `json:"feature_bytes"` // that an epoch reads, by section
	EdgeBytes    int64   `json:"edge_bytes"`
	EpochBytes   int64   `json:"epoch_bytes"` // by the formula, without the padding of pages
	RequestBytes float64 `json:"mean_request_bytes"`
	LoadSeconds  float64 `json:"load_seconds"` // of a mega-batch, in the mean
	WaitSeconds  float64 `json:"wait_seconds"` // of training, in an epoch
}

// assumedCut is the share of the edges that a partition of which nothing is known cuts.
const assumedCut = 0.5

// ParseCut reads the share of the edges that lead from part to part.
func ParseCut(text string) (*float64, error) {
	x, err := units.ParseShare(text)
	if err != nil {
		return nil, errs.New(errs.Usage, "%v %w, of the edges", errs.Key("cut"), err)
	}
	return &x, nil
}

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
	j       *job
	parts   *prepare.MegaParts
	room    prepare.MegaRoom
	onGPU   bool
	cut     float64
	source  string
	statics int64
	local   int64   // nodes of a mega-batch, the static ones among them, which are its hottest
	mass    float64 // share of the draws that meet static nodes
	kept    float64
	seeds   int64 // training nodes of a mega-batch
	per     []float64
	drawn   map[int][]*virtual.Looked // by the number of seeds
	asked   int
}

// megaDataset is what a plan has to know of a dataset whose mega-batches are played.
func megaDataset(c plan.Config, in prepare.Inputs) *accesses {
	m := in.Dataset.Meta
	a := &accesses{by: "samples of mega-batches of dataset " + m.Name, rows: m.Nodes,
		edges: m.Edges, epoch: 1, most: math.MaxInt32}
	a.topology, a.wide = topologyBytes(m.Nodes, m.Edges)
	a.draw = func(context.Context, int) (*batch, error) { // nobody knows it before it is played
		n := int64(c.Batch)
		return &batch{shape: cost.MadeUp([]int64{n}, nil), rows: make([]int64, n),
			ranks: make([]int64, n)}, nil
	}
	return a
}

// playMega plays mega-batches, of a dataset or made up.
func (j *job) playMega(ctx context.Context, p *Planner) (r *virtual.Played, err error) {
	// The second epoch tells: its first mega-batch is loaded while the one before trains.
	epochs := 2
	if n := j.o.Config.Epochs; n > 0 {
		epochs = min(n, epochs)
	}
	j.c.Epochs = epochs
	var x *megas
	if j.o.Inputs.Dataset != nil {
		c, hw := j.o.Config, j.o.Hardware
		c.Topology, c.Epochs, c.NoEval, c.HotnessDir = plan.TopologyMemory, epochs, true,
			plan.NoFolder
		c.GPUCache, c.GPUCacheAuto, c.CPUCache = j.c.GPUCache, false, j.c.CPUCache
		if c, err = c.Filled(); err != nil {
			return nil, err
		}
		if j.o.Batches > 0 {
			return nil, errs.New(errs.Usage,
				"%v %d: a dataset's mega-batches are played for whole epochs; leave it out",
				errs.Key("batches"), j.o.Batches)
		}
		r, err = virtual.PlayMega(ctx, c, j.o.Inputs, hw, p.obs)
	} else {
		if x, err = j.makeMega(); err != nil {
			return nil, err
		}
		j.work.Config, j.work.Parts, j.work.Tiers = j.c, x.parts, j.tiers
		j.work.Batches = x.batches()
		j.work.Source.Mega = x.batch
		r, err = virtual.Play(ctx, j.work, j.o.Hardware)
	}
	if err != nil {
		return nil, err
	}
	j.a.epoch = r.Batches
	j.mega = j.toldMega(r, x)
	return r, nil
}

// toldMega is what the plan says of mega-batches.
func (j *job) toldMega(r *virtual.Played, x *megas) *Mega {
	i := r.Mega
	scale := float64(r.Batches) / float64(len(r.Ends))
	m := &Mega{Parts: i.Parts, Loaded: i.Loaded, Order: i.Order, Passes: i.Passes,
		MegaBatches: i.MegaBatches, StaticRows: i.StaticRows, StaticOnGPU: i.StaticOnGPU,
		PageBytes: i.PageBytes, FeatureBytes: scaled(i.FeatureBytes, scale),
		EdgeBytes: scaled(i.EdgeBytes, scale), EpochBytes: i.EpochBytes,
		RequestBytes: i.RequestBytes, WaitSeconds: i.WaitSeconds * scale}
	if i.MegaBatches > 0 {
		m.LoadSeconds = i.LoadSeconds / float64(i.MegaBatches)
	}
	if x == nil { // nobody knew a mini-batch's rows before
		gpu, cpu, ssd := r.Epoch.Tiers()
		j.first.rows = make([]int64, (gpu+cpu+ssd)/int64(len(r.Ends)))
	} else {
		m.Cut, m.CutSource, m.Kept = x.cut, x.source, x.kept
	}
	j.disk, j.memoryOf, j.static = i.DiskBytes, i.CPUBytes, i.StaticBytes
	if i.StaticOnGPU {
		j.tiers.GPURows = i.StaticRows
	} else {
		j.tiers.GPURows = 0
	}
	j.tiers.CPURows = 0
	return m
}

// makeMega makes parts of equal size, and says what a mini-batch finds in a mega-batch of them.
func (j *job) makeMega() (*megas, error) {
	g, c, pop := &j.o.Graph, &j.c, j.a.popularity
	x := &megas{j: j, drawn: map[int][]*virtual.Looked{}}
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
	parts := c.PartsOf(g.Nodes*j.bytes, g.Nodes)
	x.statics = int64(c.StaticNodes.Fraction() * float64(g.Nodes))
	mean := float64(g.Edges) / float64(g.Nodes)
	even := parted.Even{Nodes: g.Nodes, Edges: g.Edges, RowBytes: j.bytes, Parts: parts,
		Statics: x.statics, StaticEdges: int64(pop.edgesOf(x.statics, mean)), Train: train,
		First: c.PartOrder == plan.PartsSequential}
	l, err := even.Layout()
	if err != nil {
		return nil, err
	}
	if x.parts, err = prepare.NewMegaParts(l, c.PartOrder); err != nil {
		return nil, err
	}
	x.onGPU = x.statics > 0 && x.statics <= j.tiers.GPURows
	if x.room, err = x.parts.Room(c, 0, x.onGPU); err != nil {
		return nil, err
	}
	x.settle(mean, train)
	return x, nil
}

// settle works out what stays of a mini-batch's draws in a mega-batch.
func (x *megas) settle(mean float64, train int64) {
	j := x.j
	of, loaded := float64(x.parts.Parts), float64(x.room.Loaded)
	switch {
	case j.o.Cut != nil:
		x.cut, x.source = *j.o.Cut, "given"
	case j.c.Partitioner() == partition.Random:
		x.cut, x.source = 1-1/of, "that of random parts"
	default:
		x.cut, x.source = assumedCut, "assumed"
	}
	inside := 1.0
	if of > 1 {
		inside = 1 - x.cut + x.cut*(loaded-1)/(of-1)
	}
	n := j.o.Graph.Nodes
	x.mass = j.a.popularity.below(x.statics, n)
	x.kept = x.mass + (1-x.mass)*inside
	x.local = x.statics + max(int64(float64(n-x.statics)*loaded/of), 1)
	x.local = min(x.local, n)
	x.seeds = train
	if x.parts.Fixed == 0 {
		x.seeds = max(int64(float64(train)*loaded/of), 1)
	}
	x.seeds = min(x.seeds, x.local)
	for _, f := range j.c.Fanouts {
		x.per = append(x.per, j.a.popularity.drawnOf(f, mean, x.kept))
	}
}

// batches is how many mini-batches are played of an epoch: those of whole mega-batches, 0: of all.
func (x *megas) batches() int {
	c := &x.j.c
	if c.Passes == plan.PassesAuto {
		return 0
	}
	b, n := x.parts.Batches(c, x.room), 0
	for epoch := range c.Epochs {
		o := b.Order(x.parts.Train, c.SampleEpoch(epoch), c.Passes)
		whole := len(o.Ends)
		if all := x.parts.EpochBytes(x.room.Loaded) * int64(c.Epochs); all > playMegaBytes {
			whole = max(int(float64(whole)*playMegaBytes/float64(all)), 1)
		}
		if asked := x.j.o.Batches; asked > 0 {
			whole = min(o.Mega(min(asked, o.Len())-1)+1, len(o.Ends))
		}
		if end := o.Ends[whole-1]; n == 0 || end < n {
			n = end
		}
	}
	return n
}

// batch looks up a mini-batch of so many seeds.
func (x *megas) batch(seeds int) (*virtual.Looked, error) {
	if err := prepare.Interrupted(x.j.look.ctx); err != nil {
		return nil, err
	}
	all := x.drawn[seeds]
	x.asked++
	if len(all) < drawnMegas {
		b := x.draw(seeds, philox.Mix(x.j.c.Seed^philox.Mix(uint64(x.asked))))
		if len(all) == 0 {
			x.j.first = b
		}
		all = append(all, x.find(b))
		x.drawn[seeds] = all
	}
	b := *all[x.asked%len(all)]
	b.Shape.Parts = slices.Clone(b.Shape.Parts) // which learn what is read for them
	return &b, nil
}

// find looks a mini-batch up: its rows are in one of the tiers.
func (x *megas) find(b *batch) *virtual.Looked {
	return x.j.look.parts(b, func(_, ranks []int64) (p cost.Part, read []int64) {
		for _, r := range ranks {
			if x.onGPU && r < x.statics {
				p.NGPU++
			}
		}
		p.NCPU = int64(len(ranks)) - p.NGPU
		return p, nil
	})
}

// draw draws a mini-batch: its nodes are numbered within a mega-batch, the hottest first.
func (x *megas) draw(seeds int, key uint64) *batch {
	count := uint64(0)
	uniform := func() float64 {
		count++
		return float64(philox.Mix(key+count)>>11) / (1 << 53)
	}
	pop, n := x.j.a.popularity, x.j.o.Graph.Nodes
	met, ranks := newSet(4*seeds), make([]int64, 0, 4*seeds)
	// Training nodes are any, here one after the other from a random one on.
	for i, at := int64(0), int64(uniform()*float64(x.seeds)); len(ranks) < seeds &&
		i < x.seeds; i++ {
		r := int64(float64((at+i)%x.seeds) / float64(x.seeds) * float64(x.local))
		if met.add(r) {
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
				r = min(pop.rank(uniform()*x.mass, n), x.statics-1)
			} else {
				r = max(pop.rank(x.mass+uniform()*(1-x.mass), n)-x.statics, 0)
				r = min(x.statics+int64(float64(r)*rest), x.local-1)
			}
			if met.add(r) {
				ranks = append(ranks, r)
			}
		}
		edges, hopEnd = append(edges, drawn), append(hopEnd, int64(len(ranks)))
	}
	return &batch{shape: cost.MadeUp(hopEnd, edges), ranks: ranks, rows: ranks}
}
