package importer

import (
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
)

const (
	hostileNodes = "user,age,group\na,1,x\nb,2,y\nc,3,x\nd,4,y\ne,5,x\n"
	hostileEdges = "who,whom\na,b\nb,c\nc,d\nd,e\ne,a\n"
)

// hostileTables tries tables, each of which is refused.
type hostileTables struct {
	t     *testing.T
	o     TablesOptions
	tried int
}

// refuse imports nodes and edges, and wants an error that says so and leaves nothing.
func (h *hostileTables) refuse(what string, nodes, edges []byte, say ...string) {
	t := h.t
	h.tried++
	require.NoError(t, os.WriteFile(h.o.Nodes, nodes, 0o644))
	require.NoError(t, os.WriteFile(h.o.Edges, edges, 0o644))
	err := importTables(h.o)
	if !assert.Error(t, err, what) {
		require.NoError(t, os.RemoveAll(h.o.Out))
		return
	}
	for _, s := range say {
		assert.ErrorContains(t, err, s, what)
	}
	assert.Contains(t, []errs.Class{errs.Usage, errs.Capability}, errs.ClassOf(err), "%s: %v", what, err)
	assert.NotContains(t, err.Error(), "runtime error", what)
	assert.Less(t, len(err.Error()), 1000, what)
	left, err2 := os.ReadDir(filepath.Dir(h.o.Out))
	assert.NoError(t, err2)
	assert.Empty(t, left, "%s: %v", what, err)
}

// packers compress as people do.
var packers = map[string]func(io.Writer) io.WriteCloser{
	"gz":  func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"lz4": func(w io.Writer) io.WriteCloser { return lz4.NewWriter(w) },
	"zst": func(w io.Writer) io.WriteCloser {
		z, err := zstd.NewWriter(w)
		if err != nil {
			panic(err)
		}
		return z
	},
}

func pack(t *testing.T, kind string, write func(w io.Writer)) []byte {
	var b bytes.Buffer
	w := packers[kind](&b)
	write(w)
	require.NoError(t, w.Close())
	return b.Bytes()
}

// peakHeap runs fn and returns by how much the heap that Go holds has grown.
func peakHeap(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.HeapSys - min(after.HeapSys, before.HeapSys)
}

// TestHostileTables: tables that are wrong in any way are refused by file, line and column, within
// memory. Descriptions, Parquet and Arrow have tests of their own.
func TestHostileTables(t *testing.T) {
	dir := t.TempDir()
	h := &hostileTables{t: t, o: tableFiles(t, word, 1, 1)}
	h.o.Nodes, h.o.Edges = filepath.Join(dir, "n.csv"), filepath.Join(dir, "e.csv")
	h.o.Out = filepath.Join(t.TempDir(), "g")
	require.NoError(t, h.o.Transform.UnmarshalText([]byte("age=standard")))
	require.Less(t, peakHeap(func() {
		h.text()
		h.json()
		h.packed()
	}), uint64(600<<20))
	if !wide.Lean() {
		require.GreaterOrEqual(t, h.tried, 200)
	}
}

// change is hostileNodes with its line of b, or its heading, replaced.
func change(from, to string) []byte { return []byte(strings.Replace(hostileNodes, from, to, 1)) }

