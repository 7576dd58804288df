package prepare

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"time"

	"helios/cache"
	"helios/graph"
	"helios/sched/plan"
	"helios/sched/report"
)

// tierCosts are in the order of every device that there is: the tiers' budgets are the user's, so
// none is left empty. PlanCache has the cost of an access on a machine.
var tierCosts = cache.Costs{GPU: 1, CPU: 2, SSD: 3}

// SampledForAuto is the number of batches that are sampled to measure a batch's needs where
// presampling has not.
const SampledForAuto = 8

// Hooks holds what a run adds to choose. Each may be nil.
type Hooks struct {
	// Measure gives the plan.TierSizes that were to be measured once batches have been sampled.
	Measure func(plan.TierSizes, *cache.Hotness) (plan.TierSizes, error)
	// Found hears when finding the hotness began, once it has ended.
	Found func(start time.Time)
}

// Choose finds the rows' hotness where that matters, when a tier has room for some of the rows, and
// gives the hottest rows to the GPU tier and the next to the CPU tier.
func (s *Sampling) Choose(ctx context.Context, b plan.TierSizes, hooks Hooks) (p cache.Placement,
	err error) {
	if b.GPURows+b.CPURows == 0 && !b.Auto {
		return p, nil
	}
	h, err := cache.NewHotness(s.Device, s.Rows)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	if b.Auto || b.GPURows < s.Rows && b.CPURows < s.Rows {
		start := time.Now()
		if err := s.findHotness(ctx, h, b.Auto); err != nil {
			return p, err
		}
		s.PresampleTime += time.Since(start)
		if hooks.Found != nil {
			hooks.Found(start)
		}
	}
	if b.Auto {
		if b, err = hooks.Measure(b, h); err != nil {
			return p, err
		}
	}
	op, cancel := s.OperatorContext(ctx)
	defer cancel()
	return tierCosts.Place(b.GPURows, b.CPURows, func(first, next int64) (cache.Placement, error) {
		return h.Place(op, s.Stream, first, next)
	})
}

// findHotness makes h the rows' hotness by cfg.Hotness: from a file of an earlier run where its key
// is the same, else anew, and then kept for later runs. sizes asks for s.seen, too.
func (s *Sampling) findHotness(ctx context.Context, h *cache.Hotness, sizes bool) error {
	train, err := s.In.HotFrom()
	if err != nil {
		return err
	}
	info := report.HotnessInfo{By: s.Config.Hotness}
	if info.By == "" {
		info.By = plan.HotnessPresample
	}
	switch info.By {
	case plan.HotnessPresample:
		info.Epochs = s.Config.Presample
	case plan.HotnessForesight:
		info.Epochs = min(s.Config.Presample, s.Config.Epochs)
	}
	key, keep := s.hotnessKey(&info, train)
	folder := s.Config.HotnessFolder(s.In.Dataset.Dir())
	if !keep {
		folder = ""
	}
	if saved := s.loadHotness(folder, key, &info); saved != nil {
		err = s.setScores(ctx, h, saved.Scores)
	} else {
		err = s.makeHotness(ctx, h, folder, key, &info, train)
	}
	if err != nil {
		return err
	}
	if sizes && len(s.Seen.HopEnd) == 0 {
		if err := s.PresampleBatches(ctx, train, false, 1, SampledForAuto, nil); err != nil {
			return err
		}
	}
	s.Hotness = &info
	return nil
}

// loadHotness returns the scores that an earlier run has kept in a folder; nil: there are none.
func (s *Sampling) loadHotness(folder string, key cache.HotnessKey,
	info *report.HotnessInfo) *cache.SavedHotness {
	if folder == "" {
		return nil
	}
	saved, path, err := cache.LoadHotness(folder, key)
	switch {
	case err == nil:
		info.Reused, info.File, info.Seconds = true, path, saved.Seconds
		s.Observer.TellNote("hotness: %v", *info)
		s.Seen.addSizes(saved.Nodes, saved.Edges)
		return saved
	case !errors.Is(err, fs.ErrNotExist):
		s.Observer.TellNote("kept hotness cannot be used: %v; it is found anew", err)
	}
	return nil
}

// makeHotness finds the scores and, where there is a folder, keeps them for later runs.
func (s *Sampling) makeHotness(ctx context.Context, h *cache.Hotness, folder string,
	key cache.HotnessKey, info *report.HotnessInfo, train []int64) error {
	start := time.Now()
	scores, err := s.newScores(ctx, h, info, train)
	info.Seconds = time.Since(start).Seconds()
	if err != nil || folder == "" {
		return err
	}
	if scores == nil {
		if scores, err = s.counts(ctx, h); err != nil {
			return err
		}
	}
	info.File, err = cache.SaveHotness(folder, &cache.SavedHotness{Key: key, Scores: scores,
		Seconds: info.Seconds, Nodes: s.Seen.HopEnd, Edges: s.Seen.Edges})
	if err != nil {
		info.File = ""
		s.Observer.TellNote(
			"hotness is not kept for later runs: %v; name a folder that can be written with {hotness-dir}, or off",
			err)
	}
	return nil
}

// addSizes adds what an earlier run has seen.
func (f *Frontier) addSizes(hopEnd, edges []int64) {
	if len(hopEnd) == 0 {
		return
	}
	if f.HopEnd == nil {
		f.HopEnd, f.Edges = make([]int64, len(hopEnd)), make([]int64, len(edges))
	}
	for i, n := range hopEnd {
		f.HopEnd[i] = max(f.HopEnd[i], n)
	}
	for i, n := range edges {
		f.Edges[i] = max(f.Edges[i], n)
	}
}

