package sched

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"helios/cache"
	"helios/cache/trace"
	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/graph"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/units"
)

// PlanOptions ask for a split of memory between the tiers.
type PlanOptions struct {
	Budget units.Budget // of both tiers together: bytes, or a share of the features
	// GPUMax and CPUMax bound the tiers in bytes; 0: the GPU's memory, and nothing; Off: the tier stays empty.
	GPUMax, CPUMax int64
	Steps          int // splits tried beside the first; 100
	Hardware       Hardware
	// Trace is a run's accesses (Config.Trace) to plan for; empty: an epoch is sampled.
	Trace string
}

// PlanPoint is one split: what an epoch takes of each resource, all at work at once, as in a deep pipeline. The epoch takes
// as long as the busiest.
type PlanPoint struct {
	GPUBytes   int64   `json:"gpu_bytes"`
	CPUBytes   int64   `json:"cpu_bytes"`
	Seconds    float64 `json:"seconds"`
	Bottleneck string  `json:"bottleneck"`
	HitGPU     float64 `json:"hit_gpu"` // share of the accesses
	HitCPU     float64 `json:"hit_cpu"`
	// Resources in seconds: PlanResources.
	Resources map[string]float64 `json:"resource_seconds"`
}

// PlanResources are what a PlanPoint counts.
var PlanResources = []string{"ssds", "link", "gpu", "cpu memory", "sampling", "training"}

// CachePlan is the answer of PlanCache. Every time in it is modelled.
type CachePlan struct {
	Event    string `json:"event"` // "cache plan"
	Modelled bool   `json:"modelled"`
	Dataset  string `json:"dataset"`
	Hardware string `json:"hardware"`
	SSDModel string `json:"ssd_model"`
	SSDs     int    `json:"ssd_count"`
	From     string `json:"from"` // what the accesses are from
	Hotness  string `json:"hotness"`
	Rows     int64  `json:"rows"`
	RowBytes int64  `json:"row_bytes"`
	Epochs   int    `json:"epochs"` // that batches and accesses are of
	Batches  int    `json:"batches"`
	Accesses int64  `json:"accesses"` // rows looked up
	// Costs of an access in nanoseconds on its busiest resource.
	Costs       map[string]float64 `json:"access_ns"`
	BudgetBytes int64              `json:"budget_bytes"`
	GPUMaxBytes int64              `json:"gpu_max_bytes"`
	CPUMaxBytes *int64             `json:"cpu_max_bytes,omitempty"` // absent: no bound
	Best        PlanPoint          `json:"best"`
	// Flat is how many of the splits take as long as the best, to a thousandth.
	Flat int `json:"splits_as_good"`
	// LeastGPUBytes is the smallest GPU tier among those.
	LeastGPUBytes int64       `json:"least_gpu_bytes"`
	Curve         []PlanPoint `json:"curve"`
	Notes         []string    `json:"notes,omitempty"`
}

// planWork is what an epoch takes whatever the tiers hold, and what it accesses.
type planWork struct {
	batches, epochs int
	counts          []uint32 // accesses by row
	accesses        int64
	scores          []uint32 // what rows are placed by
	by              string
	notes           []string

	// Of one epoch.

	sampleNS, sampleGPUNS float64 // the sampling stream's time, and that of the SMs
	trainNS, lookupNS     float64
	topologyBytes         int64 // read of the CPU's memory
}

// openSampling makes an engine that samples and does nothing else. Close it.
func openSampling(cfg Config, in Inputs, obs Observer) (*engine, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if i := in.Dev.Info(); i.Backend != "host" {
		return nil, errs.New(errs.Capability, "sampling for a plan is done on the host device, not on %s; use --device host", i.Name)
	}
	cfg, err := cfg.onDevice(in.Dev.Info())
	if err != nil {
		return nil, err
	}
	t := in.Dataset.Meta.RowType()
	if cfg.RowType != "" {
		if t, err = rowtype.Parse(cfg.RowType); err != nil {
			return nil, err
		}
	}
	e := &engine{cfg: cfg, plan: cfg.plan(), obs: obs, dev: in.Dev, in: in}
	e.sizes(in, t)
	err = e.openGraph(in)
	if err == nil {
		s := &slot{segs: make([]segment, 1)}
		e.slots = []*slot{s}
		if s.mb, err = e.sampler.NewMiniBatch(); err == nil {
			e.onClose(s.mb.Close)
		}
	}
	if err != nil {
		return nil, errors.Join(err, e.close())
	}
	return e, nil
}

