package plan

import (
	"cmp"

	"helios/internal/units"
)

// DefaultMode is the mode of a configuration that names none.
const DefaultMode = "helios"

// ModeAuto as Config.Mode leaves the choice of a mode to the machine: sched.Choose. Where nothing
// chooses, it is DefaultMode.
const ModeAuto = "auto"

// Choice is a mode that the machine has chosen.
type Choice struct {
	Mode   string `json:"mode"`
	Reason string `json:"reason"`
	// Seconds that the run is predicted to take in each mode, preparation included; absent where
	// nothing had to be predicted. They are modelled.
	Seconds map[string]float64 `json:"modelled_seconds,omitempty"`
}

// Mode is a data path: a published system's, or our own. A mode is a choice of parts: it names the
// I/O stack, pipeline, tiers, policy and hotness of a run, and what it lacks. A part that no mode
// had before is added where its kind lives (a policy in cache/policy, a sampler in graph, a stack
// in gpuio, a pipeline in this package); the mode's file then chooses it.
//
// One file of sched/tiers declares each mode, and the list there has it. Help, comparisons, checks
// and the tables of documents go by the list, so nothing else names a mode.
type Mode struct {
	Name string
	// Summary says in a line how rows get to the device.
	Summary string
	// InMemory: every row is in memory before the first batch. The CPU tier takes what the GPU
	// tier leaves, and no row comes or goes.
	InMemory bool
	// Own is the system that keeps the rows of training under any policy; nil: the policy's does.
	Own *System
	// Fill sets what the configuration leaves open and this mode does otherwise than DefaultMode's
	// parts in fillCommon. A value that is set stays. Nil: nothing.
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

// Defaults returns the configuration of a run that names the mode and nothing else.
func (m *Mode) Defaults() Config { return Config{Mode: m.Name}.WithDefaults() }

// mode returns the mode of a configuration; DefaultMode's where Check would refuse the name.
func (c Config) mode() *Mode {
	m, err := catalog.Mode(cmp.Or(c.Mode, DefaultMode))
	switch {
	case err == nil:
		return m
	case len(catalog.Modes) > 0:
		return catalog.Modes[0]
	}
	return &Mode{}
}

// InMemory reports whether the mode has every row in memory before the first batch.
func (c Config) InMemory() bool { return c.mode().InMemory }

// DefaultTiers reports which tiers, whose size can be chosen, runs of the mode have when nobody
// asks for one.
func (c Config) DefaultTiers() (gpu, cpu bool) {
	d := c.mode().Defaults()
	return d.GPUCacheAuto || d.GPUCache != units.Budget{}, d.CPUCache != units.Budget{}
}

// BudgetTiers reports which tiers of the mode take of a budget for both.
func (c Config) BudgetTiers() (gpu, cpu bool) {
	gpu, cpu = c.DefaultTiers()
	return gpu && !c.InMemory() && !c.Traits().OneBudget, cpu
}

// TierOptions returns the keys of the options about tiers that mean something in the mode under the
// policy: a comparison hands those of them on that are given for all modes.
func (c Config) TierOptions() (keys []string) {
	c = c.WithDefaults()
	gpu, cpu := c.DefaultTiers()
	if gpu {
		keys = append(keys, "gpu-cache")
		if !c.InMemory() && c.mode().Own == nil {
			keys = append(keys, "policy")
		}
	}
	if cpu {
		keys = append(keys, "cpu-cache")
	}
	keys = append(keys, c.System().options()...)
	if c.Traits().ByHotness {
		keys = append(keys, HotnessOptions()...)
	}
	return keys
}

// HotnessOptions are the keys of the options that say how rows are placed by hotness.
func HotnessOptions() []string { return []string{"hotness", "hotness-dir", "presample-epochs"} }

// Together gives the tiers of a run the budgets gpu and cpu where both are the same memory: a mode
// that lacks one of the tiers has its budget in the other, so that all modes hold as much.
func (c Config) Together(gpu, cpu units.Budget) Config {
	hasGPU, hasCPU := c.BudgetTiers()
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

// OrText sets *s where it is empty.
func OrText(s *string, v string) {
	if *s == "" {
		*s = v
	}
}

// OrNumber sets *n where it is 0.
func OrNumber[N int | int64 | float64](n *N, v N) {
	if *n == 0 {
		*n = v
	}
}

// AutoGPUTier sizes the GPU tier by what the device has free, where no size is given.
func (c *Config) AutoGPUTier() {
	c.GPUCacheAuto = c.GPUCacheAuto || c.GPUCache == units.Budget{}
}

// CPUTier gives the CPU tier a share of the features, where no size is given.
func (c *Config) CPUTier(percent float64) {
	if (c.CPUCache == units.Budget{}) {
		c.CPUCache.Percent = percent
	}
}
