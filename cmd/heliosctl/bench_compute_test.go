package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/simd"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
)

// Every level computes every group of kernels right, and lists its measurements.
func TestBenchCompute(t *testing.T) {
	isolate(t)
	levels := simd.Levels()
	if wide.Lean() {
		levels = levels[len(levels)-1:]
	}
	for _, l := range levels {
		args := []string{"bench", "compute", "--shapes", "64x47x100,tn:33x1x300", "--seconds",
			"0.01", "--rows", "1000", "--workers", "1,2", "--kernels", l.String(), "--overwrite",
			"--precision", "fp32,bf16", "--results", "out.json"}
		rows := lines(t, ok(t, append(args, "--json")...))
		require.Equal(t, rows, lines(t, kept(t, "out.json")))
		products, beside := map[any]int{}, 0
		for _, r := range rows {
			require.Equal(t, true, r["ok"])
			require.Equal(t, l.String(), r["kernels"])
			if ratio, of := r["ratio"].(map[string]any); of {
				require.Nil(t, r["m"], "OpenBLAS was not asked for")
				require.Positive(t, ratio["median"])
				beside++
			}
			if r["m"] != nil {
				products[r["precision"]]++
				require.Positive(t, r["flops_per_second"])
				require.Positive(t, r["error"])
				require.Less(t, r["error"], r["error_bound"])
				require.Equal(t, l > simd.Generic, r["peak_share"].(float64) > 0)
				require.Equal(t, l > simd.Generic, r["floor_seconds"].(float64) > 0)
			}
		}
		require.Equal(t, map[any]int{"fp32": 4, "bf16": 4}, products)
		require.Positive(t, beside, "kernels beside their floor")
	}
	require.Regexp(t, `(?s)bf16 by [a-z0-9_ ]+\n.*nn:8x8x8 .* passed`, ok(t, "bench", "compute", "--shapes", "8x8x8",
		"--only", "gemm", "--precision", "bf16", "--seconds", "0.01", "--workers", "1"))
	require.Regexp(t, `nn:8x8x8 +\S+ [nµm]s .* passed`, ok(t, "bench", "compute", "--shapes", "8x8x8",
		"--rows", "100", "--seconds", "0.01", "--workers", "1"))
}

// On a GPU, here the fake libcuda: every kernel, all precisions, cuBLAS in turns, a whole step next
// to the host's, and a library that computes something else is refused.
func TestBenchComputeOnGPU(t *testing.T) {
	lib, blas := fakecuda.Build(t, fakecuda.Private()), fakecuda.BuildBLAS(t)
	isolate(t)
	t.Setenv("HELIOS_LIBCUDA", lib)
	fakecuda.Control(t, lib, "reset,sms=4,mem=67108864")
	fakecuda.Control(t, blas, "reset,libcuda="+lib)
	args := []string{"bench", "compute", "--device", "cuda", "--shapes", "nn:70x33x40,tn:33x20x600",
		"--rows", "90", "--seconds", "0.001", "--nodes", "500", "--batch-size", "20",
		"--fanout", "3,2", "--dim", "20", "--hidden", "12", "--classes", "4", "--json",
		"--blas", blas}
	rows := lines(t, ok(t, append(args, "--overwrite", "--results", "out.json")...))
	require.Equal(t, "peak", rows[0]["event"])
	rows = rows[1:]
	kernels := map[string]int{}
	for _, r := range rows {
		require.Equal(t, true, r["ok"])
		require.Equal(t, "ptx", r["kernels"])
		require.Equal(t, "cubin sm_90", r["code"])
		require.Positive(t, r["copy_bytes_per_second"])
		require.Positive(t, r["floor_share"], r["case"])
		kernels[r["kernel"].(string)]++
		if k := r["kernel"]; k == "gemm_nn" || k == "gemm_tn" || k == "step" {
			require.Positive(t, r["peak_share"])
			require.Contains(t, r["rival"], "cuBLAS")
			require.Positive(t, r["rival_flops_per_second"])
			require.Less(t, r["rival_error"], 0.01)
		}
		if r["kernel"] == "step" {
			require.Len(t, r["blocks"], 2)
		}
	}
	for k, n := range map[string]int{"gemm_nn": 3, "gemm_tn": 3, "step": 3, "copy": 1,
		"sage_mean": 4, "gcn_agg": 3, "sage_mean_bwd": 3, "gcn_agg_bwd": 3, "sage_transpose": 1,
		"col_sum": 1} {
		require.Equal(t, n, kernels[k], k)
	}
	fakecuda.Control(t, blas, "wrong=1")
	r := hc(t, "bench", "compute", "--device", "cuda", "--only", "gemm", "--shapes", "nn:70x33x40",
		"--rows", "90", "--seconds", "0.001", "--precision", "tf32", "--blas", blas)
	require.Equal(t, 3, r.code)
	require.Contains(t, r.errOut, "trial product")
	// Without cuBLAS there is no comparison; asking for one by name is an error.
	require.Nil(t, lines(t, ok(t, "bench", "compute", "--device", "cuda", "--only", "gemm",
		"--shapes", "8x8x8", "--rows", "90", "--precision", "fp32", "--seconds", "0.001", "--json",
		"--blas", "off"))[1]["ratio"])
	r = hc(t, "bench", "compute", "--device", "cuda", "--only", "gemm", "--blas", "none.so")
	require.Equal(t, 3, r.code)
	require.Contains(t, r.errOut, "none.so")
}

func TestBenchComputeBadInput(t *testing.T) {
	runBad(t, []badCase{
		{"no shape", nil, "bench compute --shapes 4096x1024", 2,
			[]string{"--shapes", "4096x1024x256"}, ""},
		{"a shape beyond memory", nil, "bench compute --shapes 1000000x1000000x8", 2,
			[]string{"--shapes", "GiB"}, ""},
		{"no such group", nil, "bench compute --only gem", 2,
			[]string{"--only", "did you mean gemm"}, ""},
		{"no time", nil, "bench compute --seconds 0", 2, []string{"--seconds 0"}, ""},
		{"no workers", nil, "bench compute --workers 0", 2, []string{"--workers"}, ""},
		{"too many workers", nil, "bench compute --workers 5000", 2,
			[]string{"--workers 5000"}, ""},
		{"precision of the host device", nil, "bench compute --precision tf32", 2,
			[]string{"--precision tf32", "cuda"}, ""},
		{"no such precision", nil, "bench compute --device cuda --precision fp8", 2,
			[]string{"fp8", "fp32, tf32, bf16"}, ""},
		{"OpenBLAS beside a GPU", nil, "bench compute --device cuda --openblas auto", 2,
			[]string{"--openblas", "host"}, ""},
		{"a step's flag without it", nil, "bench compute --dim 100", 2,
			[]string{"--dim", "step"}, ""},
		{"no rows", nil, "bench compute --rows 0", 2, []string{"--rows 0"}, ""},
		{"no such library", nil, "bench compute --openblas none.so", 3,
			[]string{"none.so", "--openblas off"}, ""},
		{"no OpenBLAS", nil, "bench compute --openblas libc.so.6", 3,
			[]string{"libc.so.6", "no OpenBLAS"}, ""},
	})
}
