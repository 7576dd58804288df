// Package virtual plays a run on a modelled machine: batches are sampled and looked up for real,
// and all times come from a hardware profile. Package walk takes mini-batches through the
// operators, as it does in a run.
package virtual

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"helios/cache"
	"helios/cuda"
	"helios/dataset/pages"
	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/graph"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/hostmem"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/samples"
)

// modelledTransfer is the largest transfer of a modelled SSD, of which the models say nothing; it
// is the usual one, and that of our software controller.
const modelledTransfer = 128 << 10

// Run plays cfg's run on the virtual clock: the same plan over the same batches, sampled for real
// and looked up in the real caches on in's device, while durations come from hw. The topology is in
// memory where cfg names none (lists.go: on storage). No features are read and nothing is computed,
// so in needs no SSDs. Equal arguments give equal results. Not modelled: errors and retries, hits
// of mmap's page cache (each row is a fault), the CPU's own work between operators, the test pass,
// checkpoints.
//
// When ctx ends, the error has class errs.Interrupted and the result holds the epochs that were
// whole.
func Run(ctx context.Context, find Find, cfg plan.Config, in prepare.Inputs, hw cost.Hardware,
	obs report.Observer) (res *report.ModelledResult, err error) {
	if cfg, err = Check(find, cfg); err != nil {
		return nil, err
	}
	v, err := Open(ctx, find, cfg, in, hw, obs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, v.Close()) }()
	cfg = v.Config
	meta := in.Dataset.Meta
	res = &report.ModelledResult{
		Result: report.Result{
			Mode: cfg.Mode, Model: cfg.Model, Dataset: meta.Name, Seed: cfg.Seed,
			Device: hw.Profile.GPU.Name + " (modelled)", IOStack: v.stackName(), RunInfo: v.info(),
			Pipeline: cfg.Pipeline,
			RowDType: v.RowType.String(), RowBytes: v.RowBytes,
			GPUCacheBytes: v.Tiers.GPUBytes(),
			CPUCacheBytes: v.Tiers.CPUBytes(),
			TopologyBytes: v.Topology.Bytes(), ScaleBytes: v.ScaleBytes(),
			PresampleSecs: float64(v.PresampleNS) / 1e9,
			FillSeconds:   float64(v.FillNS) / 1e9,
		},
		Hardware: hw.Profile.Name, SSDModel: v.Machine.Model.ModelName(),
		SSDs: v.Machine.Model.SSDs(),
	}
	v.Observer.TellPlan(v.Config.Operators(v.Machine.Stack != nil))
	err = v.train(ctx, in, res)
	res.IO, res.RunInfo = v.Io(), v.info()
	if err == nil {
		err = v.Conserved()
	}
	return res, err
}

