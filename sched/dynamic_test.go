package sched

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/cuda"
	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
	"helios/internal/units"
	"helios/nvme"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/dynamic"
	dynamicspec "helios/sched/tiers/dynamic/spec"
	"helios/sched/tiers/static"
)

// dyn is a configuration with a dynamic GPU tier.
func dyn(pol string, line int64, f func(*plan.Config)) func(*plan.Config) {
	return func(c *plan.Config) {
		c.Policy, c.CacheLine, c.GPUCache = pol, line, percent(10)
		if f != nil {
			f(c)
		}
	}
}

// dynamicWays is every policy, both kinds of lines, every pipeline, window and accumulator, on
// several stacks.
var dynamicWays = []variant{
	{"bam", func(c *plan.Config) { c.Mode, c.GPUCache = dynamic.ModeBaM, percent(10) }, 2, 2},
	{"gids",
		func(
			c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache = dynamic.ModeGIDS, percent(10), percent(10)
		}, 2, 2},
	{"lru deep by rows", dyn(policy.LRU, dynamicspec.LineRow, nil), 2, 4},
	{"sieve deep lines window", dyn(policy.Sieve, 4096, func(c *plan.Config) { c.Window = 2 }), 2,
		4},
	{"clock prefetch accumulated", dyn(policy.Clock, dynamicspec.LineRow, func(c *plan.Config) {
		c.Pipeline, c.IOStack, c.Accumulate, c.CPUCache = plan.PipelinePrefetch, gpuio.StackSync,
			0.5, percent(5)
	}), 2, 1},
	{"s3fifo series window accumulated cpu", dyn(policy.S3FIFO, 2048, func(c *plan.Config) {
		c.Pipeline, c.IOStack, c.Accumulate, c.Window = plan.PipelineSeries, gpuio.StackCPU, 0.9, 3
	}), 1, 4},
	{"gids in sets", func(c *plan.Config) {
		c.Mode, c.GPUCache, c.CPUCache = dynamic.ModeGIDS, percent(10), percent(10)
		c.Directory = policy.InSets
	}, 2, 2},
	{"s3fifo in sets deep window", dyn(policy.S3FIFO, dynamicspec.LineRow, func(c *plan.Config) {
		c.Window, c.Directory = 2, policy.InSets
	}), 2, 4},
	// The rest only in long tests.
	{"random run-ahead window alone", dyn(policy.Random, dynamicspec.LineRow,
		func(c *plan.Config) { c.Pipeline, c.Window = plan.PipelineRunAhead, 16 }), 2, 4},
	{"lru intra mmap",
		dyn(policy.LRU, 4096,
			func(c *plan.Config) { c.Pipeline, c.IOStack = plan.PipelineIntra, gpuio.StackMmap }),
		2, 1},
	{"no slot",
		dyn(policy.LRU, 4096, func(c *plan.Config) { c.GPUCache = percent(0); c.Window = 1 }), 2,
		2},
	{"all of it", dyn(policy.Sieve, dynamicspec.LineRow,
		func(c *plan.Config) { c.GPUCache = percent(100) }), 2, 2},
	{"series static", func(c *plan.Config) { c.Pipeline = plan.PipelineSeries; caches(5, 10)(c) },
		2, 2},
	{"bam accumulated", func(c *plan.Config) {
		c.Mode, c.GPUCache, c.Accumulate, c.Pipeline = dynamic.ModeBaM, percent(10), 0.95,
			plan.PipelineRunAhead
	}, 2, 2},
	{"bam checked", func(c *plan.Config) {
		c.Mode, c.GPUCache, c.CPUCache, c.CheckReads = dynamic.ModeBaM, percent(10), percent(5),
			plan.ChecksOn
	}, 2, 2},
	{"gids without its parts", func(c *plan.Config) {
		c.Mode, c.GPUCache, c.Window, c.Accumulate = dynamic.ModeGIDS, percent(5), plan.Off,
			plan.Off
	}, 2, 2},
}

