package sched

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/cuda"
	"helios/dataset"
	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
	"helios/internal/timeline"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/dynamic"
	dynamicspec "helios/sched/tiers/dynamic/spec"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/hier"
	hierspec "helios/sched/tiers/hier/spec"
	"helios/sched/tiers/static"
	"helios/sched/virtual"
)

// playVirtual plays a run on the virtual clock of a fresh host device, which it wants to get back
// whole.
func playVirtual(t testing.TB, cfg plan.Config, d *dataset.Dataset, profile string,
	ssds int) *report.ModelledResult {
	t.Helper()
	return playOn(t, cfg, d, hardwareOf(t, profile), ssds)
}

// playOn is playVirtual on a machine of the test's own.
func playOn(t testing.TB, cfg plan.Config, d *dataset.Dataset, hw *hardware.Profile,
	ssds int) *report.ModelledResult {
	t.Helper()
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	before := hostmem.Usage()
	r, err := virtual.Run(context.Background(), tiers.Simulation, cfg,
		prepare.Inputs{Dev: dev,
			Dataset: d},
		cost.Hardware{Profile: hw, SSDs: ssds}, report.Observer{})
	require.NoError(t, err)
	require.NoError(t, dev.Close(), "streams or buffers were left open")
	for k, v := range hostmem.Usage() {
		if !strings.HasPrefix(k, "topology") {
			require.LessOrEqual(t, v, before[k], "hostmem for %q", k)
		}
	}
	return r
}

func hardwareOf(t testing.TB, profile string) *hardware.Profile {
	t.Helper()
	hw, err := hardware.Load(profile)
	require.NoError(t, err)
	return hw
}

// The virtual clock runs the same batches over the same caches as a real run of that seed: what
// does not depend on time is equal, the commands of the SSDs included.
func TestVirtualCountsAreThoseOfARealRun(t *testing.T) {
	shapes := []graphSpec{dense, tiny, padded}
	if wide.Lean() {
		shapes = shapes[:1]
	}
	for _, g := range shapes {
		d, feat := g.open(t)
		s := bind(t, d, 3, "")
		for _, v := range []variant{
			{"none", modePipe(static.ModeHelios, plan.PipelineNone, caches(5, 10)), 2, 3},
			{"deep", modePipe(static.ModeHelios, plan.DefaultPipeline, caches(10, 0)), 2, 3},
			{"deep, row by row", modePipe(static.ModeHelios, plan.DefaultPipeline,
				func(c *plan.Config) { c.CoalesceBytes = -1 }), 2, 3},
			{"sync", modePipe(static.ModeHelios, plan.PipelineIntra,
				func(c *plan.Config) { c.IOStack = gpuio.StackSync }), 2, 3},
			{"mmap", modePipe(static.ModeMmap, plan.PipelinePrefetch, nil), 2, 3},
			{"inmem", modePipe(static.ModeInmem, plan.DefaultPipeline, caches(20, 0)), 2, 3},
			{"gcn", modePipe(static.ModeHelios, plan.DefaultPipeline,
				func(c *plan.Config) { c.Model, c.Fanouts = "gcn", []int{-1, 2} }), 2, 3},
			{"ladies", modePipe(static.ModeHelios, plan.DefaultPipeline,
				func(c *plan.Config) { c.Sampler, c.Fanouts = graph.Ladies, []int{40, 30} }), 2, 3},
			{"labor", modePipe(static.ModeHelios, plan.DefaultPipeline,
				func(c *plan.Config) { c.Sampler, c.BatchDependency = graph.Labor, 4 }), 2, 3},
			{"samples again", modePipe(static.ModeHelios, plan.DefaultPipeline,
				func(c *plan.Config) { c.SampleEpochs, c.Refresh, c.Epochs = 2, 1, 4 }), 2, 3},
		} {
			cfg := small()
			v.set(&cfg)
			real := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
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
				e.Loss, e.TrainAcc, e.ValAcc = 0, nil, nil
				require.Equal(t, e, m, name)
			}
			if v.name != "mmap" { // there the real stack counts what it faults in
				var a, b report.SSDResult
				for i := range real.res.IO.SSDs {
					a.Commands += real.res.IO.SSDs[i].Commands
					b.Commands += model.IO.SSDs[i].Commands
				}
				require.LessOrEqual(t, b.Commands, a.Commands,
					"%s: the test pass is not modelled", name)
			}
		}
	}
}

// Hops are read together where their rows share commands: all mini-batches but the first as those
// of a pipeline that samples them whole. Row by row each hop is read by itself.
func TestHopsAreReadTogether(t *testing.T) {
	d, feat := dense.open(t)
	s := bind(t, d, 2, "")
	epoch := func(pipeline string, coalesce int) report.EpochResult {
		cfg := small()
		cfg.Mode, cfg.Pipeline, cfg.CoalesceBytes, cfg.Epochs = static.ModeHelios, pipeline,
			coalesce, 1
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		return counts(r.res.Epochs[0])
	}
	deep, intra, whole := epoch(plan.DefaultPipeline, 0), epoch(plan.PipelineIntra, 0),
		epoch(plan.PipelinePrefetch, 0)
	require.Greater(t, deep.Batches, 2)
	require.Greater(t, deep.SSDCommands, whole.SSDCommands, "nothing is known of the first")
	require.Less(t, deep.SSDCommands, (intra.SSDCommands+whole.SSDCommands)/2)
	require.Equal(t, epoch(plan.PipelineIntra, -1), epoch(plan.DefaultPipeline, -1))
	deep.SSDCommands, deep.BytesSSD, deep.ReadAmplification = whole.SSDCommands, whole.BytesSSD,
		whole.ReadAmplification
	require.Equal(t, whole, deep)
}

