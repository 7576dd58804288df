package sched

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/diskgnn"
	diskgnnspec "helios/sched/tiers/diskgnn/spec"
)

// packedWays are mini-batches that were laid out beforehand: every stack, every pipeline that takes
// them, tiers of one and both, segments of several lengths, samples that train again.
var packedWays = []variant{
	{"diskgnn", func(c *plan.Config) {
		c.Mode, c.GPUCache, c.CPUCache = diskgnn.ModeDiskGNN, percent(5), percent(10)
	}, 2, 2},
	{"async", func(c *plan.Config) { c.IOStack = gpuio.StackAsync }, 2, 4},
	{"sync, series", func(c *plan.Config) {
		c.IOStack, c.Pipeline = gpuio.StackSync, plan.PipelineSeries
	}, 2, 1},
	{"mmap, none", func(c *plan.Config) {
		c.IOStack, c.Pipeline = gpuio.StackMmap, plan.PipelineNone
	}, 1, 2},
	{"CPU tier alone, segments of 3", func(c *plan.Config) {
		c.GPUCache, c.CPUCache, c.Segment = plan.NoCache(), percent(20), 3
		c.DiskBudget = diskgnnspec.DiskBudget{Times: 10}
	}, 2, 2},
	{"no tier, checked", func(c *plan.Config) {
		c.GPUCache, c.CPUCache, c.CheckReads = plan.NoCache(), plan.NoCache(), plan.ChecksOn
	}, 2, 2},
	{"async, none, checked, 5x", func(c *plan.Config) {
		c.IOStack, c.Pipeline, c.CheckReads = gpuio.StackAsync, plan.PipelineNone, plan.ChecksOn
		c.DiskBudget = diskgnnspec.DiskBudget{Times: 5}
	}, 2, 2},
	{"everything fits", func(c *plan.Config) { c.CPUCache = percent(95) }, 2, 2},
}

// onPacked is small under mode diskgnn.
func onPacked(t testing.TB) plan.Config {
	cfg := small()
	cfg.Mode, cfg.GPUCache, cfg.CPUCache = diskgnn.ModeDiskGNN, percent(5), percent(10)
	cfg.PackedDir = filepath.Join(t.TempDir(), "p")
	return cfg
}

// Every way gives the batches, rows and losses of static tiers, the first time and from what that
// left.
func TestPackedTiers(t *testing.T) {
	for n, g := range []graphSpec{tiny, dense, padded} {
		d, feat := g.open(t)
		sets := map[int]*ssdSet{1: bind(t, d, 1, ""), 2: bind(t, d, 2, ""), 4: bind(t, d, 4, "")}
		cfg := small()
		caches(0, 10)(&cfg)
		static := train(t, context.Background(), cfg, d, feat, sets[2], 2, report.Observer{})
		require.NoError(t, static.err)
		for i, v := range packedWays {
			if n > 0 && i%3 != n-1 || wide.Lean() && i > 1 {
				continue
			}
			cfg := onPacked(t)
			v.set(&cfg)
			for _, again := range []bool{false, true} {
				r := train(t, context.Background(), cfg, d, feat, sets[v.ssds], v.workers,
					report.Observer{})
				require.NoError(t, r.err, v.name)
				require.Equal(t, static.blocks, r.blocks, v.name)
				require.Equal(t, static.seen, r.seen, v.name)
				require.Equal(t, static.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
				require.Equal(t, static.res.TestAcc, r.res.TestAcc, v.name)
				p := r.res.Packed
				require.NotNil(t, p, v.name)
				require.Equal(t, again, p.Reused, v.name)
				require.Equal(t, cfg.Epochs, p.SampleEpochs, v.name)
				require.Positive(t, p.Seconds, v.name)
				var gpu, cpu, ssd, chunk int64
				for e, x := range r.res.Epochs {
					was := static.res.Epochs[e]
					require.Equal(t, was.Loss, x.Loss, v.name)
					require.Equal(t, was.RowsCPU+was.RowsSSD, x.RowsGPU+x.RowsCPU+x.RowsSSD, v.name)
					gpu, cpu, ssd, chunk = gpu+x.RowsGPU, cpu+x.RowsCPU, ssd+x.RowsSSD,
						chunk+x.RowsChunk
				}
				require.Equal(t, []int64{p.AccessesMemory, p.AccessesDiskCache, p.AccessesChunks},
					[]int64{gpu + cpu, ssd - chunk, chunk}, v.name)
			}
		}
	}
}

// Samples that train again, and samples that give way to new ones, are those of every mode.
func TestPackedSampleEpochs(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for _, refresh := range []int{0, 1} {
		cfg := small()
		cfg.Epochs, cfg.SampleEpochs, cfg.Refresh = 5, 2, refresh
		want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, want.err)
		p := onPacked(t)
		p.Epochs, p.SampleEpochs, p.Refresh = 5, 2, refresh
		r := train(t, context.Background(), p, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.Equal(t, want.blocks, r.blocks)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
		require.Equal(t, 2+refresh, r.res.Packed.SampleEpochs)
	}
}

// So it is with every model and every way to sample.
func TestPackedModelsAndSamplers(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for i, v := range []struct {
		model, sampler string
		fanouts        []int
	}{
		{"gcn", graph.Neighbor, []int{-1, 2}}, {"gat", graph.Labor, []int{4, 3}},
		{"gin", graph.Ladies, []int{60, 40}}, {"sage", graph.Labor, []int{3, 3, 2}},
	} {
		if wide.Lean() && i > 1 {
			break
		}
		set := func(c *plan.Config) {
			c.Model, c.Sampler, c.Fanouts, c.Epochs = v.model, v.sampler, v.fanouts, 2
			c.SampleEpochs = 1
		}
		cfg := small()
		set(&cfg)
		want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, want.err)
		p := onPacked(t)
		set(&p)
		r := train(t, context.Background(), p, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err, v.model)
		require.Equal(t, want.blocks, r.blocks, v.model)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, v.model)
	}
}

