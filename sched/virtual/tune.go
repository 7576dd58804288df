package virtual

import (
	"context"
	"fmt"
	"slices"

	"helios/gpuio"
	"helios/sched/plan"
	"helios/sched/tuner"
)

// The tuner on the virtual clock: that of a run which reads, over modelled times. The mini-batches
// that it tunes with are part of the first epoch, and its settings are the run's from there on.

// tune plays a pass of training, whose first mini-batches tune the run.
func tune(ctx context.Context, v *Player, p *Pass) (err error) {
	n, at, shape := p.End, p.First, p.Shape
	walk := func(ctx context.Context, to int) error {
		p.First, p.End, p.Shape, v.Source.End = at, to, shape, to
		err := p.Walk(ctx)
		at = to
		return err
	}
	t := &tuner.Tuner{Config: v.Config, N: n, Exact: true, Next: func() int { return at },
		Clock: func() float64 { return float64(v.Machine.Sim.Now()) / 1e9 },
		Note: func(format string, args ...any) {
			v.Observer.TellNote("modelled: "+format, args...)
		}}
	t.Train = func(ctx context.Context, batches int) (float64, error) {
		if batches < 1 {
			return 0, nil
		}
		begin := v.Machine.Sim.Now()
		err := walk(ctx, at+batches)
		return float64(v.Machine.Sim.Now()-begin) / 1e9, err
	}
	if v.tuned, err = t.Run(ctx, tuneKnobs(v)); err != nil {
		return err
	}
	v.Observer.TellPlan(v.Config.Operators(v.Machine.Stack != nil))
	if at == n {
		return nil
	}
	return walk(ctx, n)
}

// tuneKnobs are the settings that can be tried in this run, the most telling first: those of a run
// that reads.
func tuneKnobs(v *Player) (out []tuner.Knob) {
	c := &v.Config
	full := c.Tune == plan.TuneFull
	if depths := c.TuneDepths(); len(depths) > 1 {
		out = append(out, knob("prefetch-depth", depths, c.Depth, func(d int) error {
			c.Depth = d
			v.Plan = c.Schedule()
			v.Machine.plan = v.Plan
			return nil
		}))
	}
	if a, ok := v.Tiers.(tuner.Accumulator); ok {
		if shares := a.Shares(full); shares != nil {
			out = append(out, knob("accumulate", shares, c.Accumulate, a.Aim))
		}
	}
	if v.Plan.Serial { // operators that run alone want all there is
		return out
	}
	out = append(out, budgetKnobs(v, full)...)
	if full && v.Machine.Stack != nil && c.IOStack == gpuio.StackAsync {
		now := c.Blocks
		if now == 0 {
			now = plan.IOBlocks
		}
		out = append(out, knob("io-blocks", []int{8, 16, 32, 64}, now, func(blocks int) error {
			if c.Blocks == blocks || c.Blocks == 0 && blocks == plan.IOBlocks {
				return nil
			}
			c.Blocks = blocks
			return v.OpenStack()
		}))
	}
	return out
}

// budgetKnobs are the SMs of operators.
func budgetKnobs(v *Player, full bool) (out []tuner.Knob) {
	c, m := &v.Config, v.Machine
	sms, parts := v.Hardware.Profile.GPU.SMs.Int(), []int{2}
	if full {
		parts = []int{4, 2}
	}
	train := []*vstream{m.trainS}
	for _, r := range m.replicas {
		train = append(train, r.train)
	}
	for _, s := range []struct {
		op      string
		streams []*vstream
		budget  *int
		quick   bool
	}{
		{plan.OpTrain, train, &c.SMs.Train, true},
		{plan.OpSample, []*vstream{m.sampleS}, &c.SMs.Sample, true},
		{plan.OpGather, []*vstream{m.gatherS}, &c.SMs.Gather, false},
		{plan.OpLookup, []*vstream{m.lookupS}, &c.SMs.Lookup, false},
	} {
		if !full && !s.quick {
			continue
		}
		budgets := []int{0}
		for _, d := range parts {
			if b := sms / d; b >= 1 && b < sms && !slices.Contains(budgets, b) {
				budgets = append(budgets, b)
			}
		}
		if !slices.Contains(budgets, *s.budget) {
			budgets = append(budgets, *s.budget)
		}
		if len(budgets) < 2 {
			continue
		}
		k := tuner.Knob{Name: "sm-budget", Now: slices.Index(budgets, *s.budget),
			Set: func(_ context.Context, i int) error {
				*s.budget = budgets[i]
				for _, x := range s.streams {
					x.sms = budgets[i]
				}
				return nil
			}}
		for _, b := range budgets {
			text := fmt.Sprintf("%s=%d", s.op, b)
			if b == 0 {
				text = s.op + "=all"
			}
			k.Values = append(k.Values, text)
		}
		out = append(out, k)
	}
	return out
}

// knob is a setting of some values, the present one among them.
func knob[T int | float64](name string, values []T, now T, set func(T) error) tuner.Knob {
	if values = slices.Clone(values); !slices.Contains(values, now) {
		values = append(values, now)
		slices.Sort(values)
	}
	k := tuner.Knob{Name: name, Now: slices.Index(values, now),
		Set: func(_ context.Context, i int) error { return set(values[i]) }}
	for _, x := range values {
		k.Values = append(k.Values, fmt.Sprint(x))
	}
	return k
}
