package sched

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/replay"
	"helios/cache/trace"
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/static"
	"helios/sched/virtual"
)

// replayed holds a trace's live counters against its replay; passes is how many had to be there.
func replayed(t testing.TB, path string, passes int) []replay.Checked {
	t.Helper()
	r, err := trace.Open(path)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Close()) }()
	all, err := replay.Check(context.Background(), r, gpuio.AnyStack([]string{r.Header().IOStack},
		func(s *gpuio.Stack) bool { return !s.Queued }), nil)
	require.NoError(t, err)
	compared := 0
	for _, c := range all {
		if c.Compared {
			compared++
			require.True(t, c.Equal, "%s %d: live %v, replayed %v", c.Kind, c.Epoch, c.Live,
				c.Replayed)
		}
	}
	require.Equal(t, passes, compared, "passes")
	return all
}

// An interrupted run leaves a trace whose whole passes agree; a failed one leaves none; neither
// does it leave a part of one.
func TestTraceOfRunsThatEndEarly(t *testing.T) {
	d, feat := tiny.open(t)
	dir := t.TempDir()
	cfg := small()
	dynamicWays[1].set(&cfg)
	cfg.Trace = filepath.Join(dir, "run.trace")
	ctx, cancel := context.WithCancel(context.Background())
	epochs := 0
	r := train(t, ctx, cfg, d, feat, bind(t, d, 2, ""), 2,
		report.Observer{Step: func(stage string, done, total int) {
			if stage == "epoch 2" {
				epochs++
				cancel()
			}
		}})
	cancel()
	require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
	replayed(t, cfg.Trace, 2)

	require.NoError(t, os.Remove(cfg.Trace))
	r = train(t, context.Background(), cfg, d, feat,
		bind(t, d, 2, "error(op=read,sct=2,sc=0x81,dnr=1,after=700)"), 2, report.Observer{})
	require.Equal(t, errs.Device, errs.ClassOf(r.err), "%v", r.err)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)

	cfg.Trace = filepath.Join(dir, "no", "such", "folder")
	r = train(t, context.Background(), cfg, d, feat, bind(t, d, 2, ""), 2, report.Observer{})
	require.ErrorContains(t, r.err, "option trace "+cfg.Trace)
}

// A trace of tiers that know a superbatch names the mini-batches that they knew: a replay comes to
// the counts of the run, in turn and overlapped, of one tier and of two, whole or interrupted.
func TestTraceOfPlannedTiers(t *testing.T) {
	for n, g := range []graphSpec{tiny, dense} {
		d, feat := g.open(t)
		for i, v := range plannedWays {
			if n > 0 && i%3 != 0 || wide.Lean() && (n > 0 || i > 2) {
				continue
			}
			cfg := small()
			v.set(&cfg)
			cfg.SuperbatchDir, cfg.Trace = t.TempDir(), filepath.Join(t.TempDir(), "run.trace")
			r := train(t, context.Background(), cfg, d, feat, bind(t, d, v.ssds, ""), v.workers,
				report.Observer{})
			require.NoError(t, r.err, v.name)
			all := replayed(t, cfg.Trace, 2*cfg.Epochs+1)
			e := r.res.Epochs[0]
			// no row of a static cache comes or goes, nor of a cache that is filled with all
			require.Equal(t, (cfg.WithDefaults().Policy == plan.PolicyBelady) &&
				e.RowsSSD > 0,
				all[0].Live.Inserted > 0, v.name)
			require.Equal(t, []int64{e.RowsGPU, e.RowsCPU, e.RowsSSD}, []int64{
				all[0].Replayed.RowsGPU, all[0].Replayed.RowsCPU, all[0].Replayed.RowsSSD}, v.name)
		}
	}
	d, feat := tiny.open(t)
	cfg := small()
	plannedWays[3].set(&cfg)
	cfg.Trace = filepath.Join(t.TempDir(), "run.trace")
	ctx, cancel := context.WithCancel(context.Background())
	r := train(t, ctx, cfg, d, feat, bind(t, d, 2, ""), 2, report.Observer{
		Step: func(stage string, _, _ int) {
			if stage == "epoch 2" {
				cancel()
			}
		}})
	cancel()
	require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
	replayed(t, cfg.Trace, 2)
}

