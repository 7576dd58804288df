package sched

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
	"helios/internal/timeline"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/dynamic"
	dynamicspec "helios/sched/tiers/dynamic/spec"
	"helios/sched/tiers/hier"
	"helios/sched/tiers/static"
)

// variant is a way to run the same training.
type variant struct {
	name    string
	set     func(*plan.Config)
	workers int
	ssds    int
}

func caches(gpu, cpu float64) func(*plan.Config) {
	return func(c *plan.Config) { c.GPUCache, c.CPUCache = percent(gpu), percent(cpu) }
}

func modePipe(mode, pipe string, f func(*plan.Config)) func(*plan.Config) {
	return func(c *plan.Config) {
		c.Mode, c.Pipeline = mode, pipe
		if f != nil {
			f(c)
		}
	}
}

// sameWays is every mode (helios with and without caches) under deep, intra and none, and the
// default pipelines; any two of mode, pipeline, workers and SSDs meet.
var sameWays = []variant{
	{"helios no cache deep", modePipe(static.ModeHelios, plan.DefaultPipeline, nil), 2, 1},
	{"helios caches deep", modePipe(static.ModeHelios, plan.DefaultPipeline, caches(5, 10)), 2, 4},
	{"helios cpu cache none", modePipe(static.ModeHelios, plan.PipelineNone, caches(0, 20)), 1, 1},
	{"inmem deep", modePipe(static.ModeInmem, plan.DefaultPipeline, nil), 2, 4},
	{"cpu prefetch", modePipe(static.ModeCPU, "", caches(0, 10)), 2, 1},
	{"mmap prefetch", modePipe(static.ModeMmap, "", nil), 2, 4},
	{"helios prefetch", modePipe(static.ModeHelios, plan.PipelinePrefetch, caches(1, 1)), 2, 4},
	{"helios sync deep", modePipe(static.ModeHelios, plan.DefaultPipeline,
		func(c *plan.Config) { c.IOStack = gpuio.StackSync }), 2, 2},
	// The rest only in long tests.
	{"helios no cache intra", modePipe(static.ModeHelios, plan.PipelineIntra, nil), 2, 4},
	{"helios no cache none", modePipe(static.ModeHelios, plan.PipelineNone, nil), 2, 4},
	{"helios gpu cache intra", modePipe(static.ModeHelios, plan.PipelineIntra, caches(20, 0)), 1, 1},
	{"helios everything cached", modePipe(static.ModeHelios, plan.DefaultPipeline, caches(50, 60)), 1,
		4},
	{"inmem intra", modePipe(static.ModeInmem, plan.PipelineIntra, nil), 2, 1},
	{"inmem gpu none", modePipe(static.ModeInmem, plan.PipelineNone, caches(30, 0)), 1, 1},
	{"cpu deep", modePipe(static.ModeCPU, plan.DefaultPipeline, caches(0, 10)), 1, 4},
	{"cpu intra", modePipe(static.ModeCPU, plan.PipelineIntra, nil), 2, 4},
	{"cpu none pread", modePipe(static.ModeCPU, plan.PipelineNone,
		func(c *plan.Config) { c.CPUEngine = "pread" }), 1, 1},
	{"mmap deep", modePipe(static.ModeMmap, plan.DefaultPipeline, nil), 1, 1},
	{"mmap intra", modePipe(static.ModeMmap, plan.PipelineIntra, nil), 2, 1},
	{"mmap none", modePipe(static.ModeMmap, plan.PipelineNone, caches(0, 5)), 1, 4},
}

// Every mode, pipeline, number of workers and of SSDs gives the same batches, rows and
// parameters: the same seed is the same run.
func TestSameParametersEveryWay(t *testing.T) {
	for _, model := range gnn.Archs() {
		variants := sameWays
		if wide.Lean() {
			variants = sameWays[:6]
		}
		// a way of each mode: the others differ in nothing that a model sees
		if model == "gat" || model == "gin" {
			seen := map[string]bool{}
			variants = slices.DeleteFunc(slices.Clone(variants), func(v variant) bool {
				cfg := small()
				v.set(&cfg)
				had := seen[cfg.Mode]
				seen[cfg.Mode] = true
				return had
			})
		}
		t.Run(model, func(t *testing.T) {
			d, feat := tiny.open(t)
			sets := map[int]*ssdSet{}
			var first record
			for i, v := range variants {
				if sets[v.ssds] == nil {
					sets[v.ssds] = bind(t, d, v.ssds, "")
				}
				cfg := small()
				cfg.Model = model
				v.set(&cfg)
				r := train(t, context.Background(), cfg, d, feat, sets[v.ssds], v.workers,
					report.Observer{})
				require.NoError(t, r.err, v.name)
				check(t, v, cfg, r)
				if i == 0 {
					first = r
					require.Less(t, r.res.Epochs[1].Loss, r.res.Epochs[0].Loss, "the loss fell")
					require.Greater(t, *r.res.TestAcc, 0.3, "better than one in five")
					continue
				}
				require.Equal(t, first.blocks, r.blocks, v.name)
				require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
				require.Equal(t, first.res.TestAcc, r.res.TestAcc, v.name)
				for e := range first.res.Epochs {
					require.Equal(t, first.res.Epochs[e].Loss, r.res.Epochs[e].Loss, v.name)
					require.Equal(t, first.res.Epochs[e].ValAcc, r.res.Epochs[e].ValAcc, v.name)
				}
			}
		})
	}
}

