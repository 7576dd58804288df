package main

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/datasettest"
	"helios/internal/testing/realdata"
	"helios/internal/testing/wide"
)

// igbhFolder writes IGBH's layout with few nodes and rows of 24: classes show in a paper's row.
func igbhFolder(t *testing.T, dir string) {
	rng := rand.New(rand.NewPCG(3, 4))
	counts := map[string]int64{"paper": 300, "author": 120, "fos": 20, "institute": 8}
	write := func(name string, a datasettest.Arr) {
		name = filepath.Join(dir, "processed", name)
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, os.WriteFile(name, a.Bytes(t), 0o644))
	}
	labels := make([]float32, counts["paper"])
	for i := range labels {
		labels[i] = float32(rng.IntN(4))
	}
	for _, kind := range []string{"paper", "author", "fos", "institute"} {
		n := counts[kind]
		x := make([]float32, n*24)
		for i := range x {
			x[i] = float32(rng.NormFloat64())
			if row := i / 24; kind == "paper" && i%24 == int(labels[row]) {
				x[i] += 3
			}
		}
		write(kind+"/node_feat.npy", datasettest.Arr{DT: "<f4", Shape: []int64{n, 24}, Data: x})
	}
	for _, name := range []string{"19", "2K"} {
		write("paper/node_label_"+name+".npy", datasettest.Arr{DT: "<f4",
			Shape: []int64{counts["paper"]}, Data: labels})
	}
	for _, r := range [][3]string{{"paper", "cites", "paper"}, {"paper", "written_by", "author"},
		{"author", "affiliated_to", "institute"}, {"paper", "topic", "fos"}} {
		var ends []int64
		for range 900 {
			ends = append(ends, rng.Int64N(counts[r[0]]), rng.Int64N(counts[r[2]]))
		}
		write(r[0]+"__"+r[1]+"__"+r[2]+"/edge_index.npy", datasettest.Arr{DT: "<i8",
			Shape: []int64{900, 2}, Data: ends})
	}
}

// MLPerf's recipe, but for its width and batches, runs on a small copy of IGBH's layout, and GIDS
// trains it to the same parameters.
func TestMLPerfRecipe(t *testing.T) {
	recipe, err := filepath.Abs("../../examples/igbh-mlperf.yaml")
	require.NoError(t, err)
	isolate(t)
	igbhFolder(t, "copy")
	ok(t, "import", "igbh", "--in", "copy", "--relations", "mlperf", "--classes", "2K", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "ssd.img", "--size", "8MiB")
	ok(t, "load", "g")
	run := []string{"train", "g", "--config", recipe, "--hidden", "16", "--batch-size", "32", "--lr",
		"0.01", "--epochs", "8", "--json", "--checkpoint"}
	first := last(t, ok(t, append(slices.Clone(run), "a", "--mode", "helios")...))
	second := last(t, ok(t, append(slices.Clone(run), "b", "--mode", "gids")...))
	require.Equal(t, first["params_sha256"], second["params_sha256"])
	epochs := first["epochs"].([]any)
	loss := func(i int) any { return epochs[i].(map[string]any)["loss"] }
	require.Less(t, loss(len(epochs)-1), loss(0))
	require.Equal(t, first["test_acc"], last(t, ok(t, "eval", "g", "--checkpoint", "a", "--json"))["accuracy"])
}

// A featureless R-GCN learns AIFB, none of whose nodes has rows. PyTorch Geometric's R-GCN of the
// same triples and splits has 88.9% to 91.7% of 36 test nodes right.
func TestAIFB(t *testing.T) {
	data := realdata.Dir(t, "aifb", "triples.tsv", "labels.tsv")
	isolate(t)
	ok(t, "import", "triples", "--in", data, "--out", "g")
	epochs := "50"
	if wide.Lean() {
		epochs = "20"
	}
	r := last(t, ok(t, "train", "g", "--model", "rgcn", "--featureless", "--bases", "30", "--hidden",
		"16", "--fanout=-1,-1", "--batch-size", "140", "--epochs", epochs, "--lr", "0.01",
		"--weight-decay", "5e-4", "--dropout", "0", "--seed", "1", "--mode", "helios", "--json"))
	require.Greater(t, r["test_acc"], 0.8)
}
