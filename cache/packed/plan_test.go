package packed

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/superbatch"
	"helios/internal/testing/wide"
)

// file is a File in memory.
type file struct{ b []byte }

func (f *file) WriteAt(b []byte, offset int64) (int, error) {
	if need := int(offset) + len(b); need > len(f.b) {
		f.b = append(f.b, make([]byte, need-len(f.b))...)
	}
	return copy(f.b[offset:], b), nil
}

func (f *file) Truncate(size int64) error {
	f.b = append(f.b[:min(size, int64(len(f.b)))], make([]byte, max(0, size-int64(len(f.b))))...)
	return nil
}

// random is mini-batches whose rows are skewed to low numbers.
func random(r *rand.Rand, batches, rows, limit int) superbatch.Memory {
	m := make(superbatch.Memory, batches)
	for b := range m {
		seen := map[int64]bool{}
		for range r.IntN(limit + 1) {
			row := int64(float64(rows) * r.Float64() * r.Float64())
			if !seen[row] {
				seen[row] = true
				m[b] = append(m[b], row)
			}
		}
	}
	return m
}

// build makes a plan in memory.
func build(t testing.TB, m Accesses, c Config) (*Plan, *Result, []byte) {
	t.Helper()
	f := &file{}
	r, err := Build(context.Background(), m, c, f)
	require.NoError(t, err)
	require.EqualValues(t, len(f.b), r.Bytes)
	p, err := New("plan", bytes.NewReader(f.b), int64(len(f.b)))
	require.NoError(t, err)
	require.Equal(t, r.Stats, p.Stats())
	return p, r, f.b
}

// place is a row's in the pages.
type place struct{ page, row int64 }

// contents are the rows of all pages, as the streams have them.
func contents(t testing.TB, p *Plan) map[place]int64 {
	t.Helper()
	all := map[place]int64{}
	per := p.Shape().RowsPerPage
	for i := range p.Streams() {
		s := p.Stream(i)
		rows, places := streamOf(t, p, i)
		require.True(t, slices.IsSorted(rows))
		require.Len(t, rows, int(s.Rows))
		for k, row := range rows {
			slot := int64(k)
			if s.Cache {
				slot = int64(places[k])
			}
			to := place{s.Page + slot/per, slot % per}
			_, twice := all[to]
			require.False(t, twice, "page %d, row %d is written twice", to.page, to.row)
			all[to] = row
		}
	}
	return all
}

// check holds a plan against the mini-batches: each position in exactly one place, the place has
// its row, nothing is read twice, and the totals are right.
func check(t testing.TB, m superbatch.Memory, c Config, p *Plan) {
	t.Helper()
	hot, err := p.Hot()
	require.NoError(t, err)
	rows := contents(t, p)
	shape, st := p.Shape(), p.Stats()
	per := shape.RowsPerPage
	require.Equal(t, len(m), p.Batches())
	var b Batch
	var got Stats
	for i := range m {
		require.NoError(t, p.Batch(i, &b))
		var pages []int64
		end := int64(-1)
		for _, r := range b.Runs {
			require.GreaterOrEqual(t, r.Page, end)
			require.Positive(t, r.Pages)
			end = r.Page + r.Pages
			for q := r.Page; q < end; q++ {
				pages = append(pages, q)
			}
		}
		require.Len(t, pages, int(b.ReadPages))
		require.LessOrEqual(t, end, p.Pages())
		require.LessOrEqual(t, b.ReadPages, st.MostReadPages)
		rowAt := make([]int64, len(m[i]))
		for k := range rowAt {
			rowAt[k] = -1
		}
		require.Len(t, b.HotRank, len(b.HotPos))
		require.Len(t, b.Slot, len(b.Pos))
		require.True(t, slices.IsSorted(b.HotPos))
		require.True(t, slices.IsSorted(b.Pos))
		for k, pos := range b.HotPos {
			require.EqualValues(t, -1, rowAt[pos])
			rowAt[pos] = hot[b.HotRank[k]]
		}
		read := map[int64]bool{}
		for k, pos := range b.Pos {
			require.EqualValues(t, -1, rowAt[pos])
			page := pages[int64(b.Slot[k])/per]
			row, ok := rows[place{page, int64(b.Slot[k]) % per}]
			require.True(t, ok, "mini-batch %d, position %d: page %d has no row there", i, pos, page)
			rowAt[pos], read[page] = row, true
			if int64(b.Slot[k])/per >= b.ReadPages-b.ChunkPages {
				got.ChunkAccesses++
			} else {
				got.CacheAccesses++
			}
		}
		require.Equal(t, append([]int64{}, m[i]...), rowAt, "mini-batch %d", i)
		require.Len(t, read, len(pages), "each page that is read is needed")
		got.Accesses += int64(len(m[i]))
		got.HotAccesses += int64(len(b.HotPos))
		got.ChunkPages += b.ChunkPages
		got.CacheReadPages += b.ReadPages - b.ChunkPages
	}
	require.Equal(t, st.Accesses, got.Accesses)
	require.Equal(t, st.HotAccesses, got.HotAccesses)
	require.Equal(t, st.ChunkAccesses, got.ChunkAccesses)
	require.Equal(t, st.CacheAccesses, got.CacheAccesses)
	require.Equal(t, st.ChunkPages, got.ChunkPages)
	require.Equal(t, st.CacheReadPages, got.CacheReadPages)
	require.Equal(t, st.Pages, st.CachePages+st.ChunkPages)
	require.Equal(t, st.ChunkRows+st.CacheRows, int64(len(rows)))
	if c.Budget > 0 {
		require.LessOrEqual(t, p.Pages()*shape.PageBytes, c.Budget)
	}
}

