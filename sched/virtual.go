package sched

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"helios/cache"
	"helios/cuda"
	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/graph"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
)

// The clocks of a run.
const (
	ClockWall    = "wall"
	ClockVirtual = "virtual" // modelled
)

// Clocks lists the accepted values.
var Clocks = []string{ClockWall, ClockVirtual}

// Hardware is the machine of a run on the virtual clock.
type Hardware struct {
	Profile *hardware.Profile
	SSDs    int // 0: as many as the profile has
	// Warm batches at the start of each epoch go through sampling and the caches in no time and are counted nowhere, so
	// that what follows meets caches that have filled; Batches after them are played, 0: all that are left.
	Warm, Batches int
}

// limit is which batches of n are played: from first on, up to end.
func (h Hardware) limit(n int) (first, end int) {
	first = min(max(h.Warm, 0), max(n-1, 0))
	end = n
	if h.Batches > 0 {
		end = min(n, first+h.Batches)
	}
	return first, end
}

// modelledTransfer is the largest transfer of a modelled SSD, of which the models say nothing; it is
// the usual one, and that of our software controller.
const modelledTransfer = 128 << 10

// directAlign is how far the cpu stack widens its reads (O_DIRECT on a file system of 4 KiB blocks).
const directAlign = 4096

// ModelledResult is a run on the virtual clock: every figure in it is modelled, except the counts of
// rows, batches and commands, which are what a real run of the same seed has. What arithmetic would
// tell (parameters, loss, accuracy) is not there, in JSON neither.
type ModelledResult struct {
	Result
	Hardware string // profile
	SSDModel string
	SSDs     int
}

// MarshalJSON writes the fields of a Result without those that only arithmetic, or this machine,
// could fill.
func (r ModelledResult) MarshalJSON() ([]byte, error) {
	epochs := make([]ModelledEpoch, len(r.Epochs))
	for i, e := range r.Epochs {
		epochs[i] = ModelledEpoch{e}
	}
	return json.Marshal(struct {
		Event    string `json:"event"`
		Modelled bool   `json:"modelled"`
		Clock    string `json:"clock"`
		Hardware string `json:"hardware"`
		SSDModel string `json:"ssd_model"`
		SSDs     int    `json:"ssd_count"`
		Result
		Epochs     []ModelledEpoch `json:"epochs"`
		BestEpoch  *absent         `json:"best_epoch,omitempty"`
		TestAcc    *absent         `json:"test_acc,omitempty"`
		Params     *absent         `json:"params_sha256,omitempty"`
		PeakMemory *absent         `json:"peak_memory_bytes,omitempty"`
	}{Event: r.Event, Modelled: true, Clock: ClockVirtual, Hardware: r.Hardware, SSDModel: r.SSDModel, SSDs: r.SSDs, Result: r.Result, Epochs: epochs})
}

// absent takes the place of a field that is left out.
type absent struct{}

// ModelledEpoch is an EpochResult of the virtual clock.
type ModelledEpoch struct{ EpochResult }

// MarshalJSON leaves out what only arithmetic could fill.
func (e ModelledEpoch) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Modelled bool `json:"modelled"`
		EpochResult
		Loss     *absent `json:"loss,omitempty"`
		TrainAcc *absent `json:"train_acc,omitempty"`
		ValAcc   *absent `json:"val_acc,omitempty"`
	}{Modelled: true, EpochResult: e.EpochResult})
}

