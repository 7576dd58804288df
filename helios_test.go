package helios_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios"
	"helios/dataset/build"
	"helios/internal/errs"
	"helios/internal/state"
	"helios/internal/testing/testrig"
)

// generated makes a graph of 600 nodes with names for the files of its SSDs.
func generated(t *testing.T) (graph string, files []string) {
	t.Helper()
	t.Setenv(state.EnvDir, t.TempDir())
	t.Setenv(state.EnvRun, t.TempDir())
	dir := t.TempDir()
	graph = filepath.Join(dir, "g")
	require.NoError(t, build.Generate(t.Context(), build.GenerateOptions{Kind: "sbm", Nodes: 600,
		AvgDegree: 6, Classes: 3, Dim: 7, Seed: 3, Out: graph}))
	return graph, []string{filepath.Join(dir, "a.img"), filepath.Join(dir, "b.img")}
}

// opened is generated, loaded and opened.
func opened(t *testing.T) *helios.Dataset {
	t.Helper()
	testrig.CheckLeaks(t)
	graph, files := generated(t)
	require.NoError(t, helios.Load(t.Context(), graph, files...))
	d, err := helios.Open(graph, files[1], files[0])
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

var small = helios.BatchOptions{Config: helios.Config{Fanouts: []int{3, 2}, Batch: 100, Epochs: 2}}

// The rows of a mini-batch are those of the dataset, and its blocks name nodes of it.
func TestBatches(t *testing.T) {
	d := opened(t)
	var order [][2]int
	seeds := map[int64]int{}
	for b, err := range d.Batches(t.Context(), small) {
		require.NoError(t, err)
		order = append(order, [2]int{b.Epoch, b.Index})
		require.Len(t, b.Features, len(b.Nodes)*d.Dim())
		require.Len(t, b.Labels, b.Seeds)
		for _, v := range b.Nodes[:b.Seeds] {
			seeds[v]++
		}
		for _, k := range b.Blocks {
			for _, v := range k.Src {
				require.Less(t, int(v), len(b.Nodes))
			}
		}
		if b.Index == 0 {
			requireRows(t, d, b)
		}
	}
	require.Equal(t,
		[][2]int{{0, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 0}, {1, 1}, {1, 2}, {1, 3}}, order)
	for v, n := range seeds {
		require.Equal(t, 2, n, "node %d is a seed once in each epoch", v)
	}
}

// requireRows reads the rows of a mini-batch again, as seeds of others.
func requireRows(t *testing.T, d *helios.Dataset, b *helios.Batch) {
	t.Helper()
	rows := map[int64][]float32{}
	for again, err := range d.Batches(t.Context(), helios.BatchOptions{
		Config:        helios.Config{Mode: "cpu", Fanouts: []int{1}, Batch: 64},
		LoaderOptions: helios.LoaderOptions{Nodes: b.Nodes}}) {
		require.NoError(t, err)
		for i, v := range again.Nodes[:again.Seeds] {
			rows[v] = again.Features[i*d.Dim():][:d.Dim()]
		}
	}
	for i, v := range b.Nodes {
		require.Equal(t, rows[v], b.Features[i*d.Dim():][:d.Dim()], "node %d", v)
	}
}

// A loop that is left, by break, by a panic or by an interrupt, leaves nothing open.
func TestLoopIsLeft(t *testing.T) {
	d := opened(t)
	for b, err := range d.Batches(t.Context(), small) {
		require.NoError(t, err)
		require.Zero(t, b.Index)
		break
	}
	require.PanicsWithValue(t, "enough", func() {
		for range d.Batches(t.Context(), small) {
			panic("enough")
		}
	})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var failed error
	for _, err := range d.Batches(ctx, small) {
		stop()
		failed = err
	}
	require.Equal(t, errs.Interrupted, errs.ClassOf(failed))
}

// A model predicts the same from its own folder and from a temporary one, which goes with it.
func TestModel(t *testing.T) {
	d := opened(t)
	o := helios.TrainOptions{
		Config: helios.Config{Fanouts: []int{3}, Epochs: 2, Batch: 50,
			ModelSettings: helios.ModelSettings{Hidden: 8}}}
	var epochs int
	o.Epoch = func(helios.EpochResult) { epochs++ }
	t.Setenv("TMPDIR", t.TempDir())
	brief, first, err := helios.Train(t.Context(), d, o)
	require.NoError(t, err)
	require.Equal(t, 2, epochs)
	o.CheckpointDir = filepath.Join(t.TempDir(), "kept")
	kept, second, err := helios.Train(t.Context(), d, o)
	require.NoError(t, err)
	require.Equal(t, first.ParamsSHA256, second.ParamsSHA256)
	want, err := brief.Predict(t.Context(), []int64{5, 0})
	require.NoError(t, err)
	require.NoError(t, brief.Close())
	require.NoError(t, kept.Close())
	got, err := helios.OpenModel(d, o.CheckpointDir).Predict(t.Context(), []int64{5, 0})
	require.NoError(t, err)
	require.Equal(t, want, got)
	e, err := kept.Evaluate(t.Context(), "test")
	require.NoError(t, err)
	require.Equal(t, *second.TestAcc, *e.Accuracy)
	_, _, err = helios.Train(t.Context(), d, o)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "another model lies there")
	o.CheckpointDir, o.Model = "", "none"
	_, _, err = helios.Train(t.Context(), d, o)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	left, err := os.ReadDir(os.Getenv("TMPDIR"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Without names of files the SSDs are those that were bound, or the folder where none is.
func TestOpenBound(t *testing.T) {
	testrig.CheckLeaks(t)
	graph, files := generated(t)
	d, err := helios.Open(graph)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, helios.Load(t.Context(), graph, files...))
	store, err := state.Open("")
	require.NoError(t, err)
	require.NoError(t, store.Update(t.Context(), func(st *state.State) error {
		for _, f := range files {
			fi, err := os.Stat(f)
			require.NoError(t, err)
			st.SSDs = append(st.SSDs, state.SSD{Name: st.NextName(), Kind: state.KindProxy, Path: f,
				Bytes: fi.Size(), LBABytes: 512, Serial: filepath.Base(f)})
		}
		return nil
	}))
	d, err = helios.Open(graph)
	require.NoError(t, err)
	beside, err := helios.Open(graph)
	require.NoError(t, err, "files are shared")
	require.NoError(t, beside.Close())
	require.NoError(t, d.Close())
	d, err = helios.Open(graph, files...)
	require.NoError(t, err)
	require.NoError(t, d.Close())
}

// A second load writes nothing; SSDs that hold anything else are left alone.
func TestLoad(t *testing.T) {
	testrig.CheckLeaks(t)
	graph, files := generated(t)
	require.ErrorContains(t, helios.Load(t.Context(), graph), "name")
	require.NoError(t, helios.Load(t.Context(), graph, files...))
	loaded, err := os.ReadFile(files[0])
	require.NoError(t, err)
	require.NoError(t, helios.Load(t.Context(), graph, files...))
	again, err := os.ReadFile(files[0])
	require.NoError(t, err)
	require.Equal(t, loaded, again, "a load anew has another identity")
	require.NoError(t, os.WriteFile(files[0], make([]byte, 4<<20), 0o600))
	require.NoError(t, os.WriteFile(files[1], append([]byte("mine"), make([]byte, 4<<20-4)...), 0o600))
	err = helios.Load(t.Context(), graph, files...)
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	b, err := os.ReadFile(files[1])
	require.NoError(t, err)
	require.Equal(t, "mine", string(b[:4]))
	err = helios.Load(t.Context(), graph, "/dev/null")
	require.Equal(t, errs.Refused, errs.ClassOf(err), "whether a disk is in use is found out elsewhere")
	_, err = helios.Open(filepath.Join(graph, "none"), files...)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}