func (h *hostileTables) text() {
	edges := []byte(hostileEdges)
	for to, say := range map[string][]string{
		"b,2":                                    {"n.csv:3: 2 cells, and 3 columns are named"},
		"b,2,y,z":                                {"n.csv:3: 4 cells"},
		"":                                       {"n.csv:3: the line is empty"},
		"b":                                      {"n.csv:3: 1 cells"},
		"b;2;y":                                  {"n.csv:3: 1 cells", "separated by commas"},
		"b\t2\ty":                                {"n.csv:3: 1 cells"},
		"b|2|y":                                  {"n.csv:3: 1 cells"},
		",2,y":                                   {"n.csv:3, column user: the id is missing"},
		"a,2,y":                                  {"n.csv:3, column user: a is the id of"},
		"\"b,2,y":                                {"n.csv:3: a quoted cell does not end"},
		"b,\"2\"x,y":                             {"n.csv:3: text behind a quoted cell"},
		"b,2\",y":                                {"n.csv:3: a quote within a cell"},
		"b,,y":                                   {"n.csv:3, column age: no value; choose"},
		"b,two,y":                                {"n.csv:3, column age: two is no number"},
		"b,0x10,y":                               {"n.csv:3, column age"},
		"b,1_000,y":                              {"n.csv:3, column age"},
		"b,nan,y":                                {"n.csv:3, column age"},
		"b,inf,y":                                {"n.csv:3, column age"},
		"b,-Infinity,y":                          {"n.csv:3, column age"},
		"b,1e400,y":                              {"n.csv:3, column age"},
		"b,1e39,y":                               {"n.csv:3, column age"},
		"b,\"1,5\",y":                            {"n.csv:3, column age: 1,5 is no number"},
		"b,1 000,y":                              {"n.csv:3, column age"},
		"b,１,y":                                  {"n.csv:3, column age"},
		"b,2,":                                   {"n.csv:3, column group: no label"},
		"\xff,2,y":                               {"n.csv:3: column user: ", "is no UTF-8"},
		"b,\xff,y":                               {"n.csv:3: column age: ", "is no UTF-8"},
		"b,2,\xc3":                               {"n.csv:3: column group: ", "is no UTF-8"},
		"b,2,\xed\xa0\x80":                       {"n.csv:3: column group: ", "is no UTF-8"},
		"b,2,\xc0\xaf":                           {"n.csv:3: column group: ", "is no UTF-8"},
		"\x00,2,y":                               {"n.csv:3: a byte of 0"},
		"b,2\x00,y":                              {"n.csv:3: a byte of 0"},
		"b,2,y\x00":                              {"n.csv:3: a byte of 0"},
		strings.Repeat("b", 70000) + ",2,y":      {"n.csv:3, column user"},
		"b,2," + strings.Repeat("y", 70000):      {"n.csv:3, column group: "},
		"b,2,y" + strings.Repeat(",", 1<<16):     {"n.csv:3: 65539 cells"},
		"b," + strings.Repeat("2", 1<<20) + ",y": {"n.csv:3, column age"},
	} {
		what := to[:min(len(to), 40)]
		h.refuse(what, change("b,2,y", to), edges, say...)
		// The same in a table of tabs.
		if !wide.Lean() && !strings.ContainsAny(to, "\t\";") && !strings.Contains(to, "1,5") && to != "b|2|y" {
			tabs := strings.ReplaceAll(string(change("b,2,y", to)), ",", "\t")
			h.refuse("tabs: "+what, []byte(tabs), edges, strings.ReplaceAll(say[0], "1,5", "1.5"))
		}
	}
	for from, say := range map[string][]string{
		"":                              {"n.csv is empty"},
		"\n":                            {"n.csv"},
		"user,age,group":                {"n.csv", "has no rows"},
		"user,age,group\n":              {"n.csv", "has no rows"},
		"\xef\xbb\xbf":                  {"n.csv"},
		"1,2,3\n4,5,6\n":                {"n.csv:1: the line should name the columns"},
		"User,age,group\na,1,x\n":       {`n.csv has no column "user"`},
		"user;age;group\na,1,x\n":       {"n.csv:2: 1 cells"},
		"user,age,group\ra,1,x\rb,2,y":  {"n.csv:1: lines end in carriage returns alone"},
		"\"user,age,group\na,1,x\n":     {"n.csv"},
		"us\xffer,age,group\na,1,x\n":   {"n.csv:1", "UTF-8"},
		"\xff\xfeu\x00s\x00e\x00r\x00":  {"n.csv is text in UTF-16"},
		"u\x00s\x00e\x00r\x00":          {"n.csv:1: a byte of 0"},
		"<html><body>404</body></html>": {"n.csv"},
		"%PDF-1.4\n":                    {"n.csv is a PDF document"},
		"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n": {"n.csv", "LFS"},
		strings.Repeat(",", 1<<19) + "\n":                                    {"n.csv:1: 524289 columns; at most"},
		strings.Repeat("user,", 1<<12) + "age\n":                             {"n.csv"},
		"PAR1":                                                               {"n.csv"},
		"ARROW1\x00\x00":                                                     {"n.csv"},
		"\x89HDF\r\n\x1a\n":                                                  {"n.csv is an HDF5 file"},
		"PK\x03\x04":                                                         {"n.csv is a zip archive"},
		"\x80\x04\x95\x00\x00.":                                              {"n.csv is a pickle"},
		"user,age,group\n" + strings.Repeat("\n", 1<<20) + "a,1,x": {"n.csv:2: the line is empty"},
		strings.Repeat("#\n", 1<<16):                               {"n.csv is empty"},
	} {
		h.refuse(from[:min(len(from), 40)], []byte(from), edges, say...)
	}
	for to, say := range map[string][]string{
		"b,z":                             {"e.csv:3, column whom: there is no node z"},
		"z,c":                             {"e.csv:3, column who: there is no node z"},
		"B,c":                             {"e.csv:3, column who: there is no node B"},
		" b,c":                            {"e.csv:3, column who: there is no node"},
		"b":                               {"e.csv:3: 1 cells"},
		"b,c,1":                           {"e.csv:3: 3 cells"},
		"b,":                              {"e.csv:3, column whom: the id is missing"},
		",c":                              {"e.csv:3, column who: the id is missing"},
		",":                               {"e.csv:3, column who: the id is missing"},
		"":                                {"e.csv:3: the line is empty"},
		"\"b,c":                           {"e.csv:3: a quoted cell does not end"},
		"b\x00,c":                         {"e.csv:3: a byte of 0"},
		"\xff,c":                          {"e.csv:3: column who: ", "is no UTF-8"},
		"b,\xff":                          {"e.csv:3: column whom: ", "is no UTF-8"},
		"b\tc":                            {"e.csv:3: 1 cells"},
		"b c":                             {"e.csv:3: 1 cells"},
		strings.Repeat("b", 1<<20) + ",c": {"e.csv:3, column who"},
	} {
		h.refuse("edges: "+to[:min(len(to), 40)], []byte(hostileNodes),
			[]byte(strings.Replace(hostileEdges, "b,c", to, 1)), say...)
	}
	for text, say := range map[string][]string{
		"": {"e.csv is empty"}, "who": {`e.csv has no column "whom"`}, "a,b\nb,c\n": {`e.csv has no column "who"`},
		"who,who\na,b\n": {`e.csv has no column "whom"`}, "1,2\n": {"e.csv:1: the line should name"},
	} {
		h.refuse("edges: "+text, []byte(hostileNodes), []byte(text), say...)
	}
}

