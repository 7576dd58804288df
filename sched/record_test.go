package sched

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/replay"
	"helios/cache/trace"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/internal/wide"
	"helios/sched/report"
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

// A trace of tiers that know a superbatch tells which mini-batches they knew: a replay comes to
// what the run counted, in turn and overlapped, of one tier and of two, whole or interrupted.
func TestTraceOfPlannedTiers(t *testing.T) {
	for n, g := range []graphSpec{tiny, dense} {
		d, feat := g.open(t)
		for i, v := range plannedWays {
			if n > 0 && i%3 != 0 || wide.Lean() && i > 4 {
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
			require.Equal(t, cfg.WithDefaults().Planned() && e.RowsSSD > 0,
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
