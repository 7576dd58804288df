package planner

import (
	"context"
	"math"

	"helios/internal/errs"
	"helios/internal/hardware"
)

// Calibrating ends where the plan takes as long as the run within closeEnough, or after mostTries.
const (
	closeEnough = 0.01
	mostTries   = 12
)

// Measured holds what an epoch of a run took, in seconds by stage.
type Measured struct {
	Training float64
	Lookup   float64 // 0: not known; only that of a dynamic tier is heeded
}

// Calibrated are the figures that make a plan take as long as a run.
type Calibrated struct {
	TensorTFLOPS float64 // gpu.tensor_tflops
	Directory    string  // the figure of cpu that is LookupNS; empty: not calibrated
	LookupNS     float64
	AnnounceNS   float64 // cpu.announce_ns, which goes with it
}

// Calibrate changes the machine's speed of arithmetic (gpu.tensor_tflops) until training takes as
// long in an epoch of the plan as it took in one of a run. Where the plan has a dynamic tier whose
// directory is the CPU's, its time a row is changed likewise, until lookups take as long.
func (p *Planner) Calibrate(ctx context.Context, m Measured) (c Calibrated, err error) {
	if !(m.Training > 0) || math.IsInf(m.Training, 0) {
		return c, errs.New(errs.Usage,
			"an epoch's training took %g s in the run: that is no time to calibrate by", m.Training)
	}
	filled, err := p.o.Config.Filled()
	if err != nil {
		return c, err
	}
	own := *p.o.Hardware.Profile
	p.o.Hardware.Profile = &own
	s, err := p.o.Find.of(&filled)
	if err != nil {
		return c, err
	}
	figure, lookup := "", &hardware.Figure{}
	directory := false
	if s.Directory != nil && m.Lookup > 0 {
		if name, f := s.Directory(&filled, &own); f != nil {
			figure, lookup, directory = name, f, true
		}
	}
	was, first := own, *lookup
	for range mostTries {
		x, err := p.Plan(ctx, nil)
		if err != nil {
			return c, err
		}
		by, lookups := x.Busy[resTraining]/m.Training, 1.0
		if directory {
			lookups = x.Busy[resLookup] / m.Lookup
		}
		if math.Abs(by-1) <= closeEnough && math.Abs(lookups-1) <= closeEnough {
			c.TensorTFLOPS = own.GPU.TensorTFLOPS.Value
			if directory {
				c.Directory, c.LookupNS = figure, lookup.Value
				c.AnnounceNS = own.CPU.AnnounceNS.Value
			}
			return c, nil
		}
		own.GPU.TensorTFLOPS.Value *= by
		if !near(own.GPU.TensorTFLOPS, was.GPU.TensorTFLOPS) {
			break
		}
		lookup.Value /= lookups
		own.CPU.AnnounceNS.Value /= lookups
		if !near(*lookup, first) {
			return c, errs.New(errs.Usage,
				"no cpu.%s makes the plan's lookups take as long as the run's, %.4g s an epoch; take a run that looks more rows up (a larger %v)",
				figure, m.Lookup, errs.Key("fanout"))
		}
	}
	return c, errs.New(errs.Usage,
		"no gpu.tensor_tflops makes the plan train as long as the run did, %.4g s an epoch: other figures of %s bound its training; take a run that computes more (a larger %v), or another profile",
		m.Training, own.Name, errs.Key("hidden"))
}

// near reports whether a figure is still of its size.
func near(now, was hardware.Figure) bool {
	return was.Value == 0 || now.Value > was.Value/1e4 && now.Value < was.Value*1e4
}
