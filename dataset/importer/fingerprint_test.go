package importer

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

	"helios/dataset/build"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

func requestOf(o Options, inputs ...string) request {
	return request{kind: "k", options: &o, Options: o, inputs: inputs}
}

// TestFingerprintOptions: the options that decide what comes out tell one import from another,
// those of the format included; where it goes, memory and Restart do not.
func TestFingerprintOptions(t *testing.T) {
	in := t.TempDir()
	print := func(change func(o *IGBOptions)) string {
		o := IGBOptions{Options: Options{Input: Input{In: in}}}
		change(&o)
		p, err := fingerprint(request{kind: "igb", options: &o, Options: o.Options})
		require.NoError(t, err)
		return p
	}
	plain := print(func(*IGBOptions) {})
	for _, change := range []func(o *IGBOptions){
		func(o *IGBOptions) { o.Out = "x" }, func(o *IGBOptions) { o.Memory = 1 << 30 },
		func(o *IGBOptions) { o.Restart = true },
	} {
		require.Equal(t, plain, print(change))
	}
	for _, change := range []func(o *IGBOptions){
		func(o *IGBOptions) { o.Classes = "2K" }, func(o *IGBOptions) { o.Dedup = true },
		func(o *IGBOptions) { o.SelfLoops = "add" }, func(o *IGBOptions) { o.Seed = 7 },
	} {
		require.NotEqual(t, plain, print(change))
	}
}

// TestFingerprintFiles: what tells one input from another covers files behind links and files
// outside --in.
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
		in      string
		inputs  []string
		changes string
	}{
		"folder": {real, nil, file}, "link": {filepath.Join(root, "link"), nil, file},
		"linked folder in it": {in, nil, file}, "beside": {in, []string{"", other}, other},
	} {
		print := func() string {
			p, err := fingerprint(requestOf(Options{Input: Input{In: c.in}}, c.inputs...))
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
	o := Options{Input: Input{In: file}}
	was, err := fingerprint(requestOf(o))
	require.NoError(t, err)
	st, err := os.Stat(file)
	require.NoError(t, err)
	time.Sleep(20 * time.Millisecond) // more than a tick of the kernel's clock
	require.NoError(t, os.WriteFile(file, []byte("b"), 0o644))
	require.NoError(t, os.Chtimes(file, st.ModTime(), st.ModTime()))
	now, err := fingerprint(requestOf(o))
	require.NoError(t, err)
	require.NotEqual(t, was, now)
}

// TestStartsOverForFilesBeside: formats name the files that they read outside --in, or beside it.
func TestStartsOverForFilesBeside(t *testing.T) {
	defer func() { build.JournalStep = nil }()
	fingerprintOf := func(imp importFunc, o Options) string {
		o.Out = filepath.Join(t.TempDir(), "g")
		var text string
		build.JournalStep = func(line []byte, _ bool) error {
			if text == "" {
				text = string(line)
			}
			return context.Canceled
		}
		require.ErrorIs(t, imp(bg, o), context.Canceled)
		return text
	}
	bolt := boltTree(t).write(t, t.TempDir())
	features := filepath.Join(t.TempDir(), "f.npy")
	require.NoError(t, os.Rename(filepath.Join(bolt, "data", "feat.npy"), features))
	meta, err := os.ReadFile(filepath.Join(bolt, metaYAML))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(bolt, metaYAML),
		bytes.Replace(meta, []byte("path: data/feat.npy"), []byte("path: "+features), 1), 0o644))
	imp := with(GraphBolt, func(o *GraphBoltOptions) { o.AllowOutside = true })
	o := Options{Input: Input{In: bolt}}
	was := fingerprintOf(imp, o)
	require.Equal(t, was, fingerprintOf(imp, o))
	require.NoError(t, os.Chtimes(features, time.Time{}, time.Now().Add(time.Hour)))
	require.NotEqual(t, was, fingerprintOf(imp, o))
}

// TestFirstLine: a first line that has a number is no heading, so it is taken or refused; a byte
// order mark is skipped.
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
		err := plain(Edges)(bg, Options{Input: Input{In: edges}, Features: writeText(t, "x.txt",
			c.features), Labels: writeText(t, "y.txt", c.labels), SplitDir: splits(c.train),
			Output: Output{Out: out}})
		if c.want != "" {
			datasettest.RequireUsage(t, err)
			require.ErrorContains(t, err, c.want)
			continue
		}
		require.NoError(t, err)
		m := datasettest.Open(t, out).Meta
		require.Equal(t, []int64{3, 3, 1}, []int64{m.Nodes, m.Edges, m.Train}, "%+v", c)
	}
}

