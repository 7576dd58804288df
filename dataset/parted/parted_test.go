package parted

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/pages"
	"helios/graph"
	"helios/graph/partition"
	"helios/internal/rowtype"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/testrig"
)

var bg = context.Background()

// generated is a dataset in memory and its topology.
func generated(t testing.TB, nodes int64, dim int) (*dataset.Dataset, *graph.Topology) {
	t.Helper()
	dir := filepath.Join(testrig.MemoryDir(t), "g")
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Kind: "rmat", Nodes: nodes,
		AvgDegree: 9, Dim: dim, Classes: 4, Seed: 3, Out: dir}))
	d := datasettest.Open(t, dir)
	topo, err := d.Topology()
	require.NoError(t, err)
	return d, topo
}

// partsOf is a partition at random.
func partsOf(t testing.TB, d *dataset.Dataset, topo *graph.Topology,
	parts int) *partition.Partition {
	t.Helper()
	p, err := partition.Make(bg, topo, partition.Options{Parts: parts,
		Method: partition.Random, Seed: 5})
	require.NoError(t, err)
	p.Info.Dataset = d.Meta.UUID
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// want is a layout in the plainest way.
type want struct {
	old    []int64 // by new number
	newOf  []int64
	static []bool // by old number
}

func plain(topo *graph.Topology, of []uint32, share float64) *want {
	n := topo.NumNodes
	degree := make([]int64, n)
	for e := range topo.NumEdges {
		degree[neighbor(topo, e)]++
	}
	byDegree := make([]int64, n)
	for v := range byDegree {
		byDegree[v] = int64(v)
	}
	slices.SortStableFunc(byDegree, func(a, b int64) int {
		return cmp.Compare(degree[b], degree[a])
	})
	w := &want{old: make([]int64, n), newOf: make([]int64, n), static: make([]bool, n)}
	for _, v := range byDegree[:int64(share*float64(n))] {
		w.static[v] = true
	}
	for v := range w.old {
		w.old[v] = int64(v)
	}
	slices.SortStableFunc(w.old, func(a, b int64) int {
		if c := cmp.Compare(of[a], of[b]); c != 0 || w.static[a] == w.static[b] {
			return c
		}
		if w.static[a] {
			return -1
		}
		return 1
	})
	for id, v := range w.old {
		w.newOf[v] = int64(id)
	}
	return w
}

func neighbor(topo *graph.Topology, e int64) int64 {
	if topo.Wide() {
		return topo.Indices64[e]
	}
	return int64(topo.Indices32[e])
}

// holds compares all of a layout with the dataset. store has its pages.
func holds(t testing.TB, l *Layout, store []byte, d *dataset.Dataset, topo *graph.Topology,
	of []uint32, share float64, rt rowtype.Type) {
	t.Helper()
	w := plain(topo, of, share)
	rows := make([]byte, l.Nodes*l.RowBytes)
	require.NoError(t, d.RowsAs(rt).Read(0, rows))
	row := func(v int64) []byte { return rows[v*l.RowBytes:][:l.RowBytes] }
	list := func(v int64) (out []uint32) {
		for i := range topo.InDegree(v) {
			out = append(out, uint32(w.newOf[topo.Neighbor(v, i)]))
		}
		return out
	}
	run := func(r Run) []byte { return store[r.Page*l.Spec.PageBytes:][:r.Pages*l.Spec.PageBytes] }
	section := func(s Section, nodes []int64) {
		pos := 0
		require.Len(t, s.Degrees, len(nodes))
		for i, v := range nodes {
			n := int(topo.InDegree(v))
			if int64(s.Old[i]) != v || int(s.Degrees[i]) != n ||
				!slices.Equal(list(v), s.Neighbors[pos:pos+n]) {
				t.Fatalf("node %d: old number %d, degree %d, neighbours %v and not %v", v, s.Old[i],
					s.Degrees[i], s.Neighbors[pos:pos+n], list(v))
			}
			pos += n
		}
		require.Len(t, s.Neighbors, pos)
	}
	features := func(r Run, nodes []int64) {
		got := run(r)
		for i, v := range nodes {
			if !bytes.Equal(row(v), got[int64(i)*l.RowBytes:][:l.RowBytes]) {
				t.Fatalf("node %d has another row", v)
			}
		}
		rest := got[int64(len(nodes))*l.RowBytes:]
		require.True(t, bytes.Equal(make([]byte, len(rest)), rest), "zeros behind the rows")
	}
	var static []int64
	for p := range l.Parts {
		nodes := w.old[l.Base[p]:l.Base[p+1]]
		for i, v := range nodes {
			id := l.Base[p] + int64(i)
			rank, ok := l.Statics[p]+int64(i), int64(i) < l.statics(p)
			if int(of[v]) != p || l.PartOf(id) != p || ok != w.static[v] ||
				ok && rank != int64(len(static)) {
				t.Fatalf("node %d (%d in part %d): part %d, static rank %d, %t", id, v, of[v],
					l.PartOf(id), rank, ok)
			}
			if ok {
				static = append(static, v)
			}
		}
		features(l.FeaturePages[p], nodes)
		s, err := l.Section(p, run(l.EdgePages[p]))
		require.NoError(t, err)
		section(s, nodes)
	}
	require.EqualValues(t, len(static), l.StaticNodes())
	features(l.StaticFeatures, static)
	s, err := l.StaticSection(run(l.StaticEdges))
	require.NoError(t, err)
	section(s, static)
	train, err := d.Split("train")
	require.NoError(t, err)
	require.Len(t, l.Train, len(train))
	for i, v := range train {
		if w.newOf[v] != l.Train[i] {
			t.Fatalf("training node %d is %d and not %d", v, l.Train[i], w.newOf[v])
		}
	}
}

// folderBytes are the pages in a folder.
func folderBytes(t testing.TB, l *Layout) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(l.Dir, pages.PagesName))
	require.NoError(t, err)
	return b
}

