package main

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/trace"
)

func TestRun(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "t")
	w, err := trace.Create(path, trace.Header{Rows: 2000, RowBytes: 512, SSDs: 1}, false)
	require.NoError(t, err)
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 30 {
		require.NoError(t, w.Begin(trace.Train, i/15, i%15))
		seen := map[int64]bool{}
		for part := range 2 {
			var rows []int64
			for range 100 + 100*part {
				if v := int64(2000 * r.Float64() * r.Float64()); !seen[v] {
					seen[v] = true
					rows = append(rows, v)
				}
			}
			require.NoError(t, w.Part(rows))
		}
	}
	require.NoError(t, w.Close())

	m, rows, err := load(path, 1)
	require.NoError(t, err)
	require.Len(t, m, 15)
	require.EqualValues(t, 2000, rows)

	pack := filepath.Join(dir, "pack")
	require.NoError(t, os.Mkdir(pack, 0o700))
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), options{trace: path, hot: "5%", budgets: "1.5,4",
		segments: "5", rowBytes: 512, workers: 2, single: 3, dir: pack}, &out))
	for _, s := range []string{"30 mini-batches", "1.5x, as the paper\t", "4x, copies\t",
		"5, no MinHash\t5", "5, 2 hashes\t5", "at one go over those by mini-batch"} {
		require.Contains(t, out.String(), s)
	}
	require.Equal(t, 3, strings.Count(out.String(), "\nby mini-batch\t"))
	left, err := os.ReadDir(pack)
	require.NoError(t, err)
	require.Empty(t, left)
}
