package importer

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
)

// TestTablesWrongWays: the ways in which other readers, and older versions of this program, made
// wrong data without a word. Two are no matter of tables: the direction of SciPy's archives is in
// TestArchives, and the padding of IGB's labels in TestImportIGB.
func TestTablesWrongWays(t *testing.T) {
	var notes []string
	run := func(nodes, edges, label string, classes int64) (*dataset.Dataset, error) {
		notes = nil
		o := TablesOptions{Nodes: "n.csv", ID: "id", Edges: "e.csv", Src: "src", Dst: "dst"}
		o.Label, o.Note = label, func(s errs.Text) { notes = append(notes, s.String()) }
		o.NumClasses = classes
		return importFolder(t, map[string]string{"n.csv": nodes, "e.csv": edges}, o)
	}
	// edgesOf are the edges by names.
	edgesOf := func(d *dataset.Dataset) string {
		names, err := d.Names()
		require.NoError(t, err)
		read := func(name string) (xs []int64) {
			a, err := npy.Open(d.Path(name))
			require.NoError(t, err)
			err = eachInt(a, func(_, x int64) error { xs = append(xs, x); return nil })
			require.NoError(t, err)
			return xs
		}
		ptr, src := read(dataset.IndptrName), read(dataset.IndicesName)
		var out []string
		for v := range names {
			for _, u := range src[ptr[v]:ptr[v+1]] {
				out = append(out, names[u]+">"+names[v])
			}
		}
		return strings.Join(out, " ")
	}

	// 2: rows in another order than ids; 9: ids from 1, and of 64 bits, make no node of their own.
	d, err := run("id,f,y\n3,7,c\n2,5,b\n18446744073709551615,4,a\n1,9,a\n", "src,dst\n1,3\n2,1\n18446744073709551615,2\n", "y", 0)
	require.NoError(t, err)
	require.Equal(t, "1>3 18446744073709551615>2 2>1", edgesOf(d))
	require.EqualValues(t, 4, d.Meta.Nodes)
	labels, err := d.Labels()
	require.NoError(t, err)
	require.Equal(t, []int32{2, 1, 0, 0}, labels)

	// 2, 4: pandas' index is no feature and no end of an edge, and a weight is named.
	d, err = run(",id,f\n0,a,1\n1,b,2\n2,c,3\n", ",src,dst,weight\n0,a,b,.5\n1,b,c,1\n", "", 0)
	require.NoError(t, err)
	require.Equal(t, 1, d.Meta.Dim)
	require.Equal(t, "a>b b>c", edgesOf(d))
	require.Contains(t, strings.Join(notes, "\n"), "weight")

	// 3: columns without names, as pandas writes them.
	_, err = run("0,1\na,1\nb,2\n", "src,dst\na,b\n", "", 0)
	require.ErrorContains(t, err, "n.csv:1: the line should name the columns, and has numbers")

	// 5: nothing moves: an empty cell, a blank line, a decimal comma, an edge without an end.
	for text, say := range map[string]string{
		"id\tf\tg\na\t\t3\nb\t1\t2\n": "n.csv:2, column f: no value",
		"id,f\na,1\n\nb,2\n":          "n.csv:3: the line is empty",
		"id;f\na;1,5\nb;2,5\n":        "no column is taken as a feature",
		"id,f\na,1,5\nb,2,5\n":        "n.csv:2: 3 cells",
	} {
		_, err = run(text, "src,dst\na,a\n", "", 0)
		require.ErrorContains(t, err, say, text)
	}
	_, err = run("id,f\na,1\nb,2\n", "src,dst\nfoo\na,b\n", "", 0)
	require.ErrorContains(t, err, "e.csv:2: 1 cells, and 2 columns are named")
	_, err = run("id,f\n1,1\n2,2\n", "4 4\n2 3\n1\n", "", 0) // a graph of METIS
	require.ErrorContains(t, err, "e.csv:1: the line should name the columns")

	// 6: a class is what has a node; a stray number makes one class; numbers are no classes.
	var nodes, numbers strings.Builder
	nodes.WriteString("id,f,y\n")
	numbers.WriteString("id,f,y\n")
	for i := range 60 {
		y := 6 + i%4
		if i == 7 {
			y = 1_000_000
		}
		fmt.Fprintf(&nodes, "%d,%d,%d\n", i, i, y)
		fmt.Fprintf(&numbers, "%d,%d,%d\n", i, i, i*i)
	}
	d, err = run(nodes.String(), "src,dst\n1,2\n", "y", 0)
	require.NoError(t, err)
	require.Equal(t, []string{"6", "7", "8", "9", "1000000"}, d.Meta.ClassNames)
	_, err = run(numbers.String(), "src,dst\n1,2\n", "y", 0)
	require.ErrorContains(t, err, "look like numbers to predict")
	d, err = run(numbers.String(), "src,dst\n1,2\n", "y", 60)
	require.NoError(t, err)
	require.Equal(t, 60, d.Meta.Classes)

	// 7: nobody gets features unasked.
	d, err = run("id\na\nb\n", "src,dst\na,b\n", "", 0)
	require.NoError(t, err)
	require.Zero(t, d.Meta.Rows())

	// A table of edges without rows is whole, and named.
	_, err = run("id,f\na,1\nb,2\n", "src,dst\n", "", 0)
	require.NoError(t, err)
	require.Contains(t, strings.Join(notes, "\n"), "e.csv has no rows")

	// 9: repeated edges are counted.
	d, err = run("id,f\na,1\nb,2\n", "src,dst\na,b\na,b\nb,a\n", "", 0)
	require.NoError(t, err)
	require.EqualValues(t, 1, d.Meta.Source.Counts["duplicate-edges-kept"])
}
