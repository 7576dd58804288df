package dataset

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/hostmem"
)

func TestEdgeSorter(t *testing.T) {
	for _, c := range []struct {
		name   string
		edges  int
		ids    uint64
		memory int64
		runs   int // spilled, at least
	}{
		{"none", 0, 10, 1, 0},
		{"one", 1, 10, 1, 0},
		{"in memory", 5000, 100, 1 << 20, 0},
		{"exactly one chunk", minChunk, 1 << 20, 1, 0},
		{"two chunks", minChunk + 1, 1 << 20, 1, 1},
		{"several passes", 70*minChunk + 5, 3000, 1, 65},
		{"64 bit ids", 5000, 1 << 40, 1, 4},
		{"all alike", 3000, 1, 1, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := newStaging(filepath.Join(t.TempDir(), "g"))
			require.NoError(t, err)
			defer func() { require.NoError(t, s.abort()) }()
			e := newEdgeSorter(s, c.memory)
			var want []edge
			for range c.edges {
				x := edge{rand.Uint64N(c.ids), rand.Uint64N(c.ids)}
				want = append(want, x)
				require.NoError(t, e.add(int64(x.src), int64(x.dst)))
			}
			require.GreaterOrEqual(t, e.seq, c.runs)
			slices.SortFunc(want, func(a, b edge) int {
				if a.less(b) {
					return -1
				} else if b.less(a) {
					return 1
				}
				return 0
			})
			var got []edge
			require.NoError(t, e.each(bg, func(x edge) error { got = append(got, x); return nil }))
			require.Equal(t, want, got)
			left, err := os.ReadDir(s.dir)
			require.NoError(t, err)
			require.Empty(t, left, "spill files stay")
			require.Zero(t, hostmem.Usage()["edge sort"])
		})
	}
}

// TestEdgeSorterNarrowThenWide: small ids in early runs, large in later ones.
func TestEdgeSorterNarrowThenWide(t *testing.T) {
	s, err := newStaging(filepath.Join(t.TempDir(), "g"))
	require.NoError(t, err)
	defer func() { require.NoError(t, s.abort()) }()
	e := newEdgeSorter(s, 1)
	for i := range int64(66 * minChunk) {
		id := i
		if i > 65*minChunk {
			id += 1 << 33
		}
		require.NoError(t, e.add(id, 5))
	}
	n, last := 0, edge{}
	require.NoError(t, e.each(bg, func(x edge) error {
		require.True(t, n == 0 || last.less(x))
		last = x
		n++
		return nil
	}))
	require.Equal(t, 66*minChunk, n)
	require.EqualValues(t, 66*minChunk-1+1<<33, last.src)

	ctx, cancel := context.WithCancel(bg)
	cancel()
	e = newEdgeSorter(s, 1)
	require.NoError(t, e.add(1, 2))
	require.ErrorIs(t, e.each(ctx, func(edge) error { return nil }), context.Canceled)
	require.NoError(t, e.free())
	require.Zero(t, hostmem.Usage()["edge sort"])

	e = newEdgeSorter(s, 1<<60)
	err = e.add(1, 2)
	require.ErrorContains(t, err, "lower the budgets")
	require.NotContains(t, err.Error(), "\n")
}

// TestWideIndices: graphs beyond 2^32 nodes have 64-bit ids; here the limit is lowered.
func TestWideIndices(t *testing.T) {
	narrow := filepath.Join(t.TempDir(), "g")
	require.NoError(t, Generate(bg, GenerateOptions{Nodes: 500, Dim: 2, Classes: 2, Out: narrow}))
	wideFrom = 100
	defer func() { wideFrom = 1 << 32 }()
	wide := filepath.Join(t.TempDir(), "g")
	require.NoError(t, Generate(bg, GenerateOptions{Nodes: 500, Dim: 2, Classes: 2, Out: wide}))
	a, err := open(t, narrow).Topology()
	require.NoError(t, err)
	b, err := open(t, wide).Topology()
	require.NoError(t, err)
	require.False(t, a.Wide())
	require.True(t, b.Wide())
	require.Equal(t, a.Indptr, b.Indptr)
	for i, v := range a.Indices32 {
		require.EqualValues(t, v, b.Indices64[i])
	}
}

