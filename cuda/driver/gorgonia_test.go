//go:build gorgonia && !nocuda

package driver_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/testing/conformance"
	"helios/internal/testing/fakecuda"
)

// linked is the fake library that this program was linked against and started with.
// tools/gorgonia.sh makes both and passes the path.
func linked(t testing.TB) string {
	t.Helper()
	lib := os.Getenv("HELIOS_LINKED_LIBCUDA")
	require.NotEmpty(t, lib, "start the tests of -tags gorgonia by make build GPU_BINDING=gorgonia")
	return lib
}

func libraryForBench(b *testing.B) string { return linked(b) }

// The binding passes the suite that purego passes, on the same kinds of GPU (TestConformance).
func TestGorgoniaConformance(t *testing.T) {
	lib := linked(t)
	for _, c := range kinds {
		t.Run(c.name, func(t *testing.T) {
			fakecuda.Control(t, lib, "reset,mem=67108864,"+c.knobs)
			b := backend(t, lib)
			b.Lose = func(t *testing.T) { fakecuda.Control(t, lib, "lose=719") }
			b.Ended = func(t *testing.T) { empty(t, lib) }
			conformance.Run(t, b)
		})
	}
}

// Another library than the linked one is refused, with the way out.
func TestGorgoniaOtherLibrary(t *testing.T) {
	other := filepath.Join(t.TempDir(), "libcuda.so.1")
	_, err := driver.Open(driver.Options{Library: other})
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.NoError(t, os.WriteFile(other, nil, 0o666))
	_, err = driver.Open(driver.Options{Library: other})
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, "LD_LIBRARY_PATH")
}
