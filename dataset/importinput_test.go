package dataset

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/dataset/npy"
)

// TestFingerprintFiles: what tells one input from another covers files behind links and files outside --in.
func TestFingerprintFiles(t *testing.T) {
	root := t.TempDir()
	real, in := filepath.Join(root, "real"), filepath.Join(root, "in")
	require.NoError(t, os.MkdirAll(filepath.Join(real, "raw"), 0o755))
	require.NoError(t, os.Mkdir(in, 0o755))
	file, other := filepath.Join(real, "raw", "x"), filepath.Join(root, "other")
	require.NoError(t, os.WriteFile(file, []byte("a"), 0o644))
	require.NoError(t, os.WriteFile(other, []byte("a"), 0o644))
	require.NoError(t, os.Symlink(real, filepath.Join(root, "link")))
	require.NoError(t, os.Symlink(filepath.Join(real, "raw"), filepath.Join(in, "raw")))
	require.NoError(t, os.Symlink(in, filepath.Join(in, "loop")))
	require.NoError(t, os.Symlink("nowhere", filepath.Join(in, "dangling")))
	for name, c := range map[string]struct {
		o       ImportOptions
		changes string
	}{
		"folder": {ImportOptions{In: real}, file}, "link": {ImportOptions{In: filepath.Join(root, "link")}, file}, "linked folder in it": {ImportOptions{In: in}, file},
		"beside": {ImportOptions{In: in, inputs: []string{"", other}}, other},
	} {
		print := func() string {
			p, err := fingerprint(&c.o, "k")
			require.NoError(t, err, name)
			return p
		}
		was := print()
		require.Equal(t, was, print(), name)
		require.NoError(t, os.Chtimes(c.changes, time.Time{}, time.Now().Add(time.Hour)))
		require.NotEqual(t, was, print(), name)
		require.NoError(t, os.Chtimes(c.changes, time.Time{}, time.Now()))
	}
	// The same name, size and time, but other content.
	o := ImportOptions{In: file}
	was, err := fingerprint(&o, "k")
	require.NoError(t, err)
	st, err := os.Stat(file)
	require.NoError(t, err)
	time.Sleep(20 * time.Millisecond) // more than a tick of the kernel's clock
	require.NoError(t, os.WriteFile(file, []byte("b"), 0o644))
	require.NoError(t, os.Chtimes(file, st.ModTime(), st.ModTime()))
	now, err := fingerprint(&o, "k")
	require.NoError(t, err)
	require.NotEqual(t, was, now)
}

// TestStartsOverForFilesBeside: formats name the files that they read outside --in, or beside it.
func TestStartsOverForFilesBeside(t *testing.T) {
	defer func() { journalStep = nil }()
	fingerprintOf := func(imp importFunc, o ImportOptions) string {
		o.Out = filepath.Join(t.TempDir(), "g")
		var text string
		journalStep = func(line []byte, _ bool) error {
			if text == "" {
				text = string(line)
			}
			return context.Canceled
		}
		require.ErrorIs(t, imp(bg, o), context.Canceled)
		return text
	}
	base := writeBV(t)
	raw := writeFolder(t, rawFolder(t, "plain"))
	indptr := filepath.Join(t.TempDir(), "ptr")
	require.NoError(t, os.Rename(filepath.Join(raw, "indptr.bin"), indptr))
	bolt := boltTree(t).write(t, t.TempDir())
	features := filepath.Join(t.TempDir(), "f.npy")
	require.NoError(t, os.Rename(filepath.Join(bolt, "data", "feat.npy"), features))
	meta, err := os.ReadFile(filepath.Join(bolt, metaYAML))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(bolt, metaYAML), bytes.Replace(meta, []byte("path: data/feat.npy"), []byte("path: "+features), 1), 0o644))
	for _, c := range []struct {
		imp  importFunc
		o    ImportOptions
		file string
	}{
		{ImportWebGraph, ImportOptions{AllowOutside: true, In: base + ".graph"}, base + ".properties"},
		{ImportRaw, ImportOptions{AllowOutside: true, In: raw, Format: FormatOptions{Raw: RawOptions{Indptr: indptr, IndexDType: "int64", Dim: 2}}}, indptr},
		{ImportGraphBolt, ImportOptions{AllowOutside: true, In: bolt}, features},
	} {
		was := fingerprintOf(c.imp, c.o)
		require.Equal(t, was, fingerprintOf(c.imp, c.o), c.file)
		require.NoError(t, os.Chtimes(c.file, time.Time{}, time.Now().Add(time.Hour)))
		require.NotEqual(t, was, fingerprintOf(c.imp, c.o), c.file)
	}
}

