package edges

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/dataset/npy"
	"helios/internal/hostmem"
	"helios/internal/philox"
)

// reference returns what the rules make of edges, by sorting in memory.
func reference(edges []Edge, nodes int64, r Rules) []Edge {
	var want []Edge
	for _, x := range edges {
		if x.Src == x.Dst && (r.NoSelf || r.AddSelf) {
			continue
		}
		want = append(want, x)
		if r.Opposite && x.Src != x.Dst {
			want = append(want, Edge{x.Src, x.Dst})
		}
	}
	for v := range nodes {
		if r.AddSelf {
			want = append(want, Edge{uint64(v), uint64(v)})
		}
	}
	slices.SortFunc(want, func(a, b Edge) int {
		return cmp.Or(cmp.Compare(a.Dst, b.Dst), cmp.Compare(a.Src, b.Src))
	})
	if r.Dedup {
		want = slices.Compact(want)
	}
	return want
}

// edgesAsSource deals edges to parts of different lengths, and emits them in batches.
func edgesAsSource(edges []Edge, parts, batch int) Source {
	cut := func(p int) int { return len(edges) * p * (p + 1) / (parts * (parts + 1)) }
	return Source{Name: "test", Unit: "edges", Total: int64(len(edges)), Parts: parts,
		Read: func(_ context.Context, p int, emit func(src, dst []int64) error,
			done func(int64)) error {
			for mine := edges[cut(p):cut(p+1)]; len(mine) > 0; {
				n := min(batch, len(mine))
				var src, dst []int64
				for _, x := range mine[:n] {
					src, dst = append(src, int64(x.Src)), append(dst, int64(x.Dst))
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
func stored(t testing.TB, s *dirStore) []Edge {
	t.Helper()
	ptr, idx := s.array(t, "indptr"), s.array(t, "indices")
	var got []Edge
	for v := range len(ptr) - 1 {
		for _, u := range idx[ptr[v]:ptr[v+1]] {
			got = append(got, Edge{uint64(v), uint64(u)})
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
			var edges []Edge
			for range c.edges {
				edges = append(edges, Edge{rng.Uint64N(c.ids), rng.Uint64N(c.ids)})
			}
			for _, rules := range []Rules{{}, {Dedup: true}, {Dedup: true, Opposite: true},
				{Opposite: true, NoSelf: true}, {AddSelf: true}, {AddSelf: true, Dedup: true,
					Opposite: true}} {
				s := &dirStore{dir: t.TempDir()}
				e, err := New(s, c.memory, rules)
				require.NoError(t, err)
				require.NoError(t, e.Read(context.Background(), edgesAsSource(edges, 5, 777), nil))
				e.spills.Wait()
				if rules == (Rules{}) {
					require.GreaterOrEqual(t, e.seq, c.runs)
				}
				counts, err := e.WriteCSC(context.Background(), int64(c.ids), nil)
				require.NoError(t, err)
				require.NoError(t, e.Close())
				want := reference(edges, int64(c.ids), rules)
				require.Equal(t, want, stored(t, s), "%+v", rules)
				require.EqualValues(t, len(want), counts.Stored)
				require.EqualValues(t, c.edges, counts.Taken)
				require.Equal(t, counts.Stored, counts.Taken+counts.Opposite+counts.Added-
					counts.Self-counts.Duplicates)
				all := rules
				all.Dedup = false
				require.EqualValues(t, len(reference(edges, int64(c.ids), all))-len(want),
					counts.Duplicates)
				left, err := filepath.Glob(filepath.Join(s.dir, "sort-*"))
				require.NoError(t, err)
				require.Empty(t, left, "spill files stay")
				require.Zero(t, hostmem.Usage()["edge sort"])
				if c.edges > 100_000 {
					break
				}
			}
		})
	}
}

// TestEdgeSorterWide: small ids in early runs, ids beyond 32 bits in later ones.
func TestEdgeSorterWide(t *testing.T) {
	s := &dirStore{dir: t.TempDir()}
	for _, dedup := range []bool{false, true} {
		e, err := New(s, 1, Rules{Dedup: dedup})
		require.NoError(t, err)
		var edges []Edge
		for i := range uint64(30 * minChunk) {
			x := Edge{philox.Mix(i) % 9, philox.Mix(i) % 70_000}
			if i > 20*minChunk {
				x.Src += 1 << 33
			}
			if i%7 == 0 {
				x = Edge{3, 3}
			}
			edges = append(edges, x)
		}
		require.NoError(t, e.Read(context.Background(), edgesAsSource(edges, 4, 500), nil))
		held, err := e.finish(true)
		require.NoError(t, err)
		require.Empty(t, held)
		require.NoError(t, e.fewer(context.Background(), true, nil))
		sources, closeAll, err := e.openRuns(e.runs)
		require.NoError(t, err)
		m := e.newMerger(sources, true, false)
		var got []Edge
		require.NoError(t, m.each(context.Background(), m.ranges(Edge{}), true,
			func(out *merged) error {
				for range out.times {
					got = append(got, out.lo)
				}
				got = append(got, pairs(out.keys)...)
				return nil
			}))
		require.NoError(t, closeAll())
		require.NoError(t, e.Close())
		require.Equal(t, reference(edges, 9, Rules{Dedup: dedup}), got)
	}
}

func TestEdgeSorterStops(t *testing.T) {
	s := &dirStore{dir: t.TempDir()}
	edges := make([]Edge, 50*minChunk)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := Sort(ctx, s, edgesAsSource(edges, 3, 100), Options{Memory: 1, Nodes: 5})
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, hostmem.Usage()["edge sort"])

	s.full = RunPrefix + "5"
	_, err = Sort(context.Background(), s, edgesAsSource(edges, 3, 100),
		Options{Memory: 1, Nodes: 5})
	require.ErrorIs(t, err, unix.ENOSPC)
	require.Zero(t, hostmem.Usage()["edge sort"])
}

// TestDamagedRun: a bit that flips on the disk is an error, not an edge.
func TestDamagedRun(t *testing.T) {
	s := &dirStore{dir: t.TempDir()}
	e, err := New(s, 1, Rules{})
	require.NoError(t, err)
	var edges []Edge
	for i := range uint64(9 * minChunk) {
		edges = append(edges, Edge{philox.Mix(i) % 1000, philox.Mix(i) >> 40})
	}
	require.NoError(t, e.Read(context.Background(), edgesAsSource(edges, 1, 500), nil))
	_, err = e.finish(true)
	require.NoError(t, err)
	path := filepath.Join(s.dir, runName(e.runs[1].ID))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	b[len(b)/2] ^= 4
	require.NoError(t, os.WriteFile(path, b, 0o644))
	_, err = e.WriteCSC(context.Background(), 1<<25, nil)
	require.ErrorContains(t, err, "damaged")
	require.ErrorContains(t, err, "restart")
	require.NoError(t, e.Close())
}

func TestRadix(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, n := range []int{0, 1, 2, 30, 150, 1000, 5000, 300_000} {
		for _, mask := range []uint64{0, 1, 0xff, 0x00ffffff_07ffffff, 0x7_00000fff, ^uint64(0),
			3 << 62} {
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
				x := philox.Mix(uint64(i))
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
	var edges []Edge
	for i := range uint64(3000) {
		edges = append(edges, Edge{philox.Mix(i) % 500, philox.Mix(i+1e6) % 500})
	}
	narrow, wide := &dirStore{dir: t.TempDir()}, &dirStore{dir: t.TempDir()}
	write := func(s *dirStore) {
		_, err := Sort(context.Background(), s, edgesAsSource(edges, 3, 100), Options{Nodes: 500})
		require.NoError(t, err)
	}
	write(narrow)
	wideFrom = 100
	defer func() { wideFrom = 1 << 32 }()
	write(wide)
	require.Equal(t, npy.Uint32, narrow.types["indices"])
	require.Equal(t, npy.Int64, wide.types["indices"])
	require.Len(t, narrow.array(t, "indices"), len(edges))
	require.Equal(t, narrow.array(t, "indptr"), wide.array(t, "indptr"))
	require.Equal(t, narrow.array(t, "indices"), wide.array(t, "indices"))
}

// dirStore is a folder as a store without a log; its arrays have no header.
type dirStore struct {
	dir   string
	full  string // writes to files of this name's beginning fail as those to a full disk
	types map[string]npy.DType
	mu    sync.Mutex
}

type dirFile struct {
	*os.File
	full bool
}

func (s *dirStore) Path(name string) string { return filepath.Join(s.dir, name) }
func (s *dirStore) Log() Log                { return nil }

func (s *dirStore) Create(name string) (File, error) {
	f, err := os.Create(s.Path(name))
	return &dirFile{f, s.full != "" && strings.HasPrefix(name, s.full)}, err
}

func (s *dirStore) Array(name string, dt npy.DType, mark *ArrayMark) (Array, error) {
	if mark != nil {
		return nil, errors.New("nothing is gone on with")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.types == nil {
		s.types = map[string]npy.DType{}
	}
	s.types[name] = dt
	f, err := os.Create(s.Path(name))
	return &dirFile{File: f}, err
}

func (f *dirFile) Write(b []byte) (int, error) {
	if f.full {
		return 0, unix.ENOSPC
	}
	return f.File.Write(b)
}

func (f *dirFile) Flush() error  { return nil }
func (f *dirFile) Finish() error { return f.Close() }
func (f *dirFile) Mark() (ArrayMark, error) {
	return ArrayMark{}, errors.New("nothing is gone on with")
}

func (f *dirFile) Discard() error {
	if err := f.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// array reads an array back.
func (s *dirStore) array(t testing.TB, name string) (v []int64) {
	t.Helper()
	b, err := os.ReadFile(s.Path(name))
	require.NoError(t, err)
	for n := s.types[name].Size; len(b) > 0; b = b[n:] {
		if n == 4 {
			v = append(v, int64(binary.LittleEndian.Uint32(b)))
		} else {
			v = append(v, int64(binary.LittleEndian.Uint64(b)))
		}
	}
	return v
}
