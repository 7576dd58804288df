package importer

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/edges"
	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/testing/datasettest"
)

// tableFiles are a table of nodes with ids of a kind, and one of edges among them.
func tableFiles(t testing.TB, id func(i int) string, nodes, edges int) TablesOptions {
	dir := t.TempDir()
	var n, e strings.Builder
	n.WriteString("user,age,group\n")
	for i := range nodes {
		fmt.Fprintf(&n, "%s,%d,%s\n", id(i), i%90, []string{"red", "green", "blue"}[i%3])
	}
	e.WriteString("who,whom\n")
	r := rand.New(rand.NewPCG(1, 2))
	for range edges {
		fmt.Fprintf(&e, "%s,%s\n", id(r.IntN(nodes)), id(r.IntN(nodes)))
	}
	var o TablesOptions
	options.Defaults(&o)
	o.Nodes, o.Edges = filepath.Join(dir, "n.csv"), filepath.Join(dir, "e.csv")
	require.NoError(t, os.WriteFile(o.Nodes, []byte(n.String()), 0o644))
	require.NoError(t, os.WriteFile(o.Edges, []byte(e.String()), 0o644))
	o.ID, o.Src, o.Dst, o.Label, o.Memory = "user", "who", "whom", "group", 1
	o.Out = filepath.Join(t.TempDir(), "g")
	return o
}

func importTables(o TablesOptions) error {
	_, err := Tables(bg, o)
	return err
}

func word(i int) string { return fmt.Sprintf("u%x", i*2654435761%1000003) }

// Names come back whatever their kind: texts, UUIDs, numbers of 64 bits with gaps.
func TestTablesNames(t *testing.T) {
	for name, id := range map[string]func(int) string{"texts": word,
		"uuids":   func(i int) string { return fmt.Sprintf("%08x-0000-4000-8000-%012x", i*7, i) },
		"numbers": func(i int) string { return fmt.Sprint(uint64(i) * 12345678901234567) },
	} {
		o := tableFiles(t, id, 500, 2000)
		require.NoError(t, importTables(o), name)
		d, err := dataset.Open(o.Out)
		require.NoError(t, err)
		names, err := d.Names()
		require.NoError(t, err)
		require.Len(t, names, 500)
		m, err := d.NameMap(0)
		require.NoError(t, err)
		for i, n := range names {
			require.Equal(t, id(i), n, name)
			v, ok, err := m.Node(n)
			require.NoError(t, err)
			require.True(t, ok)
			require.EqualValues(t, i, v)
		}
		require.Equal(t, []string{"blue", "green", "red"}, d.Meta.ClassNames)
		require.NoError(t, m.Close())
		require.NoError(t, d.Close())
	}
}

// TestTablesResume ends an import before and after each line of its journal, as a kill would.
func TestTablesResume(t *testing.T) {
	defer func(d func([]byte, bool) error) {
		build.JournalStep, edges.SyncEvery = d, 10e9
	}(build.JournalStep)
	edges.SyncEvery = 0
	o := tableFiles(t, word, 2000, 9000)
	build.JournalStep = nil
	require.NoError(t, importTables(o))
	want := datasettest.Digest(t, o.Out)
	for stop, done := 1, false; !done; stop++ {
		require.Less(t, stop, 200)
		o.Out = filepath.Join(t.TempDir(), "g")
		n := 0
		build.JournalStep = func([]byte, bool) error {
			if n++; n == stop {
				return context.Canceled
			}
			return nil
		}
		err := importTables(o)
		build.JournalStep = nil
		if done = err == nil; !done {
			require.ErrorIs(t, err, context.Canceled)
			require.NoError(t, importTables(o), stop)
		} else {
			require.Greater(t, stop, 10)
		}
		require.Equal(t, want, datasettest.Digest(t, o.Out), stop)
		left, err := filepath.Glob(filepath.Join(filepath.Dir(o.Out), "*partial*"))
		require.NoError(t, err)
		require.Empty(t, left)
	}
}

