package virtual

import (
	"context"

	"helios/cache/trace"
	"helios/gpuio"
	"helios/sched/cost"
	"helios/sched/prepare"
	"helios/sched/report"
)

// A trace of a modelled run (plan.Config.Trace). The accesses are real, so the file is the one that
// a run with SSDs of this number and block size would write. That run ends with a test pass, which
// is not played here; its accesses are recorded in no time.

// Recorder records a modelled run.
type Recorder struct {
	v *Player
	prepare.Recording
}

// test records the test pass. No figure of the run counts it.
func (r *Recorder) test(ctx context.Context) error {
	v := r.v
	test, err := v.In.Dataset.Split("test")
	if err != nil || !r.On() || v.Config.NoEval || len(test) == 0 {
		return err
	}
	order := prepare.NewOrder(test, v.Config.Batch)
	v.Source = Part{Kind: trace.Test, Key: prepare.TestEpoch, N: order.Len(), Order: order}
	read := append([]gpuio.Planned(nil), v.perSSD...)
	var sum report.Partial
	err = v.Tiers.Test(ctx, &sum)
	v.perSSD = read
	if err != nil {
		return err
	}
	return r.Live(v.Source.Kind, v.Source.Epoch, sum)
}

// LookUp looks mini-batches up that are played by nobody.
func LookUp(first, end int, sum *report.Partial,
	shape func(i int) (*cost.Shape, error)) error {
	for i := first; i < end; i++ {
		s, err := shape(i)
		if err != nil {
			return err
		}
		Count(sum, &Batch{Shape: s})
	}
	return nil
}
