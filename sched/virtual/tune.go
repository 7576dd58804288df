package virtual

import (
	"context"

	"helios/gpuio"
	"helios/sched/plan"
	"helios/sched/tuner"
)

// The tuner on the virtual clock: that of a run which reads, over modelled times. The mini-batches
// that it tunes with are part of the first epoch, and its settings are the run's from there on.

// tune plays a pass of training, whose first mini-batches tune the run.
func tune(ctx context.Context, v *Player, p *Pass) (err error) {
	n, next, shape := p.End, p.First, p.Shape
	walk := func(ctx context.Context, to int) error {
		p.First, p.End, p.Shape, v.Source.End = next, to, shape, to
		err := p.Walk(ctx)
		next = to
		return err
	}
	t := &tuner.Tuner{Config: v.Config, N: n, Exact: true, Next: func() int { return next },
		Clock: func() float64 { return float64(v.Machine.Sim.Now()) / 1e9 },
		Note: func(format string, args ...any) {
			v.Observer.TellNote("modelled: "+format, args...)
		}}
	t.Train = func(ctx context.Context, batches int) (float64, error) {
		if batches < 1 {
			return 0, nil
		}
		begin := v.Machine.Sim.Now()
		err := walk(ctx, next+batches)
		return float64(v.Machine.Sim.Now()-begin) / 1e9, err
	}
	if v.tuned, err = t.Run(ctx, settings(v).Knobs()); err != nil {
		return err
	}
	v.Observer.TellPlan(v.Config.Operators(v.Machine.Stack != nil))
	if next == n {
		return nil
	}
	return walk(ctx, n)
}

// settings are those that the tuner can set in this run.
func settings(v *Player) *tuner.Settings {
	c, m := &v.Config, v.Machine
	s := &tuner.Settings{Config: c, SMs: v.Hardware.Profile.GPU.SMs.Int(),
		Depth: v.Replan}
	s.Accumulator, _ = v.Tiers.(tuner.Accumulator)
	s.Budget = func(op string) error {
		sms := c.Operators(true).Stream(op).SMs
		map[string]*vstream{plan.OpTrain: m.trainS, plan.OpSample: m.sampleS,
			plan.OpGather: m.gatherS, plan.OpLookup: m.lookupS}[op].sms = sms
		for _, r := range m.replicas {
			if op == plan.OpTrain {
				r.train.sms = sms
			}
		}
		return nil
	}
	if m.Stack != nil && c.IOStack == gpuio.StackAsync {
		s.Blocks = func(_ context.Context, blocks int) error {
			c.Blocks = blocks
			return v.OpenStack()
		}
	}
	return s
}