// Every mode has it so, over files of a real file system, too, whose O_DIRECT asks for sectors:
// rows, commands and bytes are the same on both clocks.
func TestVirtualCountsOfEveryMode(t *testing.T) {
	d, feat := tiny.open(t)
	s := bindIn(t, d, 2, t.TempDir(), true, "")
	for _, m := range tiers.Modes {
		cfg := small()
		cfg.Mode, cfg.Topology = m.Name, plan.TopologyMemory
		gpu, cpu := plan.Config{Mode: m.Name}.DefaultTiers()
		if gpu {
			cfg.GPUCache = percent(10)
		}
		if cpu {
			cfg.CPUCache = percent(10)
		}
		switch {
		case m.Defaults().Policy == plan.PolicyBelady:
			cfg.SuperbatchDir = t.TempDir()
		// a folder is one device; the modelled SSDs are two, as those here
		case m.Own == &diskgnn.System:
			cfg.PagesOn, cfg.PackedDir = plan.PagesSSDs, t.TempDir()
		case m.Own == &hier.System:
			cfg.PagesOn, cfg.PartedDir, cfg.CPUCache = plan.PagesSSDs, t.TempDir(), percent(60)
		}
		real := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, real.err, m.Name)
		model := playVirtual(t, cfg, d, "a100-p5510x12", 2)
		require.Equal(t, real.res.GPUCacheBytes, model.GPUCacheBytes, m.Name)
		require.Equal(t, real.res.CPUCacheBytes, model.CPUCacheBytes, m.Name)
		for i, e := range real.res.Epochs {
			e, m := counts(e), counts(model.Epochs[i])
			e.Loss, e.TrainAcc, e.ValAcc = 0, nil, nil
			require.Equal(t, e, m, cfg.Mode)
		}
	}
}

// So it is with dynamic tiers: a policy's answers depend on the order of lookups alone. How many
// batches the accumulator merges depends on the SSDs, and with it only how the cpu stack's reads
// share commands.
// The machine has flash, of which commands reach as far as those of software SSDs do.
func TestVirtualCountsOfDynamicTiers(t *testing.T) {
	shapes := []graphSpec{tiny, dense, padded}
	if wide.Lean() {
		shapes = shapes[:1]
	}
	for n, g := range shapes {
		d, feat := g.open(t)
		s := bind(t, d, 3, "")
		for i, v := range dynamicWays {
			// the first layout has all, the others half of them each
			if n > 0 && i%2 != n-1 || wide.Lean() && i > 3 {
				continue
			}
			cfg := small()
			v.set(&cfg)
			real := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, real.err, v.name)
			model := playVirtual(t, cfg, d, "a100-980pro", 3)
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
				e.Loss, e.TrainAcc, e.ValAcc = 0, nil, nil
				e.ReadGroups, e.GroupBatches, m.ReadGroups, m.GroupBatches = 0, 0, 0, 0
				if cfg.IOStack == gpuio.StackCPU || cfg.IOStack == gpuio.StackMmap {
					e.BytesSSD, e.SSDCommands, e.ReadAmplification = m.BytesSSD, m.SSDCommands,
						m.ReadAmplification
				}
				require.Equal(t, e, m, name)
			}
		}
	}
}

// So it is with planned tiers, whose superbatches lie in the same mini-batches: what is loaded
// before them, and how the tiers' hits are divided, included.
func TestVirtualCountsOfPlannedTiers(t *testing.T) {
	ways := append([]variant{{"helios auto", func(c *plan.Config) {
		c.Policy, c.GPUCache, c.CPUCache = plan.PolicyBelady, percent(5), percent(10)
	}, 2, 3}, {"gids hop by hop", func(c *plan.Config) {
		c.Mode, c.Policy, c.GPUCache = dynamic.ModeGIDS, plan.PolicyBelady, percent(3)
		c.Pipeline, c.Superbatch = plan.DefaultPipeline, 3
	}, 2, 3}}, plannedWays...)
	hw, err := hardware.Load("a100-p5510x12")
	require.NoError(t, err)
	for n, g := range []graphSpec{tiny, dense} {
		d, feat := g.open(t)
		s := bind(t, d, 3, "")
		for i, v := range ways {
			if n > 0 && i%3 != 0 || wide.Lean() && i > 4 {
				continue
			}
			cfg := small()
			v.set(&cfg)
			// the virtual clock refuses it
			if cfg.WithDefaults().Policy != plan.PolicyBelady {
				continue
			}
			cfg.Topology, cfg.SuperbatchDir = plan.TopologyMemory, t.TempDir()
			real := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, real.err, v.name)
			cfg.CheckReads = plan.ChecksOff // nothing is read
			model := playVirtual(t, cfg, d, "a100-p5510x12", 3)
			name := fmt.Sprintf("%+v %s", g, v.name)
			require.Equal(t, real.res.GPUCacheBytes, model.GPUCacheBytes, name)
			require.Equal(t, real.res.CPUCacheBytes, model.CPUCacheBytes, name)
			require.Equal(t, real.res.FillSeconds, model.FillSeconds, name)
			for i, e := range real.res.Epochs {
				m := model.Epochs[i]
				e, m = counts(e), counts(m)
				e.Loss, e.TrainAcc, e.ValAcc = 0, nil, nil
				require.Equal(t, e, m, name)
			}
			r, m := *real.res.Superbatch, *model.Superbatch
			require.Equal(t, r.Batches, m.Batches, name)
			require.Equal(t, r.FileBytes, m.FileBytes, name)
			require.Less(t, m.Superbatches, r.Superbatches, "%s: the test pass is not modelled",
				name)
			require.Positive(t, m.SampleSeconds, name)
			cpu := hw.CPU
			require.InDelta(t, float64(m.Accesses)*(cpu.InspectScanNS.Value+
				cpu.InspectNS.Value/cpu.Cores.Value)/1e9, m.InspectSeconds, 1e-6, name)
			require.InDelta(t, float64(m.Accesses)*cpu.ChangeNS.Value/1e9, m.ChangeSeconds,
				1e-6, name)
		}
	}
}

