package sched

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"time"

	"helios/cache"
	"helios/graph"
)

// HotnessOutDegree places rows by how many in-neighbour lists a node stands in, each drawn from as often as the other:
// one pass over the edges. HotnessDegree (in-degree) needs none, and is the same on graphs whose edges go both ways.
const HotnessOutDegree = "out-degree"

// HotnessForesight counts Presample epochs as HotnessPresample does, but the run's own, from the first on (no more than it
// has): samples are a function of the seed, so what is counted is what training will access. Where all epochs are counted
// no static placement has more hits.
const HotnessForesight = "foresight"

// Hotnesses lists the accepted values of Config.Hotness beside the path of a file.
var Hotnesses = []string{HotnessPresample, HotnessDegree, HotnessOutDegree, HotnessPageRank, HotnessForesight}

// HotnessInfo says what placed the static tiers.
type HotnessInfo struct {
	By string `json:"by"` // one of Hotnesses, or the path of the user's list
	// Epochs of sampling that were counted.
	Epochs int `json:"epochs,omitempty"`
	// File is where the scores were found (Reused) or are kept now.
	File   string `json:"file,omitempty"`
	Reused bool   `json:"reused"`
	// Seconds is what finding them took, whenever that was.
	Seconds float64 `json:"seconds"`
}

func (i HotnessInfo) String() string {
	s := i.By
	switch {
	case i.Epochs == 1:
		s += " of 1 epoch"
	case i.Epochs > 1:
		s += fmt.Sprintf(" of %d epochs", i.Epochs)
	}
	switch {
	case i.Reused:
		s += ", reused from " + i.File
	case i.File != "":
		s += ", kept in " + i.File
	}
	return s
}

// tierCosts are in the order of every device that there is: the tiers' budgets are the user's, so none is left empty. What
// an access costs on a machine in figures is for PlanCache.
var tierCosts = cache.Costs{GPU: 1, CPU: 2, SSD: 3}

// sampledForAuto is how many batches are sampled to measure what a batch needs where presampling has not.
const sampledForAuto = 8

// choose finds the rows' hotness where that matters, when a tier has room for some of the rows, and gives the hottest
// rows to the GPU tier and the next to the CPU tier.
func (e *engine) choose(ctx context.Context, b budgets, in Inputs) (p cache.Placement, err error) {
	if b.gpuRows+b.cpuRows == 0 && !b.auto {
		return p, nil
	}
	h, err := cache.NewHotness(e.dev, e.rows)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	found := false
	if b.auto || b.gpuRows < e.rows && b.cpuRows < e.rows {
		found = true
		start := time.Now()
		if err := e.findHotness(ctx, in, h, b.auto); err != nil {
			return p, err
		}
		e.presample += time.Since(start)
		e.trace.run("presample", start)
	}
	if b.auto {
		if b, err = e.measured(b, h); err != nil {
			return p, err
		}
	}
	if e.tracing() && found { // a tier for all rows needs no scores, and a replay must not take zeros for some
		scores, err := e.counts(ctx, h)
		if err == nil {
			err = e.recordScores(scores)
		}
		if err != nil {
			return p, err
		}
	}
	op, cancel := e.opCtx(ctx)
	defer cancel()
	return tierCosts.Place(b.gpuRows, b.cpuRows, func(first, next int64) (cache.Placement, error) {
		return h.Place(op, e.sampleS, first, next)
	})
}

// findHotness makes h the rows' hotness by cfg.Hotness: from a file of an earlier run where its key is the same, else
// anew, and then kept for later runs. sizes asks for e.seen, too.
func (e *engine) findHotness(ctx context.Context, in Inputs, h *cache.Hotness, sizes bool) error {
	train, err := in.Dataset.Split("train")
	if err != nil {
		return err
	}
	info := HotnessInfo{By: e.cfg.Hotness}
	if info.By == "" {
		info.By = HotnessPresample
	}
	switch info.By {
	case HotnessPresample:
		info.Epochs = e.cfg.Presample
	case HotnessForesight:
		info.Epochs = min(e.cfg.Presample, e.cfg.Epochs)
	}
	key, keep := e.hotnessKey(in, &info, train)
	keep = keep && e.cfg.HotnessDir != ""
	var saved *cache.SavedHotness
	if keep {
		var path string
		saved, path, err = cache.LoadHotness(e.cfg.HotnessDir, key)
		switch {
		case err == nil:
			info.Reused, info.File, info.Seconds = true, path, saved.Seconds
			e.obs.note("hotness: " + info.String())
			e.seen.addSizes(saved.Nodes, saved.Edges)
		case errors.Is(err, fs.ErrNotExist):
		default:
			e.obs.note(fmt.Sprintf("kept hotness cannot be used: %v; it is found anew", err))
		}
	}
	start := time.Now()
	if saved != nil {
		if err := e.setScores(ctx, h, saved.Scores); err != nil {
			return err
		}
	} else {
		scores, err := e.newScores(ctx, in, h, &info, train)
		if err != nil {
			return err
		}
		info.Seconds = time.Since(start).Seconds()
		if keep {
			if scores == nil {
				if scores, err = e.counts(ctx, h); err != nil {
					return err
				}
			}
			s := &cache.SavedHotness{Key: key, Scores: scores, Seconds: info.Seconds, Nodes: e.seen.hopEnd, Edges: e.seen.edges}
			path, err := cache.SaveHotness(e.cfg.HotnessDir, s)
			if err != nil {
				e.obs.note(fmt.Sprintf("hotness is not kept for later runs: %v; name a folder that can be written with --hotness-dir, or off", err))
			} else {
				info.File = path
			}
		}
	}
	if sizes && len(e.seen.hopEnd) == 0 {
		if err := e.presampleBatches(ctx, train, false, 1, sampledForAuto, nil); err != nil {
			return err
		}
	}
	e.hotness = &info
	return nil
}

