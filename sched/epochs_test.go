package sched

import (
	"context"
	"crypto/sha256"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// sampledBy has each epoch's mini-batches hashed: frontiers in their order.
func sampledBy(cfg *plan.Config) func() [][32]byte {
	var all [][]byte
	cfg.OnBatch = func(epoch, _ int, mb *graph.MiniBatch) {
		for len(all) <= epoch {
			all = append(all, nil)
		}
		n := mb.HopEnd[len(mb.HopEnd)-1]
		all[epoch] = append(all[epoch], hostmem.Bytes(
			hostmem.View[int64](mb.Nodes.Bytes())[:n])...)
	}
	return func() (sums [][32]byte) {
		for _, b := range all {
			sums = append(sums, sha256.Sum256(b))
		}
		return sums
	}
}

// With sample epochs every mode trains on the mini-batches that fresh sampling draws in those
// epochs, and all modes get the same parameters; with as many as there are epochs, those of fresh
// sampling.
func TestSampleEpochsEveryWay(t *testing.T) {
	d, feat := tiny.open(t)
	sets := map[int]*ssdSet{}
	run := func(v variant, set func(*plan.Config)) (record, [][32]byte) {
		if sets[v.ssds] == nil {
			sets[v.ssds] = bind(t, d, v.ssds, "")
		}
		cfg := small()
		cfg.NoEval = true
		v.set(&cfg)
		set(&cfg)
		sums := sampledBy(&cfg)
		r := train(t, context.Background(), cfg, d, feat, sets[v.ssds], v.workers,
			report.Observer{})
		require.NoError(t, r.err, v.name)
		return r, sums()
	}
	fresh, epochs := run(sameWays[0], func(c *plan.Config) { c.Epochs = 6 })
	require.Len(t, epochs, 6)
	require.Len(t, slices.Compact(slices.Clone(epochs)), 6, "no two are the same")
	for _, again := range []struct {
		name string
		set  func(*plan.Config)
		want []int
	}{
		{"two", func(c *plan.Config) { c.SampleEpochs, c.Epochs = 2, 5 }, []int{0, 1, 0, 1, 0}},
		{"two refreshed", func(c *plan.Config) {
			c.SampleEpochs, c.Refresh, c.RefreshEvery, c.Epochs = 2, 1, 1, 5
		}, []int{0, 1, 2, 3, 4}},
		{"three of five refreshed", func(c *plan.Config) {
			c.SampleEpochs, c.Refresh, c.RefreshEvery, c.Epochs = 3, 1, 2, 5
		}, []int{0, 1, 2, 3, 4}},
		{"one refreshed", func(c *plan.Config) {
			c.SampleEpochs, c.Refresh, c.RefreshEvery, c.Epochs = 1, 1, 2, 5
		}, []int{0, 0, 1, 1, 2}},
		{"enough", func(c *plan.Config) { c.SampleEpochs, c.Epochs = 6, 6 },
			[]int{0, 1, 2, 3, 4, 5}},
	} {
		t.Run(again.name, func(t *testing.T) {
			if wide.Lean() && strings.Contains(again.name, "refreshed") &&
				again.name != "one refreshed" {
				t.Skip("one with refreshing is enough")
			}
			var first record
			seen := map[string]bool{}
			for _, v := range slices.Concat(sameWays, dynamicWays, plannedWays) {
				cfg := small()
				v.set(&cfg)
				if wide.Lean() && again.name != "two" && len(seen) > 4 {
					break
				}
				if seen[cfg.Mode] && (!(cfg.Policy == plan.PolicyBelady) || seen[cfg.Policy]) {
					continue
				}
				seen[cfg.Mode], seen[cfg.Policy] = true, true
				r, got := run(v, func(c *plan.Config) {
					again.set(c)
					if c.Mode == static.ModeCPU {
						c.Topology, c.NeighborCache = plan.TopologySSD, percent(20)
					}
				})
				require.Len(t, got, len(again.want), v.name)
				for e, s := range again.want {
					require.Equal(t, epochs[s], got[e], "%s: epoch %d", v.name, e)
				}
				if first.res == nil {
					first = r
					continue
				}
				require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
			}
			require.Equal(t, again.name == "enough",
				fresh.res.ParamsSHA256 == first.res.ParamsSHA256)
			require.Positive(t, first.res.SampleEpochs)
		})
	}
}

// A resumed run keeps its samples, and is another run with other sample epochs.
func TestSampleEpochsGoOn(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	again := func(c *plan.Config) {
		c.NoEval, c.Epochs, c.SampleEpochs, c.Refresh, c.RefreshEvery = true, 5, 2, 1, 2
	}
	cfg := small()
	again(&cfg)
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	cfg.CheckpointDir, cfg.Resume = t.TempDir(), true
	ctx, cancel := context.WithCancel(context.Background())
	r := train(t, ctx, cfg, d, feat, s, 2, report.Observer{Step: func(stage string, done, _ int) {
		if stage == "epoch 4" && done == 2 {
			cancel()
		}
	}})
	cancel()
	require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
	for want, set := range map[string]func(*plan.Config){
		"sample-epochs 2, this run has 3": func(c *plan.Config) { c.SampleEpochs = 3 },
		"refresh 1, this run has 2":       func(c *plan.Config) { c.Refresh = 2 },
		"refresh-every 2, this run has 1": func(c *plan.Config) { c.RefreshEvery = 1 },
	} {
		cfg := cfg
		set(&cfg)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.ErrorContains(t, r.err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	}
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, r.err)
	require.Equal(t, "epoch 4 batch 2", r.res.ResumedAt)
	require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
}

// Foresight counts the epochs that will train: none places better than one that trains for ever.
func TestForesightOfSampleEpochs(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	hits := func(by string, samples int) int64 {
		cfg := small()
		cfg.NoEval, cfg.Epochs, cfg.SampleEpochs = true, 4, samples
		cfg.Hotness, cfg.CPUCache = by, percent(10)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		n := int64(0)
		for _, e := range r.res.Epochs {
			n += e.RowsCPU
		}
		return n
	}
	one := hits(plan.HotnessForesight, 1)
	require.Greater(t, one, hits(plan.HotnessForesight, 0))
	require.Greater(t, one, hits(plan.HotnessPresample, 1))
}
