package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// The products of the machine's OpenBLAS (HELIOS_OPENBLAS names one that the loader does not find),
// for both ways to store the operands.
func TestOpenBLAS(t *testing.T) {
	path := os.Getenv("HELIOS_OPENBLAS")
	named := path != ""
	if !named {
		path = "libopenblas.so.0"
	}
	l, err := openOpenBLAS(path)
	if err != nil && !named {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Contains(t, l.config, "OpenBLAS")
	require.Equal(t, 1, l.useThreads(1))
	a := []float32{1, 2, 3, 4, 5, 6}  // 2×3, or 3×2 as its transpose's rows
	b := []float32{1, 0, 2, 1, -1, 3} // 3×2
	for _, c := range []struct {
		a, b blasMatrix
		want []float32
	}{
		{blasMatrix{a, 3, false}, blasMatrix{b, 2, false}, []float32{2, 11, 8, 23}},
		{blasMatrix{a, 2, true}, blasMatrix{b, 2, false}, []float32{1*1 + 3*2 + 5*-1, 0 + 3 + 15,
			2 + 8 - 6, 4 + 18}},
		{blasMatrix{a, 3, false}, blasMatrix{b, 3, true}, []float32{1 + 6, 1 - 2 + 9, 4 + 12,
			4 - 5 + 18}},
	} {
		got := make([]float32, 4)
		l.multiply(2, 2, 3, c.a, c.b, blasMatrix{got, 2, false})
		require.Equal(t, c.want, got)
	}
}

func TestOpenBLASRefuses(t *testing.T) {
	for path, want := range map[string]string{"/none/lib.so": "/none/lib.so",
		"libc.so.6": "is no OpenBLAS"} {
		_, err := openOpenBLAS(path)
		require.ErrorContains(t, err, want)
	}
}
