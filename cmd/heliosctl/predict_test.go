package main

import (
	"encoding/csv"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/stretchr/testify/require"

	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/hostmem"
	figures "helios/internal/metrics"
	"helios/internal/testing/datasettest"
	"helios/sched/checkpoint"
)

// matrix is an array of two dimensions.
type matrix struct {
	rows, cols int
	v          []float64
}

func (m matrix) at(i, j int) float64 { return m.v[i*m.cols+j] }

func readMatrix(t *testing.T, path string) matrix {
	t.Helper()
	a, err := npy.Open(path)
	require.NoError(t, err)
	r, err := a.Reader(0)
	require.NoError(t, err)
	defer r.Close()
	m := matrix{int(a.Header.Shape[0]), 1, nil}
	if len(a.Header.Shape) > 1 {
		m.cols = int(a.Header.Shape[1])
	}
	m.v = make([]float64, m.rows*m.cols)
	if a.Header.DType.Kind == 'f' {
		_, err = r.Floats(m.v)
	} else {
		ints := make([]int64, len(m.v))
		_, err = r.Ints(ints)
		for i, n := range ints {
			m.v[i] = float64(n)
		}
	}
	require.NoError(t, err)
	return m
}

// weights are the tensors of a checkpoint's best parameters.
func weights(t *testing.T, path string) map[string]matrix {
	t.Helper()
	f, err := checkpoint.Load(path)
	require.NoError(t, err)
	out := map[string]matrix{}
	for _, x := range f.Tensors {
		m := matrix{int(x.Shape[0]), int(x.Shape[1]), nil}
		for _, v := range hostmem.View[float32](x.Data) {
			m.v = append(m.v, float64(v))
		}
		out[x.Name] = m
	}
	return out
}

// sageLayer is a layer of GraphSAGE over whole neighbour lists, by its formula.
func sageLayer(in matrix, indptr, indices matrix, w map[string]matrix, layer string,
	relu bool) matrix {
	self, neigh, bias := w[layer+".self.weight"], w[layer+".neigh.weight"], w[layer+".bias"]
	out := matrix{in.rows, self.cols, make([]float64, in.rows*self.cols)}
	for i := range in.rows {
		from, to := int(indptr.v[i]), int(indptr.v[i+1])
		for k := range out.cols {
			sum := bias.at(0, k)
			for j := range in.cols {
				mean := 0.0
				for _, u := range indices.v[from:to] {
					mean += in.at(int(u), j) / float64(to-from)
				}
				sum += in.at(i, j)*self.at(j, k) + mean*neigh.at(j, k)
			}
			if relu {
				sum = max(sum, 0)
			}
			out.v[i*out.cols+k] = sum
		}
	}
	return out
}

