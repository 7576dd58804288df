package simd

import (
	"bytes"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// rowDims are widths with every kind of stripe and rest.
var rowDims = []int{1, 3, 8, 47, 64, 100, 127, 128, 256, 602}

// someFloats has ordinary numbers, zeros of both signs, and now and then NaN, infinity and
// denormals.
func someFloats(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
		switch r.IntN(200) {
		case 0:
			v[i] = float32(math.NaN())
		case 1:
			v[i] = float32(math.Inf(r.IntN(2)*2 - 1))
		case 2:
			v[i] = 1e-40
		case 3:
			v[i] = 0
		case 4:
			v[i] = float32(math.Copysign(0, -1))
		}
	}
	return v
}

// requireBits compares to the bit; all NaNs are one.
func requireBits(t *testing.T, want, got []float32, format string, args ...any) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		if math.Float32bits(want[i]) != math.Float32bits(got[i]) &&
			(want[i] == want[i] || got[i] == got[i]) {
			t.Fatalf("%s: element %d is %v, expected %v", fmt.Sprintf(format, args...), i, got[i],
				want[i])
		}
	}
}

// alignedFloats starts at a multiple of 64 bytes.
func alignedFloats(n int) []float32 {
	v := make([]float32, n+16)
	for uintptr(unsafe.Pointer(&v[0]))%64 != 0 {
		v = v[1:]
	}
	return v[:n:n]
}

// rowSumByHand is sumRows element by element, as the contract says it.
func rowSumByHand(s *RowSum, old []float32, list []uint32, factor float32, init []float32,
	start float32) []float32 {
	out := make([]float32, s.Dim)
	for k := range out {
		v := float32(0)
		if init != nil {
			v = start * init[k]
		}
		for _, j := range list {
			w := factor
			if s.Table != nil {
				w = float32(factor * s.Table[j])
			}
			row := int(j)
			if s.Map != nil {
				row = int(s.Map[j])
			}
			p := float32(w * s.X[row*s.Dim+k])
			v += p
		}
		if s.Gate {
			if !(old[k] > 0) {
				v = 0
			} else {
				v *= s.Scale
			}
		}
		out[k] = v
	}
	return out
}

// sumRows is SumLists for one list, List[lo:hi].
func sumRows(l Level, s *RowSum, out []float32, lo, hi int, factor float32, init []float32,
	start float32) {
	_ = s.List[lo:hi]
	one := [1]RowList{{uint32(hi - lo), factor, start}}
	l.SumLists(s, out, lo, one[:], init)
}

// requireManyLists sums lists of all lengths in one call.
func requireManyLists(t *testing.T, r *rand.Rand) {
	const rows, dim = 40, 77
	s := RowSum{X: someFloats(r, rows*dim), Dim: dim, Gate: true, Scale: 0.5}
	var lists []RowList
	for n := range uint32(20) {
		lists = append(lists, RowList{n, 0.25 * float32(n), float32(n)})
		for range n {
			s.List = append(s.List, r.Uint32N(rows))
		}
	}
	init, old := someFloats(r, len(lists)*dim), someFloats(r, len(lists)*dim)
	var want []float32
	first := 0
	for i, q := range lists {
		want = append(want, rowSumByHand(&s, old[i*dim:], s.List[first:first+int(q.N)], q.Factor,
			init[i*dim:], q.Start)...)
		first += int(q.N)
	}
	for _, l := range Levels() {
		got := append([]float32{}, old...)
		l.SumLists(&s, got, 0, lists, init)
		requireBits(t, want, got, "%v, many lists", l)
	}
}

func TestSumLists(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	const rows = 40
	for _, dim := range rowDims {
		x, table := someFloats(r, rows*dim), someFloats(r, rows)
		var list []uint32
		var ends []int
		for _, n := range []int{0, 1, 2, 3, 4, 5, 9, 0, 30} {
			for range n {
				list = append(list, r.Uint32N(rows))
			}
			ends = append(ends, len(list))
		}
		places := make([]int64, rows)
		for j := range places {
			places[j] = r.Int64N(rows)
		}
		for variant := range 32 {
			s := RowSum{X: x, Dim: dim, List: list, Gate: variant&1 != 0, Scale: 1.25,
				Stream: variant&2 != 0}
			if variant&16 != 0 {
				s.Map = places
			}
			if variant&4 != 0 {
				s.Table = table
			}
			lo := 0
			for _, hi := range ends {
				var init []float32
				if variant&8 != 0 {
					init = someFloats(r, dim)
				}
				old := someFloats(r, dim)
				want := rowSumByHand(&s, old, list[lo:hi], 0.3, init, 0.7)
				for _, l := range Levels() {
					for offset := range 2 { // with and without alignment
						all := alignedFloats(dim + 3)
						copy(all[offset:], old)
						all[dim+offset] = 77
						sumRows(l, &s, all[offset:offset+dim], lo, hi, 0.3, init, 0.7)
						l.StoreFence()
						requireBits(t, want, all[offset:offset+dim],
							"%v, %d columns, %d rows, variant %d", l, dim, hi-lo, variant)
						require.Equal(t, float32(77), all[dim+offset], "written past the row")
					}
				}
				lo = hi
			}
		}
	}
	requireManyLists(t, r)
	for _, l := range Levels() {
		require.Panics(t, func() {
			sumRows(l, &RowSum{X: make([]float32, 6), Dim: 2, List: []uint32{1, 3}},
				make([]float32, 2), 0, 2, 1, nil, 0)
		}, "a row that is not there")
		for _, places := range [][]int64{{0}, {0, 3}, {0, -1}, {0, 1 << 60}} {
			require.Panics(t, func() {
				sumRows(l, &RowSum{X: make([]float32, 6), Dim: 2, List: []uint32{0, 1},
					Map: places}, make([]float32, 2), 0, 2, 1, nil, 0)
			}, "rows at %v", places)
		}
	}
}

