// Package tiers lists the systems: the ways to keep rows that runs choose from. Each has a folder
// with all of it.
package tiers

import (
	"slices"

	"helios/internal/options"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/dynamic"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/hier"
	"helios/sched/tiers/static"
	"helios/sched/virtual"
)

// System is a way to keep rows.
type System struct {
	Plan     *plan.System
	Run      *engine.System
	Simulate *virtual.System
	Predict  *planner.System
}

// All has the systems. Where a mode has none of its own, a run has the first that runs its policy.
var All = []System{
	{&diskgnn.System, &diskgnn.Run, &diskgnn.Simulate, &diskgnn.Predict},
	{&hier.System, &hier.Run, &hier.Simulate, &hier.Predict},
	{&ginex.System, &ginex.Run, &ginex.Simulate, &ginex.Predict},
	{&dynamic.System, &dynamic.Run, &dynamic.Simulate, &dynamic.Predict},
	{&static.System, &static.Run, &static.Simulate, &static.Predict},
}

// Modes has the modes in the order of lists. Comparisons run them in this order and report figures
// relative to the first.
var Modes = []*plan.Mode{&static.Helios, &dynamic.GIDS, &dynamic.BaM, &ginex.Ginex,
	&diskgnn.DiskGNN, &hier.Hier, &hier.Marius, &static.CPU, &static.Mmap, &static.Inmem}

// Catalog has both.
var Catalog = newCatalog()

func newCatalog() *plan.Catalog {
	k := &plan.Catalog{Modes: Modes}
	for _, s := range All {
		k.Systems = append(k.Systems, s.Plan)
	}
	return k
}

var _ = plan.Use(Catalog) && options.Define("modes", Catalog.Names) &&
	options.DefineVariants(plan.Config{}, Catalog.Variants)

// Of returns the system of a configuration's runs.
func Of(c *plan.Config) System {
	s := c.System()
	return All[slices.IndexFunc(All, func(x System) bool { return x.Plan == s })]
}

// Preparing returns the names of the modes that lay something out on disk before training.
func Preparing() (names []string) {
	for _, m := range Modes {
		if c := m.Defaults(); Of(&c).Run.Prepares {
			names = append(names, m.Name)
		}
	}
	return names
}

// Simulation returns the system that runs a configuration on the virtual clock.
func Simulation(c *plan.Config) *virtual.System { return Of(c).Simulate }

// Prediction returns the system that predicts a configuration in a planner.
func Prediction(c *plan.Config) *planner.System { return Of(c).Predict }
