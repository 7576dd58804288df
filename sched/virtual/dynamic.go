package virtual

import (
	"context"
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
)

// openDynamic makes the dynamic GPU tier of b's bytes over the constant CPU buffer that e.placement
// has. It holds no features here.
func (v *run) openDynamic(b plan.TierSizes) (err error) {
	if v.lines, v.layout, err = prepare.LayLines(v.layout, v.Rows, v.Config.CacheLine); err != nil {
		return err
	}
	cpu := slices.Clone(v.placement.CPU)
	slices.Sort(cpu)
	c := cache.DynamicConfig{
		Rows: v.Rows, RowBytes: v.RowBytes, Lines: v.lines,
		Slots:  min(b.GPURows*v.RowBytes/v.lines.LineBytes, v.lines.Count(v.Rows)),
		Policy: v.Config.Policy, Directory: v.Config.Directory, Seed: v.Config.Seed, CPU: cpu,
		NoData: true,
	}
	if v.dyn, err = cache.NewDynamic(v.Device, c); err != nil {
		return err
	}
	v.OnClose(v.dyn.Close)
	if v.ticket, err = v.dyn.NewTicket(); err != nil {
		return err
	}
	v.OnClose(v.ticket.Close)
	v.off = make([]int64, v.layout.SSDs+1)
	openDirectory(v, c.Slots)
	return nil
}

// openDirectory has kernels look rows up where the directory is in sets and the GPU keeps it, else
// the CPU.
func openDirectory(v *run, slots int64) {
	m, p := v.m, v.hw.Profile
	m.work.LineBytes = v.lines.LineBytes
	switch {
	case v.Config.Directory != policy.InSets:
		m.directory, m.directoryNS = des.NewPool(m.sim, 1), p.CPU.DirectoryNS.Value
	case p.GPU.KeepsDirectory():
		m.work.Directory = &cache.GPUSets{Policy: v.Config.Policy,
			Sets: (slots + policy.Ways - 1) / policy.Ways, SSDs: v.lines.SSDs,
			Window: v.Config.Window > 0, SMs: int64(p.GPU.SMs.Int())}
	default: // workers share a lookup
		m.directory = des.NewPool(m.sim, 1)
		m.directoryNS = p.CPU.SetsNS.Value / p.CPU.Cores.Value
	}
}

// admit looks a part up in the dynamic tier.
func (v *run) admit(ctx context.Context, mb *graph.MiniBatch, from int64, part *cost.Part) error {
	t := v.ticket
	before := v.dyn.Stats()
	if err := v.dyn.Admit(ctx, v.lookupS, mb.Nodes.Ptr(), from, part.Count, t); err != nil {
		return err
	}
	part.NGPU, part.NCPU, part.NMiss, part.Fills = t.NGPU, t.NCPU, t.NMiss, t.Fills()
	after := v.dyn.Stats()
	part.Evicted, part.Bypassed = after.Evicted-before.Evicted, after.Bypassed-before.Bypassed
	part.Lines, part.Missed = after.Accesses-before.Accesses, t.NLines
	v.src.lines += t.NLines
	if t.NLines > 0 {
		all := t.Lines()
		if len(all) > len(v.toRead) {
			v.toRead = make([]int64, len(all)+len(all)/4)
		}
		stripe(all, v.toRead, v.off)
		part.Reads, _, _ = v.commands(v.toRead[:len(all)], v.off)
	}
	if err := v.dyn.Finish(v.gatherS, t, nil, 0, 0); err != nil {
		return err
	}
	return v.dyn.Release(t)
}

// Sets that calibration reads, in commands to an SSD: enough that the second one is at the peak
// rate for most of its time.
const (
	calibrateFew  = 1 << 12
	calibrateMany = 1 << 14
)

// calibrate finds the accumulator's target: two sets of reads are played on a machine of their own,
// of which what the longer one takes more is the peak rate, and what the shorter one takes besides
// is what a launch costs. On real SSDs the same reads are measured.
func (v *run) calibrate() error {
	a := v.Config.Accumulate
	if a == 0 {
		return nil
	}
	took := func(perSSD int64) (float64, error) {
		m, err := iosim.NewMachine(des.New(), v.hw.Profile, v.m.m.SSDs())
		if err != nil {
			return 0, err
		}
		c := v.stack.Config()
		s, err := iosim.New(m, c)
		if err != nil {
			return 0, err
		}
		per := make([]int64, m.SSDs())
		for i := range per {
			per[i] = perSSD
		}
		var ns int64
		s.Submit(per, func(t iosim.Times) { ns = t.DoneNS - t.SubmitNS })
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
	ssds := float64(v.m.m.SSDs())
	v.acc = report.AccumulatorInfo{Calibration: report.Calibrate(a, ssds*calibrateFew, few,
		ssds*calibrateMany, many, ssds), MaxBatches: plan.MaxGroup}
	if v.acc.Target < 1 {
		return errs.New(errs.Failed,
			"the modelled SSDs read %.0f commands in %.3g s and %.0f in %.3g s, which gives no rate; choose option accumulate 0",
			ssds*calibrateFew, few, ssds*calibrateMany, many)
	}
	v.acc.InitiateSeconds = v.hw.Profile.GPU.LaunchNS.Value / 1e9
	v.acc.TerminateSeconds = max(v.acc.OverheadSeconds-v.acc.InitiateSeconds, 0)
	return nil
}
