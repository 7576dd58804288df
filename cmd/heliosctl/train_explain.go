package main

import (
	"slices"

	"helios/sched/plan"
)

// showPlan prints a run's operators, where that was asked for. Of a plan that the tuner has changed
// it prints the lines that are others now.
func (t *trainer) showPlan(out *results) func(*plan.OpGraph) {
	if !t.explain {
		return nil
	}
	var table [][]string
	var bounds []string
	return func(g *plan.OpGraph) {
		out.event("plan", g)
		steps, says := g.Table(), g.Bounds()
		again := table != nil
		steps = slices.DeleteFunc(steps, func(r []string) bool {
			return slices.ContainsFunc(table,
				func(was []string) bool { return slices.Equal(was, r) })
		})
		says = slices.DeleteFunc(says, func(l string) bool { return slices.Contains(bounds, l) })
		if again && len(steps)+len(says) > 0 {
			t.ui.Printf("after tuning:")
		}
		if len(steps) > 0 {
			t.ui.Columns(planColumns, steps)
		}
		for _, l := range says {
			t.ui.Printf("%s", l)
		}
		table, bounds = append(table, steps...), append(bounds, says...)
	}
}