// addSizes adds what an earlier run has seen.
func (f *frontier) addSizes(hopEnd, edges []int64) {
	if len(hopEnd) == 0 {
		return
	}
	if f.hopEnd == nil {
		f.hopEnd, f.edges = make([]int64, len(hopEnd)), make([]int64, len(edges))
	}
	for i, n := range hopEnd {
		f.hopEnd[i] = max(f.hopEnd[i], n)
	}
	for i, n := range edges {
		f.edges[i] = max(f.edges[i], n)
	}
}

// hotnessKey is what hotness by a source depends on; ok is false where it is not worth keeping.
func (e *engine) hotnessKey(in Inputs, by *HotnessInfo, train []int64) (key cache.HotnessKey, ok bool) {
	m := in.Dataset.Meta
	key = cache.HotnessKey{Source: by.By, Dataset: in.Dataset.UUID().String(), Rows: e.rows, Edges: m.Edges}
	switch by.By {
	case HotnessPresample, HotnessForesight:
		key.Train = cache.HashNodes(train)
		key.Method = "draws by batch"
		if by.By == HotnessForesight {
			key.Method = "the run's own"
		}
		key.Seed, key.Fanouts, key.Batch, key.Sampler, key.Epochs = e.cfg.Seed, e.cfg.Fanouts, e.cfg.Batch, e.cfg.Sampler, by.Epochs
		if key.Sampler == "" {
			key.Sampler = SamplerNeighbor
		}
	case HotnessPageRank:
		key.Train = cache.HashNodes(train)
		key.Method = "reverse from the training nodes, damping 0.85, 20 iterations"
	case HotnessOutDegree:
	default: // in-degrees are there, and a user's list is a file already
		return key, false
	}
	return key, true
}

// newScores finds hotness by a source. The scores are in h, and also returned where they were in memory anyhow.
func (e *engine) newScores(ctx context.Context, in Inputs, h *cache.Hotness, info *HotnessInfo, train []int64) (scores []uint32, err error) {
	by := info.By
	switch by {
	case HotnessPresample:
		return nil, e.presampleBatches(ctx, train, false, info.Epochs, math.MaxInt, h)
	case HotnessForesight:
		return nil, e.presampleBatches(ctx, train, true, info.Epochs, math.MaxInt, h)
	}
	workers := e.dev.Info().SMs
	if e.onGPU() {
		workers = 0
	}
	switch by {
	case HotnessDegree:
		scores = make([]uint32, e.rows)
		for v := range e.rows {
			scores[v] = uint32(min(e.topo.InDegree(v), math.MaxUint32))
		}
	case HotnessOutDegree:
		scores, err = graph.OutDegrees(ctx, e.topo, workers)
	case HotnessPageRank:
		var rank []float32
		rank, err = graph.ReversePageRank(ctx, e.topo, graph.PageRankOptions{
			Teleport: train, Workers: workers, Progress: func(done, total int) { e.obs.step("pagerank", done, total) },
		})
		scores = cache.HotnessScores(rank)
	default:
		scores, err = readHotList(by, e.rows)
	}
	if stopped := interrupted(ctx); stopped != nil {
		return nil, stopped
	}
	if err != nil {
		return nil, fmt.Errorf("hotness by %s: %w", by, err)
	}
	return scores, e.setScores(ctx, h, scores)
}

func (e *engine) setScores(ctx context.Context, h *cache.Hotness, scores []uint32) error {
	op, cancel := e.opCtx(ctx)
	defer cancel()
	return h.Set(op, e.sampleS, scores)
}

func (e *engine) counts(ctx context.Context, h *cache.Hotness) ([]uint32, error) {
	op, cancel := e.opCtx(ctx)
	defer cancel()
	return h.Counts(op, e.sampleS)
}

// presampleBatches samples epochs of their own, or with own the run's from the first on, of each no more than so many
// batches, and adds to h, where given, how often each row is needed.
func (e *engine) presampleBatches(ctx context.Context, train []int64, own bool, epochs, most int, h *cache.Hotness) error {
	mb := e.slots[0].mb
	order := make([]int64, len(train))
	last := len(e.cfg.Fanouts)
	n := min(batches(len(train), e.cfg.Batch), most)
	done := 0
	for p := range epochs {
		number := presampleEpoch + p
		if own {
			number = p
		}
		graph.Shuffle(order, train, e.cfg.Seed, number)
		for i := range n {
			if err := interrupted(ctx); err != nil {
				return err
			}
			if err := e.sampleWhole(ctx, mb, number, i, seedsOf(order, i, e.cfg.Batch)); err != nil {
				return fmt.Errorf("presampling, before the first epoch: %w", err)
			}
			if h != nil {
				if err := h.Add(e.sampleS, mb.Nodes.Ptr(), mb.HopEnd[last]); err != nil {
					return err
				}
			}
			e.seen.add(mb)
			if e.presampled != nil {
				e.presampled(mb)
			}
			done++
			e.obs.step("presample", done, epochs*n)
		}
	}
	op, cancel := e.opCtx(ctx)
	defer cancel()
	return e.sampleS.Synchronize(op)
}
