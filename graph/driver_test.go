package graph

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// TestDriver runs the sampler's tests on a device of the driver, whose memory the CPU cannot see
// (the fake libcuda, or a GPU), and on one that also compares each launch with Go's kernels.
func TestDriver(t *testing.T) {
	library := difftest.Library(t)
	for name, open := range map[string]opener{
		"alone": func(t testing.TB, _ int) cuda.Device {
			dev, err := driver.Open(driver.Options{Library: library})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, dev.Close()) })
			return dev
		},
		"compared": func(t testing.TB, sms int) cuda.Device {
			return difftest.Open(t, difftest.Options{Seed: 1, SMs: sms, RandomThreads: true,
				Grain: 50, Normalise: difftest.NormaliseTables()})
		},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "compared" && wide.Lean() {
				checkRepeatedSeedsAndSelfLoops(t, open)
				checkLayerwise(t, open, 300, []int{20, 30})
				checkLabor(t, open, 150, 12, 3)
				checkTypedBlocks(t, open, typedFanouts[3:])
				return
			}
			t.Run("BlocksEqualReference",
				func(
					t *testing.T) {
					checkBlocksEqualReference(t, open, 600, []int{60, 1, 150, 60}, 3)
				})
			t.Run("RepeatedSeedsAndSelfLoops",
				func(t *testing.T) { checkRepeatedSeedsAndSelfLoops(t, open) })
			t.Run("ManyRepeatedSeeds", func(t *testing.T) { checkManyRepeatedSeeds(t, open) })
			t.Run("NoEdges", func(t *testing.T) { checkNoEdges(t, open) })
			t.Run("AlternatingBatches", func(t *testing.T) { checkAlternatingBatches(t, open) })
			t.Run("ConcurrentBatches", func(t *testing.T) { checkConcurrentBatches(t, open) })
			t.Run("OldFrontierStaysReadable",
				func(t *testing.T) { checkOldFrontierStaysReadable(t, open) })
			t.Run("StampsWrap", func(t *testing.T) { checkStampsWrap(t, open) })
			t.Run("Layerwise", func(t *testing.T) { checkLayerwise(t, open, 600, []int{40, 90}) })
			t.Run("Labor", func(t *testing.T) { checkLabor(t, open, 300, 30, 3, 2, 2) })
			t.Run("Typed", func(t *testing.T) { checkTypedBlocks(t, open, typedFanouts) })
			t.Run("Misuse", func(t *testing.T) { checkMisuse(t, open) })
			t.Run("SteadyState", func(t *testing.T) { checkSteadyStateAllocatesNoBuffers(t, open) })
		})
	}
}