// countEpoch samples one epoch and counts its rows; each, where given, sees the batches.
func (e *engine) countEpoch(ctx context.Context, epoch int, train []int64, counts []uint32, each func(*graph.MiniBatch)) (accesses int64, err error) {
	mb := e.slots[0].mb
	order := make([]int64, len(train))
	graph.Shuffle(order, train, e.cfg.Seed, epoch)
	n := batches(len(order), e.cfg.Batch)
	for i := range n {
		if err := interrupted(ctx); err != nil {
			return 0, err
		}
		if err := e.sampleWhole(ctx, mb, epoch, i, seedsOf(order, i, e.cfg.Batch)); err != nil {
			return 0, err
		}
		for _, v := range hostmem.View[int64](mb.Nodes.Bytes())[:mb.HopEnd[len(mb.HopEnd)-1]] {
			if counts[v] < math.MaxUint32 {
				counts[v]++
			}
			accesses++
		}
		if each != nil {
			each(mb)
		}
		e.obs.step("sample", i+1, n)
	}
	return accesses, nil
}

// trainSplit is the dataset's, which must not be empty.
func trainSplit(in Inputs) ([]int64, error) {
	train, err := in.Dataset.Split("train")
	if err == nil && len(train) == 0 {
		err = errs.New(errs.Usage, "dataset %s has no training nodes; import or generate it with a training split", in.Dataset.Meta.Name)
	}
	return train, err
}

// PlanCache finds the split of a budget between the GPU and the CPU tier with the least modelled time of an epoch. Rows
// are placed by cfg.Hotness; hits are those of the first epoch, sampled for real, which the hotness has not seen. With a
// trace they are placed by what placed the traced run's, and hits are those of its training; in.Dataset may then be nil, and
// sampling and training are left out. Times are the profile's: each resource's own work is summed over the epoch, and the epoch takes as long as the busiest, as in a
// pipeline deep enough that they all work at once. Every split of the budget in o.Steps steps is looked at, so the best
// is the best of them; of equals the one with the least work on all resources together.
func PlanCache(ctx context.Context, cfg Config, in Inputs, o PlanOptions, obs Observer) (plan *CachePlan, err error) {
	if o.Trace == "" {
		return planSampled(ctx, cfg, in, o, obs)
	}
	r, err := trace.Open(o.Trace)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	head := r.Header()
	// A count and a score for each row, and their order.
	if free, err := hostmem.AvailableBytes(); err == nil && head.Rows > free/16 {
		return nil, errs.New(errs.Capability, "trace %s: a plan for its %d rows needs %s of memory, and %s can be had; use a machine with more, if the trace is right",
			o.Trace, head.Rows, units.FormatBytes(16*head.Rows), units.FormatBytes(free))
	}
	w := &planWork{counts: make([]uint32, head.Rows)}
	if err := w.fromTrace(ctx, r); err != nil {
		return nil, err
	}
	if in.Dataset == nil {
		w.notes = append(w.notes, "a trace holds accesses alone: sampling and training are not counted; give the dataset for them")
	} else {
		if id := in.Dataset.UUID().String(); id != head.Dataset {
			return nil, errs.New(errs.Usage, "%s is a trace of dataset %s (%s), %s is %s; give the dataset that was trained on", o.Trace, head.Name, head.Dataset, in.Dataset.Dir(), id)
		}
		cfg.Fanouts = nil
		for _, f := range head.Fanouts {
			cfg.Fanouts = append(cfg.Fanouts, int(f))
		}
		cfg.Batch, cfg.Seed, cfg.Sampler = int(head.Batch), head.Seed, head.Sampler
		if err := w.compute(ctx, cfg, in, o.Hardware.Profile, obs); err != nil {
			return nil, err
		}
	}
	return w.plan(head.Name, o.Trace, head.RowBytes, o)
}

