package gnn

import "helios/internal/simd"

// ELU (Clevert et al., ICLR 2016): x above 0, e^x - 1 elsewhere.
var eluActivation = &Activation{
	Name: "elu", Summary: "x above 0, e^x - 1 below", value: simd.Level.ELU,
	slope: simd.Level.ELUSlope,
}