// Virtual plays cfg's run on the virtual clock (DESIGN section 7): the same plan over the same
// batches, sampled for real and looked up in the real caches on in's device, while durations come
// from hw. No features are read and nothing is computed, so in needs no SSDs. Equal arguments give
// equal results. Not modelled: errors and retries, hits of mmap's page cache (each row is a fault), the
// CPU's own work between operators, the test pass, checkpoints.
//
// When ctx ends, the error has class errs.Interrupted and the result holds the epochs that were whole.
func Virtual(ctx context.Context, cfg Config, in Inputs, hw Hardware, obs Observer) (res *ModelledResult, err error) {
	if cfg.CheckpointDir != "" || cfg.Resume {
		return nil, errs.New(errs.Usage, "--clock virtual computes no parameters: leave out --checkpoint and --resume")
	}
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	switch {
	case cfg.Topology == TopologySSD:
		return nil, errs.New(errs.Capability, "--clock virtual has no times for sampling from storage, which the CPU does; use --topology %s", TopologyMemory)
	case cfg.Tune != TuneOff:
		return nil, errs.New(errs.Usage, "--tune measures the first batches of a run that reads; under --clock virtual play other --prefetch-depth, SM budgets or --accumulate instead")
	case cfg.Trace != "":
		return nil, errs.New(errs.Usage, "--trace records a run that reads, to hold replays against; under --clock virtual nothing is read: leave one of them out")
	}
	if i := in.Dev.Info(); i.Backend != "host" {
		return nil, errs.New(errs.Capability, "--clock virtual samples on the host device, not on %s; use --device host", i.Name)
	}
	if cfg, err = cfg.onDevice(in.Dev.Info()); err != nil {
		return nil, err
	}
	v := &virtual{e: &engine{cfg: cfg, plan: cfg.plan(), obs: obs, dev: in.Dev}, hw: hw}
	defer func() { err = errors.Join(err, v.e.close()) }()
	if err := v.open(ctx, in); err != nil {
		return nil, err
	}
	e, meta := v.e, in.Dataset.Meta
	res = &ModelledResult{
		Result: Result{
			Event: "result", Mode: cfg.Mode, Model: cfg.Model, Dataset: meta.Name, Seed: cfg.Seed,
			Device: hw.Profile.GPU.Name + " (modelled)", IOStack: v.stackName(), RunInfo: v.info(), Pipeline: cfg.Pipeline,
			RowDType: e.rowType.String(), RowBytes: e.rowBytes,
			GPUCacheBytes: v.gpuCacheBytes(), CPUCacheBytes: int64(len(e.placement.CPU)) * e.rowBytes,
			TopologyBytes: e.topo.Bytes(), PresampleSecs: float64(v.presampleNS) / 1e9, FillSeconds: float64(v.fillNS) / 1e9,
		},
		Hardware: hw.Profile.Name, SSDModel: v.m.m.Model().Name, SSDs: v.m.m.SSDs(),
	}
	e.obs.plan(e.cfg.graph(v.m.stack != nil))
	err = v.train(ctx, in, res)
	res.IO, res.RunInfo = v.io(), v.info()
	if err == nil {
		err = v.conserved()
	}
	return res, err
}

// virtual is a run of Virtual.
type virtual struct {
	e       *engine // sampling, placement and lookup are real
	hw      Hardware
	m       *vmachine
	planner *gpuio.Planner
	stack   *iosim.Stack
	perSSD  []gpuio.Planned // what was read so far

	mbs []*graph.MiniBatch // one more than the window's depth
	src source
	acc AccumulatorInfo
	// filled is the commands of a stack before the present one.
	filled int64
	// A dynamic GPU tier, in place of e.het.
	dyn    *cache.Dynamic
	ticket *cache.Ticket
	lines  cache.Lines
	rows   []int64 // scratch: lines to be read, by SSD
	off    []int64

	presampleNS, fillNS int64
}

// source samples a pass's batches for real, as far ahead as the window has it.
type source struct {
	key, next, n int
	order        []int64
	lines, count int64 // to be read for the group, batches in it
}

