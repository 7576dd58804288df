package sched

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/testing/wide"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/ginex"
	"helios/sched/virtual"
)

// instant is a profile whose launches take no time, so that some operator is busy at any time.
func instant(t testing.TB, name string) *hardware.Profile {
	p := hardwareOf(t, name)
	g := &p.GPU
	for _, f := range []*hardware.Figure{&g.LaunchNS, &g.OpLaunchNS, &g.GapNS, &g.TeardownNS} {
		f.Value = 0
	}
	return p
}

// coveredWays are the settings of a mode in which other stages take their time.
var coveredWays = []struct {
	name string
	set  func(*plan.Config)
}{
	{"", func(*plan.Config) {}},
	{"belady", func(c *plan.Config) { c.Policy, c.Superbatch = plan.PolicyBelady, 4 }},
	{"belady, overlapped", func(c *plan.Config) {
		c.Policy, c.Superbatch, c.SuperbatchOverlap = plan.PolicyBelady, 3, true
	}},
	{"a window and merged reads", func(c *plan.Config) {
		c.Policy, c.Window, c.Accumulate = "lru", 4, 0.9
	}},
	{"no window", func(c *plan.Config) {
		c.Policy, c.Window, c.Accumulate = "lru", plan.Off, plan.Off
	}},
}

// withTiers takes the tiers from cfg that its mode does not have, and reports whether it can be
// run.
func withTiers(cfg *plan.Config) bool {
	gpu, cpu := cfg.GPUCache, cfg.CPUCache
	none := plan.NoCache()
	for _, sizes := range [][2]units.Budget{{gpu, cpu}, {none, cpu}, {gpu, none}, {none, none},
		{gpu}, {}} {
		cfg.GPUCache, cfg.CPUCache = sizes[0], sizes[1]
		if cfg.WithDefaults().Check() == nil {
			return true
		}
	}
	return false
}

// Every second of a modelled epoch belongs to a stage: with launches that take no time the stages
// cover it in every mode, pipeline and kind of tiers, and launches take what they are said to.
func TestVirtualEpochsAreCovered(t *testing.T) {
	d := large.generate(t)
	played, launched := map[string]bool{}, 0.0
	for m, mode := range tiers.Catalog.Names() {
		for n, pipe := range plan.PipelineNames(nil) {
			for k, way := range coveredWays {
				if wide.Lean() && (k+n+m)%4 != 0 {
					continue
				}
				cfg := largeConfig(pipe)
				cfg.Mode = mode
				way.set(&cfg)
				if runsOn(cfg.WithDefaults(), &ginex.System) {
					cfg.SuperbatchDir = t.TempDir()
				}
				name := fmt.Sprintf("%s, %s, %s", mode, pipe, way.name)
				if !withTiers(&cfg) {
					continue
				}
				for _, hw := range []*hardware.Profile{instant(t, "a100-p5510x12"),
					hardwareOf(t, "a100-p5510x12")} {
					dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
					require.NoError(t, err)
					r, err := virtual.Run(context.Background(), tiers.Simulation, cfg,
						prepare.Inputs{Dev: dev, Dataset: d},
						cost.Hardware{Profile: hw, SSDs: 2, Batches: 2}, report.Observer{})
					require.NoError(t, dev.Close(), name)
					if errs.ClassOf(err) == errs.Capability {
						break // the virtual clock refuses it
					}
					require.NoError(t, err, name)
					played[mode], played[pipe], played[way.name] = true, true, true
					e := r.Epochs[0]
					require.GreaterOrEqual(t, e.Overlap, 0.0, name)
					require.LessOrEqual(t, e.Seconds, e.StageSeconds.Sum()*(1+1e-9), name)
					share := e.StageSeconds.Between / e.Seconds
					if hw.GPU.OpLaunchNS.Value > 0 {
						launched = max(launched, share)
						continue
					}
					require.Less(t, share, 1e-4, "%s: %+v of %g s", name, e.StageSeconds,
						e.Seconds)
				}
			}
		}
	}
	require.Positive(t, launched, "launches take time where nothing overlaps")
	for _, mode := range tiers.Catalog.Names() {
		require.True(t, played[mode], mode)
	}
	for _, pipe := range plan.PipelineNames(nil) {
		require.True(t, played[pipe], pipe)
	}
	for _, way := range coveredWays {
		require.True(t, played[way.name], way.name)
	}
}

// On the wall clock stages cover an epoch too, with the time that none of them accounts for: no
// overlap is below 0, in any mode. A superbatch's rows of a static cache are read in the epoch.
func TestEpochsAreCovered(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for _, mode := range tiers.Catalog.Names() {
		for _, fill := range []bool{false, true} {
			cfg := small()
			cfg.Mode, cfg.GPUCache, cfg.CPUCache = mode, percent(5), percent(10)
			cfg.Pipeline, cfg.Epochs, cfg.NoEval = plan.PipelineNone, 1, true
			if fill {
				cfg.Policy, cfg.Superbatches, cfg.Superbatch = plan.PolicyStatic, true, 3
				cfg.SuperbatchDir = t.TempDir()
			}
			if !withTiers(&cfg) {
				continue
			}
			if mode == diskgnn.ModeDiskGNN {
				cfg.PackedDir = t.TempDir() + "/p"
			}
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, r.err, mode)
			e := r.res.Epochs[0]
			require.GreaterOrEqual(t, e.Overlap, 0.0, mode)
			require.LessOrEqual(t, e.Seconds, e.StageSeconds.Sum()*(1+1e-9), mode)
			if fill {
				require.Positive(t, r.res.Superbatch.FillSeconds, mode)
				// in this epoch and in the test, which has a superbatch of its own
				require.Greater(t, e.StageSeconds.Complete, r.res.Superbatch.FillSeconds/10, mode)
			}
		}
	}
}
