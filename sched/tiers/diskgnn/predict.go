package diskgnn

import (
	"context"
	"fmt"
	"helios/cache/packed"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/packs"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/tiers/static"
	"math"
)

// Predict is the system in a plan.
var Predict = planner.System{
	New: func(j *planner.Job) planner.Tiers {
		return &prediction{Prediction: static.Prediction{Base: planner.Base{Job: j}}}
	},
	Simulate: &Simulate,
	// the tiers hold what the packed mini-batches access most
	Hotness: plan.HotnessForesight}

// prediction foresees packed mini-batches, of which each has pages of its own.
type prediction struct {
	static.Prediction
	shape packed.Shape
}

// Open implements Tiers.
func (t *prediction) Open(ctx context.Context, n int) (err error) {
	j := t.Job
	if t.shape, err = packed.NewShape(j.RowBytes, int64(j.Layout.LBABytes)); err != nil {
		return err
	}
	return t.Prediction.Open(ctx, n)
}

// Prepare implements Tiers.
func (t *prediction) Prepare(p *planner.Plan, b planner.Before) {
	j, hw := t.Job, t.Job.Options.Hardware.Profile
	p.Preparation.Fill = j.FillSeconds(j.Sizes.GPURows + j.Sizes.CPURows)
	first, end := packs.Epochs(&j.Config, 0)
	batches := int64(j.Accesses.Batches) * int64(end-first)
	perBatch := float64(p.RowsSSD) / float64(j.Accesses.Batches)
	pages := int64(math.Ceil(perBatch/float64(t.shape.RowsPerPage))) * batches
	size := pages * t.shape.PageBytes
	p.Disk["packed"], p.Disk["samples"] = size, j.First.Shape.SavedBytes()*batches
	accesses := float64(len(j.First.Rows)) * float64(batches)
	io := float64(b.Stored)/b.Read + float64(size)/b.Write
	copied := perBatch * float64(batches) * float64(j.RowBytes) / (hw.CPU.GatherGBs.Value * 1e9)
	p.Preparation.Pack = b.Sample*float64(batches) + accesses*hw.CPU.InspectNS.Value/1e9 +
		max(io, copied)
	if budget := j.Config.DiskBudget.Of(j.Accesses.Rows * j.RowBytes); size > budget {
		p.Notes = append(p.Notes, fmt.Sprintf(
			"packed rows take %s, beyond %v of %s: a run shares pages among mini-batches and reads more than is said here",
			units.FormatBytes(size), errs.Key("disk-budget"), units.FormatBytes(budget)))
	}
}