// So it is with packed mini-batches, which are sampled and laid out for real: levels, pages and,
// where the CPU reads one SSD, commands. The times of preparing are the model's.
func TestVirtualCountsOfPackedTiers(t *testing.T) {
	for n, g := range []graphSpec{tiny, dense} {
		d, feat := g.open(t)
		s := bind(t, d, 1, "")
		for i, v := range packedWays {
			if n > 0 && i%3 != 0 || wide.Lean() && i > 3 || v.name == "mmap, none" {
				continue
			}
			cfg := onPacked(t)
			v.set(&cfg)
			cfg.CheckReads = plan.ChecksOff
			cfg.SampleEpochs, cfg.Refresh, cfg.Epochs = 2, n, 3
			real := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, real.err, v.name)
			model := playVirtual(t, cfg, d, "a100-p5510x12", 1)
			name := fmt.Sprintf("%+v %s", g, v.name)
			require.Equal(t, real.res.GPUCacheBytes, model.GPUCacheBytes, name)
			require.Equal(t, real.res.CPUCacheBytes, model.CPUCacheBytes, name)
			require.Len(t, model.Epochs, len(real.res.Epochs))
			for k, e := range real.res.Epochs {
				m := model.Epochs[k]
				e, m = counts(e), counts(m)
				e.Loss, e.TrainAcc, e.ValAcc = 0, nil, nil
				if cfg.WithDefaults().IOStack != gpuio.StackCPU {
					m.SSDCommands = e.SSDCommands // the folder's controller moves more at a time
				}
				require.Equal(t, e, m, name)
			}
			r, m := *real.res.Packed, *model.Packed
			require.Equal(t, []int64{r.RowsMemory, r.RowsDiskCache, r.RowsChunks, r.AccessesMemory,
				r.AccessesDiskCache, r.AccessesChunks, r.PagesBytes, r.PlanBytes},
				[]int64{m.RowsMemory, m.RowsDiskCache, m.RowsChunks, m.AccessesMemory,
					m.AccessesDiskCache, m.AccessesChunks, m.PagesBytes, m.PlanBytes}, name)
			require.Equal(t, []any{r.Segment, r.Batches, r.Amplification, r.RequestBytes},
				[]any{m.Segment, m.Batches, m.Amplification, m.RequestBytes}, name)
			require.InDelta(t, m.SampleSeconds+m.PlanSeconds+m.PackSeconds, m.Seconds,
				1e-9+m.Seconds/1e6, name)
			require.Positive(t, min(m.SampleSeconds, m.PlanSeconds, m.PackSeconds), name)
		}
	}
}

// A superbatch is sampled before the first of its mini-batches trains, or while another trains; its
// mini-batches keep the operators' order, and what is played of an epoch is known beforehand.
func TestVirtualSuperbatches(t *testing.T) {
	d := large.generate(t)
	play := func(overlap bool, pipe string, set func(*hardware.Profile), warm,
		n int) (*report.ModelledResult, []drawn) {
		var b bytes.Buffer
		cfg := largeConfig(pipe)
		cfg.Policy, cfg.Superbatch, cfg.SuperbatchOverlap = plan.PolicyBelady, 3, overlap
		cfg.CoalesceBytes, cfg.Timeline = -1, timeline.New(&b, timeline.Virtual)
		hw, err := hardware.Load("a100-p5510x12")
		require.NoError(t, err)
		if set != nil {
			set(hw)
		}
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		r, err := virtual.Run(context.Background(), tiers.Simulation, cfg,
			prepare.Inputs{Dev: dev, Dataset: d},
			cost.Hardware{Profile: hw, SSDs: 4, Warm: warm, Batches: n}, report.Observer{})
		require.NoError(t, err)
		require.NoError(t, dev.Close())
		require.NoError(t, cfg.Timeline.Close())
		spans, _, _ := readTimeline(t, b.Bytes())
		return r, spans
	}
	for _, pipe := range []string{plan.PipelineNone, plan.PipelinePrefetch, plan.DefaultPipeline} {
		inTurn, spans := play(false, pipe, nil, 0, 0)
		checkOrder(t, spans, pipe, 0.001)
		for i := range spans { // the pass begins with these
			if spans[i].name == "sample superbatch" {
				spans[i].batch = 0
			}
		}
		conserved(t, pipe, largeConfig(pipe), inTurn.Epochs[0], spans)
		s := inTurn.Superbatch
		before := s.SampleSeconds + s.InspectSeconds
		require.Greater(t, inTurn.Epochs[0].Seconds, before, pipe)
		over, _ := play(true, pipe, nil, 0, 0)
		saved := inTurn.Epochs[0].Seconds - over.Epochs[0].Seconds
		require.Greater(t, saved, 0.2*before, pipe)
		require.Less(t, saved, before+s.ChangeSeconds,
			"%s: the first superbatch has nothing to hide behind", pipe)
		require.Equal(t, counts(inTurn.Epochs[0]), counts(over.Epochs[0]), pipe)
	}
	all, _ := play(false, "", nil, 0, 0)
	slow, _ := play(false, "", func(p *hardware.Profile) { p.PCIe.UVAGBs.Value /= 100 }, 0, 0)
	require.Greater(t, slow.Epochs[0].Seconds, all.Epochs[0].Seconds, "moves take the link")
	one, _ := play(false, "", func(p *hardware.Profile) { p.CPU.Cores.Value = 1 }, 0, 0)
	cpu := hardwareOf(t, "a100-p5510x12").CPU
	require.InDelta(t, float64(one.Superbatch.Accesses)*(cpu.InspectNS.Value+
		cpu.InspectScanNS.Value)/1e9, one.Superbatch.InspectSeconds, 1e-6)
	require.Greater(t, one.Superbatch.InspectSeconds, all.Superbatch.InspectSeconds)
	// Changes are found beside training, as long as that takes longer.
	none, _ := play(false, "", func(p *hardware.Profile) { p.CPU.ChangeNS.Value = 0 }, 0, 0)
	require.Less(t, all.Epochs[0].Seconds-none.Epochs[0].Seconds, 0.7*all.Superbatch.ChangeSeconds)
	late, _ := play(false, "", func(p *hardware.Profile) { p.CPU.ChangeNS.Value *= 100 }, 0, 0)
	require.Greater(t, late.Epochs[0].Seconds, late.Superbatch.ChangeSeconds)
	require.Equal(t, counts(all.Epochs[0]), counts(late.Epochs[0]))
	part, _ := play(false, "", nil, 4, 4)
	require.Equal(t, 4, part.Epochs[0].Batches)
	require.Less(t, part.Superbatch.SampleSeconds, all.Superbatch.SampleSeconds)
	require.Equal(t, 3, part.Superbatch.Superbatches)
}

