// Package planner says before a run, and before there is a machine or a dataset of that size, what
// an epoch would take: the virtual clock plays mini-batches that a trace, a skew or a degree
// distribution gives, or samples of a dataset, on a machine that a profile describes. All times and
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
	"helios/cache/packed"
	"helios/cache/policy"
	"helios/cache/superbatch"
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
	// The accesses are from one of these: a dataset (Inputs), a trace, or Popularity.
	Popularity *Popularity
	Trace      string
	Inputs     prepare.Inputs
	// Budget is memory for both tiers together; zero: the tiers' own budgets hold, plan.NoCache:
	// there are none.
	Budget  units.Budget
	Batches int // that are played; 0: as many as a few seconds allow
	// Cut is the share of the edges that lead from part to part, of mega-batches that are made up;
	// nil: that of random parts, or half of them.
	Cut    *float64
	Prices Prices
}

// Planner makes plans that share what was sampled or drawn.
type Planner struct {
	o    Options
	obs  report.Observer
	kept map[string]*accesses
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
	return &Planner{o: o, obs: obs, kept: map[string]*accesses{}}, nil
}

// Close lets go of what was opened.
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
	// Busy is how long an epoch keeps each of Resources busy.
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
	Notes       []string         `json:"notes,omitempty"`
}

// Resources are what Plan.Busy counts.
var Resources = []string{resSampling, resInspect, resLookup, resSSDs, resLink, resGather,
	resTraining, resCopies}

// What can bound an epoch.
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
	var played *virtual.Played
	if j.c.MegaBatched() {
		played, err = j.playMega(ctx, p)
	} else {
		played, err = virtual.Play(ctx, j.work, o.Hardware)
	}
	if err != nil {
		return nil, err
	}
	return j.result(played)
}

// job is one plan at work.
type job struct {
	o       Options
	c       plan.Config
	a       *accesses
	m       *iosim.Machine
	layout  gpuio.Layout
	bytes   int64 // of a row
	tiers   plan.TierSizes
	first   *batch
	look    *lookups
	work    virtual.Work
	shape   packed.Shape
	notes   []string
	kernels *cost.Kernels
	// Of mega-batches, once they have been played: what is said of them, and the bytes of the parts
	// on disk, of mega-batches in CPU memory, and of what is in all of them.
	mega                   *Mega
	disk, memoryOf, static int64
}

func (p *Planner) newJob(ctx context.Context, o Options) (*job, error) {
	j := &job{o: o}
	c, a, err := p.accesses(ctx, &j.o)
	if err != nil {
		return nil, err
	}
	j.c, j.a = c, a
	g := &j.o.Graph
	if err := g.check(); err != nil {
		return nil, err
	}
	if j.m, err = iosim.NewMachine(des.New(), o.Hardware.Profile, o.Hardware.SSDs); err != nil {
		return nil, err
	}
	lba, err := j.m.LBABytes()
	if err != nil {
		return nil, err
	}
	j.bytes = int64(o.RowType.RowBytes(g.Dim))
	if j.layout, err = gpuio.NewLayout(a.rows, int(j.bytes), j.m.SSDs(), lba); err != nil {
		return nil, err
	}
	if j.first, err = a.get(ctx, 0); err != nil {
		return nil, err
	}
	if err := j.size(); err != nil {
		return nil, err
	}
	j.kernels = cost.NewKernels(&o.Hardware.Profile.GPU.Ops, j.c, g.Dim, o.RowType,
		g.Classes, a.wide)
	n := j.batches() // may shorten superbatches
	j.look = &lookups{ctx: ctx, c: j.c, a: a, tiers: j.tiers, perHop: j.c.PerHop(),
		rowBytes: j.bytes}
	j.work = virtual.Work{Config: j.c, Rows: a.rows, Dim: g.Dim, RowType: o.RowType,
		Classes: g.Classes, WideIDs: a.wide, Batches: n}
	if j.c.LaidOut() {
		if j.shape, err = packed.NewShape(j.bytes, int64(lba)); err != nil {
			return nil, err
		}
		j.work.PageBytes, j.work.Pages = j.shape.PageBytes, math.MaxInt64>>20
		j.look.pages = j.shape.RowsPerPage
	}
	if j.c.Dynamic() {
		j.look.warm = j.warm()
	}
	if j.c.Planned() {
		if j.look.after, err = j.full(ctx, n); err != nil {
			return nil, err
		}
	}
	j.work.Source, j.work.Slots = j.look.source(), j.look.slots
	return j, nil
}