// open makes the machine, samples to place the rows, and plays presampling and the filling of the
// tiers.
func (v *virtual) open(ctx context.Context, in Inputs) error {
	e, p := v.e, v.hw.Profile
	t := in.Dataset.Meta.RowType()
	if e.cfg.RowType != "" {
		var err error
		if t, err = rowtype.Parse(e.cfg.RowType); err != nil {
			return err
		}
	}
	e.sizes(in, t)
	sim := des.New()
	machine, err := iosim.NewMachine(sim, p, v.hw.SSDs)
	if err != nil {
		return err
	}
	ssds := machine.SSDs()
	lba := 512
	if sizes := machine.Model().LBAs.Bytes; len(sizes) > 0 {
		lba = sizes[0]
	}
	if e.layout, err = gpuio.NewLayout(e.rows, int(e.rowBytes), ssds, lba); err != nil {
		return err
	}
	// The GPU's memory bounds its tier; the profile says nothing of how much memory the CPU has.
	b, err := e.cfg.tierRows(e.rows, e.rowBytes, math.MaxInt64/2, int64(p.GPU.MemoryGiB.Value*(1<<30)))
	if err != nil {
		return err
	}
	if err := e.openGraph(in); err != nil {
		return err
	}
	s := &slot{segs: make([]segment, 1)}
	e.slots = []*slot{s}
	for range e.cfg.Window + 1 {
		mb, err := e.sampler.NewMiniBatch()
		if err != nil {
			return err
		}
		e.onClose(mb.Close)
		v.mbs = append(v.mbs, mb)
	}
	s.mb = v.mbs[0]

	gpu := newVGPU(machine)
	v.m = &vmachine{
		sim: sim, m: machine, gpu: gpu, plan: e.plan, rec: e.cfg.Timeline,
		work: newVWork(&p.GPU.Ops, e.cfg, e.dim, e.rowType, in.Dataset.Meta.Classes, e.topo.Wide()),
	}
	ops := e.cfg.graph(true)
	for name, to := range map[string]**vstream{OpSample: &v.m.sampleS, OpLookup: &v.m.lookupS, OpGather: &v.m.gatherS, OpTrain: &v.m.trainS} {
		s := ops.stream(name)
		*to = gpu.stream(s.Priority, s.SMs)
	}
	v.m.rec.Tracks(tracks...)
	v.perSSD = make([]gpuio.Planned, ssds)
	e.presampled = func(mb *graph.MiniBatch) { v.presample(shapeOf(mb)) }
	placed := b
	if e.cfg.dynamic() { // lines come into the GPU tier by themselves
		placed.gpuRows, placed.auto = 0, false
	}
	if e.placement, err = e.choose(ctx, placed, in); err != nil {
		return err
	}
	v.span("presample", 0)
	v.presampleNS = sim.Now()
	if e.cfg.dynamic() {
		if err := v.openStack(); err != nil { // the CPU buffer is filled row by row
			return err
		}
		v.fill(ctx)
		if err := v.openDynamic(b); err != nil {
			return err
		}
		if err := v.openStack(); err != nil {
			return err
		}
		if err := v.calibrate(); err != nil {
			return err
		}
		return interrupted(ctx)
	}
	// The tiers hold no features here: a byte for each row is enough for lookups.
	if e.het, err = cache.NewHetero(e.dev, e.rows, 1, ssds, e.placement); err != nil {
		return err
	}
	e.onClose(e.het.Close)
	if s.segs[0].buckets, err = e.het.NewBuckets(); err != nil {
		return err
	}
	e.onClose(s.segs[0].buckets.Close)
	if err := v.openStack(); err != nil {
		return err
	}
	v.fill(ctx)
	if b.gpuRows+b.cpuRows == e.rows { // every row is in a tier
		v.m.stack = nil
	}
	return interrupted(ctx)
}

// openStack makes the I/O stack.
func (v *virtual) openStack() (err error) {
	c, l := v.e.cfg, v.e.layout
	o := gpuio.PlanOptions{Stack: c.IOStack, CoalesceBytes: c.CoalesceBytes, Depth: c.QueueDepth, MaxTransferBytes: modelledTransfer}
	if c.IOStack == StackCPU {
		o.Align = directAlign
	}
	if v.planner, err = gpuio.NewPlanner(l, o); err != nil {
		return err
	}
	ic := iosim.Config{Stack: c.IOStack, Blocks: c.Blocks, Depth: c.QueueDepth, CommandBytes: int64(l.ReadBytes()), Seed: c.Seed}
	if c.IOStack == StackCPU || c.IOStack == StackMmap {
		ic.Blocks, ic.Threads = 0, c.Workers
	} else if c.SMs.IO > 0 { // blocks at once
		if ic.Blocks == 0 || ic.Blocks > c.SMs.IO {
			ic.Blocks = c.SMs.IO
		}
	}
	if c.IOStack != StackCPU && c.IOStack != StackMmap && int(l.RowBytes) != l.ReadBytes() {
		ic.StagedBytes = int64(l.RowBytes)
	}
	if c.Pipeline == PipelineSeries && c.IOStack == StackAsync && ic.Blocks == 0 { // alone on the GPU
		ic.Blocks = max(32, 16*v.hw.Profile.GPU.SMs.Int())
	}
	if v.stack != nil {
		v.filled += v.stack.Stats().Commands
	}
	if v.m.stack, err = iosim.New(v.m.m, ic); err != nil {
		return err
	}
	v.stack = v.m.stack
	// What the I/O kernels hold while they run: their budget, or their warps' share of the GPU's.
	ic = v.m.stack.Config()
	g := &v.hw.Profile.GPU
	holds := float64(ic.Blocks*ic.Threads/32) / g.WarpsPerSM.Value
	switch {
	case c.IOStack == StackCPU || c.IOStack == StackMmap || g.IO.WakeNS.Value > 0: // no kernels, or such that sleep
		holds = 0
	case c.SMs.IO > 0:
		holds = float64(c.SMs.IO)
	}
	v.m.gpu.io = func() float64 {
		if v.stack.InFlight() == 0 {
			return 0
		}
		return min(holds, g.SMs.Value)
	}
	return nil
}

