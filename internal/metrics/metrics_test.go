package metrics

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// outputs are labels and logits of nodes.
type outputs struct {
	Classes int
	Labels  []int32
	Logits  []float32
}

// random draws scores with many ties, classes without nodes and predictions of one class alone.
func random(r *rand.Rand) *outputs {
	s := &outputs{Classes: 1 + r.IntN(5)}
	levels, labels := 1+r.IntN(6), 1+r.IntN(s.Classes)
	for range 1 + r.IntN(40) {
		s.Labels = append(s.Labels, int32(r.IntN(labels)))
		for range s.Classes {
			s.Logits = append(s.Logits, float32(r.IntN(levels))-2)
		}
	}
	return s
}

// scores sets the nodes in falling order.
func (o *outputs) scores(keep bool) *Scores {
	s := NewScores(o.Classes, o.Labels, keep)
	for i := len(o.Labels) - 1; i >= 0; i-- {
		s.Set(i, o.Logits[i*o.Classes:(i+1)*o.Classes])
	}
	return s
}

// Of is the report of outputs.
func Of(o *outputs) *Report { return o.scores(true).Report() }

// byPairs is the area under the ROC curve by its meaning: the chance that a positive node scores
// above a negative one, ties by half.
func byPairs(p []float64, positive []bool) *float64 {
	wins, pairs := 0.0, 0
	for i := range p {
		for j := range p {
			if positive[i] && !positive[j] {
				pairs++
				switch {
				case p[i] > p[j]:
					wins++
				case p[i] == p[j]:
					wins += 0.5
				}
			}
		}
	}
	if pairs == 0 {
		return nil
	}
	wins /= float64(pairs)
	return &wins
}

// byThresholds is average precision by its sum: Σ (R_k - R_k-1) P_k over falling thresholds.
func byThresholds(p []float64, positive []bool) *float64 {
	levels := slices.Clone(p)
	slices.Sort(levels)
	levels = slices.Compact(levels)
	slices.Reverse(levels)
	all := 0
	for _, x := range positive {
		if x {
			all++
		}
	}
	if all == 0 {
		return nil
	}
	sum, before := 0.0, 0.0
	for _, level := range levels {
		hit, taken := 0, 0
		for i := range p {
			if p[i] >= level {
				taken++
				if positive[i] {
					hit++
				}
			}
		}
		recall := float64(hit) / float64(all)
		sum += (recall - before) * float64(hit) / float64(taken)
		before = recall
	}
	return &sum
}

// same compares figures that may be absent.
func same(t *testing.T, want, got *float64, name string) {
	t.Helper()
	require.Equal(t, want == nil, got == nil, "%s: only one is absent", name)
	if want != nil {
		require.InDelta(t, *want, *got, 1e-12, name)
	}
}

// All figures are those of their definitions, over random scores.
func TestDefinitions(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		checkDefinitions(t, random(r))
	}
}

