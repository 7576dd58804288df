package metrics

import (
	"encoding/json"
	"math"
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
