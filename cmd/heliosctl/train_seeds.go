package main

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
	figures "helios/internal/metrics"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/report"
)

// maxSeeds is the most runs of --seeds.
const maxSeeds = 1000

// parseSeeds reads seeds and ranges of them, as 1..3,7.
func parseSeeds(text string) (seeds []uint64, err error) {
	parts, err := list("seeds", text)
	if err != nil {
		return nil, err
	}
	for _, p := range parts {
		from, to, is := strings.Cut(p, "..")
		if !is {
			to = from
		}
		first, err := strconv.ParseUint(from, 10, 64)
		last, wrong := strconv.ParseUint(to, 10, 64)
		if err != nil || wrong != nil || last < first || last-first >= maxSeeds {
			return nil, errs.New(errs.Usage,
				"{seeds}: %q is neither a seed nor a range of up to %d such as 1..10", p, maxSeeds)
		}
		for s := first; ; s++ {
			if slices.Contains(seeds, s) {
				return nil, errs.New(errs.Usage, "{seeds}: %d is named twice", s)
			}
			if seeds = append(seeds, s); s == last {
				break
			}
		}
	}
	if len(seeds) > maxSeeds {
		return nil, errs.New(errs.Usage, "{seeds} names %d, and there are at most %d", len(seeds),
			maxSeeds)
	}
	return seeds, nil
}

// seedsResult has the figures of the runs of several seeds.
type seedsResult struct {
	Seeds []uint64 `json:"seeds"` // of the runs that came to their end
	// Figures of these runs, by their means.
	Figures []seedsFigure `json:"figures"`
}

// seedsFigure is a figure over seeds.
type seedsFigure struct {
	Name string  `json:"name"`
	Mean float64 `json:"mean"`
	// Deviation is that of a sample (by one less than the runs); absent for one run.
	Deviation *float64  `json:"deviation,omitempty"`
	Values    []float64 `json:"values"` // in the order of the seeds
}

func newSeedsFigure(name string, values []float64) seedsFigure {
	f := seedsFigure{Name: name, Values: values}
	n := float64(len(values))
	for _, v := range values {
		f.Mean += v / n
	}
	if n > 1 {
		sum := 0.0
		for _, v := range values {
			sum += (v - f.Mean) * (v - f.Mean)
		}
		sum = math.Sqrt(sum / (n - 1))
		f.Deviation = &sum
	}
	return f
}

// seedsOf sums the runs of several seeds up. A figure that not all of them have is left out.
func seedsOf(runs []*report.Result) seedsResult {
	var r seedsResult
	add := func(name string, of func(*report.Result) *float64) {
		var values []float64
		for _, x := range runs {
			if v := of(x); v != nil {
				values = append(values, *v)
			}
		}
		if len(values) == len(runs) {
			r.Figures = append(r.Figures, newSeedsFigure(name, values))
		}
	}
	for _, x := range runs {
		r.Seeds = append(r.Seeds, x.Seed)
	}
	add("epochs", func(x *report.Result) *float64 {
		n := float64(len(x.Epochs))
		return &n
	})
	last := func(x *report.Result) *report.EpochResult { return &x.Epochs[len(x.Epochs)-1] }
	add("last loss", func(x *report.Result) *float64 { return &last(x).Loss })
	m := figures.Find(runs[0].Metric)
	add("last validation "+m.Name, func(x *report.Result) *float64 { return last(x).Score(m) })
	add("best validation "+m.Name, func(x *report.Result) *float64 {
		return x.Epochs[x.BestEpoch-1].Score(m)
	})
	add("test accuracy", func(x *report.Result) *float64 { return x.TestAcc })
	for _, m := range figures.All[1:] {
		add("test "+m.Name, func(x *report.Result) *float64 {
			if x.TestMetrics == nil {
				return nil
			}
			return m.Of(&x.TestMetrics.Summary)
		})
	}
	return r
}

