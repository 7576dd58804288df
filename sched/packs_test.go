package sched

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/pages"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
	"helios/sched/packs"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// sampledWays are all that samples depend on.
var sampledWays = []variant{
	{name: "neighbour", set: func(*plan.Config) {}},
	{name: "labor with dependent batches", set: func(c *plan.Config) {
		c.Sampler, c.BatchDependency = graph.Labor, 3
	}},
	{name: "ladies", set: func(c *plan.Config) {
		c.Sampler, c.Fanouts = graph.Ladies, []int{24, 24}
	}},
	{name: "gcn over a topology on storage", set: func(c *plan.Config) {
		c.Model, c.Topology, c.NeighborCache = "gcn", plan.TopologySSD, percent(20)
	}},
	{name: "all neighbours", set: func(c *plan.Config) { c.Fanouts = []int{-1, 2} }},
}

// openSampling is a run's, on a device that it closes.
func openSampling(t *testing.T, dev cuda.Device, d *dataset.Dataset, cfg plan.Config,
	obs report.Observer) *prepare.Sampling {
	t.Helper()
	cfg, err := cfg.Filled()
	require.NoError(t, err)
	s := prepare.New(cfg, prepare.Inputs{Dev: dev, Dataset: d}, obs, d.Meta.RowType())
	require.NoError(t, s.Open(context.Background()))
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, dev.Close(), "streams or buffers were left open")
	})
	return s
}

// requireSampled: what packs have of each epoch of training, restored, is what sampling draws.
func requireSampled(t *testing.T, s *prepare.Sampling, r *packs.Run, d *dataset.Dataset) {
	t.Helper()
	ctx := context.Background()
	train, err := d.Split("train")
	require.NoError(t, err)
	fresh, err := s.NewBatch()
	require.NoError(t, err)
	kept, err := s.NewBatch()
	require.NoError(t, err)
	var stage graph.Stage
	read := func(b cuda.Buffer, n int64) []byte { return readBack(t, s.Device, b, n) }
	for epoch := range s.Config.Epochs {
		p, first, err := r.Find(ctx, epoch)
		require.NoError(t, err)
		r.Ahead(ctx, epoch)
		sample := s.Config.SampleEpoch(epoch)
		order := s.Shuffled(train, sample)
		for i := range order.Len() {
			require.NoError(t, s.SampleWhole(ctx, fresh, sample, i, order.Seeds(i)))
			op, cancel := s.OperatorContext(ctx)
			require.NoError(t, s.Stream.Synchronize(op))
			nodes, err := p.Samples.Read(first+i, nil)
			require.NoError(t, err)
			adj, err := p.Samples.Adj(first+i, nil)
			require.NoError(t, err)
			require.NoError(t, s.Sampler.Restore(op, s.Stream, kept, sample, i, nodes, adj, &stage))
			cancel()
			require.Equal(t, order.Seeds(i), nodes[:fresh.HopEnd[0]])
			require.Equal(t, fresh.HopEnd, kept.HopEnd)
			n := fresh.HopEnd[len(fresh.HopEnd)-1]
			require.Equal(t, nodes, append([]int64{},
				hostmem.View[int64](read(fresh.Nodes, 8*n))...))
			require.Equal(t, read(fresh.Nodes, 8*n), read(kept.Nodes, 8*n))
			if fresh.Degrees != nil {
				require.Equal(t, read(fresh.Degrees, 4*n), read(kept.Degrees, 4*n))
			}
			for h := range fresh.Blocks {
				a, b := &fresh.Blocks[h], &kept.Blocks[h]
				require.Equal(t, []int64{a.NumDst, a.NumSrc, a.NumEdges},
					[]int64{b.NumDst, b.NumSrc, b.NumEdges})
				require.Equal(t, read(a.Indptr, 8*(a.NumDst+1)), read(b.Indptr, 8*(b.NumDst+1)))
				require.Equal(t, read(a.Src, 4*a.NumEdges), read(b.Src, 4*b.NumEdges))
				if a.Weights != nil {
					require.Equal(t, read(a.Weights, 4*a.NumSrc), read(b.Weights, 4*b.NumSrc))
				}
			}
		}
	}
	require.NoError(t, stage.Close())
}

// Packs hold what sampling draws, to the bit, with every sampler; refreshed ones too, whether they
// are made in their turn or while others train.
func TestPacksHoldWhatSamplingDraws(t *testing.T) {
	d := tiny.generate(t)
	for i, v := range sampledWays {
		if wide.Lean() && i > 2 {
			break
		}
		t.Run(v.name, func(t *testing.T) {
			cfg := small()
			cfg.Epochs, cfg.SampleEpochs, cfg.Refresh, cfg.RefreshEvery = 5, 2, 1, 1+i%2
			v.set(&cfg)
			dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
			require.NoError(t, err)
			s := openSampling(t, dev, d, cfg, report.Observer{})
			r, err := packs.Start(s, packs.Options{Dir: filepath.Join(t.TempDir(), "p"),
				Hot: 100, Segment: 3, Pages: pages.InFolder{}})
			require.NoError(t, err)
			requireSampled(t, s, r, d)
			p, first, err := r.Find(context.Background(), 4)
			require.NoError(t, err)
			require.Equal(t, cfg.SampleEpoch(4), p.Entry.First+first/prepare.Batches(
				len(trainSplit(t, d)), cfg.Batch))
			require.NoError(t, r.Close())
		})
	}
}

func trainSplit(t *testing.T, d *dataset.Dataset) []int64 {
	train, err := d.Split("train")
	require.NoError(t, err)
	return train
}

// A run that is stopped while it samples, plans or packs ends as interrupted, and the next one goes
// on.
func TestPacksAreInterrupted(t *testing.T) {
	d := tiny.generate(t)
	dir := filepath.Join(t.TempDir(), "p")
	done := 0
	for stop := 2; ; stop += 9 {
		ctx, cancel := context.WithCancel(context.Background())
		heard, began := 0, -1
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		cfg := small()
		cfg.SampleEpochs, cfg.Epochs = 3, 3
		s := openSampling(t, dev, d, cfg, report.Observer{Step: func(stage string, at, _ int) {
			if stage == packs.PhaseSample && began < 0 {
				began = at
			}
			if heard++; heard == stop {
				cancel()
			}
		}})
		r, err := packs.Start(s, packs.Options{Dir: dir, Hot: 10, Segment: 2,
			Pages: pages.InFolder{}})
		require.NoError(t, err)
		_, _, err = r.Find(ctx, 0)
		cancel()
		if err == nil {
			requireSampled(t, s, r, d)
			require.NoError(t, r.Close())
			break
		}
		require.Equal(t, errs.Interrupted, errs.ClassOf(err), "%v", err)
		if began >= 0 {
			require.Equal(t, done+1, began, "it goes on where it was")
			done += stop
			done = min(done, 3*prepare.Batches(len(trainSplit(t, d)), cfg.Batch))
		}
		require.NoError(t, r.Close())
	}
	require.Positive(t, done)
}
