package dataset

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// mapped makes every array one that is too large to be copied.
func mapped(t *testing.T) {
	was := [2]float64{mapTopologyFrom, mapLabelsFrom}
	mapTopologyFrom, mapLabelsFrom = 0, 0
	t.Cleanup(func() { mapTopologyFrom, mapLabelsFrom = was[0], was[1] })
}

// TestMappedTopology: mapped arrays are those that are copied, take no memory of ours, and are checked.
func TestMappedTopology(t *testing.T) {
	d := small(t, 3000, 4, 1)
	copied, err := d.Topology()
	require.NoError(t, err)
	labels, err := d.Labels()
	require.NoError(t, err)

	mapped(t)
	before := total(hostmem.Usage())
	m, err := Open(d.Dir())
	require.NoError(t, err)
	topo, err := m.Topology()
	require.NoError(t, err)
	require.Equal(t, copied.Indptr, topo.Indptr)
	require.Equal(t, copied.Indices32, topo.Indices32)
	l, err := m.Labels()
	require.NoError(t, err)
	require.Equal(t, labels, l)
	require.Equal(t, before, total(hostmem.Usage()))
	require.Len(t, m.maps, 3)
	pinned, err := Open(d.Dir()) // for a GPU nothing is mapped
	require.NoError(t, err)
	topo, err = pinned.TopologyInMemory()
	require.NoError(t, err)
	require.Equal(t, copied.Indices32, topo.Indices32)
	require.Empty(t, pinned.maps)
	require.NoError(t, pinned.Close())
	require.NoError(t, m.Close())
	require.Empty(t, m.maps)
	_, err = m.Labels()
	require.ErrorContains(t, err, "closed")
	_, err = m.Topology()
	require.ErrorContains(t, err, "closed")

	// A neighbour that is no node, and a label that is no class.
	unseal(t, d.Dir())
	for name, bytes := range map[string][]byte{indicesName: {0xff, 0xff, 0xff, 0x7f}, labelsName: {0x77, 0, 0, 0}} {
		f, err := os.OpenFile(d.path(name), os.O_RDWR, 0)
		require.NoError(t, err)
		_, err = f.WriteAt(bytes, 128+400)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		m, err := Open(d.Dir())
		require.NoError(t, err)
		if name == indicesName {
			_, err = m.Topology()
		} else {
			_, err = m.Labels()
		}
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, name)
		require.NoError(t, m.Close())
	}
}
