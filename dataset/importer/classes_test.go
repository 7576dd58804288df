package importer

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

// importLabels imports a graph of as many nodes as there are labels, with splits that are dealt.
func importLabels(t *testing.T, labels []int64, change func(*Options)) (*dataset.Dataset, string,
	error) {
	n := int64(len(labels))
	dir := datasettest.WriteDir(t, map[string]datasettest.Arr{
		"edge_index": {DT: "<i8", Shape: []int64{2, 1}, Data: []int64{0, n - 1}},
		"labels":     {DT: "<i8", Shape: []int64{n}, Data: labels}})
	said := ""
	o := Options{Input: Input{In: dir}, FeatureFn: "hash", Dim: 1, Output: Output{
		Out: filepath.Join(t.TempDir(), "g"), Note: func(s errs.Text) { said += s.String() + "\n" }}}
	if change != nil {
		change(&o)
	}
	if err := plain(NPY)(bg, o); err != nil {
		datasettest.RequireUsage(t, err)
		return nil, said, err
	}
	return datasettest.Open(t, o.Out), said, nil
}

// repeated has n labels from 0 to classes-1, in turn.
func repeated(n, classes int64) []int64 {
	labels := make([]int64, n)
	for v := range labels {
		labels[v] = int64(v) % classes
	}
	return labels
}

// Labels that are no classes are refused with a number and the way out; what is odd is named.
func TestClasses(t *testing.T) {
	stray := repeated(60, 3)
	stray[7] = 1_000_000
	gaps := repeated(60, 4)
	for v := range gaps {
		gaps[v] += 6
	}
	gaps[0] = 20
	one := repeated(60, 3)
	one[59] = 4
	several := repeated(60, 30)
	for v := range several {
		several[v] *= 100
	}
	lost := repeated(60, 3)
	lost[5] = 1 << 30
	many := make([]int64, 60)
	for v := range many {
		many[v] = int64(v) * int64(v)
	}
	for name, c := range map[string]struct {
		labels  []int64
		classes int64 // option num-classes
		want    int
		say     string // a note, or the error
	}{
		"plain":             {repeated(60, 3), 0, 3, "the input has no splits: 36 nodes are dealt to train, 12 to val and 12 to test"},
		"a stray label":     {stray, 0, 0, "label 1000000 of node 7 would make 1000001 classes, and only 4 have a node; mend the label, or give option num-classes 1000001"},
		"it is meant":       {stray, 1_000_001, 1_000_001, "999997 of the 1000001 classes have no node: 3 to 999999"},
		"a lost label":      {lost, 0, 0, "label 1073741824 of node 5 would make 1073741825 classes"},
		"gaps":              {gaps, 0, 21, "16 of the 21 classes have no node: 0 to 5, 10 to 19"},
		"one gap":           {one, 0, 5, "one of the 5 classes has no node: 3"},
		"classes told":      {repeated(60, 3), 5, 5, "2 of the 5 classes have no node: 3 to 4"},
		"fewer are told":    {repeated(60, 3), 2, 0, "label 2 of node 2, but option num-classes says 2 classes, 0 to 1"},
		"numbers":           {many, 0, 0, "label 3481 of node 59 would make 3482 classes, and only 60 have a node"},
		"numbers, small":    {repeated(60, 60), 0, 0, "60 different labels on 60 labelled nodes; these look like numbers to predict"},
		"numbers are meant": {repeated(60, 60), 60, 60, "classes have no node in train"},
		"two nodes each":    {repeated(60, 30), 0, 30, "60"},
		"far apart":         {several, 0, 0, "2901 classes, and only 30 have a node"},
		"few nodes":         {repeated(9, 9), 0, 9, "9 nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			d, said, err := importLabels(t, c.labels, func(o *Options) { o.NumClasses = c.classes })
			if c.want == 0 {
				require.ErrorContains(t, err, c.say)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want, d.Meta.Classes)
			if name != "two nodes each" && name != "few nodes" {
				require.Contains(t, said, c.say)
			}
		})
	}
}

// split counts the nodes of each class in each split.
func splitOfClasses(t *testing.T, d *dataset.Dataset, labels []int64) (out [3]map[int64]int) {
	for i, name := range dataset.Splits {
		ids, err := d.Split(name)
		require.NoError(t, err)
		require.True(t, slices.IsSorted(ids))
		out[i] = map[int64]int{}
		for _, v := range ids {
			out[i][labels[v]]++
		}
	}
	return out
}

