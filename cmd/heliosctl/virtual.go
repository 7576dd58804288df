package main

import (
	"context"
	"fmt"
	"strings"

	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/timeline"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/virtual"
)

// clockArgs choose the clock of a run.
type clockArgs struct {
	clock string `option:"clock" use:"setting" oneof:"@clocks" default:"wall" usage:"virtual samples and looks rows up for real, but takes all times from {hardware}, with no SSD and no arithmetic: every figure is modelled"`
	// of --hardware
	profile  string `option:"hardware" use:"input" words:"@hardware" arg:"PROFILE" usage:"machine of {clock} virtual, a PROFILE ({@hardware}) or a YAML file"`
	ssdCount int    `option:"ssd-count" positive:"yes" range:"1..256" shown:"the profile's" usage:"number of SSDs of that machine"`
}

// notVirtual are the options that mean nothing where nothing is read and nothing is computed.
func notVirtual(a *runArgs) []any {
	c := &a.cfg
	return []any{&a.names, &c.ReadResets, &c.ReadTimeout, &c.ReadRetries, &c.CPUEngine,
		&c.CheckReads, &c.MemoryRung, &c.Precision, &c.BLAS, &c.PartedDir,
		&c.LRSchedule, &c.Warmup, &c.ClipNorm}
}

// hardware returns the machine of the virtual clock; ok is false under the wall clock. The options
// in off have no meaning under the virtual one.
func (a *clockArgs) hardware(e *env, off []any) (hw cost.Hardware, ok bool, err error) {
	if a.clock != plan.ClockVirtual {
		if f := e.given(&a.profile, &a.ssdCount); f != "" {
			return hw, false, errs.New(errs.Usage, "%v is for {clock} virtual", errs.Key(f))
		}
		return hw, false, nil
	}
	if f := e.given(off...); f != "" {
		return hw, false, errs.New(errs.Usage,
			"%v means nothing under {clock} virtual, where nothing is read or computed; leave it out",
			errs.Key(f))
	}
	if e.given(&a.profile) == "" {
		return hw, false, errs.New(errs.Usage,
			"{clock} virtual needs {hardware}: choose one of %s, or give a YAML file",
			strings.Join(hardware.Names(), ", "))
	}
	hw.SSDs = a.ssdCount
	hw.Profile, err = hardware.Load(a.profile)
	return hw, err == nil, err
}

// trainVirtual is train on the virtual clock.
func (t *trainer) trainVirtual(ctx context.Context, hw cost.Hardware) (err error) {
	out, err := t.openResults(t.env)
	if err != nil {
		return err
	}
	defer out.end(&err)
	tl, err := openTimeline(&t.outputs, t.timeline, timeline.Virtual)
	if err != nil {
		return err
	}
	defer closing(&err, tl.close)
	t.cfg.Timeline = tl.rec
	s, err := openGraph(t.env, &t.runArgs, "--clock virtual samples on the host device")
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	obs := t.observer()
	far := newWatch(t).far
	obs.Step = far.step
	obs.Epoch = func(r report.EpochResult) {
		out.event("epoch", report.ModelledEpoch{EpochResult: r})
		t.ui.Printf("modelled epoch %d: %.6g s; %s", r.Epoch, r.Seconds, tierLine(r))
	}
	obs.Plan = t.showPlan(out)
	res, err := virtual.Run(ctx, tiers.Simulation, t.cfg, s.Inputs, hw, obs)
	if err != nil {
		return err
	}
	showModelled(t.env, res)
	out.event("result", res)
	return nil
}

// showModelled is the summary for people. Each line says that its figures are modelled, so that
// none can be quoted without the word.
func showModelled(e *env, r *report.ModelledResult) {
	sum, seconds := epochsOf(&r.Result)
	rows := [][]string{
		{"modelled run",
			fmt.Sprintf("%s, %s; hardware profile %s with %d %s; I/O stack %s, pipeline %s", r.Mode,
				r.Model, r.Hardware, r.SSDs, r.SSDModel, r.IOStack, r.Pipeline)},
		{"modelled rows", fmt.Sprintf("%s, stored as %s", units.FormatBytes(r.RowBytes),
			r.RowDType)},
	}
	for _, l := range runInfoRows(r.RunInfo) {
		rows = append(rows, []string{"modelled " + l[0], l[1]})
	}
	if seconds > 0 {
		rows = append(rows,
			[]string{"modelled time",
				fmt.Sprintf(
					"%.6g s for %d epochs; before them presampling %.3g s, filling the tiers %.3g s",
					seconds, len(r.Epochs), r.PresampleSecs, r.FillSeconds)})
		for _, l := range pathRows(sum, seconds) {
			rows = append(rows, []string{"modelled " + l[0], l[1]})
		}
		st, inspect := sum.StageSeconds, ""
		if st.Topology > 0 {
			inspect = fmt.Sprintf("lists from storage %.3g s, ", st.Topology)
		}
		if st.Inspect > 0 {
			inspect += fmt.Sprintf("inspect %.3g s, ", st.Inspect)
		}
		rows = append(rows,
			[]string{"modelled stages",
				fmt.Sprintf(
					"sample %.3g s, "+inspect+"lookup %.3g s, submit %.3g s, complete %.3g s, gather %.3g s, train %.3g s, between them %.3g s",
					st.Sample, st.Lookup, st.Submit, st.Complete, st.Gather, st.Train, st.Between)})
		if sum.RowsSSD > 0 {
			rows = append(rows, []string{"modelled read amplification",
				fmt.Sprintf("%.3g", sum.ReadAmplification)})
		}
	}
	for _, l := range ioRows(r.IO) {
		rows = append(rows, []string{"modelled " + l[0], l[1]})
	}
	rows = append(rows,
		[]string{"modelled memory", memoryText(&r.Result)})
	e.ui.Facts(rows)
}
