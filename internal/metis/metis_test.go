package metis

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/dl"
	"helios/internal/errs"
)

func TestOpenRefuses(t *testing.T) {
	if !dl.Have {
		_, err := Open("")
		require.ErrorContains(t, err, "opens no libraries")
		require.Equal(t, errs.Capability, errs.ClassOf(err))
		return
	}
	for path, want := range map[string]string{"/none/lib.so": "/none/lib.so",
		"libc.so.6": "it is no METIS 5"} {
		_, err := Open(path)
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Capability, errs.ClassOf(err))
	}
}

func TestFits(t *testing.T) {
	narrow, wide := &Library{Path: "lib32"}, &Library{Path: "lib64", Wide: true}
	require.NoError(t, narrow.Fits(math.MaxInt32-1, math.MaxInt32))
	for _, n := range [][2]int64{{math.MaxInt32, 0}, {1, math.MaxInt32 + 1}} {
		err := narrow.Fits(n[0], n[1])
		require.ErrorContains(t, err, "lib32 has 32-bit numbers")
		require.Equal(t, errs.Capability, errs.ClassOf(err))
		require.NoError(t, wide.Fits(n[0], n[1]))
	}
}
