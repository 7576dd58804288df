// Package planner says before a run, and before there is a machine or a dataset of that size, what
// an epoch would take: the virtual clock plays mini-batches that a skew or a degree distribution
// gives, or samples of a dataset, on a machine that a profile describes. All times and
// costs in it are modelled.
package planner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"helios/cache"
	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/virtual"
)

// Options ask for a plan.
type Options struct {
	Config   plan.Config
	Hardware cost.Hardware
	Graph    Graph
	RowType  rowtype.Type
	// The accesses are from one of these: a dataset (Inputs), or Popularity.
	Popularity *Popularity
	Inputs     prepare.Inputs
	// Budget is memory for both tiers together; zero: the tiers' own budgets hold, plan.NoCache:
	// there are none.
	Budget  units.Budget
	sized   string // tier that a sweep sizes in it
	Batches int    // that are played; 0: as many as a few seconds allow
	// Cut is the share of the edges that lead from part to part, of mega-batches that are made up;
	// nil: that of random parts, or half of them.
	Cut    *float64
	Prices Prices
	Find   Find
}

// Planner makes plans that share what was sampled or drawn.
type Planner struct {
	o    Options
	obs  report.Observer
	kept map[string]*Accesses
}

// New makes a planner. Close it.
func New(o Options, obs report.Observer) (*Planner, error) {
	if o.Hardware.Profile == nil {
		return nil, errs.New(errs.Usage, "a plan needs a machine: give %v", errs.Key("hardware"))
	}
	if o.Batches < 0 || o.Batches > 1<<20 {
		return nil, errs.New(errs.Usage, "%d mini-batches to play: 1 to %d are possible", o.Batches,
			1<<20)
	}
	return &Planner{o: o, obs: obs, kept: map[string]*Accesses{}}, nil
}

// Close releases what was opened.
func (p *Planner) Close() error {
	var all []error
	for _, a := range p.kept {
		if a.close != nil {
			all = append(all, a.close())
		}
	}
	p.kept = nil
	return errors.Join(all...)
}

// Plan is an answer. Every second and every price in it is modelled.
//
// Large: a field for each figure, as its JSON has them.
type Plan struct {
	Modelled bool   `json:"modelled"`
	Graph    Graph  `json:"graph"`
	From     string `json:"from"`    // what the accesses are from
	Hotness  string `json:"hotness"` // what ranks rows
	Mode     string `json:"mode"`
	Model    string `json:"model"`
	IOStack  string `json:"io_stack"`
	Pipeline string `json:"pipeline"`
	Policy   string `json:"policy"`
	Hardware string `json:"hardware"`
	SSDModel string `json:"ssd_model"`
	SSDs     int    `json:"ssd_count"`
	Fanouts  []int  `json:"fanout"`
	Batch    int    `json:"batch_size"`
	RowBytes int64  `json:"row_bytes"`

	Seconds float64 `json:"seconds"` // of an epoch
	Batches int     `json:"batches"` // of an epoch
	// Played mini-batches were played, after Warm that filled a dynamic tier; an epoch's figures
	// are theirs, continued.
	Played     int     `json:"batches_played"`
	Warm       int     `json:"batches_warm,omitempty"`
	Bottleneck string  `json:"bottleneck"`
	Stall      float64 `json:"stall"`
	Overlap    float64 `json:"overlap"`
	// Busy is the time in which an epoch keeps each of Resources busy.
	Busy map[string]float64 `json:"busy_seconds"`

	RowsGPU           int64   `json:"rows_gpu"` // of an epoch, as the next
	RowsCPU           int64   `json:"rows_cpu"`
	RowsSSD           int64   `json:"rows_ssd"`
	BytesGPU          int64   `json:"bytes_gpu"`
	BytesCPU          int64   `json:"bytes_cpu"`
	BytesSSD          int64   `json:"bytes_ssd"` // that the SSDs read
	SSDCommands       int64   `json:"ssd_commands"`
	HitRatio          float64 `json:"hit_ratio"`
	ReadAmplification float64 `json:"read_amplification"`
	SSDBytesPerSecond float64 `json:"ssd_bytes_per_second"`

	GPUCacheBytes int64 `json:"gpu_cache_bytes"`
	CPUCacheBytes int64 `json:"cpu_cache_bytes"`

	Preparation Preparation      `json:"preparation_seconds"`
	Disk        map[string]int64 `json:"disk_bytes"`
	GPUMemory   map[string]int64 `json:"gpu_memory_bytes"`
	CPUMemory   map[string]int64 `json:"cpu_memory_bytes"`
	Cost        *Cost            `json:"cost,omitempty"`
	Mega        *Mega            `json:"megabatches,omitempty"` // where these train
	// Of a typed graph.
	Types     []TypePlan     `json:"types,omitempty"`
	Relations []RelationPlan `json:"relations,omitempty"`
	Notes     []string       `json:"notes,omitempty"`
}

