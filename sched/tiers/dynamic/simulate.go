package dynamic

import (
	"context"
	"helios/sched/virtual"
	"slices"

	"helios/cache"
	"helios/cache/policy"
	"helios/gpuio/iosim"
	"helios/graph"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tuner"
)

// Simulate is the system on the virtual clock.
var Simulate = virtual.System{New: func(v *virtual.Player) virtual.Tiers {
	t := &simulation{Base: virtual.Base{Player: v}}
	t.Self = t
	return t
}}

// simulation has dynamic tiers on the virtual clock.
type simulation struct {
	virtual.Base
	tier         *cache.Dynamic
	ticket       *cache.Ticket
	lines        cache.Lines
	acc          report.AccumulatorInfo
	read, merged int64 // lines to be read for the group, batches in it

	// Of mini-batches that are drawn: a directory without a tier, the rows of the CPU buffer, and
	// the first mini-batch that the window has not heard of.
	directory policy.Directory
	cpuRows   int64
	heard     int
}

// Open implements Tiers.
func (t *simulation) Open(ctx context.Context, b plan.TierSizes) error {
	v := t.Player
	// lines come into the GPU tier by themselves
	if err := v.ChooseRows(ctx, plan.TierSizes{CPURows: b.CPURows}); err != nil {
		return err
	}
	if err := v.OpenStack(); err != nil { // the CPU buffer is filled row by row
		return err
	}
	v.Fill(ctx)
	if err := t.openTier(b); err != nil {
		return err
	}
	if err := v.OpenStack(); err != nil {
		return err
	}
	if err := t.calibrate(); err != nil {
		return err
	}
	return prepare.Interrupted(ctx)
}

// OpenWork implements Tiers: mini-batches before those that are played fill the GPU tier.
func (t *simulation) OpenWork(ctx context.Context, w *virtual.Work) (err error) {
	v, c := t.Player, &t.Player.Config
	t.cpuRows, t.heard = w.Tiers.CPURows, -w.Warm
	if t.lines, v.Layout, err = prepare.LayLines(v.Layout, v.Rows, c.CacheLine); err != nil {
		return err
	}
	lines := t.lines.Count(v.Rows)
	slots := min(w.Tiers.GPURows*v.RowBytes/t.lines.LineBytes, lines)
	if t.directory, err = policy.New(policy.Config{Policy: c.Policy, Kind: c.Directory,
		Seed: c.Seed, Lines: lines, Slots: slots}); err != nil {
		return err
	}
	t.openDirectory(slots)
	if err := v.OpenStack(); err != nil {
		return err
	}
	for i := range w.Warm {
		if _, err := t.Made(ctx, w, i-w.Warm); err != nil {
			return err
		}
	}
	v.ForgetReads()
	t.read, t.merged = 0, 0
	return t.calibrate()
}

// Made implements Tiers. The directory hears of the mini-batches of the window first.
func (t *simulation) Made(ctx context.Context, w *virtual.Work, i int) (*cost.Shape, error) {
	for ; w.Config.Window > 0 && t.heard <= i+w.Config.Window; t.heard++ {
		coming, err := w.Draw(ctx, t.heard+w.Warm)
		if err != nil {
			return nil, err
		}
		lines, _, _ := t.linesOf(coming.Rows, coming.Ranks)
		t.directory.Announce(lines)
	}
	t.directory.NextBatch()
	return t.Base.Made(ctx, w, i)
}

// Find implements Tiers: rows are in the constant CPU buffer, or their lines in the GPU tier.
func (t *simulation) Find(rows, ranks []int64, part *cost.Part) {
	lines, counts, inBuffer := t.linesOf(rows, ranks)
	out, before := make([]policy.Answer, len(lines)), t.directory.Stats()
	t.directory.Access(lines, out)
	var read []int64
	missed := int64(0)
	for j, x := range out {
		if x.Hit {
			part.NGPU += counts[j]
			continue
		}
		missed += counts[j]
		read = append(read, lines[j])
	}
	st := t.directory.Stats()
	t.Player.Miss(read, part)
	part.NMiss, part.NCPU, part.Fills = missed, inBuffer, st.Inserted-before.Inserted
	part.Evicted, part.Bypassed = st.Evicted-before.Evicted, st.Bypassed-before.Bypassed
	part.Lines, part.Missed = int64(len(lines)), int64(len(read))
}

