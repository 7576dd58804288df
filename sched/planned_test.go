package sched

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/superbatch"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
	"helios/internal/timeline"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/static"
)

// plannedWays are tiers that know the future: one or both, superbatches of several lengths, in turn
// and overlapped, every kind of pipeline and stack.
var plannedWays = []variant{
	{"ginex", func(c *plan.Config) { c.Mode, c.CPUCache = ginex.ModeGinex, percent(10) }, 2, 2},
	{"ginex in superbatches", func(c *plan.Config) {
		c.Mode, c.CPUCache, c.Superbatch = ginex.ModeGinex, percent(10), 3
	}, 2, 4},
	{"ginex overlapped", func(c *plan.Config) {
		c.Mode, c.CPUCache = ginex.ModeGinex, percent(20)
		c.Superbatch, c.SuperbatchOverlap = 2, true
	}, 1, 2},
	{"helios", func(c *plan.Config) {
		c.Policy, c.GPUCache, c.CPUCache = plan.PolicyBelady, percent(5), percent(10)
		c.Superbatch = 4
	}, 2, 4},
	{"helios series without a CPU tier", func(c *plan.Config) {
		c.Policy, c.GPUCache, c.CPUCache = plan.PolicyBelady, percent(15), plan.NoCache()
		c.Pipeline, c.Superbatch, c.SuperbatchOverlap = plan.PipelineSeries, 3, true
	}, 2, 1},
	{"cpu checked", func(c *plan.Config) {
		c.Mode, c.Policy, c.CPUCache = static.ModeCPU, plan.PolicyBelady, percent(10)
		c.CheckReads = plan.ChecksOn
	}, 2, 2},
	{"ginex with a static cache", func(c *plan.Config) {
		c.Mode, c.Policy, c.CPUCache = ginex.ModeGinex, plan.PolicyStatic, percent(10)
		c.Hotness, c.Superbatch = plan.HotnessOutDegree, 3
	}, 2, 2},
	{"a static cache beside a GPU tier", func(c *plan.Config) {
		c.Mode, c.Policy, c.CPUCache = ginex.ModeGinex, plan.PolicyStatic, percent(10)
		c.GPUCache, c.Superbatch, c.SuperbatchOverlap = percent(5), 2, true
	}, 2, 2},
	{"ginex with lists on storage", func(c *plan.Config) {
		c.Mode, c.CPUCache, c.Topology, c.Superbatch = ginex.ModeGinex, percent(10),
			plan.TopologySSD, 3
	}, 2, 2},
	{"everything fits", func(c *plan.Config) {
		c.Mode, c.CPUCache = ginex.ModeGinex, percent(100)
	}, 2, 2},
}

