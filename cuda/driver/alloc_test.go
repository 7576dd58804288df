//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia && !race

package driver

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
)

// Not under the race detector, which empties pools at random.
func TestLaunchAllocatesNothing(t *testing.T) {
	d, _ := device(t, "", Options{})
	s := streamOf(t, d, cuda.StreamOptions{Name: "lean"})
	k := kernelOf(t, d, "conf_affine")
	p := &affine{Mul: 1}
	launch := func() {
		if err := s.LaunchRaw(k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, unsafe.Pointer(p),
			unsafe.Sizeof(*p)); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 * inFlight { // makes the ring's events
		launch()
	}
	require.NoError(t, s.Synchronize(soon(t, patience)))
	// Fewer than make a launch wait for room.
	n := testing.AllocsPerRun(inFlight-10, launch)
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.NoError(t, s.Close())
	require.Zero(t, n)
}
