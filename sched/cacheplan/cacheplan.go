// Package cacheplan finds out before a run what caches will do for it: the split of a budget
// between the tiers with the least modelled time of an epoch, and how well sources of hotness place
// rows.
package cacheplan

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
	"helios/graph"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Options ask for a split of memory between the tiers.
type Options struct {
	Budget units.Budget `option:"budget" arg:"SIZE" usage:"memory for both tiers together, a SIZE or a share of the features"` // of both tiers together: bytes, or a share of the features
	// GPUMax and CPUMax bound the tiers in bytes; 0: the GPU's memory, and nothing; Off: the tier
	// stays empty.
	GPUMax   int64 `option:"gpu-max" size:"" zero:"-1" shown:"the GPU's memory" arg:"BYTES" usage:"at most BYTES of it in the GPU"`
	CPUMax   int64 `option:"cpu-max" size:"" zero:"-1" shown:"no bound" arg:"BYTES" usage:"at most BYTES of it in the CPU's memory"`
	Steps    int   `option:"steps" default:"100" usage:"splits to look at, beside the first"` // splits tried beside the first; 100
	Hardware cost.Hardware
}

// Point is one split: what an epoch takes of each resource, all at work at once, as in a deep
// pipeline. The epoch takes as long as the busiest.
type Point struct {
	GPUBytes   int64   `json:"gpu_bytes"`
	CPUBytes   int64   `json:"cpu_bytes"`
	Seconds    float64 `json:"seconds"`
	Bottleneck string  `json:"bottleneck"`
	HitGPU     float64 `json:"hit_gpu"` // share of the accesses
	HitCPU     float64 `json:"hit_cpu"`
	// Resources in seconds: PlanResources.
	Resources map[string]float64 `json:"resource_seconds"`
}

// Resources names the counts of a PlanPoint.
var Resources = []string{"ssds", "link", "gpu", "cpu memory", "sampling", "training"}

// Plan is the answer of PlanCache. Every time in it is modelled.
type Plan struct {
	Modelled bool   `json:"modelled"`
	Dataset  string `json:"dataset"`
	Hardware string `json:"hardware"`
	SSDModel string `json:"ssd_model"`
	SSDs     int    `json:"ssd_count"`
	Hotness  string `json:"hotness"`
	Rows     int64  `json:"rows"`
	RowBytes int64  `json:"row_bytes"`
	Batches  int    `json:"batches"`
	Accesses int64  `json:"accesses"` // rows looked up
	// Costs of an access in nanoseconds on its busiest resource.
	Costs       map[string]float64 `json:"access_ns"`
	BudgetBytes int64              `json:"budget_bytes"`
	GPUMaxBytes int64              `json:"gpu_max_bytes"`
	CPUMaxBytes *int64             `json:"cpu_max_bytes,omitempty"` // absent: no bound
	Best        Point              `json:"best"`
	// Flat is the number of splits that take as long as the best, to a thousandth.
	Flat int `json:"splits_as_good"`
	// LeastGPUBytes is the smallest GPU tier among those.
	LeastGPUBytes int64    `json:"least_gpu_bytes"`
	Curve         []Point  `json:"curve"`
	Notes         []string `json:"notes,omitempty"`
}

// planWork holds what an epoch takes whatever the tiers hold, and what it accesses.
type planWork struct {
	counts   []uint32 // accesses by row
	accesses int64
	scores   []uint32 // what rows are placed by

	sampleNS, sampleGPUNS float64 // the sampling stream's time, and that of the SMs
	trainNS, lookupNS     float64
	topologyBytes         int64 // read of the CPU's memory
}

