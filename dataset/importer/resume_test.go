package importer

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/edges"
	"helios/dataset/seal"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/philox"
	"helios/internal/testing/datasettest"
)

// resumeInput is a directory with edges, features and labels, large enough for many runs in the
// least memory.
func resumeInput(t testing.TB) string {
	const nodes, edges = 2000, 9_000
	e, f := make([]int32, 2*edges), make([]float32, nodes*40)
	for i := range e {
		e[i] = int32(philox.Mix(uint64(i)) % nodes)
	}
	for i := range f {
		f[i] = float32(i % 977)
	}
	return datasettest.WriteDir(t, map[string]datasettest.Arr{
		"edge_index": {DT: "<i4", Shape: []int64{2, edges}, Data: e},
		"features":   {DT: "<f4", Shape: []int64{nodes, 40}, Data: f},
		"labels":     {DT: "<i4", Shape: []int64{nodes}, Data: make([]int32, nodes)},
	})
}

// TestImportResume ends an import before and after each line of its journal, as a kill would, again
// and again, and compares what comes out with an import that was left alone.
func TestImportResume(t *testing.T) {
	defer func(d func([]byte,
		bool) error) {
		build.JournalStep, edges.SyncEvery = d, 10e9
	}(build.JournalStep)
	edges.SyncEvery = 0
	in := resumeInput(t)
	o := Options{Input: Input{In: in}, SelfLoops: "add", Undirected: true, Output: Output{Memory: 1}}
	o.Out = filepath.Join(t.TempDir(), "g")
	kinds := map[string]int{}
	build.JournalStep = func(line []byte, written bool) error {
		for _, k := range []string{"begin", "source", "run", "replaces", "merged", "topology",
			"done", "partial"} {
			if bytes.Contains(line, []byte(`"`+k+`":`)) {
				kinds[k]++
			}
		}
		return nil
	}
	require.NoError(t, plain(NPY)(bg, o))
	want, steps := datasettest.Digest(t, o.Out), 0
	for _, k := range []string{"begin", "source", "run", "replaces", "merged", "topology", "done",
		"partial"} {
		require.NotZero(t, kinds[k], "no line of kind %s: the test would not see it", k)
	}

	// Once to the end, ended at every step on the way: each run goes one line further.
	o.Out = filepath.Join(t.TempDir(), "g")
	var notes []string
	o.Note = func(s errs.Text) { notes = append(notes, s.String()) }
	for done := false; !done; steps++ {
		require.Less(t, steps, 600)
		n := 0
		build.JournalStep = func(line []byte, written bool) error {
			if bytes.Contains(line, []byte(`"begin"`)) || bytes.Contains(line, []byte(`"source"`)) {
				return nil
			}
			if n++; n > (steps+1)%2 { // before the first line of this run, or after it
				return context.Canceled
			}
			return nil
		}
		err := plain(NPY)(bg, o)
		if done = err == nil; !done {
			require.ErrorIs(t, err, context.Canceled)
			require.Zero(t, hostmem.Usage()["edge sort"])
		}
	}
	require.Greater(t, steps, 20)
	require.Equal(t, want, datasettest.Digest(t, o.Out))
	require.Contains(t, strings.Join(notes, "\n"), "% of the edges")
	require.NotRegexp(t, "(10[1-9]|1[1-9][0-9]) %", strings.Join(notes, "\n"))
	require.Contains(t, strings.Join(notes, "\n"), "% of the merge of edges")
	require.Contains(t, strings.Join(notes, "\n"), "of the features")

	// A single end at each of some steps, then straight on; the last line torn, as by a crash.
	for _, stop := range []int{3, 9, 26, 60} {
		root := t.TempDir()
		o.Out = filepath.Join(root, "g")
		n := 0
		build.JournalStep = func(line []byte, written bool) error {
			if n++; n >= stop {
				return context.Canceled
			}
			return nil
		}
		require.ErrorIs(t, plain(NPY)(bg, o), context.Canceled)
		build.JournalStep = nil
		dirs, err := filepath.Glob(o.Out + ".partial-*")
		require.NoError(t, err)
		if stop == 3 {
			require.Empty(t, dirs, "nothing was done yet")
			continue
		}
		require.Len(t, dirs, 1)
		datasettest.RequireNoFDs(t, root)
		f, err := os.OpenFile(filepath.Join(dirs[0], build.JournalName), os.O_WRONLY|os.O_APPEND, 0)
		require.NoError(t, err)
		_, err = f.WriteString(`{"run":{"id":99,"keys":`)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.NoError(t, os.WriteFile(filepath.Join(dirs[0], "sort-98.tmp"),
			[]byte("half a run"), 0o644))
		require.NoError(t, plain(NPY)(bg, o))
		require.Equal(t, want, datasettest.Digest(t, o.Out))
		entries, err := os.ReadDir(root)
		require.NoError(t, err)
		require.Len(t, entries, 1, "only the dataset is left")
	}
}

