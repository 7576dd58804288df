package dataset_test

import (
	"context"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
)

// A label takes the four bytes that are kept, and a fixed amount to read them by.
func TestLabelsTakeTheirSize(t *testing.T) {
	const nodes = 300_000
	dir := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(context.Background(), build.GenerateOptions{Kind: "sbm",
		Nodes: nodes, AvgDegree: 1, Classes: 2, Dim: 2, Out: dir}))
	d, err := dataset.Open(dir)
	require.NoError(t, err)
	defer d.Close()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	labels, err := d.Labels()
	runtime.ReadMemStats(&after)
	require.NoError(t, err)
	require.Len(t, labels, nodes)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4*nodes+3<<19))
}