// fromTrace counts the accesses of a trace's training and finds what its rows were placed by.
func (w *planWork) fromTrace(ctx context.Context, r *trace.Reader) (err error) {
	epoch, first, whole := -1, 0, 0
	err = r.Play(trace.Visitor{Live: func(l trace.Live) error {
		if l.Kind == trace.Train && first == 0 {
			whole++
		}
		return nil
	}, Batch: func(b *trace.Batch) error {
		if b.Kind != trace.Train {
			return interrupted(ctx)
		}
		if b.Epoch != epoch {
			epoch, first = b.Epoch, b.Index
			w.epochs++
		}
		w.batches++
		for _, part := range b.Parts {
			w.accesses += int64(len(part))
			for _, v := range part {
				if w.counts[v] < math.MaxUint32 {
					w.counts[v]++
				}
			}
		}
		return interrupted(ctx)
	}})
	if err != nil {
		return err
	}
	if part := w.epochs - whole; part > 0 {
		w.notes = append(w.notes, fmt.Sprintf("%d of the trace's %d epochs are not whole (the run was interrupted or resumed), and count as if they were: an epoch takes longer than is said here", part, w.epochs))
	}
	if r.Totals().Resets > 0 {
		w.notes = append(w.notes, "the traced run placed its rows anew, and what it then looked up again counts twice here")
	}
	if w.scores, err = r.Hotness(); err != nil || w.scores != nil {
		w.by = cmp.Or(r.Header().HotnessBy, "the trace's scores")
		return err
	}
	w.scores, w.by = w.counts, "the trace's own accesses"
	w.notes = append(w.notes, "the trace has no hotness (the run had no static tier, or one for all rows), so rows are placed by what the trace itself accesses: hits are the most that could be")
	return nil
}

