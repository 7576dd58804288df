package sched

import (
	"context"
	"errors"
	"time"

	"helios/cuda"
	"helios/gpuio"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tuner"
)

// tune measures with the first batches of p and leaves the engine with what was best. before is the
// configuration as it was asked for: the depth that the tuner begins with.
func (e *runner) tune(ctx context.Context, p *engine.Pass, before plan.Config) (*report.TuneResult,
	error) {
	var aside time.Duration             // of a segment, for what comes after batches
	if after := p.After; after != nil { // checkpoints, which some segments have and others have not
		p.After = func(index int) error {
			begin := time.Now()
			defer func() { aside += time.Since(begin) }()
			return after(index)
		}
		defer func() { p.After = after }()
	}
	e.Config.Depth = before.Depth
	e.Replan()
	start := time.Now()
	t := &tuner.Tuner{Config: before, N: p.Order.Len(), Next: func() int { return p.First },
		Clock: func() float64 { return time.Since(start).Seconds() }, Note: e.Observer.TellNote}
	// A segment's time is without checkpoints and the sampling of superbatches: not every segment
	// has them.
	t.Train = func(ctx context.Context, n int) (float64, error) {
		if n < 1 {
			return 0, nil
		}
		p.End, aside = p.First+n, 0
		begin, prepared := time.Now(), p.Prepared
		err := e.Run(ctx, p)
		return (time.Since(begin) - aside - (p.Prepared - prepared)).Seconds(), err
	}
	return t.Run(ctx, e.settings().Knobs())
}

// settings are those that the tuner can set in this run.
func (e *runner) settings() *tuner.Settings {
	s := &tuner.Settings{Config: &e.Config, SMs: e.Device.Info().SMs, Tunes: e.Tiers.Tunes,
		Depth: e.Replan, Budget: e.renewStream}
	s.Accumulator, _ = e.Tiers.(tuner.Accumulator)
	if e.Store.Reader != nil && e.Config.IOStack == gpuio.StackAsync {
		s.Blocks = func(ctx context.Context, blocks int) error {
			// it went by the blocks
			if e.OnGPU() && e.Config.SMs.IO == plan.IOSMs(e.Config.Blocks, s.SMs) {
				e.Config.SMs.IO = plan.IOSMs(blocks, s.SMs)
			}
			e.Config.Blocks = blocks
			if err := e.Store.Renew(ctx, e.Tiers.Layout()); err != nil {
				return errors.Join(err, ctx.Err())
			}
			return nil
		}
	}
	return s
}

// renewStream makes an operator's stream anew, with the budget that it has now. Nothing may be in
// flight.
func (e *runner) renewStream(op string) error {
	o := map[string]struct {
		stream *cuda.Stream
		busy   *float64
	}{plan.OpSample: {&e.Stream, &e.BusyBefore.Sample},
		plan.OpLookup: {&e.LookupStream, &e.BusyBefore.Lookup},
		plan.OpGather: {&e.GatherStream, &e.BusyBefore.Gather},
		plan.OpTrain:  {&e.TrainStream, &e.BusyBefore.Train}}[op]
	s, err := e.Device.NewStream(e.Config.Operators(true).StreamOptions(op))
	if err != nil {
		return err
	}
	old := *o.stream
	*o.busy += old.Busy().Seconds()
	*o.stream = s
	if e.copier != nil && op == plan.OpTrain {
		e.copier.stream = s
	}
	return old.Close()
}
