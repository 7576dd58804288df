package sched

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/report"
)

// The tuner measures the first mini-batches that a run trains under other settings and keeps the
// best: how many batches are prepared ahead, how many SMs each operator gets, how many blocks the
// I/O kernels have, what the accumulator aims at. The batches are those of the first epoch, in
// their order, each trained once: cutting the epoch into segments, between which the pipeline
// drains, changes no result.
//
// One setting is changed at a time, from the most telling to the least (coordinate descent). Its
// values are measured in turns, the present one first and last, so that what drifts (a page cache
// that fills, a machine that warms up) shows; another value is taken only when it is better by more
// than tuneGain, and by more than the present one's own times differ. A segment's time has the
// filling of its pipeline in it, which is the same for all: differences are a little smaller than
// they will be.

// tuneGain is how much less time a value must take than the present one: less is not told from
// noise.
const tuneGain = 0.03

const (
	// tuneTime is how long a segment lasts, where the epoch has batches enough.
	tuneTime = 150 * time.Millisecond
	// tuneShare is the most of an epoch that is spent on measuring.
	tuneShare = 0.75
)

// Tests lower these.
var (
	// tuneBatches is the least number of batches that one value is measured with.
	tuneBatches = 4
	// tuneLeast is how long a segment must last for its time to tell settings apart.
	tuneLeast = 10 * time.Millisecond
)

// tuneKnob is a setting with its candidates.
type tuneKnob struct {
	name   string
	values []string
	now    int // index of the present one
	set    func(ctx context.Context, i int) error
}

// tuner is the tuner at work.
type tuner struct {
	e     *engine
	p     *pass
	res   *report.TuneResult
	level int           // rounds
	each  int           // batches of a segment
	most  int           // batches that may be used up
	aside time.Duration // of a segment, for what comes after batches
	// train trains n batches and says how many seconds that took.
	train func(ctx context.Context, n int) (float64, error)
}

// tune measures with the first batches of p and leaves the engine with what was best. before is the
// configuration as it was asked for: the depth that the tuner begins with.
func (e *engine) tune(ctx context.Context, p *pass, before plan.Config) (*report.TuneResult,
	error) {
	t := &tuner{e: e, p: p, res: &report.TuneResult{Level: before.Tune,
		Trials: []report.TuneTrial{}}, level: 1}
	if before.Tune == plan.TuneFull {
		t.level = 2
	}
	t.train = t.segment
	if after := p.after; after != nil { // checkpoints, which some segments have and others have not
		p.after = func(index int) error {
			begin := time.Now()
			defer func() { t.aside += time.Since(begin) }()
			return after(index)
		}
		defer func() { p.after = after }()
	}
	start := time.Now()
	e.Config.Depth = before.Depth
	e.plan = e.Config.Schedule()
	knobs := e.tuneKnobs(before)
	n := p.order.Len()
	first := p.first
	t.most = first + int(float64(n-first)*tuneShare)
	if len(knobs) == 0 {
		t.res.Skipped = fmt.Sprintf("pipeline %s on this device has nothing to choose",
			e.Config.Pipeline)
		return t.res, nil
	}
	// The first batches make buffers and warm caches; they tell how many a segment needs.
	warm := min(2, t.most-first)
	took, err := t.train(ctx, warm)
	if err != nil {
		return t.res, err
	}
	if warm > 0 && took > 0 {
		t.each = int(tuneTime.Seconds() / (took / float64(warm)))
	}
	segments := 0
	for _, k := range knobs {
		segments += t.level * (len(k.values) + 1)
	}
	t.each = max(tuneBatches, min(t.each, (t.most-p.first)/max(segments, 1)))
	if each := took / float64(max(warm, 1)); each*float64(t.each) < tuneLeast.Seconds() &&
		t.each < t.most-p.first {
		t.each = max(t.each, int(tuneLeast.Seconds()/max(each, 1e-9))+1)
	}
	var flags, budgets, skipped []string
	for i := range knobs {
		k := &knobs[i]
		if (len(k.values)+1)*t.level*t.each > t.most-p.first {
			name := errs.Key(k.name).Flag()
			if op, _, ok := strings.Cut(k.values[0], "="); ok {
				name += " " + op
			}
			skipped = append(skipped, name)
			continue
		}
		was := k.now
		if err := t.choose(ctx, k); err != nil {
			return t.res, err
		}
		switch v := k.values[k.now]; {
		case k.now == was:
		case k.name != "sm-budget":
			flags = append(flags, errs.Key(k.name).Flag()+" "+v)
		case !strings.HasSuffix(v, "=all"):
			budgets = append(budgets, v)
		}
	}
	if len(budgets) > 0 {
		flags = append(flags, errs.Key("sm-budget").Flag()+" "+strings.Join(budgets, ","))
	}
	t.res.Batches, t.res.Seconds, t.res.Flags = p.first-first, time.Since(start).Seconds(),
		strings.Join(flags, " ")
	if len(skipped) > 0 {
		t.res.Skipped = fmt.Sprintf(
			"%d mini-batches of the epoch are too few to measure %s with %d for each value",
			n-first, strings.Join(skipped, ", "), t.each)
	}
	return t.res, nil
}

