// Package tuner finds good settings of a run while it trains: it measures the first mini-batches
// under other ones and keeps the best. A run that reads and a modelled one tune alike.
package tuner

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

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

// gainLeast is the share of time that a value must save over the present one: less may be noise.
const gainLeast = 0.03

const (
	// segmentTime is the length of a segment, where the epoch has batches enough.
	segmentTime = 150 * time.Millisecond
	// shareMost is the most of an epoch that is spent on measuring.
	shareMost = 0.75
)

// Tests lower these.
var (
	// Batches is the least number of batches that one value is measured with.
	Batches = 4
	// Least is the shortest segment whose time tells settings apart.
	Least = 10 * time.Millisecond
)

// Knob is a setting with its candidates.
type Knob struct {
	Name   string
	Values []string
	Now    int // index of the present one
	Set    func(ctx context.Context, i int) error
}

// Tuner is the tuner at work.
type Tuner struct {
	Config plan.Config // as it was asked for
	// Next returns the mini-batch that trains next, of N in the epoch.
	Next func() int
	N    int
	// Train trains n batches and returns the seconds that it took.
	Train func(ctx context.Context, n int) (float64, error)
	Clock func() float64 // seconds, since any time
	Note  func(format string, args ...any)
	// Exact: the times are free of noise, so that short segments tell settings apart.
	Exact bool

	res   *report.TuneResult
	level int // rounds
	each  int // batches of a segment
	limit int // batches that may be used up
}

// Run measures the knobs, the most telling first, and leaves each at its best.
func (t *Tuner) Run(ctx context.Context, knobs []Knob) (*report.TuneResult, error) {
	t.res, t.level = &report.TuneResult{Level: t.Config.Tune, Trials: []report.TuneTrial{}}, 1
	if t.Config.Tune == plan.TuneFull {
		t.level = 2
	}
	start, first := t.Clock(), t.Next()
	t.limit = first + int(float64(t.N-first)*shareMost)
	if len(knobs) == 0 {
		t.res.Skipped = fmt.Sprintf("pipeline %s on this device has nothing to choose",
			t.Config.Pipeline)
		return t.res, nil
	}
	if err := t.size(ctx, knobs); err != nil {
		return t.res, err
	}
	var flags, budgets, skipped []string
	for i := range knobs {
		k := &knobs[i]
		if (len(k.Values)+1)*t.level*t.each > t.limit-t.Next() {
			name := errs.Key(k.Name).Flag()
			if op, _, ok := strings.Cut(k.Values[0], "="); ok {
				name += " " + op
			}
			skipped = append(skipped, name)
			continue
		}
		was := k.Now
		if err := t.choose(ctx, k); err != nil {
			return t.res, err
		}
		switch v := k.Values[k.Now]; {
		case k.Now == was:
		case k.Name != "sm-budget":
			flags = append(flags, errs.Key(k.Name).Flag()+" "+v)
		case !strings.HasSuffix(v, "=all"):
			budgets = append(budgets, v)
		}
	}
	if len(budgets) > 0 {
		flags = append(flags, errs.Key("sm-budget").Flag()+" "+strings.Join(budgets, ","))
	}
	t.res.Batches, t.res.Seconds, t.res.Flags = t.Next()-first, t.Clock()-start,
		strings.Join(flags, " ")
	if len(skipped) > 0 {
		t.res.Skipped = fmt.Sprintf(
			"%d mini-batches of the epoch are too few to measure %s with %d for each value",
			t.N-first, strings.Join(skipped, ", "), t.each)
	}
	return t.res, nil
}

// size trains the first batches, which make buffers and warm caches, and chooses the length of a
// segment by their time.
func (t *Tuner) size(ctx context.Context, knobs []Knob) error {
	warm := min(2, t.limit-t.Next())
	took, err := t.Train(ctx, warm)
	if err != nil {
		return err
	}
	if warm > 0 && took > 0 {
		t.each = int(segmentTime.Seconds() / (took / float64(warm)))
	}
	segments, left := 0, t.limit-t.Next()
	for _, k := range knobs {
		segments += t.level * (len(k.Values) + 1)
	}
	t.each = max(Batches, min(t.each, left/max(segments, 1)))
	if each := took / float64(max(warm, 1)); !t.Exact && each*float64(t.each) < Least.Seconds() &&
		t.each < left {
		t.each = max(t.each, int(Least.Seconds()/max(each, 1e-9))+1)
	}
	return nil
}

// choose measures a knob's values in turns and leaves it at the best.
func (t *Tuner) choose(ctx context.Context, k *Knob) error {
	best := make([]float64, len(k.Values))
	var present []float64
	for round := range t.level {
		order := []int{k.Now}
		for j := 1; j < len(k.Values); j++ {
			order = append(order, (j+k.Now)%len(k.Values))
		}
		if round%2 == 1 {
			slices.Reverse(order[1:])
		}
		for _, i := range append(order, k.Now) {
			if err := k.Set(ctx, i); err != nil {
				return errs.Errorf("tuning %v %s: %w", errs.Key(k.Name), k.Values[i], err)
			}
			took, err := t.Train(ctx, t.each)
			if err != nil {
				return err
			}
			took /= float64(t.each)
			if i == k.Now {
				present = append(present, took)
			}
			if best[i] == 0 || took < best[i] {
				best[i] = took
			}
		}
	}
	was := k.Now
	gain := max(gainLeast, 1-slices.Min(present)/slices.Max(present))
	for i, s := range best {
		if s < best[k.Now] && s < best[was]*(1-gain) {
			k.Now = i
		}
	}
	var parts []string
	for i, v := range k.Values {
		n := t.level * t.each
		if i == was {
			n *= 2
		}
		t.res.Trials = append(t.res.Trials, report.TuneTrial{Setting: k.Name, Value: v, Batches: n,
			Seconds: best[i], Before: i == was, Chosen: i == k.Now})
		parts = append(parts, fmt.Sprintf("%s: %.4g ms", v, 1e3*best[i]))
	}
	why := fmt.Sprintf("none gains more than %.0f%%, so it stays", 100*gain)
	if gain > gainLeast {
		why = fmt.Sprintf("its own times differ by %.0f%%, and none gains more, so it stays",
			100*gain)
	}
	if k.Now != was {
		why = fmt.Sprintf("%.0f%% less than %s", 100*(1-best[k.Now]/best[was]), k.Values[was])
	}
	t.Note("tune %v, time of a mini-batch: %s; takes %s: %s", errs.Key(k.Name),
		strings.Join(parts, ", "), k.Values[k.Now], why)
	if err := k.Set(ctx, k.Now); err != nil {
		return errs.Errorf("tuning %v %s: %w", errs.Key(k.Name), k.Values[k.Now], err)
	}
	return nil
}

// Accumulator merges the reads of several mini-batches.
type Accumulator interface {
	// Shares are the shares of the SSDs' rate that are worth trying, the present one aside; nil:
	// there is nothing to try.
	Shares(all bool) []float64
	// Aim has it aim at one.
	Aim(share float64) error
}

// AccumulatorShares are the values of Accumulator.Shares.
func AccumulatorShares(all bool) []float64 {
	if all {
		return []float64{0.5, 0.7, 0.8, 0.9, 0.95, 0.98}
	}
	return []float64{0.8, 0.95}
}