// Same seed, same losses, whatever the tier's policy, lines, window and pipeline.
// TestVirtualCountsOfDynamicTiers holds the counters against those of a model.
func TestSameParametersByDynamicTiers(t *testing.T) {
	ways := append([]variant{{"static", caches(10, 10), 2, 2}, {"nothing cached", caches(0, 0), 2,
		2}}, dynamicWays...)
	for n, g := range []graphSpec{tiny, dense, padded} {
		d, feat := g.open(t)
		sets := map[int]*ssdSet{1: bind(t, d, 1, ""), 2: bind(t, d, 2, ""), 4: bind(t, d, 4, "")}
		var first record
		for i, v := range ways {
			// tiny has all, the others a third each
			if i > 0 && n > 0 && i%3 != n || wide.Lean() && i > 6 {
				continue
			}
			cfg := small()
			v.set(&cfg)
			r := train(t, context.Background(), cfg, d, feat, sets[v.ssds], v.workers,
				report.Observer{})
			require.NoError(t, r.err, v.name)
			if i == 0 {
				first = r
			}
			require.Equal(t, first.blocks, r.blocks, v.name)
			require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
			for e, x := range r.res.Epochs {
				require.Equal(t, first.res.Epochs[e].Loss, x.Loss, v.name)
				require.Equal(t, first.res.Epochs[e].ValAcc, x.ValAcc, v.name)
			}
			e := r.res.Epochs[1]
			t.Logf("%s: hits %.3f, lines of %d, %d groups of %.1f", v.name, e.HitRatio,
				r.res.CacheLineBytes, e.ReadGroups, e.GroupBatches)
		}
	}
}

// A read that cannot be healed ends the run with class Device, whatever merges and stages it, and
// leaves nothing behind.
func TestFaultsInDynamicTiers(t *testing.T) {
	d, feat := tiny.open(t)
	for i, v := range dynamicWays[:4] {
		if wide.Lean() && i%2 == 0 {
			continue
		}
		s := bind(t, d, 2, "error(op=read,sct=2,sc=0x81,dnr=1,after=700)")
		before := testrig.Held(t)
		cfg := small()
		v.set(&cfg)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.Error(t, r.err, v.name)
		require.Equal(t, errs.Device, errs.ClassOf(r.err), "%s: %v", v.name, r.err)
		var st *nvme.StatusError
		require.ErrorAs(t, r.err, &st, v.name)
		before.Leaked(t, "topology")
	}
}