// hotnessKey returns what hotness by a source depends on; ok is false where it is not worth
// keeping.
func (s *Sampling) hotnessKey(by *report.HotnessInfo, train []int64) (key cache.HotnessKey,
	ok bool) {
	m := s.In.Dataset.Meta
	key = cache.HotnessKey{Source: by.By, Dataset: s.In.Dataset.UUID().String(), Rows: s.Rows,
		Edges: m.Edges}
	if s.In.Seeds != nil {
		defer func() { key.Method += ", of type " + s.schema.Types[s.schema.Seeds].Name }()
	}
	switch by.By {
	case plan.HotnessPresample, plan.HotnessForesight:
		key.Train = cache.HashNodes(train)
		key.Method = "draws by batch"
		if by.By == plan.HotnessForesight {
			key.Method = "the run's own"
			if s.Config.Resamples(by.Epochs) {
				key.Method = fmt.Sprintf("the run's own, sampled as %v",
					s.Config.SampledAs(by.Epochs))
			}
		}
		key.Seed, key.Fanouts, key.Batch, key.Sampler, key.Epochs = s.Config.Seed, s.Config.Fanouts,
			s.Config.Batch, s.Config.Sampler, by.Epochs
		if s.Config.RelationFanouts != "" {
			key.Method += ", " + s.Config.RelationFanouts
		}
		if s.Config.BatchDependency > 1 {
			key.Dependency = s.Config.BatchDependency
		}
		if key.Sampler == "" {
			key.Sampler = graph.Neighbor
		}
	case plan.HotnessPageRank:
		key.Train = cache.HashNodes(train)
		key.Method = "reverse from the training nodes, damping 0.85, 20 iterations"
	case plan.HotnessOutDegree:
	default: // in-degrees are there, and a user's list is a file already
		return key, false
	}
	return key, true
}

// newScores finds hotness by a source. The scores are in h, and also returned where they were in
// memory anyhow.
func (s *Sampling) newScores(ctx context.Context, h *cache.Hotness, info *report.HotnessInfo,
	train []int64) (scores []uint32, err error) {
	by := info.By
	switch by {
	case plan.HotnessPresample:
		return nil, s.PresampleBatches(ctx, train, false, info.Epochs, math.MaxInt, h)
	case plan.HotnessForesight:
		return nil, s.PresampleBatches(ctx, train, true, info.Epochs, math.MaxInt, h)
	}
	workers := s.Device.Info().SMs
	if s.OnGPU() {
		workers = 0
	}
	switch by {
	case plan.HotnessDegree:
		scores = make([]uint32, s.Rows)
		for v := range s.Rows {
			scores[v] = uint32(min(s.Topology.InDegree(v), math.MaxUint32))
		}
	case plan.HotnessOutDegree:
		scores, err = graph.OutDegrees(ctx, s.Topology, workers)
	case plan.HotnessPageRank:
		var rank []float32
		rank, err = graph.ReversePageRank(ctx, s.Topology, graph.PageRankOptions{
			Teleport: s.rowsOf(train), Workers: workers,
			Progress: func(done, total int) { s.Observer.TellStep("pagerank", done, total) },
		})
		scores = cache.HotnessScores(rank)
	default:
		scores, err = readHotList(by, s.Rows)
	}
	if stopped := Interrupted(ctx); stopped != nil {
		return nil, stopped
	}
	if err != nil {
		return nil, fmt.Errorf("hotness by %s: %w", by, err)
	}
	scores = scores[:s.Rows] // of a graph's nodes, the last may have no rows
	return scores, s.setScores(ctx, h, scores)
}

func (s *Sampling) setScores(ctx context.Context, h *cache.Hotness, scores []uint32) error {
	op, cancel := s.OperatorContext(ctx)
	defer cancel()
	return h.Set(op, s.Stream, scores)
}

func (s *Sampling) counts(ctx context.Context, h *cache.Hotness) ([]uint32, error) {
	op, cancel := s.OperatorContext(ctx)
	defer cancel()
	return h.Counts(op, s.Stream)
}

// PresampleBatches samples epochs of their own, or with own the run's from the first on, of each no
// more than so many batches, and adds to h, where given, how often each row is needed.
func (s *Sampling) PresampleBatches(ctx context.Context, train []int64, own bool, epochs, limit int,
	h *cache.Hotness) error {
	mb, err := s.scratchBatch()
	if err != nil {
		return err
	}
	last := len(s.Config.Fanouts)
	n := min(s.Shuffled(train, s.Config.SampleEpoch(0)).Len(), limit)
	done := 0
	for p := range epochs {
		number := PresampleEpoch + p
		if own {
			number = s.Config.SampleEpoch(p)
		}
		order := s.Shuffled(train, number)
		for i := range n {
			if err := Interrupted(ctx); err != nil {
				return err
			}
			if err := s.SampleWhole(ctx, mb, number, order.Index(i), order.Seeds(i)); err != nil {
				return fmt.Errorf("presampling, before the first epoch: %w", err)
			}
			if h != nil {
				if err := h.Add(s.Stream, mb.RowNumbers().Ptr(), mb.RowCount(last)); err != nil {
					return err
				}
			}
			s.Seen.add(mb)
			if s.Presampled != nil {
				s.Presampled(mb)
			}
			done++
			s.Observer.TellStep("presample", done, epochs*n)
		}
	}
	op, cancel := s.OperatorContext(ctx)
	defer cancel()
	return s.Stream.Synchronize(op)
}

// Scores is findHotness to the CPU's memory.
func (s *Sampling) Scores(ctx context.Context) (scores []uint32, err error) {
	h, err := cache.NewHotness(s.Device, s.Rows)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	if err := s.findHotness(ctx, h, false); err != nil {
		return nil, err
	}
	return s.counts(ctx, h)
}