// Check returns cfg as Run plays it, or why Run refuses it whatever the dataset and the machine.
func Check(find Find, cfg plan.Config) (plan.Config, error) {
	if cfg.CheckpointDir != "" || cfg.Resume {
		return cfg, errs.New(errs.Usage,
			"{clock} virtual computes no parameters: leave out {checkpoint} and {resume}")
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
	if cfg.Reduce != plan.ReduceTree {
		return cfg, errs.New(errs.Capability,
			"%v virtual plays the gradients' way through the first device (%v %s), not %s; leave %v out",
			errs.Key("clock"), errs.Key("reduce"), plan.ReduceTree, cfg.Reduce,
			errs.Key("reduce"))
	}
	if refuse := find(&cfg).Refuse; refuse != nil {
		return cfg, refuse(&cfg)
	}
	return cfg, nil
}

// Open opens a run and plays what comes before its first epoch. On error nothing stays open.
func Open(ctx context.Context, find Find, cfg plan.Config, in prepare.Inputs, hw cost.Hardware,
	obs report.Observer) (*Player, error) {
	if err := prepare.RefuseTypes(in.Dataset, "a modelled run"); err != nil {
		return nil, err
	}
	s, err := prepare.Open(ctx, cfg, in, obs)
	if err != nil {
		return nil, err
	}
	v := newRun(find, s, hw)
	if err := v.open(ctx, in); err != nil {
		return nil, errors.Join(err, v.Close())
	}
	return v, nil
}

// newRun makes a run without a machine.
func newRun(find Find, s *prepare.Sampling, hw cost.Hardware) *Player {
	v := &Player{Sampling: s, Hardware: hw}
	v.Replan()
	v.Tiers = find(&s.Config).New(v)
	return v
}

// Replan makes the plan of the configuration's pipeline.
func (v *Player) Replan() {
	v.Plan = ScheduleOn(&v.Config, v.Hardware.Profile)
}

// ScheduleOn returns a configuration's schedule on a machine.
func ScheduleOn(c *plan.Config, p *hardware.Profile) plan.Schedule {
	s := c.Schedule()
	if p.OverFiles() {
		s = s.Merging()
	}
	return s
}

// Player is a run of Virtual.
type Player struct {
	*prepare.Sampling // and placement and lookup are real
	typed             *cost.Typed
	Plan              plan.Schedule
	Hardware          cost.Hardware
	Machine           *Machine
	planner           *gpuio.Planner
	Stack             *iosim.Stack
	perSSD            []gpuio.Planned // what was read so far

	Tiers   Tiers
	Batches []*graph.MiniBatch // one more than the window's depth
	Source  Part
	// tuned is the result of the tuner; nil: not yet, or nobody asked.
	tuned *report.TuneResult
	// filled is the commands of a stack before the present one.
	filled    int64
	Layout    gpuio.Layout
	Placement cache.Placement
	LookupS   cuda.Stream // of the device that samples, as the next
	GatherS   cuda.Stream
	// Paged: the stack reads pages. ToHost: they stay in the CPU's memory.
	Paged, ToHost bool
	adj           []byte  // scratch
	striped, off  []int64 // scratch, of reads

	setUp
}

// setUp has the times before the first epoch.
type setUp struct{ PresampleNS, FillNS int64 }

// Part samples a pass's batches for real, as far ahead as the window has it.
type Part struct {
	Key, next, N int
	End          int // of the part that is played, where it is not all
	Order        prepare.Order
	joined       int   // mini-batches that are read with this one, as Shape.Joined
	missed       int64 // rows of the batch before that were in no tier
}

// openMachine makes the machine with the operators' streams, and the layout of the rows. wide: the
// topology has 8 bytes for a neighbour.
func (v *Player) openMachine(classes int, wide bool) error {
	p := v.Hardware.Profile
	sim := des.New()
	machine, err := iosim.NewMachine(sim, p, v.Hardware.SSDs)
	if err != nil {
		return err
	}
	ssds := machine.SSDs()
	lba, err := machine.LBABytes()
	if err != nil {
		return err
	}
	if v.Layout, err = gpuio.NewLayout(v.Rows, int(v.RowBytes), ssds, lba); err != nil {
		return err
	}
	gpu := newVGPU(machine)
	v.Machine = &Machine{
		Sim: sim, Model: machine, Gpu: gpu, rec: v.Config.Timeline,
		Work: cost.NewKernels(&p.GPU.Ops, v.Config, v.Dim, v.RowType, classes, wide, v.typed),
	}
	ops := v.Config.Operators(true)
	for name, to := range map[string]**vstream{plan.OpSample: &v.Machine.sampleS,
		plan.OpLookup: &v.Machine.lookupS, plan.OpGather: &v.Machine.gatherS,
		plan.OpTrain: &v.Machine.trainS} {
		s := ops.Stream(name)
		*to = gpu.stream(s.Priority, s.SMs)
	}
	s := ops.Stream(plan.OpSuperbatch)
	v.Machine.SuperS = gpu.stream(s.Priority, s.SMs)
	v.Machine.openReplicas(v.Config.Replicas, ops.Stream(plan.OpTrain))
	v.Machine.rec.Tracks(report.Tracks...)
	v.perSSD = make([]gpuio.Planned, ssds)
	return nil
}

// open makes the machine, samples to place the rows, and plays presampling and the filling of the
// tiers.
func (v *Player) open(ctx context.Context, in prepare.Inputs) (err error) {
	if err := v.openMachine(in.Dataset.Meta.Classes, v.Topology.Wide()); err != nil {
		return err
	}
	watchLists(v)
	if err := v.Machine.openLists(v.Config.Seed); err != nil {
		return err
	}
	// The GPU's memory bounds its tier; the profile says nothing of how much memory the CPU has.
	b, err := v.Config.TierRows(v.Rows, v.RowBytes, math.MaxInt64/2,
		int64(v.Hardware.Profile.GPU.MemoryGiB.Value*(1<<30)))
	if err != nil {
		return err
	}
	for range v.Config.Window + 1 {
		mb, err := v.NewBatch()
		if err != nil {
			return err
		}
		v.Batches = append(v.Batches, mb)
	}
	v.Scratch = v.Batches[0]
	for _, to := range []*cuda.Stream{&v.LookupS, &v.GatherS} {
		if *to, err = v.Device.NewStream(cuda.StreamOptions{Name: "modelled"}); err != nil {
			return err
		}
		v.OnClose((*to).Close)
	}
	return v.Tiers.Open(ctx, b)
}

// ChooseRows chooses the rows of tiers of b's sizes, by what presampling counts.
func (v *Player) ChooseRows(ctx context.Context, b plan.TierSizes) (err error) {
	v.Presampled = func(mb *graph.MiniBatch) { v.Machine.presample(v.Machine.shapeOf(mb)) }
	if v.Placement, err = v.Choose(ctx, b, prepare.Hooks{}); err != nil {
		return err
	}
	v.Span("presample", 0)
	v.PresampleNS = v.Machine.Sim.Now()
	return nil
}

// OpenStack makes the I/O stack.
func (v *Player) OpenStack() (err error) {
	c, l := v.Config, v.Layout
	o := gpuio.PlanOptions{Stack: c.IOStack, CoalesceBytes: c.CoalesceBytes, Depth: c.QueueDepth,
		MaxTransferBytes: modelledTransfer}
	if o.Speed, err = v.Machine.Model.Speed(c.Stack(), l); err != nil {
		return err
	}
	if v.Paged {
		s := (&pages.Opened{Layout: l}).Options(gpuio.StackOptions{
			AsyncOptions: gpuio.AsyncOptions{CoalesceBytes: o.CoalesceBytes, Depth: o.Depth}})
		o.CoalesceBytes, o.Depth = s.CoalesceBytes, s.Depth
	}
	if v.planner, err = gpuio.NewPlanner(l, o); err != nil {
		return err
	}
	ic := iosim.Config{Stack: c.IOStack, Blocks: c.Blocks, Depth: o.Depth,
		CommandBytes: int64(l.ReadBytes()), ToHost: v.ToHost, Seed: c.Seed}
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
		ic.Blocks = max(32, plan.IOBlocksPerSM*v.Hardware.Profile.GPU.SMs.Int())
	}
	if v.Stack != nil {
		v.filled += v.Stack.Stats().Commands
	}
	if v.Machine.Stack, err = iosim.New(v.Machine.Model, ic); err != nil {
		return err
	}
	v.Stack = v.Machine.Stack
	if err := v.Machine.openLists(c.Seed); err != nil {
		return err
	}
	// The SMs of the I/O kernels while they run: their budget, or their warps' share of the GPU's.
	ic = v.Machine.Stack.Config()
	g := &v.Hardware.Profile.GPU
	holds := float64(ic.Blocks*ic.Threads/32) / g.WarpsPerSM.Value
	switch {
	case !c.Queued() || g.IO.WakeNS.Value > 0: // no kernels, or such that sleep
		holds = 0
	case c.SMs.IO > 0:
		holds = float64(c.SMs.IO)
	}
	v.Machine.Gpu.io = func() float64 {
		if v.Stack.InFlight() == 0 {
			return 0
		}
		return min(holds, g.SMs.Value)
	}
	return nil
}

