package dataset_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/npy"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

func typedDataset(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Kind: "typed", Nodes: 3000, Dim: 10,
		Classes: 4, AvgDegree: 5, Seed: 5, Out: out}))
	return out
}

// TestTypedGenerated reads all parts of a typed dataset.
func TestTypedGenerated(t *testing.T) {
	for _, mapped := range []bool{false, true} {
		if mapped {
			dataset.MapAlways(t)
		}
		d := datasettest.Open(t, typedDataset(t))
		m := &d.Meta
		require.Equal(t, int64(3000), m.Rows())
		require.True(t, d.Sealed())
		edges := func(i int) map[[2]int64]bool {
			r := &m.Relations[i]
			tp, err := d.Relation(i)
			require.NoError(t, err)
			require.Equal(t, m.NodeTypes[m.TypeOf(r.Dst)].Nodes, tp.NumNodes)
			require.Equal(t, r.Edges, tp.NumEdges)
			all := map[[2]int64]bool{}
			for v := range tp.NumNodes {
				last := int64(-1)
				for k := range tp.InDegree(v) {
					u := tp.Neighbor(v, k)
					require.Greater(t, u, last)
					require.Less(t, u, m.NodeTypes[m.TypeOf(r.Src)].Nodes)
					last = u
					all[[2]int64{u, v}] = true
				}
			}
			return all
		}
		for i := range m.Relations {
			rev := m.Relations[i].Reverse
			if rev == nil {
				continue
			}
			forth, back := edges(i), edges(*rev)
			require.Len(t, back, len(forth))
			for e := range forth {
				require.True(t, back[[2]int64{e[1], e[0]}])
			}
		}
		seen := map[int64]bool{}
		for _, name := range dataset.Splits {
			nodes, err := d.TaskSplit(0, name)
			require.NoError(t, err)
			require.NotEmpty(t, nodes)
			for _, v := range nodes {
				require.False(t, seen[v])
				seen[v] = true
			}
		}
		labels, err := d.Labels()
		require.NoError(t, err)
		require.Len(t, labels, int(m.NodeTypes[0].Nodes))
		_, err = d.TaskValues(0)
		require.ErrorContains(t, err, "task topic is one of class, not of regression")

		// A reader of one type of nodes is told so.
		for _, open := range []func() error{
			func() error { _, err := d.Topology(); return err },
			func() error { _, err := d.TopologyInMemory(); return err },
			func() error { _, err := d.TopologyOnSSD(bg, graph.OutOfCoreOptions{}); return err },
		} {
			err := open()
			require.ErrorContains(t, err, "has 4 types of nodes and 7 relations")
			require.Equal(t, errs.Capability, errs.ClassOf(err))
		}
		empty := d.WithoutEdges()
		tp, err := empty.Relation(2)
		require.NoError(t, err)
		require.Zero(t, tp.NumEdges)
		require.Equal(t, m.NodeTypes[1].Nodes, tp.NumNodes)
		require.NoError(t, empty.Close())
		require.NotZero(t, m.Relations[2].Edges)
	}
}

