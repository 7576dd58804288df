package parted

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// Parts of equal size have every node, edge, static node and training node once.
func TestEvenLayout(t *testing.T) {
	e := Even{Nodes: 1003, Edges: 20_001, RowBytes: 512, Parts: 8, Statics: 21, StaticEdges: 900,
		Train: 101}
	l, err := e.Layout()
	require.NoError(t, err)
	require.NoError(t, l.check())
	edges, in := int64(0), map[int]int{}
	for p := range l.Parts {
		require.InDelta(t, 1003/8, l.Base[p+1]-l.Base[p], 1)
		require.InDelta(t, 21/8, l.Statics[p+1]-l.Statics[p], 1)
		edges += l.Edges[p]
	}
	require.Equal(t, []int64{1003, 21, 20_001}, []int64{l.Base[8], l.StaticNodes(), edges})
	for _, id := range l.Train {
		in[l.PartOf(id)]++
	}
	for p := range l.Parts {
		require.InDelta(t, 101/8, in[p], 1)
	}
	e.First = true
	l, err = e.Layout()
	require.NoError(t, err)
	require.Equal(t, 0, l.PartOf(l.Train[100]))
	for _, bad := range []Even{{Nodes: 0, Parts: 1, RowBytes: 4}, {Nodes: 5, Parts: 6, RowBytes: 4},
		{Nodes: 1 << 33, Parts: 2, RowBytes: 4}, {Nodes: 5, Parts: 1, RowBytes: 4, Statics: 6}} {
		_, err := bad.Layout()
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%+v", bad)
	}
}
