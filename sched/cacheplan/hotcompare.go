// Package cacheplan compares sources of hotness before a run: how well each places rows.
package cacheplan

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// HotnessReport compares sources of hotness by the hits of tiers that each places, in an epoch that
// none of them has seen.
type HotnessReport struct {
	Dataset  string          `json:"dataset"`
	Rows     int64           `json:"rows"`
	Seeds    int             `json:"seeds"` // training nodes
	Fanouts  []int           `json:"fanouts"`
	Batch    int             `json:"batch_size"`
	Sampler  string          `json:"sampler"`
	Accesses int64           `json:"accesses"` // of that epoch
	Met      int64           `json:"rows_met"` // rows that it accesses at all
	Sources  []HotnessSource `json:"sources"`
}

// HotnessSource is one of them.
type HotnessSource struct {
	By      string       `json:"by"`
	Seconds float64      `json:"seconds"` // to find it
	Reused  bool         `json:"reused"`
	Sizes   []HotnessHit `json:"sizes"`
}

// HotnessHit is a tier of one size.
type HotnessHit struct {
	Size string  `json:"size"`
	Rows int64   `json:"rows"`
	Hit  float64 `json:"hit"`
	// Best is the hit ratio of the rows that the epoch accesses most: no static placement has more.
	Best float64 `json:"best"`
	// Gap is Best - Hit in points of a hundred, and OfBest is Hit / Best.
	Gap    float64 `json:"gap_points"`
	OfBest float64 `json:"of_best"`
}

// CompareHotness measures sources (Config.Hotness; "presample:K" counts K epochs) at tiers of some
// sizes on the first epoch of training, which only HotnessForesight samples. It needs no SSDs.
func CompareHotness(ctx context.Context, cfg plan.Config, in prepare.Inputs, sources []string,
	sizes []units.Budget, obs report.Observer) (r *HotnessReport, err error) {
	e, err := prepare.Open(ctx, cfg, in, obs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	train, err := prepare.TrainSplit(in)
	if err != nil {
		return nil, err
	}
	r = &HotnessReport{
		Dataset: in.Dataset.Meta.Name, Rows: e.Rows, Seeds: len(train),
		Fanouts: e.Config.Fanouts, Batch: e.Config.Batch, Sampler: e.Config.Sampler,
	}
	for _, by := range sources { // before the long work
		if _, _, err := presampled(by, 1); err != nil {
			return nil, err
		}
	}
	counts := make([]uint32, e.Rows)
	if r.Accesses, err = e.CountEpoch(ctx, 0, train, counts); err != nil {
		return nil, err
	}
	for _, n := range counts {
		if n > 0 {
			r.Met++
		}
	}
	var cuts []int64
	for _, s := range sizes {
		cuts = append(cuts, min(s.Of(e.Rows*e.RowBytes)/e.RowBytes, e.Rows))
	}
	best := hitsAt(counts, counts, sorted(cuts))
	for _, by := range sources {
		src := HotnessSource{By: by}
		start := time.Now()
		scores := counts // HotnessForesight
		epochs, counted, err := presampled(by, e.Config.Presample)
		switch {
		case err != nil:
			return nil, err
		case counted:
			scores = make([]uint32, e.Rows)
			for p := range epochs {
				if _, err := e.CountEpoch(ctx, prepare.PresampleEpoch+p, train,
					scores); err != nil {
					return nil, err
				}
			}
			src.Seconds = time.Since(start).Seconds()
		case by != plan.HotnessForesight:
			e.Config.Hotness = by
			if scores, err = e.Scores(ctx); err != nil {
				return nil, err
			}
			src.Seconds, src.Reused = e.Hotness.Seconds, e.Hotness.Reused
		}
		hits := hitsAt(scores, counts, sorted(cuts))
		for i, n := range cuts {
			h := HotnessHit{Size: sizes[i].String(), Rows: n}
			h.Hit, h.Best = share(hits[n], r.Accesses), share(best[n], r.Accesses)
			h.Gap, h.OfBest = 100*(h.Best-h.Hit), share(hits[n], best[n])
			src.Sizes = append(src.Sizes, h)
		}
		r.Sources = append(r.Sources, src)
	}
	return r, nil
}

// presampled returns the number of epochs that a source counts, if it is presampling.
func presampled(by string, usual int) (epochs int, ok bool, err error) {
	if by == plan.HotnessPresample {
		return usual, true, nil
	}
	k, ok := strings.CutPrefix(by, plan.HotnessPresample+":")
	if !ok {
		return 0, false, nil
	}
	if epochs, err = strconv.Atoi(k); err != nil || epochs < 1 || epochs > 1<<10 {
		return 0, false, errs.New(errs.Usage, "%s: give 1 to %d epochs", by, 1<<10)
	}
	return epochs, true, nil
}

func share(part, all int64) float64 {
	if all == 0 {
		return 0
	}
	return float64(part) / float64(all)
}
