package plan_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/tiers"
	"helios/sched/tiers/static"
)

// A run that names its mode and nothing else gets the mode's parts.
func TestModeDefaults(t *testing.T) {
	type parts struct {
		stack, pipeline, policy, hotness string
		line                             int64
		window                           int
		accumulate                       float64
		gpuAuto                          bool
		cpu                              float64
		tierOptions                      []string
	}
	hotness := plan.HotnessOptions()
	lines := []string{"cache-line", "directory", "window", "accumulate"}
	want := map[string]parts{
		"helios": {
			"async", "deep", "static", "presample", 0, 0, 0, true, 10,
			append([]string{"gpu-cache", "policy", "cpu-cache"}, hotness...),
		},
		"gids": {
			"sync", "run-ahead", "random", "pagerank", 4096, 8, 0.95, true, 10,
			slices.Concat([]string{"gpu-cache", "policy", "cpu-cache"}, lines, hotness),
		},
		"bam": {
			"sync", "none", "random", "presample", 4096, 0, 0, true, 0,
			slices.Concat([]string{"gpu-cache", "policy"}, lines, hotness),
		},
		"cpu": {"cpu", "prefetch", "static", "presample", 0, 0, 0, false, 10,
			append([]string{"cpu-cache"}, hotness...)},
		"ginex": {"cpu", "prefetch", "belady", "presample", 0, 0, 0, false, 10,
			[]string{"cpu-cache", "superbatch", "superbatch-overlap", "superbatch-dir",
				"superbatch-disk"}},
		"mmap": {"mmap", "prefetch", "static", "presample", 0, 0, 0, false, 0, hotness},
		"inmem": {"async", "deep", "static", "presample", 0, 0, 0, true, 0,
			append([]string{"gpu-cache"}, hotness...)},
	}
	for _, m := range tiers.Modes {
		c := m.Defaults()
		require.NoError(t, c.Check(), m.Name)
		require.NotEmpty(t, m.Summary, m.Name)
		w, ok := want[m.Name]
		if !ok {
			continue // its own test says
		}
		require.Equal(t, w, parts{
			c.IOStack, c.Pipeline, c.Policy, c.Hotness, c.CacheLine, c.Window, c.Accumulate,
			c.GPUCacheAuto, c.CPUCache.Percent, c.TierOptions(),
		}, m.Name)
		require.Equal(t, c, c.WithDefaults(), "%s: what is filled stays", m.Name)
		delete(want, m.Name)
	}
	require.Empty(t, want)
	require.Equal(t, plan.Config{}.WithDefaults(),
		plan.Config{Mode: plan.DefaultMode}.WithDefaults())
}

// Settings that are given, as nothing too, stay in every mode.
func TestModesLeaveWhatIsSet(t *testing.T) {
	for _, name := range tiers.Catalog.Names() {
		c := plan.Config{
			Mode: name, GPUCache: plan.NoCache(), CPUCache: plan.NoCache(), IOStack: gpuio.StackCPU,
			Pipeline: plan.PipelineNone, Policy: plan.PolicyStatic, Hotness: plan.HotnessDegree,
			SeedZero: true,
		}.WithDefaults()
		require.Equal(t, []units.Budget{{}, {}}, []units.Budget{c.GPUCache, c.CPUCache}, name)
		require.False(t, c.GPUCacheAuto, name)
		require.Equal(t, []any{gpuio.StackCPU, plan.PipelineNone, plan.PolicyStatic,
			plan.HotnessDegree,
			uint64(0)},
			[]any{c.IOStack, c.Pipeline, c.Policy, c.Hotness, c.Seed}, name)
	}
}

func TestModeNames(t *testing.T) {
	_, err := tiers.Catalog.Mode("helois")
	require.ErrorContains(t, err, "unknown option mode \"helois\"")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// A dynamic GPU tier needs a size where the mode has no GPU tier of its own.
func TestPolicyWithoutATier(t *testing.T) {
	err := plan.Config{Mode: static.ModeCPU, Policy: "lru"}.Check()
	require.ErrorContains(t, err, "option policy lru: option mode cpu has no GPU tier by itself")
	require.NoError(t, plan.Config{Mode: static.ModeCPU, Policy: "lru", GPUCache: plan.NoCache()}.Check())
	require.NoError(t, plan.Config{Mode: static.ModeHelios, Policy: "lru"}.Check())
	require.ErrorContains(t, plan.Config{Presample: 2,
		Hotness: plan.HotnessDegree}.Check(),
		"counts no epochs")
}

// A baseline has a name of its own.
func TestBaselines(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range tiers.Catalog.Names() {
		seen[name] = true
	}
	require.NotEmpty(t, tiers.Catalog.Baselines())
	for _, b := range tiers.Catalog.Baselines() {
		require.False(t, seen[b.Name], b.Name)
		seen[b.Name] = true
		_, err := tiers.Catalog.Mode(b.Mode)
		require.NoError(t, err)
		require.NotEmpty(t, b.Options, b.Name)
	}
}