// The embeddings are the last hidden layer's activations, nodes × hidden width, in the order of the
// nodes: a recomputation from the checkpoint's weights gives the same, and the last layer makes
// the classes of them.
func TestPredictEmbeddings(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "200", "--avg-degree", "5", "--classes", "4", "--dim",
		"8", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	features, indptr, indices := readMatrix(t, "g/features.npy"), readMatrix(t, "g/indptr.npy"),
		readMatrix(t, "g/indices.npy")
	for _, c := range []struct {
		fanout string
		hidden int // layers before the last
		width  int
	}{{"-1,-1", 1, 12}, {"-1,-1,-1", 2, 12}, {"-1", 0, 4}} {
		dir := fmt.Sprint("run", c.hidden)
		ok(t, "train", "g", "--epochs", "2", "--fanout", c.fanout, "--hidden", "12", "--checkpoint", dir,
			"--quiet")
		out := ok(t, "predict", "g", "--checkpoint", dir, "--embeddings", dir+".npy", "--csv", dir+".csv",
			"--batch-size", "64")
		require.Contains(t, out, fmt.Sprintf("embeddings in %s.npy: 200 nodes × %d", dir, c.width))
		got, w := readMatrix(t, dir+".npy"), weights(t, dir+"/checkpoint.safetensors")
		require.Equal(t, []int{200, c.width}, []int{got.rows, got.cols})
		want := features
		for l := range c.hidden {
			want = sageLayer(want, indptr, indices, w, fmt.Sprintf("best.layer%d", l), true)
		}
		logits := sageLayer(want, indptr, indices, w, fmt.Sprintf("best.layer%d", c.hidden), false)
		if c.hidden == 0 {
			want = logits
		}
		for i, v := range want.v {
			require.InDelta(t, v, got.v[i], 1e-4*max(1, math.Abs(v)), "%s: node %d", c.fanout, i/c.width)
		}
		f, err := os.Open(dir + ".csv")
		require.NoError(t, err)
		rows, err := csv.NewReader(f).ReadAll()
		require.NoError(t, err)
		require.NoError(t, f.Close())
		for i, row := range rows[1:] {
			require.Equal(t, strconv.Itoa(i), row[0])
			best := 0
			for k := range logits.cols {
				if logits.at(i, k) > logits.at(i, best) {
					best = k
				}
			}
			require.Equal(t, strconv.Itoa(best), row[1])
		}
	}
	// Some nodes, in the order that they are asked for.
	ok(t, "predict", "g", "--checkpoint", "run1", "--nodes", "7,3,11", "--embeddings", "some.npy", "--quiet")
	all, some := readMatrix(t, "run1.npy"), readMatrix(t, "some.npy")
	require.Equal(t, []int{3, 12}, []int{some.rows, some.cols})
	for i, node := range []int{7, 3, 11} {
		for k := range 12 {
			require.InDelta(t, all.at(node, k), some.at(i, k), 1e-5)
		}
	}
	for _, line := range []string{"last hidden layer", "nodes × width of the last hidden layer"} {
		require.Contains(t, ok(t, "predict", "--help"), line)
	}
}

// Scores are the model's outputs, probabilities their softmax, and the class is the largest of
// either.
func TestPredictScores(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "200", "--avg-degree", "5", "--classes", "3", "--dim",
		"8", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	ok(t, "train", "g", "--mode", "helios", "--fanout", "-1", "--hidden", "12", "--checkpoint", "run", "--quiet")
	out := ok(t, "predict", "g", "--checkpoint", "run", "--scores", "s.npy", "--proba", "p.npy",
		"--embeddings", "e.npy", "--csv", "c.csv", "--batch-size", "64")
	require.Contains(t, out, "probabilities in p.npy: 200 nodes × 3")
	scores, proba, emb := readMatrix(t, "s.npy"), readMatrix(t, "p.npy"), readMatrix(t, "e.npy")
	require.Equal(t, emb, scores, "a model of one layer")
	f, err := os.Open("c.csv")
	require.NoError(t, err)
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	require.NoError(t, err)
	for i, row := range rows[1:] {
		sum, best := 0.0, 0
		for c := range 3 {
			sum += math.Exp(scores.at(i, c))
			if scores.at(i, c) > scores.at(i, best) {
				best = c
			}
		}
		require.Equal(t, strconv.Itoa(best), row[1])
		for c := range 3 {
			require.InDelta(t, math.Exp(scores.at(i, c))/sum, proba.at(i, c), 1e-6)
		}
	}
	require.Contains(t, ok(t, "eval", "g", "--checkpoint", "run"), "f1-macro")
}

