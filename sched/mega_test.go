package sched

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/hier"
	hierspec "helios/sched/tiers/hier/spec"
	"helios/sched/tiers/static"
)

// megaWays are mega-batches of the whole graph, which give what every other mode does.
var megaWays = []variant{
	{"hier", func(c *plan.Config) { c.Mode = hier.ModeHier; wholeGraph(c) }, 2, 2},
	{"marius, async", func(c *plan.Config) {
		c.Mode, c.IOStack = hier.ModeMarius, gpuio.StackAsync
		wholeGraph(c)
	}, 3, 1},
}

// onMega is small under mode hier, with parts of a test's own.
func onMega(t testing.TB, parts, loaded int) plan.Config {
	cfg := small()
	cfg.Mode, cfg.GPUCache, cfg.CPUCache = hier.ModeHier, percent(5), percent(60)
	cfg.Parts, cfg.MegaBatch.Parts, cfg.PartedDir = parts, loaded, t.TempDir()
	return cfg
}

// One part, no static nodes and one pass: the mini-batches, rows and parameters of every other
// mode, with every model and every way to sample.
func TestMegaOfAllIsInmem(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for i, v := range []struct {
		model, sampler string
		fanouts        []int
	}{
		{"sage", graph.Neighbor, []int{4, 3}}, {"gcn", graph.Neighbor, []int{-1, 2}},
		{"gat", graph.Labor, []int{4, 3}}, {"gin", graph.Ladies, []int{60, 40}},
	} {
		if wide.Lean() && i > 1 {
			break
		}
		set := func(c *plan.Config) {
			c.Model, c.Sampler, c.Fanouts = v.model, v.sampler, v.fanouts
		}
		cfg := small()
		cfg.Mode = static.ModeInmem
		set(&cfg)
		want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, want.err)
		m := onMega(t, 1, 0)
		m.StaticNodes = hierspec.NoShare
		set(&m)
		r := train(t, context.Background(), m, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err, v.model)
		require.Equal(t, want.blocks, r.blocks, v.model)
		require.Equal(t, want.seen, r.seen, v.model)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, v.model)
		require.Equal(t, want.res.TestAcc, r.res.TestAcc, v.model)
		i := r.res.Mega
		require.NotNil(t, i)
		require.Equal(t, 1, i.MegaBatches)
		require.Equal(t, []int{1, 1}, []int{i.Parts, i.Loaded})
	}
}

// Workers, SSDs, stacks, pipelines, tiers and loading ahead change nothing.
func TestMegaEveryWay(t *testing.T) {
	d, feat := padded.open(t)
	sets := map[int]*ssdSet{1: bind(t, d, 1, ""), 2: bind(t, d, 2, "")}
	cfg := onMega(t, 5, 2)
	cfg.StaticNodes, cfg.Passes = 4, 2
	dir := cfg.PartedDir
	want := train(t, context.Background(), cfg, d, feat, sets[2], 2, report.Observer{})
	require.NoError(t, want.err)
	i := want.res.Mega
	require.Equal(t, 6, i.MegaBatches)
	require.Equal(t, 5, i.Ahead)
	require.True(t, i.StaticOnGPU)
	require.EqualValues(t, 60, i.StaticRows)
	for _, e := range want.res.Epochs {
		require.EqualValues(t, 2*d.Meta.Train, e.Seeds)
		require.Positive(t, e.RowsGPU)
		require.Positive(t, e.BytesSSD)
		require.Zero(t, e.RowsSSD)
	}
	for n, v := range []variant{
		{"one worker, one SSD, none", func(c *plan.Config) { c.Pipeline = plan.PipelineNone }, 1, 1},
		{"async, deep", func(c *plan.Config) {
			c.IOStack, c.Pipeline = gpuio.StackAsync, plan.DefaultPipeline
		}, 3, 2},
		{"mmap, nothing ahead", func(c *plan.Config) {
			c.IOStack, c.LoadAhead = gpuio.StackMmap, hierspec.LoadAheadOff
		}, 2, 1},
		{"sync, no GPU tier, checked", func(c *plan.Config) {
			c.IOStack, c.GPUCache, c.CheckReads = gpuio.StackSync, plan.NoCache(), plan.ChecksOn
		}, 2, 2},
	} {
		if wide.Lean() && n > 1 {
			break
		}
		m := cfg
		m.PartedDir = dir
		v.set(&m)
		r := train(t, context.Background(), m, d, feat, sets[v.ssds], v.workers, report.Observer{})
		require.NoError(t, r.err, v.name)
		require.Equal(t, want.blocks, r.blocks, v.name)
		require.Equal(t, want.seen, r.seen, v.name)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
		require.Equal(t, want.res.TestAcc, r.res.TestAcc, v.name)
		if m.LoadAhead == hierspec.LoadAheadOff {
			require.Zero(t, r.res.Mega.Ahead)
		}
	}
}