// linesOf returns the different lines of the rows that are not in the CPU buffer, and how many rows
// each has.
func (t *simulation) linesOf(rows, ranks []int64) (lines []int64, counts []int64, inBuffer int64) {
	found := map[int64]int{}
	for k, row := range rows {
		if ranks[k] < t.cpuRows {
			inBuffer++
			continue
		}
		line, _ := t.lines.Of(row)
		j, ok := found[line]
		if !ok {
			j = len(lines)
			found[line] = j
			lines, counts = append(lines, line), append(counts, 0)
		}
		counts[j]++
	}
	return lines, counts, inBuffer
}

// Before implements Tiers.
func (t *simulation) Before(ctx context.Context, p *virtual.Pass, key int, train bool) error {
	err := t.Base.Before(ctx, p, key, train)
	t.read, t.merged = 0, 0
	return err
}

// Announce implements Tiers.
func (t *simulation) Announce(ctx context.Context, mb *graph.MiniBatch) error {
	return t.tier.Announce(ctx, t.Player.LookupS, mb.Nodes.Ptr(), mb.HopEnd[len(mb.HopEnd)-1])
}

// NextBatch implements Tiers.
func (t *simulation) NextBatch() { t.tier.NextBatch() }

// Looked implements Tiers: a group of merged reads ends with a batch or takes the next one in.
func (t *simulation) Looked(s *cost.Shape, i int) {
	v := t.Player
	if v.Config.Accumulate <= 0 {
		return
	}
	for _, part := range s.Parts {
		t.read += part.Missed
	}
	t.merged++
	last := i == v.Source.N-1 || i == v.Source.End-1
	if s.Closes = t.read >= t.acc.Target || t.merged >= plan.MaxGroup || last; s.Closes {
		t.read, t.merged = 0, 0
	}
}

// Staged implements Tiers.
func (t *simulation) Staged() bool { return true }

// Shares implements tuner.Accumulator.
func (t *simulation) Shares(all bool) []float64 {
	if !t.Player.Plan.Group || t.acc.Target <= 0 || t.acc.IOPS <= 0 {
		return nil
	}
	return tuner.AccumulatorShares(all)
}

// Aim implements tuner.Accumulator.
func (t *simulation) Aim(share float64) error {
	t.Player.Config.Accumulate, t.acc.Share = share, share
	t.acc.Target = t.acc.ReadsToOverlap(float64(t.Player.Machine.Model.SSDs()))
	return nil
}

// GPUBytes implements Tiers.
func (t *simulation) GPUBytes() int64 { return t.tier.Config().Slots * t.lines.LineBytes }

// Describe implements Tiers.
func (t *simulation) Describe(r *report.RunInfo) {
	if t.tier != nil {
		r.CacheLineBytes, r.PolicyBytes = t.lines.LineBytes, t.tier.MetadataBytes()
	}
	if t.acc.MaxBatches > 0 {
		a := t.acc
		r.Accumulator = &a
	}
}

// openTier makes the dynamic GPU tier of b's bytes over the constant CPU buffer that is placed. It
// holds no features here.
func (t *simulation) openTier(b plan.TierSizes) (err error) {
	v := t.Player
	if t.lines, v.Layout, err = prepare.LayLines(v.Layout, v.Rows, v.Config.CacheLine); err != nil {
		return err
	}
	cpu := slices.Clone(v.Placement.CPU)
	slices.Sort(cpu)
	c := cache.DynamicConfig{
		Rows: v.Rows, RowBytes: v.RowBytes, Lines: t.lines,
		Slots:  min(b.GPURows*v.RowBytes/t.lines.LineBytes, t.lines.Count(v.Rows)),
		Policy: v.Config.Policy, Directory: v.Config.Directory, Seed: v.Config.Seed, CPU: cpu,
		NoData: true,
	}
	if t.tier, err = cache.NewDynamic(v.Device, c); err != nil {
		return err
	}
	v.OnClose(t.tier.Close)
	if t.ticket, err = t.tier.NewTicket(); err != nil {
		return err
	}
	v.OnClose(t.ticket.Close)
	t.openDirectory(c.Slots)
	return nil
}