func (h *hostileTables) json() {
	edges := []byte("who,whom\na,b\nb,c\n")
	for line, say := range map[string]string{
		`{"user":"b","age":2,"group":"y"`:                "n.csv:2",
		`{"user":"b","age":2,"group":"y"}}`:              "n.csv:2: text behind the object",
		`{"user":"b","age":2,"group":"y"} {}`:            "n.csv:2: text behind the object",
		`[1,2]`:                                          "n.csv:2: the line is no JSON object",
		`null`:                                           "n.csv:2: the line is no JSON object",
		`"b"`:                                            "n.csv:2: the line is no JSON object",
		`{"user":"b","age":2,"group":{"a":1}}`:           "n.csv:2: member group: an object within an object",
		`{"user":"b","age":[2],"group":"y"}`:             "n.csv:",
		`{"user":["b"],"age":2,"group":"y"}`:             "n.csv:",
		`{"user":"b","user":"c","age":2,"group":"y"}`:    "n.csv:2: member user: stands twice",
		`{"age":2,"group":"y"}`:                          "n.csv:2, column user: the id is missing",
		`{"user":null,"age":2,"group":"y"}`:              "n.csv:2, column user: the id is missing",
		`{"user":"","age":2,"group":"y"}`:                "n.csv:2, column user: the id is missing",
		`{"user":"a","age":2,"group":"y"}`:               "n.csv:2, column user: a is the id of",
		`{"user":"b","age":"two","group":"y"}`:           "n.csv:2, column age: two is no number",
		`{"user":"b","age":true,"group":"y"}`:            "n.csv:2, column age",
		`{"user":"b","age":NaN,"group":"y"}`:             "n.csv:2",
		`{"user":"b","age":1e999,"group":"y"}`:           "n.csv:2, column age",
		`{"user":"b","age":null,"group":"y"}`:            "n.csv:2, column age: no value; choose",
		`{"user":"b","age":2}`:                           "n.csv:2, column group: no label",
		`{user:"b"}`:                                     "n.csv:2",
		`{'user':'b'}`:                                   "n.csv:2",
		`{"user":"b",}`:                                  "n.csv:2",
		`{"user":"b","age":2,"group":"\ud800`:            "n.csv:2",
		"{\"user\":\"b\x00\",\"age\":2,\"group\":\"y\"}": "n.csv:2: a byte of 0",
		"{\"user\":\"b\",\"age\":2,\"group\":" + strings.Repeat("[", 20000): "n.csv:2",
		strings.Repeat(`{"a":`, 20000):                                      "n.csv:2",
		`{"user":"` + strings.Repeat("b", 1<<20) + `","age":2,"group":"y"}`: "n.csv:2, column user",
	} {
		text := `{"user":"a","age":1,"group":"x"}` + "\n" + line + "\n" + `{"user":"c","age":3,"group":"x"}` + "\n"
		h.refuse(line[:min(len(line), 60)], []byte(text), edges, say)
	}
	for text, say := range map[string]string{
		"{":            "n.csv",
		"{}":           "n.csv: the objects have no members",
		"{}\n{}\n":     "n.csv: the objects have no members",
		`{"user":"a"}`: `has no column "group"`,
		`{"user":"a","age":1,"group":"x"}` + strings.Repeat("\n", 1<<20) + "{": "n.csv:1048577",
	} {
		h.refuse(text[:min(len(text), 40)], []byte(text), edges, say)
	}
	var wide strings.Builder
	wide.WriteString("{")
	for i := range 1 << 18 {
		fmt.Fprintf(&wide, `"%d":1,`, i)
	}
	h.refuse("wide", []byte(wide.String()+`"user":"a"}`), edges, "columns")
}