// Turn has the stack read what lies as l says.
func (v *Player) Turn(l gpuio.Layout) error {
	if v.Layout == l && v.Stack != nil {
		return nil
	}
	v.Layout = l
	return v.OpenStack()
}

// presample plays the sampling of one batch whose rows are counted.
func (m *Machine) presample(s cost.Shape) {
	m.SampleWhole(m.sampleS, &s, func() {
		m.chain(m.sampleS, [][]cost.Kernel{m.Work.Hotness(s.HopEnd[len(s.HopEnd)-1])}, func() {})
	})
	m.Sim.Run()
}

// Fill plays the reads that fill the tiers.
func (v *Player) Fill(ctx context.Context) {
	start := v.Machine.Sim.Now()
	v.ReadSets(ctx, [][]int64{v.Placement.GPU, v.Placement.CPU})
	v.FillNS = v.Machine.Sim.Now() - start
	v.Span("fill tiers", start)
}

// ReadSets plays reads of rows into tiers.
func (v *Player) ReadSets(ctx context.Context, tiers [][]int64) (commands, bytes int64) {
	return PlanSets(ctx, v, tiers, func(per []int64, size int64) {
		v.Machine.Stack.SubmitSized(per, size, func(iosim.Times) {})
		v.Machine.Sim.Run()
	})
}

