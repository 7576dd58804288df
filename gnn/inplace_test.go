package gnn

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/simd"
)

// A step that finds the rows of the last hop where they are is, to the bit, the step that has them
// in x: there, they are not read.
func TestRowsInPlace(t *testing.T) {
	kinds := append(loopKinds(), ModelSettings{Model: "gin", LearnEps: true},
		ModelSettings{Model: "sage", Norm: "layer", Residual: true})
	for _, kind := range kinds {
		for _, layerwise := range []bool{false, true} {
			rc := rigConfig{nodes: 400, edges: 3000, dim: 21, classes: 5, seeds: 40,
				fanouts: []int{4, 3}, layerwise: layerwise, loops: kind.SelfLoops}
			mc := ModelConfig{ModelSettings: kind, InDim: rc.dim, Classes: rc.classes, Layers: 2,
				Seed: 1}
			mc.Hidden, mc.Dropout = 16, 0.3
			for _, level := range simd.Levels() {
				rc.level = level
				want, reads := trainOnce(t, rc, mc, false)
				require.Equal(t, kind.Model != "gat", reads, kind.Model)
				if !reads {
					continue
				}
				for _, rc.sms = range []int{1, 3} {
					got, _ := trainOnce(t, rc, mc, true)
					require.Equal(t, want, got, "%+v, layerwise %v, %v, %d workers", kind,
						layerwise, level, rc.sms)
				}
			}
		}
	}
}

// trainOnce is the hash of a model's parameters after a step, and whether it reads rows in place.
func trainOnce(t *testing.T, rc rigConfig, mc ModelConfig, inPlace bool) (sum string, reads bool) {
	g := newRig(t, rc)
	m := g.model(t, mc)
	st := Step{Seed: 7, LR: 0.01}
	if inPlace {
		var all []float32
		for _, row := range g.features {
			for _, v := range row {
				all = append(all, float32(v))
			}
		}
		rows := floats(t, g.dev, all)
		st.Rows = NodeRows{At: rows.Ptr(), N: int64(rc.nodes)}
		x := f32(g.x)[g.mb.HopEnd[1]*int64(rc.dim):]
		require.NotEmpty(t, x)
		for i := range x {
			x[i] = float32(math.NaN())
		}
	}
	require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st))
	loss, _, _, err := m.Outcome(g.ctx, g.stream)
	require.NoError(t, err)
	require.False(t, math.IsNaN(loss))
	sum, err = m.ParamsSHA256()
	require.NoError(t, err)
	return sum, m.ReadsInPlace()
}