// packed are tables that are cut, damaged, of another kind, or enormous within their compression.
func (h *hostileTables) packed() {
	t, edges, r := h.t, []byte(hostileEdges), rand.New(rand.NewPCG(5, 6))
	many := hostileNodes
	for i := range 2000 {
		many += fmt.Sprintf("%s,%d,%s\n", word(i+10), r.IntN(100), []string{"x", "y"}[r.IntN(2)])
	}
	all := map[string][]byte{}
	for kind := range packers {
		all[kind] = pack(t, kind, func(w io.Writer) {
			_, err := io.WriteString(w, many)
			require.NoError(t, err)
		})
		inner := pack(t, kind, func(w io.Writer) {
			_, err := w.Write(all[kind])
			require.NoError(t, err)
		})
		h.refuse(kind+" twice", inner, edges, "n.csv is ", "compressed; unpack it first")
		other := pack(t, kind, func(w io.Writer) {
			_, err := io.WriteString(w, "PAR1\x15\x04\x00\x00")
			require.NoError(t, err)
		})
		h.refuse(kind+" Parquet", other, edges, "n.csv is a Parquet file, compressed")
		if kind != "lz4" && wide.Lean() {
			continue
		}
		// 40 MiB without a line feed, in a few kilobytes.
		bomb := pack(t, kind, func(w io.Writer) {
			_, err := io.WriteString(w, "user,age,group\na,1,x\n")
			for range 40 {
				require.NoError(t, err)
				_, err = w.Write(bytes.Repeat([]byte{'7'}, 1<<20))
			}
			require.NoError(t, err)
		})
		h.refuse(kind+" bomb", bomb, edges, "n.csv:3: a record of more than 16 MiB")
	}
	for kind, text := range map[string]string{ // of "0,1\n1,2\n"; 46 million times a
		"bz2": "425a6839314159265359bca2513100000258000010000470002000221e8d0668152a185dc914e14242f28944c4",
		"xz": "fd377a585a000004e6d6b4460200210116000000742fe5a3010007302c310a312c320a00032d51bc33541eac00012008bb19d9" +
			"bb1fb6f37d010000000004595a",
		"bz2 bomb": "425a6839314159265359c26d2af3015f8e0100a0000008200030804d4642a025a90a8097177245385090c26d2af3",
	} {
		b, err := hex.DecodeString(text)
		require.NoError(t, err)
		if kind == "bz2 bomb" {
			if wide.Lean() {
				continue
			}
			h.refuse(kind, b, edges, "n.csv:1: a record of more than 16 MiB")
			continue
		}
		all[kind] = b
	}
	for kind, b := range all {
		for _, n := range []int{7, 12, len(b) / 2, len(b) - 5, len(b) - 1} {
			h.refuse(fmt.Sprint(kind, " cut at ", n), b[:min(n, len(b)-1)], edges, "n.csv")
		}
		for range 4 { // a checksum is at the end of all
			bad := bytes.Clone(b)
			bad[len(bad)/2+r.IntN(len(bad)/4)] ^= byte(1 << r.IntN(8))
			h.refuse(kind+" flipped", bad, edges, "n.csv")
		}
	}
}
