package gnn

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/simd"
)

// A step with input dropout is a step without on features that the same mask has gone over, with
// any number of workers; inference leaves its input alone.
func TestInputDropout(t *testing.T) {
	const p = 0.5
	for _, kind := range []string{"sage", "gcn"} {
		rc := rigConfig{nodes: 1000, edges: 8000, dim: 21, classes: 5, seeds: 100,
			fanouts: []int{5, 5}, sms: 1}
		mc := ModelConfig{
			ModelSettings: ModelSettings{Model: kind, Hidden: 16, Dropout: 0.3},
			InDim:         21,
			Classes:       5,
			Layers:        2,
			Seed:          1,
		}
		st := Step{Seed: 7, Epoch: 3, Batch: 2, LR: 0.01}

		g := newRig(t, rc)
		plain := g.model(t, mc)
		whole := slices.Clone(f32(g.x))
		masked := f32(g.x)
		d := (&step{set: &st}).drop(p, inputLayer)
		for i := range len(masked) / 21 {
			d.apply(simd.Generic, masked[i*21:(i+1)*21], int64(i), 0)
		}
		dropped := 0
		for i, v := range masked {
			require.Contains(t, []float32{0, whole[i] * 2}, v)
			if v == 0 {
				dropped++
			}
		}
		require.InDelta(t, p, float64(dropped)/float64(len(masked)), 0.03)
		require.NoError(t, plain.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st))
		_, _, _, err := plain.Outcome(g.ctx, g.stream)
		require.NoError(t, err)
		want, err := plain.ParamsSHA256()
		require.NoError(t, err)

		for _, sms := range []int{1, 2, 3} {
			rc.sms = sms
			g := newRig(t, rc)
			mc.FeatureDropout = p
			m := g.model(t, mc)
			require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), 0))
			_, _, _, err := m.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			require.Equal(t, whole, f32(g.x), "inference")
			require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st))
			_, _, _, err = m.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			got, err := m.ParamsSHA256()
			require.NoError(t, err)
			require.Equal(t, want, got, "%s with %d workers", kind, sms)
		}
		mc.FeatureDropout = 1
		_, err = NewModel(g.dev, mc)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
		require.ErrorContains(t, err, "feature-dropout 1")
	}
}