// TestImportStartsOver: the remains of an interrupted import are not resumed when the input or an
// option is another, when it is damaged, or when it is asked for; and is left alone while in use.
func TestImportStartsOver(t *testing.T) {
	defer func() { build.JournalStep = nil }()
	begin := func() (o Options, partial string) {
		o = Options{Input: Input{In: resumeInput(t)},
			Output: Output{Out: filepath.Join(t.TempDir(), "g"), Memory: 1}}
		n := 0
		build.JournalStep = func([]byte, bool) error {
			if n++; n > 12 {
				return context.Canceled
			}
			return nil
		}
		err := plain(NPY)(bg, o)
		build.JournalStep = nil
		require.ErrorIs(t, err, context.Canceled)
		var kept *KeptError
		require.ErrorAs(t, err, &kept)
		require.Contains(t, kept.Where, "of the edges")
		dirs, err := filepath.Glob(o.Out + ".partial-*")
		require.NoError(t, err)
		require.Len(t, dirs, 1)
		return o, dirs[0]
	}
	for name, c := range map[string]struct {
		change func(o *Options, dir string)
		note   string
	}{
		"nothing":     {func(*Options, string) {}, "going on"},
		"more memory": {func(o *Options, _ string) { o.Memory = 1 << 20 }, "going on"},
		"restart":     {func(o *Options, _ string) { o.Restart = true }, "option restart"},
		"option":      {func(o *Options, _ string) { o.Dedup = true }, "its input or options"},
		"touched file": {func(o *Options, _ string) {
			require.NoError(t, os.Chtimes(filepath.Join(o.In, "labels.npy"), time.Unix(9, 0),
				time.Unix(9, 0)))
		}, "its input or options"},
		"other input": {func(o *Options, _ string) { o.In = resumeInput(t) },
			"its input or options"},
		"run gone": {func(_ *Options,
			dir string) {
			removeGlob(t, filepath.Join(dir, "sort-*.tmp"))
		}, "no such file"},
		"run cut": {func(_ *Options, dir string) {
			// A run that the journal has: which ones it has got to depends on the sorters' turns.
			journal, err := os.ReadFile(filepath.Join(dir, build.JournalName))
			require.NoError(t, err)
			cut := 0
			for _, m := range regexp.MustCompile(`"run":\{"id":(\d+)`).FindAllSubmatch(journal,
				-1) {
				if os.Truncate(filepath.Join(dir, "sort-"+string(m[1])+".tmp"), 100) == nil {
					cut++
				}
			}
			require.Positive(t, cut)
		}, ".tmp has 100 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			o, dir := begin()
			c.change(&o, dir)
			var notes []string
			o.Note = func(s errs.Text) { notes = append(notes, s.String()) }
			require.NoError(t, plain(NPY)(bg, o))
			require.Len(t, notes, 2)
			require.Contains(t, notes[0], c.note)
			entries, err := os.ReadDir(filepath.Dir(o.Out))
			require.NoError(t, err)
			require.Len(t, entries, 1)
			fresh := o
			fresh.Out, fresh.Note = filepath.Join(t.TempDir(), "g"), nil
			require.NoError(t, plain(NPY)(bg, fresh))
			require.Equal(t, datasettest.Digest(t, fresh.Out), datasettest.Digest(t, o.Out))
		})
	}
	o, dir := begin()
	f, err := os.Open(dir)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	require.NoError(t, plain(NPY)(bg, o))
	require.DirExists(t, dir, "another import is at it")
	require.NoError(t, f.Close())

	// Errors are no interruptions: nothing is kept.
	o.Out = filepath.Join(t.TempDir(), "g")
	build.WriteFault = func(path string) error {
		if strings.HasSuffix(path, "sort-6.tmp") {
			return unix.ENOSPC
		}
		return nil
	}
	defer func() { build.WriteFault = nil }()
	require.ErrorIs(t, plain(NPY)(bg, o), unix.ENOSPC)
	datasettest.RequireEmpty(t, filepath.Dir(o.Out))
}

func removeGlob(t testing.TB, pattern string) {
	found, err := filepath.Glob(pattern)
	require.NoError(t, err)
	require.NotEmpty(t, found)
	for _, p := range found {
		require.NoError(t, os.Remove(p))
	}
}

