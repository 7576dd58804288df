package gnn

import (
	"fmt"
	"math"
	"unsafe"

	"helios/cuda"
	"helios/internal/metrics"
)

// Cross-entropy of classes, after a softmax.
var softmaxLoss = &Loss{
	Name: "softmax", Summary: "cross-entropy of classes",
	Targets: []metrics.Target{metrics.Classes},
}

func init() {
	cuda.RegisterHost("xent_count", xentCount)
	cuda.RegisterHost("softmax_xent", softmaxXent)
	cuda.RegisterHost("xent_sum", xentSum)
}

// xentParams is the parameter block of the kernels of softmax cross-entropy.
type xentParams struct {
	Logits  cuda.DevicePtr // float32[Rows, Classes]
	Labels  cuda.DevicePtr // int32[Rows], -1 = not labelled; 0 = no labels at all
	Grad    cuda.DevicePtr // float32[Rows, Classes], or 0: gradient of the mean loss by the logits
	Loss    cuda.DevicePtr // float64[Rows]
	Pred    cuda.DevicePtr // int32[Rows]: class of the largest logit, the first of equals
	Outcome cuda.DevicePtr // outcome
	Weights cuda.DevicePtr // float32[Classes] of seeds by their label, or 0
	Rows    int64
	Classes int64
	// Smoothing is the share of a label that goes to all classes alike.
	Smoothing float64
}

const (
	_ = uint(unsafe.Sizeof(xentParams{}) - 80)
	_ = uint(80 - unsafe.Sizeof(xentParams{}))
)

// xentCount counts the labelled rows and adds up their weights, by which the gradient is divided.
// One block.
func xentCount(b *cuda.Block, p *xentParams) error {
	if b.Index != 0 {
		return nil
	}
	n := int64(0)
	if p.Labels != 0 {
		for i, y := range cuda.View[int32](p.Labels, p.Rows) {
			if y < -1 || int64(y) >= p.Classes {
				return fmt.Errorf(
					"label %d of seed %d is out of range: -1 (none) to %d; check the dataset's labels",
					y, i, p.Classes-1)
			}
			if y >= 0 {
				n++
			}
		}
	}
	o := outcome{Counted: n}
	if n > 0 && p.Weights != 0 {
		labels, weights := cuda.View[int32](p.Labels, p.Rows), view(p.Weights, p.Classes)
		o.Mass = sumLeaves(p.Rows, func(i int64) float64 {
			if labels[i] < 0 {
				return 0
			}
			return float64(weights[labels[i]])
		})
	}
	cuda.View[outcome](p.Outcome, 1)[0] = o
	return nil
}

// softmaxXent computes per row the prediction, the loss log Σ exp z - z_y, and the gradient
// (softmax(z) - onehot(y)) / counted, in float64 after the row's maximum is subtracted.
func softmaxXent(b *cuda.Block, p *xentParams) error {
	logits := cuda.View[float32](p.Logits, p.Rows*p.Classes)
	pred := cuda.View[int32](p.Pred, p.Rows)
	loss := cuda.View[float64](p.Loss, p.Rows)
	var labels []int32
	var grad []float32
	scale := 0.0
	if p.Labels != 0 {
		labels = cuda.View[int32](p.Labels, p.Rows)
	}
	if p.Grad != 0 {
		grad = cuda.View[float32](p.Grad, p.Rows*p.Classes)
		if n := cuda.View[outcome](p.Outcome, 1)[0].divisor(); n > 0 {
			scale = 1 / n
		}
	}
	var kept xentKept
	shares := p.shares()
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		z := logits[i*p.Classes : (i+1)*p.Classes]
		best := 0
		for c, v := range z {
			if v > z[best] {
				best = c
			}
		}
		pred[i] = int32(best)
		var g []float32
		if grad != nil {
			g = grad[i*p.Classes : (i+1)*p.Classes]
		}
		if labels == nil || labels[i] < 0 {
			loss[i] = 0
			clear(g)
			continue
		}
		if y := int(labels[i]); shares == nil {
			loss[i] = kept.row(z, g, y, float64(z[best]), scale)
		} else {
			loss[i] = shares.row(z, g, y, float64(z[best]), scale)
		}
	}
	return nil
}

// xentKept has exp of a row's first classes, which loss and gradient both need.
type xentKept [512]float64

// row returns the loss of a row of logits z with label y, of which top is the largest, and writes
// its gradient to g, which may be nil.
func (kept *xentKept) row(z, g []float32, y int, top, scale float64) float64 {
	sum := 0.0
	for c, v := range z {
		e := math.Exp(float64(v) - top)
		if sum += e; c < len(kept) {
			kept[c] = e
		}
	}
	for c := range g {
		var e float64
		if c < len(kept) {
			e = kept[c]
		} else {
			e = math.Exp(float64(z[c]) - top)
		}
		q := e / sum
		if c == y {
			q--
		}
		g[c] = float32(q * scale)
	}
	return math.Log(sum) - (float64(z[y]) - top)
}

// xentShares are the weights of a loss in which a label is not all: each class has its part in
// every row's loss.
type xentShares struct {
	weights []float32 // nil: 1
	label   float64   // share of a row's own label
	each    float64   // of every class
}

// shares returns nil where a row's loss is its label's alone, and weighs 1.
func (p *xentParams) shares() *xentShares {
	if p.Weights == 0 && p.Smoothing == 0 {
		return nil
	}
	s := &xentShares{label: 1 - p.Smoothing, each: p.Smoothing / float64(p.Classes)}
	if p.Weights != 0 {
		s.weights = view(p.Weights, p.Classes)
	}
	return s
}

// of returns the part that class c has in the loss of a row with label y.
func (s *xentShares) of(c, y int) float64 {
	w, share := 1.0, s.each
	if s.weights != nil {
		w = float64(s.weights[c])
	}
	if c == y {
		share += s.label
	}
	return float64(w * share)
}

// row is xentKept.row, with the sum of all classes' parts.
func (s *xentShares) row(z, g []float32, y int, top, scale float64) float64 {
	sum := 0.0
	for _, v := range z {
		sum += math.Exp(float64(v) - top)
	}
	log, loss, all := math.Log(sum), 0.0, 0.0
	for c, v := range z {
		part := s.of(c, y)
		loss += float64(part * (log - (float64(v) - top)))
		all += part
	}
	for c := range g {
		q := math.Exp(float64(z[c])-top) / sum
		g[c] = float32((float64(q*all) - s.of(c, y)) * scale)
	}
	return loss
}

// xentSum adds up the rows. One block.
func xentSum(b *cuda.Block, p *xentParams) error {
	if b.Index != 0 || p.Labels == 0 {
		return nil
	}
	o := &cuda.View[outcome](p.Outcome, 1)[0]
	loss, pred := cuda.View[float64](p.Loss, p.Rows), cuda.View[int32](p.Pred, p.Rows)
	labels, correct := cuda.View[int32](p.Labels, p.Rows), int64(0)
	sum := sumLeaves(p.Rows, func(i int64) float64 {
		if labels[i] < 0 {
			return 0
		}
		if pred[i] == labels[i] {
			correct++
		}
		return loss[i]
	})
	if n := o.divisor(); n > 0 {
		o.Loss = sum / n
	}
	o.Correct = correct
	return nil
}
