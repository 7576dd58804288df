package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/units"
)

// What a run gets that names its mode and nothing else.
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
	want := map[string]parts{
		"helios": {
			"async", "deep", "static", "presample", 0, 0, 0, true, 10,
			[]string{"gpu-cache", "policy", "cache-line", "window", "cpu-cache"},
		},
		"gids": {
			"sync", "run-ahead", "random", "pagerank", 4096, 8, 0.95, true, 10,
			[]string{"gpu-cache", "policy", "cache-line", "window", "cpu-cache"},
		},
		"bam": {
			"sync", "none", "random", "presample", 4096, 0, 0, true, 0,
			[]string{"gpu-cache", "policy", "cache-line", "window"},
		},
		"cpu": {"cpu", "prefetch", "static", "presample", 0, 0, 0, false, 10,
			[]string{"cpu-cache"}},
		"ginex": {"cpu", "prefetch", "belady", "presample", 0, 0, 0, false, 10,
			append([]string{"cpu-cache"}, SuperbatchOptions()...)},
		"mmap":  {"mmap", "prefetch", "static", "presample", 0, 0, 0, false, 0, nil},
		"inmem": {"async", "deep", "static", "presample", 0, 0, 0, true, 0, []string{"gpu-cache"}},
	}
	for _, m := range Modes() {
		c := m.Defaults()
		require.NoError(t, c.Check(), m.Name)
		require.NotEmpty(t, m.Summary, m.Name)
		w, ok := want[m.Name]
		if !ok {
			continue // its own test says
		}
		require.Equal(t, w, parts{
			c.IOStack, c.Pipeline, c.Policy, c.Hotness, c.CacheLine, c.Window, c.Accumulate,
			c.GPUCacheAuto, c.CPUCache.Percent, m.TierOptions(),
		}, m.Name)
		require.Equal(t, c, c.WithDefaults(), "%s: what is filled stays", m.Name)
		delete(want, m.Name)
	}
	require.Empty(t, want)
	require.Equal(t, Config{}.WithDefaults(), Config{Mode: DefaultMode}.WithDefaults())
}

// What is set, to nothing too, stays in every mode.
func TestModesLeaveWhatIsSet(t *testing.T) {
	for _, name := range ModeNames() {
		c := Config{
			Mode: name, GPUCache: NoCache(), CPUCache: NoCache(), IOStack: gpuio.StackCPU,
			Pipeline: PipelineNone, Policy: PolicyStatic, Hotness: HotnessDegree, SeedZero: true,
		}.WithDefaults()
		require.Equal(t, []units.Budget{{}, {}}, []units.Budget{c.GPUCache, c.CPUCache}, name)
		require.False(t, c.GPUCacheAuto, name)
		require.Equal(t, []any{gpuio.StackCPU, PipelineNone, PolicyStatic, HotnessDegree,
			uint64(0)},
			[]any{c.IOStack, c.Pipeline, c.Policy, c.Hotness, c.Seed}, name)
	}
}

func TestModeNames(t *testing.T) {
	_, err := ModeOf("helois")
	require.ErrorContains(t, err, "unknown option mode \"helois\"")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// A dynamic GPU tier needs a size where the mode has no GPU tier of its own.
func TestPolicyWithoutATier(t *testing.T) {
	err := Config{Mode: ModeCPU, Policy: "lru"}.Check()
	require.ErrorContains(t, err, "option policy lru: option mode cpu has no GPU tier by itself")
	require.NoError(t, Config{Mode: ModeCPU, Policy: "lru", GPUCache: NoCache()}.Check())
	require.NoError(t, Config{Mode: ModeHelios, Policy: "lru"}.Check())
	require.ErrorContains(t, Config{Presample: 2, Hotness: HotnessDegree}.Check(),
		"counts no epochs")
}

// A baseline has a name of its own.
func TestBaselines(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range ModeNames() {
		seen[name] = true
	}
	require.NotEmpty(t, Baselines())
	for _, b := range Baselines() {
		require.False(t, seen[b.Name], b.Name)
		seen[b.Name] = true
		_, err := ModeOf(b.Mode)
		require.NoError(t, err)
		require.NotEmpty(t, b.Options, b.Name)
	}
}
