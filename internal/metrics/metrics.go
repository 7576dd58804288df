// Package metrics judges a classifier by its scores. Every figure is a function of the nodes, in
// their order: neither mini-batches nor ranks change a bit of it. A figure that the data does not
// define is absent.
package metrics

import "math"

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

// Summary has the figures of all classes together. Means over classes ("macro") weigh each class
// alike.
type Summary struct {
	Nodes    int64   `json:"nodes"` // that have a label
	Accuracy float64 `json:"accuracy"`
	// BalancedAccuracy is the mean recall of the classes that the nodes have.
	BalancedAccuracy float64 `json:"balanced_accuracy"`
	// F1Micro counts all classes together: with one class a node it is the accuracy.
	F1Micro float64 `json:"f1_micro"`
	// F1Macro is the mean over the classes that are a label or a prediction of some node.
	F1Macro float64 `json:"f1_macro"`
	// ROCAUC is the area under the ROC curve, AveragePrecision that under the steps of precision by
	// recall. Of two classes they are those of class 1, of more the mean over the classes, each
	// against all others. A class without positive nodes has neither, one without negative nodes no
	// area under the ROC curve. Absent where no class has it, or probabilities were not kept.
	ROCAUC           *float64 `json:"roc_auc,omitempty"`
	AveragePrecision *float64 `json:"average_precision,omitempty"`
	// LogLoss is the mean of -ln(probability of the label).
	LogLoss float64 `json:"log_loss"`
	// CalibrationError is the mean distance between confidence and accuracy over 15 bins of equal
	// width (Guo et al., ICML 2017, equation 3).
	CalibrationError float64 `json:"calibration_error"`
}

// Report has all figures of a set of nodes.
type Report struct {
	Summary
	// Classes are the figures of each class against all others.
	Classes []Class `json:"classes"`
	// Confusion counts nodes by label and prediction; absent with more than MaxConfusion classes.
	Confusion [][]int64 `json:"confusion,omitempty"`
	// Curves are those of class 1 of two, or of each of up to MaxCurves classes; absent where areas
	// are.
	Curves []Curve `json:"curves,omitempty"`
}

// Curve has what falling thresholds of a class's probability give, at some 200 of them at most.
type Curve struct {
	Class int `json:"class"`
	// FPR is the share of the other nodes that are predicted as the class, Recall that of its own.
	FPR       []float64 `json:"fpr"`
	Recall    []float64 `json:"recall"`
	Precision []float64 `json:"precision"`
}

// MaxCurves is the most classes of a report with curves.
const MaxCurves = 10

// Class has the figures of a class against all others. A figure is absent where it divides by 0.
type Class struct {
	Class            int      `json:"class"`
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
	r.LogLoss, r.CalibrationError = loss/float64(k.nodes), bins.err(k.nodes)
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