func checkDefinitions(t *testing.T, s *outputs) {
	got := Of(s)
	n := len(s.Labels)
	proba, predicted, loss := make([][]float64, s.Classes), make([]int, n), 0.0
	type bin struct{ confidence, right float64 }
	bins := map[int]*bin{}
	for i, y := range s.Labels {
		row, sum := s.Logits[i*s.Classes:(i+1)*s.Classes], 0.0
		for _, v := range row {
			sum += math.Exp(float64(v))
		}
		predicted[i] = slices.Index(row, slices.Max(row))
		for c, v := range row {
			proba[c] = append(proba[c], math.Exp(float64(v))/sum)
		}
		loss -= math.Log(proba[y][i]) / float64(n)
		p := proba[predicted[i]][i]
		b := 0
		for float64(b+1)/15 < float64(float32(p)) {
			b++
		}
		if bins[b] == nil {
			bins[b] = &bin{}
		}
		bins[b].confidence += p / float64(n)
		if predicted[i] == int(y) {
			bins[b].right += 1 / float64(n)
		}
	}
	require.InDelta(t, loss, *got.LogLoss, 1e-9)
	ece := 0.0
	for _, b := range bins {
		ece += math.Abs(b.right - b.confidence)
	}
	require.InDelta(t, ece, *got.CalibrationError, 1e-6)
	var recall, f1, auc, ap mean
	right := int64(0)
	for c := range s.Classes {
		tp, fp, fn, positive := 0.0, 0.0, 0.0, make([]bool, n)
		for i, y := range s.Labels {
			positive[i] = int(y) == c
			switch {
			case positive[i] && predicted[i] == c:
				tp++
				right++
			case positive[i]:
				fn++
			case predicted[i] == c:
				fp++
			}
		}
		x := got.Classes[c]
		ratio := func(a, b float64) *float64 {
			if b == 0 {
				return nil
			}
			a /= b
			return &a
		}
		same(t, ratio(tp, tp+fp), x.Precision, "precision")
		same(t, ratio(tp, tp+fn), x.Recall, "recall")
		same(t, ratio(2*tp, 2*tp+fp+fn), x.F1, "F1")
		recall.add(ratio(tp, tp+fn))
		f1.add(ratio(2*tp, 2*tp+fp+fn))
		as32 := make([]float64, n)
		for i, p := range proba[c] {
			as32[i] = float64(float32(p)) // ties are those of the probabilities that are written
		}
		same(t, byPairs(as32, positive), x.ROCAUC, "ROC AUC")
		same(t, byThresholds(as32, positive), x.AveragePrecision, "average precision")
		auc.add(x.ROCAUC)
		ap.add(x.AveragePrecision)
	}
	require.Equal(t, float64(right)/float64(n), *got.Accuracy)
	same(t, recall.value(), got.BalancedAccuracy, "balanced accuracy")
	same(t, f1.value(), got.F1Macro, "macro F1")
	if s.Classes == 2 {
		same(t, got.Classes[1].ROCAUC, got.ROCAUC, "ROC AUC of class 1")
		same(t, got.Classes[1].AveragePrecision, got.AveragePrecision, "average precision of class 1")
	} else {
		same(t, auc.value(), got.ROCAUC, "mean ROC AUC")
		same(t, ap.value(), got.AveragePrecision, "mean average precision")
	}
}

// A metric is defined where the report has its figure.
func TestDefined(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	absent := 0
	for range 2000 {
		o := random(r)
		for i := range o.Labels {
			if r.IntN(4) == 0 {
				o.Labels[i] = -1
			}
		}
		for _, keep := range []bool{true, false} {
			got := o.scores(keep).Report()
			for _, m := range All {
				want := got != nil && m.Of(&got.Summary) != nil
				require.Equal(t, want, m.Defined(NewScores(o.Classes, o.Labels, keep)),
					"%s of %v", m.Name, o)
				if !want {
					absent++
				}
			}
		}
	}
	require.Positive(t, absent)
}

// A case by hand: scikit-learn 1.5 gives the same figures.
func TestBinary(t *testing.T) {
	s := &outputs{Classes: 2, Labels: []int32{0, 0, 1, 1, 0, 1}}
	for _, p := range []float64{.1, .4, .35, .8, .4, .4} { // logits of a probability of class 1
		s.Logits = append(s.Logits, 0, float32(math.Log(p/(1-p))))
	}
	r := Of(s)
	require.InDelta(t, 2.0/3, *r.ROCAUC, 1e-12)
	require.InDelta(t, 0.7, *r.AveragePrecision, 1e-12)
	require.InDelta(t, 4.0/6, *r.Accuracy, 1e-12)
	require.Equal(t, [][]int64{{3, 0}, {2, 1}}, r.Confusion)
	require.Equal(t, int64(3), r.Classes[1].Nodes)
}

// Figures that the nodes do not define are absent.
func TestUndefined(t *testing.T) {
	require.Nil(t, Of(&outputs{Classes: 3}))
	r := Of(&outputs{Classes: 2, Labels: []int32{1, 1}, Logits: []float32{0, 1, 0, 2}})
	require.Nil(t, r.ROCAUC, "no negative node")
	require.Equal(t, 1.0, *r.AveragePrecision)
	require.Nil(t, r.Classes[0].Precision)
	require.Nil(t, r.Classes[0].F1)
	require.Equal(t, 1.0, *r.F1Macro, "of the class that there is")
}

// Large logits neither overflow nor leave a probability above 1.
func TestLargeLogits(t *testing.T) {
	p := make([]float32, 3)
	require.InDelta(t, 3e38, Softmax(p, []float32{3e38, -3e38, 0}), 1e30)
	require.Equal(t, []float32{1, 0, 0}, p)
}

