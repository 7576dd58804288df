package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/simd"
)

// Every level computes every group of kernels right, and says what was measured.
func TestBenchCompute(t *testing.T) {
	isolate(t)
	for _, l := range simd.Levels() {
		args := []string{"bench", "compute", "--shapes", "64x47x100,tn:33x1x300", "--seconds", "0.01", "--rows", "1000", "--workers", "1,2", "--kernels", l.String(), "--results", "out.json"}
		rows := lines(t, ok(t, append(args, "--json")...))
		saved, err := os.ReadFile("out.json")
		require.NoError(t, err)
		require.Equal(t, rows, lines(t, string(saved)))
		products := 0
		for _, r := range rows {
			require.Equal(t, true, r["ok"])
			require.Equal(t, l.String(), r["kernels"])
			require.Nil(t, r["ratio"])
			if r["m"] != nil {
				products++
				require.Positive(t, r["flops_per_second"])
				require.Positive(t, r["error"])
				require.Less(t, r["error"], r["error_bound"])
				require.Equal(t, l > simd.Generic, r["peak_share"].(float64) > 0)
			}
		}
		require.Equal(t, 4, products)
	}
	require.Regexp(t, `nn:8x8x8 +\S+ +1 .* passed`, ok(t, "bench", "compute", "--shapes", "8x8x8", "--rows", "100", "--seconds", "0.01", "--workers", "1"))
}

func TestBenchComputeBadInput(t *testing.T) {
	runBad(t, []badCase{
		{"no shape", nil, "bench compute --shapes 4096x1024", 2, []string{"--shapes", "4096x1024x256"}, ""},
		{"a shape beyond memory", nil, "bench compute --shapes 1000000x1000000x8", 2, []string{"--shapes", "GiB"}, ""},
		{"no such group", nil, "bench compute --only gem", 2, []string{"--only", "did you mean gemm"}, ""},
		{"no time", nil, "bench compute --seconds 0", 2, []string{"--seconds 0"}, ""},
		{"no workers", nil, "bench compute --workers 0", 2, []string{"--workers"}, ""},
		{"too many workers", nil, "bench compute --workers 5000", 2, []string{"--workers 5000"}, ""},
		{"no such library", nil, "bench compute --openblas none.so", 3, []string{"none.so", "--openblas off"}, ""},
		{"no OpenBLAS", nil, "bench compute --openblas libc.so.6", 3, []string{"libc.so.6", "no OpenBLAS"}, ""},
	})
}