// TestFirstLine: a first line that has a number is no heading, so it is taken or refused; a byte order mark is skipped.
func TestFirstLine(t *testing.T) {
	const mark = "\xef\xbb\xbf"
	edges := writeText(t, "e.txt", mark+"0 1\n1 2\n2 0\n")
	splits := func(train string) string {
		dir := t.TempDir()
		for name, text := range map[string]string{"train": train, "val": "1\n", "test": "2\n"} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name+".txt"), []byte(text), 0o644))
		}
		return dir
	}
	for _, c := range []struct{ features, labels, train, want string }{
		{"1 2\n3 4\n5 6\n", "0\n1\n0\n", "0\n", ""},
		{mark + "1 2\n3 4\n5 6\n", mark + "0\n1\n0\n", mark + "0\n", ""},
		{mark + "a b\n1 2\n3 4\n5 6\n", "class\n0\n1\n0\n", "node\n0\n", ""},
		{"x 2\n1 2\n3 4\n5 6\n", "0\n1\n0\n", "0\n", `x.txt:1: "x" in column 1 is not a number`},
		{"1 2\n3 4\n5 6\n", "0 ?\n0 1\n1 0\n2 0\n", "0\n", `y.txt:1: label "?"`},
		{"1 2\n3 4\n5 6\n", "0\n1\n0\n", "0.0\n", `train.txt:1: "0.0" is not a node id`},
		{"1 2\n3 4\n5 6\n", "0\n1\n0\n", "-1\n0\n", `train.txt:1: "-1" is not a node id`},
	} {
		out := filepath.Join(t.TempDir(), "g")
		err := ImportEdges(bg, ImportOptions{In: edges, Out: out, Features: writeText(t, "x.txt", c.features), Labels: writeText(t, "y.txt", c.labels), SplitDir: splits(c.train)})
		if c.want != "" {
			requireUsage(t, err)
			require.ErrorContains(t, err, c.want)
			continue
		}
		require.NoError(t, err)
		m := open(t, out).Meta
		require.Equal(t, []int64{3, 3, 1}, []int64{m.Nodes, m.Edges, m.Train}, "%+v", c)
	}
}

// TestStrayID: a number that is far too large is refused, before it takes the disk or the memory.
func TestStrayID(t *testing.T) {
	out := filepath.Join(t.TempDir(), "g")
	o := ImportOptions{In: writeText(t, "e.txt", "0 1\n60000000000 1\n"), Out: out, Dim: 4096, Note: func(string) {}}
	err := ImportEdges(bg, o)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "the largest id in the edges is 60000000000")
	mtx := ImportOptions{In: writeText(t, "m.mtx", "%%MatrixMarket matrix coordinate pattern general\n60000000000 60000000000 1\n1 2\n"), Out: out, Dim: 4096}
	err = ImportMTX(bg, mtx)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "there are 60000000000 nodes")
	raw := ImportOptions{In: writeFolder(t, rawFolder(t, "plain")), Out: out, Nodes: 1 << 62, Format: FormatOptions{Raw: RawOptions{FeatureDType: "float32"}}}
	err = ImportRaw(bg, raw)
	requireUsage(t, err)
	require.ErrorContains(t, err, "--nodes 4611686018427387904: at most")
	o.In, o.Labels = writeText(t, "e.txt", "0 1\n"), writeText(t, "y.txt", "0 1\n68000000000 1\n")
	err = ImportEdges(bg, o)
	requireUsage(t, err)
	require.ErrorContains(t, err, "y.txt:2: node id 68000000000: a label for each node needs 253.3 GiB")
	requireEmpty(t, filepath.Dir(out))
}

// TestEdgesCutWhileRead: a file that gets shorter under an import is an error, not fewer edges.
func TestEdgesCutWhileRead(t *testing.T) {
	path := writeText(t, "e.txt", "0 1\n1 2\n2 3\n")
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, os.Truncate(path, 8))
	x := &edgeText{path: "e.txt", limit: 9, emit: func(_, _ []int64) error { return nil }}
	err = readPart(bg, f, 12, 0, x, 0, func(int64) {})
	requireUsage(t, err)
	require.ErrorContains(t, err, "e.txt ends at byte 8; it had 12")
}