// A run that is interrupted, in a load or within a mega-batch, goes on to the same parameters,
// also without the options that the checkpoint knows.
func TestMegaGoesOn(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := onMega(t, 6, 2)
	cfg.Batch, cfg.Epochs = 48, 3
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	cfg.CheckpointDir, cfg.Resume, cfg.CheckpointEvery = t.TempDir(), true, 2
	runs := 0
	for stop := 2; ; stop += 5 {
		runs++
		r := trainStopped(t, stop, cfg, d, feat, s)
		if r.err == nil {
			require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
			require.Equal(t, want.res.TestAcc, r.res.TestAcc)
			for i, e := range want.res.Epochs {
				is := r.res.Epochs[i]
				require.Equal(t, []any{e.Loss, e.ValAcc, e.Batches, e.Seeds, e.RowsGPU, e.RowsCPU},
					[]any{is.Loss, is.ValAcc, is.Batches, is.Seeds, is.RowsGPU, is.RowsCPU})
			}
			break
		}
		require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
		if held, err := HeldIn(cfg.CheckpointDir); err == nil && held != nil {
			cfg.MegaBatch = hierspec.MegaSize{} // the checkpoint says
		}
		require.Less(t, runs, 40)
	}
	require.Greater(t, runs, 4)

	// A checkpoint of another run is refused, with the difference.
	cfg.Epochs++
	for want, set := range map[string]func(*plan.Config){
		"option megabatch 2, this run has 3": func(c *plan.Config) { c.MegaBatch.Parts = 3 },
		"option passes 1, this run has 2":    func(c *plan.Config) { c.Passes = 2 },
		"samples the whole graph": func(c *plan.Config) {
			*c = small()
			c.Batch, c.Epochs, c.CheckpointDir, c.Resume = 48, 4, cfg.CheckpointDir, true
		},
		"in other parts": func(c *plan.Config) { c.Parts, c.PartedDir = 7, t.TempDir() },
	} {
		c := cfg
		set(&c)
		r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
		require.ErrorContains(t, r.err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(r.err), "%v", r.err)
	}
	other := small()
	other.CheckpointDir, other.Epochs = t.TempDir(), 1
	require.NoError(t, train(t, context.Background(), other, d, feat, s, 2, report.Observer{}).err)
	c := onMega(t, 6, 2)
	c.CheckpointDir, c.Resume = other.CheckpointDir, true
	r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "samples within mega-batches")
}

// Passes that a run chooses are those of a run that was told their number; the checkpoint keeps
// them.
func TestMegaPassesAuto(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for _, shards := range []int{1, 2} {
		if wide.Lean() && shards == 1 {
			continue
		}
		cfg := onMega(t, 5, 2)
		cfg.Batch, cfg.Passes, cfg.Shards, cfg.Epochs = 128, hierspec.PassesAuto, shards, 1
		cfg.NoEval = true
		cfg.CheckpointDir, cfg.CheckpointEvery = t.TempDir(), 1
		// Loads seem slow, whatever they take.
		was := hier.LoadTime
		hier.LoadTime = func(time.Duration) time.Duration { return time.Hour }
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.Equal(t, hierspec.MostPassesAuto, r.res.Mega.Passes)
		require.True(t, r.res.Mega.PassesAuto)
		given := cfg
		given.Passes, given.CheckpointDir = hierspec.MostPassesAuto, ""
		want := train(t, context.Background(), given, d, feat, s, 2, report.Observer{})
		require.NoError(t, want.err)
		require.Equal(t, want.blocks, r.blocks)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)

		hier.LoadTime = func(time.Duration) time.Duration { return 0 }
		cfg.Resume, cfg.Epochs, given.Epochs = true, 2, 2
		r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.Equal(t, hierspec.MostPassesAuto, r.res.Mega.Passes)
		want = train(t, context.Background(), given, d, feat, s, 2, report.Observer{})
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)

		cfg.Resume, cfg.CheckpointDir = false, ""
		r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		hier.LoadTime = was
		require.NoError(t, r.err)
		require.Equal(t, 1, r.res.Mega.Passes)
	}
}

