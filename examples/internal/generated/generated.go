// Package generated makes a small dataset for the tests of the example programs.
package generated

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/build"
)

// Dataset returns the folder of a dataset of 3,000 nodes, and names for the files of its SSDs.
func Dataset(t testing.TB) (dir string, files []string) {
	t.Helper()
	t.Setenv("HELIOS_STATE", t.TempDir())
	tmp := t.TempDir()
	dir = filepath.Join(tmp, "g")
	require.NoError(t, build.Generate(t.Context(), build.GenerateOptions{
		Kind: "sbm", Nodes: 3000, AvgDegree: 8, Classes: 4, Dim: 16, Seed: 1, Out: dir,
	}))
	return dir, []string{filepath.Join(tmp, "a.img"), filepath.Join(tmp, "b.img")}
}