// Tables name nodes and classes as the dataset does, in CSV and in Parquet alike; the most probable
// classes come with their probabilities, and a threshold chooses between two.
func TestPredictTables(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "200", "--avg-degree", "5", "--classes", "2", "--dim",
		"8", "--seed", "3", "--out", "g")
	var names strings.Builder
	for i := range 200 {
		fmt.Fprintf(&names, "node, %d\n", i)
	}
	require.NoError(t, os.WriteFile("g/names.txt", []byte(names.String()), 0o644))
	meta, err := os.ReadFile("g/dataset.yaml")
	require.NoError(t, err)
	text := strings.Replace(string(meta), "sealed: true\n", "", 1) + "class_names: [node, b]\n"
	require.NoError(t, os.WriteFile("g/dataset.yaml", []byte(text), 0o644))
	require.NoError(t, os.Remove("g/dataset.seal"))
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	ok(t, "train", "g", "--mode", "inmem", "--fanout", "-1,-1", "--hidden", "12", "--checkpoint", "run",
		"--quiet")
	predict := func(args ...string) string {
		return ok(t, append([]string{"predict", "g", "--checkpoint", "run", "--overwrite"}, args...)...)
	}
	predict("--csv", "c.csv", "--topk", "2", "--proba", "p.npy", "--scores", "s.csv")
	proba := readMatrix(t, "p.npy")
	rows := readTable(t, "c.csv")
	require.Equal(t, []string{"node", "class", "name", "class_name", "top1", "proba1", "top2", "proba2"},
		rows[0])
	for i, row := range rows[1:] {
		require.Equal(t, fmt.Sprint("node, ", i), row[2])
		require.Equal(t, row[3], row[4], "the first is the class")
		first, err := strconv.ParseFloat(row[5], 64)
		require.NoError(t, err)
		require.Equal(t, max(proba.at(i, 0), proba.at(i, 1)), float64(float32(first)))
	}
	require.Equal(t, []string{"node", "name", "node_2", "b"}, readTable(t, "s.csv")[0],
		"a class has another column than the nodes")
	predict("--csv", "c.parquet", "--topk", "2", "--proba", "p.parquet", "--scores", "s.parquet")
	require.Equal(t, rows, readTable(t, "c.parquet"))
	require.Equal(t, readTable(t, "s.csv"), readTable(t, "s.parquet"))
	// Nodes by their names are those by their numbers.
	predict("--csv", "n.csv", "--nodes", "3,150", "--topk", "2")
	predict("--csv", "i.csv", "--id", `"node, 3","node, 150"`, "--topk", "2")
	require.Equal(t, readTable(t, "n.csv"), readTable(t, "i.csv"))
	require.Contains(t, ok(t, "names", "g", "--id", `"node, 7"`, "--node", "9"), "node, 9")
	for _, c := range [][]string{
		{"--id", "node 3", "no node has this name"},
		{"--id", `"node, 3`, "CSV"},
		{"--id", "", "has no name"},
		{"--id", `"node, 3"`, "--nodes", "3", "give one"},
		{"--id", `"node, 3"`, "--split", "test", "--id and --split together"},
	} {
		fails(t, hc(t, append([]string{"predict", "g", "--checkpoint", "run", "--quiet"},
			c[:len(c)-1]...)...), 2, "predict", "--id", c[len(c)-1])
	}
	// The threshold is that of the second class.
	predict("--csv", "t.csv", "--threshold", "0.6")
	changed := 0
	for i, row := range readTable(t, "t.csv")[1:] {
		require.Equal(t, proba.at(i, 1) >= 0.6, row[1] == "1", "node %d", i)
		if row[1] != rows[1+i][1] {
			changed++
		}
	}
	require.Positive(t, changed)
	require.Contains(t, predict("--nodes", "3", "--topk", "1"), "3\t"+rows[4][1]+"\tnode, 3\t")
	for want, args := range map[string][]string{
		"has 2 classes": {"--topk", "3"}, "--threshold": {"--threshold", "1.5"},
	} {
		r := hc(t, append([]string{"predict", "g", "--checkpoint", "run"}, args...)...)
		require.Equal(t, int(errs.Usage), r.code)
		require.Contains(t, r.errOut, want)
	}
}

