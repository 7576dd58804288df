//go:build !gorgonia

package driver_test

import (
	"testing"

	"helios/cuda/fakecuda"
)

// libraryForBench is the libcuda that benchmarks open: the fake, built for them.
func libraryForBench(b *testing.B) string { return fakecuda.Build(b) }