// slowEdges parses an edge list in the plain way: the reference of the fast parser.
func slowEdges(h *edgeHead, text []byte, ids idRange) (all []edges.Edge, bad int) {
	for n, line := range bytes.Split(bytes.TrimPrefix(text, byteOrderMark), []byte{'\n'}) {
		line = bytes.TrimSpace(line)
		if int64(n+1) < h.line || len(line) == 0 || isComment(line) {
			continue
		}
		cells, data, err := edgeCells(&splitter{sep: h.sep}, line)
		if err != nil || len(cells) != h.cols || data != nil && !h.data {
			return all, n + 1
		}
		s, ok1 := parseID(cells[h.ends[0]])
		d, ok2 := parseID(cells[h.ends[1]])
		if !ok1 || !ok2 || s >= ids.nodes || d >= ids.nodes {
			return all, n + 1
		}
		all = append(all, edges.Edge{Dst: uint64(d), Src: uint64(s)})
	}
	return all, 0
}

// fastEdges reads a file by parts, and as .gz.
func fastEdges(t testing.TB, h *edgeHead, path string, ids idRange) ([]edges.Edge, error) {
	var got []edges.Edge
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	collect := func(src, dst []int64) error {
		for i := range src {
			got = append(got, edges.Edge{Dst: uint64(dst[i]), Src: uint64(src[i])})
		}
		return nil
	}
	units := int64(0)
	var comments atomic.Int64
	read := func(path string) error {
		s, err := textSource(path, h, ids, &comments)
		require.NoError(t, err)
		for part := range s.Parts {
			if err := s.Read(bg, part, collect, func(n int64) { units += n }); err != nil {
				return err
			}
		}
		return nil
	}
	if err := read(path); err != nil {
		return got, err
	}
	require.EqualValues(t, len(text), units, "progress")
	all := got
	got = nil
	zipped := path + ".gz"
	require.NoError(t, os.WriteFile(zipped, []byte(gz(t, string(text))), 0o644))
	require.NoError(t, read(zipped))
	require.Equal(t, all, got, "plain and .gz")
	return all, nil
}