// Each wrong table is refused with its row, and leaves nothing.
func TestTablesRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		nodes, edges string
		change       func(o *TablesOptions)
		say          string
	}{
		"twice": {nodes: "user,age,group\na,1,x\nb,2,y\na,3,x\n", edges: "who,whom\na,b\n",
			say: "n.csv:4, column user: a is the id of"},
		"dangling source": {nodes: "user,age,group\na,1,x\nb,2,y\n", edges: "who,whom\na,b\nc,a\nd,a\n",
			say: "e.csv:3, column who: there is no node c of type node (edges without a node: 2)"},
		"dangling target": {nodes: "user,age,group\na,1,x\nb,2,y\n", edges: "who,whom\na,c\nc,a\n",
			say: "e.csv:2, column whom: there is no node c"},
		"no id": {nodes: "user,age,group\na,1,x\n,2,y\n", edges: "who,whom\na,a\n",
			say: "n.csv:3, column user: the id is missing"},
		"no end": {nodes: "user,age,group\na,1,x\n", edges: "who,whom\na,\n",
			say: "e.csv:2, column whom: the id is missing"},
		"no rows": {nodes: "user,age,group\n", edges: "who,whom\na,b\n", say: "has no rows"},
		"a transform of none": {nodes: "user,age,group\na,1,x\n", edges: "who,whom\na,a\n",
			change: func(o *TablesOptions) {
				o.Features, o.Transform = "none", ByColumn{"age": "log"}
			}, say: "are for features"},
		"columns": {nodes: "id,age,group\na,1,x\n", edges: "who,whom\na,a\n", say: `no column "user"`},
		"numbers first": {nodes: "0,1,2\na,1,x\n", edges: "who,whom\na,a\n",
			say: "n.csv:1: the line should name the columns"},
		"utf-8": {nodes: "user,age,group\n\xff,1,x\n", edges: "who,whom\na,a\n",
			say: "n.csv:2, column user: "},
	} {
		o := tableFiles(t, word, 1, 1)
		require.NoError(t, os.WriteFile(o.Nodes, []byte(c.nodes), 0o644))
		require.NoError(t, os.WriteFile(o.Edges, []byte(c.edges), 0o644))
		if c.change != nil {
			c.change(&o)
		}
		err := importTables(o)
		if name == "utf-8" {
			require.ErrorContains(t, err, "is no UTF-8", name)
			continue
		}
		require.ErrorContains(t, err, c.say, name)
		require.Equal(t, errs.Usage, errs.ClassOf(err), name)
		left, err := os.ReadDir(filepath.Dir(o.Out))
		require.NoError(t, err)
		require.Empty(t, left, name)
	}
	o := tableFiles(t, word, 300, 300)
	text, err := os.ReadFile(o.Edges)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(o.Edges, append(text, "nobody,u0\nu0,none\n"...), 0o644))
	o.Dangling = "drop"
	require.NoError(t, importTables(o))
	d, err := dataset.Open(o.Out)
	require.NoError(t, err)
	require.EqualValues(t, 300, d.Meta.Edges)
	require.EqualValues(t, 2, d.Meta.Source.Counts["dangling-edges-dropped"])
	require.NoError(t, d.Close())
}

// parquetUser is a row of a table of nodes.
type parquetUser struct {
	User  string  `parquet:"user,dict,snappy"`
	Age   float64 `parquet:"age,zstd"`
	Group *string `parquet:"group,optional,dict"`
}

