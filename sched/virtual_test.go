package sched

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/cuda"
	"helios/dataset"
	"helios/gpuio/iosim"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/hostmem"
	"helios/internal/timeline"
	"helios/internal/wide"
)

// playVirtual plays a run on the virtual clock of a fresh host device, which it wants to get back whole.
func playVirtual(t testing.TB, cfg Config, d *dataset.Dataset, profile string, ssds int) *ModelledResult {
	t.Helper()
	hw, err := hardware.Load(profile)
	require.NoError(t, err)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	before := hostmem.Usage()
	r, err := Virtual(context.Background(), cfg, Inputs{Dev: dev, Dataset: d}, Hardware{Profile: hw, SSDs: ssds}, Observer{})
	require.NoError(t, err)
	require.NoError(t, dev.Close(), "streams or buffers were left open")
	for k, v := range hostmem.Usage() {
		if !strings.HasPrefix(k, "topology") {
			require.LessOrEqual(t, v, before[k], "hostmem for %q", k)
		}
	}
	return r
}

// The virtual clock runs the same batches over the same caches as a real run of that seed: what does
// not depend on time is equal, the commands of the SSDs included.
func TestVirtualCountsAreThoseOfARealRun(t *testing.T) {
	shapes := []graphSpec{packed, tiny, padded}
	if wide.Lean() {
		shapes = shapes[:1]
	}
	for _, g := range shapes {
		d, feat := g.open(t)
		s := bind(t, d, 3, "")
		for _, v := range []variant{
			{"none", modePipe(ModeHelios, PipelineNone, caches(5, 10)), 2, 3},
			{"deep", modePipe(ModeHelios, PipelineDeep, caches(10, 0)), 2, 3},
			{"deep, row by row", modePipe(ModeHelios, PipelineDeep, func(c *Config) { c.CoalesceBytes = -1 }), 2, 3},
			{"sync", modePipe(ModeHelios, PipelineIntra, func(c *Config) { c.IOStack = StackSync }), 2, 3},
			{"mmap", modePipe(ModeMmap, PipelinePrefetch, nil), 2, 3},
			{"inmem", modePipe(ModeInmem, PipelineDeep, caches(20, 0)), 2, 3},
			{"gcn", modePipe(ModeHelios, PipelineDeep, func(c *Config) { c.Model, c.Fanouts = "gcn", []int{-1, 2} }), 2, 3},
			{"ladies", modePipe(ModeHelios, PipelineDeep, func(c *Config) { c.Sampler, c.Fanouts = SamplerLadies, []int{40, 30} }), 2, 3},
		} {
			cfg := small()
			v.set(&cfg)
			real := train(t, context.Background(), cfg, d, feat, s, 2, Observer{})
			require.NoError(t, real.err)
			model := playVirtual(t, cfg, d, "a100-p5510x12", 3)
			name := fmt.Sprintf("%+v %s", g, v.name)
			require.Equal(t, real.res.IOStack, model.IOStack, name)
			require.Equal(t, real.res.GPUCacheBytes, model.GPUCacheBytes, name)
			require.Equal(t, real.res.CPUCacheBytes, model.CPUCacheBytes, name)
			require.Len(t, model.Epochs, len(real.res.Epochs))
			for i, e := range real.res.Epochs {
				m := model.Epochs[i]
				e, m = counts(e), counts(m)
				e.Loss, e.TrainAcc, e.ValAcc = 0, 0, nil
				require.Equal(t, e, m, name)
			}
			if v.name != "mmap" { // there the real stack counts what it faults in
				var a, b SSDResult
				for i := range real.res.IO.SSDs {
					a.Commands += real.res.IO.SSDs[i].Commands
					b.Commands += model.IO.SSDs[i].Commands
				}
				require.LessOrEqual(t, b.Commands, a.Commands, "%s: the test pass is not modelled", name)
			}
		}
	}
}

