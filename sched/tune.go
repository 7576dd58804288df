package sched

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	e.Plan = e.Config.Schedule()
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
	return t.Run(ctx, e.tuneKnobs(before))
}

// tuneKnobs are the settings that can be tried in this run, the most telling first.
func (e *runner) tuneKnobs(before plan.Config) []tuner.Knob {
	var out []tuner.Knob
	add := func(name string, n, now int, text func(i int) string, set func(ctx context.Context,
		i int) error) {
		if n < 2 {
			return
		}
		k := tuner.Knob{Name: name, Now: now, Set: set}
		for i := range n {
			k.Values = append(k.Values, text(i))
		}
		out = append(out, k)
	}
	full := before.Tune == plan.TuneFull

	depths := before.TuneDepths()
	add("prefetch-depth", len(depths), slices.Index(depths, before.Depth),
		func(i int) string { return fmt.Sprint(depths[i]) },
		func(_ context.Context, i int) error {
			e.Config.Depth = depths[i]
			e.Plan = e.Config.Schedule()
			return nil
		})

	if a, ok := e.Tiers.(tuner.Accumulator); ok {
		shares := a.Shares(full)
		if now := e.Config.Accumulate; shares != nil && !slices.Contains(shares, now) {
			shares = append(shares, now)
			slices.Sort(shares)
		}
		add("accumulate", len(shares), slices.Index(shares, e.Config.Accumulate),
			func(i int) string { return fmt.Sprint(shares[i]) },
			func(_ context.Context, i int) error { return a.Aim(shares[i]) })
	}

	if e.Plan.Serial { // operators that run alone want all there is
		return out
	}
	sms := e.Device.Info().SMs
	parts := []int{2}
	if full {
		parts = []int{4, 2}
	}
	for _, s := range []struct {
		op     string
		stream *cuda.Stream
		budget *int
		quick  bool
	}{
		{plan.OpTrain, &e.TrainStream, &e.Config.SMs.Train, true},
		{plan.OpSample, &e.Stream, &e.Config.SMs.Sample, true},
		{plan.OpGather, &e.GatherStream, &e.Config.SMs.Gather, false},
		{plan.OpLookup, &e.LookupStream, &e.Config.SMs.Lookup, false},
	} {
		if !full && !s.quick {
			continue
		}
		if !e.Tiers.Tunes(s.op) {
			continue
		}
		budgets := []int{0}
		for _, d := range parts {
			if b := sms / d; b >= 1 && b < sms && !slices.Contains(budgets, b) {
				budgets = append(budgets, b)
			}
		}
		now := *s.budget
		if !slices.Contains(budgets, now) {
			budgets = append(budgets, now)
		}
		text := func(i int) string {
			if budgets[i] == 0 {
				return s.op + "=all"
			}
			return fmt.Sprintf("%s=%d", s.op, budgets[i])
		}
		add("sm-budget", len(budgets), slices.Index(budgets, now), text,
			func(_ context.Context, i int) error {
				if *s.budget == budgets[i] {
					return nil
				}
				*s.budget = budgets[i]
				return e.renewStream(s.op, s.stream)
			})
	}

	if full && e.Store.Reader != nil && e.Config.IOStack == gpuio.StackAsync {
		blocks := []int{8, 16, 32, 64}
		now := e.Config.Blocks
		if now == 0 {
			now = plan.IOBlocks
		}
		if !slices.Contains(blocks, now) {
			blocks = append(blocks, now)
			slices.Sort(blocks)
		}
		add("io-blocks", len(blocks), slices.Index(blocks, now),
			func(i int) string { return fmt.Sprint(blocks[i]) },
			func(ctx context.Context, i int) error {
				if e.Config.Blocks == blocks[i] || e.Config.Blocks == 0 &&
					blocks[i] == plan.IOBlocks {
					return nil
				}
				// it went by the blocks
				if e.OnGPU() && e.Config.SMs.IO == plan.IOSMs(e.Config.Blocks, sms) {
					e.Config.SMs.IO = plan.IOSMs(blocks[i], sms)
				}
				e.Config.Blocks = blocks[i]
				if err := e.Store.Renew(ctx, e.Tiers.Layout()); err != nil {
					return errors.Join(err, ctx.Err())
				}
				return nil
			})
	}
	return out
}

// renewStream makes an operator's stream anew, with the budget that it has now. Nothing may be in
// flight.
func (e *runner) renewStream(op string, at *cuda.Stream) error {
	s, err := e.Device.NewStream(e.Config.Operators(true).StreamOptions(op))
	if err != nil {
		return err
	}
	old := *at
	busy := old.Busy().Seconds()
	*map[string]*float64{plan.OpSample: &e.BusyBefore.Sample, plan.OpLookup: &e.BusyBefore.Lookup,
		plan.OpGather: &e.BusyBefore.Gather, plan.OpTrain: &e.BusyBefore.Train}[op] += busy
	*at = s
	if e.copier != nil && op == plan.OpTrain {
		e.copier.stream = s
	}
	return old.Close()
}
