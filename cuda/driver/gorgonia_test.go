//go:build gorgonia && !nocuda

package driver_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/conformance"
	"helios/cuda/driver"
	"helios/internal/errs"
)

// The library is linked: tools/gorgonia.sh starts this with the fake one in LD_LIBRARY_PATH, and
// its knobs in HELIOS_FAKECUDA.
func libraryForBench(*testing.B) string { return "" }

// The binding passes the suite that purego passes.
func TestGorgoniaConformance(t *testing.T) {
	conformance.Run(t, func(t *testing.T) cuda.Device {
		d, err := driver.Open(driver.Options{})
		require.NoError(t, err)
		return d
	})
}

// Another library than the linked one is refused, with the way out.
func TestGorgoniaOtherLibrary(t *testing.T) {
	_, err := driver.Open(driver.Options{Library: filepath.Join(t.TempDir(), "libcuda.so.1")})
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	other := filepath.Join(t.TempDir(), "libcuda.so.1")
	require.NoError(t, os.WriteFile(other, nil, 0o666))
	_, err = driver.Open(driver.Options{Library: other})
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, "LD_LIBRARY_PATH")
}