// Resources are the keys of Plan.Busy.
var Resources = []string{resSampling, resInspect, resLookup, resSSDs, resLink, resGather,
	resTraining, resCopies}

// The resources that can bound an epoch.
const (
	resSampling = "sampling"
	resInspect  = "finding changes"
	resLookup   = "lookup"
	resSSDs     = "ssds"
	resLink     = "link"
	resGather   = "gather"
	resTraining = "training" // of all devices
	resCopies   = "copies to other GPUs"
	resNothing  = "nothing overlaps"
)

// Preparation holds what comes before the first epoch, in seconds: writing the rows to the SSDs,
// once; finding the hottest rows; packing mini-batches; filling the tiers.
type Preparation struct {
	Load    float64 `json:"load"`
	Hotness float64 `json:"hotness"`
	Pack    float64 `json:"pack"`
	Fill    float64 `json:"fill"`
}

// Sum is all of it.
func (p Preparation) Sum() float64 { return p.Load + p.Hotness + p.Pack + p.Fill }

// Plan plans o's run as vary changes it; nil: as it is.
func (p *Planner) Plan(ctx context.Context, vary func(*Options)) (*Plan, error) {
	o := p.o
	if vary != nil {
		vary(&o)
	}
	j, err := p.newJob(ctx, o)
	if err != nil {
		return nil, err
	}
	played, err := j.predict.Play(ctx)
	if err != nil {
		return nil, err
	}
	return j.result(played)
}

// Job is one plan at work.
type Job struct {
	Options  Options
	Config   plan.Config
	Accesses *Accesses
	Machine  *iosim.Machine
	Layout   gpuio.Layout
	RowBytes int64 // of a row
	Sizes    plan.TierSizes
	First    *Batch
	predict  Tiers
	Observer report.Observer
	Work     virtual.Work
	Warm     int // batches that fill a tier before those that count
	Notes    []string
	kernels  *cost.Kernels
}

func (p *Planner) newJob(ctx context.Context, o Options) (*Job, error) {
	j := &Job{Options: o, Observer: p.obs}
	c, a, err := p.accesses(ctx, &j.Options)
	if err != nil {
		return nil, err
	}
	j.Config, j.Accesses = c, a
	j.predict = o.Find(&c).New(j)
	g := &j.Options.Graph
	if err := g.check(); err != nil {
		return nil, err
	}
	if j.Machine, err = iosim.NewMachine(des.New(), o.Hardware.Profile,
		o.Hardware.SSDs); err != nil {
		return nil, err
	}
	lba, err := j.Machine.LBABytes()
	if err != nil {
		return nil, err
	}
	j.RowBytes = int64(o.RowType.RowBytes(g.Dim))
	if j.Layout, err = gpuio.NewLayout(a.Rows, int(j.RowBytes), j.Machine.SSDs(), lba); err != nil {
		return nil, err
	}
	if j.First, err = a.Get(ctx, 0); err != nil {
		return nil, err
	}
	if err := j.size(); err != nil {
		return nil, err
	}
	j.kernels = cost.NewKernels(&o.Hardware.Profile.GPU.Ops, j.Config, g.Dim, o.RowType,
		g.Classes, a.Wide, a.typed)
	n := j.batches() // may shorten superbatches
	j.Work = virtual.Work{Config: j.Config, Rows: a.Rows, Dim: g.Dim, RowType: o.RowType,
		Classes: g.Classes, WideIDs: a.Wide, Typed: a.typed, Batches: n}
	return j, j.predict.Open(ctx, n)
}

