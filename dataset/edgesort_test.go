package dataset

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/dataset/npy"
	"helios/internal/hostmem"
)

// reference is what the rules make of edges, by sorting in memory.
func reference(edges []edge, nodes int64, r edgeRules) []edge {
	var want []edge
	if r.none {
		return nil
	}
	for _, x := range edges {
		if x.src == x.dst && (r.noSelf || r.addSelf) {
			continue
		}
		want = append(want, x)
		if r.opposite && x.src != x.dst {
			want = append(want, edge{x.src, x.dst})
		}
	}
	for v := range nodes {
		if r.addSelf {
			want = append(want, edge{uint64(v), uint64(v)})
		}
	}
	slices.SortFunc(want, func(a, b edge) int {
		return cmp.Or(cmp.Compare(a.dst, b.dst), cmp.Compare(a.src, b.src))
	})
	if r.dedup {
		want = slices.Compact(want)
	}
	return want
}

// edgesAsSource deals edges to parts of different lengths, and emits them in batches.
func edgesAsSource(edges []edge, parts, batch int) edgeSource {
	cut := func(p int) int { return len(edges) * p * (p + 1) / (parts * (parts + 1)) }
	return edgeSource{Name: "test", Unit: "edges", Total: int64(len(edges)), Parts: parts, Read: func(_ context.Context, p int, emit func(src, dst []int64) error, done func(int64)) error {
		for mine := edges[cut(p):cut(p+1)]; len(mine) > 0; {
			n := min(batch, len(mine))
			var src, dst []int64
			for _, x := range mine[:n] {
				src, dst = append(src, int64(x.src)), append(dst, int64(x.dst))
			}
			if err := emit(src, dst); err != nil {
				return err
			}
			done(int64(n))
			mine = mine[n:]
		}
		return nil
	}}
}

// stored reads the topology of a staging directory.
func stored(t testing.TB, s *staging) []edge {
	t.Helper()
	read := func(name string) []int64 {
		a, err := npy.Open(filepath.Join(s.dir, name))
		require.NoError(t, err)
		r, err := a.Reader(0)
		require.NoError(t, err)
		defer r.Close()
		v := make([]int64, a.Header.Elements())
		require.NoError(t, fill(r, v))
		return v
	}
	ptr, idx := read(indptrName), read(indicesName)
	var got []edge
	for v := range len(ptr) - 1 {
		for _, u := range idx[ptr[v]:ptr[v+1]] {
			got = append(got, edge{uint64(v), uint64(u)})
		}
	}
	require.EqualValues(t, len(idx), ptr[len(ptr)-1])
	return got
}

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
		{"two chunks", 8 * minChunk, 1 << 16, 1, 2},
		{"several passes", 70*minChunk + 5, 3000, 1, 65},
		{"all alike", 9000, 1, 1, 2},
		{"two keys", 9000, 2, 1, 2},
		{"large", 400_000, 50_000, 5 << 20, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(7, uint64(c.edges)))
			var edges []edge
			for range c.edges {
				edges = append(edges, edge{rng.Uint64N(c.ids), rng.Uint64N(c.ids)})
			}
			for _, rules := range []edgeRules{{}, {dedup: true}, {dedup: true, opposite: true}, {opposite: true, noSelf: true}, {addSelf: true}, {addSelf: true, dedup: true, opposite: true}, {none: true}} {
				s, err := newStaging(filepath.Join(t.TempDir(), "g"))
				require.NoError(t, err)
				e, err := newEdgeSorter(s, c.memory, rules)
				require.NoError(t, err)
				require.NoError(t, e.read(bg, edgesAsSource(edges, 5, 777), nil))
				e.spills.Wait()
				if rules == (edgeRules{}) {
					require.GreaterOrEqual(t, e.seq, c.runs)
				}
				counts, err := s.writeCSC(bg, e, int64(c.ids), nil)
				require.NoError(t, err)
				require.NoError(t, e.close())
				want := reference(edges, int64(c.ids), rules)
				require.Equal(t, want, stored(t, s), "%+v", rules)
				require.EqualValues(t, len(want), counts.Stored)
				require.EqualValues(t, c.edges, counts.Taken)
				if !rules.none {
					require.Equal(t, counts.Stored, counts.Taken+counts.Opposite+counts.Added-counts.Self-counts.Duplicates)
					all := rules
					all.dedup = false
					require.EqualValues(t, len(reference(edges, int64(c.ids), all))-len(want), counts.Duplicates)
				}
				left, err := filepath.Glob(filepath.Join(s.dir, "sort-*"))
				require.NoError(t, err)
				require.Empty(t, left, "spill files stay")
				require.Zero(t, hostmem.Usage()["edge sort"])
				require.NoError(t, s.abort())
				if c.edges > 100_000 {
					break
				}
			}
		})
	}
}