// writeTyped writes a small typed dataset by hand: rows of 6 and of 3 halves, a type without rows,
// and a task of each target.
func writeTyped(t *testing.T, change func(m *dataset.Meta, put func(name string, dt npy.DType,
	width int64, b []byte))) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "g")
	s, err := build.NewStaging(out)
	require.NoError(t, err)
	put := func(name string, dt npy.DType, width int64, b []byte) {
		a, err := s.Array(name, dt, width)
		require.NoError(t, err)
		_, err = a.Write(b)
		require.NoError(t, err)
		require.NoError(t, a.Close())
	}
	half := npy.DType{Kind: 'f', Size: 2}
	rows := func(n, dim int) (b []byte) {
		for i := range n * dim {
			b = append(b, byte(i), byte(n))
		}
		return b
	}
	zeros := func(n int) []byte { return make([]byte, n) }
	put("nodes/000/features", half, 5, rows(3, 5))
	put("nodes/001/features", half, 3, rows(2, 3))
	put("edges/000/indptr", npy.Int64, 0, zeros(8*4))
	put("edges/000/indices", npy.Uint32, 0, nil)
	put("tasks/000/labels", npy.Int32, 0, zeros(4*3))
	put("tasks/001/labels", npy.Uint8, 2, []byte{0, 1, 255, 0})
	put("tasks/002/labels", npy.Float32, 1, []byte{0, 0, 192, 127, 0, 0, 0, 64})
	m := dataset.Meta{Name: "g"}
	m.NodeTypes = []dataset.NodeType{{Name: "a", Nodes: 3, Dim: 5, DType: "float16"},
		{Name: "b", Nodes: 2, Dim: 3, DType: "float16"}, {Name: "c", Nodes: 4}}
	m.Relations = []dataset.Relation{{Src: "c", Name: "to", Dst: "a"}}
	for i, target := range []string{"class", "multi-label", "regression"} {
		task := dataset.Task{Name: target, Kind: "node", Type: "b", Target: target}
		switch i {
		case 0:
			task.Type, task.Classes = "a", 2
		default:
			task.Columns = 3 - i
		}
		for _, split := range dataset.Splits {
			put(dataset.TasksDir(i)+"/"+split, npy.Int64, 0, nil)
		}
		m.Tasks = append(m.Tasks, task)
	}
	if change != nil {
		change(&m, put)
	}
	require.NoError(t, s.Commit(m))
	return out
}

// TestTypedRows shows one row space over types of several widths, and the targets.
func TestTypedRows(t *testing.T) {
	d := datasettest.Open(t, writeTyped(t, nil))
	require.Equal(t, int64(5), d.Meta.Rows())
	require.Equal(t, 12, d.Meta.RowBytes()) // 5 halves, padded to words
	b := make([]byte, 5*12)
	require.NoError(t, d.ReadRows(0, b))
	require.Equal(t, []byte{10, 3, 11, 3, 12, 3, 13, 3, 14, 3, 0, 0}, b[24:36])
	require.Equal(t, []byte{3, 2, 4, 2, 5, 2, 0, 0, 0, 0, 0, 0}, b[48:])
	for first := range 5 {
		for n := range 5 - first + 1 {
			part := slices.Repeat([]byte{99}, 12*n)
			require.NoError(t, d.ReadRows(int64(first), part))
			require.Equal(t, b[12*first:12*(first+n)], part)
		}
	}
	require.ErrorContains(t, d.ReadRows(5, make([]byte, 12)), "are not rows of 12 bytes in 0..4")
	multi, err := d.TaskMultiLabels(1)
	require.NoError(t, err)
	require.Equal(t, []uint8{0, 1, 255, 0}, multi)
	values, err := d.TaskValues(2)
	require.NoError(t, err)
	require.True(t, values[0] != values[0] && values[1] == 2)
	_, err = d.TaskLabels(1)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
}

