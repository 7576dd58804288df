package importer

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/internal/testing/datasettest"
)

// several are the good arrays with other labels.
func several(t *testing.T, dt string, shape []int64, data any) string {
	arrays := datasettest.GoodArrays()
	arrays["labels"] = datasettest.Arr{DT: dt, Shape: shape, Data: data}
	return datasettest.WriteDir(t, arrays)
}

func importTarget(t *testing.T, in, target string, unlabelled bool) (*dataset.Dataset, error) {
	o := NPYOptions{}
	o.In, o.Out, o.Target, o.UnlabelledOK = in, filepath.Join(t.TempDir(), "d"), target, unlabelled
	if err := NPY(context.Background(), o); err != nil {
		return nil, err
	}
	return datasettest.Open(t, o.Out), nil
}

// Several labels and numbers are read as they are named, with unknown ones, and nodes that have
// none are in no split.
func TestTargets(t *testing.T) {
	nan := math.NaN()
	d, err := importTarget(t, several(t, "<f8", []int64{5, 2},
		[]float64{0, 1, 1, 255, -1, nan, 0, 0, nan, 1}), "multi-label", true)
	require.NoError(t, err)
	labels, err := d.TaskMultiLabels(0)
	require.NoError(t, err)
	require.Equal(t, []uint8{0, 1, 1, 255, 255, 255, 0, 0, 255, 1}, labels)
	require.Equal(t, 2, d.Meta.Classes)
	require.Equal(t, int64(1), d.Meta.Unlabelled)
	require.Equal(t, []int64{2, 1, 1}, []int64{d.Meta.Train, d.Meta.Val, d.Meta.Test})

	d, err = importTarget(t, several(t, "<f8", []int64{5}, []float64{1.5, -2, 3e6, 0, nan}),
		"regression", true)
	require.NoError(t, err)
	numbers, err := d.TaskValues(0)
	require.NoError(t, err)
	require.Equal(t, []float32{1.5, -2, 3e6, 0}, numbers[:4])
	require.True(t, math.IsNaN(float64(numbers[4])))
	require.Equal(t, int64(1), d.Meta.Train, "node 4 has no number")
	tp, err := d.Topology()
	require.NoError(t, err)
	require.Equal(t, int64(6), tp.NumEdges)

	d, err = importTarget(t, several(t, "|u1", []int64{5, 2}, []uint8{0, 1, 1, 1, 0, 1, 0, 0, 1, 1}),
		"multi-label", false)
	require.NoError(t, err)
	require.Equal(t, []int64{2, 1, 2}, []int64{d.Meta.Train, d.Meta.Val, d.Meta.Test})
}

// A table of numbers is read by its ids; nodes that it leaves out have none.
func TestNumbersOfATable(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	o := EdgesOptions{}
	o.In = write("edges.csv", "0,1\n1,2\n2,3\n")
	o.Labels = write("y.csv", "id,y\n3,0.25\n0,-7\n1,2e3\n")
	o.FeatureFn, o.Dim, o.Out, o.UnlabelledOK = "hash", 4, filepath.Join(dir, "d"), true
	o.Target = "regression"
	require.NoError(t, Edges(context.Background(), o))
	d := datasettest.Open(t, o.Out)
	numbers, err := d.TaskValues(0)
	require.NoError(t, err)
	require.Equal(t, []float32{-7, 2000}, numbers[:2])
	require.True(t, math.IsNaN(float64(numbers[2])))
	require.Equal(t, float32(0.25), numbers[3])

	o.Target, o.Out = "multi-label", filepath.Join(dir, "e")
	require.ErrorContains(t, Edges(context.Background(), o), "is a text file, of one label a node")
}

// A wrong guess is refused by name.
func TestWrongTargets(t *testing.T) {
	for want, c := range map[string]struct {
		target string
		shape  []int64
		data   []float64
	}{
		"option target regression takes numbers":        {"class", []int64{5}, []float64{0, 1, 0.5, 1, 0}},
		"option target multi-label or regression takes": {"class", []int64{5, 1 + 1}, make([]float64, 10)},
		"2 of node 1, column 0, is no label":            {"multi-label", []int64{5}, []float64{0, 2, 1, 1, 0}},
		"is no number that float32 holds":               {"regression", []int64{5}, []float64{0, 1e40, 1, 1, 0}},
		"+Inf of node 0, column 1":                      {"regression", []int64{5, 2}, []float64{0, math.Inf(1), 1, 1, 0, 1, 2, 3, 4, 5}},
		"has no label (NaN or -1)":                      {"regression", []int64{5}, []float64{0, math.NaN(), 1, 1, 0}},
		"must be (nodes,) or (nodes, columns)":          {"regression", []int64{5, 1, 1}, make([]float64, 5)},
	} {
		_, err := importTarget(t, several(t, "<f8", c.shape, c.data), c.target, false)
		require.ErrorContains(t, err, want)
		datasettest.RequireUsage(t, err)
	}
	o := NPYOptions{}
	o.In, o.Out = several(t, "<f8", []int64{5}, make([]float64, 5)), filepath.Join(t.TempDir(), "d")
	o.Target, o.NumClasses = "regression", 3
	require.ErrorContains(t, NPY(context.Background(), o), "leave one out")
}
