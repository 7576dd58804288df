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

// All levels add heads in the order of the list, of rows or of edges, and nothing beside them.
func TestSumHeads(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	normal := func(n int) []float32 {
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(r.NormFloat64())
		}
		return v
	}
	for _, shape := range [][2]int{{1, 1}, {3, 7}, {8, 8}, {2, 19}, {4, 32}, {1, 77}} {
		heads, dim := shape[0], shape[1]
		wide := heads * dim
		s := HeadSum{X: normal(9 * wide), Heads: heads, Dim: dim, Weights: normal(20 * heads)}
		list := []uint32{1, 2, 3, 4, 5, 6, 3, 0, 8, 3}
		const lo = 6
		s.List = list
		init, start := normal(wide), normal(heads)
		for _, rows := range [][]uint32{nil, {5, 1, 2, 8, 0, 7, 7, 3, 2}} {
			s.Rows = rows
			want := make([]float32, wide)
			for c := range want {
				k := c / dim
				want[c] += float32(start[k] * init[c])
				for n, e := range list[lo:] {
					row, edge := int(e), lo+n
					if rows != nil {
						row, edge = int(rows[e]), int(e)
					}
					want[c] += float32(s.Weights[edge*heads+k] * s.X[row*wide+c])
				}
			}
			for _, l := range Levels() {
				out := append(normal(wide), 77)
				l.SumHeads(&s, out[:wide], lo, len(list), init, start)
				require.Equal(t, append(append([]float32{}, want...), 77), out, "%v of %v",
					shape, l)
			}
		}
	}
}
