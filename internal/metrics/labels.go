package metrics

import "math"

// UnknownLabel is a label that does not count.
const UnknownLabel = 255

// LabelScores are the outputs of a model of several labels for some nodes.
type LabelScores struct {
	Columns int
	Labels  []uint8 // nodes × columns: 0, 1 or UnknownLabel
	// By Set: the labels that are predicted, -ln of the probabilities of the known labels, added up
	// for each node, and all probabilities; nil where they are not kept.
	Predicted []uint8
	Loss      []float64
	Proba     []float32
}

// NewLabelScores makes room for nodes with these labels. keep is that of NewScores.
func NewLabelScores(columns int, labels []uint8, keep bool) *LabelScores {
	s := &LabelScores{Columns: columns, Labels: labels, Predicted: make([]uint8, len(labels)),
		Loss: make([]float64, len(labels)/columns)}
	if keep {
		s.Proba = make([]float32, len(labels))
	}
	return s
}

// Set takes the outputs of node i, before the sigmoid.
func (s *LabelScores) Set(i int, outputs []float32) {
	from := i * s.Columns
	s.Loss[i] = 0
	for c, z := range outputs {
		p, logYes, logNo := sigmoid(float64(z))
		if s.Proba != nil {
			s.Proba[from+c] = float32(p)
		}
		s.Predicted[from+c] = 0
		if z > 0 {
			s.Predicted[from+c] = 1
		}
		switch s.Labels[from+c] {
		case 0:
			s.Loss[i] -= logNo
		case 1:
			s.Loss[i] -= logYes
		}
	}
}

// Parts implements Judge.
func (s *LabelScores) Parts(from, to int) []any {
	all := []any{s.Predicted[from*s.Columns : to*s.Columns], s.Loss[from:to]}
	if s.Proba != nil {
		all = append(all, s.Proba[from*s.Columns:to*s.Columns])
	}
	return all
}

// Report implements Judge. Labels that are not known do not count.
func (s *LabelScores) Report() *Report {
	nodes, right := s.whole()
	if nodes == 0 {
		return nil
	}
	r := &Report{Summary: Summary{Nodes: nodes, Accuracy: over(right, nodes)}}
	var hits, labels, predictions, known int64
	var f1, auc, ap mean
	keys, spare := make([]uint64, 0, len(s.Loss)), make([]uint64, len(s.Loss))
	for c := range s.Columns {
		var hit, label, predicted int64
		keys = keys[:0]
		for i := c; i < len(s.Labels); i += s.Columns {
			y := s.Labels[i]
			if y == UnknownLabel {
				continue
			}
			known++
			label += int64(y)
			predicted += int64(s.Predicted[i])
			hit += int64(y & s.Predicted[i])
			if s.Proba != nil {
				keys = append(keys, uint64(math.Float32bits(s.Proba[i]))<<1+uint64(y))
			}
		}
		x := Class{Class: c, Nodes: label, Precision: over(hit, predicted),
			Recall: over(hit, label), F1: over(2*hit, label+predicted)}
		if s.Proba != nil {
			x.ROCAUC, x.AveragePrecision = ranking(keys, spare[:len(keys)])
			if x.ROCAUC != nil && s.Columns <= MaxCurves {
				r.Curves = append(r.Curves, curveOf(c, keys, label))
			}
		}
		hits, labels, predictions = hits+hit, labels+label, predictions+predicted
		f1.add(x.F1)
		auc.add(x.ROCAUC)
		ap.add(x.AveragePrecision)
		r.Classes = append(r.Classes, x)
	}
	loss := 0.0
	for _, l := range s.Loss {
		loss += l
	}
	r.F1Micro, r.F1Macro = over(2*hits, labels+predictions), f1.value()
	r.ROCAUC, r.AveragePrecision = auc.value(), ap.value()
	r.LogLoss = ratio(loss, float64(known))
	return r
}

// whole counts the nodes that have a label, and those that are right in all that are known.
func (s *LabelScores) whole() (nodes, right int64) {
	for i := range s.Loss {
		some, all := false, true
		for c := i * s.Columns; c < (i+1)*s.Columns; c++ {
			if y := s.Labels[c]; y != UnknownLabel {
				some, all = true, all && y == s.Predicted[c]
			}
		}
		if some {
			nodes++
			if all {
				right++
			}
		}
	}
	return nodes, right
}

// sigmoid returns 1/(1+exp(-z)), its logarithm and that of 1 less it.
func sigmoid(z float64) (p, logYes, logNo float64) {
	e := math.Exp(-math.Abs(z))
	small := math.Log1p(e)
	if z < 0 {
		return e / (1 + e), z - small, -small
	}
	return 1 / (1 + e), -small, -z - small
}

// Sigmoid writes the probabilities of labels to p, of their outputs. They may be one slice.
func Sigmoid(p, outputs []float32) {
	for i, z := range outputs {
		q, _, _ := sigmoid(float64(z))
		p[i] = float32(q)
	}
}
