package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/timeline"
	"helios/internal/units"
	"helios/sched"
)

// clockFlags choose the clock of a run.
func clockFlags() []cli.Flag {
	return []cli.Flag{
		oneOf("clock", "virtual samples and looks rows up for real, but takes all times from --hardware, with no SSD and no arithmetic: every figure is modelled", sched.ClockWall, sched.Clocks, nil),
		&cli.StringFlag{Name: "hardware", Usage: "machine of --clock virtual, a `PROFILE` (" + strings.Join(hardware.Names(), ", ") + ") or a YAML file"},
		&cli.IntFlag{Name: "ssd-count", DefaultText: "the profile's", Usage: "number of SSDs of that machine"},
	}
}

// noVirtual are flags that mean nothing where nothing is read and nothing is computed.
var noVirtual = []string{
	"checkpoint", "checkpoint-every", "resume", "ssds", "sq", "fault", "on-ssd-failure", "read-timeout", "read-retries", "cpu-engine", "check-reads",
	"memory-rung", "precision", "blas",
}

// hardware reads the flags of the virtual clock; ok is false under the wall clock.
func (e *env) hardware() (hw sched.Hardware, ok bool, err error) {
	c := e.c
	if c.String("clock") != sched.ClockVirtual {
		for _, f := range []string{"hardware", "ssd-count"} {
			if c.IsSet(f) {
				return hw, false, errs.New(errs.Usage, "--%s is for --clock virtual", f)
			}
		}
		return hw, false, nil
	}
	for _, f := range noVirtual {
		if c.IsSet(f) {
			return hw, false, errs.New(errs.Usage, "--%s means nothing under --clock virtual, where nothing is read or computed; leave it out", f)
		}
	}
	if !c.IsSet("hardware") {
		return hw, false, errs.New(errs.Usage, "--clock virtual needs --hardware: choose one of %s, or give a YAML file", strings.Join(hardware.Names(), ", "))
	}
	if err := e.notZero("ssd-count"); err != nil {
		return hw, false, err
	}
	if hw.SSDs = c.Int("ssd-count"); hw.SSDs < 0 || hw.SSDs > 256 {
		return hw, false, errs.New(errs.Usage, "--ssd-count %d is not between 1 and 256", hw.SSDs)
	}
	hw.Profile, err = hardware.Load(c.String("hardware"))
	return hw, err == nil, err
}

// trainVirtual is train on the virtual clock.
func (e *env) trainVirtual(ctx context.Context, cfg sched.Config, hw sched.Hardware) (err error) {
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)
	tl, err := e.openTimeline(timeline.Virtual)
	if err != nil {
		return err
	}
	defer closing(&err, tl.close)
	cfg.Timeline = tl.rec
	in, done, err := e.graphInputs("--clock virtual samples on the host device")
	if err != nil {
		return err
	}
	defer closing(&err, done)
	obs := e.observer()
	obs.Epoch = func(r sched.EpochResult) {
		out.event("epoch", sched.ModelledEpoch{EpochResult: r})
		e.ui.Printf("modelled epoch %d: %.6g s; %s", r.Epoch, r.Seconds, tierLine(r))
	}
	obs.Plan = e.explain(out)
	res, err := sched.Virtual(ctx, cfg, in, hw, obs)
	if err != nil {
		return err
	}
	e.showModelled(res)
	out.object(res)
	return nil
}

// showModelled is the summary for people. Each line says that its figures are modelled, so that none
// can be quoted without the word.
func (e *env) showModelled(r *sched.ModelledResult) {
	sum, seconds := epochsOf(&r.Result)
	rows := [][]string{
		{"modelled run", fmt.Sprintf("%s, %s; hardware profile %s with %d %s; I/O stack %s, pipeline %s", r.Mode, r.Model, r.Hardware, r.SSDs, r.SSDModel, r.IOStack, r.Pipeline)},
		{"modelled rows", fmt.Sprintf("%s, stored as %s", units.FormatBytes(r.RowBytes), r.RowDType)},
	}
	for _, l := range runInfoRows(r.RunInfo) {
		rows = append(rows, []string{"modelled " + l[0], l[1]})
	}
	if seconds > 0 {
		rows = append(rows, []string{"modelled time", fmt.Sprintf("%.6g s for %d epochs; before them presampling %.3g s, filling the tiers %.3g s", seconds, len(r.Epochs), r.PresampleSecs, r.FillSeconds)})
		for _, l := range pathRows(sum, seconds) {
			rows = append(rows, []string{"modelled " + l[0], l[1]})
		}
		st := sum.StageSeconds
		rows = append(rows, []string{"modelled stages", fmt.Sprintf("sample %.3g s, lookup %.3g s, submit %.3g s, complete %.3g s, gather %.3g s, train %.3g s", st.Sample, st.Lookup, st.Submit, st.Complete, st.Gather, st.Train)})
		if sum.RowsSSD > 0 {
			rows = append(rows, []string{"modelled read amplification", fmt.Sprintf("%.3g", sum.ReadAmplification)})
		}
	}
	for _, l := range ioRows(r.IO) {
		rows = append(rows, []string{"modelled " + l[0], l[1]})
	}
	rows = append(rows, []string{"modelled memory", fmt.Sprintf("GPU tier %s, CPU tier %s, topology %s", units.FormatBytes(r.GPUCacheBytes), units.FormatBytes(r.CPUCacheBytes), units.FormatBytes(r.TopologyBytes))})
	e.ui.Table([]string{"", ""}, rows)
}