// TestEdgeSorterWide: small ids in early runs, ids beyond 32 bits in later ones.
func TestEdgeSorterWide(t *testing.T) {
	s, err := newStaging(filepath.Join(t.TempDir(), "g"))
	require.NoError(t, err)
	defer func() { require.NoError(t, s.abort()) }()
	for _, dedup := range []bool{false, true} {
		e, err := newEdgeSorter(s, 1, edgeRules{dedup: dedup})
		require.NoError(t, err)
		var edges []edge
		for i := range uint64(30 * minChunk) {
			x := edge{mix(i) % 9, mix(i) % 70_000}
			if i > 20*minChunk {
				x.src += 1 << 33
			}
			if i%7 == 0 {
				x = edge{3, 3}
			}
			edges = append(edges, x)
		}
		require.NoError(t, e.read(bg, edgesAsSource(edges, 4, 500), nil))
		held, err := e.finish(true)
		require.NoError(t, err)
		require.Empty(t, held)
		require.NoError(t, e.fewer(bg, true, nil))
		sources, closeAll, err := e.openRuns(e.runs)
		require.NoError(t, err)
		m := e.newMerger(sources, true, false)
		var got []edge
		require.NoError(t, m.each(bg, m.ranges(edge{}), true, func(out *merged) error {
			for range out.times {
				got = append(got, out.lo)
			}
			got = append(got, pairs(out.keys)...)
			return nil
		}))
		require.NoError(t, closeAll())
		require.NoError(t, e.close())
		require.Equal(t, reference(edges, 9, edgeRules{dedup: dedup}), got)
	}
}

func TestEdgeSorterStops(t *testing.T) {
	s, err := newStaging(filepath.Join(t.TempDir(), "g"))
	require.NoError(t, err)
	defer func() { require.NoError(t, s.abort()) }()
	edges := make([]edge, 50*minChunk)
	ctx, cancel := context.WithCancel(bg)
	cancel()
	_, err = s.sortEdges(ctx, edgesAsSource(edges, 3, 100), sortOptions{Memory: 1, Nodes: 5})
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, hostmem.Usage()["edge sort"])

	writeFault = func(path string) error {
		if strings.Contains(path, "sort-5") {
			return unix.ENOSPC
		}
		return nil
	}
	defer func() { writeFault = nil }()
	_, err = s.sortEdges(bg, edgesAsSource(edges, 3, 100), sortOptions{Memory: 1, Nodes: 5})
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "free some space")
	require.Zero(t, hostmem.Usage()["edge sort"])
}

// TestDamagedRun: a bit that flips on the disk is an error, not an edge.
func TestDamagedRun(t *testing.T) {
	s, err := newStaging(filepath.Join(t.TempDir(), "g"))
	require.NoError(t, err)
	defer func() { require.NoError(t, s.abort()) }()
	e, err := newEdgeSorter(s, 1, edgeRules{})
	require.NoError(t, err)
	var edges []edge
	for i := range uint64(9 * minChunk) {
		edges = append(edges, edge{mix(i) % 1000, mix(i) >> 40})
	}
	require.NoError(t, e.read(bg, edgesAsSource(edges, 1, 500), nil))
	_, err = e.finish(true)
	require.NoError(t, err)
	path := s.runPath(e.runs[1].ID)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	b[len(b)/2] ^= 4
	require.NoError(t, os.WriteFile(path, b, 0o644))
	_, err = s.writeCSC(bg, e, 1<<25, nil)
	require.ErrorContains(t, err, "damaged")
	require.ErrorContains(t, err, "--restart")
	require.NoError(t, e.close())
}

func TestRadix(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, n := range []int{0, 1, 2, 30, 150, 1000, 5000, 300_000} {
		for _, mask := range []uint64{0, 1, 0xff, 0x00ffffff_07ffffff, 0x7_00000fff, ^uint64(0), 3 << 62} {
			a := make([]uint64, n)
			for i := range a {
				a[i] = rng.Uint64() & mask
				if i%3 == 0 {
					a[i] &= 0xf0000000f
				}
			}
			want := slices.Sorted(slices.Values(a))
			sortKeys(a, make([]uint64, n))
			require.True(t, slices.Equal(want, a), "%d keys of %x", n, mask)
		}
	}
}

func FuzzGroup(f *testing.F) {
	f.Add([]byte("0123456789abcdef"), false)
	f.Fuzz(func(t *testing.T, b []byte, wide bool) {
		// Any keys come back; any bytes are refused or decoded, without a crash.
		keys := make([]uint64, min(len(b)/8, maxGroup)&^1)
		for i := range keys {
			keys[i] = binary.LittleEndian.Uint64(b[8*i:])
		}
		slices.Sort(keys)
		buf := make([]byte, groupRoom)
		n := len(keys)
		if wide {
			n /= 2
		}
		if n > 0 {
			size := encodeGroup(buf, keys, wide)
			got := make([]uint64, len(keys))
			used, err := decodeGroup(got, buf[:size+8], n, wide)
			require.NoError(t, err)
			require.Equal(t, size, used)
			require.Equal(t, keys, got)
		}
		_, _ = decodeGroup(make([]uint64, 2*maxGroup), b, 64, wide)
	})
}

func BenchmarkSortKeys(b *testing.B) {
	for _, n := range []int{1 << 20, 1 << 24} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			from, a, tmp := make([]uint64, n), make([]uint64, n), make([]uint64, n)
			for i := range from {
				x := mix(uint64(i))
				from[i] = x&(1<<27-1) | x>>37<<32
			}
			b.SetBytes(int64(8 * n))
			for b.Loop() {
				copy(a, from)
				sortKeys(a, tmp)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n)/float64(b.N), "ns/key")
		})
	}
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
	unseal(t, good) // sealed, each of these is found as a difference from the seal
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