// full is the state of tiers that know a superbatch, before the first of n batches.
func (j *job) full(ctx context.Context, n int) (*superbatch.State, error) {
	var met []*batch
	if j.tiers.GPURows == 0 || j.tiers.CPURows == 0 {
		for i := range n {
			b, err := j.a.get(ctx, i)
			if err != nil {
				return nil, err
			}
			met = append(met, b)
		}
	}
	return j.a.hottest(j.tiers.GPURows+j.tiers.CPURows, met), nil
}

// accesses settles the configuration, and gives the mini-batches that it asks for.
func (p *Planner) accesses(ctx context.Context, o *Options) (plan.Config, *accesses, error) {
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
	if err := refused(f); err != nil {
		return f, nil, err
	}
	key := fmt.Sprint(o.Trace, f.Batch, f.Fanouts, f.Seed, f.Sampler, f.BatchDependency, f.Hotness,
		f.Presample, o.Graph.Nodes, o.Graph.Edges)
	if p.kept[key] == nil {
		var a *accesses
		g := o.Graph
		switch {
		case o.Inputs.Dataset != nil && f.MegaBatched():
			a = megaDataset(f, o.Inputs)
		case o.Trace != "" && f.MegaBatched():
			err = errs.New(errs.Usage,
				"a trace does not say what is in which part, and %v %s trains on parts; plan by a skew, by degrees or for a dataset",
				errs.Key("mode"), f.Mode)
		case o.Inputs.Dataset != nil:
			a, err = fromDataset(ctx, f, o.Inputs, p.obs)
		case o.Trace != "":
			a, err = fromTrace(ctx, o.Trace, &g, &f)
		case o.Popularity != nil:
			if err = g.check(); err == nil {
				a, err = fromPopularity(g, o.Popularity, f)
			}
		default:
			err = errs.New(errs.Usage,
				"a plan needs accesses: give a skew, degrees, a trace or a dataset")
		}
		if err != nil {
			return f, nil, err
		}
		a.graph, a.sampled = g, f
		p.kept[key] = a
	}
	a := p.kept[key]
	if o.Trace != "" { // it says what was sampled
		o.Graph.Name, o.Graph.Nodes = a.graph.Name, a.graph.Nodes
		if o.Graph.Dim == 0 {
			o.Graph.Dim = o.RowType.Dim(a.bytes)
		}
		f.Batch, f.Fanouts, f.Seed, f.SeedZero, f.Sampler = a.sampled.Batch, a.sampled.Fanouts,
			a.sampled.Seed, a.sampled.SeedZero, a.sampled.Sampler
	}
	return f, a, nil
}

// refused names what the virtual clock cannot play.
func refused(c plan.Config) error {
	switch {
	case c.Topology == plan.TopologySSD:
		return errs.New(errs.Capability, "a plan has the topology in memory; use %v %s",
			errs.Key("topology"), plan.TopologyMemory)
	case c.Superbatched() && !c.Planned():
		return errs.New(errs.Capability, "a plan has superbatches under %v %s, not %s; use that",
			errs.Key("policy"), plan.PolicyBelady, c.Policy)
	case c.Reduce != plan.ReduceTree:
		return errs.New(errs.Capability,
			"a plan has gradients added by %v %s, not %s; leave it out",
			errs.Key("reduce"), plan.ReduceTree, c.Reduce)
	}
	return nil
}

// gpuSlack is what is kept free of a GPU's memory beside tiers and feature tensors.
const gpuSlack = 1 << 30

// slots is the memory of the feature tensors of mini-batches under way.
func (j *job) slots() int64 {
	s := j.c.Schedule()
	n := int64(len(j.first.rows))
	slots := int64(s.Credits) * n * j.bytes
	if j.onGPU() {
		slots += int64(s.Credits)*n*cache.GPUTicketBytes + cache.GPUSetsWork(n, j.c.Window)
	}
	return slots
}

// onGPU tells whether kernels keep the directory of a dynamic tier.
func (j *job) onGPU() bool {
	return j.c.Dynamic() && j.c.Directory == policy.InSets &&
		j.o.Hardware.Profile.GPU.KeepsDirectory()
}

// directory is what it takes of the GPU's memory for a tier of so many bytes.
func (j *job) directory(bytes int64) (int64, error) {
	if !j.onGPU() {
		return 0, nil
	}
	lines, _, err := prepare.LayLines(j.layout, j.a.rows, j.c.CacheLine)
	if err != nil {
		return 0, err
	}
	return cache.GPUSetsBytes(j.c.Policy, min(bytes/lines.LineBytes, lines.Count(j.a.rows)),
		j.c.Window > 0)
}

