//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package driver_test

import (
	"testing"

	"helios/internal/testing/fakecuda"
)

// libraryForBench is the libcuda that benchmarks open: the fake, built for them, or with
// HELIOS_GPU=1 the machine's.
func libraryForBench(b *testing.B) string {
	if gpu() {
		return ""
	}
	return fakecuda.Build(b)
}
