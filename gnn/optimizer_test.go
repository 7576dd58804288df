package gnn

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// Learning rates of 4 epochs of 3 steps are those of PyTorch 2.2.1: CosineAnnealingLR, StepLR and
// LambdaLR, from 0.01.
func TestSchedules(t *testing.T) {
	const epochs, steps = 4, 3
	for _, x := range []struct {
		text   string
		warmup int
		want   []float64
	}{
		{"constant", 0, []float64{.01, .01, .01, .01, .01, .01, .01, .01, .01, .01, .01, .01}},
		{"cosine", 0, []float64{.01, .009829629131445342, .009330127018922194, .008535533905932736,
			.0075, .006294095225512604, .005, .003705904774487397, .0025000000000000014,
			.0014644660940672629, .0006698729810778065, .00017037086855465903}},
		{"linear", 0, []float64{.01, .009166666666666667, .008333333333333333, .0075,
			.006666666666666668, .005833333333333333, .005, .004166666666666667,
			.003333333333333334, .0025, .0016666666666666663, .0008333333333333337}},
		{"step:2,0.3", 0, []float64{.01, .01, .01, .01, .01, .01, .003, .003, .003, .003, .003,
			.003}},
		{"constant", 5, []float64{.002, .004, .006, .008, .01, .01, .01, .01, .01, .01, .01, .01}},
		{"cosine", 5, []float64{.002, .003931851652578137, .005598076211353316, .00682842712474619,
			.0075, .006294095225512604, .005, .003705904774487397, .0025000000000000014,
			.0014644660940672629, .0006698729810778065, .00017037086855465903}},
	} {
		s, err := ParseSchedule(x.text)
		require.NoError(t, err)
		for i, want := range x.want {
			p := Position{Epoch: i / steps, Done: float64(i) / (epochs * steps)}
			require.InDelta(t, want, 0.01*s.Factor(p)*Warm(int64(i), x.warmup), 1e-16,
				"%s, warm-up %d, step %d", x.text, x.warmup, i)
		}
	}
}

func TestScheduleTexts(t *testing.T) {
	for _, bad := range []string{"", "exponential", "step", "step:", "step:3", "step:0,0.1",
		"step:3,0", "step:3,1.5", "step:3,NaN", "step:3,0.1,2", "cosine:3,0.1", "plateau",
		"plateau:-1,0.5", "constant:1,0.5"} {
		_, err := ParseSchedule(bad)
		require.ErrorContains(t, err, "lr-schedule", bad)
	}
	for text, ends := range map[string]bool{"constant": false, "cosine": true, "linear": true,
		"step:30,0.1": false, "plateau:3,0.5": false} {
		s, err := ParseSchedule(text)
		require.NoError(t, err)
		require.Equal(t, ends, s.Ends(), text)
		require.Equal(t, text == "plateau:3,0.5", s.Plateau() == 3, text)
	}
}

// Three steps of Adam behind clip_grad_norm_, as PyTorch 2.2.1 takes them: norms and parameters. Of
// a limit that is never met no parameter changes a bit.
func TestClipNorm(t *testing.T) {
	dev := host(t, 2)
	s := newStream(t, dev)
	const n, room = 8, 64 // a tensor of 6 and one of 2, in one
	steps := func(limit float32) (norms []float64, params [][]float32) {
		o := newLauncher(dev)
		require.NoError(t, o.find(nil))
		store := alloc(t, dev, 16*room+8*(squareUnits(room)+1))
		copy(f32(store), []float32{0, .1, .2, .3, .4, .5, .5, -.25})
		m := &Model{params: parameters{n: room, learns: room, store: store,
			squares: alloc(t, dev, 8)}}
		st := &step{parameters: &m.params, grid: o.grid, on: o, stepSink: stepSink{stream: s},
			set: &Step{LR: 0.05, Beta1: 0.8, WeightDecay: 0.1, ClipNorm: limit}}
		for step := range 3 {
			for i := range n {
				f32(store)[room+i] = float32((i%6*7+step*3)%5-2) * 0.9
			}
			require.NoError(t, st.adam(st.grad(0)))
			st.adamStep++
			require.NoError(t, s.Synchronize(t.Context()))
			norms = append(norms, m.GradientNorm())
			params = append(params, append([]float32{}, f32(store)[:n]...))
		}
		return norms, params
	}
	norms, params := steps(1.5)
	for i, want := range []float64{3.8183765411376953, 3.5999999046325684, 3.2449960708618164} {
		require.InDelta(t, want, norms[i], 1e-6)
	}
	for i, want := range [][]float64{
		{.04999999329447746, .050000060349702835, .15000000596046448, .3500000238418579,
			.3500000238418579, .550000011920929, .550000011920929, -.20000001788139343},
		{.059088077396154404, .08884871751070023, .11776141822338104, .3256606161594391,
			.3519003093242645, .5547870397567749, .5547870397567749, -.15972723066783905},
		{.08108913153409958, .09566287696361542, .12886354327201843, .3067162036895752,
			.322176456451416, .5727441310882568, .5727441310882568, -.15024471282958984},
	} {
		for k, p := range want {
			require.InDelta(t, p, params[i][k], 2e-6, "step %d, parameter %d", i, k)
		}
	}
	_, clipped := steps(1e9)
	_, plain := steps(0)
	require.Equal(t, plain, clipped)
}

// The sum of squares is within the rounding of float64, and the same for any number of workers.
func TestSquareSum(t *testing.T) {
	for _, n := range []int64{1, 4, 127, 129, 2048, 2049, 300_001} {
		want, first := 0.0, 0.0
		x := randomFloats(int(n), uint64(n))
		for _, v := range x {
			want += float64(v) * float64(v)
		}
		for _, workers := range []int{1, 2, 5} {
			dev := host(t, workers)
			s := newStream(t, dev)
			o := newLauncher(dev)
			require.NoError(t, o.find(nil))
			store := alloc(t, dev, 16*n+8*(squareUnits(n)+2))
			copy(f32(store)[n:], x)
			m := &Model{params: parameters{n: n, learns: n, store: store,
				squares: alloc(t, dev, 8)}}
			st := &step{parameters: &m.params, grid: o.grid, on: o, stepSink: stepSink{stream: s},
				set: &Step{LR: 0.05}}
			require.NoError(t, st.adam(st.grad(0)))
			require.NoError(t, s.Synchronize(t.Context()))
			got := m.GradientNorm()
			require.InEpsilon(t, math.Sqrt(want), got, 1e-12, "%d floats", n)
			if workers == 1 {
				first = got
			}
			require.Equal(t, first, got)
		}
	}
}
