package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/datasettest"
	"helios/internal/testing/wide"
)

// An import of tables that is killed at moments from its begin to its end, most of them in the
// passes over its columns, goes on or starts clean, and ends with the bytes of one that was left
// alone.
func TestKilledImportOfTables(t *testing.T) {
	isolate(t)
	nodes, columns, kills := 40_000, 50, 50
	if wide.Lean() {
		nodes, columns, kills = 3_000, 20, 2
	}
	rng := rand.New(rand.NewPCG(7, 8))
	var n, e strings.Builder
	n.WriteString("id,group")
	for c := range columns {
		fmt.Fprintf(&n, ",c%d", c)
	}
	for i := range nodes {
		fmt.Fprintf(&n, "\nuser-%x,%c", i*7919, 'a'+i%3)
		for c := range columns {
			switch {
			case c%5 == 0:
				fmt.Fprintf(&n, ",word%d", rng.IntN(20))
			case rng.IntN(9) == 0:
				n.WriteByte(',')
			default:
				fmt.Fprintf(&n, ",%g", rng.Float64())
			}
		}
	}
	e.WriteString("a,b\n")
	for range nodes {
		fmt.Fprintf(&e, "user-%x,user-%x\n", rng.IntN(nodes)*7919, rng.IntN(nodes)*7919)
	}
	require.NoError(t, os.WriteFile("n.csv", []byte(n.String()), 0o644))
	require.NoError(t, os.WriteFile("e.csv", []byte(e.String()), 0o644))
	args := []string{"import", "tables", "--nodes", "n.csv", "--id", "id", "--label", "group",
		"--edges", "e.csv", "--src", "a", "--dst", "b", "--missing", "mean", "--quiet", "--name", "g",
		"--memory", "64MiB", "--out"}
	begin := time.Now()
	require.NoError(t, child(t, append(args, "whole")...).Run())
	took := time.Since(begin)
	want := datasettest.Digest(t, "whole")
	killed := 0
	for i := range kills {
		c := child(t, append(args, "g")...)
		require.NoError(t, c.Start())
		time.Sleep(took * time.Duration(2*i+1) / time.Duration(2*kills))
		_ = c.Process.Kill() // it may have ended
		if c.Wait() != nil {
			killed++
			if _, err := os.Stat("g"); err != nil { // else it was about to exit
				r := finishChild(t, child(t, append(args, "g")...))
				require.Zero(t, r.code, "%d: %s", i, r.errOut)
			}
		}
		require.Equal(t, want, datasettest.Digest(t, "g"), i)
		left, err := filepath.Glob("*partial*")
		require.NoError(t, err)
		require.Empty(t, left, i)
		require.NoError(t, os.RemoveAll("g"))
	}
	t.Logf("%d of %d killed", killed, kills)
	require.Positive(t, killed)
}