// size settles the tiers.
func (j *job) size() error {
	c, total := &j.c, j.a.rows*j.bytes
	g := &j.o.Hardware.Profile.GPU
	memory := int64(g.MemoryGiB.Value * (1 << 30))
	free := max(memory-gpuSlack-j.slots(), 0)
	directory, err := j.directory(free)
	if err != nil {
		return err
	}
	if directory > 0 { // and the index of the CPU tier
		directory += cache.IndexBytes(j.a.rows)
	}
	free = max(free-directory, 0)
	if c.GPUCacheAuto {
		c.GPUCacheAuto, c.GPUCache = false, units.Budget{Bytes: min(free, total)}
		if j.o.Hardware.Profile.OneMemory() {
			c.GPUCache = units.Budget{Percent: 5}
		}
	}
	if j.o.Budget != (units.Budget{}) {
		if c.InMemory() {
			return errs.New(errs.Usage, "%v: %v %s has all rows in memory; leave it out",
				errs.Key("budget"), errs.Key("mode"), c.Mode)
		}
		j.divide(min(max(j.o.Budget.Of(total), 0), total), free)
	}
	if j.tiers, err = c.TierRows(j.a.rows, j.bytes, math.MaxInt64/2, memory); err != nil {
		return err
	}
	if gpu := j.tiers.GPURows * j.bytes; gpu > free {
		j.notes = append(j.notes, fmt.Sprintf(
			"the GPU tier of %s leaves less than %s of the GPU's %s for mini-batches and the rest",
			units.FormatBytes(gpu), units.FormatBytes(memory-free), units.FormatBytes(memory)))
	}
	if c.Planned() { // directories are as large as the tiers
		most := int64(256 << 20)
		if j.tiers.GPURows+j.tiers.CPURows > most {
			return errs.New(errs.Usage,
				"tiers of %d rows that know a superbatch: at most %d are possible; give a smaller %v",
				j.tiers.GPURows+j.tiers.CPURows, most, errs.Key("cpu-cache"))
		}
	}
	return nil
}

// divide divides a budget between the tiers that the run has; free bounds the GPU's.
func (j *job) divide(all, free int64) {
	c := &j.c
	hasGPU, hasCPU := c.GPUCache != (units.Budget{}), c.CPUCache != (units.Budget{})
	var gpu, cpu int64
	switch {
	case hasGPU && hasCPU && c.Dynamic():
		gpu = min(all/2, free)
	case hasGPU:
		gpu = min(all, free)
	}
	if hasCPU {
		cpu = all - gpu
	}
	if left := all - gpu - cpu; left > 0 {
		j.notes = append(j.notes, fmt.Sprintf("%s of the %s of %v stay unused: %v %s has no other tier",
			units.FormatBytes(left), units.FormatBytes(all), errs.Key("budget"), errs.Key("mode"), c.Mode))
	}
	c.GPUCache, c.CPUCache = units.Budget{Bytes: gpu}, units.Budget{Bytes: cpu}
}

// How many rows are played at most where nobody says how many batches, and the bounds of those.
const (
	playRows      = 3 << 20
	warmRows      = 12 << 20
	leastBatches  = 3
	mostBatches   = 64
	leastPlanned  = 8
	mostGroups    = 3 * plan.MaxGroup
	mostWarm      = 400
	plannedFactor = 2
)

// batches is how many mini-batches are played.
func (j *job) batches() int {
	n := j.o.Batches
	rows := max(len(j.first.rows), 1)
	if n == 0 {
		least, most, all := leastBatches, mostBatches, playRows
		switch {
		case j.c.Accumulate > 0:
			most = mostGroups
		case j.c.Planned():
			least, all = leastPlanned, plannedFactor*playRows
		}
		n = min(max(all/rows, least), most)
	}
	if !j.c.Planned() { // the last ones find nothing behind them to wait for
		n += j.c.Schedule().Credits
	}
	n = min(n, j.a.epoch)
	if j.a.most < n { // a trace that was not kept whole
		n = j.a.most
	}
	if j.c.Planned() && n < j.a.epoch {
		// Two superbatches: the second finds what the first left.
		size := min(j.c.SuperbatchMost(j.a.epoch), max(n/2, 1))
		if size < j.c.SuperbatchMost(j.a.epoch) {
			j.notes = append(j.notes, fmt.Sprintf(
				"superbatches of %d mini-batches are played, the run's have %d and save more reads",
				size, min(j.c.SuperbatchMost(j.a.epoch), j.a.epoch)))
		}
		j.c.Superbatch = size
		n = min(2*size, n)
	}
	return n
}