// segment trains n batches and says how long they took, checkpoints and the sampling of
// superbatches aside: not every segment has them.
func (t *tuner) segment(ctx context.Context, n int) (float64, error) {
	if n < 1 {
		return 0, nil
	}
	t.p.end, t.aside = t.p.first+n, 0
	start, prepared := time.Now(), t.p.prepared
	err := t.e.run(ctx, t.p)
	return (time.Since(start) - t.aside - (t.p.prepared - prepared)).Seconds(), err
}

// choose measures a knob's values in turns and leaves it at the best.
func (t *tuner) choose(ctx context.Context, k *tuneKnob) error {
	best := make([]float64, len(k.values))
	var present []float64
	for round := range t.level {
		order := []int{k.now}
		for j := 1; j < len(k.values); j++ {
			order = append(order, (j+k.now)%len(k.values))
		}
		if round%2 == 1 {
			slices.Reverse(order[1:])
		}
		for _, i := range append(order, k.now) {
			if err := k.set(ctx, i); err != nil {
				return fmt.Errorf("tuning --%s %s: %w", k.name, k.values[i], err)
			}
			took, err := t.train(ctx, t.each)
			if err != nil {
				return err
			}
			took /= float64(t.each)
			if i == k.now {
				present = append(present, took)
			}
			if best[i] == 0 || took < best[i] {
				best[i] = took
			}
		}
	}
	was := k.now
	gain := max(tuneGain, 1-slices.Min(present)/slices.Max(present))
	for i, s := range best {
		if s < best[k.now] && s < best[was]*(1-gain) {
			k.now = i
		}
	}
	var parts []string
	for i, v := range k.values {
		n := t.level * t.each
		if i == was {
			n *= 2
		}
		t.res.Trials = append(t.res.Trials, report.TuneTrial{Setting: k.name, Value: v, Batches: n,
			Seconds: best[i], Before: i == was, Chosen: i == k.now})
		parts = append(parts, fmt.Sprintf("%s: %.4g ms", v, 1e3*best[i]))
	}
	why := fmt.Sprintf("none gains more than %.0f%%, so it stays", 100*gain)
	if gain > tuneGain {
		why = fmt.Sprintf("its own times differ by %.0f%%, and none gains more, so it stays",
			100*gain)
	}
	if k.now != was {
		why = fmt.Sprintf("%.0f%% less than %s", 100*(1-best[k.now]/best[was]), k.values[was])
	}
	t.e.Observer.TellNote(fmt.Sprintf("tune --%s, time of a mini-batch: %s; takes %s: %s", k.name,
		strings.Join(parts, ", "), k.values[k.now], why))
	if err := k.set(ctx, k.now); err != nil {
		return fmt.Errorf("tuning --%s %s: %w", k.name, k.values[k.now], err)
	}
	return nil
}

// tuneKnobs are the settings that can be tried in this run, the most telling first.
func (e *engine) tuneKnobs(before plan.Config) []tuneKnob {
	var out []tuneKnob
	add := func(name string, n, now int, text func(i int) string, set func(ctx context.Context,
		i int) error) {
		if n < 2 {
			return
		}
		k := tuneKnob{name: name, now: now, set: set}
		for i := range n {
			k.values = append(k.values, text(i))
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
