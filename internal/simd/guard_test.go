//go:build unix

package simd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// fence hands out memory that ends, or begins, where an unreadable page is: what goes past it
// faults.
type fence struct {
	t    testing.TB
	back bool // the unreadable page is in front
	r    *rand.Rand
}

func guarded[T any](f *fence, n int) []T {
	var one T
	size := n * int(unsafe.Sizeof(one))
	page := unix.Getpagesize()
	room := (size + page - 1) / page * page
	mem, err := unix.Mmap(-1, 0, room+2*page, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, unix.Munmap(mem)) })
	require.NoError(f.t, unix.Mprotect(mem[:page], unix.PROT_NONE))
	require.NoError(f.t, unix.Mprotect(mem[page+room:], unix.PROT_NONE))
	first := page + room - size
	if f.back {
		first = page
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&mem[first:][:1][0])), n)
}

func (f *fence) floats(n int) []float32 {
	if n == 0 {
		return nil
	}
	v := guarded[float32](f, n)
	for i := range v {
		v[i] = float32(f.r.NormFloat64())
	}
	return v
}

func (f *fence) numbers(n int, below uint32) []uint32 {
	if n == 0 {
		return nil
	}
	v := guarded[uint32](f, n)
	for i := range v {
		v[i] = f.r.Uint32N(below)
	}
	return v
}

// Nothing is read or written outside of the operands: each lies against an unreadable page, first
// with its end and then with its beginning.
func TestGuardPages(t *testing.T) {
	sizes := []int{1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 47, 64, 65, 100}
	for _, l := range Levels() {
		for _, back := range []bool{false, true} {
			for _, n := range sizes {
				t.Run(fmt.Sprintf("%v/%v/%d", l, back, n), func(t *testing.T) {
					defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
					f := &fence{t, back, rand.New(rand.NewPCG(9, uint64(n)))}
					guardRows(f, l, n)
					guardHeads(f, l, n)
					guardSoftmax(f, l, n)
					guardConvert(f, l, n)
					guardGemm(f, l, n)
					guardSample(f, l, n)
				})
			}
		}
	}
}

func guardRows(f *fence, l Level, dim int) {
	const rows = 9
	s := RowSum{X: f.floats(rows * dim), Dim: dim, List: f.numbers(7, rows), Table: f.floats(rows),
		Scale: 2}
	s.List[6], s.List[0] = rows-1, 0
	places := guarded[int64](f, rows)
	for j := range places {
		places[j] = int64(rows - 1 - j)
	}
	for variant := range 16 {
		s.Gate, s.Stream, s.Map = variant&1 != 0, variant&2 != 0, nil
		if variant&4 != 0 {
			s.Map = places
		}
		if variant&8 != 0 {
			s.Table = nil
		}
		sumRows(l, &s, f.floats(dim), 0, 7, 0.5, f.floats(dim), 2)
		sumRows(l, &s, f.floats(dim), 7, 7, 0.5, nil, 2)
		l.StoreFence()
	}
	l.SumColumns(f.floats(dim), f.floats(6*(dim+3)+dim), 7, dim+3)
	ReadRows(l, s.X, dim, s.List, 0, 7)
	l.Adam(f.floats(dim), f.floats(dim), f.floats(dim), f.floats(dim),
		&AdamStep{B1: .9, C1: .1, B2: .99, C2: .01, StepSize: 1, RootC2: 1, Eps: 1})
	width := 64 * (1 + dim/16)
	src, dst := guarded[byte](f, rows*width), guarded[byte](f, rows*width)
	pos, slot := f.numbers(7, rows), f.numbers(7, rows)
	pos[6], slot[6], pos[0], slot[0] = rows-1, rows-1, 0, 0
	require.Equal(f.t, l > Generic, l.CopyRows(dst, src, pos, slot, 5, width, width))
	require.Equal(f.t, l > Generic, l.CopyRows(dst, src, pos[5:], slot[5:], 2, width, width))
	l.StoreFence()
}

func guardHeads(f *fence, l Level, dim int) {
	const rows = 9
	for _, heads := range []int{1, 3, 8, 19} {
		wide := heads * dim
		dots := HeadDots{f.floats(2 * wide), f.floats(rows * wide), heads, dim}
		list := f.numbers(7, rows)
		list[6], list[0] = rows-1, 0
		l.DotHeads(&dots, f.floats(7*heads), list, 0, []uint32{3, 4})
		dots.A = f.floats(wide)
		l.DotRows(&dots, f.floats(rows*heads))
		l.Dot(f.floats(dim), f.floats(dim))
		s := HeadSum{X: f.floats(rows * wide), Heads: heads, Dim: dim, List: list,
			Weights: f.floats(7 * heads)}
		for variant := range 4 {
			if s.Stream = variant&1 != 0; variant&2 != 0 {
				s.Rows, s.Weights = f.numbers(rows, rows), f.floats(rows*heads)
			}
			l.SumHeads(&s, f.floats(2*wide), 0, []uint32{3, 4}, &HeadTerms{
				{f.floats(2 * wide), f.floats(2 * heads)}, {f.floats(wide), f.floats(2 * heads)}})
			l.SumHeads(&s, f.floats(wide), 7, []uint32{0}, &HeadTerms{})
			l.StoreFence()
		}
	}
}