// presample plays the sampling of one batch whose rows are counted.
func (v *virtual) presample(s vshape) {
	m := v.m
	jobs := [][]vkernel{m.work.begin(&s)}
	for h := range s.blocks {
		jobs = append(jobs, m.work.hop(&s, h))
	}
	jobs = append(jobs, m.work.hotness(s.hopEnd[len(s.hopEnd)-1]))
	var next func(int64)
	next = func(int64) {
		if len(jobs) > 0 {
			j := jobs[0]
			jobs = jobs[1:]
			m.sampleS.launch(j, nil, next)
		}
	}
	next(0)
	m.sim.Run()
}

// fill plays the reads that fill the tiers, set by set as fillTier makes them.
func (v *virtual) fill(ctx context.Context) {
	e, m := v.e, v.m
	start := m.sim.Now()
	ssds := m.m.SSDs()
	rows, off := make([]int64, fillRows), make([]int64, ssds+1)
	for _, all := range [][]int64{e.placement.GPU, e.placement.CPU} {
		for at := 0; at < len(all) && ctx.Err() == nil; at += fillRows {
			part := all[at:min(at+fillRows, len(all))]
			stripe(part, rows, off)
			_, per, bytes := v.plan(rows[:len(part)], off)
			m.stack.SubmitSized(per, bytes, func(iosim.Times) {})
			m.sim.Run()
		}
	}
	v.fillNS = m.sim.Now() - start
	v.span("fill tiers", start)
}

// stripe sorts rows by SSD into out; off has an entry for each SSD and one more.
func stripe(rows, out, off []int64) {
	n := int64(len(off) - 1)
	clear(off)
	for _, r := range rows {
		off[r%n+1]++
	}
	for s := range n {
		off[s+1] += off[s]
	}
	next := append([]int64(nil), off...)
	for _, r := range rows {
		out[next[r%n]] = r
		next[r%n]++
	}
}

// plan is which commands a set takes by SSD, and what one of them moves; they are counted as read.
func (v *virtual) plan(rows, off []int64) (reads []gpuio.Planned, per []int64, bytes int64) {
	reads = make([]gpuio.Planned, len(off)-1)
	v.planner.Set(rows, off, reads)
	per = make([]int64, len(reads))
	var commands int64
	for s, r := range reads {
		per[s] = r.Commands
		commands += r.Commands
		bytes += r.Bytes
		v.perSSD[s].Commands += r.Commands
		v.perSSD[s].Bytes += r.Bytes
		v.perSSD[s].Shared += r.Shared
	}
	return reads, per, (bytes + commands/2) / max(commands, 1)
}

func (v *virtual) span(name string, start int64) {
	if now := v.m.sim.Now(); v.m.rec.On() && now > start {
		v.m.rec.Span(trackRun, name, start, now-start, nil)
	}
}

// sampleTo samples the batches up to i and those that the window wants beyond, and announces them.
func (v *virtual) sampleTo(ctx context.Context, i int) error {
	e, s := v.e, &v.src
	for last := min(i+e.cfg.Window, s.n-1); s.next <= last; s.next++ {
		mb := v.mbs[s.next%len(v.mbs)]
		if err := e.sampleWhole(ctx, mb, s.key, s.next, seedsOf(s.order, s.next, e.cfg.Batch)); err != nil {
			return err
		}
		if e.cfg.Window == 0 {
			continue
		}
		if err := v.dyn.Announce(hostmem.View[int64](mb.Nodes.Bytes())[:mb.HopEnd[len(mb.HopEnd)-1]]); err != nil {
			return fmt.Errorf("batch %d: %w", s.next, err)
		}
	}
	return nil
}