// So it is with dynamic tiers: a policy's answers depend on the order of lookups alone. How many batches the accumulator
// merges depends on the SSDs, and with it only how the cpu stack's reads share commands.
func TestVirtualCountsOfDynamicTiers(t *testing.T) {
	shapes := []graphSpec{tiny, packed, padded}
	if wide.Lean() {
		shapes = shapes[:1]
	}
	for n, g := range shapes {
		d, feat := g.open(t)
		s := bind(t, d, 3, "")
		for i, v := range dynamicWays {
			if n > 0 && i%2 != n-1 || wide.Lean() && i > 3 { // the first layout has all, the others half of them each
				continue
			}
			cfg := small()
			v.set(&cfg)
			real := train(t, context.Background(), cfg, d, feat, s, 2, Observer{})
			require.NoError(t, real.err, v.name)
			model := playVirtual(t, cfg, d, "a100-optane", 3)
			name := fmt.Sprintf("%+v %s", g, v.name)
			require.Equal(t, real.res.GPUCacheBytes, model.GPUCacheBytes, name)
			require.Equal(t, real.res.CPUCacheBytes, model.CPUCacheBytes, name)
			require.Equal(t, real.res.PolicyBytes, model.PolicyBytes, name)
			require.Equal(t, real.res.CacheLineBytes, model.CacheLineBytes, name)
			require.Equal(t, real.res.Accumulator != nil, model.Accumulator != nil, name)
			require.Len(t, model.Epochs, len(real.res.Epochs))
			for i, e := range real.res.Epochs {
				m := model.Epochs[i]
				e, m = counts(e), counts(m)
				e.Loss, e.TrainAcc, e.ValAcc = 0, 0, nil
				e.ReadGroups, e.GroupBatches, m.ReadGroups, m.GroupBatches = 0, 0, 0, 0
				if cfg.IOStack == StackCPU || cfg.IOStack == StackMmap {
					e.BytesSSD, e.SSDCommands, e.ReadAmplification = m.BytesSSD, m.SSDCommands, m.ReadAmplification
				}
				require.Equal(t, e, m, name)
			}
		}
	}
}

// The accumulator's groups grow with its target, and each operator still has its place.
func TestVirtualAccumulator(t *testing.T) {
	d := large.generate(t)
	seconds := map[string]float64{}
	for name, set := range map[string]func(*Config){
		"none": func(c *Config) { c.Accumulate = Off },
		"0.8":  func(c *Config) { c.Accumulate = 0.8 },
		"0.95": func(c *Config) { c.Accumulate = 0.95 },
	} {
		if wide.Lean() && name == "0.8" {
			continue
		}
		var b bytes.Buffer
		cfg := largeConfig("")
		cfg.Mode, cfg.Batch, cfg.Fanouts, cfg.CPUCache = ModeGIDS, 16, []int{5, 5}, percent(10)
		set(&cfg)
		cfg.Timeline = timeline.New(&b, timeline.Virtual)
		r := playVirtual(t, cfg, d, "a100-optane", 1)
		require.NoError(t, cfg.Timeline.Close())
		e := r.Epochs[0]
		seconds[name] = e.Seconds
		t.Logf("%s: %.6f s, %d groups of %.1f, %+v", name, e.Seconds, e.ReadGroups, e.GroupBatches, r.Accumulator)
		spans, _, _ := readTimeline(t, b.Bytes())
		checkOrder(t, spans, PipelineRunAhead, 0.001)
		if name == "none" {
			require.Zero(t, e.ReadGroups)
			require.Nil(t, r.Accumulator)
			continue
		}
		require.Greater(t, e.GroupBatches, 1.0)
		require.InDelta(t, 1.5e6, r.Accumulator.IOPS, 1e5)
		require.InDelta(t, 54e-6, r.Accumulator.OverheadSeconds, 20e-6, "25 and 5 us of a launch, the SSD's 11, and the kernel's own (BENCHMARKS.md)")
	}
	require.Less(t, seconds["0.95"], seconds["none"])
	if !wide.Lean() {
		require.Less(t, seconds["0.95"], seconds["0.8"])
		require.Less(t, seconds["0.8"], seconds["none"])
	}
}

