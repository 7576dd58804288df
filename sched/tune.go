package sched

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/cuda"
	"helios/gpuio"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tuner"
)

// tune measures with the first batches of p and leaves the engine with what was best. before is the
// configuration as it was asked for: the depth that the tuner begins with.
func (e *engine) tune(ctx context.Context, p *pass, before plan.Config) (*report.TuneResult,
	error) {
	var aside time.Duration             // of a segment, for what comes after batches
	if after := p.after; after != nil { // checkpoints, which some segments have and others have not
		p.after = func(index int) error {
			begin := time.Now()
			defer func() { aside += time.Since(begin) }()
			return after(index)
		}
		defer func() { p.after = after }()
	}
	e.Config.Depth = before.Depth
	e.plan = e.Config.Schedule()
	start := time.Now()
	t := &tuner.Tuner{Config: before, N: p.order.Len(), Next: func() int { return p.first },
		Clock: func() float64 { return time.Since(start).Seconds() }, Note: e.Observer.TellNote}
	// A segment's time is without checkpoints and the sampling of superbatches: not every segment
	// has them.
	t.Train = func(ctx context.Context, n int) (float64, error) {
		if n < 1 {
			return 0, nil
		}
		p.end, aside = p.first+n, 0
		begin, prepared := time.Now(), p.prepared
		err := e.run(ctx, p)
		return (time.Since(begin) - aside - (p.prepared - prepared)).Seconds(), err
	}
	return t.Run(ctx, e.tuneKnobs(before))
}

// tuneKnobs are the settings that can be tried in this run, the most telling first.
func (e *engine) tuneKnobs(before plan.Config) []tuner.Knob {
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
			e.plan = e.Config.Schedule()
			return nil
		})

	if d, ok := e.features.(*dynamicTiers); ok && e.plan.Group && d.acc.Target > 0 &&
		d.acc.IOPS > 0 {
		shares := []float64{0.8, 0.95}
		if full {
			shares = []float64{0.5, 0.7, 0.8, 0.9, 0.95, 0.98}
		}
		if !slices.Contains(shares, e.Config.Accumulate) {
			shares = append(shares, e.Config.Accumulate)
			slices.Sort(shares)
		}
		add("accumulate", len(shares), slices.Index(shares, e.Config.Accumulate),
			func(i int) string { return fmt.Sprint(shares[i]) },
			func(_ context.Context, i int) error { return d.aim(shares[i]) })
	}

	if e.plan.Serial { // operators that run alone want all there is
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
		{plan.OpTrain, &e.trainS, &e.Config.SMs.Train, true},
		{plan.OpSample, &e.Stream, &e.Config.SMs.Sample, true},
		{plan.OpGather, &e.gatherS, &e.Config.SMs.Gather, false},
		{plan.OpLookup, &e.lookupS, &e.Config.SMs.Lookup, false},
	} {
		if !full && !s.quick {
			continue
		}
		// What of superbatches is between two steps samples nothing, and the CPU looks rows up.
		if e.Config.Superbatched() && (s.op == plan.OpSample || s.op == plan.OpLookup) {
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

	if full && e.store.reader != nil && e.Config.IOStack == gpuio.StackAsync {
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
				if err := e.store.renew(ctx, e.features.layout()); err != nil {
					return errors.Join(err, ctx.Err())
				}
				return nil
			})
	}
	return out
}

// renewStream makes an operator's stream anew, with the budget that it has now. Nothing may be in
// flight.
func (e *engine) renewStream(op string, at *cuda.Stream) error {
	s, err := e.Device.NewStream(e.Config.Operators(true).StreamOptions(op))
	if err != nil {
		return err
	}
	old := *at
	busy := old.Busy().Seconds()
	*map[string]*float64{plan.OpSample: &e.busyBefore.Sample, plan.OpLookup: &e.busyBefore.Lookup,
		plan.OpGather: &e.busyBefore.Gather, plan.OpTrain: &e.busyBefore.Train}[op] += busy
	*at = s
	if e.copier != nil && op == plan.OpTrain {
		e.copier.stream = s
	}
	return old.Close()
}