// Damaged Parquet files are refused, or read as the file that they still are; nothing else happens.
func TestTablesHostileParquet(t *testing.T) {
	o := tableFiles(t, word, 300, 900)
	var b bytes.Buffer
	w := parquet.NewGenericWriter[parquetUser](&b, parquet.MaxRowsPerRowGroup(100))
	for i := range 300 {
		g := []string{"red", "green", "blue"}[i%3]
		_, err := w.Write([]parquetUser{{word(i), float64(i), &g}})
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	whole := b.Bytes()
	o.Nodes = filepath.Join(t.TempDir(), "n.parquet")
	try := func(b []byte, what string) (ok bool) {
		require.NoError(t, os.WriteFile(o.Nodes, b, 0o644))
		o.Out = filepath.Join(t.TempDir(), "g")
		err := importTables(o)
		if err != nil {
			require.NotEqual(t, "whole", what, "%v", err)
			require.NotEqual(t, errs.Failed, errs.ClassOf(err), "%s: %v", what, err)
			require.NotContains(t, err.Error(), "runtime error", what)
			left, err := os.ReadDir(filepath.Dir(o.Out))
			require.NoError(t, err)
			require.Empty(t, left, what)
		}
		return err == nil
	}
	require.True(t, try(whole, "whole"))
	r := rand.New(rand.NewPCG(3, 4))
	for range 60 {
		n := r.IntN(len(whole))
		require.False(t, try(whole[:n], fmt.Sprint("cut at ", n)))
	}
	for range 140 {
		bad := bytes.Clone(whole)
		place := r.IntN(len(bad))
		if r.IntN(2) == 0 {
			place = len(bad) - 1 - r.IntN(600) // the description
		}
		bad[place] ^= byte(1 << r.IntN(8))
		if r.IntN(3) == 0 {
			bad[place] = 0xff
		}
		try(bad, fmt.Sprint("changed at ", place))
	}
}

// An index that pandas wrote is no feature.
func TestTablesIndexIsNoFeature(t *testing.T) {
	o := tableFiles(t, word, 1, 1)
	require.NoError(t, os.WriteFile(o.Nodes, []byte(",user,x\n0,a,3\n1,b,4\n"), 0o644))
	require.NoError(t, os.WriteFile(o.Edges, []byte("a,b\na,b\nb,a\n"), 0o644))
	o.ID, o.Src, o.Dst, o.Label = "user", "a", "b", ""
	require.NoError(t, importTables(o))
	d, err := dataset.Open(o.Out)
	require.NoError(t, err)
	require.Equal(t, 1, d.Meta.Dim)
	require.NoError(t, d.Close())
}

// Graphs of LDBC have no features: those of Graphalytics no names of columns either, and of SNB two
// columns of one name and parts.
func TestTablesOfLDBC(t *testing.T) {
	files := map[string]string{"g.v": "1\n4\n9\n7\n", "g.e": "1 4 0.5\n4 9 1.25\n",
		"person_0_0.csv": "id|gender|email\n933|male|a@b;c@d\n1129|female|\n", "person_1_0.csv": "id|gender|email\n4194|male|x\n",
		"person_knows_person_0_0.csv": "Person.id|Person.id|creationDate\n933|1129|2010-05-05T12:17:01.293+0000\n",
		"person_knows_person_1_0.csv": "Person.id|Person.id|creationDate\n1129|4194|2010-05-05T12:17:01.293+0000\n"}
	o := TablesOptions{Nodes: "g.v", ID: "1", Edges: "g.e", Src: "1", Dst: "2", Header: "no", FeatureFn: "hash"}
	d, err := importFolder(t, files, o)
	require.NoError(t, err)
	require.Equal(t, [3]int64{4, 2, 64}, [3]int64{d.Meta.Nodes, d.Meta.Edges, int64(d.Meta.Dim)})
	o = TablesOptions{Nodes: "person_?_0.csv", ID: "id", Edges: "person_knows_person_*", Src: "Person.id",
		Dst: "Person.id.1", Undirected: true, FeatureFn: "random", Dim: 5}
	o.Label = "gender"
	d, err = importFolder(t, files, o)
	require.NoError(t, err)
	require.Equal(t, [3]int64{3, 4, 5}, [3]int64{d.Meta.Nodes, d.Meta.Edges, int64(d.Meta.Dim)})
	require.Equal(t, []string{"female", "male"}, d.Meta.ClassNames)
	o.ColumnOptions.Features = "email"
	_, err = importFolder(t, files, o)
	require.ErrorContains(t, err, "option feature-fn makes features in place of columns")
	o.ColumnOptions.Features, o.FeatureFn = "", ""
	_, err = importFolder(t, files, o)
	require.ErrorContains(t, err, "option dim 5 is for option feature-fn")
	o.Dim, o.FeatureFn = 0, "dream"
	_, err = importFolder(t, files, o)
	require.ErrorContains(t, err, "dream")
}
