package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Rows of a type from load to training: every verb names it, and a run can ask for one.
func TestRowTypes(t *testing.T) {
	loaded(t, 2)
	require.Contains(t, ok(t, "load", "g", "--row-dtype", "int8"), "rows of 32 B (int8)")
	require.Contains(t, ok(t, "verify", "g", "--source"),
		"rows of 32 B (int8), 4000 rows have their checksums, 4000 rows equal to the source")
	var first any
	for _, mode := range []string{"helios", "mmap"} {
		r := lines(t, ok(t, "train", "g", "--mode", mode, "--fanout", "3,3", "--hidden", "8",
			"--no-eval", "--json", "--quiet", "--checkpoint", mode))
		last := r[len(r)-1]
		require.Equal(t, "int8", last["row_dtype"])
		require.EqualValues(t, 32, last["row_bytes"])
		if first == nil {
			first = last["params_sha256"]
		}
		require.Equal(t, first, last["params_sha256"])
	}
	require.Contains(t, ok(t, "eval", "g", "--checkpoint", "helios", "--row-dtype", "int8"),
		"of 32 B as int8")
	fails(t, hc(t, "train", "g", "--row-dtype", "float16", "--quiet"), 2, "train",
		"the SSDs hold rows of int8", "load --dataset", "--row-dtype float16")
	fails(t, hc(t, "load", "g", "--row-dtype", "float8", "--quiet"), 2, "load", "--row-dtype",
		"bfloat16")
	out := ok(t, "train", "g", "--clock", "virtual", "--hardware", "host", "--row-dtype", "float16",
		"--no-eval", "--quiet")
	require.Contains(t, out, "64 B, stored as float16")
}