// TestStrayID: a number that is far too large is refused, before it takes the disk or the memory.
func TestStrayID(t *testing.T) {
	out := filepath.Join(t.TempDir(), "g")
	o := Options{Input: Input{In: writeText(t, "e.txt", "0 1\n60000000000 1\n")},
		FeatureFn: RandomFeatures, Dim: 4096, Output: Output{Out: out,
			Note: func(errs.Text) {}}}
	err := plain(Edges)(bg, o)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "the largest id in the edges is 60000000000")
	mtx := Options{Input: Input{In: writeText(t, "m.mtx", "%%MatrixMarket matrix coordinate pattern general\n60000000000 60000000000 1\n1 2\n")},
		FeatureFn: RandomFeatures, Dim: 4096, Output: Output{Out: out}}
	err = MTX(bg, mtx)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "there are 60000000000 nodes")
	many := Options{Input: Input{In: t.TempDir()}, Nodes: 1 << 62, Output: Output{Out: out}}
	err = plain(NPY)(bg, many)
	datasettest.RequireUsage(t, err)
	require.ErrorContains(t, err, "option nodes 4611686018427387904: at most")
	o.In, o.Labels = writeText(t, "e.txt", "0 1\n"), writeText(t, "y.txt", "0 1\n68000000000 1\n")
	err = plain(Edges)(bg, o)
	datasettest.RequireUsage(t, err)
	require.ErrorContains(t, err,
		"y.txt:2: node id 68000000000: a label for each node needs 253.3 GiB")
	datasettest.RequireEmpty(t, filepath.Dir(out))
}

// TestEdgesCutWhileRead: a file that gets shorter under an import is an error, not fewer edges.
func TestEdgesCutWhileRead(t *testing.T) {
	path := writeText(t, "e.txt", "0 1\n1 2\n2 3\n")
	require.NoError(t, os.Truncate(path, 8))
	x := &edgeText{path: path, edgeColumns: edgeColumns{sep: ' ', cols: 2},
		idRange: idRange{nodes: 9}, emit: func(_, _ []int64) error { return nil }}
	err := x.readPart(bg, 0, 0, 12, func(int64) {})
	datasettest.RequireUsage(t, err)
	require.ErrorContains(t, err, "e.txt ends at byte 8; it had 12")
}

// TestStagingTaken: another run for the same output may remove a directory that is not locked yet.
func TestStagingTaken(t *testing.T) {
	defer func() { build.StagingMade = nil }()
	out := filepath.Join(t.TempDir(), "g")
	made := 0
	build.StagingMade = func(string) {
		if made++; made < 3 {
			require.NoError(t, build.EachStale(out, func(string, *os.File) bool { return false }))
		}
	}
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Nodes: 50, Out: out}))
	require.Equal(t, 3, made)
	datasettest.Open(t, out)
	entries, err := os.ReadDir(filepath.Dir(out))
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

// TestUnlabelledTakesNoMemory: nodes without labels are not kept in memory, however many there are.
func TestUnlabelledTakesNoMemory(t *testing.T) {
	const nodes = 4 << 20
	var before, after runtime.MemStats
	out := filepath.Join(t.TempDir(), "g")
	o := Options{Input: Input{In: writeText(t, "e.txt", "0 1\n")}, Nodes: nodes, FeatureFn: "hash", Dim: 1,
		Output: Output{Out: out, Memory: 1, Note: func(errs.Text) {}}}
	runtime.ReadMemStats(&before)
	require.NoError(t, plain(Edges)(bg, o))
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4*nodes))
	d := datasettest.Open(t, out)
	require.Equal(t, []int64{nodes, nodes, 0, 0, 0, 0}, []int64{d.Meta.Nodes, d.Meta.Unlabelled,
		int64(d.Meta.Classes), d.Meta.Train, d.Meta.Val, d.Meta.Test})
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

// TestNotThatKindOfFile: pipes and folders, which cannot be read in parts, and files of something
// else, are refused by name.
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
		{plain(Edges), pipe, "pipe is a pipe; a regular file"},
		{MTX, pipe, "pipe is a pipe; a regular file"},
		{MTX, dir, "is a folder; a regular file is needed"},
		{func(ctx context.Context, o Options) error {
			return Planetoid(ctx, PlanetoidOptions{Input: o.Input, Output: o.Output})
		}, writeText(t, "x", "?"), "no ind.NAME.graph beside it"},
	} {
		err := c.imp(bg, Options{Input: Input{In: c.in},
			Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
		datasettest.RequireUsage(t, err)
		require.ErrorContains(t, err, c.want)
	}
}

// TestResumeInsideInput: an import resumes --out in --in too, where its own files are beside
// the input.
func TestResumeInsideInput(t *testing.T) {
	defer func() { build.JournalStep = nil }()
	in := resumeInput(t)
	o := Options{Input: Input{In: in}, Output: Output{Out: filepath.Join(in, "g"), Memory: 1}}
	n := 0
	build.JournalStep = func([]byte, bool) error {
		if n++; n > 12 {
			return context.Canceled
		}
		return nil
	}
	require.ErrorIs(t, plain(NPY)(bg, o), context.Canceled)
	build.JournalStep = nil
	var notes []string
	o.Note = func(s errs.Text) { notes = append(notes, s.String()) }
	require.NoError(t, plain(NPY)(bg, o))
	require.Len(t, notes, 2)
	require.Contains(t, notes[0], "going on")
}
