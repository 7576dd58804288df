package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/build"
	"helios/internal/testing/fakecuda"
)

// The median of an even number of values lies between the middle two, and the input keeps its
// order.
func TestSpreadOf(t *testing.T) {
	v := []float64{4, 1, 2, 8}
	require.Equal(t, spread{3, 1, 8}, spreadOf(v))
	require.Equal(t, []float64{4, 1, 2, 8}, v)
	require.Equal(t, spread{4, 4, 4}, spreadOf(v[:1]))
	require.Equal(t, "3 (1–8)", spreadOf(v).by(1))
}

// rowsOf runs the command and returns what it prints as JSON.
func rowsOf(t *testing.T, args string) (rows []map[string]any) {
	t.Helper()
	stdout := os.Stdout
	defer func() { os.Stdout = stdout }()
	out, err := os.CreateTemp(t.TempDir(), "rows")
	require.NoError(t, err)
	defer func() { require.NoError(t, out.Close()) }()
	os.Stdout = out
	require.NoError(t, run(t.Context(), strings.Fields(args)))
	text, err := os.ReadFile(out.Name())
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		var r map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &r))
		rows = append(rows, r)
	}
	return rows
}

func fakeGPU(t *testing.T) (lib string) {
	lib = fakecuda.Build(t, fakecuda.Private())
	t.Setenv("HELIOS_LIBCUDA", lib)
	fakecuda.Control(t, lib, "reset,sms=4,mem=67108864")
	return lib
}

// Both devices answer alike, and say what was checked.
func TestCache(t *testing.T) {
	fakeGPU(t)
	rows := rowsOf(t,
		"cache -device host,cuda -nodes 20K -rows 1000 -policy static,random,sieve -seconds 0.001")
	require.Len(t, rows, 6)
	for i, r := range rows {
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Equal(t, []string{"static", "random", "sieve"}[i%3], r["policy"])
		require.Equal(t, i >= 3, r["device"] == "cuda:0 (Fake GPU (CPU shim))")
		require.Positive(t, r["lookups_per_second"].(map[string]any)["median"])
		if i%3 == 0 {
			require.EqualValues(t, 90*64, r["index_bytes"])
			require.Equal(t, i == 0, r["ratio"] != nil, "the limit is the host's")
			require.InDelta(t, .1, r["hit_ratio"], .05)
			require.InDelta(t, .2, r["cpu_ratio"], .05)
		} else {
			require.EqualValues(t, 2000, r["slots"])
			require.Positive(t, r["metadata_bytes"])
			require.GreaterOrEqual(t, r["checked_rows"], 5000.0)
		}
	}
	for _, what := range []string{"hit_ratio", "cpu_ratio"} {
		require.Equal(t, rows[0][what], rows[3][what]) // of the same rows
	}
}

// Both devices gather and copy what they should, and say what was compared.
func TestMemory(t *testing.T) {
	fakeGPU(t)
	rows := rowsOf(t,
		"memory -device host,cuda -tier 640KiB -set 256KiB -row-bytes 4096,100 -seconds 0.01")
	require.Len(t, rows, 8)
	for i, r := range rows {
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Equal(t, []string{"device", "cpu"}[i%2], r["from"])
		require.Equal(t, 2*r["rows"].(float64), r["checked_rows"]) // of the gather and of the copy
		require.Positive(t, r["ratio"].(map[string]any)["median"])
		require.Equal(t, i >= 4, r["device"] == "cuda:0 (Fake GPU (CPU shim))")
	}
}

// Mini-batches are equal on all devices.
func TestSample(t *testing.T) {
	fakeGPU(t)
	g := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(t.Context(), build.GenerateOptions{Kind: "sbm", Nodes: 3000,
		AvgDegree: 8, Classes: 4, Dim: 4, Seed: 1, Out: g}))
	require.Equal(t, true, rowsOf(t, "sample -fanout 2 -batch-size 8 -batches 1 -turns 1 -dataset "+
		g)[0]["audited"])
	rows := rowsOf(t, "sample -device host,cuda -workers 1,2 -nodes 3000 -fanout 5,3"+
		" -batch-size 32 -batches 2 -turns 2")
	require.Len(t, rows, 3)
	for _, r := range rows {
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Equal(t, rows[0]["digest"], r["digest"])
		require.Positive(t, r["checked_edges"])
		require.Positive(t, r["edges_per_second"].(map[string]any)["median"])
	}
}

