package static

import "helios/sched/planner"

// Predict is the system in a plan.
var Predict = planner.System{New: func(j *planner.Job) planner.Tiers {
	return &Prediction{Base: planner.Base{Job: j}}
},
	Simulate: &Simulate}

// Prediction foresees static tiers.
type Prediction struct{ planner.Base }

// Prepare implements Tiers.
func (t *Prediction) Prepare(p *planner.Plan, b planner.Before) {
	j := t.Job
	p.Preparation.Fill = j.FillSeconds(j.Sizes.GPURows + j.Sizes.CPURows)
	p.Preparation.Hotness = j.HotnessSeconds(b.Sample)
}