// shape looks the next batch's rows up.
func (v *virtual) shape(ctx context.Context, i int) (*vshape, error) {
	e := v.e
	if err := v.sampleTo(ctx, i); err != nil {
		return nil, err
	}
	mb := v.mbs[i%len(v.mbs)]
	s := shapeOf(mb)
	s.at, s.announced = i, e.cfg.Window > 0
	if e.cfg.Sampler == SamplerLadies {
		s.lists(e.topo.Indptr, hostmem.View[int64](mb.Nodes.Bytes()))
	}
	if v.dyn != nil {
		v.dyn.NextBatch()
	}
	op, cancel := e.opCtx(ctx)
	defer cancel()
	from := int64(0)
	for h, to := range s.hopEnd {
		if !e.plan.perHop && h < len(s.hopEnd)-1 {
			continue
		}
		part := vpart{count: to - from}
		if part.count > 0 {
			look := v.look
			if v.dyn != nil {
				look = v.admit
			}
			if err := look(op, mb, from, &part); err != nil {
				return nil, fmt.Errorf("batch %d: %w", i, err)
			}
		}
		s.parts = append(s.parts, part)
		from = to
	}
	if e.cfg.Accumulate > 0 {
		g := &v.src
		g.count++
		if s.closes = g.lines >= v.acc.Target || g.count >= maxGroup || i == g.n-1; s.closes {
			g.lines, g.count = 0, 0
		}
	}
	return &s, nil
}

// look looks a part up in static tiers.
func (v *virtual) look(ctx context.Context, mb *graph.MiniBatch, from int64, part *vpart) error {
	e, b := v.e, v.e.slots[0].segs[0].buckets
	if err := e.het.Lookup(ctx, e.lookupS, mb.Nodes.Ptr(), from, part.count, b); err != nil {
		return err
	}
	part.ngpu, part.ncpu, part.nmiss = b.NGPU, b.NCPU, b.NMiss
	if part.nmiss > 0 {
		if v.m.stack == nil {
			return fmt.Errorf("%d rows are in no tier and no SSD is there", part.nmiss)
		}
		part.reads, _, _ = v.plan(hostmem.View[int64](b.MissRow.Bytes())[:part.nmiss], b.SSDOffset)
	}
	return nil
}

// train plays all epochs.
func (v *virtual) train(ctx context.Context, in Inputs, res *ModelledResult) error {
	e := v.e
	train, err := in.Dataset.Split("train")
	if err != nil {
		return err
	}
	if len(train) == 0 {
		return errs.New(errs.Usage, "dataset %s has no training nodes; import or generate it with a training split", in.Dataset.Meta.Name)
	}
	val, err := in.Dataset.Split("val")
	if err != nil {
		return err
	}
	order := make([]int64, len(train))
	for ep := range e.cfg.Epochs {
		graph.Shuffle(order, train, e.cfg.Seed, ep)
		r, err := v.pass(ctx, fmt.Sprintf("epoch %d", ep+1), ep, ep, order, true)
		if err != nil {
			return v.stopped(ep, err)
		}
		if len(val) > 0 && !e.cfg.NoEval {
			w, err := v.pass(ctx, "validate", valEpoch+ep, ep, val, false)
			if err != nil {
				return v.stopped(ep, err)
			}
			r.ValSeconds = w.Seconds
		}
		res.Epochs = append(res.Epochs, r)
		e.obs.epoch(r)
	}
	return nil
}

func (v *virtual) stopped(epoch int, err error) error {
	if errs.ClassOf(err) == errs.Interrupted {
		return errs.New(errs.Interrupted, "stopped in epoch %d of the modelled run (%w)", epoch+1, err)
	}
	return err
}