// FuzzEdgeText: the fast parser takes what the plain one takes and refuses the same line, for parts
// and blocks so small that they end anywhere.
func FuzzEdgeText(f *testing.F) {
	for _, s := range []string{"0 1\n2,3\n", "# c\nsrc;dst\n5;6\n", "1\t2\r\n3\t4",
		"1,2,1\n\n%x\n 7 , 8 ,9\n", "1,2\n3\n", "0 99999999999999999999\n", "1  2\n1 \t 2\n1 2 \n",
		"a,b\nc,d\n", "1,2,x y\n3,4,", "1,\n", "12345678 1\n1 2\n", "18446744073709551617 1\n",
		"#23456789", "\xef\xbb\xbf0 1\n2 3\n", "\xef\xbb\xbf# c\nto,from\n1,2\n3, 4",
		" \xef\xbb\xbf1 2\n", ",src,dst\n0,1,2\n1,3,4\n", "dst,w,src\n1,0.5,2\n3,x,4\n",
		"\"src\",\"dst\"\n\"1\",\"2\"\n3,4\n", "0 1 {}\n1 2 {'weight': 3}\n2 3\n",
		"w t to from\n0 0 1 2\n 5 6  7 8 \n", "0,0A00,", "A A to from\n 0 0 0",
		strings.Repeat("# long comment line\n", 9) + "src dst\n1 2\n"} {
		f.Add([]byte(s), uint8(3), uint8(9), uint16(50))
	}
	f.Fuzz(func(t *testing.T, text []byte, part, block uint8, nodes uint16) {
		defer func(p int64, b int) { textPart, blockBytes = p, b }(textPart, blockBytes)
		textPart, blockBytes = int64(part)+1, int(block)+1
		ids := idRange{nodes: int64(nodes) + 1, known: true}
		path := writeText(t, "e.txt", string(text))
		im := &edgesImport{importer: &importer{}, edges: path,
			opt: EdgesOptions{IgnoreColumns: nodes%2 == 0}}
		h, err := im.readEdgeHead(path)
		if err != nil || h.empty {
			return
		}
		want, bad := slowEdges(h, text, ids)
		got, err := fastEdges(t, h, path, ids)
		if bad > 0 {
			require.ErrorContains(t, err, fmt.Sprintf("e.txt:%d: ", bad))
			require.Equal(t, errs.Usage, errs.ClassOf(err))
			return
		}
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

// TestImportEdgeRules compares options with a reference, through the whole import.
func TestImportEdgeRules(t *testing.T) {
	const nodes = 40
	var text strings.Builder
	var all []edges.Edge
	for i := range uint64(600) {
		x := edges.Edge{Dst: philox.Mix(i) % nodes, Src: philox.Mix(i+1e6) % nodes}
		all = append(all, x)
		fmt.Fprintf(&text, "%d %d\n", x.Src, x.Dst)
	}
	file := filepath.Join(t.TempDir(), "e.txt")
	require.NoError(t, os.WriteFile(file, []byte(text.String()), 0o644))
	for i := range 24 {
		o := Options{Input: Input{In: file}, SelfLoops: []string{"keep", "drop", "add"}[i/8], Dim: 1,
			FeatureFn: RandomFeatures, Nodes: nodes,
			Undirected: i&1 > 0, AddReverse: i&2 > 0, Dedup: i&4 > 0,
			Output: Output{Out: filepath.Join(t.TempDir(), "g"),
				Memory: int64(i%2) << 30}}
		require.NoError(t, plain(Edges)(bg, o))
		want := sortedByRules(all, nodes, o.rules())
		v := viewOf(t, o.Out)
		var got []edges.Edge
		for d := range nodes {
			for _, s := range v.indices[v.indptr[d]:v.indptr[d+1]] {
				got = append(got, edges.Edge{Dst: uint64(d), Src: uint64(s)})
			}
		}
		require.Equal(t, want, got, "%+v", o)
		c := datasettest.Open(t, o.Out).Meta.Source.Counts
		loops := int64(len(slices.DeleteFunc(slices.Clone(want),
			func(x edges.Edge) bool { return x.Src != x.Dst })))
		if o.SelfLoops == "add" {
			require.EqualValues(t, nodes, loops)
			require.EqualValues(t, nodes, c["self-loops-added"])
		}
		if o.SelfLoops == "drop" {
			require.Zero(t, loops)
		}
	}
	o := Options{Input: Input{In: file}, SelfLoops: "some",
		Output: Output{Out: filepath.Join(t.TempDir(), "g")}}
	datasettest.RequireUsage(t, plain(Edges)(bg, o))
	// Ids far apart are told.
	require.NoError(t, os.WriteFile(file, []byte("0 1\n900000 5\n"), 0o644))
	o.SelfLoops, o.FeatureFn, o.Dim = "", RandomFeatures, 1
	said := ""
	o.Note = func(s errs.Text) { said += s.String() }
	require.NoError(t, plain(Edges)(bg, o))
	require.Contains(t, said, "sparse")

}

func BenchmarkEdgeText(b *testing.B) {
	var text []byte
	for i := range uint64(400_000) {
		text = fmt.Appendf(text, "%d\t%d\n", philox.Mix(i)%20_000_000, philox.Mix(i+7e6)%20_000_000)
	}
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		t := &edgeText{edgeColumns: edgeColumns{sep: '\t', cols: 2},
			idRange: idRange{nodes: 1 << 30}, emit: func(_, _ []int64) error { return nil }}
		require.NoError(b, t.lines(lineBlock{text: text}))
	}
}

// sortedByRules returns what the rules make of edges, by sorting in memory.
func sortedByRules(all []edges.Edge, nodes int64, r edges.Rules) []edges.Edge {
	var want []edges.Edge
	for _, x := range all {
		if x.Src == x.Dst && (r.NoSelf || r.AddSelf) {
			continue
		}
		want = append(want, x)
		if r.Opposite && x.Src != x.Dst {
			want = append(want, edges.Edge{Dst: x.Src, Src: x.Dst})
		}
	}
	for v := range nodes {
		if r.AddSelf {
			want = append(want, edges.Edge{Dst: uint64(v), Src: uint64(v)})
		}
	}
	slices.SortFunc(want, func(a, b edges.Edge) int {
		return cmp.Or(cmp.Compare(a.Dst, b.Dst), cmp.Compare(a.Src, b.Src))
	})
	if r.Dedup {
		want = slices.Compact(want)
	}
	return want
}

// Wherever an import ends, the one that goes on seals the same files; and a part that rotted in
// between is found.
func TestSealResumedImport(t *testing.T) {
	in := datasettest.WriteDir(t, datasettest.GoodArrays())
	whole := filepath.Join(t.TempDir(), "whole")
	require.NoError(t, importNPY(whole, in))
	wantSeal, err := os.ReadFile(filepath.Join(whole, seal.Name))
	require.NoError(t, err)
	stop := errors.New("stop")
	defer func() { build.JournalStep = nil }()
	cut := 0
	for _, rot := range []bool{false, true} {
		for line := 1; ; line++ {
			out := filepath.Join(t.TempDir(), "whole")
			n := 0
			build.JournalStep = func(_ []byte, written bool) error {
				if n++; n == line {
					return errors.Join(stop, context.Canceled)
				}
				return nil
			}
			err := importNPY(out, in)
			build.JournalStep = nil
			if err == nil {
				break
			}
			require.ErrorIs(t, err, stop)
			parts, err := filepath.Glob(out + dataset.PartialMark + "*/features.npy")
			require.NoError(t, err)
			kept := false
			if rot && len(parts) == 1 {
				text, err := os.ReadFile(filepath.Join(filepath.Dir(parts[0]), build.JournalName))
				require.NoError(t, err)
				kept = strings.Contains(string(text), `{"array":"features","done"`)
				datasettest.FlipBit(t, parts[0], 128+4)
			}
			err = importNPY(out, in)
			if kept {
				cut++
				require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
				require.ErrorContains(t, err, "features.npy is not what was written")
				continue
			}
			require.NoError(t, err)
			got, err := os.ReadFile(filepath.Join(out, seal.Name))
			require.NoError(t, err)
			require.Equal(t, wantSeal, got)
		}
	}
	require.Positive(t, cut)
}

func importNPY(out, in string) error {
	return plain(NPY)(bg, Options{Input: Input{In: in}, Output: Output{Out: out, Seed: 1,
		Memory: 64 << 20}})
}

// TestTextResume ends an import of text, whose ids count from 1 or have gaps, at each line of its
// journal. A resumed import makes the same dataset; and but for ids.npy it is that of the same
// graph with ids from 0: features, classes and the splits that are dealt follow the nodes.
func TestTextResume(t *testing.T) {
	defer func(d func([]byte, bool) error) {
		build.JournalStep, edges.SyncEvery = d, 10e9
	}(build.JournalStep)
	edges.SyncEvery = 0
	const nodes = 60
	var want *view
	for _, c := range []struct {
		name string
		id   func(v uint64) uint64
		set  func(*EdgesOptions)
	}{
		{"from 0", func(v uint64) uint64 { return v }, nil},
		{"from 1", func(v uint64) uint64 { return v + 1 }, func(o *EdgesOptions) { o.Base = "1" }},
		{"gaps", func(v uint64) uint64 { return 7 + v*v*v<<30 },
			func(o *EdgesOptions) { o.Renumber = true }},
	} {
		t.Run(c.name, func(t *testing.T) {
			var e, x, y strings.Builder
			x.WriteString("id,a,b\n")
			y.WriteString("id,label\n")
			for i := range uint64(nodes) {
				v := i * 7 % nodes // in another order than the nodes
				fmt.Fprintf(&x, "%d,%d,.5\n", c.id(v), v)
				fmt.Fprintf(&y, "%d,%d\n", c.id(v), v%5)
				for k := range uint64(9) {
					fmt.Fprintf(&e, "%d %d\n", c.id(v), c.id((v+k*k+1)%nodes))
				}
			}
			o := EdgesOptions{Options: Options{Input: Input{In: writeText(t, "e.txt", e.String())},
				Features: writeText(t, "x.csv", x.String()), Labels: writeText(t, "y.csv", y.String()),
				Output: Output{Memory: 1, Out: filepath.Join(t.TempDir(), "g")}}}
			if c.set != nil {
				c.set(&o)
			}
			build.JournalStep = nil
			require.NoError(t, Edges(bg, o))
			require.Equal(t, 5, datasettest.Open(t, o.Out).Meta.Classes)
			whole, digest := viewOf(t, o.Out), datasettest.Digest(t, o.Out)
			require.Len(t, whole.train, nodes*6/10)
			if want == nil {
				want = &whole
			}
			require.Equal(t, *want, whole)
			wentOn := 0
			for line := 1; ; line++ {
				require.Less(t, line, 200)
				o.Out, o.Note = filepath.Join(t.TempDir(), "g"), nil
				n := 0
				build.JournalStep = func([]byte, bool) error {
					if n++; n == line {
						return context.Canceled
					}
					return nil
				}
				err := Edges(bg, o)
				build.JournalStep = nil
				if err == nil {
					break
				}
				require.ErrorIs(t, err, context.Canceled)
				o.Note = func(s errs.Text) {
					if strings.Contains(s.String(), "going on") {
						wentOn++
					}
				}
				require.NoError(t, Edges(bg, o))
				require.Equal(t, digest, datasettest.Digest(t, o.Out), "ended at line %d", line)
			}
			require.Positive(t, wentOn)
		})
	}
}
