package tuner

import (
	"context"
	"fmt"
	"slices"

	"helios/sched/plan"
)

// Settings are the settings of a run that its tuner may change. Nothing is in flight when the
// functions are called.
type Settings struct {
	Config *plan.Config // the run's own, which changes
	SMs    int          // of the device
	// Accumulator merges reads; nil: nothing does.
	Accumulator Accumulator
	// Tunes reports whether an operator's SMs change anything; nil: all do.
	Tunes func(op string) bool
	// Depth and Budget take over the prefetch depth of Config, and the SMs of an operator.
	Depth  func()
	Budget func(op string) error
	// Blocks changes the blocks of the I/O kernels; nil: there are none.
	Blocks func(ctx context.Context, blocks int) error
}

// Knobs are the settings that can be tried, the most telling first.
func (s *Settings) Knobs() (out []Knob) {
	c := s.Config
	full := c.Tune == plan.TuneFull
	if depths := c.TuneDepths(); len(depths) > 1 {
		out = append(out, knob("prefetch-depth", depths, c.Depth, func(_ context.Context, d int) error {
			c.Depth = d
			s.Depth()
			return nil
		}))
	}
	if a := s.Accumulator; a != nil {
		if shares := a.Shares(full); shares != nil {
			out = append(out, knob("accumulate", shares, c.Accumulate,
				func(_ context.Context, share float64) error { return a.Aim(share) }))
		}
	}
	if c.Schedule().Serial { // operators that run alone want all there is
		return out
	}
	out = append(out, s.budgets(full)...)
	if full && s.Blocks != nil {
		now := c.Blocks
		if now == 0 {
			now = plan.IOBlocks
		}
		out = append(out, knob("io-blocks", []int{8, 16, 32, 64}, now,
			func(ctx context.Context, blocks int) error {
				if c.Blocks == blocks || c.Blocks == 0 && blocks == plan.IOBlocks {
					return nil
				}
				return s.Blocks(ctx, blocks)
			}))
	}
	return out
}

// budgets are the SMs of operators.
func (s *Settings) budgets(full bool) (out []Knob) {
	b, parts := &s.Config.SMs, []int{2}
	if full {
		parts = []int{4, 2}
	}
	for _, o := range []struct {
		op     string
		budget *int
		quick  bool
	}{{plan.OpTrain, &b.Train, true}, {plan.OpSample, &b.Sample, true},
		{plan.OpGather, &b.Gather, false}, {plan.OpLookup, &b.Lookup, false}} {
		if !full && !o.quick || s.Tunes != nil && !s.Tunes(o.op) {
			continue
		}
		values := []int{0}
		for _, d := range parts {
			if n := s.SMs / d; n >= 1 && n < s.SMs && !slices.Contains(values, n) {
				values = append(values, n)
			}
		}
		if !slices.Contains(values, *o.budget) {
			values = append(values, *o.budget)
		}
		if len(values) < 2 {
			continue
		}
		k := Knob{Name: "sm-budget", Now: slices.Index(values, *o.budget),
			Set: func(_ context.Context, i int) error {
				if *o.budget == values[i] {
					return nil
				}
				*o.budget = values[i]
				return s.Budget(o.op)
			}}
		for _, n := range values {
			text := fmt.Sprintf("%s=%d", o.op, n)
			if n == 0 {
				text = o.op + "=all"
			}
			k.Values = append(k.Values, text)
		}
		out = append(out, k)
	}
	return out
}

// knob is a setting of some values, the present one among them.
func knob[T int | float64](name string, values []T, now T,
	set func(ctx context.Context, x T) error) Knob {
	if values = slices.Clone(values); !slices.Contains(values, now) {
		values = append(values, now)
		slices.Sort(values)
	}
	k := Knob{Name: name, Now: slices.Index(values, now),
		Set: func(ctx context.Context, i int) error { return set(ctx, values[i]) }}
	for _, x := range values {
		k.Values = append(k.Values, fmt.Sprint(x))
	}
	return k
}