// pass plays one walk over nodes; key is the sampling's.
func (v *virtual) pass(ctx context.Context, name string, key, epoch int, order []int64, train bool) (EpochResult, error) {
	e := v.e
	var sum partial
	p := &vpass{
		vmachine: v.m, name: name, n: batches(len(order), e.cfg.Batch), train: train,
		window: e.cfg.Window, grouped: e.cfg.Accumulate > 0, staged: v.dyn != nil,
	}
	if train {
		p.first, p.n = v.hw.limit(p.n)
	}
	v.src = source{key: key, n: p.n, order: order}
	for i := range p.first { // caches that have filled
		if err := interrupted(ctx); err != nil {
			return EpochResult{}, err
		}
		planned := append([]gpuio.Planned(nil), v.perSSD...)
		if _, err := v.shape(ctx, i); err != nil {
			return EpochResult{}, err
		}
		v.perSSD = planned
	}
	v.src.lines, v.src.count = 0, 0
	p.shape = func(i int) (*vshape, error) { return v.shape(ctx, i) }
	p.after = func(b *vbatch) {
		sum.Batches++
		sum.Seeds += b.seeds
		for _, part := range b.parts {
			sum.RowsGPU += part.ngpu
			sum.RowsCPU += part.ncpu
			sum.RowsSSD += part.nmiss
			for _, r := range part.reads {
				sum.BytesSSD += r.Bytes
				sum.Commands += r.Commands
			}
			sum.Inserted += part.fills
			sum.Evicted += part.evicted
			sum.Bypassed += part.bypassed
		}
		e.obs.step("modelled "+name, b.index+1, p.n)
	}
	if err := p.run(ctx); err != nil {
		return EpochResult{}, err
	}
	if p.grouped {
		sum.Groups, sum.Grouped = p.merged, sum.Batches
	}
	sum.Seconds, sum.Waited, sum.Stages = float64(p.end-p.start)/1e9, float64(p.waited)/1e9, p.stages()
	return sum.result(epoch, e.rowBytes), nil
}

// conserved checks that the modelled SSDs did what the batches needed, no less and no more, and that
// nothing is under way.
func (v *virtual) conserved() error {
	var planned int64
	for _, p := range v.perSSD {
		planned += p.Commands
	}
	if did := v.filled + v.stack.Stats().Commands; did != planned || v.stack.InFlight() != 0 || v.m.credits != 0 || v.m.reads != 0 {
		return fmt.Errorf("the modelled run lost track: %d of %d commands done, %d sets, %d batches and %d rows still in flight; this is a bug",
			did, planned, v.stack.InFlight(), v.m.credits, v.m.reads)
	}
	return nil
}

// info is what RunInfo says of a modelled run.
func (v *virtual) info() RunInfo {
	e := v.e
	r := RunInfo{
		MemoryRung: "modelled", Precision: cuda.FP32.String(), BLAS: BLASOff,
		Policy: e.cfg.Policy, Window: e.cfg.Window, Sampler: e.cfg.Sampler, Topology: e.cfg.Topology,
	}
	if e.hotness != nil {
		h := *e.hotness
		h.Seconds = float64(v.presampleNS) / 1e9 // and not this machine's
		r.Hotness = &h
	}
	if v.dyn != nil {
		r.CacheLineBytes, r.PolicyBytes = v.lines.LineBytes, v.dyn.MetadataBytes()
	}
	if v.acc.MaxBatches > 0 {
		a := v.acc
		r.Accumulator = &a
	}
	return r
}

// gpuCacheBytes is the GPU tier's size.
func (v *virtual) gpuCacheBytes() int64 {
	if v.dyn != nil {
		return v.dyn.Config().Slots * v.lines.LineBytes
	}
	return int64(len(v.e.placement.GPU)) * v.e.rowBytes
}

func (v *virtual) stackName() string {
	if v.m.stack == nil {
		return StackNone
	}
	return v.e.cfg.IOStack
}

// io is what the modelled SSDs did.
func (v *virtual) io() IOResult {
	r := IOResult{SSDs: []SSDResult{}}
	for s, p := range v.perSSD {
		r.SSDs = append(r.SSDs, SSDResult{Name: fmt.Sprintf("ssd%d", s), Commands: p.Commands, Bytes: p.Bytes})
		r.Coalesced += p.Shared
	}
	r.Balance = balance(r.SSDs)
	st := v.stack.Stats()
	r.Latency = latencyOf(&st.Latency)
	return r
}
