package sched

import (
	"context"
	"slices"

	"helios/cache"
	"helios/cache/superbatch"
	"helios/sched/plan"
)

// choose sizes the tiers, and under plan.PolicyStatic chooses their rows, by hotness: superbatches
// then find what the tiers hold, and change nothing.
func (t *plannedTiers) choose(ctx context.Context) (b plan.TierSizes, err error) {
	e := t.e
	b, e.placement, t.static = e.tiers, cache.Placement{}, nil
	if e.Config.Planned() {
		if b.Auto {
			b, err = e.autoTiers(ctx, b)
		}
		return b, err
	}
	if e.placement, err = e.Choose(ctx, b, e.hooks()); err != nil {
		return b, err
	}
	gpu := int64(len(e.placement.GPU))
	b = plan.TierSizes{GPURows: gpu, CPURows: int64(len(e.placement.CPU))}
	t.static, err = superbatch.NewStatic(slices.Concat(e.placement.GPU, e.placement.CPU), gpu,
		e.Rows)
	return b, err
}
