package simd

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The order of the sum is part of the contract: a GPU's warp follows it.
func TestDot(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	for _, n := range []int{0, 1, 3, 8, 31, 32, 33, 64, 100, 256} {
		a, b := make([]float32, n), make([]float32, n)
		for k := range a {
			a[k], b[k] = float32(r.NormFloat64()), float32(r.NormFloat64())
		}
		var lanes [32]float32
		for k := range a {
			p := float32(a[k] * b[k])
			lanes[k%32] += p
		}
		for _, d := range []int{16, 8, 4, 2, 1} {
			for k := range d {
				lanes[k] += lanes[k+d]
			}
		}
		for _, l := range Levels() {
			require.Equal(t, lanes[0], l.Dot(a, b), "%d of %v", n, l)
		}
	}
	require.Equal(t, float32(32), Generic.Dot([]float32{4, 4}, []float32{4, 4}))
}

// ordinary are ordinary numbers.
func ordinary(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}

// Products of heads are those of each head alone, of rows in order and by a list.
func TestDotHeads(t *testing.T) {
	r := rand.New(rand.NewPCG(10, 10))
	for _, shape := range [][2]int{{1, 1}, {3, 7}, {8, 8}, {2, 19}, {8, 32}, {1, 77}, {20, 40},
		{2, 16}, {3, 63}} {
		heads, dim := shape[0], shape[1]
		wide := heads * dim
		const rows = 9
		s := HeadDots{A: ordinary(r, rows*wide), B: ordinary(r, rows*wide), Heads: heads, Dim: dim}
		list := []uint32{3, 8, 0, 0, 5, 8, 1}
		want := func(a, b, k int) float32 {
			return Generic.Dot(s.A[a*wide+k*dim:][:dim], s.B[b*wide+k*dim:][:dim])
		}
		for _, l := range Levels() {
			got := append(ordinary(r, rows*heads), 77)
			l.DotRows(&s, got[:rows*heads])
			for i, v := range got[:rows*heads] {
				require.Equal(t, want(i/heads, i/heads, i%heads), v, "%v of %v", shape, l)
			}
			one := HeadDots{s.A[:wide], s.B, heads, dim}
			l.DotRows(&one, got[:rows*heads])
			for i, v := range got[:rows*heads] {
				require.Equal(t, want(0, i/heads, i%heads), v, "%v of %v", shape, l)
			}
			l.DotHeads(&s, got[:rows*heads], list, 1, []uint32{0, 2, 0, 1, 3, 0})
			for i, v := range got[:6*heads] {
				a := []int{1, 1, 3, 4, 4, 4}[i/heads]
				require.Equal(t, want(a, int(list[1+i/heads]), i%heads), v, "%v of %v", shape, l)
			}
			require.Equal(t, float32(77), got[rows*heads], "written past the results")
			l.DotHeads(&one, nil, list, 3, []uint32{0})
			require.Panics(t, func() { l.DotHeads(&one, got, []uint32{1, rows}, 0, []uint32{2}) },
				"a row that is not there")
		}
	}
	for _, l := range Levels() {
		got := []float32{7, 7}
		l.DotRows(&HeadDots{Heads: 2}, got)
		require.Equal(t, []float32{0, 0}, got, "heads of no width")
	}
}

// headSumByHand is SumHeads element by element, as the contract says it.
func headSumByHand(s *HeadSum, lo int, counts []uint32, terms *HeadTerms) []float32 {
	wide := s.Heads * s.Dim
	out := make([]float32, len(counts)*wide)
	n := lo
	for i, count := range counts {
		for c := range wide {
			k, v := c/s.Dim, float32(0)
			add := func(w, x float32) {
				p := float32(w * x)
				v += p
			}
			term := func(t HeadTerm) {
				if t.X != nil {
					add(t.Weights[i*s.Heads+k], t.X[(i*wide)%len(t.X)+c])
				}
			}
			term(terms[0])
			for m := n; m < n+int(count); m++ {
				edge, row := m, int(s.List[m])
				if s.Rows != nil {
					edge, row = row, int(s.Rows[row])
				}
				add(s.Weights[edge*s.Heads+k], s.X[row*wide+c])
			}
			term(terms[1])
			term(terms[2])
			out[i*wide+c] = v
		}
		n += int(count)
	}
	return out
}

// All levels add heads in the order of the list, of rows or of edges, and nothing beside them.
func TestSumHeads(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	for _, shape := range [][2]int{{1, 1}, {3, 7}, {8, 8}, {2, 19}, {8, 32}, {1, 77}, {20, 5},
		{35, 3}, {4, 100}, {1, 300}, {17, 16}} {
		heads, dim := shape[0], shape[1]
		wide := heads * dim
		s := HeadSum{X: someFloats(r, 9*wide), Heads: heads, Dim: dim,
			Weights: someFloats(r, 21*heads)}
		for range 21 {
			s.List = append(s.List, r.Uint32N(9))
		}
		counts := []uint32{0, 1, 2, 3, 9}
		const lo = 4
		each, one := len(counts)*wide, len(counts)*heads
		for variant := range 16 {
			s.Stream, s.Rows = variant&1 != 0, nil
			if variant&2 != 0 {
				s.Rows = []uint32{5, 1, 2, 8, 0, 7, 7, 3, 2}
			}
			var terms HeadTerms
			if variant&4 != 0 {
				terms[0] = HeadTerm{someFloats(r, each), someFloats(r, one)}
			}
			if variant&8 != 0 {
				terms[1] = HeadTerm{someFloats(r, wide), someFloats(r, one)}
				terms[2] = HeadTerm{someFloats(r, each), someFloats(r, one)}
			}
			want := headSumByHand(&s, lo, counts, &terms)
			for _, l := range Levels() {
				for offset := range 2 { // with and without alignment
					s.headOf = nil
					all := alignedFloats(each + 3)
					all[each+offset] = 77
					l.SumHeads(&s, all[offset:offset+each], lo, counts, &terms)
					l.StoreFence()
					requireBits(t, want, all[offset:offset+each], "%v of %v, variant %d", shape, l,
						variant)
					require.Equal(t, float32(77), all[offset+each], "written past the rows")
				}
			}
		}
		for _, l := range Levels() {
			for _, bad := range []HeadSum{{List: []uint32{0, 9}}, {List: []uint32{0, 9},
				Rows: s.Rows}, {List: []uint32{0, 1}, Rows: []uint32{8, 9}}} {
				bad.X, bad.Weights, bad.Heads, bad.Dim = s.X, s.Weights, heads, dim
				require.Panics(t, func() {
					l.SumHeads(&bad, make([]float32, wide), 0, []uint32{2}, &HeadTerms{})
				}, "what is not there")
			}
		}
	}
}