// TestTypedWrongArrays: arrays that do not fit the description, or hold what they may not.
func TestTypedWrongArrays(t *testing.T) {
	put8 := func(v ...byte) []byte {
		b := make([]byte, 8*len(v))
		for i, x := range v {
			b[8*i] = x
		}
		return b
	}
	for _, c := range []struct {
		want   string
		change func(m *dataset.Meta, put func(string, npy.DType, int64, []byte))
	}{
		{"nodes/001/features.npy has shape (2, 3)", func(m *dataset.Meta, _ func(string, npy.DType, int64,
			[]byte)) {
			m.NodeTypes[1].Dim = 4
		}},
		{"edges/000/indptr.npy has shape (4,)", func(m *dataset.Meta, _ func(string, npy.DType, int64,
			[]byte)) {
			m.Relations[0].Dst = "b"
		}},
		{"tasks/001/labels.npy has shape (2, 2)", func(m *dataset.Meta, _ func(string, npy.DType, int64,
			[]byte)) {
			m.Tasks[1].Columns = 3
		}},
		{"tasks/002/labels.npy: holds <f4", func(m *dataset.Meta, _ func(string, npy.DType, int64, []byte)) {
			m.Tasks[2] = dataset.Task{Name: "x", Kind: "node", Type: "b", Target: "class", Classes: 1}
		}},
		{"edges/001/indptr.npy is missing", func(m *dataset.Meta, _ func(string, npy.DType, int64, []byte)) {
			m.Relations = append(m.Relations, dataset.Relation{Src: "a", Name: "no", Dst: "b"})
		}},
		// 3 is a node of c, the source, though of no other type; 4 is none.
		{"edges/000/indices.npy: node id 4 at position 1 is outside 0..3",
			func(m *dataset.Meta, put func(string, npy.DType, int64, []byte)) {
				put("edges/000/indptr", npy.Int64, 0, put8(0, 2, 2, 2))
				put("edges/000/indices", npy.Uint32, 0, []byte{3, 0, 0, 0, 4, 0, 0, 0})
				m.Relations[0].Edges = 2
			}},
		{"edges/000/indptr.npy: falls from 2 to 1",
			func(m *dataset.Meta, put func(string, npy.DType, int64, []byte)) {
				put("edges/000/indptr", npy.Int64, 0, put8(0, 2, 1, 2))
				put("edges/000/indices", npy.Uint32, 0, make([]byte, 8))
				m.Relations[0].Edges = 2
			}},
		{"label 1 of node 1 is 7, must be 0, 1, or 255",
			func(_ *dataset.Meta, put func(string, npy.DType, int64, []byte)) {
				put("tasks/001/labels", npy.Uint8, 2, []byte{0, 1, 0, 7})
			}},
		{"value 0 of node 1 is +Inf",
			func(_ *dataset.Meta, put func(string, npy.DType, int64, []byte)) {
				put("tasks/002/labels", npy.Float32, 1, []byte{0, 0, 0, 0, 0, 0, 128, 127})
			}},
		{"label 2 of node 0 is outside -1..1",
			func(_ *dataset.Meta, put func(string, npy.DType, int64, []byte)) {
				put("tasks/000/labels", npy.Int32, 0, []byte{2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
			}},
		{"tasks/001/val.npy: node id 2 at position 0 is outside 0..1",
			func(m *dataset.Meta, put func(string, npy.DType, int64, []byte)) {
				put("tasks/001/val", npy.Int64, 0, put8(2))
				m.Tasks[1].Val = 1
			}},
	} {
		err := useTyped(writeTyped(t, c.change))
		require.ErrorContains(t, err, c.want)
		require.Equal(t, errs.Usage, errs.ClassOf(err), c.want)
	}
}

// useTyped reads all that a run may read of a typed dataset.
func useTyped(dir string) error {
	d, err := dataset.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	for i := range d.Meta.Relations {
		_, rerr := d.Relation(i)
		err = errors.Join(err, rerr)
	}
	for i := range d.Meta.Tasks {
		var terr error
		switch d.Meta.Tasks[i].Target {
		case dataset.TargetClass:
			_, terr = d.TaskLabels(i)
		case dataset.TargetMultiLabel:
			_, terr = d.TaskMultiLabels(i)
		default:
			_, terr = d.TaskValues(i)
		}
		err = errors.Join(err, terr)
		for _, s := range dataset.Splits {
			_, serr := d.TaskSplit(i, s)
			err = errors.Join(err, serr)
		}
	}
	return errors.Join(err, d.ReadRows(0, make([]byte, d.Meta.Rows()*int64(d.Meta.RowBytes()))))
}

// A split of a typed dataset has a node once: a learned table takes one gradient for it.
func TestTypedSplitHasNodesOnce(t *testing.T) {
	dir := typedDataset(t)
	datasettest.Unseal(t, dir)
	file := filepath.Join(dir, "tasks", "000", "train.npy")
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	copy(data[len(data)-8:], data[len(data)-16:])
	require.NoError(t, os.WriteFile(file, data, 0o600))
	_, err = datasettest.Open(t, dir).Split("train")
	require.ErrorContains(t, err, "train.npy has node")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// TestTypedByteTrials damages each file of a typed dataset in each way: a reader of all of it is
// told, and so is VerifyFiles.
func TestTypedByteTrials(t *testing.T) {
	dir := typedDataset(t)
	require.NoError(t, useTyped(dir))
	r := rand.New(rand.NewPCG(1, 2))
	for _, name := range datasettest.FilesIn(t, dir) {
		path := filepath.Join(dir, name)
		good, err := os.ReadFile(path)
		require.NoError(t, err)
		for trial := range 8 {
			bad := slices.Clone(good)
			switch trial % 4 {
			case 0, 1:
				bad[r.IntN(len(bad))] ^= 1 << r.IntN(8)
			case 2:
				bad = bad[:r.IntN(len(bad))]
			default:
				bad = append(bad, byte(r.Uint32()))
			}
			require.NoError(t, os.WriteFile(path, bad, 0o644))
			require.Error(t, useTyped(dir), "%s, trial %d", name, trial)
			if d, err := dataset.Open(dir); err == nil {
				_, err := dataset.VerifyFiles(bg, d, nil)
				require.ErrorContains(t, err, name)
				require.Equal(t, errs.Device, errs.ClassOf(err))
				require.NoError(t, d.Close())
			}
		}
		require.NoError(t, os.WriteFile(path, good, 0o644))
	}
	require.NoError(t, useTyped(dir))
	// A file that nobody sealed, where one could be read.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "nodes/001/names.txt"), []byte("x\n"), 0o644))
	_, err := dataset.Open(dir)
	require.ErrorContains(t, err, "nodes/001/names.txt is not one of the files")
}

// TestTypedSealAnew takes the seal of a typed dataset away, and seals it again.
func TestTypedSealAnew(t *testing.T) {
	dir := typedDataset(t)
	datasettest.Unseal(t, dir)
	require.NoError(t, useTyped(dir))
	_, anew, err := dataset.Seal(bg, dir, nil)
	require.NoError(t, err)
	require.True(t, anew)
	d := datasettest.Open(t, dir)
	require.True(t, d.Sealed())
	_, err = dataset.VerifyFiles(bg, d, nil)
	require.NoError(t, err)
}

// TestTypedHomogeneous shows a dataset of format 2 with one type and one relation as its twin of
// format 1, to whoever knows no types.
func TestTypedHomogeneous(t *testing.T) {
	one := datasettest.Open(t, sealedDataset(t))
	m := one.Meta
	g := m.Graph()
	out := filepath.Join(t.TempDir(), "g")
	s, err := build.NewStaging(out)
	require.NoError(t, err)
	for from, to := range map[string]string{"features": "nodes/000/features",
		"indptr": "edges/000/indptr", "indices": "edges/000/indices", "labels": "tasks/000/labels",
		"train": "tasks/000/train", "val": "tasks/000/val", "test": "tasks/000/test"} {
		a, err := npy.Open(one.Path(from + ".npy"))
		require.NoError(t, err)
		b, err := os.ReadFile(one.Path(from + ".npy"))
		require.NoError(t, err)
		width := int64(0)
		if from == "features" {
			width = int64(m.Dim)
		}
		w, err := s.Array(to, a.Header.DType, width)
		require.NoError(t, err)
		_, err = w.Write(b[a.DataOffset():])
		require.NoError(t, err)
		require.NoError(t, w.Close())
	}
	require.NoError(t, s.Commit(dataset.Meta{Name: "g", Schema: g}))
	two := datasettest.Open(t, out)
	require.True(t, two.Meta.Typed())
	require.True(t, two.Meta.Homogeneous())
	require.NotEqual(t, one.UUID(), two.UUID())
	require.Equal(t, []int64{m.Nodes, m.Edges, m.Train, m.Val, m.Test, int64(m.Dim),
		int64(m.Classes)},
		[]int64{two.Meta.Nodes, two.Meta.Edges, two.Meta.Train, two.Meta.Val, two.Meta.Test,
			int64(two.Meta.Dim), int64(two.Meta.Classes)})
	a, err := one.Topology()
	require.NoError(t, err)
	b, err := two.Topology()
	require.NoError(t, err)
	require.Equal(t, a.Indptr, b.Indptr)
	require.Equal(t, a.Indices32, b.Indices32)
	far, err := two.TopologyOnSSD(bg, graph.OutOfCoreOptions{})
	require.NoError(t, err)
	require.NoError(t, far.Close())
	require.Equal(t, datasettest.AllRows(t, one), datasettest.AllRows(t, two))
	la, err := one.Labels()
	require.NoError(t, err)
	lb, err := two.Labels()
	require.NoError(t, err)
	require.Equal(t, la, lb)
	for _, name := range dataset.Splits {
		sa, err := one.Split(name)
		require.NoError(t, err)
		sb, err := two.Split(name)
		require.NoError(t, err)
		require.Equal(t, sa, sb)
	}
}