// A trace that cannot be written is told before there is work, and one of a run that placed nothing
// by hotness has no scores.
func TestTraceBeginsAndScores(t *testing.T) {
	d, feat := tiny.open(t)
	dir := t.TempDir()
	cfg := small()
	cfg.Epochs, cfg.NoEval, cfg.GPUCache, cfg.CPUCache = 1, true, percent(5), percent(5)
	cfg.Trace = filepath.Join(dir, "none", "run.trace")
	r := train(t, context.Background(), cfg, d, feat, bind(t, d, 2, ""), 2,
		report.Observer{Step: func(stage string, done, total int) {
			require.Fail(t, "work before the error", "%s %d of %d", stage, done, total)
		}})
	require.Equal(t, errs.Usage, errs.ClassOf(r.err), "%v", r.err)

	cfg.Overwrite = true
	for _, scores := range []bool{true, false} {
		cfg.Trace = filepath.Join(dir, "run.trace")
		if !scores {
			cfg.GPUCache, cfg.CPUCache = percent(100), units.Budget{}
		}
		r = train(t, context.Background(), cfg, d, feat, bind(t, d, 2, ""), 2, report.Observer{})
		require.NoError(t, r.err)
		replayed(t, cfg.Trace, 1)
		f, err := trace.Open(cfg.Trace)
		require.NoError(t, err)
		require.Equal(t, scores, f.Totals().Hotness)
		require.NoError(t, f.Close())
	}
}

// The virtual clock's accesses are a real run's, so its trace is that run's to the byte, of every
// kind of tiers; the run's figures do not depend on it.
func TestTraceOnTheVirtualClock(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 3, "")
	var ways []variant
	for i, v := range slices.Concat([]variant{
		{"static", caches(5, 10), 3, 2},
		{"hop by hop", modePipe(static.ModeHelios, plan.DefaultPipeline, caches(10, 0)), 3, 2},
		{"all in memory", caches(100, 0), 3, 2},
		{"no evaluation", func(c *plan.Config) { c.NoEval = true }, 3, 2},
	}, dynamicWays[:4], plannedWays) {
		if !wide.Lean() || i < 3 || i%3 == 0 {
			ways = append(ways, v)
		}
	}
	for _, v := range ways {
		cfg := small()
		v.set(&cfg)
		c := cfg.WithDefaults()
		if runsOn(c, &ginex.System) && c.Policy != plan.PolicyBelady {
			continue // the virtual clock refuses it
		}
		cfg.Topology = plan.TopologyMemory
		if cfg.WithDefaults().Policy == plan.PolicyBelady {
			cfg.SuperbatchDir = t.TempDir()
		}
		cfg.Trace = filepath.Join(t.TempDir(), "run.trace")
		real := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, real.err, v.name)
		want, err := os.ReadFile(cfg.Trace)
		require.NoError(t, err)
		cfg.CheckReads = plan.ChecksOff // nothing is read
		cfg.Trace = filepath.Join(t.TempDir(), "modelled.trace")
		model := playVirtual(t, cfg, d, "a100-p5510x12", 3)
		got, err := os.ReadFile(cfg.Trace)
		require.NoError(t, err)
		passes := 2*cfg.Epochs + 1
		if cfg.NoEval {
			passes = cfg.Epochs
		}
		replayed(t, cfg.Trace, passes)
		require.True(t, bytes.Equal(want, got), "%s: %d bytes, modelled %d", v.name, len(want),
			len(got))
		cfg.Trace = ""
		require.Equal(t, playVirtual(t, cfg, d, "a100-p5510x12", 3), model, v.name)
	}
}

// A modelled run that is interrupted leaves a trace whose whole passes agree, and one that fails
// leaves none; a file that is there stays.
func TestTraceOfModelledRunsThatEndEarly(t *testing.T) {
	d, _ := tiny.open(t)
	dir := t.TempDir()
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	play := func(ctx context.Context, cfg plan.Config, obs report.Observer) error {
		_, err := virtual.Run(ctx, tiers.Simulation, cfg, prepare.Inputs{Dev: dev,
			Dataset: d},
			cost.Hardware{Profile: hardwareOf(t, "a100-p5510x12"), SSDs: 2}, obs)
		return err
	}
	cfg := small()
	dynamicWays[1].set(&cfg)
	cfg.Trace = filepath.Join(dir, "run.trace")
	ctx, cancel := context.WithCancel(context.Background())
	err = play(ctx, cfg, report.Observer{Epoch: func(report.EpochResult) { cancel() }})
	cancel()
	require.Equal(t, errs.Interrupted, errs.ClassOf(err), "%v", err)
	replayed(t, cfg.Trace, 2)

	err = play(context.Background(), cfg, report.Observer{})
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	replayed(t, cfg.Trace, 2)
	require.NoError(t, os.Remove(cfg.Trace))
	require.NoError(t, dev.Close())
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}