// Nodes without a label do not count, and without probabilities the figures of their order are
// absent.
func TestLabelsThatAreMissing(t *testing.T) {
	o := random(rand.New(rand.NewPCG(3, 4)))
	want := Of(o)
	o.Labels = append(o.Labels, -1)
	o.Logits = append(o.Logits, make([]float32, o.Classes)...)
	require.Equal(t, want, Of(o))
	got := o.scores(false).Report()
	require.Nil(t, got.ROCAUC)
	require.Nil(t, got.AveragePrecision)
	require.Nil(t, got.Curves)
	got.ROCAUC, got.AveragePrecision, got.Curves = want.ROCAUC, want.AveragePrecision, want.Curves
	for c := range got.Classes {
		x, y := &got.Classes[c], &want.Classes[c]
		x.ROCAUC, x.AveragePrecision = y.ROCAUC, y.AveragePrecision
	}
	require.Equal(t, want, got)
	require.Nil(t, Of(&outputs{Classes: 1, Labels: []int32{-1}, Logits: []float32{0}}))
}

// With more classes than a matrix shows there is none.
func TestManyClasses(t *testing.T) {
	s := &outputs{Classes: MaxConfusion + 1, Labels: []int32{5},
		Logits: make([]float32, MaxConfusion+1)}
	require.Nil(t, Of(s).Confusion)
	require.Len(t, Of(s).Classes, MaxConfusion+1)
}

// A curve's points are what thresholds give, no two of them far apart, and the area under the ROC
// curve is that under its points, but for what lies between them.
func TestCurves(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, c := range []struct{ nodes, levels, classes int }{{5, 3, 2}, {50_000, 1 << 20, 2},
		{50_000, 7, 2}, {3000, 1 << 20, 4}} {
		o := &outputs{Classes: c.classes}
		for range c.nodes {
			y := min(r.IntN(20), c.classes-1)
			o.Labels = append(o.Labels, int32(y))
			for k := range c.classes {
				z := 4 * float32(r.IntN(c.levels)) / float32(c.levels)
				if k == y {
					z++
				}
				o.Logits = append(o.Logits, z)
			}
		}
		o.Labels[0], o.Labels[1] = 0, 1
		scores := o.scores(true)
		got := scores.Report()
		want := c.classes
		if want == 2 {
			want = 1
		}
		require.Len(t, got.Curves, want)
		for _, curve := range got.Curves {
			require.LessOrEqual(t, len(curve.FPR), 203)
			last := len(curve.FPR) - 1
			require.Equal(t, 1.0, curve.FPR[last])
			require.Equal(t, 1.0, curve.Recall[last])
			reached := thresholds(scores, curve.Class)
			area := 0.0
			for i := range curve.FPR {
				if i > 0 {
					require.True(t, reached[[3]float64{curve.FPR[i], curve.Recall[i],
						curve.Precision[i]}], "point %d: %v", i, curve)
					mean := (curve.Recall[i] + curve.Recall[i-1]) / 2
					area += (curve.FPR[i] - curve.FPR[i-1]) * mean
				}
			}
			require.InDelta(t, *got.Classes[curve.Class].ROCAUC, area, 0.005)
		}
	}
}

// thresholds has what each threshold of a class's probability gives, with five decimals.
func thresholds(s *Scores, class int) map[[3]float64]bool {
	order := make([]int, len(s.Labels))
	positives := 0
	for i, y := range s.Labels {
		order[i] = i
		if int(y) == class {
			positives++
		}
	}
	p := func(i int) float32 { return s.Proba[i*s.Classes+class] }
	slices.SortFunc(order, func(a, b int) int {
		if p(a) > p(b) {
			return -1
		}
		return 1
	})
	all := map[[3]float64]bool{}
	hit, missed := 0, 0
	short := func(a, b int) float64 { return math.Round(1e5*float64(a)/float64(b)) / 1e5 }
	for k, i := range order {
		if int(s.Labels[i]) == class {
			hit++
		} else {
			missed++
		}
		if k+1 == len(order) || p(order[k+1]) != p(i) {
			all[[3]float64{short(missed, len(order)-positives), short(hit, positives),
				short(hit, hit+missed)}] = true
		}
	}
	return all
}