// Wherever a run is stopped, also right behind what it measures, the choice is the same, and so
// are the parameters. A checkpoint from then on holds it.
func TestMegaPassesAutoStopped(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	was := hier.LoadTime
	hier.LoadTime = func(time.Duration) time.Duration { return time.Hour }
	t.Cleanup(func() { hier.LoadTime = was })
	for _, shards := range []int{1, 2} {
		if wide.Lean() && shards > 1 {
			continue
		}
		cfg := onMega(t, 5, 2)
		cfg.Batch, cfg.Passes, cfg.Shards, cfg.Epochs = 96, hierspec.PassesAuto, shards, 1
		cfg.NoEval = true
		want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, want.err)
		require.Equal(t, hierspec.MostPassesAuto, want.res.Mega.Passes)
		cfg.CheckpointEvery, cfg.Resume = 1, true
		chosen := 0
		stops := []int{1, 2, 3, 4, 5, 6, 7, 8}
		if wide.Lean() {
			stops = []int{1, 4, 5}
		}
		for _, stop := range stops {
			c := cfg
			c.CheckpointDir = t.TempDir()
			c.CheckpointEvery = stop % 2 // 0: saved where it stops only
			ctx, cancel := context.WithCancel(context.Background())
			heard := 0
			c.OnBatch = func(int, int, *graph.MiniBatch) {
				if heard++; heard == stop {
					cancel()
				}
			}
			r := train(t, ctx, c, d, feat, s, 2, report.Observer{})
			cancel()
			require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
			if r.res.Mega.Passes != 0 {
				chosen++
			}
			c.OnBatch = nil
			r = train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
			require.NoError(t, r.err, stop)
			require.Equal(t, hierspec.MostPassesAuto, r.res.Mega.Passes, stop)
			require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, stop)
		}
		require.Greater(t, chosen, 1, "some stop behind the first pass")
		require.Less(t, chosen, len(stops), "some stop within the first pass")

		// A step that goes beyond the first mega-batch leaves nothing to measure.
		c := cfg
		c.Shards, c.Resume, c.CheckpointEvery = 64, false, 0
		r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
		require.Equal(t, errs.Usage, errs.ClassOf(r.err), "%v", r.err)
		require.ErrorContains(t, r.err, "option shards 64 goes beyond them")
	}
}

// Parts that hold the training nodes stay, and each epoch is one mega-batch.
func TestMegaSequential(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := onMega(t, 10, 8)
	cfg.Mode, cfg.GPUCache, cfg.PartOrder = hier.ModeMarius, units.Budget{},
		hierspec.PartsSequential
	cfg.Epochs = 4
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, r.err)
	// Two epochs in turn may have the same parts.
	require.Greater(t, r.res.Mega.MegaBatches, 1)
	require.LessOrEqual(t, r.res.Mega.MegaBatches, 4)
	require.Zero(t, r.res.Mega.StaticRows)
	for _, e := range r.res.Epochs {
		require.EqualValues(t, d.Meta.Train, e.Seeds)
	}
	first, last := r.res.Epochs[0].BytesSSD, r.res.Epochs[3].BytesSSD
	require.Less(t, last, first*3/4, "parts that stay are not read again")
	off := cfg
	off.LoadAhead = hierspec.LoadAheadOff
	again := train(t, context.Background(), off, d, feat, s, 1, report.Observer{})
	require.NoError(t, again.err)
	require.Equal(t, r.blocks, again.blocks)
	require.Equal(t, r.res.ParamsSHA256, again.res.ParamsSHA256)
	cfg.MegaBatch.Parts = 2
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "have the training nodes and are in every mega-batch")
}