// accesses settles the configuration, and gives the mini-batches that it asks for.
func (p *Planner) accesses(ctx context.Context, o *Options) (plan.Config, *Accesses, error) {
	c := o.Config
	if c.Topology == "" {
		c.Topology = plan.TopologyMemory
	}
	if o.Inputs.Dataset == nil {
		c.HotnessDir = ""
	}
	f, err := c.Filled()
	if err != nil {
		return f, nil, err
	}
	s, err := o.Find.of(&f)
	if err == nil {
		err = s.refused(&f)
	}
	if err != nil {
		return f, nil, err
	}
	key := fmt.Sprint(f.Batch, f.Fanouts, f.Seed, f.Sampler, f.BatchDependency, f.Hotness,
		f.Presample, o.Graph.Nodes, o.Graph.Edges, f.RelationFanouts)
	if p.kept[key] == nil {
		var a *Accesses
		g := o.Graph
		switch {
		case o.Inputs.Dataset != nil && s.Dataset != nil:
			a = s.Dataset(f, o.Inputs)
		case o.Inputs.Dataset != nil:
			a, err = fromDataset(ctx, f, s.Hotness, o.Inputs, p.obs)
		case o.Popularity != nil && len(g.Types) > 0:
			if err = g.check(); err == nil {
				a, err = fromTypes(&g, o.Popularity, f)
			}
		case o.Popularity != nil:
			if err = g.check(); err == nil {
				a, err = fromPopularity(g, o.Popularity, f)
			}
		default:
			err = errs.New(errs.Usage,
				"a plan needs accesses: give a skew, degrees or a dataset")
		}
		if err != nil {
			return f, nil, err
		}
		if a.typed != nil {
			model := f.ModelConfig()
			if err := model.CheckSchema(true); err != nil {
				return f, nil, errors.Join(err, closeOf(a))
			}
		}
		p.kept[key] = a
	}
	return f, p.kept[key], nil
}

func closeOf(a *Accesses) error {
	if a.close == nil {
		return nil
	}
	return a.close()
}

// refused names what the virtual clock cannot play.
func (s *System) refused(c *plan.Config) error {
	switch {
	case c.Topology == plan.TopologySSD:
		return errs.New(errs.Capability, "a plan has the topology in memory; use %v %s",
			errs.Key("topology"), plan.TopologyMemory)
	case c.Reduce != plan.ReduceTree:
		return errs.New(errs.Capability,
			"a plan has gradients added by %v %s, not %s; leave it out",
			errs.Key("reduce"), plan.ReduceTree, c.Reduce)
	case s.Refuse != nil:
		return s.Refuse(c)
	}
	return nil
}

// gpuSlack is the part of a GPU's memory that is kept free beside tiers and feature tensors.
const gpuSlack = 1 << 30

// schedule is that of the run on the machine.
func (j *Job) schedule() plan.Schedule {
	return virtual.ScheduleOn(&j.Config, j.Options.Hardware.Profile)
}

// slots is the memory of the mini-batches under way.
func (j *Job) slots() int64 {
	s, n := j.schedule(), int64(len(j.First.Rows))
	f := prepare.Frontier{HopEnd: j.First.Shape.HopEnd, Edges: j.First.Shape.HopEdges()}
	wide := int64(0)
	if j.Options.RowType != rowtype.Float32 {
		wide = int64(j.Options.Graph.Dim) * 4
	}
	return f.BatchBytes(int64(s.Credits), int64(s.Samples), n, j.RowBytes, wide,
		j.Config.Arch().Degrees()) + j.predict.SlotBytes(int64(s.Credits), n)
}

// size settles the tiers.
func (j *Job) size() error {
	c, total := &j.Config, j.Accesses.Rows*j.RowBytes
	g := &j.Options.Hardware.Profile.GPU
	memory := int64(g.MemoryGiB.Value * (1 << 30))
	free := max(memory-gpuSlack-j.slots(), 0)
	directory, err := j.predict.DirectoryBytes(free)
	if err != nil {
		return err
	}
	if directory > 0 { // and the index of the CPU tier
		directory += cache.IndexBytes(j.Accesses.Rows)
	}
	free = max(free-directory, 0)
	if c.GPUCacheAuto {
		c.GPUCacheAuto, c.GPUCache = false, units.Budget{Bytes: min(free, total)}
		if j.Options.Hardware.Profile.OneMemory() {
			c.GPUCache = c.HostGPUCache()
		}
	}
	if j.Options.Budget != (units.Budget{}) {
		if c.InMemory() {
			return errs.New(errs.Usage, "%v: %v %s has all rows in memory; leave it out",
				errs.Key("budget"), errs.Key("mode"), c.Mode)
		}
		j.divide(total, free)
	}
	if j.Sizes, err = c.TierRows(j.Accesses.Rows, j.RowBytes, math.MaxInt64/2, memory); err != nil {
		return err
	}
	if gpu := j.Sizes.GPURows * j.RowBytes; gpu > free {
		j.Notes = append(j.Notes, fmt.Sprintf(
			"the GPU tier of %s leaves less than %s of the GPU's %s for mini-batches and the rest",
			units.FormatBytes(gpu), units.FormatBytes(memory-free), units.FormatBytes(memory)))
	}
	return j.predict.CheckSizes()
}