func guardSoftmax(f *fence, l Level, heads int) {
	const rows = 9
	list, counts := f.numbers(7, rows), guarded[uint32](f, 3)
	list[6], list[0] = rows-1, 0
	copy(counts, []uint32{3, 0, 4})
	s := HeadSoftmax{Heads: heads, Src: f.floats(rows * heads), Dst: f.floats(3 * heads),
		Largest: f.floats(3 * heads), Inverse: f.floats(3 * heads), Alpha: f.floats(7 * heads),
		AlphaSelf: f.floats(3 * heads), Dot: f.floats(7 * heads), DotSelf: f.floats(3 * heads),
		DDst: f.floats(3 * heads)}
	for range 2 {
		l.Softmax(&s, 0, list, 0, counts)
		l.SoftmaxSlope(&s, 0, list, 0, counts)
		l.Softmax(&s, 2, list, 3, counts[2:])
		l.SoftmaxSlope(&s, 1, list, 3, counts[1:2])
		s.Weights = f.floats(rows)
	}
}

func guardConvert(f *fence, l Level, n int) {
	dst, src := f.floats(n), guarded[byte](f, 2*n)
	l.FromFloat16(dst, src)
	l.FromBFloat16(dst, src)
	l.FromInt8(dst, guarded[byte](f, n), 0.5)
	l.FromUint32(guarded[int64](f, n), f.numbers(n, 9))
	indptr := guarded[int64](f, n+1)
	for i := range indptr {
		indptr[i] = int64(i) * int64(i) / 8
	}
	l.Repeat(guarded[int64](f, int(indptr[n])), indptr, 3)
	l.BiasReLU(f.floats(n), f.floats(n), true)
	l.Dropout(f.floats(n), [2]uint32{1, 2}, [4]uint32{3}, 0.5, 2)
	l.ELU(f.floats(n), f.floats(n))
	l.ELUSlope(f.floats(n), f.floats(n))
	l.GELU(f.floats(n), f.floats(n))
	l.GELUSlope(f.floats(n), f.floats(n))
}

func guardGemm(f *fence, l Level, n int) {
	if l == Generic {
		return
	}
	side := func(rows, cols int, turned bool) ([]float32, int) {
		if turned {
			rows, cols = cols, rows
		}
		ld := cols + n%3
		return f.floats((rows-1)*ld + cols), ld
	}
	for i, s := range [][3]int{{n, n, n}, {1, n, 9}, {2, 128 + n, 5}, {n, 3, 17}, {7, n, 1},
		{n, 33, 600}, {50, n, 16}, {1030, 1, n}} {
		for kind := range 3 {
			p := Product{M: s[0], N: s[1], TransA: kind == 2, TransB: kind == 1}
			for j := range 1 + (i+kind+n)%2 {
				x := &p.Terms[j]
				x.K = s[2] + j
				x.A, x.LDA = side(p.M, x.K, p.TransA)
				x.B, x.LDB = side(x.K, p.N, p.TransB)
			}
			p.C, p.LDC = side(p.M, p.N, false)
			l.Multiply(&p)
			p.BF16 = true
			for _, w := range bf16Ways(l) {
				p.by(w)
			}
		}
	}
}

func guardSample(f *fence, l Level, n int) {
	const numNodes = 50
	indptr := guarded[int64](f, numNodes+1)
	for v := range int64(numNodes) {
		indptr[v+1] = indptr[v] + int64(f.r.IntN(12))
		if v == numNodes-1 {
			indptr[v+1] = indptr[v] + 11
		}
	}
	edges := int(indptr[numNodes])
	narrow, wide := f.numbers(edges, numNodes), guarded[int64](f, edges)
	for i := range wide {
		wide[i] = int64(narrow[i])
	}
	seeds := guarded[int64](f, n)
	for i := range seeds {
		seeds[i] = int64(f.r.IntN(numNodes))
	}
	seeds[0], seeds[n-1] = 0, numNodes-1
	first, deg, local := guarded[int64](f, n), guarded[uint32](f, n), guarded[uint32](f, n+1)
	const k = 5
	require.Equal(f.t, n, l.SampleRows(seeds, n, indptr, int64(edges), k, first, deg, local))
	keys := SampleKeys([2]uint32{1, 2})
	total := int(local[n])
	ids := guarded[uint32](f, total+k)
	for g := 0; g < n; g += SampleGroup {
		m := min(SampleGroup, n-g)
		nodes, degrees, draws := guarded[int64](f, SampleGroup), guarded[uint32](f, SampleGroup),
			guarded[uint32](f, (k+1)*SampleGroup)
		copy(nodes, seeds[g:g+m])
		copy(degrees, deg[g:g+m])
		l.SampleDraw((*[SampleGroup]int64)(nodes), (*[SampleGroup]uint32)(degrees), k, &keys, 1,
			0, draws)
		l.SamplePrefetch(first[g:], m, k, draws, unsafe.Pointer(&narrow[0]), false)
		require.Zero(f.t, l.SampleGather64(first[g:], deg[g:], m, k, draws, wide, numNodes,
			ids[local[g]:]))
		require.Zero(f.t, l.SampleGather32(first[g:], deg[g:], m, k, draws, narrow, numNodes,
			ids[local[g]:]))
	}
	ids = append(guarded[uint32](f, total+SampleAhead)[:0], ids[:total]...)[:total+SampleAhead]
	for i := range SampleAhead {
		ids[total+i] = math.MaxUint32 // prefetched at most
	}
	src := guarded[uint32](f, total)
	table, nodes := guarded[uint32](f, numNodes), guarded[int64](f, numNodes+1)
	next := l.SampleEnter(ids, total, table, 1<<8, 1<<8-1, nodes, 0, src)
	require.LessOrEqual(f.t, next, numNodes)
	h := SampleHash{Table: guarded[uint64](f, 128), Shift: 57, PosBits: 8, Mask: 1<<8 - 1,
		Low: 1<<40 - 1, Stamp: 1 << 40}
	require.Equal(f.t, next, l.SampleEnterHash(ids, total, &h, nodes, 0, src))
}