// A run that is interrupted, in preparing or in training, goes on to the same parameters.
func TestPackedGoesOn(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	want := train(t, context.Background(), small(), d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	cfg := onPacked(t)
	cfg.CheckpointDir, cfg.Resume, cfg.Segment = t.TempDir(), true, 12
	r, runs := trainInPieces(t, 3, 7, cfg, d, feat, s)
	require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
	require.Greater(t, runs, 3)
}

// Pages for other options, or for more memory, are refused with the difference; so is a page that
// has changed.
func TestPackedRefuses(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := onPacked(t)
	run := func(c plan.Config) error {
		return train(t, context.Background(), c, d, feat, s, 2, report.Observer{}).err
	}
	require.NoError(t, run(cfg))
	for want, set := range map[string]func(*plan.Config){
		"option batch-size": func(c *plan.Config) { c.Batch = 100 },
		"option fanout":     func(c *plan.Config) { c.Fanouts = []int{3, 3} },
		"option seed":       func(c *plan.Config) { c.Seed = 8 },
		"option sampler":    func(c *plan.Config) { c.Sampler = graph.Labor },
		"option segment":    func(c *plan.Config) { c.Segment = 4 },
		"option disk-budget": func(c *plan.Config) {
			c.DiskBudget = diskgnnspec.DiskBudget{Bytes: 1 << 30}
		},
		"option sample-epochs": func(c *plan.Config) { c.SampleEpochs = 1 },
		"have room for 0": func(c *plan.Config) {
			c.GPUCache, c.CPUCache = plan.NoCache(), plan.NoCache()
		},
		"option pipeline deep":          func(c *plan.Config) { c.Pipeline = plan.DefaultPipeline },
		"option policy lru":             func(c *plan.Config) { c.Policy = "lru" },
		"option window 3":               func(c *plan.Config) { c.Window = 3 },
		"option gpu-cache auto":         func(c *plan.Config) { c.GPUCacheAuto = true },
		"leave option hotness, option ": func(c *plan.Config) { c.Hotness = plan.HotnessDegree },
	} {
		c := cfg
		set(&c)
		require.ErrorContains(t, run(c), want)
	}
	more := cfg
	more.CPUCache = percent(50) // more than was prepared for
	require.NoError(t, run(more))

	dirs, err := filepath.Glob(filepath.Join(cfg.PackedDir, "*", "pages"))
	require.NoError(t, err)
	require.Len(t, dirs, 1)
	f, err := os.OpenFile(dirs[0], os.O_RDWR, 0)
	require.NoError(t, err)
	st, err := f.Stat()
	require.NoError(t, err)
	b := make([]byte, 1)
	for pos := int64(100); pos < st.Size(); pos += 4096 { // each page, so that all are met
		_, err = f.ReadAt(b, pos)
		require.NoError(t, err)
		b[0] ^= 4
		_, err = f.WriteAt(b, pos)
		require.NoError(t, err)
	}
	require.NoError(t, f.Close())
	c := cfg
	c.CheckReads = plan.ChecksOn
	r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
	require.Error(t, r.err)
	require.Equal(t, errs.Device, errs.ClassOf(r.err), "%v", r.err)
	require.ErrorContains(t, r.err, "pages")
}