// On a GPU, here the fake libcuda: every kernel, all precisions, cuBLAS in turns, a whole step next
// to the host's, and a library that computes something else is refused.
func TestKernelsOnGPU(t *testing.T) {
	lib, blas := fakeGPU(t), fakecuda.BuildBLAS(t)
	fakecuda.Control(t, blas, "reset,libcuda="+lib)
	const gpu = " -device cuda -rows 90 -seconds 0.001"
	products := " -blas " + blas
	kernels := map[string]int{}
	for _, args := range []string{"rows" + gpu,
		"gemm -shapes nn:70x33x40,tn:33x20x600" + gpu + products,
		"step -nodes 500 -batch-size 20 -fanout 3,2 -dim 20 -hidden 12 -classes 4" + gpu + products} {
		for _, r := range rowsOf(t, args) {
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
	}
	require.Equal(t, map[string]int{"gemm_nn": 3, "gemm_tn": 3, "step": 3, "copy": 1,
		"sage_mean": 4, "gcn_agg": 3, "sage_mean_bwd": 3, "gcn_agg_bwd": 3, "sage_transpose": 1,
		"col_sum": 1}, kernels)
	one := strings.Fields("gemm -shapes nn:70x33x40 -precision tf32" + gpu + products)
	fakecuda.Control(t, blas, "wrong=1")
	require.ErrorContains(t, run(t.Context(), one), "trial product")
	one[len(one)-1] = "none.so"
	require.ErrorContains(t, run(t.Context(), one), "none.so")
	// Without cuBLAS there is no comparison.
	require.Nil(t, rowsOf(t, "gemm -shapes 8x8x8 -precision fp32 -blas off"+gpu)[0]["ratio"])
}

// The measurements of a GPU alone find what the fake one has.
func TestDevice(t *testing.T) {
	lib := fakeGPU(t)
	fakecuda.Control(t, lib, "reset,sms=4,hw_queues=6")
	require.Len(t, rowsOf(t, "probe")[0]["GPUs"], 1)
	require.Greater(t, rowsOf(t, "clock")[0]["values"], 2.0)
	require.EqualValues(t, 6, rowsOf(t, "queues")[0]["at_once"])
	require.Greater(t, rowsOf(t, "start")[0]["kernels"], 20.0)
	prices := rowsOf(t, "pcie")[0]["prices"].([]any)
	require.Len(t, prices, 14)
	for _, p := range prices {
		p := p.(map[string]any)
		ns, _ := p["ns"].(float64)
		gbs, _ := p["gb_s"].(float64)
		require.Greater(t, ns+gbs, 0.0, p["of"])
	}
}

func TestBadArguments(t *testing.T) {
	for args, want := range map[string]string{
		"sort":                              "help requested",
		"gemm -shapes 4096x1024":            "-shapes",
		"gemm -shapes 1000000x1000000x8":    "GiB",
		"gemm -precision fp8":               "fp32, tf32, bf16",
		"gemm -openblas libc.so.6":          "no OpenBLAS",
		"rows -rows 0":                      "-rows 0",
		"rows -workers 0":                   "help requested",
		"rows x":                            "x: it takes no argument",
		"rows -device gpu":                  "choose host, cuda or cuda:N",
		"step -nodes 10 -batch-size 11":     "a batch of 11 from 10 nodes",
		"memory -tier 1MiB -set 2MiB":       "at most the tier's",
		"memory -row-bytes 6":               "a multiple of 4",
		"cache -nodes 1K -rows 1001":        "-rows 1001",
		"cache -nodes 10 -rows 1 -policy x": "x",
		"sample -turns 0":                   "-turns",
	} {
		require.ErrorContains(t, run(t.Context(), strings.Fields(args)), want, args)
	}
}
