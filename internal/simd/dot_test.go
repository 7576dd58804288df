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
