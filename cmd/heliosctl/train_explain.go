package main

import (
	"fmt"
	"slices"

	"helios/internal/hostcpu"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/report"
)

// meterCPU has the epochs of a run that is to be explained account for their CPU time, until stop
// is called.
func (t *trainer) meterCPU() (stop func()) {
	if !t.explain {
		return func() {}
	}
	return hostcpu.Meter()
}

// showCPU prints the CPU time of a mini-batch by what took it, of the last epoch. rate is the most
// commands a second that the run had of its SSDs.
func showCPU(e *env, epochs []report.EpochResult, rate float64) {
	if len(epochs) == 0 {
		return
	}
	last := epochs[len(epochs)-1]
	u := last.CPU
	if u == nil || u.Batches == 0 || u.Seconds == 0 {
		return
	}
	row := func(stage, operator string, seconds float64) []string {
		return []string{stage, operator, fmt.Sprintf("%.1f", 1e6*seconds/float64(u.Batches)),
			fmt.Sprintf("%.1f%%", 100*seconds/u.Seconds)}
	}
	var rows [][]string
	for _, p := range u.Parts {
		rows = append(rows, row(p.Stage, p.Operator, p.Seconds))
	}
	rows = append(rows, row("unaccounted", "Go's scheduler, launches, the rest", u.Unaccounted),
		row("all", "by getrusage", u.Seconds))
	e.ui.Printf("processor time of a mini-batch, of the %d that epoch %d trained:", u.Batches,
		last.Epoch)
	e.ui.Columns(cpuColumns, rows)
	each := 1e6 / float64(u.Batches)
	e.ui.Printf("interrupts and other programs: %.1f us a mini-batch", each*u.Others)
	e.ui.Printf("processors idle: %.1f us a mini-batch", each*u.Idle)
	e.ui.Printf("%s", floor(&last, hostcpu.Count(), rate))
}

// floor is the least time of a mini-batch, in words: where all operators share the processors
// without a gap, waits for memory included, and where the SSDs always take commands at a rate, if
// it is not 0.
func floor(r *report.EpochResult, processors int, rate float64) string {
	least := 1e6 * r.CPU.Seconds / float64(r.CPU.Batches*processors)
	each := 1e6 / float64(r.Batches) // more than CPU.Batches, where a run was resumed in the epoch
	text := fmt.Sprintf("floor: %.1f us a mini-batch by %d processors", least, processors)
	switch {
	case r.SSDCommands == 0:
	case rate == 0:
		text += fmt.Sprintf("; no pass took %v, to measure the SSDs", rateTime)
	default:
		ssds := each * float64(r.SSDCommands) / rate
		text += fmt.Sprintf(", %.1f by SSDs, which gave %s commands a second in some %v", ssds,
			units.FormatCount(rate), rateTime)
		least = max(least, ssds)
	}
	return text + fmt.Sprintf("; the epoch took %.2f times the longest", each*r.Seconds/least)
}

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
