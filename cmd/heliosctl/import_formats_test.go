package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestImportFormatVerbs: each format is a verb that says what --in must hold, and refuses an empty folder in one line.
func TestImportFormatVerbs(t *testing.T) {
	isolate(t)
	require.NoError(t, os.Mkdir("empty", 0o755))
	for name, want := range map[string]string{
		"ogb": "raw/edge.csv.gz", "mag240m": "edge_index.npy", "igb": "edge_index.npy", "graphbolt": "metadata.yaml", "dgl": ".bin file",
	} {
		require.Contains(t, ok(t, "import", name, "--help"), "--in is the ", name)
		fails(t, hc(t, "import", name, "--in", "empty", "--out", "g"), 2, "import "+name, want)
		fails(t, hc(t, "import", name, "--in", "empty", "--out", "g", "--dim", "9"), 2, "import "+name, "--dim 9 is for --feature-fn")
		fails(t, hc(t, "import", name, "--in", "nothing", "--out", "g"), 2, "import "+name, "nothing")
		require.NoDirExists(t, "g")
	}
}

func TestImportDGLVerb(t *testing.T) {
	dir, err := filepath.Abs(filepath.Join("..", "..", "dataset", "testdata", "dgl"))
	require.NoError(t, err)
	isolate(t)
	three := filepath.Join(dir, "three.bin")
	fails(t, hc(t, "import", "dgl", "--in", three, "--out", "g"), 2, "import dgl", "3 graphs", "--graph 0 to 2")
	out := ok(t, "import", "dgl", "--in", three, "--out", "g", "--graph", "1")
	require.True(t, strings.Contains(out, "5 nodes, 6 edges, 2 features, 3 classes"), out)
}
