package importer

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/edges"
	"helios/internal/testing/datasettest"
)

func writeText(t testing.TB, name, text string) string {
	path := filepath.Join(t.TempDir(), name)
	b := []byte(text)
	if strings.HasSuffix(name, ".gz") {
		var buf bytes.Buffer
		z := gzip.NewWriter(&buf)
		_, err := z.Write(b)
		require.NoError(t, err)
		require.NoError(t, z.Close())
		b = buf.Bytes()
	}
	require.NoError(t, os.WriteFile(path, b, 0o644))
	return path
}

// sourceEdges reads all parts, the last first, and gives the edges in the order of the parts.
func sourceEdges(s edges.Source) (edges [][2]int64, err error) {
	parts := make([][][2]int64, s.Parts)
	heard := int64(0)
	for p := s.Parts - 1; p >= 0 && err == nil; p-- {
		err = s.Read(context.Background(), p, func(src, dst []int64) error {
			for i := range src {
				parts[p] = append(parts[p], [2]int64{src[i], dst[i]})
			}
			return nil
		}, func(n int64) { heard += n })
	}
	for _, p := range parts {
		edges = append(edges, p...)
	}
	if err == nil && s.Total > 0 && heard != s.Total {
		err = fmt.Errorf("%d of %d %s were reported", heard, s.Total, s.Unit)
	}
	return edges, err
}

func TestMTXForms(t *testing.T) {
	const head = "%%MatrixMarket matrix coordinate "
	for name, c := range map[string]struct {
		text string
		want [][2]int64
	}{
		"pattern general": {head + "pattern general\n% a comment\n%\n\n3 3 2\n1 3\n\n 3\t2 \n",
			[][2]int64{{0, 2}, {2, 1}}},
		"no last line end": {head + "pattern general\n3 3 2\n1 3\n3 2",
			[][2]int64{{0, 2}, {2, 1}}},
		"DOS line ends": {strings.ToUpper(head) +
			"REAL GENERAL\r\n3 3 2\r\n1 3 0.5\r\n3 2 -1e-3\r\n", [][2]int64{{0, 2}, {2, 1}}},
		"integer symmetric": {head + "integer symmetric\n3 3 2\n2 2 5\n3 1 6\n",
			[][2]int64{{1, 1}, {2, 0}, {0, 2}}},
		"real skew": {head + "real skew-symmetric\n3 3 1\n3 1 6\n",
			[][2]int64{{2, 0}, {0, 2}}},
		"complex hermitian": {head + "complex hermitian\n3 3 2\n1 1 2 0\n3 1 6 1.5\n",
			[][2]int64{{0, 0}, {2, 0}, {0, 2}}},
		"no entries": {head + "pattern general\n3 3 0\n", nil},
	} {
		for _, ending := range []string{".mtx", ".mtx.gz"} {
			m, err := openMTX(context.Background(), writeText(t, "m"+ending, c.text))
			require.NoError(t, err, name)
			require.Equal(t, int64(3), m.n)
			source, err := m.edges()
			require.NoError(t, err, name)
			got, err := sourceEdges(source)
			require.NoError(t, err, name)
			require.Equal(t, c.want, got, name+ending)
		}
	}
	out := filepath.Join(t.TempDir(), "d")
	in := writeText(t, "m.mtx", head+"real general\n3 3 2\n1 3 1\n3 2 1\n")
	require.NoError(t, MTX(context.Background(), Options{Input: Input{In: in},
		FeatureFn: RandomFeatures, Dim: 2,
		Labels: writeText(t, "y.txt", "0\n1\n0\n"), Output: Output{Out: out}}))
	v := viewOf(t, out)
	require.Equal(t, []int64{0, 0, 1, 2}, v.indptr)
	require.Equal(t, []uint32{2, 0}, v.indices)
	require.Equal(t, []int32{0, 1, 0}, v.labels)
	require.Len(t, v.features, 6)
}

// A file that is cut into parts anywhere gives each entry once.
func TestMTXParts(t *testing.T) {
	defer func(n int64) { textPart = n }(textPart)
	var b strings.Builder
	b.WriteString("%%MatrixMarket matrix coordinate pattern general\n% comment\n1000 1000 500\n")
	var want [][2]int64
	for i := range 500 {
		e := [2]int64{int64(i * i % 1000), int64(i)}
		want = append(want, e)
		fmt.Fprintf(&b, "%d %d\n", e[0]+1, e[1]+1)
	}
	for _, text := range []string{b.String(), strings.TrimSuffix(b.String(), "\n"),
		strings.Replace(b.String(), "\n2 2\n", "\n\n2 2\n", 1)} {
		path := writeText(t, "m.mtx", text)
		for _, size := range []int64{1 << 20, 1500, 500, 97, 31, 8} {
			textPart = size
			m, err := openMTX(context.Background(), path)
			require.NoError(t, err)
			s, err := m.edges()
			require.NoError(t, err)
			require.Equal(t, size > int64(len(text)), s.Parts == 1)
			got, err := sourceEdges(s)
			require.NoError(t, err)
			require.Equal(t, want, got, "parts of %d bytes", size)
		}
		// Cut off at a line's end: said before anything is sorted.
		textPart = 97
		cut := text[:strings.Index(text, "\n2 301\n")+1]
		if cut == "" {
			cut = text[:len(text)/2]
			cut = cut[:strings.LastIndexByte(cut, '\n')+1]
		}
		_, err := openMTX(context.Background(), writeText(t, "m.mtx", cut))
		datasettest.RequireUsage(t, err)
		require.ErrorContains(t, err, "edges, there should be 500: it is truncated")
	}
}

