package report

import (
	"cmp"
	"slices"
	"time"

	"helios/internal/hostcpu"
)

// CPUUse is the time that the process took of its processors while it trained an epoch, or the part
// of one that a resumed run trained. The parts and the unaccounted seconds add up to the whole, and
// with those of others and the idle ones to all that the processors had.
type CPUUse struct {
	Batches int     `json:"batches"`
	Seconds float64 `json:"seconds"` // as the kernel counts them for the process
	// Parts were measured; the largest comes first.
	Parts []CPUPart `json:"parts"`
	// Unaccounted is the rest: Go's scheduler, launches, and passing work from one operator to the
	// next.
	Unaccounted float64 `json:"unaccounted_seconds"`
	// Others is the time that interrupts, other programs and a hypervisor took, where the process
	// may use all processors of the machine. Else idle seconds hold it.
	Others float64 `json:"others_seconds"`
	Idle   float64 `json:"idle_seconds"` // of the processors that the process may use
}

// CPUPart is an operator of a stage: a kernel of a stream, or what takes CPU time beside them.
type CPUPart struct {
	Stage    string  `json:"stage"`
	Operator string  `json:"operator"`
	Seconds  float64 `json:"seconds"`
}

// CPUSince accounts for the time between two usages of so many processors; nil where nobody metered
// all the time.
func CPUSince(was, now hostcpu.Usage, processors, batches int) *CPUUse {
	if was.Spent == nil || now.Spent == nil {
		return nil
	}
	by, sum := now.Since(was)
	all := now.Process - was.Process
	u := &CPUUse{Batches: batches, Seconds: all.Seconds(), Unaccounted: max(all-sum, 0).Seconds(),
		Idle: max(time.Duration(processors)*now.At.Sub(was.At)-all, 0).Seconds()}
	if processors == now.Processors && processors == was.Processors {
		// The kernel's idle time may fall: where a processor waited for a disk it is a guess.
		idle := min(max(now.Idle-was.Idle, 0).Seconds(), u.Idle)
		u.Others, u.Idle = u.Idle-idle, idle
	}
	for k, t := range by {
		u.Parts = append(u.Parts, CPUPart{k.Stage, k.Operator, t.Seconds()})
	}
	slices.SortFunc(u.Parts, func(a, b CPUPart) int {
		return cmp.Or(cmp.Compare(b.Seconds, a.Seconds), cmp.Compare(a.Stage, b.Stage),
			cmp.Compare(a.Operator, b.Operator))
	})
	return u
}
