package static

import (
	"context"
	"helios/sched/planner"

	"helios/sched/cost"
	"helios/sched/virtual"
)

// Predict is the system in a plan.
var Predict = planner.System{New: func(j *planner.Job) planner.Tiers {
	return &Prediction{Base: planner.Base{Job: j}}
},
	Simulate: &Simulate}

// Prediction foresees static tiers.
type Prediction struct {
	planner.Base
	ctx context.Context
}

// Open implements Tiers.
func (t *Prediction) Open(ctx context.Context, n int) error {
	t.ctx = ctx
	t.Job.Work.Source.Batch = t.Batch
	return t.Base.Open(ctx, n)
}

// Prepare implements Tiers.
func (t *Prediction) Prepare(p *planner.Plan, b planner.Before) {
	j := t.Job
	p.Preparation.Fill = j.FillSeconds(j.Sizes.GPURows + j.Sizes.CPURows)
	p.Preparation.Hotness = j.HotnessSeconds(b.Sample)
}

// Batch looks a batch up: it has the hottest rows in the GPU tier and the next ones in the CPU
// tier.
func (t *Prediction) Batch(i int) (*virtual.Looked, error) {
	b, err := t.Job.Accesses.Get(t.ctx, i)
	if err != nil {
		return nil, err
	}
	gpu, both := t.Job.Sizes.GPURows, t.Job.Sizes.GPURows+t.Job.Sizes.CPURows
	return t.Job.Parts(b, func(rows, ranks []int64) (p cost.Part, read []int64) {
		for k, r := range ranks {
			switch {
			case r < gpu:
				p.NGPU++
			case r < both:
				p.NCPU++
			default:
				read = append(read, rows[k])
			}
		}
		p.NMiss = int64(len(read))
		return p, read
	}), nil
}
