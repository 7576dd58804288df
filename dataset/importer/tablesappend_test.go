package importer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/seal"
	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/testing/datasettest"
)

// appendFiles are tables in two parts, of which the second is added: two types of nodes, a relation
// with a reverse, and edges among users.
var appendFiles = map[string]string{
	"u1.csv":    "id,age,city,group,part\na,1,Rome,x,train\nb,3,Oslo,y,train\nc,9,Rome,x,val\n",
	"u2.csv":    "id,age,city,group,part\nd,5,Bern,y,test\ne,,Oslo,,\nf,2,Rome,x,train\n",
	"s1.csv":    "shop,size\ns,2.5\n",
	"s2.csv":    "shop,size\nt,4\n",
	"buys1.csv": "u,s\na,s\nb,s\n",
	"buys2.csv": "u,s\na,t\nd,s\nd,t\na,s\n",
	"e1.csv":    "u,v\na,b\nb,a\nc,c\n",
	"e2.csv":    "u,v\nd,a\nf,f\na,e\na,b\n",
	"n1.csv":    "u,v\n5,7\n7,9\n",
	"n2.csv":    "u,v\n9,2\n2,5\n",
}

func appendYAML(part string) string {
	text := `nodes:
- {node_type: tag}
- node_type: user
  files: u%s.csv
  node_id_col: id
  features:
  - {feature_col: age, transform: standard, missing: mean}
  - {feature_col: city, transform: one-hot, unknown: zero}
  labels: [{label_col: group, task_type: classification, split_col: part}]
- node_type: shop
  files: s%s.csv
  node_id_col: shop
  features: [{feature_col: size, transform: none}]
edges:
- relation: [user, buys, shop]
  files: buys%s.csv
  source_id_col: u
  dest_id_col: s
  reverse: rev_buys
  dedup: true
- {relation: [tag, near, tag], files: n%s.csv, source_id_col: u, dest_id_col: v}
`
	return strings.ReplaceAll(text, "%s", part)
}

