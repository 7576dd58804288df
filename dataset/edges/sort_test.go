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
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/philox"
)

// reference returns what the rules make of edges, by sorting in memory.
func reference(edges []Edge, nodes int64, r Rules) []Edge {
	var want []Edge
	if r.None {
		return nil
	}
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
					Opposite: true}, {None: true}} {
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
				if !rules.None {
					require.Equal(t, counts.Stored, counts.Taken+counts.Opposite+counts.Added-
						counts.Self-counts.Duplicates)
					all := rules
					all.Dedup = false
					require.EqualValues(t, len(reference(edges, int64(c.ids), all))-len(want),
						counts.Duplicates)
				}
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

// Ids beyond 32 bits are refused by name.
func TestEdgeSorterRefusesLargeIDs(t *testing.T) {
	_, err := Sort(context.Background(), &dirStore{dir: t.TempDir()},
		edgesAsSource([]Edge{{1, 2}, {1 << 32, 5}}, 1, 1), Options{Nodes: 1 << 33})
	require.ErrorContains(t, err, "test has node 4294967296; a dataset has at most 2^32 nodes")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
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
	path := filepath.Join(s.dir, runName(e.runs[1].id))
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
	f.Add([]byte("0123456789abcdef"))
	f.Fuzz(func(t *testing.T, b []byte) {
		// Any keys come back; any bytes are refused or decoded, without a crash.
		keys := make([]uint64, min(len(b)/8, maxGroup))
		for i := range keys {
			keys[i] = binary.LittleEndian.Uint64(b[8*i:])
		}
		slices.Sort(keys)
		buf := make([]byte, groupRoom)
		if n := len(keys); n > 0 {
			size := encodeGroup(buf, keys)
			got := make([]uint64, n)
			used, err := decodeGroup(got, buf[:size+8], n)
			require.NoError(t, err)
			require.Equal(t, size, used)
			require.Equal(t, keys, got)
		}
		_, _ = decodeGroup(make([]uint64, maxGroup), b, 64)
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

// dirStore is a folder as a store; its arrays have no header.
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

func (s *dirStore) Create(name string) (File, error) {
	f, err := os.Create(s.Path(name))
	return &dirFile{f, s.full != "" && strings.HasPrefix(name, s.full)}, err
}

func (s *dirStore) Array(name string, dt npy.DType) (Array, error) {
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

func (f *dirFile) Flush() error { return nil }

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