func TestMTXRefuses(t *testing.T) {
	const head = "%%MatrixMarket matrix coordinate "
	gz, err := os.ReadFile(writeText(t, "m.mtx.gz", head+"pattern general\n3 3 2\n1 3\n3 2\n"))
	require.NoError(t, err)
	for name, c := range map[string]struct{ text, want string }{
		"empty":     {"", "m.mtx:0: the file is empty"},
		"no banner": {"3 3 1\n1 1\n", `m.mtx:1: "3 3 1" is not "%%MatrixMarket`},
		"dense": {"%%MatrixMarket matrix array real general\n3 3\n",
			"m.mtx:1: a matrix in array format"},
		"vector": {"%%MatrixMarket vector coordinate real general\n3 1\n",
			"m.mtx:1: a vector in"},
		"other numbers":  {head + "quaternion general\n", `numbers of kind "quaternion"`},
		"other symmetry": {head + "real antisymmetric\n", `symmetry "antisymmetric"`},
		"pattern skew": {head + "pattern skew-symmetric\n",
			"cannot be pattern and skew-symmetric"},
		"real hermitian": {head + "real hermitian\n", "cannot be real and hermitian"},
		"no sizes": {head + "real general\n% a\n",
			"m.mtx:2: the file ends before the line of sizes"},
		"bad sizes": {head + "real general\n3 3\n",
			`m.mtx:2: "3 3" is not "ROWS COLUMNS ENTRIES"`},
		"bipartite": {head + "real general\n3 4 1\n1 1 1\n",
			"m.mtx:2: a matrix of 3 × 4 is a bipartite graph"},
		"column 0": {head + "pattern general\n3 3 2\n1 1\n1 0\n",
			"m.mtx:4: node id 0 in column 2 is outside 1..3"},
		"row 4": {head + "pattern general\n3 3 1\n4 1\n",
			"node id 4 in column 1 is outside 1..3"},
		"a negative row": {head + "pattern general\n3 3 1\n-1 1\n",
			`"-1" is not a node id`},
		"a value is missing": {head + "real general\n3 3 1\n1 1\n",
			`m.mtx:3: "1 1" has 2 columns; 3 are needed`},
		"a value too many": {head + "pattern general\n3 3 1\n1 1 1\n",
			"has 3 columns; 2 are needed"},
		"upper triangle": {head + "pattern symmetric\n3 3 1\n1 2\n",
			"entry (1, 2) is above the diagonal"},
		"diagonal": {head + "real skew-symmetric\n3 3 1\n2 2 1\n",
			"entry (2, 2) is on the diagonal"},
		"too few": {head + "pattern general\n3 3 3\n1 1\n2 2\n",
			"m.mtx has 2 edges, there should be 3"},
		"too many": {head + "pattern general\n3 3 1\n1 1\n2 2\n",
			"m.mtx has 2 edges, there should be 1"},
		"a line without ends": {head + "pattern general\n3 3 1\n" + strings.Repeat("1", 17<<20),
			"line of more than 16777216 bytes"},
		"gz/cut":  {string(gz[:len(gz)-9]), "truncated or damaged"},
		"gz/zstd": {"\x28\xb5\x2f\xfd\x00", "the compressed data ends early"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.mtx")
			if strings.HasPrefix(name, "gz/") {
				path += ".gz"
			}
			require.NoError(t, os.WriteFile(path, []byte(c.text), 0o644))
			out := filepath.Join(t.TempDir(), "d")
			err := MTX(context.Background(), Options{Input: Input{In: path}, Dim: 1,
				Output: Output{Out: out}})
			datasettest.RequireUsage(t, err)
			require.ErrorContains(t, err, path)
			require.ErrorContains(t, err, c.want)
			require.NoDirExists(t, out)
		})
	}
	path := writeText(t, "m.mtx", head+"pattern general\n3 3 1\n1 1\n")
	err = MTX(context.Background(), Options{Input: Input{In: path}, Nodes: 4,
		Output: Output{Out: filepath.Join(t.TempDir(), "d")}})
	datasettest.RequireUsage(t, err)
	require.ErrorContains(t, err, "option nodes 4: "+path+" has 3")
}
