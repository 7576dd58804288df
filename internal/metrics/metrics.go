// Package metrics judges a model by its outputs. Every figure is a function of the nodes, in
// their order: neither mini-batches nor ranks change a bit of it. A figure that the data does not
// define is absent.
package metrics

import "math"

// Judge holds a model's outputs for some nodes, each in its place, against their targets. Each
// Target has one.
type Judge interface {
	// Set takes the outputs of node i.
	Set(i int, outputs []float32)
	// Parts are slices with what Set has left of nodes from to to-1, for others to fill in.
	Parts(from, to int) []any
	// Report returns the figures; nil where no node has a target.
	Report() *Report
}

// Scores are a classifier's outputs for some nodes, each in its place.
type Scores struct {
	Classes int
	Labels  []int32 // of each node, 0 to Classes-1; below 0: none, it does not count
	// Of each node, by Set: its prediction, -ln of its label's probability and its prediction's
	// probability.
	Predicted  []int32
	Loss       []float64
	Confidence []float32
	// Proba has the probabilities, nodes × Classes; nil where they are not kept.
	Proba []float32
}

// NewScores makes room for nodes with these labels. keep has probabilities kept: figures of the
// order of nodes need them.
func NewScores(classes int, labels []int32, keep bool) *Scores {
	s := &Scores{Classes: classes, Labels: labels, Predicted: make([]int32, len(labels)),
		Loss: make([]float64, len(labels)), Confidence: make([]float32, len(labels))}
	if keep {
		s.Proba = make([]float32, len(labels)*classes)
	}
	return s
}

// Set takes the outputs of node i, before the softmax.
func (s *Scores) Set(i int, logits []float32) {
	var p []float32
	if s.Proba != nil {
		p = s.Proba[i*s.Classes : (i+1)*s.Classes]
	}
	logSum := Softmax(p, logits)
	c := largest(logits)
	s.Predicted[i], s.Confidence[i] = int32(c), float32(math.Exp(float64(logits[c])-logSum))
	if y := s.Labels[i]; y >= 0 {
		s.Loss[i] = logSum - float64(logits[y])
	}
}

// Parts implements Judge.
func (s *Scores) Parts(from, to int) []any {
	all := []any{s.Predicted[from:to], s.Loss[from:to], s.Confidence[from:to]}
	if s.Proba != nil {
		all = append(all, s.Proba[from*s.Classes:to*s.Classes])
	}
	return all
}

// Summary has the figures of all classes, labels or numbers together. Means over classes ("macro")
// weigh each class alike. Each figure is absent where the task has none of the kind.
type Summary struct {
	Nodes int64 `json:"nodes"` // that have a target
	// Accuracy is the share of nodes that are right; of several labels, in all of them.
	Accuracy *float64 `json:"accuracy,omitempty"`
	// BalancedAccuracy is the mean recall of the classes that the nodes have.
	BalancedAccuracy *float64 `json:"balanced_accuracy,omitempty"`
	// F1Micro counts all classes together: with one class a node it is the accuracy.
	F1Micro *float64 `json:"f1_micro,omitempty"`
	// F1Macro is the mean over the classes that are a label or a prediction of some node.
	F1Macro *float64 `json:"f1_macro,omitempty"`
	// ROCAUC is the area under the ROC curve, AveragePrecision that under the steps of precision by
	// recall. Of two classes they are those of class 1, of more, and of labels, the mean over them,
	// each against all others. A class without positive nodes has neither, one without negative
	// nodes no area under the ROC curve. Absent where no class has it, or probabilities were not
	// kept.
	ROCAUC           *float64 `json:"roc_auc,omitempty"`
	AveragePrecision *float64 `json:"average_precision,omitempty"`
	// LogLoss is the mean of -ln(probability of the label); of several, over all that are known.
	LogLoss *float64 `json:"log_loss,omitempty"`
	// CalibrationError is the mean distance between confidence and accuracy over 15 bins of equal
	// width (Guo et al., ICML 2017, equation 3).
	CalibrationError *float64 `json:"calibration_error,omitempty"`
	// RMSE, MAE and R2 are the root of the mean squared error, the mean absolute error and the
	// share of the variance that is explained: of several numbers, the mean over them. R2 is absent
	// where no number varies.
	RMSE *float64 `json:"rmse,omitempty"`
	MAE  *float64 `json:"mae,omitempty"`
	R2   *float64 `json:"r2,omitempty"`
}

