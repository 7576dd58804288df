// Package loaded makes a small dataset and lays its rows out on files that play SSDs, for the tests
// of the example programs.
package loaded

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/nvme"
	"helios/nvme/proxy"
)

// Dataset returns the folder of a dataset of 3,000 nodes and the files that hold its rows.
func Dataset(t testing.TB) (dir string, files []string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(t.Context(), build.GenerateOptions{
		Kind: "sbm", Nodes: 3000, AvgDegree: 8, Classes: 4, Dim: 16, Seed: 1, Out: dir,
	}))
	d, err := dataset.Open(dir)
	require.NoError(t, err)
	var ssds []*gpuio.SSD
	for i := range 2 {
		path := filepath.Join(t.TempDir(), fmt.Sprintf("%d.img", i))
		require.NoError(t, proxy.Create(path, 8<<20))
		bus, err := proxy.Open(proxy.Config{Path: path})
		require.NoError(t, err)
		ctrl, err := nvme.Open(t.Context(), bus, nvme.Options{})
		require.NoError(t, err)
		ssds = append(ssds, &gpuio.SSD{Ctrl: ctrl, Name: path, BackingPath: path})
		files = append(files, path)
	}
	_, err = stripe.Load(t.Context(), d, ssds, stripe.LoadOptions{})
	require.NoError(t, err)
	for _, s := range ssds {
		require.NoError(t, s.Ctrl.Close(t.Context()))
	}
	require.NoError(t, d.Close())
	return dir, files
}
