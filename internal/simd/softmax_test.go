package simd

import (
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/wide"
)

// Exp of every number from -87 to 0 is within a unit in the last place of e^x; of each 61st one
// where tests are few. Below it is e^-87, and of NaN it is NaN.
func TestExp(t *testing.T) {
	step := uint32(61)
	if !wide.Lean() {
		step = 1
	}
	workers := uint32(runtime.GOMAXPROCS(0))
	worst := make([]float64, workers)
	var wait sync.WaitGroup
	for w := range workers {
		wait.Go(func() {
			// From -2^-25 on e^x is 1 or the number before it, which the bound allows.
			for b := math.Float32bits(0x1p-25) + w*step; b <= math.Float32bits(87); b +=
				workers * step {
				x := -math.Float32frombits(b)
				want := math.Exp(float64(x))
				_, exp := math.Frexp(want)
				unit := math.Ldexp(1, exp-24)
				worst[w] = max(worst[w], math.Abs(float64(Exp(x))-want)/unit)
			}
		})
	}
	wait.Wait()
	largest := 0.0
	for _, v := range worst {
		largest = max(largest, v)
	}
	t.Logf("largest error: %.3f units in the last place", largest)
	require.Less(t, largest, 1.0)
	require.Equal(t, float32(1), Exp(0))
	for _, x := range []float32{-math.SmallestNonzeroFloat32, -0x1p-25, -0x1p-26} {
		require.InDelta(t, 1, Exp(x), 0x1p-24)
	}
	for _, x := range []float32{-87.5, -1e10, float32(math.Inf(-1))} {
		require.Equal(t, Exp(-87), Exp(x))
	}
	require.True(t, math.IsNaN(float64(Exp(float32(math.NaN())))))
}

// softmaxCase is attention over lists, empty ones and parallel edges among them.
func softmaxCase(r *rand.Rand, heads int, weighed bool,
	scores func(n int) []float32) (s HeadSoftmax, list, counts []uint32) {
	const dsts, srcs = 9, 20
	for range dsts {
		counts = append(counts, uint32(r.IntN(6)))
		for range counts[len(counts)-1] {
			list = append(list, uint32(r.IntN(srcs)))
		}
	}
	s = HeadSoftmax{Heads: heads, Src: scores(srcs * heads), Dst: scores(dsts * heads),
		Dot: scores(len(list) * heads), DotSelf: scores(dsts * heads)}
	if weighed {
		for range srcs {
			s.Weights = append(s.Weights, float32(math.Exp(r.NormFloat64())))
		}
		for range dsts {
			s.Loops = append(s.Loops, float32(r.IntN(3)))
		}
	}
	return s, list, counts
}

// results gives s memory of its own for what it computes.
func (s HeadSoftmax) results() *HeadSoftmax {
	s.Alpha, s.AlphaSelf = make([]float32, len(s.Dot)), make([]float32, len(s.Dst))
	s.Largest, s.Inverse = make([]float32, len(s.Dst)), make([]float32, len(s.Dst))
	s.DDst = make([]float32, len(s.Dst))
	s.Dot, s.DotSelf = append([]float32{}, s.Dot...), append([]float32{}, s.DotSelf...)
	return &s
}

// Attention and its gradients are the same bits at every level, of NaN and infinities too, and near
// those of float64.
func TestSoftmax(t *testing.T) {
	r := rand.New(rand.NewPCG(12, 12))
	for _, heads := range []int{1, 2, 7, 8, 9, 16, 20} {
		for _, weighed := range []bool{false, true} {
			odd, list, counts := softmaxCase(r, heads, weighed,
				func(n int) []float32 { return someFloats(r, n) })
			sameSoftmax(t, &odd, list, counts)
			s, list, counts := softmaxCase(r, heads, weighed,
				func(n int) []float32 { return ordinary(r, n) })
			sameSoftmax(t, &s, list, counts)
			nearSoftmax(t, s.results(), list, counts)
		}
	}
}

