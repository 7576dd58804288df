package dataset_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/datasettest"
)

// TestMappedTopology: mapped arrays are those that are copied, take no memory of ours, and are
// checked.
func TestMappedTopology(t *testing.T) {
	d := datasettest.Open(t, generated(t, build.GenerateOptions{Nodes: 3000, Dim: 4, Classes: 3,
		AvgDegree: 3, Seed: 1}))
	copied, err := d.Topology()
	require.NoError(t, err)
	labels, err := d.Labels()
	require.NoError(t, err)

	dataset.MapAlways(t)
	before := inUse()
	m, err := dataset.Open(d.Dir())
	require.NoError(t, err)
	topo, err := m.Topology()
	require.NoError(t, err)
	require.Equal(t, copied.Indptr, topo.Indptr)
	require.Equal(t, copied.Indices32, topo.Indices32)
	l, err := m.Labels()
	require.NoError(t, err)
	require.Equal(t, labels, l)
	require.Equal(t, before, inUse())
	require.Equal(t, 3, dataset.Maps(m))
	pinned, err := dataset.Open(d.Dir()) // for a GPU nothing is mapped
	require.NoError(t, err)
	topo, err = pinned.TopologyInMemory()
	require.NoError(t, err)
	require.Equal(t, copied.Indices32, topo.Indices32)
	require.Zero(t, dataset.Maps(pinned))
	require.NoError(t, pinned.Close())
	require.NoError(t, m.Close())
	require.Zero(t, dataset.Maps(m))
	_, err = m.Labels()
	require.ErrorContains(t, err, "closed")
	_, err = m.Topology()
	require.ErrorContains(t, err, "closed")

	// A neighbour that is no node, and a label that is no class.
	datasettest.Unseal(t, d.Dir())
	for name, bytes := range map[string][]byte{dataset.IndicesName: {0xff, 0xff, 0xff, 0x7f},
		dataset.LabelsName: {0x77, 0, 0, 0}} {
		f, err := os.OpenFile(d.Path(name), os.O_RDWR, 0)
		require.NoError(t, err)
		_, err = f.WriteAt(bytes, 128+400)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		m, err := dataset.Open(d.Dir())
		require.NoError(t, err)
		if name == dataset.IndicesName {
			_, err = m.Topology()
		} else {
			_, err = m.Labels()
		}
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, name)
		require.NoError(t, m.Close())
	}
}

// inUse is the memory off Go's heap.
func inUse() (n int64) {
	for _, v := range hostmem.Usage() {
		n += v
	}
	return n
}

// generated makes a dataset and returns its folder.
func generated(t testing.TB, o build.GenerateOptions) string {
	t.Helper()
	o.Out = filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(bg, o))
	return o.Out
}

var bg = context.Background()

func TestMain(m *testing.M) { os.Exit(datasettest.Main(m)) }
