package ginex

import (
	"context"
	"slices"

	"helios/cache"
	"helios/cache/superbatch"
	"helios/sched/plan"
)

// choose sizes the tiers, and under plan.PolicyStatic chooses their rows, by hotness: superbatches
// then find what the tiers hold, and change nothing.
func (t *Tiers) choose(ctx context.Context) (b plan.TierSizes, err error) {
	e := t.Engine
	b, e.Placement, t.static = e.Sizes, cache.Placement{}, nil
	if planned(&e.Config) {
		if !b.Auto {
			return b, nil
		}
		room, err := e.AutoRoom(ctx)
		b.GPURows, b.Auto = min(room, e.Rows*e.RowBytes)/e.RowBytes, false
		b.CPURows = min(b.CPURows, e.Rows-b.GPURows) // a row is in one tier
		return b, err
	}
	if e.Placement, err = e.Choose(ctx, b, e.Hooks()); err != nil {
		return b, err
	}
	gpu := int64(len(e.Placement.GPU))
	b = plan.TierSizes{GPURows: gpu, CPURows: int64(len(e.Placement.CPU))}
	t.static, err = superbatch.NewStatic(slices.Concat(e.Placement.GPU, e.Placement.CPU), gpu,
		e.Rows)
	return b, err
}
