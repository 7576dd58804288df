package importer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/datasettest"
	"helios/internal/testing/realdata"
	"helios/internal/testing/wide"
)

// A graph of four nodes in the BV format, by hand: 0 → 1 2 3, 1 → (a copy of 0's) 1 2 3, 3 → 0.
// Codes: γ(3)=00100, γ(0)=1, γ(1)=010, γ(2)=011; references are unary; residuals are ζ_3,
// ζ_3(2)=1011 and so on.
func writeBV(t *testing.T) string {
	base := filepath.Join(t.TempDir(), "hand")
	// 0: outdegree 3, no reference, 1 interval, from 0+fold(2)=1, length 3+γ(0)
	bits := "00100" + "1" + "010" + "011" + "1" +
		"00100" + "01" + "1" + // 1: outdegree 3, reference 1, no blocks: all is copied
		"1" + // 2: outdegree 0
		// 3: outdegree 1, no reference, no intervals, residual 3+fold(5)=0 as ζ_3(5)
		"010" + "1" + "1" + "1110"
	var b []byte
	for i, c := range bits {
		if i%8 == 0 {
			b = append(b, 0)
		}
		b[i/8] |= byte(c-'0') << (7 - i%8)
	}
	require.NoError(t, os.WriteFile(base+".graph", b, 0o644))
	require.NoError(t, os.WriteFile(base+".properties",
		[]byte(
			"nodes=4\narcs=7\nwindowsize=7\nmaxrefcount=3\nminintervallength=3\nzetak=3\nversion=0\ngraphclass=it.unimi.dsi.webgraph.BVGraph\ncompressionflags=\n"), 0o644))
	return base
}

func TestImportWebGraph(t *testing.T) {
	base := writeBV(t)
	for i, in := range []string{base, base + ".graph", base + ".properties", filepath.Dir(base)} {
		out := filepath.Join(t.TempDir(), "d")
		require.NoError(t, WebGraph(context.Background(), Options{Input: Input{In: in}, Dim: 1,
			FeatureFn: RandomFeatures,
			Labels:    writeText(t, "y", "0\n1\n1\n0\n"), Output: Output{Out: out}}), i)
		v := viewOf(t, out)
		require.Equal(t, []int64{0, 1, 3, 5, 7}, v.indptr)
		require.Equal(t, []uint32{3, 0, 1, 0, 1, 0, 1}, v.indices)
	}
	out := filepath.Join(t.TempDir(), "d")
	for want, o := range map[string]Options{
		"has 0 .properties files": {Input: Input{In: t.TempDir()}},
		"none.properties":         {Input: Input{In: filepath.Join(t.TempDir(), "none")}},
		"option nodes 5":          {Input: Input{In: base}, Nodes: 5},
		"y has 2 rows":            {Input: Input{In: base}, Labels: writeText(t, "y", "0\n1\n")},
		"option in is missing":    {},
	} {
		o.Out = out
		err := WebGraph(context.Background(), o)
		datasettest.RequireUsage(t, err)
		require.ErrorContains(t, err, want)
		require.NoDirExists(t, out)
	}
}

// The whole of cnr-2000 through the importer: the edge list that dataset/webgraph's test has a
// second decoder for.
func TestImportCNR2000(t *testing.T) {
	dir := realdata.Dir(t, "webgraph", "cnr-2000.graph", "cnr-2000.properties")
	if wide.Lean() {
		t.Skip("dataset/webgraph reads it")
	}
	out := filepath.Join(t.TempDir(), "d")
	require.NoError(t, WebGraph(context.Background(), Options{Input: Input{In: dir},
		FeatureFn: "hash", Dim: 1, Output: Output{Out: out}}))
	d := datasettest.Open(t, out)
	require.Equal(t, int64(325_557), d.Meta.Nodes)
	require.Equal(t, int64(3_216_152), d.Meta.Edges)
	tp, err := d.Topology()
	require.NoError(t, err)
	// From in-neighbours back to source and destination in order, by counting.
	n := d.Meta.Nodes
	next := make([]int64, n+1)
	for _, u := range tp.Indices32 {
		next[u+1]++
	}
	for u := range n {
		next[u+1] += next[u]
	}
	list := make([]byte, 8*len(tp.Indices32))
	largest := int64(0)
	for v := range n {
		largest = max(largest, tp.Indptr[v+1]-tp.Indptr[v])
		for _, u := range tp.Indices32[tp.Indptr[v]:tp.Indptr[v+1]] {
			binary.LittleEndian.PutUint32(list[8*next[u]:], u)
			binary.LittleEndian.PutUint32(list[8*next[u]+4:], uint32(v))
			next[u]++
		}
	}
	sum := sha256.Sum256(list)
	require.Equal(t, "7856e31dcb1db3a792f66b82e8bb34f0a952db829013eea7434b3f9c3c832220",
		hex.EncodeToString(sum[:]))
	require.Equal(t, int64(18_235), largest,
		"the largest indegree that the graph's publishers state")
}