// checkSeeds refuses what several runs can't share.
func (t *trainer) checkSeeds() error {
	if f := t.given(&t.cfg.Seed, &t.timeline, &t.clock, &t.explain, &t.serve); f != "" {
		return errs.New(errs.Usage, "{seeds} and %v together; leave one out", errs.Key(f))
	}
	if err := t.oneProcess(); err != nil {
		return err
	}
	if t.cfg.CheckpointDir == "" || t.cfg.Resume || t.overwrite {
		return nil
	}
	for _, seed := range t.seeds { // before hours of the others
		dir := t.seedConfig(seed).CheckpointDir
		held, err := sched.HeldIn(dir)
		if err == nil && held != nil {
			err = orResume(errs.With(errs.Refused, &sched.HeldError{Dir: dir, Held: held}))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// trainSeeds trains once with each seed. A run that is resumed goes through all of them: those that
// have ended are only tested again.
func (t *trainer) trainSeeds(ctx context.Context) (err error) {
	if err := t.checkSeeds(); err != nil {
		return err
	}
	out, err := t.openResults(t.env)
	if err != nil {
		return err
	}
	defer out.end(&err)
	s, err := openSession(ctx, t.env, &t.runArgs)
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	if t.cfg, err = sched.Choose(ctx, t.cfg, s.Inputs, t.observer()); err != nil {
		return err
	}
	out.begin()
	t.cfg.Run = out.run
	w := newWatch(t)
	w.far.runs = int64(len(t.seeds))
	obs := w.observer()
	obs.Epoch = w.ended
	var runs []*report.Result
	for i, seed := range t.seeds {
		cfg := t.seedConfig(seed)
		w.far.begin(fmt.Sprintf("seed %d", seed), cfg.WithDefaults().Epochs)
		var res *report.Result
		if res, err = sched.Train(ctx, cfg, s.Inputs, obs); err != nil {
			err = errs.Errorf("seed %d (%d of %d are done): %w", seed, i, len(t.seeds), orResume(err))
			if res != nil {
				s.ended(out, &res.IO, err)
			}
			break
		}
		w.far.end(len(t.seeds) - i - 1)
		s.ended(out, &res.IO, nil)
		runs = append(runs, res)
		out.event("seed", res)
		t.ui.Printf("%s", seedLine(res))
	}
	if len(runs) > 0 {
		sum := seedsOf(runs)
		showSeeds(t.env, sum)
		if err == nil {
			out.event("result", sum)
		}
	}
	return err
}

// seedConfig is the configuration of a seed's run, whose checkpoint is in a folder of its own.
func (t *trainer) seedConfig(seed uint64) (cfg plan.Config) {
	cfg = t.cfg
	cfg.Seed, cfg.SeedZero = seed, seed == 0
	if cfg.CheckpointDir != "" {
		cfg.CheckpointDir = filepath.Join(cfg.CheckpointDir, fmt.Sprintf("seed-%d", seed))
	}
	return cfg
}

func seedLine(r *report.Result) string {
	text := fmt.Sprintf("seed %d: %d epochs, last loss %.4f", r.Seed, len(r.Epochs),
		r.Epochs[len(r.Epochs)-1].Loss)
	if r.TestAcc != nil {
		text += fmt.Sprintf(", test %.2f%% at epoch %d", 100**r.TestAcc, r.BestEpoch)
	}
	return text
}

// showSeeds shows a row for each figure.
func showSeeds(e *env, sum seedsResult) {
	var rows [][]string
	for _, f := range sum.Figures {
		least, largest := slices.Min(f.Values), slices.Max(f.Values)
		rows = append(rows, []string{f.Name, figures.Text(&f.Mean), figures.Text(f.Deviation),
			figures.Text(&least), figures.Text(&largest)})
	}
	e.ui.Table([]string{fmt.Sprintf("over %d seeds", len(sum.Seeds)), "mean", "deviation", "least",
		"most"}, rows)
}