// Find finds the split of a budget between the GPU and the CPU tier with the least modelled time of
// an epoch. Rows are placed by cfg.Hotness; hits are those of the first epoch, sampled for real,
// which the hotness has not seen. Times are the profile's: each resource's own work is summed over
// the epoch, and the epoch takes as long as the busiest, as in a pipeline deep enough that they all
// work at once. Every split of the budget in o.Steps steps is looked at, so the best is the best of
// them; of equals the one with the least work on all resources together.
func Find(ctx context.Context, cfg plan.Config, in prepare.Inputs, o Options,
	obs report.Observer) (res *Plan, err error) {
	e, err := prepare.Open(ctx, cfg, in, obs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	train, err := prepare.TrainSplit(in)
	if err != nil {
		return nil, err
	}
	w := &planWork{counts: make([]uint32, e.Rows)}
	if w.scores, err = e.Scores(ctx); err != nil {
		return nil, err
	}
	if w.accesses, err = e.CountEpoch(ctx, 0, train, w.counts,
		w.adder(e, in, o.Hardware.Profile)); err != nil {
		return nil, err
	}
	name := in.Dataset.Meta.Name
	if w.accesses == 0 {
		return nil, errs.New(errs.Usage, "%s looks no rows up: there is nothing to plan for", name)
	}
	return w.plan(&Plan{Modelled: true, Dataset: name, Hotness: e.Hotness.String(), Rows: e.Rows,
		RowBytes: e.RowBytes, Batches: prepare.Batches(len(train), e.Config.Batch),
		Accesses: w.accesses}, o)
}

// adder is add for the batches that e samples.
func (w *planWork) adder(e *prepare.Sampling, in prepare.Inputs,
	hw *hardware.Profile) func(*graph.MiniBatch) {
	model := cost.NewKernels(&hw.GPU.Ops, e.Config, e.Dim, e.RowType,
		max(in.Dataset.Meta.Classes, 1), e.Topology.Wide())
	return func(mb *graph.MiniBatch) {
		s := cost.ShapeOf(mb)
		if e.Config.Method().WholeLists {
			s.CountLists(e.Topology.Indptr, hostmem.View[int64](mb.Nodes.Bytes()))
		}
		w.add(&s, model, &hw.GPU, hw.PCIe.UVAGBs.Value)
	}
}

// add counts a batch's kernels.
func (w *planWork) add(s *cost.Shape, m *cost.Kernels, g *hardware.GPU, uvaGBs float64) {
	start, gap, end := g.OpLaunchNS.Value, g.GapNS.Value, g.TeardownNS.Value
	jobs := [][]cost.Kernel{m.Begin(s)}
	for h := range s.Blocks {
		jobs = append(jobs, m.Hop(s, h))
	}
	for i, j := range jobs {
		if i > 0 { // the CPU waits for each hop: it needs its size
			w.sampleNS += start + end
		}
		for _, k := range j {
			work := cost.KernelNS(g, &k)
			w.sampleGPUNS += work
			w.sampleNS += max(work, float64(k.UVA)/uvaGBs)
			w.topologyBytes += k.UVA
		}
	}
	for _, k := range append(m.Model(s, true), m.Update(0, 1)...) {
		w.trainNS += cost.KernelNS(g, &k)
	}
	w.trainNS += gap
	for _, k := range m.Lookup(&cost.Part{Count: s.HopEnd[len(s.HopEnd)-1]}) {
		w.lookupNS += cost.KernelNS(g, &k)
	}
}

// plan completes p: it scans the splits.
func (w *planWork) plan(p *Plan, o Options) (*Plan, error) {
	rows, rowBytes := p.Rows, p.RowBytes
	if rows > math.MaxUint32 {
		return nil, errs.New(errs.Capability,
			"a plan for %d rows: at most 2^32 are supported; plan for a sample of the graph", rows)
	}
	hw := o.Hardware.Profile
	machine, err := iosim.NewMachine(des.New(), hw, o.Hardware.SSDs)
	if err != nil {
		return nil, err
	}
	lba, err := machine.LBABytes()
	if err != nil {
		return nil, err
	}
	ssds := machine.SSDs()
	layout, err := gpuio.NewLayout(rows, int(rowBytes), ssds, lba)
	if err != nil {
		return nil, err
	}
	total := rows * rowBytes
	p.Hardware, p.SSDModel, p.SSDs = hw.Name, machine.ModelName(), ssds
	p.BudgetBytes, p.GPUMaxBytes = min(o.Budget.Of(total), total), max(o.GPUMax, 0)
	if o.GPUMax == 0 {
		p.GPUMaxBytes = int64(hw.GPU.MemoryGiB.Value * (1 << 30))
	}
	if o.CPUMax != 0 {
		limit := max(o.CPUMax, 0)
		p.CPUMaxBytes = &limit
	}
	per := costsOf(machine, int64(layout.ReadBytes()), rowBytes)
	costs := cache.Costs{GPU: per.gpuRow, CPU: max(per.cpuRow, per.uva*float64(rowBytes)),
		SSD: max(per.ssd/float64(ssds), per.link)}
	p.Costs = map[string]float64{"gpu": costs.GPU, "cpu": costs.CPU, "ssd": costs.SSD}
	if costs.CPU >= costs.SSD {
		p.Notes = append(p.Notes,
			fmt.Sprintf(
				"a row from CPU memory takes the link as long as one from the %d SSDs together (%.3g and %.3g ns): CPU memory for rows shortens an epoch only where the SSDs themselves are the limit",
				ssds, costs.CPU, costs.SSD))
	}
	w.drawCurve(p, cmp.Or(int64(o.Steps), 100), ssds, per, costs.GPUFirst())
	p.choose()
	return p, nil
}

// costsOf returns the costs of a row on a machine whose reads have so many bytes.
func costsOf(m *iosim.Machine, read, rowBytes int64) planCosts {
	hw := m.Profile
	g := &hw.GPU
	gather := func(bytes int64) float64 {
		return cost.KernelNS(g, &cost.Kernel{Op: &g.Ops.Gather,
			Work: hardware.Work{Items: 1 << 20, Bytes: bytes << 20}}) / (1 << 20)
	}
	return planCosts{
		ssd:    1e9 / m.SSDBound(read), // of one SSD
		link:   1e9 / m.IngressBound(read),
		uva:    1e9 / min(hw.PCIe.UVAGBs.Value*1e9, hw.PCIe.GPU.Rate(4096)),
		memory: 1 / hw.CPU.MemoryGBs.Value,
		gpuRow: gather(2 * rowBytes), cpuRow: gather(rowBytes),
	}
}

// drawCurve adds a point for each split of the tiers. gpuFirst: the GPU tier has the hottest rows.
func (w *planWork) drawCurve(p *Plan, steps int64, ssds int, per planCosts, gpuFirst bool) {
	splits := p.splits(steps)
	cuts := []int64{} // the ranks that the splits cut the rows at
	for _, s := range splits {
		cuts = append(cuts, s.gpu+s.cpu)
		if gpuFirst {
			cuts = append(cuts, s.gpu)
		} else {
			cuts = append(cuts, s.cpu)
		}
	}
	hits := hitsAt(w.scores, w.counts, sorted(cuts), ssds)
	for _, s := range splits {
		all := hits[s.gpu+s.cpu]
		inGPU, inCPU := float64(hits[s.gpu].hits), float64(all.hits-hits[s.gpu].hits)
		if !gpuFirst {
			inCPU, inGPU = float64(hits[s.cpu].hits), float64(all.hits-hits[s.cpu].hits)
		}
		busiest := 0.0 // misses of an SSD
		for i := range ssds {
			busiest = max(busiest, float64(hits[p.Rows].perSSD[i]-all.perSSD[i]))
		}
		pt := Point{GPUBytes: s.gpu * p.RowBytes, CPUBytes: s.cpu * p.RowBytes,
			HitGPU: inGPU / float64(w.accesses), HitCPU: inCPU / float64(w.accesses)}
		w.time(&pt, per, p.RowBytes, inGPU, inCPU, busiest)
		p.Curve = append(p.Curve, pt)
	}
}

// time works out how long a point's resources are busy, from the rows in the tiers and the misses
// of the busiest SSD.
func (w *planWork) time(pt *Point, per planCosts, rowBytes int64, inGPU, inCPU, busiest float64) {
	miss := float64(w.accesses) - inGPU - inCPU
	uva := inCPU*float64(rowBytes) + float64(w.topologyBytes)
	ns := map[string]float64{
		"ssds": busiest * per.ssd,
		"link": miss*per.link + uva*per.uva,
		"gpu": w.sampleGPUNS + w.lookupNS + w.trainNS + inGPU*per.gpuRow +
			inCPU*per.cpuRow,
		"cpu memory": uva * per.memory,
		"sampling":   w.sampleNS,
		"training":   w.trainNS,
	}
	pt.Resources = map[string]float64{}
	for _, name := range Resources {
		t := ns[name] / 1e9
		pt.Resources[name] = t
		if t > pt.Seconds {
			pt.Seconds, pt.Bottleneck = t, name
		}
	}
}

// split is rows of the tiers.
type split struct{ gpu, cpu int64 }

// splits are the different splits of the budget in so many steps, from the smallest GPU tier on.
func (p *Plan) splits(steps int64) (splits []split) {
	budget := p.BudgetBytes / p.RowBytes
	gpuMost := min(budget, p.GPUMaxBytes/p.RowBytes)
	cpuMost := budget
	if p.CPUMaxBytes != nil {
		cpuMost = min(cpuMost, *p.CPUMaxBytes/p.RowBytes)
	}
	for i := range steps + 1 {
		gpu := gpuMost * i / steps
		if s := (split{gpu, min(budget-gpu, cpuMost)}); len(splits) == 0 ||
			splits[len(splits)-1] != s {
			splits = append(splits, s)
		}
	}
	return splits
}

// choose finds the best point of the curve, and how many are as good.
func (p *Plan) choose() {
	p.Best = slices.MinFunc(p.Curve, func(a, b Point) int {
		return cmp.Or(cmp.Compare(a.Seconds, b.Seconds), cmp.Compare(a.sum(), b.sum()),
			cmp.Compare(a.GPUBytes, b.GPUBytes))
	})
	p.LeastGPUBytes = p.Best.GPUBytes
	for _, c := range p.Curve {
		if c.Seconds <= p.Best.Seconds*1.001 {
			p.Flat++
			p.LeastGPUBytes = min(p.LeastGPUBytes, c.GPUBytes)
		}
	}
}

// planCosts are nanoseconds.
type planCosts struct {
	ssd, link      float64 // a read, on one SSD and on the GPU's link
	uva, memory    float64 // a byte of the CPU's memory, on the link and in the memory
	gpuRow, cpuRow float64 // the GPU's work for a cached row
}

func (p *Point) sum() float64 {
	s := 0.0
	for _, name := range Resources {
		s += p.Resources[name]
	}
	return s
}