// TestAppend: adding tables to a dataset gives the bytes of an import of all of them with the old
// statistics; the second command with the same files is refused.
func TestAppend(t *testing.T) {
	flags := func(part string) TablesOptions {
		o := TablesOptions{Edges: "e" + part + ".csv", Src: "u", Dst: "v", Nodes: "u" + part + ".csv", ID: "id"}
		o.Label, o.Split, o.UnlabelledOK = "group", "part", true
		o.Missing = ByColumn{"age": "mean"}
		return o
	}
	for name, c := range map[string]struct {
		of    func(part string) TablesOptions
		parts []string // that are added
	}{
		"both": {of: flags, parts: []string{"2"}},
		"one by one": {of: func(part string) TablesOptions {
			o := flags(strings.Trim(part, "ne"))
			if strings.HasPrefix(part, "n") {
				o.Edges, o.Src, o.Dst = "", "", ""
			} else if strings.HasPrefix(part, "e") {
				o.Nodes, o.ID, o.Label, o.Split, o.Missing = "", "", "", "", nil
			}
			return o
		}, parts: []string{"n2", "e2"}},
		"undirected": {of: func(part string) TablesOptions {
			o := flags(part)
			o.Undirected = part != "2"
			return o
		}, parts: []string{"2"}},
		"reversed": {of: func(part string) TablesOptions {
			o := flags(part)
			if part != "2" {
				o.AddReverse, o.SelfLoops = true, "drop"
			}
			return o
		}, parts: []string{"2"}},
		"edges alone": {of: func(part string) TablesOptions {
			return TablesOptions{Edges: "n" + part + ".csv", Src: "u", Dst: "v"}
		}, parts: []string{"2"}},
		"typed": {of: func(part string) TablesOptions {
			return TablesOptions{TypedOptions: TypedOptions{Input: Input{In: "d" + part + ".yaml", UnlabelledOK: true}}, PadOption: PadOption{Pad: part != "2"}}
		}, parts: []string{"2"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			files := map[string]string{}
			for f, text := range appendFiles {
				files[f] = text
			}
			for _, f := range []string{"u", "s", "buys", "e", "n"} { // all rows
				_, rows, _ := strings.Cut(files[f+"2.csv"], "\n")
				files[f+".csv"] = files[f+"1.csv"] + rows
			}
			for _, part := range []string{"", "1", "2"} {
				files["d"+part+".yaml"] = appendYAML(part)
			}
			// the dataset has decided these
			files["d2.yaml"] = strings.ReplaceAll(files["d2.yaml"], "\n  reverse: rev_buys\n  dedup: true", "")
			for f, text := range files {
				require.NoError(t, os.WriteFile(filepath.Join(dir, f), []byte(text), 0o600))
			}
			run := func(part, out string, change func(o *TablesOptions)) error {
				o := c.of(part)
				for _, p := range []*string{&o.In, &o.Nodes, &o.Edges} {
					if *p != "" {
						*p = filepath.Join(dir, *p)
					}
				}
				o.Out, o.Seed, o.StatsOf = filepath.Join(dir, out), 1, "train"
				if o.SelfLoops == "" {
					o.SelfLoops = "keep"
				}
				if change != nil {
					change(&o)
				}
				_, err := Tables(bg, o)
				return err
			}
			require.NoError(t, run("1", "old", nil))
			require.NoError(t, run("1", "g", nil))
			like := func(o *TablesOptions) {
				if name != "edges alone" {
					o.Like, o.Transform, o.Missing = filepath.Join(dir, "old"), nil, nil
				}
			}
			require.NoError(t, run("", "all", like))
			before := datasettest.Open(t, filepath.Join(dir, "g"))
			for _, part := range c.parts {
				add := func(o *TablesOptions) { o.Append, o.Missing = true, nil }
				n := 0
				for stop, done := 1, false; !done; stop++ { // killed at each line of the journal
					n = 0
					build.JournalStep = func([]byte, bool) error {
						if n++; n == stop {
							return context.Canceled
						}
						return nil
					}
					err := run(part, "g", add)
					build.JournalStep = nil
					if done = err == nil; !done {
						require.ErrorIs(t, err, context.Canceled)
						_, err := dataset.Open(filepath.Join(dir, "g"))
						require.NoError(t, err)
					}
					require.Less(t, stop, 100)
				}
				left := filepath.Join(dir, "g.partial-1")
				require.NoError(t, os.Mkdir(left, 0o700))
				err := run(part, "g", add)
				require.NoDirExists(t, left)
				require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
			}
			want, got := datasettest.Digest(t, filepath.Join(dir, "all")), datasettest.Digest(t, filepath.Join(dir, "g"))
			for _, f := range []string{dataset.MetaName, seal.Name} { // they say how it was made
				delete(want, f)
				delete(got, f)
			}
			require.Equal(t, want, got)
			require.Equal(t, datasettest.Open(t, filepath.Join(dir, "all")).UUID(),
				datasettest.Open(t, filepath.Join(dir, "g")).UUID())
			_, err := before.Split("train") // a run that has begun
			require.ErrorContains(t, err, "was replaced while it was in use")
			left, err := filepath.Glob(filepath.Join(dir, "*partial*"))
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// TestLikeLabels: several labels a node keep the columns of the first dataset; others are refused.
func TestLikeLabels(t *testing.T) {
	dir := t.TempDir()
	run := func(out, like, list, more string) error {
		text := `{"id":"a","x":1,"l":` + list + more + "}\n" + `{"id":"b","x":2,"l":["u"]` + more + "}\n"
		require.NoError(t, os.WriteFile(filepath.Join(dir, "n.jsonl"), []byte(text), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "e.csv"), []byte("a,b\na,b\n"), 0o600))
		o := TablesOptions{Nodes: filepath.Join(dir, "n.jsonl"), ID: "id",
			Edges: filepath.Join(dir, "e.csv"), Src: "a", Dst: "b", Target: "multi-label"}
		o.Label, o.Like, o.Out, o.SelfLoops, o.StatsOf = "l", like, filepath.Join(dir, out), "keep", "train"
		if o.Seed = 1; more != "" {
			o.Label = "m,l2"
		}
		return importTables(o)
	}
	require.NoError(t, run("g", "", `["t","u","v"]`, ""))
	require.NoError(t, run("h", filepath.Join(dir, "g"), `["v"]`, ""))
	y, err := datasettest.Open(t, filepath.Join(dir, "h")).TaskMultiLabels(0)
	require.NoError(t, err)
	require.Equal(t, []uint8{0, 0, 1, 0, 1, 0}, y)
	require.ErrorContains(t, run("i", filepath.Join(dir, "g"), `["w"]`, ""), "label w is none of the 3")
	require.ErrorContains(t, run("i", filepath.Join(dir, "g"), `["u"]`, `,"m":1,"l2":0`), "those of option like are")
	_, err = importFolder(t, map[string]string{"n.csv": "id,x,l\na,1,u\n", "e.csv": "a,b\na,a\n"},
		TablesOptions{Nodes: "n.csv", ID: "id", Edges: "e.csv", Src: "a", Dst: "b",
			ColumnOptions: ColumnOptions{Label: "l", Like: filepath.Join(dir, "g")}})
	require.ErrorContains(t, err, "of option target class, and those of option like of multi-label")
}

// An import that would change rows, classes or files that are there is refused.
func TestAppendRefuses(t *testing.T) {
	o := tableFiles(t, word, 50, 90)
	require.NoError(t, importTables(o))
	was := datasettest.Digest(t, o.Out)
	o.Append = true
	for _, c := range []struct {
		nodes, edges, say string
		change            func(o *TablesOptions)
	}{
		{nodes: "user,age,group\nz,1,red\n" + word(7) + ",2,red\n", say: "n.csv:3, column user: " + word(7) + " is node 7 of"},
		{nodes: "user,age,group\nz,1,pink\n", say: "class pink is none of the 3"},
		{nodes: "user,group\nz,red\n", say: `no column "age"`},
		{nodes: "user,age,group\nz,,red\n", say: "has no value"},
		{edges: "who,whom\nz," + word(1) + "\n", say: "e.csv:2, column who: there is no node z"},
		{nodes: "age,group\n1,red\n", change: func(o *TablesOptions) { o.ID = "" }, say: "name the column of ids"},
		{nodes: "user,age,group\nz,1,red\n", change: func(o *TablesOptions) { o.Undirected = true }, say: "the dataset has decided that"},
		{nodes: "user,age,group\nz,1,red\n", change: func(o *TablesOptions) {
			require.NoError(t, os.WriteFile(filepath.Join(o.Out, "4.partition"), nil, 0o600))
		}, say: "4.partition is no file of the dataset"},
	} {
		add := o
		if add.Edges = ""; c.edges != "" {
			add.Nodes, add.ID, add.Label, add.Edges = "", "", "", o.Edges
			require.NoError(t, os.WriteFile(o.Edges, []byte(c.edges), 0o600))
		} else {
			add.Src, add.Dst = "", ""
			require.NoError(t, os.WriteFile(o.Nodes, []byte(c.nodes), 0o600))
		}
		if c.change != nil {
			c.change(&add)
		}
		require.ErrorContains(t, importTables(add), c.say)
		require.NoError(t, os.RemoveAll(filepath.Join(o.Out, "4.partition")))
		require.Equal(t, was, datasettest.Digest(t, o.Out), c.say)
	}
}

// An append names columns that it leaves out and nodes that get no label. Classes come from the
// dataset alone, and of two appends at once the second begins anew.
func TestAppendSays(t *testing.T) {
	o := tableFiles(t, word, 50, 90)
	require.NoError(t, importTables(o))
	var notes []string
	o.Append, o.Note = true, func(s errs.Text) { notes = append(notes, s.String()) }
	add := func(o TablesOptions, file, text string) error {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		return importTables(o)
	}
	n := o
	n.Label, n.Edges, n.Src, n.Dst = "", "", "", ""
	require.NoError(t, os.Chmod(o.Out, 0o700))
	require.NoError(t, add(n, n.Nodes, "user,age,group,income\nz,1,red,2\n"))
	st, err := os.Stat(o.Out)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), st.Mode().Perm())
	require.Contains(t, notes, "not used of "+n.Nodes+": column group, column income")
	require.Contains(t, notes, "no label and no split, as option label names no column: 1 nodes that are added")

	e := o
	e.Nodes, e.ID, e.Label = "", "", ""
	build.JournalStep = func([]byte, bool) error {
		build.JournalStep = nil
		return importTables(n) // another one, which is faster
	}
	require.NoError(t, os.WriteFile(n.Nodes, []byte("user,age\ny,1\n"), 0o600))
	require.ErrorContains(t, add(e, e.Edges, "who,whom\nz,"+word(1)+"\n"), "was replaced while it was in use")
	require.NoError(t, importTables(e))
	require.EqualValues(t, 91, datasettest.Open(t, o.Out).Meta.Edges)

	e.Append, e.Out, e.FeatureFn = false, o.Out+"2", "hash"
	require.NoError(t, importTables(e))
	e.Out, e.FeatureFn = o.Out+"3", ""
	require.NoError(t, importTables(e))
	n.Out, n.Label = e.Out, "age"
	require.ErrorContains(t, add(n, n.Nodes, "user,age\nx,0\n"), "have no labels, so there are no classes")
}

// TestAppendKeeps: new nodes are dealt by the shares of the old ones, and what was left out of the
// old tables still counts. Damaged rows are found although they are read once.
func TestAppendKeeps(t *testing.T) {
	o := tableFiles(t, word, 300, 90)
	o.TrainFraction, o.ValFraction, o.Dangling, o.Seed = 1, 0, "drop", 7
	require.NoError(t, os.WriteFile(o.Edges, []byte("who,whom\nnobody,noone\n"), 0o600))
	require.NoError(t, importTables(o))
	require.NoError(t, os.WriteFile(o.Edges, []byte("who,whom\nnoone,nobody\n"), 0o600))
	var rows strings.Builder
	for i := range 100 {
		fmt.Fprintf(&rows, "new%d,%d,red\n", i, i)
	}
	require.NoError(t, os.WriteFile(o.Nodes, []byte("user,age,group\n"+rows.String()), 0o600))
	var usual TablesOptions
	options.Defaults(&usual)
	o.Append, o.TrainFraction, o.Seed = true, 0.5, 7
	require.ErrorContains(t, importTables(o), "option train-fraction 0.5 beside option append: nodes of")
	o.TrainFraction, o.ValFraction, o.Seed = usual.TrainFraction, usual.ValFraction, usual.Seed
	for _, key := range []string{"seed", "train-fraction"} { // the default, by hand
		o.Given = func(option string) bool { return option == key }
		require.ErrorContains(t, importTables(o), "option "+key)
	}
	var notes []string
	o.Note = func(t errs.Text) { notes = append(notes, string(t)) }
	o.Given = func(string) bool { return false }
	file := filepath.Join(o.Out, dataset.FeaturesName)
	whole, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, append(slices.Clone(whole[:len(whole)-1]), '?'), 0o600))
	require.ErrorContains(t, importTables(o), "are not those that were sealed")
	require.NoError(t, os.WriteFile(file, whole, 0o600))
	require.NoError(t, importTables(o))
	m := datasettest.Open(t, o.Out).Meta
	require.EqualValues(t, []int64{400, 400}, []int64{m.Nodes, m.Train})
	require.EqualValues(t, 2, m.Source.Counts[danglingDropped])
	require.Contains(t, strings.Join(notes, "\n"), "1 to train, 0 to val, by seed 7")
}