// What passes before the first batch that is played fills the caches and is counted nowhere.
func TestVirtualWarm(t *testing.T) {
	d := large.generate(t)
	play := func(warm, n int) EpochResult {
		cfg := largeConfig("")
		cfg.Mode, cfg.Batch, cfg.Policy, cfg.GPUCache = ModeBaM, 64, policy.LRU, percent(20)
		hw, err := hardware.Load("a100-optane")
		require.NoError(t, err)
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		r, err := Virtual(context.Background(), cfg, Inputs{Dev: dev, Dataset: d}, Hardware{Profile: hw, Warm: warm, Batches: n}, Observer{})
		require.NoError(t, err)
		require.NoError(t, dev.Close())
		return r.Epochs[0]
	}
	cold, warm := play(0, 5), play(20, 5)
	require.Equal(t, 5, cold.Batches)
	require.Equal(t, 5, warm.Batches)
	require.Greater(t, warm.HitRatio, cold.HitRatio)
	require.Equal(t, play(0, 0).Batches-70, play(70, 0).Batches)
}

// Equal seeds give equal results, to the byte, and another seed another result.
func TestVirtualIsDeterministic(t *testing.T) {
	d, _ := tiny.open(t)
	play := func(seed uint64) (result, trace string) {
		var b bytes.Buffer
		cfg := small()
		cfg.Seed, cfg.GPUCache, cfg.CPUCache = seed, percent(5), percent(5)
		cfg.Timeline = timeline.New(&b, timeline.Virtual)
		r := playVirtual(t, cfg, d, "a100-p5510x12", 0)
		require.NoError(t, cfg.Timeline.Close())
		j, err := json.Marshal(r)
		require.NoError(t, err)
		return string(j), b.String()
	}
	r1, t1 := play(3)
	r2, t2 := play(3)
	require.Equal(t, r1, r2)
	require.Equal(t, t1, t2)
	r3, _ := play(4)
	require.NotEqual(t, r1, r3)
}

// Each figure says that it is modelled, and what was not computed is not there.
func TestVirtualLabels(t *testing.T) {
	d, _ := tiny.open(t)
	cfg := small()
	r := playVirtual(t, cfg, d, "h100-pm1753x16", 0)
	b, err := json.Marshal(r)
	require.NoError(t, err)
	var m map[string]any
	require.NoError(t, json.Unmarshal(b, &m))
	require.Equal(t, "result", m["event"])
	require.Equal(t, true, m["modelled"])
	require.Equal(t, "virtual", m["clock"])
	require.Equal(t, "h100-pm1753x16", m["hardware"])
	require.Equal(t, 16.0, m["ssd_count"])
	for _, k := range []string{"mode", "seed", "io_stack", "pipeline", "io", "presample_seconds", "fill_seconds", "gpu_cache_bytes"} {
		require.Contains(t, m, k)
	}
	for _, k := range []string{"params_sha256", "test_acc", "best_epoch", "peak_memory_bytes", "checkpoint"} {
		require.NotContains(t, m, k)
	}
	require.Len(t, m["epochs"], cfg.Epochs)
	for _, x := range m["epochs"].([]any) {
		e := x.(map[string]any)
		require.Equal(t, true, e["modelled"])
		for _, k := range []string{"epoch", "seconds", "rows_ssd", "overlap", "stall", "stage_seconds", "read_amplification", "val_seconds"} {
			require.Contains(t, e, k)
		}
		for _, k := range []string{"loss", "train_acc", "val_acc"} {
			require.NotContains(t, e, k)
		}
	}
}