// warm is how many batches fill a dynamic tier first: a few times what it holds.
func (j *job) warm() int {
	rows := max(len(j.first.rows), 1)
	slots := float64(j.tiers.GPURows)
	n := int(math.Ceil(3 * slots / float64(rows)))
	n = min(n, warmRows/rows, mostWarm, j.a.epoch)
	if float64(n*rows) < slots {
		j.notes = append(j.notes, fmt.Sprintf(
			"%d mini-batches before those that are played do not fill the GPU tier: hits are fewer here than later",
			n))
	}
	return n
}

// result turns what was played into an epoch's figures.
func (j *job) result(r *virtual.Played) (*Plan, error) {
	e, hw, c := &r.Epoch, j.o.Hardware.Profile, &j.c
	n := len(r.Ends)
	if n == 0 {
		return nil, errs.New(errs.Failed, "no mini-batch was played: this is a bug")
	}
	scale := float64(j.a.epoch) / float64(n)
	if j.c.MegaBatched() {
		j.work.Batches = n
	}
	from, to := j.pace()
	gpu, cpu, ssd := e.Tiers()
	p := &Plan{
		Modelled: true, Graph: j.o.Graph, From: j.a.by, Hotness: j.a.hot,
		Mode: c.Mode, Model: c.Model, IOStack: c.IOStack, Pipeline: c.Pipeline, Policy: c.Policy,
		Hardware: hw.Name, SSDModel: j.m.ModelName(), SSDs: j.m.SSDs(), Fanouts: c.Fanouts,
		Batch: c.Batch, RowBytes: j.bytes,
		Seconds: epochSeconds(r.Ends, j.a.epoch, from, to),
		Batches: j.a.epoch, Played: n, Warm: j.look.warm,
		Stall: e.Stall, Overlap: e.Overlap,
		RowsGPU: scaled(gpu, scale), RowsCPU: scaled(cpu, scale),
		RowsSSD: scaled(ssd, scale), BytesSSD: scaled(e.BytesSSD, scale),
		SSDCommands: scaled(e.SSDCommands, scale),
		HitRatio:    e.HitRatio, ReadAmplification: e.ReadAmplification,
		GPUCacheBytes: j.tiers.GPURows * j.bytes, CPUCacheBytes: j.tiers.CPURows * j.bytes,
		Notes: slices.Concat(j.a.notes, j.notes),
	}
	p.Hotness = cmp.Or(p.Hotness, "none")
	p.BytesGPU, p.BytesCPU = p.RowsGPU*j.bytes, p.RowsCPU*j.bytes
	p.SSDBytesPerSecond = float64(p.BytesSSD) / p.Seconds
	s := e.StageSeconds
	p.Busy = map[string]float64{resSampling: s.Sample * scale, resInspect: s.Inspect * scale,
		resLookup: s.Lookup * scale, resSSDs: r.SSDSeconds * scale, resLink: r.LinkSeconds * scale,
		resGather: s.Gather * scale, resTraining: s.Train * scale,
		resCopies: r.CopySeconds * scale}
	p.Bottleneck = bottleneck(e, r, max(j.c.Replicas, 1))
	p.Mega = j.mega
	j.prepare(p, s.Sample/float64(n))
	j.memory(p)
	if j.o.Prices.given() {
		p.Cost = j.o.Prices.of(p, hw)
	}
	if x := j.slowest(); x != "" {
		p.Notes = append(p.Notes, x)
	}
	return p, nil
}

func scaled(n int64, by float64) int64 { return int64(math.Round(float64(n) * by)) }

// pace returns which of the mini-batches that are played tell how fast an epoch goes: those from
// one on, up to another. Of the last ones, as many as are in flight at once, the rows came while
// those before trained, and none came beside them. Superbatches end together: the second is
// what tells. Groups of merged reads end together too, and all of them count.
func (j *job) pace() (from, to int) {
	n := j.work.Batches
	switch {
	case j.c.MegaBatched(): // whole ones, of an epoch behind another
		return -1, n - 1
	case j.c.Accumulate > 0:
		return -1, n - 1
	case j.c.Planned():
		return n/2 - 1, n - 1
	}
	if to = n - 1 - j.c.Schedule().Credits; to < 1 {
		return -1, n - 1
	}
	return to / 3, to
}

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

// slowest says what unequal SSDs cost.
func (j *job) slowest() string {
	read := int64(j.layout.ReadBytes())
	least, sum, at := math.Inf(1), 0.0, ""
	for i, x := range j.m.Models() {
		b := j.m.BoundOf(i, read)
		sum += b
		if b < least {
			least, at = b, x.Name
		}
	}
	reached := least * float64(j.m.SSDs()) / sum
	if reached > 0.99 || math.IsInf(sum, 1) {
		return ""
	}
	return fmt.Sprintf(
		"the SSDs are unequal and rows lie on all alike: %s bounds them, and they reach %.0f%% of what they could read together",
		at, 100*reached)
}