// The accumulator's groups grow with its target, and each operator still has its place.
func TestVirtualAccumulator(t *testing.T) {
	d := large.generate(t)
	seconds := map[string]float64{}
	for name, set := range map[string]func(*plan.Config){
		"none": func(c *plan.Config) { c.Accumulate = plan.Off },
		"0.8":  func(c *plan.Config) { c.Accumulate = 0.8 },
		"0.95": func(c *plan.Config) { c.Accumulate = 0.95 },
	} {
		if wide.Lean() && name == "0.8" {
			continue
		}
		var b bytes.Buffer
		cfg := largeConfig("")
		cfg.Mode, cfg.Batch, cfg.Fanouts, cfg.CPUCache = dynamic.ModeGIDS, 16, []int{5, 5}, percent(
			10)
		set(&cfg)
		cfg.Timeline = timeline.New(&b, timeline.Virtual)
		r := playVirtual(t, cfg, d, "a100-optane", 1)
		require.NoError(t, cfg.Timeline.Close())
		e := r.Epochs[0]
		seconds[name] = e.Seconds
		t.Logf("%s: %.6f s, %d groups of %.1f, %+v", name, e.Seconds, e.ReadGroups, e.GroupBatches,
			r.Accumulator)
		spans, _, _ := readTimeline(t, b.Bytes())
		checkOrder(t, spans, plan.PipelineRunAhead, 0.001)
		if name == "none" {
			require.Zero(t, e.ReadGroups)
			require.Nil(t, r.Accumulator)
			continue
		}
		require.Greater(t, e.GroupBatches, 1.0)
		require.InDelta(t, 1.5e6, r.Accumulator.IOPS, 1e5)
		require.InDelta(t, 54e-6, r.Accumulator.OverheadSeconds, 20e-6,
			"25 and 5 us of a launch, the SSD's 11, and the kernel's own (BENCHMARKS.md)")
	}
	require.Less(t, seconds["0.95"], seconds["none"])
	if !wide.Lean() {
		require.Less(t, seconds["0.95"], seconds["0.8"])
		require.Less(t, seconds["0.8"], seconds["none"])
	}
}

