package openblas

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/dl"
	"helios/internal/errs"
)

// The products of the machine's OpenBLAS (HELIOS_OPENBLAS names one that the loader does not find),
// for both ways to store the operands.
func TestMultiply(t *testing.T) {
	path := os.Getenv("HELIOS_OPENBLAS")
	if path == "" {
		path = "auto"
	}
	l, err := Open(path)
	if err != nil && (path == "auto" || !dl.Have) {
		require.Equal(t, errs.Capability, errs.ClassOf(err))
		if dl.Have {
			require.ErrorContains(t, err, "libopenblas0-pthread")
		}
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Contains(t, l.Config, "OpenBLAS")
	require.Equal(t, 1, l.SetThreads(1))
	a := []float32{1, 2, 3, 4, 5, 6}  // 2×3, or 3×2 as its transpose's rows
	b := []float32{1, 0, 2, 1, -1, 3} // 3×2
	for _, c := range []struct {
		a, b Matrix
		want []float32
	}{
		{Matrix{a, 3, false}, Matrix{b, 2, false}, []float32{2, 11, 8, 23}},
		{Matrix{a, 2, true}, Matrix{b, 2, false}, []float32{1*1 + 3*2 + 5*-1, 0 + 3 + 15, 2 + 8 - 6,
			4 + 18}},
		{Matrix{a, 3, false}, Matrix{b, 3, true}, []float32{1 + 6, 1 - 2 + 9, 4 + 12, 4 - 5 + 18}},
	} {
		got := make([]float32, 4)
		l.Multiply(2, 2, 3, c.a, c.b, Matrix{got, 2, false})
		require.Equal(t, c.want, got)
	}
}

func TestOpenRefuses(t *testing.T) {
	if !dl.Have {
		_, err := Open("auto")
		require.ErrorContains(t, err, "opens no libraries")
		require.Equal(t, errs.Capability, errs.ClassOf(err))
		return
	}
	for path, want := range map[string]string{"/none/lib.so": "/none/lib.so",
		"libc.so.6": "is no OpenBLAS", "": "no library"} {
		_, err := Open(path)
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Capability, errs.ClassOf(err))
	}
}
