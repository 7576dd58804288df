package plan

import (
	"cmp"
	"slices"

	"helios/internal/units"
)

// Mode is a data path: a published system's, or our own. A mode is a choice of parts: it names the
// I/O stack, pipeline, tiers, policy and hotness of a run, and what it lacks. A part that no mode
// had before is added where its kind lives (a policy in cache/policy, a sampler in graph, a stack
// in gpuio, a pipeline in this package); the mode's file then chooses it.
//
// One file for each mode declares it, and the list in this file has it. Help, comparisons, checks
// and the tables of documents go by the list, so nothing else names a mode.
type Mode struct {
	Name string
	// Summary says in a line how rows get to the device.
	Summary string
	// InMemory: every row is in memory before the first batch. The CPU tier takes what the GPU
	// tier leaves, and no row comes or goes.
	InMemory bool
	// Packed: mini-batches are sampled and laid out on disk before training. Both tiers hold the
	// rows that were hottest then.
	Packed bool
	// PartOrders are how parts of the graph come together to mega-batches that train one after the
	// other; nil: it has none.
	PartOrders []string
	// Partitioner is how those parts are made, one of partition.MethodNames.
	Partitioner string
	// Fill sets what the configuration leaves open and this mode does otherwise than DefaultMode's
	// parts in fillCommon. A value that is set stays.
	Fill func(c *Config)
	// Check refuses what this mode lacks; c is filled. Nil: it lacks nothing.
	Check func(c Config) error
	// Baselines are data paths of papers' comparisons that are this mode with other parts.
	Baselines []Baseline
}

// Baseline is a data path that a paper compares its own with: a mode's with some options.
type Baseline struct {
	Name    string
	Mode    string      // whose it is
	Options [][2]string // key and value
}

// Baselines returns those of all modes.
func Baselines() (all []Baseline) {
	for _, m := range modes {
		for _, b := range m.Baselines {
			b.Mode = m.Name
			all = append(all, b)
		}
	}
	return all
}

// modes are all modes in the order of lists. Comparisons run them in this order and report figures
// relative to the first.
var modes []*Mode

func init() { // not where it is declared: modes ask the list about themselves
	modes = []*Mode{heliosMode, gidsMode, bamMode, ginexMode, diskgnnMode, hierMode, mariusMode,
		cpuMode, mmapMode, inmemMode}
}

// Modes returns every mode.
func Modes() []*Mode { return slices.Clone(modes) }

// ModeNames returns the names of Modes.
func ModeNames() []string {
	names := make([]string, len(modes))
	for i, m := range modes {
		names[i] = m.Name
	}
	return names
}

// ModeOf returns the mode of a name.
func ModeOf(name string) (*Mode, error) {
	if i := slices.IndexFunc(modes, func(m *Mode) bool { return m.Name == name }); i >= 0 {
		return modes[i], nil
	}
	return nil, unknown("mode", name, ModeNames())
}

// Defaults returns the configuration of a run that names the mode and nothing else.
func (m *Mode) Defaults() Config { return Config{Mode: m.Name}.WithDefaults() }

// HasGPUTier reports whether a run of the mode has a GPU tier when nobody asks for one.
func (m *Mode) HasGPUTier() bool {
	c := m.Defaults()
	return c.GPUCacheAuto || c.GPUCache != units.Budget{}
}

// HasCPUTier tells the same of a CPU tier whose size can be chosen.
func (m *Mode) HasCPUTier() bool { return m.Defaults().CPUCache != units.Budget{} }

// Mega reports whether training goes mega-batch by mega-batch.
func (m *Mode) Mega() bool { return len(m.PartOrders) > 0 }

// TierOptions returns the keys of the options about tiers that mean something in the mode: a
// comparison hands those of them on that are given for all modes.
func (m *Mode) TierOptions() (keys []string) {
	if m.HasGPUTier() {
		keys = append(keys, "gpu-cache")
		if !m.InMemory && !m.Packed && !m.Mega() {
			keys = append(keys, "policy", "cache-line", "window")
		}
	}
	if m.HasCPUTier() {
		keys = append(keys, "cpu-cache")
	}
	if m.Defaults().Planned() {
		keys = append(keys, SuperbatchOptions()...)
	}
	if m.Packed {
		keys = append(keys, PackedOptions()...)
	}
	if m.Mega() {
		keys = append(keys, MegaOptions()...)
	}
	return keys
}

// mode returns the mode of a configuration; DefaultMode's where CheckFilled would refuse the name.
func (c Config) mode() *Mode {
	m, err := ModeOf(c.Mode)
	if err != nil {
		m, _ = ModeOf(DefaultMode)
	}
	return m
}

// InMemory reports whether the mode has every row in memory before the first batch.
func (c Config) InMemory() bool { return c.mode().InMemory }

// Together gives the tiers of a run the budgets gpu and cpu where both are the same memory: a mode
// that lacks one of the tiers has its budget in the other, so that all modes hold as much.
// Mega-batches take rooms out of one budget, the CPU's.
func (c Config) Together(gpu, cpu units.Budget) Config {
	m := c.mode()
	hasGPU, hasCPU := m.HasGPUTier() && !m.InMemory && !m.Mega(), m.HasCPUTier()
	some := func(b units.Budget) units.Budget {
		if b.Percent > 100 { // of the features
			b.Percent = 100
		}
		return cmp.Or(b, NoCache())
	}
	switch {
	case hasGPU && hasCPU:
		c.GPUCache, c.CPUCache = some(gpu), some(cpu)
	case hasGPU:
		c.GPUCache = some(gpu.Plus(cpu))
	case hasCPU:
		c.GPUCache, c.CPUCache = NoCache(), some(gpu.Plus(cpu))
	default:
		return c
	}
	c.GPUCacheAuto = false
	return c
}

// orText sets *s where it is empty.
func orText(s *string, v string) {
	if *s == "" {
		*s = v
	}
}

// orNumber sets *n where it is 0.
func orNumber[N int | int64 | float64](n *N, v N) {
	if *n == 0 {
		*n = v
	}
}

// autoGPUTier sizes the GPU tier by what the device has free, where no size is given.
func (c *Config) autoGPUTier() {
	c.GPUCacheAuto = c.GPUCacheAuto || c.GPUCache == units.Budget{}
}

// cpuTier gives the CPU tier a share of the features, where no size is given.
func (c *Config) cpuTier(percent float64) {
	if (c.CPUCache == units.Budget{}) {
		c.CPUCache.Percent = percent
	}
}
