package cache

import (
	"testing"

	"helios/cache/policy"
	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// TestDriver runs the cache's tests on a device of the driver, whose memory the CPU cannot see (the
// fake libcuda, or a GPU), and on one that also compares each launch with Go's kernels.
func TestDriver(t *testing.T) {
	library := difftest.Library(t)
	for name, open := range map[string]opener{
		"alone": func(t testing.TB, _ int) cuda.Device {
			dev := must(driver.Open(driver.Options{Library: library}))(t)
			t.Cleanup(func() {
				if err := dev.Close(); err != nil && !t.Failed() {
					t.Error(err)
				}
			})
			return dev
		},
		"compared": func(t testing.TB, sms int) cuda.Device {
			return difftest.Open(t, difftest.Options{Seed: 1, SMs: sms, RandomThreads: true,
				Grain: 700})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Run("EmptyBudgets", func(t *testing.T) { checkEmptyBudgets(t, open) })
			t.Run("Dynamic", func(t *testing.T) { checkDynamic(t, open, 4) })
			t.Run("Sets", func(t *testing.T) { checkGPUSets(t, open, setsBatches(t)) })
			t.Run("HostWaits", func(t *testing.T) { checkHostWaits(t, open) })
			t.Run("Abandon", func(t *testing.T) { checkAbandon(t, open, policy.InSets, 10) })
			t.Run("Hotness", func(t *testing.T) { checkHotness(t, open) })
			if name == "compared" && wide.Lean() {
				return
			}
			t.Run("LookupAndGather", func(t *testing.T) { checkLookupAndGather(t, open, 2) })
			t.Run("Rank", func(t *testing.T) { checkRank(t, open) })
		})
	}
}