// Splits that the import deals hold each class in the shares of the whole, are the same for a seed
// and others for another, and keep the shares in graphs of few nodes.
func TestSplitsAreStratified(t *testing.T) {
	labels := repeated(1000, 10)
	for v := range labels {
		if v%4 == 0 {
			labels[v] = 0
		}
	}
	d, _, err := importLabels(t, labels, nil)
	require.NoError(t, err)
	total := map[int64]int{}
	for _, l := range labels {
		total[l]++
	}
	got := splitOfClasses(t, d, labels)
	for l, n := range total {
		for s, share := range []float64{0.6, 0.2, 0.2} {
			require.InDelta(t, share*float64(n), got[s][l], 1.5, "class %d of %d, split %d", l, n, s)
		}
	}
	require.Equal(t, []int64{600, 200, 200}, []int64{d.Meta.Train, d.Meta.Val, d.Meta.Test})

	again, _, err := importLabels(t, labels, nil)
	require.NoError(t, err)
	other, _, err := importLabels(t, labels, func(o *Options) { o.Seed = 8 })
	require.NoError(t, err)
	train := func(d *dataset.Dataset) []int64 {
		ids, err := d.Split("train")
		require.NoError(t, err)
		return ids
	}
	require.Equal(t, train(d), train(again))
	require.NotEqual(t, train(d), train(other))

	small, said, err := importLabels(t, []int64{0, 0, 0, 0, 0, 0, 0, 1, 1, 1}, nil)
	require.NoError(t, err)
	require.Equal(t, []int64{6, 2, 2}, []int64{small.Meta.Train, small.Meta.Val, small.Meta.Test})
	require.NotContains(t, said, "no node in train")
	none, said, err := importLabels(t, []int64{0, 0, 1, 1}, func(o *Options) { o.ValFraction = 1 })
	require.NoError(t, err)
	require.EqualValues(t, 4, none.Meta.Val)
	require.Contains(t, said, "there is nothing to train on")
}

// The same labels are dealt the same way whatever the format.
func TestSplitsOfAllReaders(t *testing.T) {
	dir := tree{"edges.csv": "0,1\n1,2\n3,4\n", "features.csv": "1\n2\n3\n4\n5\n",
		"labels.csv": "0\n1\n0\n1\n0\n"}.write(t, t.TempDir())
	out := filepath.Join(t.TempDir(), "g")
	require.NoError(t, plain(Edges)(bg, Options{Input: Input{In: dir}, Output: Output{Out: out}}))
	text := viewOf(t, out)
	d, _, err := importLabels(t, []int64{0, 1, 0, 1, 0}, nil)
	require.NoError(t, err)
	for i, ids := range [][]int64{text.train, text.val, text.test} {
		got, err := d.Split(dataset.Splits[i])
		require.NoError(t, err)
		require.Equal(t, ids, got)
	}
}

// TestQuotas: over all classes the shares are kept to a node, no class gets more or fewer places
// than it has nodes, and each has a node to train on where there are enough.
func TestQuotas(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		counts := make([]int64, 1+r.IntN(30))
		n, classes := int64(0), int64(0)
		for c := range counts {
			counts[c] = int64(r.IntN(12))
			if r.IntN(5) == 0 {
				counts[c] *= 50
			}
			if n += counts[c]; counts[c] > 0 {
				classes++
			}
		}
		shares := [3]float64{r.Float64(), 0, 0}
		shares[1] = (1 - shares[0]) * r.Float64()
		shares[2] = 1 - shares[0] - shares[1]
		var sum [3]int64
		out := quotas(counts, shares)
		for c, q := range out {
			require.Equal(t, counts[c], q[0]+q[1]+q[2])
			for s := range sum {
				require.GreaterOrEqual(t, q[s], int64(0))
				sum[s] += q[s]
			}
		}
		for s := range sum {
			require.InDelta(t, shares[s]*float64(n), sum[s], 1)
		}
		if sum[0] >= classes {
			for c, q := range out {
				require.Equal(t, counts[c] > 0, q[0] > 0, "%v of %v by %v", out, counts, shares)
			}
		}
	}
	require.Equal(t, [3]int64{4, 2, 1}, apportion(7, [3]float64{0.6, 0.2, 0.2}))
	require.Equal(t, [3]int64{0, 0, 0}, apportion(0, [3]float64{0.6, 0.2, 0.2}))
	require.Equal(t, [3]int64{10, 0, 0}, apportion(10, [3]float64{1, 0, 0}))
}
