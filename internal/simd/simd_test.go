package simd

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func TestParse(t *testing.T) {
	for _, l := range Levels() {
		got, err := Parse(l.String())
		require.NoError(t, err)
		require.Equal(t, l, got)
	}
	got, err := Parse("auto")
	require.NoError(t, err)
	require.Equal(t, Best(), got)
	require.NotEqual(t, Auto, got)
	_, err = Parse("sse9")
	require.ErrorContains(t, err, "choose one of auto, generic, avx2, avx512")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	if Best() < AVX512 {
		_, err = Parse("avx512")
		require.Equal(t, errs.Capability, errs.ClassOf(err))
	}
}