// divide divides the budget between the tiers that the run has, as a sweep of one of them says;
// total is that of all features, and free bounds the GPU's tier.
func (j *Job) divide(total, free int64) {
	c := &j.Config
	part := func(b units.Budget, of int64) int64 { return min(max(b.Of(total), 0), of) }
	all := part(j.Options.Budget, total)
	hasGPU, hasCPU := c.GPUCache != (units.Budget{}), c.CPUCache != (units.Budget{})
	var gpu, cpu int64
	if hasGPU {
		switch j.Options.sized {
		case sweepGPU:
			gpu = part(c.GPUCache, all)
		case sweepCPU:
			gpu = min(all-part(c.CPUCache, all), free)
		default:
			gpu = min(j.predict.GPUShare(all), free)
		}
	}
	switch {
	case hasCPU && j.Options.sized == sweepCPU:
		cpu = part(c.CPUCache, all-gpu)
	case hasCPU:
		cpu = all - gpu
	}
	if left := all - gpu - cpu; left > 0 {
		j.Notes = append(j.Notes, fmt.Sprintf("%s of the %s of %v stay unused: %v %s has no other tier",
			units.FormatBytes(left), units.FormatBytes(all), errs.Key("budget"), errs.Key("mode"), c.Mode))
	}
	c.GPUCache, c.CPUCache = units.Budget{Bytes: gpu}, units.Budget{Bytes: cpu}
}

// The most rows that are played where no number of batches is given, and the bounds of those.
const (
	playRows     = 3 << 20
	WarmRows     = 12 << 20
	leastBatches = 3
	mostBatches  = 64
	MostGroups   = 3 * plan.MaxGroup
	MostWarm     = 400
)

// batches is the number of mini-batches that are played.
func (j *Job) batches() int {
	n := j.Options.Batches
	rows := max(len(j.First.Rows), 1)
	if n == 0 {
		least, limit, all := j.predict.Bounds()
		n = min(max(all/rows, least), limit)
	}
	n = min(n+j.predict.Beyond(), j.Accesses.Batches)
	return j.predict.Shorten(n)
}