// Batches before the first that is played fill the caches and are counted nowhere.
func TestVirtualWarm(t *testing.T) {
	d := large.generate(t)
	play := func(warm, n int) report.EpochResult {
		cfg := largeConfig("")
		cfg.Mode, cfg.Batch, cfg.Policy, cfg.GPUCache = dynamic.ModeBaM, 64, policy.LRU, percent(20)
		hw, err := hardware.Load("a100-optane")
		require.NoError(t, err)
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		r, err := virtual.Run(context.Background(), tiers.Simulation, cfg,
			prepare.Inputs{Dev: dev, Dataset: d},
			cost.Hardware{Profile: hw, Warm: warm, Batches: n}, report.Observer{})
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
	require.Equal(t, true, m["modelled"])
	require.Equal(t, "virtual", m["clock"])
	require.Equal(t, "h100-pm1753x16", m["hardware"])
	require.Equal(t, 16.0, m["ssd_count"])
	for _, k := range []string{"mode", "seed", "io_stack", "pipeline", "io", "presample_seconds",
		"fill_seconds", "gpu_cache_bytes"} {
		require.Contains(t, m, k)
	}
	for _, k := range []string{"params_sha256", "test_acc", "best_epoch", "peak_memory_bytes",
		"checkpoint"} {
		require.NotContains(t, m, k)
	}
	require.Len(t, m["epochs"], cfg.Epochs)
	for _, x := range m["epochs"].([]any) {
		e := x.(map[string]any)
		require.Equal(t, true, e["modelled"])
		for _, k := range []string{"epoch", "seconds", "rows_ssd", "overlap", "stall",
			"stage_seconds", "read_amplification", "val_seconds"} {
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
	for want, set := range map[string]func(*plan.Config){
		"option checkpoint": func(c *plan.Config) { c.CheckpointDir = t.TempDir() },
		"option pipeline":   func(c *plan.Config) { c.Pipeline = "x" },
		"option gpu-cache":  func(c *plan.Config) { c.GPUCache.Bytes = 200 << 30 },
	} {
		cfg := small()
		set(&cfg)
		_, err := virtual.Run(context.Background(), tiers.Simulation, cfg,
			prepare.Inputs{Dev: dev, Dataset: d},
			cost.Hardware{Profile: hw}, report.Observer{})
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	for want, mode := range map[string]string{"option topology memory": hier.ModeHier,
		"lends the CPU cache": ginex.ModeGinex} {
		stored := small()
		stored.Mode, stored.Topology, stored.CPUCache = mode, plan.TopologySSD, percent(10)
		_, err = virtual.Run(context.Background(), tiers.Simulation, stored,
			prepare.Inputs{Dev: dev, Dataset: d},
			cost.Hardware{Profile: hw}, report.Observer{})
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Capability, errs.ClassOf(err))
	}
	planned := small()
	planned.Policy, planned.CPUCache, planned.Tune = plan.PolicyBelady, percent(10), plan.TuneQuick
	_, err = virtual.Run(context.Background(), tiers.Simulation, planned,
		prepare.Inputs{Dev: dev,
			Dataset: d},
		cost.Hardware{Profile: hw}, report.Observer{})
	require.ErrorContains(t, err, "leave option tune out")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	static := small()
	static.Mode, static.Policy, static.Topology = ginex.ModeGinex, plan.PolicyStatic,
		plan.TopologyMemory
	_, err = virtual.Run(context.Background(), tiers.Simulation, static,
		prepare.Inputs{Dev: dev,
			Dataset: d},
		cost.Hardware{Profile: hw}, report.Observer{})
	require.ErrorContains(t, err, "option clock virtual plays superbatches under option policy belady")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	nccl := small()
	nccl.Replicas, nccl.Reduce = 2, plan.ReduceNCCL
	_, err = virtual.Run(context.Background(), tiers.Simulation, nccl,
		prepare.Inputs{Dev: dev,
			Dataset: d},
		cost.Hardware{Profile: hw}, report.Observer{})
	require.ErrorContains(t, err, "not nccl; leave option reduce out")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	ctx, cancel := context.WithCancel(context.Background())
	cfg := small()
	cfg.Epochs = 3
	r, err := virtual.Run(ctx, tiers.Simulation, cfg, prepare.Inputs{Dev: dev,
		Dataset: d},
		cost.Hardware{Profile: hw}, report.Observer{Epoch: func(report.EpochResult) { cancel() }})
	require.Equal(t, errs.Interrupted, errs.ClassOf(err))
	require.Len(t, r.Epochs, 1, "the whole epochs are there")
	require.NoError(t, dev.Close())
}

// large is a graph whose batches keep a dozen SSDs busy.
var large = graphSpec{nodes: 12_000, dim: 128, degree: 10, train: 0.4}

func largeConfig(pipe string) plan.Config {
	return plan.Config{
		ModelSettings: gnn.ModelSettings{Hidden: 256},
		Mode:          static.ModeHelios,
		Pipeline:      pipe,
		Fanouts:       []int{10, 10},
		Batch:         512,
		Seed:          5,
		Epochs:        1,
		NoEval:        true,
		GPUCache:      percent(5),
		CPUCache:      percent(10),
	}
}

// The timeline of each pipeline keeps the operators' order, and overlap helps as it should.
func TestVirtualPipelines(t *testing.T) {
	d := large.generate(t)
	seconds := map[string]float64{}
	for _, pipe := range []string{plan.PipelineNone, plan.PipelineIntra, plan.PipelinePrefetch,
		plan.DefaultPipeline} {
		var b bytes.Buffer
		cfg := largeConfig(pipe)
		cfg.CoalesceBytes = -1 // the reads are the same then
		cfg.Timeline = timeline.New(&b, timeline.Virtual)
		r := playVirtual(t, cfg, d, "a100-p5510x12", 4)
		require.NoError(t, cfg.Timeline.Close())
		e := r.Epochs[0]
		seconds[pipe] = e.Seconds
		t.Logf("%s: %.4f s, overlap %.2f, stall %.2f, %d commands, %+v", pipe, e.Seconds, e.Overlap,
			e.Stall, e.SSDCommands, e.StageSeconds)
		spans, counters, other := readTimeline(t, b.Bytes())
		require.Equal(t, map[string]any{"clock": "virtual", "modelled": true}, other)
		checkOrder(t, spans, pipe, 0.001)
		conserved(t, pipe, cfg, e, spans)
		for _, c := range []string{report.TrackCredits, report.TrackReads} {
			require.Zero(t, counters[c][len(counters[c])-1], "%s under %s", c, pipe)
			for _, v := range counters[c] {
				require.GreaterOrEqual(t, v, 0.0)
			}
		}
		credits := 0.0
		for _, v := range counters[report.TrackCredits] {
			credits = max(credits, v)
		}
		require.LessOrEqual(t, credits, float64(cfg.WithDefaults().Schedule().Credits))
		if pipe == plan.PipelineNone {
			require.LessOrEqual(t, e.Overlap, 0.0, "one operator at a time")
		}
	}
	order := []string{plan.PipelineNone, plan.PipelineIntra, plan.PipelinePrefetch,
		plan.DefaultPipeline}
	for i := range order[1:] {
		require.LessOrEqual(t, seconds[order[i+1]], seconds[order[i]]*1.005, "%s after %s",
			order[i+1], order[i])
	}
	require.Less(t, seconds[plan.DefaultPipeline], seconds[plan.PipelineNone]*0.95)
}

// conserved holds what a pass reports against its spans: nothing is lost, done twice or done faster
// than the hardware allows.
func conserved(t *testing.T, name string, cfg plan.Config, e report.EpochResult, spans []drawn) {
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
	require.Equal(t, all, rows[report.TrackLookup], name)
	require.Equal(t, all, rows[report.TrackTrain], name)
	require.Equal(t, e.RowsSSD, rows[report.TrackComplete], name)
	require.Equal(t, e.RowsGPU+e.RowsCPU, rows[report.TrackGather], name)
	require.Equal(t, e.Batches, n[report.TrackTrain], name)
	samples := e.Batches * len(cfg.Fanouts)
	if e.StageSeconds.Inspect > 0 { // they are brought back
		samples = e.Batches
	}
	require.Equal(t, samples, n[report.TrackSample], name)
	require.InDelta(t, e.Seconds*1e6, to-from, 1, "%s: the pass is as long as its spans", name)
	st := e.StageSeconds
	for stage, s := range map[string]float64{"sample": st.Sample, "lookup": st.Lookup,
		"complete": st.Complete, "gather": st.Gather, "train": st.Train} {
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
	play := func(s plan.SMBudget) report.EpochResult {
		cfg := largeConfig(plan.DefaultPipeline)
		cfg.SMs = s
		return playVirtual(t, cfg, d, "a100-p5510x12", 12).Epochs[0]
	}
	free := play(plan.SMBudget{})
	small := play(plan.SMBudget{Train: 2})
	require.Greater(t, small.StageSeconds.Train, 5*free.StageSeconds.Train)
	require.GreaterOrEqual(t, small.Seconds, free.Seconds*0.999)
	sampler := play(plan.SMBudget{Sample: 4})
	require.Greater(t, sampler.StageSeconds.Sample, free.StageSeconds.Sample)
}

// More SSDs help until something else is the bottleneck, and never hurt much.
func TestVirtualSSDs(t *testing.T) {
	d := large.generate(t)
	last := 0.0
	for i, n := range []int{1, 3, 9} {
		cfg := largeConfig(plan.DefaultPipeline)
		r := playVirtual(t, cfg, d, "a100-p5510x12", n)
		require.Equal(t, n, r.SSDs)
		require.Len(t, r.IO.SSDs, n)
		if i > 0 {
			require.LessOrEqual(t, r.Epochs[0].Seconds, last*1.02, "%d SSDs", n)
		}
		last = r.Epochs[0].Seconds
	}
}

// Replicas on the virtual clock: the same mini-batches, read once, on several devices. Computing is
// divided, copies are paid for, and what one device reads for all bounds it.
func TestVirtualReplicas(t *testing.T) {
	d := large.generate(t)
	play := func(q, shards int, profile string, change func(*plan.Config)) report.EpochResult {
		var b bytes.Buffer
		cfg := largeConfig(plan.DefaultPipeline)
		cfg.Batch, cfg.Replicas, cfg.Shards = 256, q, shards
		if change != nil {
			change(&cfg)
		}
		cfg.Timeline = timeline.New(&b, timeline.Virtual)
		r := playVirtual(t, cfg, d, profile, 12)
		require.NoError(t, cfg.Timeline.Close())
		require.Equal(t, q, r.Replicas)
		require.Len(t, r.MoreDevices, q-1)
		e := r.Epochs[0]
		spans, _, _ := readTimeline(t, b.Bytes())
		trained := 0
		for _, s := range spans {
			if s.track == report.TrackTrain {
				trained++
			}
		}
		require.Equal(t, e.Batches, trained, "each mini-batch trains once")
		return e
	}
	compute := func(c *plan.Config) { // slow devices, everything in memory
		c.SMs.Train, c.Hidden, c.GPUCache, c.CPUCache = 2, 512, percent(90), percent(10)
	}
	one := play(1, 4, "a100-p5510x12", compute)
	last := one.Seconds
	for _, q := range []int{2, 4} {
		e := play(q, 4, "a100-p5510x12", compute)
		require.Equal(t, one.Batches, e.Batches)
		require.Equal(t, one.RowsGPU, e.RowsGPU)
		require.Less(t, e.Seconds, last*0.8, "%d devices", q)
		require.Greater(t, e.Seconds, one.Seconds/float64(q), "none has more than its share to do")
		last = e.Seconds
	}
	reading := func(c *plan.Config) { c.GPUCache, c.CPUCache = percent(1), percent(1) }
	a, b := play(1, 4, "a100-p5510x12", reading), play(4, 4, "a100-p5510x12", reading)
	require.Equal(t, a.BytesSSD, b.BytesSSD, "one device reads for all")
	// Devices that share memory and cores gain nothing but overlap.
	h1, h2 := play(1, 2, "host", compute), play(2, 2, "host", compute)
	require.InEpsilon(t, h1.Seconds, h2.Seconds, 0.1)
	require.Equal(t, b, play(4, 4, "a100-p5510x12", reading), "the same run takes the same time")
}

// So it is with mega-batches, whose parts, topology and mini-batches are made for real: memory,
// pages and, where the CPU reads one SSD, requests. The times are the model's.
func TestVirtualCountsOfMegaBatches(t *testing.T) {
	for n, g := range []graphSpec{tiny, dense} {
		d, feat := g.open(t)
		sets := map[int]*ssdSet{1: bind(t, d, 1, ""), 2: bind(t, d, 2, "")}
		for i, v := range []variant{
			{"hier", func(c *plan.Config) { c.StaticNodes, c.Passes = 4, 2 }, 2, 1},
			{"marius, sequential", func(c *plan.Config) {
				c.Mode, c.GPUCache = hier.ModeMarius, plan.NoCache()
				c.PartOrder, c.MegaBatch.Parts, c.Parts = hierspec.PartsSequential, 8, 10
			}, 2, 1},
			{"hier, statics in CPU memory, nothing ahead", func(c *plan.Config) {
				c.StaticNodes, c.GPUCache, c.LoadAhead = 10, plan.NoCache(), hierspec.LoadAheadOff
			}, 2, 1},
			{"marius on SSDs, shards, no evaluation", func(c *plan.Config) {
				c.Mode, c.GPUCache, c.PagesOn = hier.ModeMarius, plan.NoCache(), plan.PagesSSDs
				c.Shards, c.NoEval = 3, true
			}, 2, 2},
			{"hier, as many parts as fit, labor", func(c *plan.Config) {
				c.MegaBatch.Parts, c.Sampler = 0, graph.Labor
			}, 2, 1},
			{"hier, whole", func(c *plan.Config) { c.MegaBatch.Parts = 5 }, 2, 1},
		} {
			if n > 0 && i%2 != 0 || wide.Lean() && (n > 0 || i > 3) {
				continue
			}
			cfg := onMega(t, 5, 2)
			cfg.Epochs, cfg.Topology = 3, plan.TopologyMemory // the wall clock's, too
			v.set(&cfg)
			real := train(t, context.Background(), cfg, d, feat, sets[v.ssds], 2, report.Observer{})
			require.NoError(t, real.err, v.name)
			model := playVirtual(t, cfg, d, "a100-p5510x12", v.ssds)
			name := fmt.Sprintf("%+v %s", g, v.name)
			require.Equal(t, real.res.GPUCacheBytes, model.GPUCacheBytes, name)
			require.Equal(t, real.res.CPUCacheBytes, model.CPUCacheBytes, name)
			require.Len(t, model.Epochs, len(real.res.Epochs))
			for k, e := range real.res.Epochs {
				m := model.Epochs[k]
				require.Equal(t, !cfg.NoEval, m.ValSeconds > 0, name)
				e, m = counts(e), counts(m)
				e.Loss, e.TrainAcc, e.ValAcc = 0, nil, nil
				require.Equal(t, e, m, name)
			}
			r, m := *real.res.Mega, *model.Mega
			require.Greater(t, r.LoadSeconds, r.InduceSeconds, name)
			require.Greater(t, m.LoadSeconds, m.InduceSeconds, name)
			require.Positive(t, min(r.InduceSeconds, m.InduceSeconds, m.WaitSeconds), name)
			// Figures of a folder, or of time, are not the model's.
			for _, i := range []*hierspec.MegaInfo{&r, &m} {
				i.Dir, i.PagesOn, i.Reused, i.Key, i.LayoutSeconds = "", "", false, "", 0
				i.LoadSeconds, i.InduceSeconds, i.WaitSeconds, i.Waits = 0, 0, 0, 0
			}
			require.Equal(t, r, m, name)
		}
	}
}

// Loads hide behind training where that takes as long, and bound an epoch where it does not; the
// seconds of all passes add up to the clock's.
func TestVirtualMegaBatches(t *testing.T) {
	d := large.generate(t)
	play := func(profile string, ssds, batches int, set func(*plan.Config)) (*report.ModelledResult,
		[]drawn) {
		var b bytes.Buffer
		cfg := largeConfig("")
		cfg.Mode, cfg.Pipeline, cfg.IOStack = hier.ModeHier, "", ""
		cfg.GPUCache, cfg.CPUCache, cfg.Hotness = percent(5), percent(80), ""
		cfg.Parts, cfg.MegaBatch.Parts, cfg.Epochs, cfg.NoEval = 16, 4, 3, true
		cfg.Hidden, cfg.Fanouts, cfg.Batch = 16, []int{4, 4}, 2048
		cfg.Timeline = timeline.New(&b, timeline.Virtual)
		if set != nil {
			set(&cfg)
		}
		hw := hardwareOf(t, profile)
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		r, err := virtual.Run(context.Background(), tiers.Simulation, cfg,
			prepare.Inputs{Dev: dev, Dataset: d},
			cost.Hardware{Profile: hw, SSDs: ssds, Batches: batches}, report.Observer{})
		require.NoError(t, err)
		require.NoError(t, dev.Close())
		require.NoError(t, cfg.Timeline.Close())
		spans, _, _ := readTimeline(t, b.Bytes())
		return r, spans
	}
	seconds := func(r *report.ModelledResult) (s float64) {
		for _, e := range r.Epochs {
			s += e.Seconds
		}
		return s
	}
	many, _ := play("a100-p5510x12", 12, 0, nil)
	require.Equal(t, 11, many.Mega.Ahead)
	require.Less(t, many.Mega.WaitSeconds, 0.5*many.Mega.LoadSeconds, "%+v", many.Mega)
	require.Positive(t, many.Mega.WaitSeconds, "the first load has nothing to hide behind")
	off, _ := play("a100-p5510x12", 12, 0, func(c *plan.Config) { c.LoadAhead = hierspec.LoadAheadOff })
	require.Zero(t, off.Mega.Ahead)
	require.InDelta(t, off.Mega.LoadSeconds, off.Mega.WaitSeconds, 1e-9)
	require.InDelta(t, seconds(many)+off.Mega.WaitSeconds-many.Mega.WaitSeconds, seconds(off),
		0.02*seconds(off))
	// One slow SSD bounds: an epoch takes as long as its loads, and more passes cost little.
	one, spans := play("a100-980pro", 1, 0, nil)
	last := one.Epochs[2].Seconds
	rate := float64(one.Epochs[2].BytesSSD) / last
	require.Greater(t, last, 1.5*many.Epochs[2].Seconds)
	require.InDelta(t, one.Mega.LoadSeconds, seconds(one), 0.1*seconds(one))
	require.Less(t, rate, 7.01e9, "a 980 Pro reads 7 GB/s in order")
	require.Greater(t, rate, 3e9, "loads are short here, and their ends cost")
	auto, _ := play("a100-980pro", 1, 0, func(c *plan.Config) { c.Passes = hierspec.PassesAuto })
	require.Greater(t, auto.Mega.Passes, 1)
	require.True(t, auto.Mega.PassesAuto)
	require.Equal(t, int64(auto.Mega.Passes)*one.Epochs[0].Seeds, auto.Epochs[0].Seeds)
	require.Less(t, seconds(auto), 1.5*seconds(one), "passes hide behind loads")
	if !wide.Lean() {
		given, _ := play("a100-980pro", 1, 0, func(c *plan.Config) { c.Passes = auto.Mega.Passes })
		for i, e := range given.Epochs {
			require.Equal(t, counts(e), counts(auto.Epochs[i]))
		}
	}
	// No two loads at one time, each with its inducing at its end.
	end, loads := 0.0, 0
	for _, s := range spans {
		if s.name == "load mega-batch" {
			require.GreaterOrEqual(t, s.from, end-1e-3)
			end = s.to
			loads++
		}
	}
	require.Equal(t, one.Mega.MegaBatches, loads)
	// A part of an epoch that is played loads no more than it needs.
	part, _ := play("a100-980pro", 1, 3, nil)
	require.Equal(t, 3, part.Epochs[0].Batches)
	require.Less(t, part.Mega.MegaBatches, one.Mega.MegaBatches)
	devices, _ := play("a100-p5510x12", 12, 0, func(c *plan.Config) { c.Replicas, c.Shards = 2, 2 })
	e, f := counts(devices.Epochs[1]), counts(many.Epochs[1])
	require.Equal(t, f, e)
}

// Over a topology on storage a modelled run draws, finds in its neighbour cache and reads what a
// real one does; its reads take time, and the rows' commands are those over a topology in memory.
func TestVirtualCountsOfTopologyOnSSD(t *testing.T) {
	ways := []variant{
		{"none", modePipe(static.ModeHelios, plan.PipelineNone, caches(5, 10)), 2, 3},
		{"deep", modePipe(static.ModeHelios, plan.DefaultPipeline, caches(10, 0)), 2, 3},
		{"gids", func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache = dynamic.ModeGIDS, percent(10), percent(10)
		}, 2, 3},
		{"belady", modePipe(static.ModeHelios, plan.DefaultPipeline, func(c *plan.Config) {
			c.Policy, c.GPUCache, c.CPUCache = plan.PolicyBelady, percent(5), percent(10)
		}), 2, 3},
		{"ginex overlapped", func(c *plan.Config) {
			c.Mode, c.CPUCache = ginex.ModeGinex, percent(20)
			c.Superbatch, c.SuperbatchOverlap = 2, true
		}, 2, 3},
		{"gcn", modePipe(static.ModeHelios, plan.DefaultPipeline,
			func(c *plan.Config) { c.Model, c.Fanouts = "gcn", []int{-1, 2} }), 2, 3},
		{"ladies", modePipe(static.ModeHelios, plan.DefaultPipeline,
			func(c *plan.Config) { c.Sampler, c.Fanouts = graph.Ladies, []int{40, 30} }), 2, 3},
		{"labor", modePipe(static.ModeHelios, plan.DefaultPipeline,
			func(c *plan.Config) { c.Sampler, c.BatchDependency = graph.Labor, 4 }), 2, 3},
	}
	for n, g := range []graphSpec{tiny, dense} {
		d, feat := g.open(t)
		s := bind(t, d, 3, "")
		for i, v := range ways {
			if n > 0 && i%3 != 0 || wide.Lean() && (n > 0 || i > 3) {
				continue
			}
			cfg := small()
			v.set(&cfg)
			cfg.Topology, cfg.NeighborCache = plan.TopologySSD, []units.Budget{plan.NoCache(),
				percent(40)}[i%2]
			if cfg.WithDefaults().Policy == plan.PolicyBelady {
				cfg.SuperbatchDir = t.TempDir()
			}
			real := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, real.err, v.name)
			model := playVirtual(t, cfg, d, "a100-p5510x12", 3)
			require.Equal(t, model, playVirtual(t, cfg, d, "a100-p5510x12", 3), v.name)
			cfg.Topology, cfg.NeighborCache = plan.TopologyMemory, units.Budget{}
			memory := playVirtual(t, cfg, d, "a100-p5510x12", 3)
			name := fmt.Sprintf("%+v %s", g, v.name)
			for i, e := range real.res.Epochs {
				m := model.Epochs[i]
				r, f := *e.TopologyReads, *m.TopologyReads
				require.Positive(t, f.Reads, name)
				require.Positive(t, f.Wait, name)
				require.InDelta(t, f.Wait.Seconds(), m.StageSeconds.Topology, 1e-9, name)
				r.Wait, f.Wait = 0, 0
				require.Equal(t, r, f, name)
				require.Nil(t, memory.Epochs[i].TopologyReads, name)
				if cfg.Pipeline == plan.PipelineNone { // nothing hides them
					require.Greater(t, m.Seconds, memory.Epochs[i].Seconds, name)
				}
				require.GreaterOrEqual(t, m.StageSeconds.Between, -1e-9, name)
				e, m = counts(e), counts(m)
				e.Loss, e.TrainAcc, e.ValAcc = 0, nil, nil
				// groups differ in it
				if cfg.WithDefaults().IOStack == gpuio.StackCPU {
					e.BytesSSD, e.SSDCommands, e.ReadAmplification = m.BytesSSD, m.SSDCommands,
						m.ReadAmplification
				}
				require.Equal(t, e, m, name)
			}
			require.Equal(t, memory.IO.SSDs, model.IO.SSDs, "%s: lists are no rows", name)
			r, f := *real.res.TopologyStorage, *model.TopologyStorage
			r.OpenSeconds, r.Direct, r.IOUring = 0, true, true
			require.Equal(t, r, f, name)
			require.Equal(t, real.res.TopologyBytes, model.TopologyBytes, name)
		}
	}
}

// The tuner on modelled times tries what that of a real run tries, takes the best of it, and
// changes no count: the first epoch has each mini-batch once, and the next one is not slower.
func TestVirtualTune(t *testing.T) {
	d, _ := tiny.open(t)
	for _, c := range []struct {
		name  string
		cfg   plan.Config
		knobs []string
	}{
		{"quick", tuned(plan.TuneQuick, nil), []string{"prefetch-depth", "sm-budget"}},
		{"full", tuned(plan.TuneFull, nil), []string{"prefetch-depth", "sm-budget", "io-blocks"}},
		{"gids", tuned(plan.TuneFull, func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache = dynamic.ModeGIDS, percent(10), percent(10)
		}), []string{"accumulate"}},
		{"a window", tuned(plan.TuneFull, dyn(policy.LRU, dynamicspec.LineRow,
			func(c *plan.Config) { c.Window = 2 })), []string{"prefetch-depth", "sm-budget",
			"io-blocks"}},
		{"in turn", tuned(plan.TuneFull, func(c *plan.Config) { c.Pipeline = plan.PipelineNone }),
			nil},
	} {
		if wide.Lean() && (c.name == "full" || c.name == "a window") {
			continue
		}
		c.cfg.Batch, c.cfg.Epochs = 2, 2 // the first one has the segments in it
		r := playVirtual(t, c.cfg, d, "a100-p5510x12", 3)
		require.Equal(t, r, playVirtual(t, c.cfg, d, "a100-p5510x12", 3), c.name)
		plain := c.cfg
		plain.Tune = plan.TuneOff
		want := playVirtual(t, plain, d, "a100-p5510x12", 3)
		require.Nil(t, want.Tuned, c.name)
		for i, e := range r.Epochs {
			e, w := counts(e), counts(want.Epochs[i])
			require.Equal(t, w, e, c.name)
		}
		u := r.Tuned
		require.NotNil(t, u, c.name)
		if c.knobs == nil {
			require.Contains(t, u.Skipped, "nothing to choose")
			require.Equal(t, want.Epochs[0].Seconds, r.Epochs[0].Seconds)
			continue
		}
		var knobs []string
		before := 0.0
		for _, x := range u.Trials {
			if !slices.Contains(knobs, x.Setting) {
				knobs = append(knobs, x.Setting)
			}
			if x.Before {
				before = x.Seconds
			}
			require.Positive(t, x.Seconds, c.name)
			if x.Chosen && before > 0 {
				require.LessOrEqual(t, x.Seconds, before, "%s: %+v", c.name, x)
			}
			if x.Chosen {
				before = 0
			}
		}
		require.Equal(t, c.knobs, knobs, c.name)
		require.Empty(t, u.Skipped, c.name)
		require.Positive(t, u.Seconds, c.name)
		require.Less(t, u.Batches, r.Epochs[0].Batches, c.name)
		last := len(r.Epochs) - 1
		require.LessOrEqual(t, r.Epochs[last].Seconds, want.Epochs[last].Seconds*1.03, "%s: %s",
			c.name, u.Flags)
		t.Logf("%s: %.4g ms an epoch, tuned %.4g ms: %q", c.name, 1e3*want.Epochs[last].Seconds,
			1e3*r.Epochs[last].Seconds, u.Flags)
	}
}
