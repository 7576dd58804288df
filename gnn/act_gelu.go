package gnn

import "helios/internal/simd"

// GELU (Hendrycks and Gimpel, 2016), in the form with tanh: x times nearly the share of a normal
// distribution below x.
var geluActivation = &Activation{
	Name: "gelu", Summary: "x·Φ(x), in the form with tanh", value: simd.Level.GELU,
	slope: simd.Level.GELUSlope,
}
