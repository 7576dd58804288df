package ginex

import (
	"context"
	"fmt"
	"helios/cache/superbatch"
	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/planner"
)

// Predict is the system in a plan.
var Predict = planner.System{New: func(j *planner.Job) planner.Tiers {
	return &prediction{Base: planner.Base{Job: j}}
},
	Simulate: &Simulate, Hotness: plan.HotnessPresample, Refuse: refusePlan}

// refusePlan refuses superbatches whose changes nobody finds.
func refusePlan(c *plan.Config) error {
	if planned(c) {
		return nil
	}
	return errs.New(errs.Capability, "a plan has superbatches under %v %s, not %s; use that",
		errs.Key("policy"), plan.PolicyBelady, c.Policy)
}

// prediction foresees tiers that know a superbatch.
type prediction struct{ planner.Base }

// Open implements Tiers.
func (t *prediction) Open(ctx context.Context, n int) (err error) {
	if t.Job.Work.Own, err = t.full(ctx, n); err != nil {
		return err
	}
	return t.Base.Open(ctx, n)
}

// CheckSizes implements Tiers: directories are as large as the tiers.
func (t *prediction) CheckSizes() error {
	const limit = int64(256 << 20)
	if b := &t.Job.Sizes; b.GPURows+b.CPURows > limit {
		return errs.New(errs.Usage,
			"tiers of %d rows that know a superbatch: at most %d are possible; give a smaller %v",
			b.GPURows+b.CPURows, limit, errs.Key("cpu-cache"))
	}
	return nil
}

// Two superbatches are played, of at least so many mini-batches, and of more rows than other runs'.
const (
	leastPlanned  = 8
	plannedFactor = 2
)

// Bounds implements Tiers.
func (t *prediction) Bounds() (least, limit, rows int) {
	_, limit, rows = t.Base.Bounds()
	return leastPlanned, limit, plannedFactor * rows
}

// Beyond implements Tiers.
func (t *prediction) Beyond() int { return 0 }

// Shorten implements Tiers: of two superbatches the second finds what the first left.
func (t *prediction) Shorten(n int) int {
	j := t.Job
	if n >= j.Accesses.Batches {
		return n
	}
	size := min(longest(&j.Config, j.Accesses.Batches), max(n/2, 1))
	if size < longest(&j.Config, j.Accesses.Batches) {
		j.Notes = append(j.Notes, fmt.Sprintf(
			"superbatches of %d mini-batches are played, the run's have %d and save more reads",
			size, min(longest(&j.Config, j.Accesses.Batches), j.Accesses.Batches)))
	}
	j.Config.Superbatch = size
	return min(2*size, n)
}

// Pace implements Tiers: superbatches end together, and the second gives the pace.
func (t *prediction) Pace(n int) (from, to int) { return n/2 - 1, n - 1 }

// size is the number of mini-batches of the run's superbatches.
func (t *prediction) size() int64 {
	epoch := t.Job.Accesses.Batches
	return int64(min(longest(&t.Job.Options.Config, epoch), epoch))
}

// Prepare implements Tiers.
func (t *prediction) Prepare(p *planner.Plan, _ planner.Before) {
	p.Disk["superbatch"] = t.Job.First.Shape.SavedBytes() * t.size()
}

// Memory implements Tiers.
func (t *prediction) Memory(p *planner.Plan) {
	p.CPUMemory["superbatch"] = 20 * int64(len(t.Job.First.Rows)) * t.size()
}

// full is the state of tiers that know a superbatch, before the first of n batches.
func (t *prediction) full(ctx context.Context, n int) (*superbatch.State, error) {
	j := t.Job
	var met []*planner.Batch
	if j.Sizes.GPURows == 0 || j.Sizes.CPURows == 0 {
		for i := range n {
			b, err := j.Accesses.Get(ctx, i)
			if err != nil {
				return nil, err
			}
			met = append(met, b)
		}
	}
	return j.Accesses.Hottest(j.Sizes.GPURows+j.Sizes.CPURows, met), nil
}