// Stopped in the middle of an epoch and resumed under another policy: the parameters are those of
// an undisturbed run.
func TestResumeWithDynamicTiers(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	want := train(t, context.Background(), small(), d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	dir := t.TempDir()
	for i, v := range append(slices.Clone(dynamicWays[:5]),
		variant{name: "static", set: func(*plan.Config) {}}) {
		cfg := small()
		v.set(&cfg)
		cfg.CheckpointDir, cfg.Resume = dir, true
		ctx, cancel := context.WithCancel(context.Background())
		steps := 0
		r := train(t, ctx, cfg, d, feat, s, 2,
			report.Observer{Step: func(stage string, done, total int) {
				if strings.HasPrefix(stage, "epoch") {
					if steps++; steps == 2 && i < 5 {
						cancel()
					}
				}
			}})
		cancel()
		if i < 5 {
			require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%s: %v", v.name, r.err)
			continue
		}
		require.NoError(t, r.err)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
	}
}

// An epoch walked in pieces, drained between, has the counts of one that is not: the window looks
// beyond a piece's end.
func TestPiecesOfAPass(t *testing.T) {
	d, _ := tiny.open(t)
	s := bind(t, d, 2, "")
	for _, v := range dynamicWays[:5] {
		var got []report.EpochResult
		for _, step := range []int{0, 1, 2} {
			dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
			require.NoError(t, err)
			cfg := small()
			cfg.Batch = 64
			v.set(&cfg)
			cfg = cfg.WithDefaults()
			require.NoError(t, cfg.Check())
			ctx := context.Background()
			in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
			print, err := fingerprintOf(cfg, in, report.Observer{})
			require.NoError(t, err)
			e, err := newRunner(ctx, cfg, in, report.Observer{},
				print.modelConfig())
			require.NoError(t, err)
			train, err := d.Split("train")
			require.NoError(t, err)
			p := &engine.Pass{Name: "pieces", Order: prepare.NewOrder(train, cfg.Batch),
				Sampler: e.Sampler,
				Step: func(context.Context, *engine.Slot) (engine.Outcome,
					error) {
					return engine.Outcome{}, nil
				}}
			for p.End = step; ; p.End += step {
				require.NoError(t, e.Run(ctx, p))
				if p.First == p.Batches {
					break
				}
			}
			r := e.Snapshot(p, report.Partial{}).Result(0, e.RowBytes)
			require.Equal(t, p.Batches, r.Batches)
			got = append(got, report.EpochResult{RowsGPU: r.RowsGPU, RowsCPU: r.RowsCPU,
				RowsSSD:       r.RowsSSD,
				LinesInserted: r.LinesInserted, LinesEvicted: r.LinesEvicted,
				LinesBypassed: r.LinesBypassed})
			require.NoError(t, e.Close())
			require.NoError(t, dev.Close())
		}
		require.Equal(t, got[0], got[1], v.name)
		require.Equal(t, got[0], got[2], v.name)
		require.Positive(t, got[0].LinesInserted, v.name)
	}
}

// The target follows from the measured reads and their times, and a note says that memory bounds
// it.
func TestAccumulatorAims(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Mode, cfg.GPUCache, cfg.CPUCache, cfg.Batch, cfg.Epochs = dynamic.ModeGIDS, percent(5),
		percent(10), 16, 1
	var notes []string
	r := train(t, context.Background(), cfg, d, feat, s, 2,
		report.Observer{Note: func(n errs.Text) { notes = append(notes, n.String()) }})
	require.NoError(t, r.err)
	a := r.res.Accumulator
	require.NotNil(t, a)
	require.Equal(t, 0.95, a.Share)
	require.Equal(t, plan.MaxGroup, a.MaxBatches)
	require.Positive(t, a.IOPS)
	require.InDelta(t, a.OverheadSeconds, a.InitiateSeconds+a.TerminateSeconds, 1e-12)
	if a.Capped == "" {
		require.InDelta(t, 2*0.95*a.IOPS*a.OverheadSeconds/0.05, a.Target, 1)
	}
	require.Contains(t, strings.Join(notes, "\n"), "accumulator: ")
	e := r.res.Epochs[0]
	require.Positive(t, e.ReadGroups)
	require.InDelta(t, e.Batches, e.GroupBatches*float64(e.ReadGroups), 1e-6)
	require.Equal(t, int64(4096), r.res.CacheLineBytes)
	require.Equal(t, dynamic.GIDSWindow, r.res.Window)
	require.Positive(t, r.res.PolicyBytes)
}

// Layer-wise sampling is another batching with losses of its own, the same by every tier, window
// and pipeline.
func TestLadiesEveryWay(t *testing.T) {
	d, feat := tiny.open(t)
	sets := map[int]*ssdSet{1: bind(t, d, 1, ""), 2: bind(t, d, 2, ""), 4: bind(t, d, 4, "")}
	ladies := func(c *plan.Config) { c.Sampler, c.Fanouts = graph.Ladies, []int{200, 150} }
	for _, model := range []string{"sage", "gcn"} {
		cfg := small()
		ladies(&cfg)
		cfg.Model, cfg.CPUCache = model, percent(10)
		first := train(t, context.Background(), cfg, d, feat, sets[2], 2, report.Observer{})
		require.NoError(t, first.err)
		require.Less(t, first.res.Epochs[1].Loss, first.res.Epochs[0].Loss, "the loss fell")
		other := cfg
		other.Sampler, other.Fanouts = "", []int{4, 3}
		r := train(t, context.Background(), other, d, feat, sets[2], 2, report.Observer{})
		require.NoError(t, r.err)
		require.NotEqual(t, first.res.ParamsSHA256, r.res.ParamsSHA256)
		for i, v := range dynamicWays {
			if i > 5 || (wide.Lean() || model == "gcn") && i != 1 && i != 3 {
				continue
			}
			cfg := small()
			v.set(&cfg)
			ladies(&cfg)
			cfg.Model = model
			r := train(t, context.Background(), cfg, d, feat, sets[v.ssds], v.workers,
				report.Observer{})
			require.NoError(t, r.err, v.name)
			require.Equal(t, first.blocks, r.blocks, v.name)
			require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
			require.Equal(t, graph.Ladies, r.res.Sampler)
		}
		if wide.Lean() {
			break
		}
	}
}

// LABOR, and batches that share draws, too: in every mode, with the topology on storage, and after
// an interruption the results are those of one run.
func TestLaborEveryWay(t *testing.T) {
	d, feat := tiny.open(t)
	sets := map[int]*ssdSet{}
	labor := func(c *plan.Config) { c.Sampler, c.BatchDependency = graph.Labor, 4 }
	for _, model := range gnn.Archs() {
		var first record
		seen := map[string]bool{}
		for _, v := range slices.Concat(sameWays, dynamicWays, plannedWays, packedWays, megaWays) {
			cfg := small()
			v.set(&cfg)
			labor(&cfg)
			cfg.Model = model
			if seen[cfg.Mode] {
				continue
			}
			seen[cfg.Mode] = true
			if sets[v.ssds] == nil {
				sets[v.ssds] = bind(t, d, v.ssds, "")
			}
			if cfg.Mode == static.ModeCPU {
				cfg.Topology, cfg.NeighborCache = plan.TopologySSD, percent(20)
			}
			r := train(t, context.Background(), cfg, d, feat, sets[v.ssds], v.workers,
				report.Observer{})
			require.NoError(t, r.err, v.name)
			require.Equal(t, graph.Labor, r.res.Sampler)
			require.Equal(t, 4, r.res.BatchDependency)
			if first.res == nil {
				first = r
				require.Less(t, r.res.Epochs[1].Loss, r.res.Epochs[0].Loss, "the loss fell")
				require.Greater(t, *r.res.TestAcc, 0.3, "better than one in five")
				continue
			}
			require.Equal(t, first.blocks, r.blocks, v.name)
			require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
			require.Equal(t, first.res.TestAcc, r.res.TestAcc, v.name)
		}
		require.Len(t, seen, len(tiers.Catalog.Names()))
		cfg := small()
		cfg.Model, cfg.Sampler = model, graph.Labor
		r := train(t, context.Background(), cfg, d, feat, sets[2], 2, report.Observer{})
		require.NoError(t, r.err)
		require.NotEqual(t, first.res.ParamsSHA256, r.res.ParamsSHA256, "batches of their own")
		if wide.Lean() {
			break
		}
	}
}

// Reads that are tried again leave no torn line behind: the rows, the parameters and where rows
// came from are those of a run without faults.
func TestFaultsThatHealInDynamicTiers(t *testing.T) {
	d, feat := tiny.open(t)
	clean := train(t, context.Background(), small(), d, feat, bind(t, d, 2, ""), 2,
		report.Observer{})
	require.NoError(t, clean.err)
	for i, fault := range []string{"error(op=read,sct=2,sc=0x81,times=3,after=900)",
		"late(op=read,ms=700,times=1,after=900)"} {
		if wide.Lean() && i > 0 {
			break
		}
		for _, v := range []variant{dynamicWays[1], dynamicWays[3]} {
			s := bind(t, d, 2, fault)
			cfg := small()
			v.set(&cfg)
			cfg.ReadTimeout, cfg.ReadRetries = 300*time.Millisecond, 4
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, r.err, v.name)
			require.Equal(t, clean.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
			retries := int64(0)
			for _, x := range r.res.IO.SSDs {
				retries += x.Retries
			}
			require.Positive(t, retries, "%s: the fault struck", v.name)
			model := playVirtual(t, cfg, d, "a100-optane", 2)
			for i, e := range r.res.Epochs {
				m := model.Epochs[i]
				require.Equal(t, []int64{m.RowsGPU, m.RowsCPU, m.RowsSSD, m.LinesInserted},
					[]int64{e.RowsGPU, e.RowsCPU, e.RowsSSD, e.LinesInserted}, v.name)
			}
		}
	}
}

// Lines of another size than was asked for, and a tier without room for one, are said.
func TestLinesAreTold(t *testing.T) {
	d, feat := dense.open(t)
	cfg := small()
	cfg.Policy, cfg.CacheLine, cfg.GPUCache, cfg.Epochs, cfg.NoEval = policy.LRU, 4096,
		units.Budget{Bytes: 500}, 1, true
	var notes []string
	r := train(t, context.Background(), cfg, d, feat, bind(t, d, 1, ""), 1,
		report.Observer{Note: func(n errs.Text) { notes = append(notes, n.String()) }})
	require.NoError(t, r.err)
	require.Equal(t, int64(512), r.res.CacheLineBytes)
	require.Zero(t, r.res.GPUCacheBytes)
	all := strings.Join(notes, "\n")
	require.Contains(t, all,
		"cache lines: 512 B in place of 4 KiB: lines are whole rows of 80 bytes")
	require.Contains(t, all,
		"the GPU tier of 480 B has no room for a line of 512 B, so policy lru keeps nothing")
}