func sameSoftmax(t *testing.T, s *HeadSoftmax, list, counts []uint32) {
	t.Helper()
	run := func(l Level, step int) *HeadSoftmax {
		got := s.results()
		for _, pass := range []func(*HeadSoftmax, int, []uint32, int, []uint32){l.Softmax,
			l.SoftmaxSlope} {
			lo := 0
			for row := 0; row < len(counts); row += step {
				some := counts[row:min(row+step, len(counts))]
				pass(got, row, list, lo, some)
				for _, n := range some {
					lo += int(n)
				}
			}
		}
		return got
	}
	want := run(Generic, len(counts))
	for _, l := range Levels() {
		for _, step := range []int{2, len(counts)} {
			got := run(l, step)
			for name, v := range map[string][2][]float32{"alpha": {want.Alpha, got.Alpha},
				"own": {want.AlphaSelf, got.AlphaSelf}, "largest": {want.Largest, got.Largest},
				"inverse": {want.Inverse, got.Inverse}, "dot": {want.Dot, got.Dot},
				"own dot": {want.DotSelf, got.DotSelf}, "dst": {want.DDst, got.DDst}} {
				requireBits(t, v[0], v[1], "%s of %d heads at %v", name, s.Heads, l)
			}
		}
	}
}

func nearSoftmax(t *testing.T, s *HeadSoftmax, list, counts []uint32) {
	t.Helper()
	dots := s.results()
	Best().Softmax(s, 0, list, 0, counts)
	Best().SoftmaxSlope(s, 0, list, 0, counts)
	const near = 1e-5
	for i, n := range counts {
		for k := range s.Heads {
			raw := func(j int) float64 {
				return float64(s.Dst[i*s.Heads+k]) + float64(s.Src[j*s.Heads+k])
			}
			exp := func(j int) float64 { return math.Exp(max(raw(j), leakySlope*raw(j))) }
			slope := func(j int) float64 {
				return map[bool]float64{true: 1, false: leakySlope}[raw(j) > 0]
			}
			weight := func(j uint32) float64 {
				if s.Weights == nil {
					return 1
				}
				return float64(s.Weights[j])
			}
			own, loop := i*s.Heads+k, exp(i)
			if s.Loops != nil {
				loop *= float64(s.Loops[i])
			}
			sum, mean := loop, loop*float64(dots.DotSelf[own])
			for e, j := range list[:n] {
				x := exp(int(j)) * weight(j)
				sum, mean = sum+x, mean+x*float64(dots.Dot[e*s.Heads+k])
			}
			if mean /= sum; sum == 0 {
				continue // a loop of no weight, and no edge
			}
			share := loop / sum
			require.InDelta(t, share, s.AlphaSelf[own], near)
			g := share * (float64(dots.DotSelf[own]) - mean) * slope(i)
			require.InDelta(t, g, s.DotSelf[own], near)
			all := g
			for e, j := range list[:n] {
				share := exp(int(j)) * weight(j) / sum
				require.InDelta(t, share, s.Alpha[e*s.Heads+k], near)
				g := share * (float64(dots.Dot[e*s.Heads+k]) - mean) * slope(int(j))
				require.InDelta(t, g, s.Dot[e*s.Heads+k], near)
				all += g
			}
			require.InDelta(t, all, s.DDst[own], near)
		}
		list = list[n:]
		s.Alpha, s.Dot, dots.Dot = s.Alpha[int(n)*s.Heads:], s.Dot[int(n)*s.Heads:],
			dots.Dot[int(n)*s.Heads:]
	}
}

// A source that is not there is noticed at every level.
func TestSoftmaxOutside(t *testing.T) {
	for _, l := range Levels() {
		s := HeadSoftmax{Heads: 8, Src: make([]float32, 16), Dst: make([]float32, 8),
			Dot: make([]float32, 8), DotSelf: make([]float32, 8)}
		require.Panics(t, func() { l.Softmax(s.results(), 0, []uint32{2}, 0, []uint32{1}) })
		require.Panics(t, func() { l.SoftmaxSlope(s.results(), 0, []uint32{2}, 0, []uint32{1}) })
		require.Panics(t, func() { l.Softmax(s.results(), 0, []uint32{1}, 0, []uint32{2}) })
	}
}