func TestLayout(t *testing.T) {
	testrig.CheckLeaks(t)
	d, topo := generated(t, 5000, 25)
	far, err := d.TopologyOnSSD(bg, graph.OutOfCoreOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, far.Close()) })
	for _, c := range []struct {
		parts  int
		share  float64
		rt     rowtype.Type
		memory int64
		far    bool
		sweeps bool // several
	}{
		{1, 0, rowtype.Float32, 0, false, false},
		{7, 0, rowtype.Float32, 0, true, false},
		{7, 0.1, rowtype.Float32, 0, false, false},
		{64, 0.1, rowtype.Float16, 0, true, false},
		{300, 0.3, rowtype.Int8, 0, false, false},
		{40, 0.25, rowtype.Float32, 9 << 20, false, true},
		{40, 0.25, rowtype.Float32, 9 << 20, true, true},
		{40, 1, rowtype.Float32, 9 << 20, false, true},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			p := partsOf(t, d, topo, c.parts)
			from := topo
			if c.far {
				from = far
			}
			o := Options{Dir: filepath.Join(testrig.MemoryDir(t), "l"), Partition: p,
				StaticShare: c.share, RowType: c.rt, Place: pages.InFolder{}, MemoryBytes: c.memory}
			l, err := Make(bg, d, from, o)
			require.NoError(t, err)
			holds(t, l, folderBytes(t, l), d, topo, p.Of, c.share, c.rt)
			m, err := readManifest(o.Dir)
			require.NoError(t, err)
			require.Equal(t, c.sweeps, m.Stats.RowSweeps > 1, "%+v", m.Stats)
			require.EqualValues(t, l.Spec.Bytes(), m.Stats.BytesWritten, "each page once")
			again, err := Make(bg, d, from, o)
			require.NoError(t, err)
			require.Equal(t, l, again)
			planned(t, l, d, topo, o)
			r, err := Verify(bg, o.Dir, d.Meta.UUID, nil)
			require.NoError(t, err)
			require.Equal(t, l.Spec.Pages, r.Pages)
			opened, err := l.OpenPages(bg, pages.InFolder{})
			require.NoError(t, err)
			require.NoError(t, opened.Close(bg))
		})
	}
}

// planned holds what is planned of a layout against what was made of it.
func planned(t testing.TB, l *Layout, d *dataset.Dataset, topo *graph.Topology, o Options) {
	t.Helper()
	p, err := Plan(bg, d, topo, o)
	require.NoError(t, err)
	require.Equal(t, []any{l.Base, l.Statics, l.Edges, l.StaticEdgeCount, l.Train, l.FeaturePages,
		l.EdgePages, l.StaticFeatures, l.StaticEdges, l.Spec.PageBytes, l.Spec.Pages},
		[]any{p.Base, p.Statics, p.Edges, p.StaticEdgeCount, p.Train, p.FeaturePages,
			p.EdgePages, p.StaticFeatures, p.StaticEdges, p.Spec.PageBytes, p.Spec.Pages})
	store := folderBytes(t, l)
	run := func(r Run) []byte { return store[r.Page*l.Spec.PageBytes:][:r.Pages*l.Spec.PageBytes] }
	for part := range l.Parts {
		want := run(l.EdgePages[part])
		got := make([]byte, len(want))
		_, err := p.PartEdges(part, got)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got), "edges of part %d", part)
	}
	want := run(l.StaticEdges)
	got := make([]byte, len(want))
	_, err = p.StaticNodeEdges(got)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got), "edges of the static nodes")
	require.NoError(t, p.Close())
}

// One part without static nodes keeps all numbers.
func TestOnePartIsTheDataset(t *testing.T) {
	d, topo := generated(t, 700, 8)
	l, err := Make(bg, d, topo, Options{Dir: filepath.Join(testrig.MemoryDir(t), "l"),
		PartitionOptions: partition.Options{Parts: 1}, Place: pages.InFolder{}})
	require.NoError(t, err)
	train, err := d.Split("train")
	require.NoError(t, err)
	require.Equal(t, train, l.Train)
	s, err := l.Section(0, folderBytes(t, l)[l.start(l.EdgePages[0]):])
	require.NoError(t, err)
	require.Equal(t, topo.Indices32, s.Neighbors)
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(killedEnv); dir != "" {
		makeUntilKilled(dir)
	}
	os.Exit(datasettest.Main(m))
}
