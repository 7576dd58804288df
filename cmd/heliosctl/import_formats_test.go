package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/importer"
	"helios/internal/options"
	"helios/internal/testing/datasettest"
)

// TestImportFormatVerbs: each registered format is a verb whose help lists its options, and refuses
// an empty folder, a missing one and a lone file in one line that names flags and not options.
func TestImportFormatVerbs(t *testing.T) {
	isolate(t)
	require.NoError(t, os.Mkdir("empty", 0o755))
	for _, f := range importer.Formats() {
		help := ok(t, "import", f.Name, "--help", "all")
		require.Contains(t, strings.Join(strings.Fields(help), " "), f.Usage)
		require.NotContains(t, help, "option ", f.Name)
		completed := ok(t, "__complete", "import", f.Name, "--")
		for _, o := range options.Of(f.Options()) {
			require.Contains(t, help, "--"+o.Name, f.Name)
			require.Contains(t, completed, "--"+o.Name, f.Name)
		}
		for _, in := range []string{"empty", "nothing"} {
			r := hc(t, "import", f.Name, "--in", in, "--out", "g")
			fails(t, r, 2, "import "+f.Name, in)
			require.NotContains(t, r.errOut, "option ", f.Name)
		}
		fails(t, hc(t, "import", f.Name, "--in", "empty"), 2, "import "+f.Name, "no --out DIR")
		fails(t, hc(t, "import", f.Name, "--in", "empty", "--out", "g", "--memory", "1KiB"), 2,
			"import "+f.Name, "--memory 1KiB is too little; give at least 64MiB")
		require.NoDirExists(t, "g")
	}
}

// TestImportFormatFolders: formats that are folders of known files say what is missing, and that a
// number of features is for computed ones.
func TestImportFormatFolders(t *testing.T) {
	isolate(t)
	require.NoError(t, os.Mkdir("empty", 0o755))
	for name, want := range map[string]string{
		"ogb": "raw/edge.csv.gz", "mag240m": "edge_index.npy", "igb": "edge_index.npy",
		"graphbolt": "metadata.yaml", "dgl": ".bin file",
	} {
		require.Contains(t, ok(t, "import", name, "--help"), "--in is the ", name)
		fails(t, hc(t, "import", name, "--in", "empty", "--out", "g"), 2, "import "+name, want)
		fails(t, hc(t, "import", name, "--in", "empty", "--out", "g", "--dim", "9"), 2,
			"import "+name, "--dim 9 is for --feature-fn")
		fails(t, hc(t, "import", name, "--in", "nothing", "--out", "g"), 2, "import "+name,
			"nothing")
		require.NoDirExists(t, "g")
	}
}

// An option that a format does not take is no flag of its verb.
func TestImportFormatsTakeTheirOptions(t *testing.T) {
	isolate(t)
	for _, c := range [][]string{{"planetoid", "--features"}, {"planetoid", "--dedup"},
		{"debian", "--undirected"}, {"debian", "--restart"}, {"npy", "--classes"}} {
		fails(t, hc(t, "import", c[0], "--in", "x", "--out", "g", c[1], "y"), 2, "import "+c[0],
			"unknown flag "+c[1])
	}
	fails(t, hc(t, "import", "edges", "--in", "x", "--out", "g", "--self-loops", "some"), 2,
		"import edges", `unknown --self-loops "some"; choose one of keep, drop, add`)
	fails(t, hc(t, "import", "npy", "--in", "x", "--out", "g", "--map", "a=b"), 2,
		"import npy", `--map "a=b": give THEIRS=OURS`)
	fails(t, hc(t, "import", "npy", "--in", "x", "--out", "g", "--nodes", "0"), 2,
		"import npy", "--nodes 0 is not a positive number")
}

// An import's last line of JSON has what was not used and what is odd, with flags for options.
func TestImportNotes(t *testing.T) {
	isolate(t)
	a := datasettest.GoodArrays()
	a["indptr"] = datasettest.Arr{DT: "<i8", Shape: []int64{6}, Data: []int64{0, 1, 2, 3, 4, 5}}
	a["indices"] = datasettest.Arr{DT: "<i8", Shape: []int64{5}, Data: []int64{1, 0, 0, 3, 4}}
	a["edge_weight"] = a["indices"]
	delete(a, "edge_index")
	r := hc(t, "import", "npy", "--in", datasettest.WriteDir(t, a), "--out", "g", "--num-classes",
		"4", "--json", "--quiet")
	require.Zero(t, r.code, r.errOut)
	require.Contains(t, r.errOut, "models take no edge weights", "--quiet hides no note on data")
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	var last struct{ Notes []string }
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &last))
	notes := strings.Join(last.Notes, "\n")
	for _, want := range []string{"(CSC); --lists out reads",
		"edge_weight.npy; models take no edge weights", "one of the 4 classes has no node: 3"} {
		require.Contains(t, notes, want)
	}
}

func TestImportDGLVerb(t *testing.T) {
	dir, err := filepath.Abs(filepath.Join("..", "..", "dataset", "importer", "testdata", "dgl"))
	require.NoError(t, err)
	isolate(t)
	three := filepath.Join(dir, "three.bin")
	fails(t, hc(t, "import", "dgl", "--in", three, "--out", "g"), 2, "import dgl", "3 graphs",
		"--graph 0 to 2")
	out := ok(t, "import", "dgl", "--in", three, "--out", "g", "--graph", "1")
	require.True(t, strings.Contains(out, "5 nodes, 6 edges, 2 features, 3 classes"), out)
}

// import debian lists its findings, takes a budget, and its JSON has the counts.
func TestImportDebianVerb(t *testing.T) {
	isolate(t)
	require.NoError(t, os.WriteFile("a_Packages", []byte("Package: a\nVersion: 1\nDepends: b\n"+
		"Description: first\nSection: x\n\nPackage: b\nVersion: 1\nDescription: second\n"+
		"Section: y\n"), 0o644))
	out := hc(t, "import", "debian", "--in", "a_Packages", "--out", "g", "--dim", "4", "--memory",
		"64MiB", "--json")
	require.Equal(t, 0, out.code, out.errOut)
	require.Contains(t, out.out, `"packages":2`)
	require.Contains(t, out.out, `"counts":{"dependencies":1`)
	text := ok(t, "import", "debian", "--in", "a_Packages", "--out", "h")
	require.Contains(t, text, "2 packages, 1 dependencies")
}