// result turns what was played into an epoch's figures.
func (j *Job) result(r *virtual.Played) (*Plan, error) {
	e, hw, c := &r.Epoch, j.Options.Hardware.Profile, &j.Config
	n := len(r.Ends)
	if n == 0 {
		return nil, errs.New(errs.Failed, "no mini-batch was played: this is a bug")
	}
	scale := float64(j.Accesses.Batches) / float64(n)
	from, to := j.predict.Pace(j.Work.Batches)
	gpu, cpu, ssd := e.RowsGPU, e.RowsCPU, e.RowsSSD
	p := &Plan{
		Modelled: true, Graph: j.Options.Graph, From: j.Accesses.By, Hotness: j.Accesses.hot,
		Mode: c.Mode, Model: c.Model, IOStack: c.IOStack, Pipeline: c.Pipeline, Policy: c.Policy,
		Hardware: hw.Name, SSDModel: j.Machine.ModelName(), SSDs: j.Machine.SSDs(),
		Fanouts: c.Fanouts,
		Batch:   c.Batch, RowBytes: j.RowBytes,
		Seconds: epochSeconds(r.Ends, j.Accesses.Batches, from, to),
		Batches: j.Accesses.Batches, Played: n, Warm: j.Warm,
		Stall: e.Stall, Overlap: e.Overlap,
		RowsGPU: Scaled(gpu, scale), RowsCPU: Scaled(cpu, scale),
		RowsSSD: Scaled(ssd, scale), BytesSSD: Scaled(e.BytesSSD, scale),
		SSDCommands: Scaled(e.SSDCommands, scale),
		HitRatio:    e.HitRatio, ReadAmplification: e.ReadAmplification,
		GPUCacheBytes: j.Sizes.GPURows * j.RowBytes, CPUCacheBytes: j.Sizes.CPURows * j.RowBytes,
		Notes: j.Notes,
	}
	p.Hotness = cmp.Or(p.Hotness, "none")
	p.BytesGPU, p.BytesCPU = p.RowsGPU*j.RowBytes, p.RowsCPU*j.RowBytes
	p.SSDBytesPerSecond = float64(p.BytesSSD) / p.Seconds
	s := e.StageSeconds
	p.Busy = map[string]float64{resSampling: s.Sample * scale, resInspect: s.Inspect * scale,
		resLookup: s.Lookup * scale, resSSDs: r.SSDSeconds * scale, resLink: r.LinkSeconds * scale,
		resGather: s.Gather * scale, resTraining: s.Train * scale,
		resCopies: r.CopySeconds * scale}
	p.Bottleneck = bottleneck(e, r, max(j.Config.Replicas, 1))
	j.predict.Describe(p)
	j.prepare(p, s.Sample/float64(n))
	j.memory(p)
	j.types(p)
	if j.Options.Prices.given() {
		p.Cost = j.Options.Prices.of(p, hw)
	}
	if x := j.slowest(); x != "" {
		p.Notes = append(p.Notes, x)
	}
	return p, nil
}

// Scaled returns a number times a factor, rounded.
func Scaled(n int64, by float64) int64 { return int64(math.Round(float64(n) * by)) }

// epochSeconds continues the times at which mini-batches ended to an epoch of so many, at the pace
// of those behind from, up to to.
func epochSeconds(ends []float64, batches, from, to int) float64 {
	n := len(ends)
	last := ends[n-1]
	if batches <= n {
		return last
	}
	begin := 0.0
	if from >= 0 {
		begin = ends[from]
	}
	return last + (ends[to]-begin)/float64(to-from)*float64(batches-n)
}

// enoughStall is the share of the time that training may wait and still be what bounds an epoch.
const enoughStall = 0.10

// bottleneck names what bounds what was played, on so many devices that train. One of these is
// never without a mini-batch while others are on their way to it, so it does not seem to wait; if
// their way takes longer than their training, that is what bounds it.
func bottleneck(e *report.EpochResult, r *virtual.Played, replicas int) string {
	s := e.StageSeconds
	stages := []struct {
		name string
		t    float64
	}{{resSampling, s.Sample}, {resInspect, s.Inspect}, {resLookup, s.Lookup},
		{resSSDs, s.Submit + s.Complete}, {resGather, s.Gather}, {resNothing, s.Between}}
	slowest := slices.MaxFunc(stages, func(a, b struct {
		name string
		t    float64
	}) int {
		return cmp.Compare(a.t, b.t)
	})
	switch {
	case e.Stall <= enoughStall && r.CopySeconds > s.Train/float64(replicas):
		return resCopies
	case e.Stall <= enoughStall:
		return resTraining
	case slowest.t < 0.6*e.Seconds && e.Overlap < 0.1:
		return resNothing
	case (slowest.name == resSSDs || slowest.name == resGather) && r.LinkSeconds > r.SSDSeconds &&
		r.LinkSeconds > 0.8*e.Seconds:
		return resLink
	}
	return slowest.name
}

// slowest notes the cost of unequal SSDs.
func (j *Job) slowest() string {
	read := int64(j.Layout.ReadBytes())
	least, sum, slow := math.Inf(1), 0.0, ""
	for i, x := range j.Machine.Models() {
		b := j.Machine.BoundOf(i, read)
		sum += b
		if b < least {
			least, slow = b, x.Name
		}
	}
	reached := least * float64(j.Machine.SSDs()) / sum
	if reached > 0.99 || math.IsInf(sum, 1) {
		return ""
	}
	return fmt.Sprintf(
		"the SSDs are unequal and rows lie on all alike: %s bounds them, and they reach %.0f%% of what they could read together",
		slow, 100*reached)
}
