package walk

import (
	"slices"

	"helios/sched/plan"
)

// program is the operators of a graph by the stage that runs them.
type program struct {
	steps                           []*step
	sampling, admitting, delivering []*step
	hops                            int
	reached                         []int // hops whose rows are looked up together
}

// step is an operator of a mini-batch.
type step struct {
	op    *plan.Operator
	index int
	after []int // operators that must have ended
}

// programOf deals the operators of a mini-batch to stages. Lookups are followed by their reads, and
// by gathers that wait for no read.
func programOf(g *plan.OpGraph) (p program) {
	find := func(name string) int {
		return slices.IndexFunc(p.steps, func(s *step) bool { return s.op.Name == name })
	}
	for i := range g.Ops {
		o := &g.Ops[i]
		p.hops = max(p.hops, o.Hop)
		if o.Beside || o.Kind == plan.OpTrain {
			continue
		}
		s := &step{op: o, index: len(p.steps)}
		for _, name := range o.After {
			// Else it is done before the walk, or waited for by the operator.
			if k := find(name); k >= 0 {
				s.after = append(s.after, k)
			}
		}
		p.steps = append(p.steps, s)
	}
	var gathers []*step
	for _, s := range p.steps {
		switch s.op.Kind {
		case plan.OpSample, plan.OpRestore:
			p.sampling = append(p.sampling, s)
		case plan.OpLookup:
			p.admitting = append(p.admitting, s)
			p.reached = append(p.reached, s.op.Hop)
		case plan.OpSubmit:
			p.admitting = append(p.admitting, s)
		case plan.OpComplete:
			p.delivering = append(p.delivering, s)
		case plan.OpGather:
			switch {
			case !slices.ContainsFunc(s.after, func(i int) bool {
				return p.steps[i].op.Kind == plan.OpComplete
			}):
				p.admitting = append(p.admitting, s)
			case g.Dynamic: // what a set has read makes room for others
				p.delivering = append(p.delivering, s)
			default: // once the batch's reads are whole
				gathers = append(gathers, s)
			}
		}
	}
	p.delivering = append(p.delivering, gathers...)
	return p
}
