package metrics

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// sklearnCase has labels or targets of nodes, outputs, and scikit-learn's figures.
type sklearnCase struct {
	Columns int
	Labels  []int
	Targets []*float32 // null: none
	Outputs []float32
	Summary
}

// Labels and numbers have scikit-learn's figures, also where some are unknown. Nodes are set from
// the last one on.
func TestFiguresOfScikitLearn(t *testing.T) {
	text, err := os.ReadFile("testdata/figures.json")
	require.NoError(t, err)
	var all struct{ Labels, Numbers []sklearnCase }
	require.NoError(t, json.Unmarshal(text, &all))
	check := func(j Judge, c *sklearnCase, target Target) {
		for i := len(c.Outputs)/c.Columns - 1; i >= 0; i-- {
			j.Set(i, c.Outputs[i*c.Columns:(i+1)*c.Columns])
		}
		r := j.Report()
		for _, m := range All {
			if want := m.Of(&c.Summary); want != nil {
				require.InDelta(t, *want, *m.Of(&r.Summary), 1e-6, m.Name)
			} else {
				require.Nil(t, m.Of(&r.Summary), m.Name)
			}
			require.Equal(t, m.Of(&r.Summary) != nil, m.Defined(j))
		}
		require.Len(t, NamesFor(target), map[Target]int{Labels: 6, Numbers: 3}[target])
	}
	require.NotEmpty(t, all.Labels)
	for _, c := range all.Labels {
		labels := make([]uint8, len(c.Labels))
		for i, y := range c.Labels {
			labels[i] = uint8(y)
		}
		check(NewLabelScores(c.Columns, labels, true), &c, Labels)
	}
	require.NotEmpty(t, all.Numbers)
	for _, c := range all.Numbers {
		targets := make([]float32, len(c.Targets))
		for i, x := range c.Targets {
			targets[i] = float32(math.NaN())
			if x != nil {
				targets[i] = *x
			}
		}
		check(NewNumberScores(c.Columns, targets), &c, Numbers)
	}
}

// Each of up to MaxCurves labels that both kinds of nodes have has a curve, whose points are what
// thresholds of its known nodes give.
func TestCurvesOfLabels(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, columns := range []int{1, 3, MaxCurves, MaxCurves + 1} {
		labels := make([]uint8, 400*columns)
		for i := range labels {
			labels[i] = []uint8{0, 1, UnknownLabel}[r.IntN(3)]
			if columns == 3 && i%3 == 1 {
				labels[i] = 1 // of which no node is without
			}
		}
		s := NewLabelScores(columns, labels, true)
		for i := range 400 {
			z := make([]float32, columns)
			for c := range z {
				z[c] = float32(r.IntN(40))/8 - 2.5
			}
			s.Set(i, z)
		}
		var have []int
		for _, curve := range s.Report().Curves {
			c := curve.Class
			have = append(have, c)
			one := &Scores{Classes: 1}
			for i := c; i < len(labels); i += columns {
				if labels[i] != UnknownLabel {
					one.Labels = append(one.Labels, int32(labels[i])-1)
					one.Proba = append(one.Proba, s.Proba[i])
				}
			}
			reached := thresholds(one, 0)
			require.Greater(t, len(curve.FPR), 20)
			for i := range curve.FPR[1:] {
				require.True(t, reached[[3]float64{curve.FPR[i+1], curve.Recall[i+1],
					curve.Precision[i+1]}], "label %d, point %d", c, i+1)
			}
		}
		want := map[int][]int{1: {0}, 3: {0, 2}, MaxCurves: {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}[columns]
		require.Equal(t, want, have)
	}
}

// Figures that labels or numbers do not define are absent.
func TestUndefinedOfLabelsAndNumbers(t *testing.T) {
	u := uint8(UnknownLabel)
	require.Nil(t, NewLabelScores(2, []uint8{u, u}, true).Report())
	s := NewLabelScores(2, []uint8{1, u, 1, 0}, false)
	s.Set(0, []float32{1, 1})
	s.Set(1, []float32{1, 1})
	r := s.Report()
	require.Equal(t, int64(2), r.Nodes)
	require.Equal(t, 0.5, *r.Accuracy)
	require.Nil(t, r.ROCAUC, "probabilities were not kept")
	require.Equal(t, 0.0, *r.Classes[1].F1)
	require.Nil(t, r.Classes[1].Recall, "no node has label 1")
	require.Equal(t, 0.8, *r.F1Micro)

	nan := float32(math.NaN())
	require.Nil(t, NewNumberScores(1, []float32{nan}).Report())
	n := NewNumberScores(2, []float32{3, nan, 3, 5})
	n.Set(0, []float32{3, 0})
	n.Set(1, []float32{5, 4})
	r = n.Report()
	require.Equal(t, int64(2), r.Nodes)
	require.Nil(t, r.R2, "neither number varies")
	require.Equal(t, []int64{2, 1}, []int64{r.Numbers[0].Nodes, r.Numbers[1].Nodes})
	require.InDelta(t, (math.Sqrt2+1)/2, *r.RMSE, 1e-12)
	require.Equal(t, 1.0, *r.MAE)
}