func TestSumColumns(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	for _, cols := range rowDims {
		for _, rows := range []int{0, 1, 2, 7, 33} {
			stride := cols + r.IntN(3)
			x := someFloats(r, rows*stride)
			want := make([]float32, cols)
			for i := range rows {
				for c := range want {
					want[c] += x[i*stride+c]
				}
			}
			for _, l := range Levels() {
				got := make([]float32, cols+1)
				got[cols] = 77
				l.SumColumns(got[:cols], x[:max(0, (rows-1)*stride+cols)], rows, stride)
				requireBits(t, want, got[:cols], "%v, %dx%d", l, rows, cols)
				require.Equal(t, float32(77), got[cols], "written past the row")
			}
		}
	}
}

func TestAdamLevels(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	q := AdamStep{B1: 0.9, C1: 0.1, B2: 0.999, C2: 0.001, StepSize: 0.003, RootC2: 3, Eps: 1e-8,
		L2: 0.01, Decay: 0.002}
	for _, n := range append(rowDims, 0, 1000) {
		p, g, m, v := someFloats(r, n), someFloats(r, n), someFloats(r, n), someFloats(r, n)
		var want [3][]float32
		for i, l := range Levels() {
			got := [3][]float32{append([]float32{}, p...), append([]float32{}, m...),
				append([]float32{}, v...)}
			l.Adam(got[0], g, got[1], got[2], &q)
			if i == 0 {
				want = got
				continue
			}
			for k := range want {
				requireBits(t, want[k], got[k], "%v, %d parameters, array %d", l, n, k)
			}
		}
	}
}

func TestCopyRows(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	bytesOf := func(
		v []float32) []byte {
		return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 4*len(v))
	}
	for _, l := range Levels() {
		for _, dim := range []int{16, 48, 100, 128} {
			const rows, n = 30, 20
			stride := dim + 16
			src, dst, want := someFloats(r, rows*dim), alignedFloats(n*stride),
				make([]float32, n*stride)
			pos, slot := make([]uint32, n), make([]uint32, n)
			for i, p := range r.Perm(n) {
				pos[i], slot[i] = uint32(p), r.Uint32N(rows)
				if i < 13 {
					copy(want[p*stride:][:dim], src[int(slot[i])*dim:])
				}
			}
			did := l.CopyRows(bytesOf(dst), bytesOf(src), pos, slot, 13, dim*4, stride*4)
			l.StoreFence()
			require.Equal(t, l != Generic && dim != 100, did, "%v, %d columns", l, dim)
			if did {
				require.True(t, bytes.Equal(bytesOf(want), bytesOf(dst)), "%v, %d columns", l, dim)
			}
			require.False(t, l.CopyRows(bytesOf(dst)[4:], bytesOf(src), pos, slot, 13, dim*4,
				stride*4), "not aligned")
			require.False(t, l.CopyRows(bytesOf(dst), bytesOf(src), pos, slot, 13, 0, stride*4),
				"nothing to copy")
		}
	}
}

// The quotients that prefetches go by are those of the division; a prefetch itself shows nothing
// but that it does no harm.
func TestPrefetchParts(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	for _, n := range []uint64{1, 2, 3, 7, 32, 64, 96, 224, 1000, 4096, 4095 << 5} {
		d := DivisorOf(n)
		for range 2000 {
			x := r.Uint64N(1 << 48)
			if r.IntN(2) == 0 { // around a multiple
				x = max(x/n*n, 1) - r.Uint64N(2)
			}
			q, _ := bits.Mul64(x>>d.Shift, d.Magic)
			if n == 1 {
				q = x // Magic is 0: every row asks for the first part
			}
			require.Equal(t, x/n, q, "%d by %d", x, n)
		}
	}
	mem := make([]byte, 640)
	for _, l := range Levels() {
		l.PrefetchParts(mem, []int64{0, 100, 2239, -1, 1 << 60}, DivisorOf(224))
		l.PrefetchParts(mem, nil, DivisorOf(224))
		l.PrefetchParts(nil, []int64{1}, DivisorOf(224))
	}
}