func TestVirtualRefusals(t *testing.T) {
	d, _ := tiny.open(t)
	hw, err := hardware.Load("a100-p5510x12")
	require.NoError(t, err)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	for want, set := range map[string]func(*Config){
		"--checkpoint": func(c *Config) { c.CheckpointDir = t.TempDir() },
		"--pipeline":   func(c *Config) { c.Pipeline = "x" },
		"--gpu-cache":  func(c *Config) { c.GPUCache.Bytes = 200 << 30 },
		"--trace":      func(c *Config) { c.Trace = "t" },
		"--tune":       func(c *Config) { c.Tune = TuneQuick },
	} {
		cfg := small()
		set(&cfg)
		_, err := Virtual(context.Background(), cfg, Inputs{Dev: dev, Dataset: d}, Hardware{Profile: hw}, Observer{})
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	stored := small()
	stored.Topology = TopologySSD
	_, err = Virtual(context.Background(), stored, Inputs{Dev: dev, Dataset: d}, Hardware{Profile: hw}, Observer{})
	require.ErrorContains(t, err, "--topology")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	ctx, cancel := context.WithCancel(context.Background())
	cfg := small()
	cfg.Epochs = 3
	r, err := Virtual(ctx, cfg, Inputs{Dev: dev, Dataset: d}, Hardware{Profile: hw}, Observer{Epoch: func(EpochResult) { cancel() }})
	require.Equal(t, errs.Interrupted, errs.ClassOf(err))
	require.Len(t, r.Epochs, 1, "the whole epochs are there")
	require.NoError(t, dev.Close())
}

// large is a graph whose batches keep a dozen SSDs busy.
var large = graphSpec{nodes: 12_000, dim: 128, degree: 10, train: 0.4}

func largeConfig(pipe string) Config {
	return Config{
		Mode: ModeHelios, Pipeline: pipe, Fanouts: []int{10, 10}, Batch: 512, Hidden: 256, Seed: 5, Epochs: 1, NoEval: true,
		GPUCache: percent(5), CPUCache: percent(10),
	}
}

// The timeline of each pipeline keeps the operators' order, and overlap helps as it should.
func TestVirtualPipelines(t *testing.T) {
	d := large.generate(t)
	seconds := map[string]float64{}
	for _, pipe := range []string{PipelineNone, PipelineIntra, PipelinePrefetch, PipelineDeep} {
		var b bytes.Buffer
		cfg := largeConfig(pipe)
		cfg.CoalesceBytes = -1 // the reads are the same then
		cfg.Timeline = timeline.New(&b, timeline.Virtual)
		r := playVirtual(t, cfg, d, "a100-p5510x12", 4)
		require.NoError(t, cfg.Timeline.Close())
		e := r.Epochs[0]
		seconds[pipe] = e.Seconds
		t.Logf("%s: %.4f s, overlap %.2f, stall %.2f, %d commands, %+v", pipe, e.Seconds, e.Overlap, e.Stall, e.SSDCommands, e.StageSeconds)
		spans, counters, other := readTimeline(t, b.Bytes())
		require.Equal(t, map[string]any{"clock": "virtual", "modelled": true}, other)
		checkOrder(t, spans, pipe, 0.001)
		conserved(t, pipe, cfg, e, spans)
		for _, c := range []string{trackCredits, trackReads} {
			require.Zero(t, counters[c][len(counters[c])-1], "%s under %s", c, pipe)
			for _, v := range counters[c] {
				require.GreaterOrEqual(t, v, 0.0)
			}
		}
		credits := 0.0
		for _, v := range counters[trackCredits] {
			credits = max(credits, v)
		}
		require.LessOrEqual(t, credits, float64(cfg.withDefaults().plan().credits))
		if pipe == PipelineNone {
			require.LessOrEqual(t, e.Overlap, 0.0, "one operator at a time")
		}
	}
	order := []string{PipelineNone, PipelineIntra, PipelinePrefetch, PipelineDeep}
	for i := range order[1:] {
		require.LessOrEqual(t, seconds[order[i+1]], seconds[order[i]]*1.005, "%s after %s", order[i+1], order[i])
	}
	require.Less(t, seconds[PipelineDeep], seconds[PipelineNone]*0.95)
}

// conserved holds what a pass reports against its spans: nothing is lost, done twice or done faster
// than the hardware allows.
func conserved(t *testing.T, name string, cfg Config, e EpochResult, spans []drawn) {
	t.Helper()
	rows := map[string]int64{}
	n := map[string]int{}
	var from, to float64
	first := true
	for _, s := range spans {
		if s.batch < 0 {
			continue
		}
		rows[s.track] += s.rows
		n[s.track]++
		if first || s.from < from {
			from, first = s.from, false
		}
		to = max(to, s.to)
	}
	all := e.RowsGPU + e.RowsCPU + e.RowsSSD
	require.Equal(t, all, rows[trackLookup], name)
	require.Equal(t, all, rows[trackTrain], name)
	require.Equal(t, e.RowsSSD, rows[trackComplete], name)
	require.Equal(t, e.RowsGPU+e.RowsCPU, rows[trackGather], name)
	require.Equal(t, e.Batches, n[trackTrain], name)
	require.Equal(t, e.Batches*len(cfg.Fanouts), n[trackSample], name)
	require.InDelta(t, e.Seconds*1e6, to-from, 1, "%s: the pass is as long as its spans", name)
	st := e.StageSeconds
	for stage, s := range map[string]float64{"sample": st.Sample, "lookup": st.Lookup, "complete": st.Complete, "gather": st.Gather, "train": st.Train} {
		require.Positive(t, s, "%s %s", name, stage)
		require.LessOrEqual(t, s, e.Seconds*1.000001, "%s: %s is on one stream", name, stage)
	}
	// The link into the GPU takes no more than it can: what came from the SSDs and the CPU tier.
	hw, err := hardware.Load("a100-p5510x12")
	require.NoError(t, err)
	moved := float64(e.BytesSSD + e.RowsCPU*int64(large.dim)*4)
	require.Less(t, moved/e.Seconds, hw.PCIe.GPU.RawGBs.Value*1e9, name)
}

// Budgets: a smaller one makes its operator slower; budgets that share the GPU keep it whole.
func TestVirtualBudgets(t *testing.T) {
	d := large.generate(t)
	play := func(s SMBudget) EpochResult {
		cfg := largeConfig(PipelineDeep)
		cfg.SMs = s
		return playVirtual(t, cfg, d, "a100-p5510x12", 12).Epochs[0]
	}
	free := play(SMBudget{})
	small := play(SMBudget{Train: 2})
	require.Greater(t, small.StageSeconds.Train, 5*free.StageSeconds.Train)
	require.GreaterOrEqual(t, small.Seconds, free.Seconds*0.999)
	sampler := play(SMBudget{Sample: 4})
	require.Greater(t, sampler.StageSeconds.Sample, free.StageSeconds.Sample)
}

// More SSDs help until something else is the bottleneck, and never hurt much.
func TestVirtualSSDs(t *testing.T) {
	d := large.generate(t)
	last := 0.0
	for i, n := range []int{1, 3, 9} {
		cfg := largeConfig(PipelineDeep)
		r := playVirtual(t, cfg, d, "a100-p5510x12", n)
		require.Equal(t, n, r.SSDs)
		require.Len(t, r.IO.SSDs, n)
		if i > 0 {
			require.LessOrEqual(t, r.Epochs[0].Seconds, last*1.02, "%d SSDs", n)
		}
		last = r.Epochs[0].Seconds
	}
}

// gpuRig is a modelled GPU without SSDs in use.
func gpuRig(t *testing.T) (*des.Sim, *vgpu) {
	t.Helper()
	hw, err := hardware.Load("a100-p5510x12")
	require.NoError(t, err)
	sim := des.New()
	m, err := iosim.NewMachine(sim, hw, 1)
	require.NoError(t, err)
	return sim, newVGPU(m)
}

// A kernel alone takes what its roofline says, and kernels beside each other take their turns, by
// priority, without losing or making time.
func TestVirtualGPUShares(t *testing.T) {
	sim, g := gpuRig(t)
	items := func(n int64) []vkernel {
		return []vkernel{{op: &g.g.Ops.Sample, work: hardware.Work{Items: n}}}
	}
	const n = 10_000_000
	alone := g.g.KernelNS(g.g.Ops.Sample, hardware.Work{Items: n}, 0)
	over := g.g.OpLaunchNS.NS() + g.g.TeardownNS.NS()
	at := map[string]int64{}
	run := func(name string, s *vstream, k []vkernel) {
		s.launch(k, nil, func(now int64) { at[name] = now })
	}
	run("alone", g.stream(0, 0), items(n))
	sim.Run()
	require.InDelta(t, alone+over, at["alone"], 2)

	// Two of one priority share; both take twice as long.
	start := sim.Now()
	a, b := g.stream(1, 0), g.stream(1, 0)
	run("a", a, items(n))
	run("b", b, items(n))
	sim.Run()
	require.InDelta(t, 2*alone+over, at["a"]-start, 4)
	require.InDelta(t, 2*alone+over, at["b"]-start, 4)
	require.InDelta(t, float64(2*alone), a.busy+b.busy, 8, "each had half of the SMs that it wanted")

	// The more urgent one goes first; the other one has what is left.
	start = sim.Now()
	run("urgent", g.stream(2, 0), items(n))
	run("patient", g.stream(1, 0), items(n))
	sim.Run()
	require.InDelta(t, alone+over, at["urgent"]-start, 4)
	require.InDelta(t, 2*alone+over, at["patient"]-start, 4)

	// With budgets that fit, neither disturbs the other.
	start = sim.Now()
	half := g.g.KernelNS(g.g.Ops.Sample, hardware.Work{Items: n}, 54)
	run("left", g.stream(2, 54), items(n))
	run("right", g.stream(1, 54), items(n))
	sim.Run()
	require.InDelta(t, half+over, at["left"]-start, 4)
	require.InDelta(t, half+over, at["right"]-start, 4)

	// Memory is shared even where SMs are not: two that fill it take twice as long.
	gather := func(bytes int64) []vkernel {
		return []vkernel{{op: &g.g.Ops.Gather, work: hardware.Work{Bytes: bytes}}}
	}
	one := g.g.KernelNS(g.g.Ops.Gather, hardware.Work{Bytes: 1 << 30}, 54)
	start = sim.Now()
	run("m1", g.stream(2, 54), gather(1<<30))
	run("m2", g.stream(2, 54), gather(1<<30))
	sim.Run()
	require.InEpsilon(t, 2*one+over, at["m1"]-start, 0.001)
	require.InEpsilon(t, 2*one+over, at["m2"]-start, 0.001)

	// What the I/O kernels hold is not there for others.
	g.io = func() float64 { return 54 }
	start = sim.Now()
	run("io", g.stream(0, 0), items(n))
	sim.Run()
	require.InDelta(t, half+over, at["io"]-start, 4)
}

// Kernels that read the CPU's memory take the link, at its rate.
func TestVirtualUVA(t *testing.T) {
	sim, g := gpuRig(t)
	const bytes = 256 << 20
	var end int64
	s := g.stream(0, 0)
	s.launch([]vkernel{{uva: bytes}}, nil, func(now int64) { end = now })
	sim.Run()
	want := float64(bytes)/g.m.Profile.PCIe.UVAGBs.Value + float64(g.g.OpLaunchNS.NS()+g.g.TeardownNS.NS()+g.g.HostWayNS.NS())
	require.InEpsilon(t, want, end, 0.001)
	require.InEpsilon(t, float64(bytes)/g.m.Profile.PCIe.UVAGBs.Value, s.busy, 0.001)
	require.EqualValues(t, bytes, g.m.HostMem.Bytes())
}

func TestUnionOfReads(t *testing.T) {
	require.Zero(t, union(nil))
	require.EqualValues(t, 24, union([][2]int64{{21, 31}, {1, 11}, {10, 15}, {3, 8}}))
}