// reference counts the rows that several mini-batches of a segment need, and the others.
func reference(m superbatch.Memory, hot []int64, segment int) (many, once int64) {
	in := map[int64]bool{}
	for _, r := range hot {
		in[r] = true
	}
	n := segmentsOf(len(m), segment)
	for i := range n {
		count := map[int64]int{}
		for _, rows := range m[i*len(m)/n : (i+1)*len(m)/n] {
			for _, r := range rows {
				if !in[r] {
					count[r]++
				}
			}
		}
		for _, n := range count {
			if n > 1 {
				many++
			} else {
				once++
			}
		}
	}
	return many, once
}

// Every position of every mini-batch is in exactly one place, and that has its row.
func TestEveryRowHasAPlace(t *testing.T) {
	cases := 10000
	if wide.Lean() {
		cases = 1000
	}
	for i := range cases {
		r := rand.New(rand.NewPCG(19, uint64(i)))
		rows := 1 + r.IntN(300)
		m := random(r, 1+r.IntN(12), rows, 80)
		c := Config{Rows: int64(rows),
			RowBytes: []int64{100, 512, 700, 1000, 4096, 5000}[r.IntN(6)],
			LBABytes: []int64{0, 512, 4096}[r.IntN(3)], Hot: int64(r.IntN(rows)),
			Segment: 1 + r.IntN(len(m)), Hashes: []int{-1, 0, 1, 2, 3, 4}[r.IntN(6)],
			Seed: uint64(i), Workers: 1 + r.IntN(3)}
		p, res, _ := build(t, m, c)
		check(t, m, c, p)
		hot, err := p.Hot()
		require.NoError(t, err)
		many, once := reference(m, hot, c.Segment)
		require.Equal(t, many, res.Stats.CacheRows, "case %d: rows of disk caches", i)
		require.Equal(t, once, res.Stats.ChunkRows, "case %d: rows of chunks", i)
		// More room, the same segments: copies, fewer reads.
		c.Budget = (p.Pages() + int64(r.IntN(40))) * p.Shape().PageBytes
		if c.Budget == 0 {
			continue
		}
		q, more, _ := build(t, m, c)
		check(t, m, c, q)
		require.LessOrEqual(t, more.Stats.ReadPages(), res.Stats.ReadPages(), "case %d", i)
	}
}

// The rows that stay in memory are those of the most accesses; equals go by their number.
func TestHotRows(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for range 200 {
		m := random(r, 1+r.IntN(20), 100, 60)
		count := make([]int, 100)
		for _, rows := range m {
			for _, v := range rows {
				count[v]++
			}
		}
		want := []int64{}
		for v, n := range count {
			if n > 0 {
				want = append(want, int64(v))
			}
		}
		slices.SortStableFunc(want, func(x, y int64) int { return count[y] - count[x] })
		hot := r.IntN(101)
		p, _, _ := build(t, m, Config{Rows: 100, RowBytes: 512, Hot: int64(hot), Workers: 2})
		got, err := p.Hot()
		require.NoError(t, err)
		require.Equal(t, want[:min(hot, len(want))], got)
		// A later plan takes them as they are.
		later := random(r, 5, 100, 60)
		c := Config{Rows: 100, RowBytes: 512, HotRows: got, Segment: 3}
		q, _, _ := build(t, later, c)
		again, err := q.Hot()
		require.NoError(t, err)
		require.Equal(t, got, again)
		check(t, later, c, q)
	}
}

// A plan does not depend on the number of workers.
func TestWorkersMakeTheSamePlan(t *testing.T) {
	for seed := range uint64(4) {
		m := random(rand.New(rand.NewPCG(5, seed)), 30, 20000, 3000)
		c := Config{Rows: 20000, RowBytes: 512, Hot: 1000, Segment: 7, Seed: seed,
			Budget: 40 << 20, Workers: 1}
		_, _, want := build(t, m, c)
		for _, c.Workers = range []int{2, 5} {
			_, _, got := build(t, m, c)
			require.True(t, bytes.Equal(want, got), "%d workers, seed %d", c.Workers, seed)
		}
	}
}

// streamOf gives a stream's rows and, of a disk cache, their places.
func streamOf(t testing.TB, p *Plan, i int) ([]int64, []uint32) {
	t.Helper()
	rows, err := p.Rows(i)
	require.NoError(t, err)
	if !p.Stream(i).Cache {
		return rows, nil
	}
	places, err := p.places(i, nil)
	require.NoError(t, err)
	return rows, places
}

func ExampleBuild() {
	m := superbatch.Memory{{1, 2, 3}, {2, 3, 4}, {2, 5}}
	f := &file{}
	r, err := Build(context.Background(), m, Config{Rows: 10, RowBytes: 512, Hot: 1, Segment: 3}, f)
	if err != nil {
		fmt.Println(err)
		return
	}
	s := r.Stats
	fmt.Println(s.HotRows, "in memory,", s.CacheRows, "in disk caches,", s.ChunkRows, "in chunks")
	// Output: 1 in memory, 1 in disk caches, 3 in chunks
}