// Report has all figures of a set of nodes.
type Report struct {
	Summary
	// Classes are the figures of each class against all others, or of each label.
	Classes []Class `json:"classes,omitempty"`
	// Numbers are the figures of each number.
	Numbers []NumberFigures `json:"numbers,omitempty"`
	// Confusion counts nodes by label and prediction; absent with more than MaxConfusion classes.
	Confusion [][]int64 `json:"confusion,omitempty"`
	// Curves are those of class 1 of two, or of each of up to MaxCurves classes or labels; absent
	// where areas are.
	Curves []Curve `json:"curves,omitempty"`
}

// Target returns the kind that a report is of.
func (r *Report) Target() Target {
	switch {
	case len(r.Numbers) > 0:
		return Numbers
	case r.BalancedAccuracy != nil:
		return Classes
	}
	return Labels
}

// Curve has what falling thresholds of a class's or label's probability give, at some 200 of them
// at most.
type Curve struct {
	Class int `json:"class"`
	// FPR is the share of the other nodes that are predicted as the class, Recall that of its own.
	FPR       []float64 `json:"fpr"`
	Recall    []float64 `json:"recall"`
	Precision []float64 `json:"precision"`
}

// MaxCurves is the most classes or labels of a report with curves.
const MaxCurves = 10

// Class has the figures of a class against all others. A figure is absent where it divides by 0.
type Class struct {
	Class            int      `json:"class"`
	Name             string   `json:"name,omitempty"`
	Nodes            int64    `json:"nodes"` // that have it as label
	Precision        *float64 `json:"precision,omitempty"`
	Recall           *float64 `json:"recall,omitempty"`
	F1               *float64 `json:"f1,omitempty"`
	ROCAUC           *float64 `json:"roc_auc,omitempty"`
	AveragePrecision *float64 `json:"average_precision,omitempty"`
}

// MaxConfusion is the most classes of a report with a confusion matrix.
const MaxConfusion = 100

// Report returns the figures; nil where no node has a label.
func (s *Scores) Report() *Report {
	k, loss := newCounts(s.Classes), 0.0
	var bins calibration
	for i, y := range s.Labels {
		if y < 0 {
			continue
		}
		c := s.Predicted[i]
		k.add(int(y), int(c))
		loss += s.Loss[i]
		bins.add(float64(s.Confidence[i]), c == y)
	}
	if k.nodes == 0 {
		return nil
	}
	r := k.report()
	r.LogLoss, r.CalibrationError = ratio(loss, float64(k.nodes)), ratio(bins.err(k.nodes), 1)
	if s.Proba != nil {
		r.rank(s)
	}
	return r
}

// largest returns the prediction of a row of logits: the first of its largest.
func largest(row []float32) int {
	best := 0
	for c, v := range row {
		if v > row[best] {
			best = c
		}
	}
	return best
}

// Softmax writes the probabilities of a row of logits to p, which may be nil, and returns ln Σ
// exp(logit). Sums are in float64, after the largest logit is subtracted.
func Softmax(p, logits []float32) (logSum float64) {
	top, sum := float64(logits[largest(logits)]), 0.0
	for _, v := range logits {
		sum += math.Exp(float64(v) - top)
	}
	for c := range p {
		v := logits[c]
		p[c] = float32(math.Exp(float64(v)-top) / sum)
	}
	return top + math.Log(sum)
}