// check holds a result against what its configuration promises.
func check(t *testing.T, v variant, cfg plan.Config, r record) {
	t.Helper()
	res := r.res
	require.Len(t, res.ParamsSHA256, 64)
	require.Len(t, res.Epochs, cfg.Epochs)
	require.Positive(t, r.rows, "rows were compared")
	require.Positive(t, res.PeakMemoryBytes)
	require.Positive(t, res.TopologyBytes)
	require.Equal(t, "proxy", res.MemoryRung)
	for i, e := range res.Epochs {
		require.Equal(t, i+1, e.Epoch)
		require.Equal(t, prepare.Batches(int(e.Seeds), cfg.Batch), e.Batches,
			"the last partial batch is kept")
		require.Positive(t, e.Seconds)
		require.Positive(t, e.StageSeconds.Sample)
		require.Positive(t, e.StageSeconds.Train)
		require.InDelta(t, 1-e.Seconds/e.StageSeconds.Sum(), e.Overlap, 1e-9)
		require.GreaterOrEqual(t, e.Stall, 0.0)
		require.LessOrEqual(t, e.Stall, 1.0)
		switch {
		case cfg.Mode == static.ModeInmem || res.GPUCacheBytes+
			res.CPUCacheBytes == tiny.nodes*int64(tiny.dim)*4:
			require.Equal(t, "none", res.IOStack)
			require.Zero(t, e.RowsSSD)
			require.Zero(t, e.SSDCommands)
		default:
			require.Positive(t, e.RowsSSD)
			require.Positive(t, e.SSDCommands)
			require.GreaterOrEqual(t, e.BytesSSD, e.RowsSSD*int64(tiny.dim)*4)
			require.GreaterOrEqual(t, e.ReadAmplification, 1.0)
		}
		if res.GPUCacheBytes > 0 {
			require.Positive(t, e.RowsGPU)
		} else {
			require.Zero(t, e.RowsGPU)
		}
		if res.CPUCacheBytes > 0 {
			require.Positive(t, e.RowsCPU)
		} else {
			require.Zero(t, e.RowsCPU)
		}
	}
	for w, b := range r.busy[:min(v.workers, runtime.NumCPU())] {
		require.Positive(t, b, "worker %d of %d did something", w, v.workers)
	}
}

// Rows smaller and larger than an LBA, read through every stack.
func TestRowShapes(t *testing.T) {
	for name, g := range map[string]graphSpec{"packed": dense, "padded": padded} {
		t.Run(name, func(t *testing.T) {
			d, feat := g.open(t)
			s := bind(t, d, 3, "")
			sha := ""
			for _, mode := range []string{static.ModeHelios, static.ModeCPU, static.ModeMmap} {
				cfg := small()
				cfg.Mode, cfg.Epochs, cfg.CPUCache = mode, 1, percent(10)
				r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
				require.NoError(t, r.err)
				if sha == "" {
					sha = r.res.ParamsSHA256
				}
				require.Equal(t, sha, r.res.ParamsSHA256, mode)
			}
		})
	}
}

// The hottest rows are cached, so that a small tier absorbs more than its share.
func TestPresampledTiersBeatTheirSize(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Epochs = 1
	cfg.GPUCache, cfg.CPUCache = percent(10), percent(10)
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, r.err)
	e := r.res.Epochs[0]
	all := float64(e.RowsGPU + e.RowsCPU + e.RowsSSD)
	require.Greater(t, float64(e.RowsGPU)/all, 0.12)
	require.Greater(t, float64(e.RowsGPU)/all, float64(e.RowsCPU)/all,
		"the GPU tier has the hotter rows")
	require.Equal(t, int64(tiny.nodes/10)*512, r.res.GPUCacheBytes)
}