// Every way gives the batches, rows and losses of static tiers, and the tiers miss no more than
// these.
func TestPlannedTiers(t *testing.T) {
	for n, g := range []graphSpec{tiny, dense} {
		d, feat := g.open(t)
		sets := map[int]*ssdSet{1: bind(t, d, 1, ""), 2: bind(t, d, 2, ""), 4: bind(t, d, 4, "")}
		cfg := small()
		caches(0, 10)(&cfg)
		static := train(t, context.Background(), cfg, d, feat, sets[2], 2, report.Observer{})
		require.NoError(t, static.err)
		for i, v := range plannedWays {
			if n > 0 && i%3 != 0 || wide.Lean() && (n > 0 || i > 3) {
				continue
			}
			cfg := small()
			v.set(&cfg)
			dir := t.TempDir()
			cfg.SuperbatchDir = dir
			r := train(t, context.Background(), cfg, d, feat, sets[v.ssds], v.workers,
				report.Observer{})
			require.NoError(t, r.err, v.name)
			require.Equal(t, static.blocks, r.blocks, v.name)
			require.Equal(t, static.seen, r.seen, v.name)
			require.Equal(t, static.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
			require.Equal(t, static.res.TestAcc, r.res.TestAcc, v.name)
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Empty(t, left, v.name)
			s := r.res.Superbatch
			require.NotNil(t, s, v.name)
			require.Positive(t, s.Superbatches, v.name)
			require.Positive(t, s.FileBytes, v.name)
			require.Positive(t, s.ChangeSeconds, v.name)
			inspected := 0.0
			for e, x := range r.res.Epochs {
				inspected += x.StageSeconds.Inspect
				require.Positive(t, x.StageSeconds.Inspect, v.name)
				require.Positive(t, x.StageSeconds.Sample, v.name)
				was := static.res.Epochs[e]
				require.Equal(t, was.Loss, x.Loss, v.name)
				require.Equal(t, was.RowsCPU+was.RowsSSD, x.RowsGPU+x.RowsCPU+x.RowsSSD, v.name)
				t.Logf("%s: %d rows read of %d, static reads %d", v.name, x.RowsSSD,
					was.RowsCPU+was.RowsSSD, was.RowsSSD)
			}
			require.LessOrEqual(t, inspected, s.InspectSeconds+s.ChangeSeconds, v.name)
		}
	}
}

// A run reads the rows that MIN with bypass reads over the same accesses: a superbatch finds what
// the one before left, in the next epoch too. While one is sampled, lists on storage have slots of
// the tier, and only these lose their rows.
func TestPlannedReadsWhatInspectSays(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for _, x := range []struct {
		length int
		stored bool
	}{{3, false}, {1000, false}, {3, true}, {1000, true}} {
		cfg := small()
		cfg.Mode, cfg.CPUCache, cfg.Superbatch, cfg.NoEval = ginex.ModeGinex, percent(30), x.length,
			true
		if x.stored {
			cfg.Topology = plan.TopologySSD
		}
		var all [][]int64
		cfg.OnBatch = func(_, _ int, mb *graph.MiniBatch) {
			n := mb.HopEnd[len(mb.HopEnd)-1]
			all = append(all, slices.Clone(hostmem.View[int64](mb.Nodes.Bytes())[:n]))
		}
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		slots, rowBytes := r.res.CPUCacheBytes/r.res.RowBytes, r.res.RowBytes
		keep := (r.res.CPUCacheBytes - r.res.Superbatch.SharedBytes) / rowBytes
		require.Equal(t, x.stored, keep < slots)
		require.Positive(t, keep)
		var before *superbatch.State
		pos, seconds := 0, int64(0)
		for i, e := range r.res.Epochs {
			var hits int64
			for end := pos + e.Batches; pos < end; {
				n := min(x.length, end-pos)
				c, err := superbatch.Inspect(context.Background(),
					superbatch.Memory(all[pos:pos+n]), superbatch.Config{Slots: slots,
						Before: before, Keep: true})
				require.NoError(t, err)
				hits += c.Stats.Hits
				before = c.After.Without(keep)
				pos += n
			}
			require.Equal(t, hits, e.RowsCPU)
			require.Positive(t, hits)
			if i > 0 {
				seconds += e.RowsSSD
			}
		}
		require.Less(t, seconds, r.res.Epochs[0].RowsSSD*int64(len(r.res.Epochs)-1))
	}
}

// The superbatch of the next pass is sampled while one trains, where there is room for both, and
// else before it trains: neither changes a result.
func TestNextPassIsSampledBeside(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	sha, size := "", int64(0)
	for _, x := range []struct {
		name   string
		set    func(c *plan.Config)
		before bool // passes behind the first are sampled before they train
	}{
		{"room for two", func(*plan.Config) {}, false},
		{"of a given length", func(c *plan.Config) { c.Superbatch = 1000 }, false},
		{"static", func(c *plan.Config) { c.Policy = plan.PolicyStatic }, false},
		{"room for one", func(c *plan.Config) { c.SuperbatchDisk = size }, true},
		{"room for half", func(c *plan.Config) { c.SuperbatchDisk = size / 2 }, true},
		{"lists on storage", func(c *plan.Config) { c.Topology = plan.TopologySSD }, true},
	} {
		cfg := small()
		cfg.Mode, cfg.CPUCache = ginex.ModeGinex, percent(30)
		x.set(&cfg)
		passes := 0
		var trace bytes.Buffer
		cfg.Timeline = timeline.New(&trace, timeline.Wall)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{
			Step: func(stage string, done, _ int) {
				if stage == "sample superbatch" && done == 1 {
					passes++
				}
			}})
		require.NoError(t, r.err, x.name)
		sha, size = cmp.Or(sha, r.res.ParamsSHA256), max(size, r.res.Superbatch.FileBytes)
		require.Equal(t, sha, r.res.ParamsSHA256, x.name)
		require.Equal(t, x.before, passes > 1, "%s: %d", x.name, passes)
		require.NoError(t, cfg.Timeline.Close())
		sampled := bytes.Count(trace.Bytes(), []byte(`"sample superbatch"`))
		if !x.before { // with validation and test
			require.Equal(t, 2*len(r.res.Epochs)+1, r.res.Superbatch.Superbatches, x.name)
		} else if cfg.Topology == "" { // one was sampled in vain, and none behind it
			require.Equal(t, r.res.Superbatch.Superbatches+1, sampled, x.name)
		}
	}
}

// A read that cannot be healed ends the run with class Device in every stage: while the tiers are
// filled, and while batches read.
func TestFaultsInPlannedTiers(t *testing.T) {
	d, feat := tiny.open(t)
	for i, v := range plannedWays[:4] {
		for _, after := range []int{101, 1500} {
			if wide.Lean() && (i+after)%2 == 0 {
				continue
			}
			s := bind(t, d, 2, fmt.Sprintf("error(op=read,sct=2,sc=0x81,dnr=1,after=%d)", after))
			before := testrig.Held(t)
			cfg := small()
			v.set(&cfg)
			cfg.IOStack = gpuio.StackAsync // the cpu stack reads the files, which have no faults
			cfg.CoalesceBytes = -1         // so that there are as many reads
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.Error(t, r.err, v.name)
			require.Equal(t, errs.Device, errs.ClassOf(r.err), "%s: %v", v.name, r.err)
			before.Leaked(t, "topology")
		}
	}
}

// A run that is interrupted, wherever it is, goes on to the same parameters.
func TestPlannedGoesOn(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	for i, v := range plannedWays[:4] {
		cfg := small()
		v.set(&cfg)
		cfg.CheckpointDir, cfg.Resume = t.TempDir(), true
		r, _ := trainInPieces(t, 5+i, 11, cfg, d, feat, s)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
	}
}

// A disk that is full while a superbatch is written ends the run with what to do.
func TestSuperbatchWithoutRoom(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Mode, cfg.CPUCache, cfg.SuperbatchDisk, cfg.Superbatch = ginex.ModeGinex, percent(10),
		20000,
		10
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "take more than they may: option superbatch-disk 19.5 KiB")
	require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	cfg.Superbatch = 0 // as many as fit
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, r.err)
	require.LessOrEqual(t, r.res.Superbatch.FileBytes, int64(20000))
	cfg.SuperbatchDir = "/dev/null/none"
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "superbatch-dir")
}