// planSampled plans for an epoch that is sampled here.
func planSampled(ctx context.Context, cfg Config, in Inputs, o PlanOptions, obs Observer) (plan *CachePlan, err error) {
	e, err := openSampling(cfg, in, obs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	train, err := trainSplit(in)
	if err != nil {
		return nil, err
	}
	w := &planWork{counts: make([]uint32, e.rows), epochs: 1, batches: batches(len(train), e.cfg.Batch)}
	if w.scores, err = e.scoresOf(ctx, in); err != nil {
		return nil, err
	}
	w.by = e.hotness.String()
	if w.accesses, err = e.countEpoch(ctx, 0, train, w.counts, w.adder(e, in, o.Hardware.Profile)); err != nil {
		return nil, err
	}
	return w.plan(in.Dataset.Meta.Name, "an epoch that was sampled", e.rowBytes, o)
}

// compute samples an epoch for the sake of its shapes.
func (w *planWork) compute(ctx context.Context, cfg Config, in Inputs, hw *hardware.Profile, obs Observer) error {
	e, err := openSampling(cfg, in, obs)
	if err != nil {
		return err
	}
	train, err := trainSplit(in)
	if err == nil {
		_, err = e.countEpoch(ctx, 0, train, make([]uint32, e.rows), w.adder(e, in, hw))
	}
	return errors.Join(err, e.close())
}

// scoresOf is findHotness to the CPU's memory.
func (e *engine) scoresOf(ctx context.Context, in Inputs) (scores []uint32, err error) {
	h, err := cache.NewHotness(e.dev, e.rows)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	if err := e.findHotness(ctx, in, h, false); err != nil {
		return nil, err
	}
	return e.counts(ctx, h)
}

// adder is add for the batches that e samples.
func (w *planWork) adder(e *engine, in Inputs, hw *hardware.Profile) func(*graph.MiniBatch) {
	model := newVWork(&hw.GPU.Ops, e.cfg, e.dim, e.rowType, max(in.Dataset.Meta.Classes, 1), e.topo.Wide())
	return func(mb *graph.MiniBatch) {
		s := shapeOf(mb)
		if e.cfg.Sampler == SamplerLadies {
			s.lists(e.topo.Indptr, hostmem.View[int64](mb.Nodes.Bytes()))
		}
		w.add(&s, model, &hw.GPU, hw.PCIe.UVAGBs.Value)
	}
}

// add counts a batch's kernels.
func (w *planWork) add(s *vshape, m *vwork, g *hardware.GPU, uvaGBs float64) {
	start, gap, end := g.OpLaunchNS.Value, g.GapNS.Value, g.TeardownNS.Value
	jobs := [][]vkernel{m.begin(s)}
	for h := range s.blocks {
		jobs = append(jobs, m.hop(s, h))
	}
	for i, j := range jobs {
		if i > 0 { // the CPU waits for each hop: it needs its size
			w.sampleNS += start + end
		}
		for _, k := range j {
			work := kernelNS(g, &k)
			w.sampleGPUNS += work
			w.sampleNS += max(work, float64(k.uva)/uvaGBs)
			w.topologyBytes += k.uva
		}
	}
	for _, k := range m.model(s, true) {
		w.trainNS += kernelNS(g, &k)
	}
	w.trainNS += gap
	for _, k := range m.lookup(&vpart{count: s.hopEnd[len(s.hopEnd)-1]}) {
		w.lookupNS += kernelNS(g, &k)
	}
}

func kernelNS(g *hardware.GPU, k *vkernel) float64 {
	if k.op == nil {
		return 0
	}
	return float64(g.KernelNS(*k.op, k.work, 0))
}

// plan scans the splits.
func (w *planWork) plan(dataset, from string, rowBytes int64, o PlanOptions) (*CachePlan, error) {
	rows := int64(len(w.counts))
	if rows > math.MaxUint32 {
		return nil, errs.New(errs.Capability, "a plan for %d rows: at most 2^32 are supported; plan for a sample of the graph", rows)
	}
	hw := o.Hardware.Profile
	machine, err := iosim.NewMachine(des.New(), hw, o.Hardware.SSDs)
	if err != nil {
		return nil, err
	}
	lba := 512
	if sizes := machine.Model().LBAs.Bytes; len(sizes) > 0 {
		lba = sizes[0]
	}
	ssds := machine.SSDs()
	layout, err := gpuio.NewLayout(rows, int(rowBytes), ssds, lba)
	if err != nil {
		return nil, err
	}
	if w.accesses == 0 {
		return nil, errs.New(errs.Usage, "%s looks no rows up: there is nothing to plan for", from)
	}
	total := rows * rowBytes
	p := &CachePlan{
		Event: "cache plan", Modelled: true, Dataset: dataset, Hardware: hw.Name, SSDModel: machine.Model().Name, SSDs: ssds, From: from, Hotness: w.by,
		Rows: rows, RowBytes: rowBytes, Epochs: w.epochs, Batches: w.batches, Accesses: w.accesses, Notes: w.notes,
		BudgetBytes: min(o.Budget.Of(total), total), GPUMaxBytes: max(o.GPUMax, 0),
	}
	if o.GPUMax == 0 {
		p.GPUMaxBytes = int64(hw.GPU.MemoryGiB.Value * (1 << 30))
	}
	if o.CPUMax != 0 {
		most := max(o.CPUMax, 0)
		p.CPUMaxBytes = &most
	}
	steps := int64(o.Steps)
	if steps == 0 {
		steps = 100
	}
	read := int64(layout.ReadBytes())
	g := &hw.GPU
	per := planCosts{
		ssd:  1e9 / machine.SSDBound(read), // of one SSD
		link: 1e9 / machine.IngressBound(read), uva: 1e9 / min(hw.PCIe.UVAGBs.Value*1e9, hw.PCIe.GPU.Rate(4096)),
		memory: 1 / hw.CPU.MemoryGBs.Value,
	}
	per.gpuRow = kernelNS(g, &vkernel{op: &g.Ops.Gather, work: hardware.Work{Items: 1 << 20, Bytes: 2 * rowBytes << 20}}) / (1 << 20)
	per.cpuRow = kernelNS(g, &vkernel{op: &g.Ops.Gather, work: hardware.Work{Items: 1 << 20, Bytes: rowBytes << 20}}) / (1 << 20)
	costs := cache.Costs{GPU: per.gpuRow, CPU: max(per.cpuRow, per.uva*float64(rowBytes)), SSD: max(per.ssd/float64(ssds), per.link)}
	p.Costs = map[string]float64{"gpu": costs.GPU, "cpu": costs.CPU, "ssd": costs.SSD}
	if costs.CPU >= costs.SSD {
		p.Notes = append(p.Notes, fmt.Sprintf("a row from CPU memory takes the link as long as one from the %d SSDs together (%.3g and %.3g ns): CPU memory for rows shortens an epoch only where the SSDs themselves are the limit", ssds, costs.CPU, costs.SSD))
	}

	// The splits, and the ranks that they cut the rows at.
	budget := p.BudgetBytes / rowBytes
	gpuMost := min(budget, p.GPUMaxBytes/rowBytes)
	cpuMost := budget
	if p.CPUMaxBytes != nil {
		cpuMost = min(cpuMost, *p.CPUMaxBytes/rowBytes)
	}
	type split struct{ gpu, cpu int64 }
	var splits []split
	for i := range steps + 1 {
		gpu := gpuMost * i / steps
		if s := (split{gpu, min(budget-gpu, cpuMost)}); len(splits) == 0 || splits[len(splits)-1] != s {
			splits = append(splits, s)
		}
	}
	cuts := []int64{}
	for _, s := range splits {
		cuts = append(cuts, s.gpu+s.cpu)
		if costs.GPUFirst() {
			cuts = append(cuts, s.gpu)
		} else {
			cuts = append(cuts, s.cpu)
		}
	}
	at := hitsAt(w.scores, w.counts, sorted(cuts), ssds)
	for _, s := range splits {
		all := at[s.gpu+s.cpu]
		inGPU, inCPU := float64(at[s.gpu].hits), float64(all.hits-at[s.gpu].hits)
		if !costs.GPUFirst() {
			inCPU, inGPU = float64(at[s.cpu].hits), float64(all.hits-at[s.cpu].hits)
		}
		missOf := 0.0 // of the busiest SSD
		for i := range ssds {
			missOf = max(missOf, float64(at[rows].perSSD[i]-all.perSSD[i]))
		}
		miss := float64(w.accesses) - inGPU - inCPU
		pt := PlanPoint{GPUBytes: s.gpu * rowBytes, CPUBytes: s.cpu * rowBytes, HitGPU: inGPU / float64(w.accesses), HitCPU: inCPU / float64(w.accesses)}
		// Of one epoch.
		n := float64(w.epochs)
		missOf, miss, inGPU, inCPU = missOf/n, miss/n, inGPU/n, inCPU/n
		uva := inCPU*float64(rowBytes) + float64(w.topologyBytes)
		ns := map[string]float64{
			"ssds":       missOf * per.ssd,
			"link":       miss*per.link + uva*per.uva,
			"gpu":        w.sampleGPUNS + w.lookupNS + w.trainNS + inGPU*per.gpuRow + inCPU*per.cpuRow,
			"cpu memory": uva * per.memory,
			"sampling":   w.sampleNS,
			"training":   w.trainNS,
		}
		pt.Resources = map[string]float64{}
		for _, name := range PlanResources {
			t := ns[name] / 1e9
			pt.Resources[name] = t
			if t > pt.Seconds {
				pt.Seconds, pt.Bottleneck = t, name
			}
		}
		p.Curve = append(p.Curve, pt)
	}
	p.Best = slices.MinFunc(p.Curve, func(a, b PlanPoint) int {
		return cmp.Or(cmp.Compare(a.Seconds, b.Seconds), cmp.Compare(a.sum(), b.sum()), cmp.Compare(a.GPUBytes, b.GPUBytes))
	})
	p.LeastGPUBytes = p.Best.GPUBytes
	for _, c := range p.Curve {
		if c.Seconds <= p.Best.Seconds*1.001 {
			p.Flat++
			p.LeastGPUBytes = min(p.LeastGPUBytes, c.GPUBytes)
		}
	}
	return p, nil
}

// planCosts are nanoseconds.
type planCosts struct {
	ssd, link      float64 // a read, on one SSD and on the GPU's link
	uva, memory    float64 // a byte of the CPU's memory, on the link and in the memory
	gpuRow, cpuRow float64 // the GPU's work for a cached row
}

func (p *PlanPoint) sum() float64 {
	s := 0.0
	for _, name := range PlanResources {
		s += p.Resources[name]
	}
	return s
}

// rankHits is how many accesses the hottest rows of some number have, and how they lie on the SSDs.
type rankHits struct {
	hits   int64
	perSSD []int64
}

// hitsAt ranks the rows by score, of equals the one with the lower number first, as placement does, and sums counts up to
// each cut (ascending) and up to all rows.
func hitsAt(scores, counts []uint32, cuts []int64, ssds int) map[int64]rankHits {
	order := make([]uint32, len(scores))
	rankRows(scores, order)
	out := map[int64]rankHits{}
	sum := rankHits{perSSD: make([]int64, ssds)}
	keep := func(i int64) { out[i] = rankHits{sum.hits, slices.Clone(sum.perSSD)} }
	for i, row := range order {
		for len(cuts) > 0 && cuts[0] == int64(i) {
			keep(cuts[0])
			cuts = cuts[1:]
		}
		sum.hits += int64(counts[row])
		sum.perSSD[int(row)%ssds] += int64(counts[row])
	}
	keep(int64(len(order)))
	return out
}

// sorted is the different values of v in order.
func sorted(v []int64) []int64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return slices.Compact(v)
}

// rankRows fills order with the rows from the highest score to the lowest, equals by number: a radix sort of 11 bits at a
// time. There are fewer than 2^32 rows.
func rankRows(scores, order []uint32) {
	const radix = 11
	from := make([]uint32, len(scores))
	for i := range from {
		from[i] = uint32(i)
	}
	for shift := 0; shift < 32; shift += radix {
		var count [1 << radix]int64
		digit := func(row uint32) uint32 { return ^scores[row] >> shift & (1<<radix - 1) }
		for _, s := range scores {
			count[^s>>shift&(1<<radix-1)]++
		}
		at := int64(0)
		for d, n := range count {
			count[d] = at
			at += n
		}
		for _, row := range from {
			d := digit(row)
			order[count[d]] = row
			count[d]++
		}
		from, order = order, from
	}
	// After three digits the caller's slice holds the result.
}
