package planner

import (
	"context"
	"math"

	"helios/internal/errs"
)

// Calibrating ends where the plan trains as long as the run within closeEnough, or after mostTries.
const (
	closeEnough = 0.01
	mostTries   = 12
)

// Calibrate changes the machine's speed of arithmetic (gpu.tensor_tflops) until training takes as
// long in an epoch of the plan as it took in one of a run, and returns what it then is.
func (p *Planner) Calibrate(ctx context.Context, seconds float64) (tflops float64, err error) {
	if !(seconds > 0) || math.IsInf(seconds, 0) {
		return 0, errs.New(errs.Usage,
			"an epoch's training took %g s in the run: that is no time to calibrate by", seconds)
	}
	own := *p.o.Hardware.Profile
	p.o.Hardware.Profile = &own
	was := own.GPU.TensorTFLOPS.Value
	for range mostTries {
		x, err := p.Plan(ctx, nil)
		if err != nil {
			return 0, err
		}
		by := x.Busy[resTraining] / seconds
		if math.Abs(by-1) <= closeEnough {
			return own.GPU.TensorTFLOPS.Value, nil
		}
		if own.GPU.TensorTFLOPS.Value *= by; !(own.GPU.TensorTFLOPS.Value > was/1e4 &&
			own.GPU.TensorTFLOPS.Value < was*1e4) {
			break
		}
	}
	return 0, errs.New(errs.Usage,
		"no gpu.tensor_tflops makes the plan train as long as the run did, %.4g s an epoch: other figures of %s bound its training; take a run that computes more (a larger %v), or another profile",
		seconds, own.Name, errs.Key("hidden"))
}
