// Package virtual plays a run on a modelled machine: batches are sampled and looked up for real,
// and all times come from a hardware profile. Events stand in for the goroutines of package sched;
// both obey the operator graph of package plan.
package virtual

import (
	"context"
	"errors"
	"fmt"
	"math"

	"helios/cache"
	"helios/cache/trace"
	"helios/cuda"
	"helios/dataset/pages"
	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/graph"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// modelledTransfer is the largest transfer of a modelled SSD, of which the models say nothing; it
// is the usual one, and that of our software controller.
const modelledTransfer = 128 << 10

// Run plays cfg's run on the virtual clock: the same plan over the same batches, sampled for real
// and looked up in the real caches on in's device, while durations come from hw. The topology is in
// memory where cfg names none (lists.go: on storage). No features are read and nothing is computed,
// so in needs no SSDs. Equal arguments give equal results. Not modelled: errors and retries, hits
// of mmap's page cache (each row is a fault), the CPU's own work between operators, the test pass
// (which a trace has all the same), checkpoints.
//
// When ctx ends, the error has class errs.Interrupted and the result holds the epochs that were
// whole.
func Run(ctx context.Context, cfg plan.Config, in prepare.Inputs, hw cost.Hardware,
	obs report.Observer) (res *report.ModelledResult, err error) {
	if cfg, err = Check(cfg); err != nil {
		return nil, err
	}
	s, err := prepare.Open(ctx, cfg, in, obs)
	if err != nil {
		return nil, err
	}
	v := &run{Sampling: s, plan: s.Config.Schedule(), hw: hw}
	v.rec = recorder{v: v, Recording: prepare.Recording{Of: s}}
	defer func() { err = errors.Join(err, v.rec.Close(), v.Close()) }()
	if err := v.open(ctx, in); err != nil {
		return nil, err
	}
	cfg = s.Config
	meta := in.Dataset.Meta
	res = &report.ModelledResult{
		Result: report.Result{
			Mode: cfg.Mode, Model: cfg.Model, Dataset: meta.Name, Seed: cfg.Seed,
			Device: hw.Profile.GPU.Name + " (modelled)", IOStack: v.stackName(), RunInfo: v.info(),
			Pipeline: cfg.Pipeline,
			RowDType: v.RowType.String(), RowBytes: v.RowBytes,
			GPUCacheBytes: v.gpuCacheBytes(),
			CPUCacheBytes: v.cpuCacheBytes(),
			TopologyBytes: v.Topology.Bytes(), ScaleBytes: v.ScaleBytes(),
			PresampleSecs: float64(v.presampleNS) / 1e9,
			FillSeconds:   float64(v.fillNS) / 1e9,
		},
		Hardware: hw.Profile.Name, SSDModel: v.m.m.ModelName(), SSDs: v.m.m.SSDs(),
	}
	v.Observer.TellPlan(v.Config.Operators(v.m.stack != nil))
	err = v.rec.End(v.train(ctx, in, res))
	res.IO, res.RunInfo = v.io(), v.info()
	if err == nil {
		err = v.conserved()
	}
	return res, err
}

// Check returns cfg as Run plays it, or why Run refuses it whatever the dataset and the machine.
func Check(cfg plan.Config) (plan.Config, error) {
	if cfg.CheckpointDir != "" || cfg.Resume {
		return cfg, errs.New(errs.Usage,
			"option clock virtual computes no parameters: leave out option checkpoint and option resume")
	}
	if cfg.HotnessDir == "" {
		cfg.HotnessDir = plan.NoFolder // modelled presampling does not depend on earlier runs
	}
	if cfg.Topology == "" {
		cfg.Topology = plan.TopologyMemory // a mode's own may be one that has no times here
	}
	cfg, err := cfg.Filled()
	if err != nil {
		return cfg, err
	}
	switch {
	case refuseStored(&cfg) != nil:
		return cfg, refuseStored(&cfg)
	case cfg.Superbatched() && !cfg.Planned():
		return cfg, errs.New(errs.Capability,
			"%v virtual plays superbatches under %v %s, not %s; use that, or another %v",
			errs.Key("clock"), errs.Key("policy"), plan.PolicyBelady, cfg.Policy, errs.Key("mode"))
	case cfg.Reduce != plan.ReduceTree:
		return cfg, errs.New(errs.Capability,
			"%v virtual plays the gradients' way through the first device (%v %s), not %s; leave %v out",
			errs.Key("clock"), errs.Key("reduce"), plan.ReduceTree, cfg.Reduce,
			errs.Key("reduce"))
	}
	return cfg, refuseTuning(&cfg)
}

// run is a run of Virtual.
type run struct {
	*prepare.Sampling // and placement and lookup are real
	plan              plan.Schedule
	hw                cost.Hardware
	m                 *vmachine
	planner           *gpuio.Planner
	stack             *iosim.Stack
	perSSD            []gpuio.Planned // what was read so far

	mbs []*graph.MiniBatch // one more than the window's depth
	src source
	acc report.AccumulatorInfo
	rec recorder
	// tuned is what the tuner did; nil: not yet, or nobody asked.
	tuned *report.TuneResult
	// filled is the commands of a stack before the present one.
	filled    int64
	layout    gpuio.Layout
	placement cache.Placement
	lookupS   cuda.Stream // of the device that samples, as the next
	gatherS   cuda.Stream
	// Static tiers.
	hetero  *cache.Hetero
	buckets *cache.Buckets
	// A dynamic GPU tier, in their place.
	dyn    *cache.Dynamic
	ticket *cache.Ticket
	lines  cache.Lines
	toRead []int64 // scratch: lines to be read, by SSD
	off    []int64
	// Planned tiers, in their place.
	planned *planned
	// Packed mini-batches, over static tiers.
	laid *laid
	// Mega-batches, over static tiers without rows.
	mega *mega
	// What the stack reads are pages; those of parts stay in the CPU's memory.
	paged, toHost bool

	setUp
}

// setUp is what a run took before its first epoch.
type setUp struct{ presampleNS, fillNS int64 }

// source samples a pass's batches for real, as far ahead as the window has it.
type source struct {
	kind, epoch  int // of the pass, for a trace
	key, next, n int
	end          int // of the part that is played, where it is not all
	order        prepare.Order
	lines, count int64 // to be read for the group, batches in it
}

// openMachine makes the machine with the operators' streams, and the layout of the rows. wide tells
// whether the topology has 8 bytes for a neighbour.
func (v *run) openMachine(classes int, wide bool) error {
	p := v.hw.Profile
	sim := des.New()
	machine, err := iosim.NewMachine(sim, p, v.hw.SSDs)
	if err != nil {
		return err
	}
	ssds := machine.SSDs()
	lba, err := machine.LBABytes()
	if err != nil {
		return err
	}
	if v.layout, err = gpuio.NewLayout(v.Rows, int(v.RowBytes), ssds, lba); err != nil {
		return err
	}
	gpu := newVGPU(machine)
	v.m = &vmachine{
		sim: sim, m: machine, gpu: gpu, plan: v.plan, rec: v.Config.Timeline,
		work: cost.NewKernels(&p.GPU.Ops, v.Config, v.Dim, v.RowType, classes, wide),
	}
	ops := v.Config.Operators(true)
	for name, to := range map[string]**vstream{plan.OpSample: &v.m.sampleS,
		plan.OpLookup: &v.m.lookupS, plan.OpGather: &v.m.gatherS, plan.OpTrain: &v.m.trainS} {
		s := ops.Stream(name)
		*to = gpu.stream(s.Priority, s.SMs)
	}
	s := ops.Stream(plan.OpSuperbatch)
	v.m.superS = gpu.stream(s.Priority, s.SMs)
	v.m.openReplicas(v.Config.Replicas, ops.Stream(plan.OpTrain))
	v.m.rec.Tracks(report.Tracks...)
	v.perSSD = make([]gpuio.Planned, ssds)
	return nil
}

// open makes the machine, samples to place the rows, and plays presampling and the filling of the
// tiers.
func (v *run) open(ctx context.Context, in prepare.Inputs) (err error) {
	if err := v.openMachine(in.Dataset.Meta.Classes, v.Topology.Wide()); err != nil {
		return err
	}
	if err := v.rec.Check(); err != nil {
		return err
	}
	watchLists(v)
	if err := v.m.openLists(v.Config.Seed); err != nil {
		return err
	}
	sim, ssds, rows := v.m.sim, v.m.m.SSDs(), v.layout
	// The GPU's memory bounds its tier; the profile says nothing of how much memory the CPU has.
	b, err := v.Config.TierRows(v.Rows, v.RowBytes, math.MaxInt64/2,
		int64(v.hw.Profile.GPU.MemoryGiB.Value*(1<<30)))
	if err != nil {
		return err
	}
	for range v.Config.Window + 1 {
		mb, err := v.NewBatch()
		if err != nil {
			return err
		}
		v.mbs = append(v.mbs, mb)
	}
	v.Scratch = v.mbs[0]
	for _, to := range []*cuda.Stream{&v.lookupS, &v.gatherS} {
		if *to, err = v.Device.NewStream(cuda.StreamOptions{Name: "modelled"}); err != nil {
			return err
		}
		v.OnClose((*to).Close)
	}
	switch {
	case v.Config.LaidOut():
		return v.openPacked(ctx, b)
	case v.Config.MegaBatched():
		return v.openMega(ctx, b)
	}
	if v.Config.Planned() { // superbatches say what comes into the tiers
		if err := v.openPlanned(b); err != nil {
			return err
		}
		return v.rec.Placed(rows, v.rec.tiers(b.GPURows))
	}
	v.Presampled = func(mb *graph.MiniBatch) { v.m.presample(v.m.shapeOf(mb)) }
	placed := b
	if v.Config.Dynamic() { // lines come into the GPU tier by themselves
		placed.GPURows, placed.Auto = 0, false
	}
	hooks := prepare.Hooks{}
	if v.rec.On() {
		hooks.Scores = v.rec.KeepScores
	}
	if v.placement, err = v.Choose(ctx, placed, hooks); err != nil {
		return err
	}
	v.span("presample", 0)
	v.presampleNS = sim.Now()
	if v.Config.Dynamic() {
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
		if err := v.rec.Placed(rows, v.rec.tiers(0)); err != nil {
			return err
		}
		return prepare.Interrupted(ctx)
	}
	// The tiers hold no features here: a byte for each row is enough for lookups.
	if v.hetero, err = cache.NewHetero(v.Device, v.Rows, 1, ssds, v.placement); err != nil {
		return err
	}
	v.OnClose(v.hetero.Close)
	if v.buckets, err = v.hetero.NewBuckets(); err != nil {
		return err
	}
	v.OnClose(v.buckets.Close)
	if err := v.openStack(); err != nil {
		return err
	}
	v.fill(ctx)
	if b.GPURows+b.CPURows == v.Rows { // every row is in a tier
		v.m.stack = nil
	}
	if err := v.rec.Placed(rows, v.rec.tiers(int64(len(v.placement.GPU)))); err != nil {
		return err
	}
	return prepare.Interrupted(ctx)
}

// openStack makes the I/O stack.
func (v *run) openStack() (err error) {
	c, l := v.Config, v.layout
	o := gpuio.PlanOptions{Stack: c.IOStack, CoalesceBytes: c.CoalesceBytes, Depth: c.QueueDepth,
		MaxTransferBytes: modelledTransfer}
	if v.paged {
		s := (&pages.Opened{Layout: l}).Options(gpuio.StackOptions{
			AsyncOptions: gpuio.AsyncOptions{CoalesceBytes: o.CoalesceBytes, Depth: o.Depth}})
		o.CoalesceBytes, o.Depth = s.CoalesceBytes, s.Depth
	}
	if v.planner, err = gpuio.NewPlanner(l, o); err != nil {
		return err
	}
	ic := iosim.Config{Stack: c.IOStack, Blocks: c.Blocks, Depth: o.Depth,
		CommandBytes: int64(l.ReadBytes()), ToHost: v.toHost, Seed: c.Seed}
	if !c.Queued() {
		ic.Blocks, ic.Threads = 0, c.Workers
	} else if c.SMs.IO > 0 { // blocks at once
		if ic.Blocks == 0 || ic.Blocks > c.SMs.IO {
			ic.Blocks = c.SMs.IO
		}
	}
	if c.Queued() && int(l.RowBytes) != l.ReadBytes() {
		ic.StagedBytes = int64(l.RowBytes)
	}
	// alone on the GPU
	if c.Overlap().WholeDevice && c.Stack().Overlaps && ic.Blocks == 0 {
		ic.Blocks = max(32, 16*v.hw.Profile.GPU.SMs.Int())
	}
	if v.stack != nil {
		v.filled += v.stack.Stats().Commands
	}
	if v.m.stack, err = iosim.New(v.m.m, ic); err != nil {
		return err
	}
	v.stack = v.m.stack
	if err := v.m.openLists(c.Seed); err != nil {
		return err
	}
	// What the I/O kernels hold while they run: their budget, or their warps' share of the GPU's.
	ic = v.m.stack.Config()
	g := &v.hw.Profile.GPU
	holds := float64(ic.Blocks*ic.Threads/32) / g.WarpsPerSM.Value
	switch {
	case !c.Queued() || g.IO.WakeNS.Value > 0: // no kernels, or such that sleep
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
func (m *vmachine) presample(s cost.Shape) {
	m.sampleWhole(m.sampleS, &s, func() {
		m.chain(m.sampleS, [][]cost.Kernel{m.work.Hotness(s.HopEnd[len(s.HopEnd)-1])}, func() {})
	})
	m.sim.Run()
}

// fill plays the reads that fill the tiers.
func (v *run) fill(ctx context.Context) {
	start := v.m.sim.Now()
	v.readSets(ctx, [][]int64{v.placement.GPU, v.placement.CPU})
	v.fillNS = v.m.sim.Now() - start
	v.span("fill tiers", start)
}

// readSets plays reads of rows into tiers.
func (v *run) readSets(ctx context.Context, tiers [][]int64) (commands, bytes int64) {
	return planSets(ctx, v, tiers, func(per []int64, size int64) {
		v.m.stack.SubmitSized(per, size, func(iosim.Times) {})
		v.m.sim.Run()
	})
}

// planSets plans reads of rows into tiers, set by set as a real run makes them.
func planSets(ctx context.Context, v *run, tiers [][]int64,
	play func(per []int64, size int64)) (commands, bytes int64) {
	rows, off := make([]int64, prepare.FillRows), make([]int64, len(v.perSSD)+1)
	for _, all := range tiers {
		for at := 0; at < len(all) && ctx.Err() == nil; at += prepare.FillRows {
			part := all[at:min(at+prepare.FillRows, len(all))]
			stripe(part, rows, off)
			reads, per, size := v.commands(rows[:len(part)], off)
			for _, r := range reads {
				commands += r.Commands
				bytes += r.Bytes
			}
			play(per, size)
		}
	}
	return commands, bytes
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

// commands says which commands a set takes by SSD, and what one of them moves; they are counted as
// read.
func (v *run) commands(rows, off []int64) (reads []gpuio.Planned, per []int64, bytes int64) {
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

func (v *run) span(name string, start int64) {
	v.draw(report.TrackRun, name, start, v.m.sim.Now())
}

// draw draws something that is of no batch.
func (v *run) draw(track, name string, from, to int64) {
	if v.m.rec.On() && to > from {
		v.m.rec.Span(track, name, from, to-from, nil)
	}
}

// sampleTo samples the batches up to i and those that the window wants beyond, and announces them.
func (v *run) sampleTo(ctx context.Context, i int) error {
	s := &v.src
	for last := min(i+v.Config.Window, s.n-1); s.next <= last; s.next++ {
		mb := v.mbs[s.next%len(v.mbs)]
		if err := v.SampleWhole(ctx, mb, s.key, s.next, s.order.Seeds(s.next)); err != nil {
			return err
		}
		if v.Config.Window == 0 {
			continue
		}
		if err := v.dyn.Announce(ctx, v.lookupS, mb.Nodes.Ptr(),
			mb.HopEnd[len(mb.HopEnd)-1]); err != nil {
			return fmt.Errorf("batch %d: %w", s.next, err)
		}
	}
	return nil
}

// shape looks the next batch's rows up.
func (v *run) shape(ctx context.Context, i int) (*cost.Shape, error) {
	if err := v.sampleTo(ctx, i); err != nil {
		return nil, err
	}
	mb := v.mbs[i%len(v.mbs)]
	s := v.m.shapeOf(mb)
	s.At, s.Announced = i, v.Config.Window > 0
	if v.Config.Method().WholeLists {
		s.CountLists(v.Topology.Indptr, hostmem.View[int64](mb.Nodes.Bytes()))
	}
	if v.dyn != nil {
		v.dyn.NextBatch()
	}
	op, cancel := v.OperatorContext(ctx)
	defer cancel()
	look := v.look
	if v.dyn != nil {
		look = v.admit
	}
	if err := v.rec.Begin(v.src.kind, v.src.epoch, i); err != nil {
		return nil, err
	}
	if err := v.parts(&s, func(from int64, part *cost.Part) error {
		if err := v.rec.Part(op, v.lookupS, mb.Nodes.Ptr(), from, part.Count); err != nil {
			return err
		}
		return look(op, mb, from, part)
	}); err != nil {
		return nil, fmt.Errorf("batch %d: %w", i, err)
	}
	group(v, &s, i)
	return &s, nil
}

// group tells whether the group of merged reads ends with batch i, whose lines are counted.
func group(v *run, s *cost.Shape, i int) {
	if v.Config.Accumulate <= 0 {
		return
	}
	g := &v.src
	g.count++
	last := i == g.n-1 || i == g.end-1
	if s.Closes = g.lines >= v.acc.Target || g.count >= plan.MaxGroup || last; s.Closes {
		g.lines, g.count = 0, 0
	}
}

// parts gives a shape its parts, of which find looks those up that have rows.
func (v *run) parts(s *cost.Shape, find func(from int64, part *cost.Part) error) error {
	from := int64(0)
	for h, to := range s.HopEnd {
		if !v.plan.PerHop && h < len(s.HopEnd)-1 {
			continue
		}
		part := cost.Part{Count: to - from}
		if part.Count > 0 {
			if err := find(from, &part); err != nil {
				return err
			}
		}
		s.Parts = append(s.Parts, part)
		from = to
	}
	return nil
}

// look looks a part up in static tiers.
func (v *run) look(ctx context.Context, mb *graph.MiniBatch, from int64, part *cost.Part) error {
	b := v.buckets
	if err := v.hetero.Lookup(ctx, v.lookupS, mb.Nodes.Ptr(), from, part.Count, b); err != nil {
		return err
	}
	part.NGPU, part.NCPU, part.NMiss = b.NGPU, b.NCPU, b.NMiss
	if part.NMiss > 0 {
		if v.m.stack == nil {
			return fmt.Errorf("%d rows are in no tier and no SSD is there", part.NMiss)
		}
		part.Reads, _, _ = v.commands(hostmem.View[int64](b.MissRow.Bytes())[:part.NMiss],
			b.SSDOffset)
	}
	return nil
}

// train plays all epochs.
func (v *run) train(ctx context.Context, in prepare.Inputs, res *report.ModelledResult) error {
	train, err := in.Dataset.Split("train")
	if err != nil {
		return err
	}
	if len(train) == 0 {
		return errs.New(errs.Usage,
			"dataset %s has no training nodes; import or generate it with a training split",
			in.Dataset.Meta.Name)
	}
	val, err := in.Dataset.Split("val")
	if err != nil {
		return err
	}
	for ep := range v.Config.Epochs {
		sampled := v.Config.SampleEpoch(ep)
		order := prepare.Order{}
		if v.mega != nil {
			order = v.mega.orderOf(sampled).Order
		} else {
			order = v.Shuffled(train, sampled)
		}
		r, err := v.pass(ctx, fmt.Sprintf("epoch %d", ep+1), sampled, ep, order, true)
		if err != nil {
			return v.stopped(ep, err)
		}
		if len(val) > 0 && !v.Config.NoEval {
			w, err := v.pass(ctx, "validate", prepare.ValEpoch+ep, ep,
				prepare.NewOrder(val, v.Config.Batch), false)
			if err != nil {
				return v.stopped(ep, err)
			}
			r.ValSeconds = w.Seconds
		}
		res.Epochs = append(res.Epochs, r)
		v.Observer.TellEpoch(r)
	}
	if err := v.rec.test(ctx); err != nil {
		return v.stopped(v.Config.Epochs-1, err)
	}
	return nil
}

func (v *run) stopped(epoch int, err error) error {
	if errs.ClassOf(err) == errs.Interrupted {
		return errs.New(errs.Interrupted, "stopped in epoch %d of the modelled run (%w)",
			epoch+1, err)
	}
	return err
}

// pass plays one walk over nodes; key is the sampling's.
func (v *run) pass(ctx context.Context, name string, key, epoch int, order prepare.Order,
	train bool) (report.EpochResult, error) {
	var sum report.Partial
	p := newPass(v, name, order.Len(), train)
	p.epoch = epoch
	if train {
		p.first, p.n = v.hw.Limit(p.n)
	}
	v.src = source{kind: trace.Validate, epoch: epoch, key: key, n: p.n, order: order}
	if train {
		v.src.kind = trace.Train
	}
	if v.laid != nil {
		var pack *vpack
		if train {
			var err error
			if pack, err = v.pack(ctx, key); err != nil {
				return report.EpochResult{}, err
			}
		}
		if err := v.turnTo(pack); err != nil {
			return report.EpochResult{}, err
		}
	}
	filling := v.planned == nil && v.laid == nil && v.mega == nil // caches, by what passes
	for i := 0; i < p.first && filling; i++ {
		if err := prepare.Interrupted(ctx); err != nil {
			return report.EpochResult{}, err
		}
		planned := append([]gpuio.Planned(nil), v.perSSD...)
		if _, err := v.shape(ctx, i); err != nil {
			return report.EpochResult{}, err
		}
		v.perSSD = planned
	}
	v.src.lines, v.src.count = 0, 0
	read, waited := v.TopologyReads(nil), v.m.listWait()
	p.shape = func(i int) (*cost.Shape, error) {
		switch {
		case v.m.planned && v.laid != nil:
			return v.packedShape(i)
		case v.mega != nil && train:
			return v.mega.shape(ctx, i)
		}
		return v.shape(ctx, i)
	}
	all := p.n
	p.after = func(b *vbatch) {
		count(&sum, b)
		v.Observer.TellStep("modelled "+name, b.Index+1, all)
	}
	play := func() error {
		p.begin()
		if train && v.Config.Tuning() && v.tuned == nil {
			return tune(ctx, v, p)
		}
		return p.walk(ctx)
	}
	switch {
	case v.planned != nil:
		play = func() error { return v.superbatches(ctx, p, &sum) }
	case v.mega != nil:
		play = func() error { return v.mega.pass(ctx, p, &sum, train) }
	}
	err := play()
	p.tell()
	sum.TopologyReads = listReads(v, read, waited)
	if err == nil && sum.Batches == order.Len() { // a part of a pass has nothing to be held against
		err = v.rec.Live(v.src.kind, v.src.epoch, sum)
	}
	if err != nil {
		return report.EpochResult{}, err
	}
	return p.result(sum, epoch, v.RowBytes), nil
}

// newPass makes a walk over n mini-batches.
func newPass(v *run, name string, n int, train bool) *vpass {
	p := &vpass{
		vmachine: v.m, name: name, n: n,
		window: v.Config.Window, grouped: v.Config.Accumulate > 0, staged: v.Config.Dynamic(),
	}
	if train {
		p.steps(v.Config.Shards, n)
		if len(v.m.replicas) > 1 {
			p.fleet = &vfleet{p: p}
		}
	}
	return p
}

// count adds a mini-batch that has trained.
func count(sum *report.Partial, b *vbatch) {
	sum.Batches++
	sum.Seeds += b.Seeds
	sum.Inserted += b.Change.ToGPU + b.Change.ToCPU
	for _, part := range b.Parts {
		sum.RowsGPU += part.NGPU
		sum.RowsCPU += part.NCPU
		sum.RowsSSD += part.NMiss
		for _, r := range part.Reads {
			sum.BytesSSD += r.Bytes
			sum.Commands += r.Commands
		}
		sum.Inserted += part.Fills
		sum.Evicted += part.Evicted
		sum.Bypassed += part.Bypassed
		sum.RowsChunk += part.Chunk
	}
}

// result is what a pass that has ended came to.
func (p *vpass) result(sum report.Partial, epoch int, rowBytes int64) report.EpochResult {
	if p.grouped {
		sum.Groups, sum.Grouped = p.merged, sum.Batches
	}
	sum.Seconds, sum.Waited, sum.Stages = float64(p.end-p.start)/1e9, float64(p.waited)/1e9,
		p.stages()
	return sum.Result(epoch, rowBytes)
}

// conserved checks that the modelled SSDs did what the batches needed, no less and no more, and
// that nothing is under way.
func (v *run) conserved() error {
	var planned int64
	for _, p := range v.perSSD {
		planned += p.Commands
	}
	if did := v.filled + v.stack.Stats().Commands; did != planned || v.stack.InFlight() != 0 ||
		v.m.credits != 0 || v.m.reads != 0 || v.m.lists != nil && v.m.lists.stack.InFlight() != 0 {
		return fmt.Errorf(
			"the modelled run lost track: %d of %d commands done, %d sets, %d batches and %d rows still in flight; this is a bug",
			did, planned, v.stack.InFlight(), v.m.credits, v.m.reads)
	}
	return nil
}

// info is what report.RunInfo says of a modelled run.
func (v *run) info() report.RunInfo {
	r := report.RunInfo{
		MemoryRung: "modelled", Precision: cuda.FP32.String(), BLAS: plan.BLASOff,
		Policy: v.Config.Policy, Window: v.Config.Window, Sampler: v.Config.Sampler,
		Topology: v.Config.Topology, BatchDependency: v.Config.BatchDependency,
		Shards: v.Config.Shards, Replicas: v.Config.Replicas,
		SampleEpochs: v.Config.SampleEpochs, Refresh: v.Config.Refresh,
		RefreshEvery: v.Config.RefreshEvery,
	}
	for range v.Config.Replicas - 1 {
		r.MoreDevices = append(r.MoreDevices, v.hw.Profile.GPU.Name+" (modelled)")
	}
	r.TopologyStorage, r.Tuned = listInfo(v), v.tuned
	if v.Hotness != nil {
		h := *v.Hotness
		h.Seconds = float64(v.presampleNS) / 1e9 // and not this machine's
		r.Hotness = &h
	}
	if v.planned != nil {
		info := v.planned.info
		r.Superbatch = &info
	}
	if v.laid != nil {
		info := v.laid.info
		r.Packed = &info
	}
	if v.mega != nil {
		r.Mega = v.mega.describe(&v.Config)
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
func (v *run) gpuCacheBytes() int64 {
	switch {
	case v.dyn != nil:
		return v.dyn.Config().Slots * v.lines.LineBytes
	case v.planned != nil:
		return v.planned.tiers.GPURows * v.RowBytes
	case v.mega != nil && v.mega.onGPU:
		return v.mega.parts.StaticFeatures.Pages * v.mega.parts.Spec.PageBytes
	}
	return int64(len(v.placement.GPU)) * v.RowBytes
}

// cpuCacheBytes is the CPU tier's size.
func (v *run) cpuCacheBytes() int64 {
	switch {
	case v.planned != nil:
		return v.planned.tiers.CPURows * v.RowBytes
	case v.mega != nil:
		return v.mega.room.Total()
	}
	return int64(len(v.placement.CPU)) * v.RowBytes
}

func (v *run) stackName() string {
	if v.m.stack == nil {
		return plan.StackNone
	}
	return v.Config.IOStack
}

// io is what the modelled SSDs did.
func (v *run) io() report.IOResult {
	r := report.IOResult{SSDs: []report.SSDResult{}}
	for s, p := range v.perSSD {
		r.SSDs = append(r.SSDs, report.SSDResult{Name: fmt.Sprintf("ssd%d", s),
			Commands: p.Commands, Bytes: p.Bytes})
		r.Coalesced += p.Shared
	}
	r.Balance = report.Balance(r.SSDs)
	st := v.stack.Stats()
	r.Latency = report.NewLatency(&st.Latency)
	return r
}