// readTable reads a table as text.
func readTable(t *testing.T, path string) (rows [][]string) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	if filepath.Ext(path) == csvEnd {
		rows, err = csv.NewReader(f).ReadAll()
		require.NoError(t, err)
		return rows
	}
	st, err := f.Stat()
	require.NoError(t, err)
	p, err := parquet.OpenFile(f, st.Size())
	require.NoError(t, err)
	rows = append(rows, nil)
	for _, c := range p.Schema().Columns() {
		rows[0] = append(rows[0], c[0])
	}
	r := parquet.NewReader(p)
	values := make([]parquet.Row, 1)
	for range p.NumRows() {
		n, err := r.ReadRows(values)
		require.Equal(t, 1, n, "%v", err)
		var row []string
		for _, v := range values[0] {
			switch v.Kind() {
			case parquet.ByteArray:
				row = append(row, string(v.ByteArray()))
			case parquet.Float:
				row = append(row, textOf(v.Float()))
			default:
				row = append(row, fmt.Sprint(v.Int64()))
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// A model of several labels gives the probability of each, one of numbers these; a dataset of them
// trains, is judged and comes from files like one of classes.
func TestPredictLabelsAndNumbers(t *testing.T) {
	isolate(t)
	const nodes = 200
	arrays := map[string]datasettest.Arr{}
	var features, numbers []float32
	var labels []uint8
	var ends [2][]int64
	for v := range int64(nodes) {
		x := float32(v%7) - 3
		features = append(features, x, float32(v%3))
		numbers = append(numbers, 1000+10*x)
		labels = append(labels, uint8(v%7/4), uint8(v%3/2))
		ends[0], ends[1] = append(ends[0], v), append(ends[1], (v+1)%nodes)
	}
	arrays["features"] = datasettest.Arr{DT: "<f4", Shape: []int64{nodes, 2}, Data: features}
	arrays["edge_index"] = datasettest.Arr{DT: "<i8", Shape: []int64{2, nodes},
		Data: append(ends[0], ends[1]...)}
	for target, y := range map[string]datasettest.Arr{
		"multi-label": {DT: "|u1", Shape: []int64{nodes, 2}, Data: labels},
		"regression":  {DT: "<f4", Shape: []int64{nodes}, Data: numbers},
	} {
		arrays["labels"] = y
		ok(t, "import", "npy", "--in", datasettest.WriteDir(t, arrays), "--out", target,
			"--target", target)
		ok(t, "bind-ssds", "--proxy", target+"-a.img,"+target+"-b.img", "--size", "8MiB")
		ok(t, "load", target)
		ok(t, "verify", target)
		train := ok(t, "train", target, "--mode", "helios", "--hidden", "12", "--epochs", "30",
			"--batch-size", "32", "--lr", "0.02", "--checkpoint", target+"-run")
		eval := ok(t, "eval", target, "--checkpoint", target+"-run")
		predict := []string{"predict", target, "--checkpoint", target + "-run", "--scores",
			target + "-s.npy", "--csv", target + ".csv"}
		if target == "multi-label" {
			ok(t, append(predict, "--proba", "p.npy")...)
			scores, proba := readMatrix(t, target+"-s.npy"), readMatrix(t, "p.npy")
			for i, z := range scores.v {
				require.InDelta(t, 1/(1+math.Exp(-z)), proba.v[i], 1e-6)
			}
			require.Contains(t, readFile(t, target+".csv"), "node,probability 0,probability 1\n0,")
			require.Contains(t, train+eval, "f1-micro")
			ok(t, "unbind-ssds", "--delete")
			continue
		}
		ok(t, predict...)
		got := readMatrix(t, target+"-s.npy")
		for i, x := range got.v {
			require.InDelta(t, numbers[i], x, 15, "node %d", i)
		}
		require.Contains(t, readFile(t, target+".csv"), "node,number 0\n0,")
		require.Contains(t, train, "test  ")
		require.Contains(t, eval, "rmse")
		require.NotContains(t, train+eval, "accuracy")
		fails(t, hc(t, "predict", target, "--checkpoint", target+"-run", "--proba", "q.npy"), 2,
			"predict", "numbers, which have no probabilities")
		ok(t, "unbind-ssds", "--delete")
	}
}

// A matrix of no nodes is one that NumPy reads.
func TestPredictNoNodes(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "200", "--avg-degree", "5", "--classes", "3", "--dim",
		"8", "--val-fraction", "0", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	ok(t, "train", "g", "--mode", "inmem", "--fanout", "-1", "--hidden", "12", "--checkpoint", "run", "--quiet")
	ok(t, "predict", "g", "--checkpoint", "run", "--split", "val", "--proba", "p.npy")
	a, err := npy.Open("p.npy")
	require.NoError(t, err)
	require.Equal(t, []int64{0, 0}, a.Header.Shape)
	r := hc(t, "train", "g", "--metric", "log-loss")
	require.Equal(t, 2, r.code)
	require.Contains(t, r.errOut,
		"--metric log-loss is not defined on the 0 validation nodes of dataset g")
}

// A class without a name, in a dataset whose list of names is short, has no line of its own.
func TestMetricRowsOfShortNames(t *testing.T) {
	r := &figures.Report{Classes: []figures.Class{{Class: 0}, {Class: 1}, {Class: 2}}}
	require.Len(t, metricRows(r, []string{"a", "b"}), 1+2)
}