// Metamorphic: random equivalent configurations, one result. HELIOS_SEED replays a run.
func TestMetamorphic(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("HELIOS_SEED"); v != "" {
		var err error
		seed, err = strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("replay with HELIOS_SEED=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	rounds := 12
	if wide.Lean() {
		rounds = 4
	}
	g := []graphSpec{tiny, dense, padded}[rng.IntN(3)]
	d, feat := g.open(t)
	base := small()
	base.Epochs = 1
	base.Model = []string{"sage", "gcn"}[rng.IntN(2)]
	base.Fanouts = [][]int{{3}, {4, 2}, {-1, 2}, {2, 2, 2}}[rng.IntN(4)]
	base.Batch = 50 + rng.IntN(300)
	sets := map[int]*ssdSet{}
	var first record
	for i := range rounds {
		cfg := base
		cfg.Mode = tiers.Catalog.Names()[rng.IntN(len(tiers.Modes))]
		cfg.IOStack = plan.Stacks[rng.IntN(len(plan.Stacks))]
		cfg.Pipeline = anyPipeline(rng, "")
		cfg.GPUCache, cfg.CPUCache = percent(float64(rng.IntN(60))), percent(float64(rng.IntN(60)))
		cfg.Depth = 1 + rng.IntN(4)
		cfg.Presample = 1 + rng.IntN(2)
		cfg.Blocks = 1 + rng.IntN(8)
		cfg.QueueDepth = []int{0, 2, 7, 64}[rng.IntN(4)]
		cfg.CPUEngine = []string{"", "pread", "io_uring"}[rng.IntN(3)]
		cfg.SMs = plan.SMBudget{Sample: rng.IntN(3), Lookup: rng.IntN(3), Gather: rng.IntN(3),
			Train: rng.IntN(3)}
		cfg.Policy = plan.Policies[rng.IntN(len(plan.Policies))]
		if cfg.Mode == static.ModeInmem {
			cfg.Policy = plan.PolicyStatic
		}
		if runsOn(cfg, &hier.System) {
			cfg.Policy, cfg.Presample = plan.PolicyStatic, 0
			wholeGraph(&cfg)
		}
		if runsOn(cfg, &diskgnn.System) {
			cfg.Policy, cfg.Presample = plan.PolicyStatic, 0
			cfg.Pipeline = anyWhole(rng)
		}
		if cfg.Policy == plan.PolicyBelady {
			cfg.Presample, cfg.Superbatch = 0, rng.IntN(4)
			cfg.SuperbatchOverlap = rng.IntN(2) == 0
		}
		if cfg.Window, cfg.Accumulate = plan.Off, plan.Off; runsOn(cfg, &dynamic.System) {
			cfg.CacheLine = []int64{dynamicspec.LineRow, 512, 4096, 5000}[rng.IntN(4)]
			cfg.Window = []int{plan.Off, 1, 3, 20}[rng.IntN(4)]
			if cfg.IOStack != gpuio.StackAsync && cfg.Pipeline != plan.DefaultPipeline &&
				cfg.Pipeline != plan.PipelineIntra {
				cfg.Accumulate = []float64{plan.Off, 0.5, 0.95}[rng.IntN(3)]
			}
		}
		if cfg.Pipeline == plan.PipelineSeries {
			cfg.SMs = plan.SMBudget{}
		}
		if cfg.Pipeline == plan.PipelineRunAhead && cfg.Window == plan.Off &&
			cfg.Accumulate == plan.Off {
			cfg.Pipeline = plan.PipelineNone
		}
		if rng.IntN(2) == 0 {
			cfg.Topology, cfg.NeighborCache = plan.TopologySSD,
				percent([]float64{0, 10, 60}[rng.IntN(3)])
		}
		workers, ssds := 1+rng.IntN(3), 1+rng.IntN(4)
		if sets[ssds] == nil {
			sets[ssds] = bind(t, d, ssds, "")
		}
		name := fmt.Sprintf(
			"%s %s superbatches of %d, lines of %d window %d accumulate %v %s %s gpu %v cpu %v depth %d queue %d %s, topology %s %v, %d workers, %d SSDs",
			cfg.Mode, cfg.Policy, cfg.Superbatch, cfg.CacheLine, cfg.Window, cfg.Accumulate,
			cfg.IOStack,
			cfg.Pipeline, cfg.GPUCache, cfg.CPUCache, cfg.Depth, cfg.QueueDepth, cfg.CPUEngine,
			cfg.Topology, cfg.NeighborCache, workers, ssds)
		r := train(t, context.Background(), cfg, d, feat, sets[ssds], workers, report.Observer{})
		require.NoError(t, r.err, name)
		if i == 0 {
			first = r
			continue
		}
		require.Equal(t, first.blocks, r.blocks, name)
		require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, name)
	}
}

// Goroutines, descriptors and mappings are what they were.
func TestNothingLeaks(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Epochs = 1
	run := func(c plan.Config) {
		r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
	}
	run(cfg) // what is made once (topology, runtime threads' pollers) is made here
	before := testrig.Held(t)
	for _, mode := range tiers.Catalog.Names() {
		c := cfg
		c.Mode = mode
		run(c)
	}
	before.Leaked(t, "topology")
}

// Deep has operators of several mini-batches at work at once; none has one operator at a time.
func TestPipelinesOverlapAsTheySay(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	shared := func(pipeline string) (pairs int) {
		var b bytes.Buffer
		cfg := small()
		cfg.Pipeline, cfg.Epochs, cfg.Batch, cfg.NoEval = pipeline, 1, 64, true
		cfg.Hidden = 64
		cfg.Timeline = timeline.New(&b, timeline.Wall)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.NoError(t, cfg.Timeline.Close())
		spans, _, _ := readTimeline(t, b.Bytes())
		for _, x := range spans {
			for _, y := range spans {
				if x.track == report.TrackTrain && y.pass == x.pass && y.batch > x.batch &&
					y.from < x.to && x.from < y.to {
					pairs++
				}
			}
		}
		return pairs
	}
	require.Zero(t, shared(plan.PipelineNone))
	// That two can be at work at once does not mean that two were, on a machine that is busy.
	for range 10 {
		if shared(plan.DefaultPipeline) > 0 {
			return
		}
	}
	t.Error("no operator of a later mini-batch was at work while one trained")
}

// One SM and no SSD: however deep the pipeline is, nothing can overlap, and the figure says so.
func TestNoOverlapOnOneSM(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := small()
	cfg.Mode, cfg.Pipeline = static.ModeInmem, plan.DefaultPipeline
	cfg.Hidden, cfg.Epochs, cfg.NoEval = 64, 1, true
	r := train(t, context.Background(), cfg, d, feat, bind(t, d, 1, ""), 1, report.Observer{})
	require.NoError(t, r.err)
	require.LessOrEqual(t, r.res.Epochs[0].Overlap, 0.0)
}

// A run that diverges ends by saying so: it saves no broken parameters, and reports no NaN,
// which JSON can't hold.
func TestDivergence(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := small()
	cfg.LR, cfg.CheckpointDir, cfg.CheckpointEvery = 1e30, t.TempDir(), 1
	r := train(t, context.Background(), cfg, d, feat, bind(t, d, 1, ""), 2, report.Observer{})
	require.ErrorContains(t, r.err, "option lr")
	require.Equal(t, errs.Failed, errs.ClassOf(r.err))
	_, err := json.Marshal(r.res)
	require.NoError(t, err)

	// So it does where it is stopped in that step.
	for _, shards := range []int{1, 2} {
		ctx, cancel := context.WithCancel(context.Background())
		cfg.CheckpointDir, cfg.CheckpointEvery, cfg.Shards = t.TempDir(), 0, shards
		cfg.OnBatch = func(_, index int, _ *graph.MiniBatch) {
			if index == shards {
				cancel()
			}
		}
		r = train(t, ctx, cfg, d, feat, bind(t, d, 1, ""), 2, report.Observer{})
		cancel()
		require.ErrorContains(t, r.err, "option lr")
		require.Equal(t, errs.Failed, errs.ClassOf(r.err))
		require.NoFileExists(t, filepath.Join(cfg.CheckpointDir, checkpointName))
	}
}

// Placing rows and evaluating sample under numbers that no training epoch has, within the
// sampler's 24 bits.
func TestSamplingKeysAreApart(t *testing.T) {
	c := plan.Config{Presample: 1 << 10, Epochs: plan.MaxEpochs}.WithDefaults()
	require.NoError(t, c.Check())
	c.Presample++
	require.Error(t, c.Check())
	last := -1
	for _, r := range [][2]int{
		{0, plan.MaxEpochs - 1}, {prepare.PresampleEpoch, prepare.PresampleEpoch + 1<<10 - 1},
		{prepare.ValEpoch, prepare.ValEpoch + plan.MaxEpochs - 1},
		{prepare.TestEpoch, prepare.TestEpoch}, {prepare.PredictEpoch, prepare.PredictEpoch},
	} {
		require.Greater(t, r[0], last)
		last = r[1]
	}
	require.Less(t, last, 1<<24)
}