// The budget is held, of features five times as large too, and the error names what takes it;
// without a size there are as many parts as fit. An epoch reads the formula's bytes and what fills
// up pages, in long requests.
func TestMegaBudget(t *testing.T) {
	was := hier.LeastBudget
	hier.LeastBudget = 0
	t.Cleanup(func() { hier.LeastBudget = was })
	// Parts of twelve pages: what they are padded to is little.
	d, feat := graphSpec{nodes: 24000, dim: 128, degree: 6, train: 0.02}.open(t)
	s := bind(t, d, 2, "")
	cfg := onMega(t, 16, 0)
	cfg.Epochs, cfg.NoEval = 1, true
	last := 0
	for _, share := range []float64{20, 40, 100} {
		cfg.CPUCache = percent(share)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		i := r.res.Mega
		require.Greater(t, i.Loaded, last)
		require.LessOrEqual(t, i.CPUBytes, i.Budget)
		require.Equal(t, i.CPUBytes, r.res.CPUCacheBytes)
		require.GreaterOrEqual(t, i.RequestBytes, 256.0*1024)
		read := i.FeatureBytes + i.EdgeBytes
		require.GreaterOrEqual(t, read, i.EpochBytes)
		require.Less(t, read, i.EpochBytes+2*int64(i.Parts)*i.PageBytes)
		last = i.Loaded
	}
	cfg.CPUCache = percent(3)
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	for _, want := range []string{"mega-batches of 1 of 16 parts take", "static lists", "of edges",
		"each of 2 mega-batches", "topology", "option cpu-cache"} {
		require.ErrorContains(t, r.err, want)
	}
	cfg.CPUCache, cfg.MegaBatch.Percent = percent(40), 90
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "mega-batches of 14 of 16 parts take")
}

// Every row that a mega-batch trains on is that of its node in the dataset.
func TestMegaVerifyRows(t *testing.T) {
	in := computedInputs(t, rowtype.Float32, "")
	cfg := onMega(t, 4, 2)
	cfg.VerifyRows, cfg.IOStack = true, gpuio.StackAsync
	res, err := Train(context.Background(), cfg, in, report.Observer{})
	require.NoError(t, err)
	rows := int64(0)
	for _, e := range res.Epochs {
		rows += e.RowsGPU + e.RowsCPU
	}
	require.NotNil(t, res.RowsVerified)
	require.GreaterOrEqual(t, *res.RowsVerified, rows)
}

// A read that fails while the next mega-batch loads behind the one that trains ends the run when
// that would begin: nothing trains on it, everything is given back, and the run goes on from the
// checkpoint to the same parameters.
func TestMegaLoadFails(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := onMega(t, 6, 2)
	cfg.IOStack = gpuio.StackAsync
	cfg.PagesOn, cfg.Epochs, cfg.NoEval, cfg.Batch = plan.PagesSSDs, 3, true, 48
	cfg.ReadTimeout, cfg.ReadRetries = 300*time.Millisecond, 1
	trained := 0
	cfg.OnBatch = func(int, int, *graph.MiniBatch) { trained++ }
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	all := trained
	cfg.CheckpointEvery, cfg.Resume = 1, true
	struck := 0
	for i, after := range []int{30, 34, 38, 42, 46} {
		if wide.Lean() && i != 1 {
			continue
		}
		for _, fault := range []string{"error(op=read,sct=2,sc=0x81,dnr=1,after=%d)",
			"lost(op=read,after=%d)"} {
			c := cfg
			c.CheckpointDir = t.TempDir()
			s.off(t)
			s.power(t, fmt.Sprintf(fault, after))
			before := testrig.Held(t)
			trained = 0
			r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
			before.Leaked(t, "topology")
			t.Logf("after %d: %d batches: %v", after, trained, r.err)
			s.off(t)
			s.power(t, "")
			if r.err == nil {
				continue
			}
			require.Equal(t, errs.Device, errs.ClassOf(r.err), "%v", r.err)
			if trained == 0 {
				continue // in a load that nothing trained beside
			}
			struck++
			require.ErrorContains(t, r.err, "load ")
			trained = 0
			again := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
			require.NoError(t, again.err)
			require.Less(t, trained, all, "it goes on, not from the start")
			require.Equal(t, want.res.ParamsSHA256, again.res.ParamsSHA256)
		}
	}
	require.Positive(t, struck)
}