// TestOpenDamaged takes a good directory and breaks one thing at a time.
func TestOpenDamaged(t *testing.T) {
	good := filepath.Join(t.TempDir(), "g")
	require.NoError(t, Generate(bg, GenerateOptions{Nodes: 50, Dim: 3, Classes: 2, AvgDegree: 4, Out: good}))
	replace := func(old, new string) func(string) error {
		return func(dir string) error {
			path := filepath.Join(dir, metaName)
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if !strings.Contains(string(b), old) {
				t.Fatalf("%q is not in %s", old, b)
			}
			return os.WriteFile(path, []byte(strings.Replace(string(b), old, new, 1)), 0o644)
		}
	}
	poke := func(name string, at int64, b ...byte) func(string) error {
		return func(dir string) error {
			f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt(b, at)
			return err
		}
	}
	use := func(dir string) error {
		d, err := Open(dir)
		if err != nil {
			return err
		}
		defer d.Close()
		if _, err := d.Topology(); err != nil {
			return err
		}
		if _, err := d.Labels(); err != nil {
			return err
		}
		_, err = d.Split("train")
		return err
	}
	require.NoError(t, use(good))
	for name, c := range map[string]struct {
		damage func(dir string) error
		want   []string
	}{
		"no metadata":          {func(d string) error { return os.Remove(filepath.Join(d, metaName)) }, []string{"not a dataset directory", metaName, "generate"}},
		"metadata not YAML":    {func(d string) error { return os.WriteFile(filepath.Join(d, metaName), []byte("\x00:["), 0o644) }, []string{metaName, "not readable"}},
		"some other YAML":      {func(d string) error { return os.WriteFile(filepath.Join(d, metaName), []byte("a: 1"), 0o644) }, []string{metaName, "no format version"}},
		"unknown version":      {replace("format: 1", "format: 7"), []string{"format version 7 is unknown", "reads 1"}},
		"bad uuid":             {replace("uuid: ", "uuid: x"), []string{metaName, "uuid"}},
		"bad dtype":            {replace("float32", "bfloat16"), []string{metaName, `dtype "bfloat16"`}},
		"no nodes":             {replace("nodes: 50", "nodes: 0"), []string{metaName, "nodes 0"}},
		"other row count":      {replace("nodes: 50", "nodes: 51"), []string{indptrName, "(51,)", metaName, "(52,)"}},
		"other dim":            {replace("dim: 3", "dim: 4"), []string{featuresName, "(50, 3)", metaName, "(50, 4)"}},
		"missing array":        {func(d string) error { return os.Remove(filepath.Join(d, labelsName)) }, []string{labelsName}},
		"truncated features":   {func(d string) error { return os.Truncate(filepath.Join(d, featuresName), 200) }, []string{featuresName, "truncated"}},
		"truncated header":     {func(d string) error { return os.Truncate(filepath.Join(d, indicesName), 20) }, []string{indicesName, "truncated"}},
		"not an array":         {poke("test.npy", 0, 'X'), []string{"test.npy", "magic"}},
		"wrong type":           {poke(labelsName, 22, 'f'), []string{labelsName, "f4"}},
		"id out of range":      {poke(indicesName, 128+4*3, 0xff, 0xff, 0, 0), []string{indicesName, "node id 65535 at position 3", "0..49"}},
		"offsets that fall":    {poke(indptrName, 128+8*2, 0xff), []string{indptrName, "falls from 255", "position 3"}},
		"offsets not from 0":   {poke(indptrName, 128, 1), []string{indptrName, "starts with 1"}},
		"label out of range":   {poke(labelsName, 128+4*5, 9), []string{labelsName, "label 9 of node 5"}},
		"split out of range":   {poke("train.npy", 128+8, 0xfe), []string{"train.npy", "node id 254 at position 1"}},
		"last offset too high": {poke(indptrName, 128+8*50, 0xff, 0xff), []string{indptrName, "ends with 65535", indicesName}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "d")
			require.NoError(t, os.CopyFS(dir, os.DirFS(good)))
			require.NoError(t, use(dir))
			require.NoError(t, c.damage(dir))
			err := use(dir)
			for _, w := range c.want {
				require.ErrorContains(t, err, w)
			}
			require.NotContains(t, err.Error(), "\n")
			requireUsage(t, err)
		})
	}
	_, err := Open(filepath.Join(good, metaName))
	require.ErrorContains(t, err, "not a directory")
	_, err = Open(filepath.Join(good, "none"))
	requireUsage(t, err)
	_, err = open(t, good).Split("dev")
	require.ErrorContains(t, err, "use train, val or test")
	d, err := Open(good)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close())
	_, err = d.Topology()
	require.ErrorContains(t, err, "closed")
	require.ErrorContains(t, d.ReadRows(0, make([]byte, 12)), "closed")
	require.ErrorContains(t, open(t, good).ReadRows(49, make([]byte, 24)), "0..49")
	require.ErrorContains(t, open(t, good).ReadRows(0, make([]byte, 10)), "rows of 12 bytes")
}
