package proxy

import "helios/internal/hostcpu"

// Stage is that of the CPU time of all software controllers of the process, in hostcpu.Spent. The
// polling of those who wait is not in it.
const Stage = "software SSDs"

// Operators of the stage.
var (
	spentServing    = hostcpu.Spender{Stage: Stage, Operator: "take commands"}
	spentCompleting = hostcpu.Spender{Stage: Stage, Operator: "post completions"}
	// The kernel does its part of a read in the call that hands it over, or when it is entered for
	// completions.
	spentInKernel = hostcpu.Spender{Stage: Stage, Operator: "io_uring_enter"}
)