// PlanSets plans reads of rows into tiers, set by set as a real run makes them.
func PlanSets(ctx context.Context, v *Player, tiers [][]int64,
	play func(per []int64, size int64)) (commands, bytes int64) {
	rows, off := make([]int64, prepare.FillRows), make([]int64, len(v.perSSD)+1)
	for _, all := range tiers {
		for first := 0; first < len(all) && ctx.Err() == nil; first += prepare.FillRows {
			part := all[first:min(first+prepare.FillRows, len(all))]
			stripe(part, rows, off)
			reads, per, size := v.Commands(rows[:len(part)], off)
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

// Commands plans the commands of a set by SSD, and the bytes of one; they are counted as read.
func (v *Player) Commands(rows, off []int64) (reads []gpuio.Planned, per []int64, bytes int64) {
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

// Span draws a part of the run in the timeline, from start until now.
func (v *Player) Span(name string, start int64) {
	v.Draw(report.TrackRun, name, start, v.Machine.Sim.Now())
}

// Draw draws something that is of no batch.
func (v *Player) Draw(track, name string, from, to int64) {
	if v.Machine.rec.On() && to > from {
		v.Machine.rec.Span(track, name, from, to-from, nil)
	}
}

// sampleTo samples the batches up to i and those that the window wants beyond, and announces them.
func (v *Player) sampleTo(ctx context.Context, i int) error {
	s := &v.Source
	for last := min(i+v.Config.Window, s.N-1); s.next <= last; s.next++ {
		mb := v.Batches[s.next%len(v.Batches)]
		if err := v.SampleWhole(ctx, mb, s.Key, s.next, s.Order.Seeds(s.next)); err != nil {
			return err
		}
		if v.Config.Window == 0 {
			continue
		}
		if err := v.Tiers.Announce(ctx, mb); err != nil {
			return fmt.Errorf("batch %d: %w", s.next, err)
		}
	}
	return nil
}

// shape looks the next batch's rows up.
func (v *Player) shape(ctx context.Context, i int) (*cost.Shape, error) {
	if err := v.sampleTo(ctx, i); err != nil {
		return nil, err
	}
	mb := v.Batches[i%len(v.Batches)]
	s := v.Machine.shapeOf(mb)
	s.At, s.Announced = i, v.Config.Window > 0
	if v.Config.Method().WholeLists {
		s.CountLists(v.Topology.Indptr, hostmem.View[int64](mb.Nodes.Bytes()))
	}
	v.Tiers.NextBatch()
	op, cancel := v.OperatorContext(ctx)
	defer cancel()
	if err := v.Parts(&s, func(from int64, part *cost.Part) error {
		return v.Tiers.Look(op, mb, from, part)
	}); err != nil {
		return nil, fmt.Errorf("batch %d: %w", i, err)
	}
	v.Tiers.Looked(&s, i)
	return &s, nil
}

// Parts gives a shape its parts, of which find looks those up that have rows.
func (v *Player) Parts(s *cost.Shape, find func(from int64, part *cost.Part) error) error {
	from, last, missed := int64(0), len(s.HopEnd)-1, int64(0)
	if v.Plan.Joins && v.planner != nil {
		s.Joined = v.planner.Joined(v.Source.missed, v.Plan.Merges)
	}
	v.Source.joined = s.Joined
	for h, to := range s.HopEnd {
		if h < last && (s.Joined > 0 || !v.Plan.PerHop) {
			if s.Joined > 0 {
				s.Parts = append(s.Parts, cost.Part{})
			}
			continue
		}
		part := cost.Part{Count: to - from}
		if part.Count > 0 {
			if err := find(from, &part); err != nil {
				return err
			}
		}
		s.Parts = append(s.Parts, part)
		from, missed = to, missed+part.NMiss
	}
	v.Source.missed = missed
	return nil
}

// ReadsOf returns the commands by SSD that reading so many rows takes, which are counted as read.
func (v *Player) ReadsOf(rows []int64) []gpuio.Planned {
	reads, _, _ := v.StripedReads(rows)
	return reads
}

// ForgetReads leaves what was planned so far out of what is read.
func (v *Player) ForgetReads() { clear(v.perSSD) }

// Miss has a part's rows, or lines, that are in no tier read.
func (v *Player) Miss(rows []int64, part *cost.Part) {
	if part.NMiss = int64(len(rows)); len(rows) > 0 {
		v.Read(rows, part)
	}
}

// Read plans the reads of a part's rows; where they are to be read as one set with those of other
// mini-batches, when these are known.
func (v *Player) Read(rows []int64, part *cost.Part) {
	if v.Source.joined > 1 {
		part.Waits = slices.Clone(rows)
		return
	}
	part.Reads = v.ReadsOf(rows)
}

// StripedReads is ReadsOf with the commands of each SSD, and what one of them moves.
func (v *Player) StripedReads(rows []int64) (reads []gpuio.Planned, per []int64, bytes int64) {
	if cap(v.striped) < len(rows) {
		v.striped = make([]int64, len(rows)+len(rows)/4)
	}
	if len(v.off) != int(v.Layout.SSDs)+1 {
		v.off = make([]int64, v.Layout.SSDs+1)
	}
	stripe(rows, v.striped[:len(rows)], v.off)
	return v.Commands(v.striped[:len(rows)], v.off)
}

// Keep adds the frontier of a sampled batch to files; of its blocks only the size is needed.
func (v *Player) Keep(mb *graph.MiniBatch, to *samples.Files) (*cost.Shape, error) {
	adj, n, err := mb.Save(v.adj[:0], func(b cuda.Buffer, bytes int64) ([]byte, error) {
		return b.Bytes()[:bytes], nil
	})
	if err != nil {
		return nil, err
	}
	v.adj = adj
	s, was := v.Machine.shapeOf(mb), to.Bytes()
	nodes := hostmem.View[int64](mb.Nodes.Bytes())
	if v.Config.Method().WholeLists {
		s.CountLists(v.Topology.Indptr, nodes)
	}
	err = to.Append(nodes[:n], nil)
	s.Saved = to.Bytes() - was + int64(len(adj))
	return &s, err
}

// train plays all epochs.
func (v *Player) train(ctx context.Context, in prepare.Inputs, res *report.ModelledResult) error {
	train, err := prepare.TrainSplit(in)
	if err != nil {
		return err
	}
	val, err := in.Dataset.Split("val")
	if err != nil {
		return err
	}
	for ep := range v.Config.Epochs {
		sampled := v.Config.SampleEpoch(ep)
		order := v.Tiers.Order(train, sampled)
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
	return nil
}

func (v *Player) stopped(epoch int, err error) error {
	if errs.ClassOf(err) == errs.Interrupted {
		return errs.New(errs.Interrupted, "stopped in epoch %d of the modelled run (%w)",
			epoch+1, err)
	}
	return err
}

// pass plays one walk over nodes; key is the sampling's.
func (v *Player) pass(ctx context.Context, name string, key, epoch int, order prepare.Order,
	train bool) (report.EpochResult, error) {
	var sum report.Partial
	p := NewPass(v, name, order.Len(), train)
	p.Epoch = epoch
	if train {
		p.First, p.End = v.Hardware.Limit(p.End)
	}
	v.Source = Part{Key: key, N: p.End, Order: order}
	if err := v.Tiers.Before(ctx, p, key, train); err != nil {
		return report.EpochResult{}, err
	}
	read, waited := v.TopologyReads(nil), v.Machine.listWait()
	p.Shape = func(i int) (*cost.Shape, error) { return v.Tiers.Shape(ctx, i) }
	all := p.End
	p.After = func(b *Batch) {
		Count(&sum, b)
		v.Observer.TellStep("modelled "+name, b.Index+1, all)
	}
	err := v.Tiers.Pass(ctx, p, &sum, train, func(ctx context.Context) error {
		if train && v.Config.Tuning() && v.tuned == nil {
			return tune(ctx, v, p)
		}
		return p.Walk(ctx)
	})
	p.tell()
	sum.TopologyReads = listReads(v, read, waited)
	if err != nil {
		return report.EpochResult{}, err
	}
	return p.Result(sum, epoch, v.RowBytes), nil
}

// NewPass makes a walk over n mini-batches.
func NewPass(v *Player, name string, n int, train bool) *Pass {
	p := &Pass{
		Machine: v.Machine, Name: name, End: n, config: &v.Config, plan: &v.Plan, reads: v.ReadsOf,
		staged: v.Tiers.Staged(),
	}
	if train {
		p.Steps(v.Config.Shards, n)
	}
	return p
}

// Count adds a mini-batch that has trained.
func Count(sum *report.Partial, b *Batch) {
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

// Result returns the figures of a pass that has ended.
func (p *Pass) Result(sum report.Partial, epoch int, rowBytes int64) report.EpochResult {
	if p.config.Accumulate > 0 || p.plan.Merges > 1 {
		sum.Groups, sum.Grouped = p.groups, p.grouped
	}
	sum.Seconds, sum.Waited, sum.Stages = float64(p.Ended-p.Began)/1e9, float64(p.Waited)/1e9,
		p.stages()
	return sum.Result(epoch, rowBytes)
}

// Conserved checks that the modelled SSDs did what the batches needed, no less and no more, and
// that nothing is under way.
func (v *Player) Conserved() error {
	var planned int64
	for _, p := range v.perSSD {
		planned += p.Commands
	}
	if did := v.filled + v.Stack.Stats().Commands; did != planned || v.Stack.InFlight() != 0 ||
		v.Machine.credits != 0 || v.Machine.reads != 0 || v.Machine.lists != nil &&
		v.Machine.lists.stack.InFlight() != 0 {
		return fmt.Errorf(
			"the modelled run lost track: %d of %d commands done, %d sets, %d batches and %d rows still in flight; this is a bug",
			did, planned, v.Stack.InFlight(), v.Machine.credits, v.Machine.reads)
	}
	return nil
}

// info describes a modelled run.
func (v *Player) info() report.RunInfo {
	r := report.RunInfo{
		MemoryRung: "modelled", Precision: cuda.FP32.String(), BLAS: plan.BLASOff,
		Policy: v.Config.Policy, Window: v.Config.Window, Sampler: v.Config.Sampler,
		Topology: v.Config.Topology, BatchDependency: v.Config.BatchDependency,
		Shards: v.Config.Shards, Replicas: v.Config.Replicas,
		SampleEpochs: v.Config.SampleEpochs, Refresh: v.Config.Refresh,
		RefreshEvery: v.Config.RefreshEvery,
	}
	for range v.Config.Replicas - 1 {
		r.MoreDevices = append(r.MoreDevices, v.Hardware.Profile.GPU.Name+" (modelled)")
	}
	r.TopologyStorage, r.Tuned = listInfo(v), v.tuned
	if v.Hotness != nil {
		h := *v.Hotness
		h.Seconds = float64(v.PresampleNS) / 1e9 // and not this machine's
		r.Hotness = &h
	}
	v.Tiers.Describe(&r)
	return r
}

func (v *Player) stackName() string {
	if v.Machine.Stack == nil {
		return plan.StackNone
	}
	return v.Config.IOStack
}

// Io returns the figures of the modelled SSDs.
func (v *Player) Io() report.IOResult {
	r := report.IOResult{SSDs: []report.SSDResult{}}
	for s, p := range v.perSSD {
		r.SSDs = append(r.SSDs, report.SSDResult{Name: fmt.Sprintf("ssd%d", s),
			Commands: p.Commands, Bytes: p.Bytes})
		r.Coalesced += p.Shared
	}
	r.Balance = report.Balance(r.SSDs)
	st := v.Stack.Stats()
	r.Latency = report.NewLatency(&st.Latency)
	return r
}

// StripedRates returns the bytes a second that the SSDs of a machine read and write together in
// long requests, where each has an equal share, within what the link carries. SSDs of which nobody
// said a bandwidth bound nothing.
func StripedRates(m *iosim.Machine) (read, write float64) {
	link := m.Profile.PCIe.CopyGBs.Value * 1e9
	read, write = link, link
	for _, x := range m.Models() {
		for _, r := range []struct {
			mbs float64
			to  *float64
		}{{x.Read.Bandwidth.MBs, &read}, {x.Write.Bandwidth.MBs, &write}} {
			if r.mbs > 0 {
				*r.to = min(*r.to, float64(m.SSDs())*r.mbs*1e6)
			}
		}
	}
	return read, write
}
