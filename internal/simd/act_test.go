package simd

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Activations are within a few roundings of float64, their slopes of differences, and the same bits
// at every level and length, of NaN, infinities and zeros too.
func TestActivations(t *testing.T) {
	gelu64 := func(x float64) float64 {
		return x / (1 + math.Exp(-2*math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
	}
	elu64 := func(x float64) float64 {
		if x > 0 {
			return x
		}
		return math.Expm1(x)
	}
	r := rand.New(rand.NewPCG(5, 5))
	for name, f := range map[string]struct {
		value func(l Level, out, x []float32)
		slope func(l Level, x, grad []float32)
		exact func(float64) float64
	}{
		"elu":  {Level.ELU, Level.ELUSlope, elu64},
		"gelu": {Level.GELU, Level.GELUSlope, gelu64},
	} {
		for _, n := range []int{0, 1, 7, 8, 9, 64, 1000} {
			x, grad := someFloats(r, n), someFloats(r, n)
			for i := range x {
				x[i] *= float32(math.Exp(3 * r.NormFloat64()))
			}
			want, slope := make([]float32, n), append([]float32{}, x...)
			f.value(Generic, want, x)
			f.slope(Generic, slope, grad)
			for i, v := range x {
				v := float64(v)
				if math.IsNaN(v) || math.IsInf(v, 0) || math.IsNaN(float64(grad[i])) ||
					math.IsInf(float64(grad[i]), 0) {
					continue
				}
				require.InDelta(t, f.exact(v), want[i], 2e-38*math.Abs(v)+4e-7*math.Abs(f.exact(v))+
					1e-6*math.Exp(-math.Abs(v)), "%s(%v)", name, v)
				step := 1e-6 * max(1, math.Abs(v))
				if name == "elu" && math.Abs(v) < step {
					continue // the slope of elu bends at 0
				}
				d := float64(grad[i]) * (f.exact(v+step) - f.exact(v-step)) / (2 * step)
				require.InDelta(t, d, slope[i], 1e-44+2e-6*math.Abs(float64(grad[i])),
					"slope of %s at %v", name, v)
			}
			for _, l := range Levels() {
				out := make([]float32, n)
				f.value(l, out, x)
				requireBits(t, want, out, "%s of %d at %v", name, n, l)
				in := append([]float32{}, x...)
				f.value(l, in, in)
				requireBits(t, want, in, "%s in place of %d at %v", name, n, l)
				in = append([]float32{}, x...)
				f.slope(l, in, grad)
				requireBits(t, slope, in, "slope of %s of %d at %v", name, n, l)
			}
		}
	}
}

// TestFarSlopes: far from 0 a slope is that of x or of 0, and what is no number stays none.
func TestFarSlopes(t *testing.T) {
	nan := float32(math.NaN())
	x := []float32{17, 100, 1e13, 1e20, math.MaxFloat32, -17, -100, -1e13, -1e20, nan, 1e20, -1e38,
		16, -16, 50, 1e5, 1e10}
	grad := []float32{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1}
	for _, l := range Levels() {
		got := append([]float32{}, x...)
		l.GELUSlope(got, grad)
		for i, v := range got {
			want := 0.0
			if x[i] > 0 {
				want = float64(grad[i])
			}
			if x[i] != x[i] {
				require.True(t, v != v, "%v: %v at %v", l, v, x[i])
				continue
			}
			require.InDelta(t, want, v, 1e-30, "%v at %v", l, x[i])
		}
	}
}

func BenchmarkActivations(b *testing.B) {
	x := make([]float32, 4096)
	for i := range x {
		x[i] = float32(i%97)/16 - 3
	}
	out := make([]float32, len(x))
	for name, f := range map[string]func(l Level, out,
		x []float32){"elu": Level.ELU, "gelu": Level.GELU} {
		for _, l := range Levels() {
			b.Run(name+"/"+l.String(), func(b *testing.B) {
				b.SetBytes(int64(8 * len(x)))
				for b.Loop() {
					f(l, out, x)
				}
			})
		}
	}
}