// openDirectory has kernels look rows up where the directory is in sets and the GPU keeps it, else
// the CPU.
func (t *simulation) openDirectory(slots int64) {
	v := t.Player
	m, p := v.Machine, v.Hardware.Profile
	m.Work.LineBytes = t.lines.LineBytes
	switch {
	case v.Config.Directory != policy.InSets:
		m.Directory, m.DirectoryNS = des.NewPool(m.Sim, 1), p.CPU.DirectoryNS.Value
	case p.GPU.KeepsDirectory():
		m.Work.Directory = &cache.GPUSets{Policy: v.Config.Policy,
			Sets: (slots + policy.Ways - 1) / policy.Ways, SSDs: t.lines.SSDs,
			Window: v.Config.Window > 0, SMs: int64(p.GPU.SMs.Int())}
	default: // workers share a lookup
		m.Directory = des.NewPool(m.Sim, 1)
		m.DirectoryNS = p.CPU.SetsNS.Value / p.CPU.Cores.Value
	}
}

// Look implements Tiers.
func (t *simulation) Look(ctx context.Context, mb *graph.MiniBatch, from int64,
	part *cost.Part) error {
	v, x := t.Player, t.ticket
	before := t.tier.Stats()
	if err := t.tier.Admit(ctx, v.LookupS, mb.Nodes.Ptr(), from, part.Count, x); err != nil {
		return err
	}
	part.NGPU, part.NCPU, part.NMiss, part.Fills = x.NGPU, x.NCPU, x.NMiss, x.Fills()
	after := t.tier.Stats()
	part.Evicted, part.Bypassed = after.Evicted-before.Evicted, after.Bypassed-before.Bypassed
	part.Lines, part.Missed = after.Accesses-before.Accesses, x.NLines
	if x.NLines > 0 {
		part.Reads = v.ReadsOf(x.Lines())
	}
	if err := t.tier.Finish(v.GatherS, x, nil, 0, 0); err != nil {
		return err
	}
	return t.tier.Release(x)
}

// Sets that calibration reads, in commands to an SSD: enough that the second one is at the peak
// rate for most of its time.
const (
	calibrateFew  = 1 << 12
	calibrateMany = 1 << 14
)

// calibrate finds the accumulator's target: two sets of reads are played on a machine of their own.
// The difference of their times gives the peak rate; the rest of the shorter time is the cost of a
// launch. On real SSDs the same reads are measured.
func (t *simulation) calibrate() error {
	v := t.Player
	a := v.Config.Accumulate
	if a == 0 {
		return nil
	}
	took := func(perSSD int64) (float64, error) {
		m, err := iosim.NewMachine(des.New(), v.Hardware.Profile, v.Machine.Model.SSDs())
		if err != nil {
			return 0, err
		}
		c := v.Stack.Config()
		s, err := iosim.New(m, c)
		if err != nil {
			return 0, err
		}
		per := make([]int64, m.SSDs())
		for i := range per {
			per[i] = perSSD
		}
		var ns int64
		s.Submit(per, func(times iosim.Times) { ns = times.DoneNS - times.SubmitNS })
		m.Sim.Run()
		return float64(ns) / 1e9, nil
	}
	few, err := took(calibrateFew)
	if err != nil {
		return err
	}
	many, err := took(calibrateMany)
	if err != nil {
		return err
	}
	ssds := float64(v.Machine.Model.SSDs())
	t.acc = report.AccumulatorInfo{Calibration: report.Calibrate(a, ssds*calibrateFew, few,
		ssds*calibrateMany, many, ssds), MaxBatches: plan.MaxGroup}
	if t.acc.Target < 1 {
		return errs.New(errs.Failed,
			"the modelled SSDs read %.0f commands in %.3g s and %.0f in %.3g s, which gives no rate; choose {accumulate} 0",
			ssds*calibrateFew, few, ssds*calibrateMany, many)
	}
	t.acc.InitiateSeconds = v.Hardware.Profile.GPU.LaunchNS.Value / 1e9
	t.acc.TerminateSeconds = max(t.acc.OverheadSeconds-t.acc.InitiateSeconds, 0)
	return nil
}