// TestStagingTaken: another run for the same output may remove a directory that is not locked yet.
func TestStagingTaken(t *testing.T) {
	defer func() { stagingMade = nil }()
	out := filepath.Join(t.TempDir(), "g")
	made := 0
	stagingMade = func(string) {
		if made++; made < 3 {
			require.NoError(t, eachStale(out, func(string, *os.File) bool { return false }))
		}
	}
	require.NoError(t, Generate(bg, GenerateOptions{Nodes: 50, Out: out}))
	require.Equal(t, 3, made)
	open(t, out)
	entries, err := os.ReadDir(filepath.Dir(out))
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

// TestUnlabelledTakesNoMemory: nodes without labels are not kept in memory, however many there are.
func TestUnlabelledTakesNoMemory(t *testing.T) {
	const nodes = 4 << 20
	var before, after runtime.MemStats
	out := filepath.Join(t.TempDir(), "g")
	o := ImportOptions{In: writeText(t, "e.txt", "0 1\n"), Out: out, Nodes: nodes, FeatureFn: "hash", Dim: 1, Memory: 1, Note: func(string) {}}
	runtime.ReadMemStats(&before)
	require.NoError(t, ImportEdges(bg, o))
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4*nodes))
	d := open(t, out)
	require.Equal(t, []int64{nodes, nodes, 0, 0, 0, 0}, []int64{d.Meta.Nodes, d.Meta.Unlabelled, int64(d.Meta.Classes), d.Meta.Train, d.Meta.Val, d.Meta.Test})
	a, err := npy.Open(filepath.Join(out, "labels.npy"))
	require.NoError(t, err)
	require.Equal(t, []int64{nodes}, a.Header.Shape)
	require.NoError(t, eachInt(a, func(v, x int64) error {
		if x != noLabel {
			return fmt.Errorf("node %d has label %d", v, x)
		}
		return nil
	}))
}

// TestNotThatKindOfFile: pipes and folders, which cannot be read in parts, and files of something else, are refused by name.
func TestNotThatKindOfFile(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	hold, err := os.OpenFile(pipe, os.O_RDWR, 0) // so that opening it does not wait
	require.NoError(t, err)
	defer hold.Close()
	for _, c := range []struct {
		imp      importFunc
		in, want string
	}{
		{ImportEdges, pipe, "pipe is a pipe; a regular file"}, {ImportMTX, pipe, "pipe is a pipe; a regular file"}, {ImportMTX, dir, "is a folder; a regular file is needed"},
		{ImportPlanetoid, writeText(t, "x", "?"), "no ind.NAME.graph beside it"},
	} {
		err := c.imp(bg, ImportOptions{In: c.in, Out: filepath.Join(t.TempDir(), "g")})
		requireUsage(t, err)
		require.ErrorContains(t, err, c.want)
	}
}

// TestJournalWhere: what a user hears of what is done is never nothing, and never more than all.
func TestJournalWhere(t *testing.T) {
	j := newJournal(nil, "g")
	j.take(journalLine{Source: &sourceMark{Total: 1000, Parts: 2}})
	piece := runPiece{Part: 1, span: span{0, 70}}
	j.take(journalLine{Run: &run{ID: 1, Keys: 70, Pieces: []runPiece{piece}}})
	require.Equal(t, "70 of the edges", j.where(), "no part is at its end")
	piece.span, piece.End, piece.Units = span{70, 90}, true, 500
	j.take(journalLine{Run: &run{ID: 2, Keys: 20, Pieces: []runPiece{piece}}})
	require.Equal(t, "50 % of the edges", j.where())
	j.take(journalLine{Merged: &mergedMark{Done: 110, Total: 120}})
	require.Equal(t, "92 % of the merge of edges", j.where(), "with 30 self loops that were added")
	j.take(journalLine{Merged: &mergedMark{Done: 130, Total: 120}})
	require.Equal(t, "100 % of the merge of edges", j.where())
}

// TestResumeInsideInput: an import goes on with --out in --in too, where its own files are beside the input.
func TestResumeInsideInput(t *testing.T) {
	defer func() { journalStep = nil }()
	in := resumeInput(t)
	o := ImportOptions{In: in, Out: filepath.Join(in, "g"), Memory: 1}
	n := 0
	journalStep = func([]byte, bool) error {
		if n++; n > 12 {
			return context.Canceled
		}
		return nil
	}
	require.ErrorIs(t, ImportNPY(bg, o), context.Canceled)
	journalStep = nil
	var notes []string
	o.Note = func(s string) { notes = append(notes, s) }
	require.NoError(t, ImportNPY(bg, o))
	require.Len(t, notes, 2)
	require.Contains(t, notes[0], "going on")
}
