package importer

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
)

func importMETIS(t *testing.T, text string) (string, error) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "a.graph"), filepath.Join(dir, "g")
	require.NoError(t, os.WriteFile(in, []byte(text), 0o644))
	err := METIS(bg, Options{Input: Input{In: in}, FeatureFn: "hash", Dim: 2,
		Output: Output{Out: out}})
	if err != nil {
		left, err2 := os.ReadDir(dir)
		require.NoError(t, err2)
		require.Len(t, left, 1)
		return "", err
	}
	read := func(name string) (xs []int64) {
		a, err := npy.Open(filepath.Join(out, name))
		require.NoError(t, err)
		require.NoError(t, eachInt(a, func(_, x int64) error { xs = append(xs, x); return nil }))
		return xs
	}
	var b strings.Builder
	offsets, neighbours := read(dataset.IndptrName), read(dataset.IndicesName)
	for v := range offsets[1:] {
		fmt.Fprint(&b, neighbours[offsets[v]:offsets[v+1]])
	}
	return b.String(), nil
}

// TestMETIS reads the graphs of the manual of METIS (figure 2), with weights of nodes and edges.
func TestMETIS(t *testing.T) {
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write([]byte("3 1\n2\n1\n\n"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	for text, want := range map[string]string{
		"7 11\n5 3 2\n1 3 4\n5 4 2 1\n2 3 6 7\n1 3 6\n5 4 7\n6 4\n":                                                             "",
		"% comment\n7 11 001\n5 1 3 2 2 1\n1 1 3 2 4 1\n5 3 4 2 2 2 1 2\n2 1 3 2 6 2 7 5\n1 1 3 3 6 2\n5 2 4 2 7 6\n6 6 4 5\n":  "",
		"7 11 011\n4 5 1 3 2 2 1\n2 1 1 3 2 4 1\n5 5 3 4 2 2 2 1 2\n3 2 1 3 2 6 2 7 5\n1 1 1 3 3 6 2\n6 5 2 4 2 7 6\n2 6 6 4 5": "",
		"7 11 010 3\n1 2 0 5 3 2\n0 2 2 1 3 4\n4 1 1 5 4 2 1\n2 2 3 2 3 6 7\n1 1 1 1 3 6\n2 2 1 5 4 7\n1 2 1 6 4\n":             "",
		"3 1\n\n3\n% amid\n2\n\n\n": "[][2][1]",
		"3 1\r\n\r\n3\r\n2":         "[][2][1]",
		packed.String():             "[1][0][]",
	} {
		if want == "" {
			want = "[1 2 4][0 2 3][0 1 3 4][1 2 5 6][0 2 5][3 4 6][3 5]"
		}
		got, err := importMETIS(t, text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for text, say := range map[string]string{
		"":                                "ends before the line of nodes",
		"3\n":                             "is not",
		"3 1 002\n":                       "is not",
		"0 0\n":                           "0 nodes",
		"99999999999999 1\n":              "nodes; 1 to",
		"3 1\n2\n1\n":                     "a.graph:4: the file ends behind node 2 of 3",
		"3 1\n2\n1\n\n3\n":                "a.graph:5: a line for node 4",
		"3 2\n2\n1\n\n":                   "its lines have 2 neighbours",
		"3 1\n2\n\n\n":                    "its lines have 1 neighbours",
		"4 2\n2\n3\n4\n1\n":               "an edge stands at one end alone",
		"3 1\n4\n1\n\n":                   "a.graph:2: neighbour 4 of node 1 is outside 1..3",
		"3 1\n0\n1\n\n":                   "neighbour 0 of node 1",
		"3 1\n2 x\n1\n\n":                 "a.graph:2: 'x' within number 2",
		"3 1 1\n2\n1 1\n\n":               "a.graph:2: the last neighbour has no weight",
		"3 1 10 2\n2\n1 1\n":              "a.graph:2: 1 numbers, and the first line says 2",
		"3 1\n2.5\n1\n\n":                 "'.' within number 1",
		"3 1\n-2\n1\n\n":                  "'-' within number 1",
		"3 1\n" + strings.Repeat("9", 19): "too long",
		packed.String()[:20]:              "",
	} {
		_, err := importMETIS(t, text)
		require.ErrorContains(t, err, say, text)
		require.Equal(t, errs.Usage, errs.ClassOf(err), text)
	}
}
