// Package tiers lists the systems: the ways to keep rows that runs choose from. Each has a folder
// with all of it.
package tiers

import (
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
	Run      *engine.System
	Simulate *virtual.System
	Predict  *planner.System
}

// All has the systems. A run has the first of them that runs its configuration; static tiers run
// all that are left.
var All = []System{
	{&diskgnn.Run, &diskgnn.Simulate, &diskgnn.Predict},
	{&hier.Run, &hier.Simulate, &hier.Predict},
	{&ginex.Run, &ginex.Simulate, &ginex.Predict},
	{&dynamic.Run, &dynamic.Simulate, &dynamic.Predict},
	{&static.Run, &static.Simulate, &static.Predict},
}

// Of returns the system of a configuration's runs.
func Of(c *plan.Config) System {
	for _, s := range All {
		if s.Run.Runs(c) {
			return s
		}
	}
	panic("static tiers run every configuration")
}

// Engine returns the system that runs a configuration.
func Engine(c *plan.Config) *engine.System { return Of(c).Run }

// Simulation returns the system that runs a configuration on the virtual clock.
func Simulation(c *plan.Config) *virtual.System { return Of(c).Simulate }

// Prediction returns the system that predicts a configuration in a planner.
func Prediction(c *plan.Config) *planner.System { return Of(c).Predict }
