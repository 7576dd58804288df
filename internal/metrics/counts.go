package metrics

// counts has what accuracy, precision, recall and F1 are made of.
type counts struct {
	nodes, right int64
	label        []int64 // nodes of each class
	predicted    []int64 // nodes that were predicted as it
	hit          []int64 // both
	confusion    [][]int64
}

func newCounts(classes int) *counts {
	k := &counts{label: make([]int64, classes), predicted: make([]int64, classes),
		hit: make([]int64, classes)}
	if classes <= MaxConfusion {
		k.confusion = make([][]int64, classes)
		for i := range k.confusion {
			k.confusion[i] = make([]int64, classes)
		}
	}
	return k
}

func (k *counts) add(label, predicted int) {
	k.nodes++
	k.label[label]++
	k.predicted[predicted]++
	if label == predicted {
		k.right++
		k.hit[label]++
	}
	if k.confusion != nil {
		k.confusion[label][predicted]++
	}
}

// over returns a share; nil where of is 0.
func over(part, of int64) *float64 { return ratio(float64(part), float64(of)) }

// ratio returns a quotient; nil where of is 0.
func ratio(part, of float64) *float64 {
	if of == 0 {
		return nil
	}
	x := part / of
	return &x
}

func (k *counts) report() *Report {
	r := &Report{Summary: Summary{Nodes: k.nodes, Accuracy: over(k.right, k.nodes)},
		Confusion: k.confusion}
	r.F1Micro = r.Accuracy
	var recall, f1 mean
	for c := range k.label {
		x := Class{Class: c, Nodes: k.label[c],
			Precision: over(k.hit[c], k.predicted[c]), Recall: over(k.hit[c], k.label[c]),
			F1: over(2*k.hit[c], k.label[c]+k.predicted[c])}
		recall.add(x.Recall)
		f1.add(x.F1)
		r.Classes = append(r.Classes, x)
	}
	r.BalancedAccuracy, r.F1Macro = recall.value(), f1.value()
	return r
}

// mean is that of the figures that are there.
type mean struct {
	sum float64
	n   int
}

func (m *mean) add(x *float64) {
	if x != nil {
		m.sum += *x
		m.n++
	}
}

func (m *mean) value() *float64 {
	if m.n == 0 {
		return nil
	}
	x := m.sum / float64(m.n)
	return &x
}
