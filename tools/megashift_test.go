package tools

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/build"
	"helios/dataset/datasettest"
	"helios/dataset/npy"
	"helios/graph/partition"
)

// TestMegashiftGraphs: the arrays of each graph that megashift.py trains on, edge by edge. With as
// many mega-batches as parts, the mega-batch of a node is its part.
func TestMegashiftGraphs(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("no python3, which megashift.py is written for")
	}
	_, err := os.Stat("megashift.py") // go test has to see that it changed
	require.NoError(t, err)
	const nodes, dim, parts, statics = 600, 3, 4, 12
	dir := t.TempDir()
	whole, file := filepath.Join(dir, "whole"), filepath.Join(dir, "parts")
	require.NoError(t, build.Generate(t.Context(), build.GenerateOptions{Kind: "communities",
		Nodes: nodes, Dim: dim, Classes: 4, AvgDegree: 8, Out: whole}))
	d := datasettest.Open(t, whole)
	tp, err := d.Topology()
	require.NoError(t, err)
	p, err := partition.Make(t.Context(), tp, partition.Options{Parts: parts, Method: "random"})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	f, err := os.Create(file)
	require.NoError(t, err)
	require.NoError(t, p.Write(f))
	require.NoError(t, f.Close())

	graphs := []string{"seen", "edges", "lists"}
	script := fmt.Sprintf(`
import megashift
m = megashift.Mega(%q, %q, %d, %d, %d)
for g in %q.split(): m.write(g, %q + "/" + g)
print(m.describe())`, whole, file, parts, parts, 100*statics/nodes, "seen edges lists", dir)
	cmd := exec.Command("python3", "-B", "-c", script)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "of the in-edges are in the mega-batch of their node")

	degree := make([]int, nodes)
	for v := range tp.NumNodes {
		for i := range tp.InDegree(v) {
			degree[tp.Neighbor(v, i)]++
		}
	}
	order := make([]int, nodes)
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return degree[b] - degree[a] })
	static := make([]bool, nodes)
	for _, v := range order[:statics] {
		static[v] = true
	}
	rows := datasettest.RowsOf(t, d)
	for _, name := range graphs {
		edges := ints(t, filepath.Join(dir, name, "edge_index.npy"))
		src, dst := edges[:len(edges)/2], edges[len(edges)/2:]
		got := floats(t, filepath.Join(dir, name, "features.npy"))
		count := len(got) / dim
		require.Len(t, ints(t, filepath.Join(dir, name, "labels.npy")), count)
		if name == "edges" {
			require.Equal(t, nodes, count)
		} else {
			require.Equal(t, nodes+statics*(parts-1), count)
		}
		// Rows are noise, so each tells its node.
		node := map[[dim]float32]int64{}
		for v := range nodes {
			node[[dim]float32(rows[v*dim:])] = int64(v)
		}
		require.Len(t, node, nodes)
		of := make([]int64, count) // the node in the whole graph
		for i := range of {
			v, ok := node[[dim]float32(got[i*dim:])]
			require.True(t, ok)
			of[i] = v
		}
		lists := make([][]int64, count)
		mega := make([]int64, count) // of a copy, by an ordinary neighbour of its; -1: not known
		for i := range mega {
			mega[i] = -1
		}
		for i, u := range src {
			lists[dst[i]] = append(lists[dst[i]], of[u])
			if u < nodes {
				if q := int64(p.Of[of[u]]); dst[i] >= nodes {
					require.Contains(t, []int64{-1, q}, mega[dst[i]], "one mega-batch a copy")
					mega[dst[i]] = q
				}
			} else if dst[i] < nodes { // a copy stands in for its node elsewhere alone
				require.NotEqual(t, p.Of[of[u]], p.Of[dst[i]])
			}
		}
		for i := range int64(count) {
			v := of[i]
			var want []int64
			for k := range tp.InDegree(v) {
				u := tp.Neighbor(v, k)
				same, there := p.Of[u] == p.Of[v], false
				switch {
				case i >= nodes:
					there = static[u] || int64(p.Of[u]) == mega[i]
				case name == "seen":
					there = same || static[u]
				case name == "edges":
					there = same || static[u] || static[v]
				default:
					there = true
				}
				if there {
					want = append(want, u)
				}
			}
			slices.Sort(want)
			slices.Sort(lists[i])
			require.Equal(t, want, lists[i], "%s: node %d, a copy of %d", name, i, v)
		}
	}
}

// ints is an array of integers.
func ints(t *testing.T, path string) []int64 {
	r, n := reader(t, path)
	to := make([]int64, n)
	got, err := r.Ints(to)
	require.NoError(t, err)
	require.Equal(t, n, got)
	return to
}

// floats is an array of float32.
func floats(t *testing.T, path string) []float32 {
	r, n := reader(t, path)
	to := make([]float32, n)
	got, err := r.Float32s(to)
	require.NoError(t, err)
	require.Equal(t, n, got)
	return to
}

func reader(t *testing.T, path string) (*npy.Reader, int) {
	a, err := npy.Open(path)
	require.NoError(t, err)
	r, err := a.Reader(0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r, int(a.Header.Elements())
}
