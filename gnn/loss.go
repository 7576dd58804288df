package gnn

import (
	"math"
	"slices"
	"strings"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/metrics"
)

// Loss is the figure that training makes small. Each one has a file of its own. Those over labels
// and numbers (dense) share their kernels but one: see denseParams.
type Loss struct {
	Name    string
	Summary string           // for help
	Targets []metrics.Target // that it can learn; of the first loss that has one it is the default

	// element returns the loss of an output z with target t, and its slope by z. weight is that of
	// a label that is there. nil: the loss is over classes.
	element func(z, t, weight float64) (loss, slope float64)
}

// losses are all losses in the order of lists, the default first.
var losses = []*Loss{softmaxLoss, bceLoss, mseLoss, maeLoss, huberLoss}

func init() {
	for _, l := range losses {
		if l.element != nil {
			cuda.RegisterHost(l.kernel(), l.rows)
		}
	}
	cuda.RegisterHost("dense_count", denseCount)
	cuda.RegisterHost("dense_sum", denseSum)
}

// Losses lists the names of all losses.
func Losses() (names []string) {
	for _, l := range losses {
		names = append(names, l.Name)
	}
	return names
}

// lossSummaries has what help says of each loss.
func lossSummaries() []string {
	var about []string
	for _, l := range losses {
		about = append(about, l.Name+": "+l.Summary)
	}
	return []string{strings.Join(about, "; ")}
}

// LossFor returns the name of the loss that learns a target: the one that is asked for, or else the
// target's own.
func LossFor(target metrics.Target, asked string) (string, error) {
	var names []string
	for _, l := range losses {
		if slices.Contains(l.Targets, target) {
			names = append(names, l.Name)
		}
	}
	switch {
	case asked == "":
		return names[0], nil
	case slices.Contains(names, asked):
		return asked, nil
	}
	return "", errs.New(errs.Usage,
		"{loss} %s does not learn %s, which the dataset's targets are; choose %s, or leave it out",
		asked, target.Plural(), strings.Join(names, " or "))
}

// lossOf finds a loss; an empty name is the default.
func lossOf(name string) (*Loss, error) {
	if name == "" {
		return losses[0], nil
	}
	for _, l := range losses {
		if l.Name == name {
			return l, nil
		}
	}
	return nil, errs.New(errs.Usage, "loss %q is unknown; choose one of %s", name,
		strings.Join(Losses(), ", "))
}

func (l *Loss) dense() bool { return l.element != nil }

func (l *Loss) kernel() string { return "loss_" + l.Name }

// kernels are those that a step launches by name: before the rows, over them, behind them.
func (l *Loss) kernels() [3]string {
	if l.dense() {
		return [3]string{"dense_count", l.kernel(), "dense_sum"}
	}
	return [3]string{"xent_count", "softmax_xent", "xent_sum"}
}

// checkLoss refuses weights that the loss does not have.
func (c *ModelConfig) checkLoss() error {
	l, err := lossOf(c.Loss)
	if err != nil {
		return err
	}
	if c.LabelSmoothing > 0 && !slices.Contains(smoothed, l) {
		return errs.New(errs.Usage,
			"{label-smoothing} is for classes and labels, and {loss} %s learns numbers; leave it out",
			l.Name)
	}
	if n := len(c.Weights); n != 0 && (n != c.Classes || !slices.Contains(smoothed, l)) {
		return errs.New(errs.Failed, "%d weights for the %d outputs of loss %s", n, c.Classes,
			l.Name)
	}
	return nil
}

// smoothed are the losses that know label smoothing and weights.
var smoothed = []*Loss{softmaxLoss, bceLoss}

// outcome holds what a step leaves for the host, in pinned memory.
type outcome struct {
	Loss    float64 // mean over Counted rows, or by Mass
	Correct int64
	Counted int64   // rows with a target
	Mass    float64 // the mean is by this; 0: by Counted
}

// divisor returns the number that a mean loss divides by.
func (o *outcome) divisor() float64 {
	if o.Mass != 0 {
		return o.Mass
	}
	return float64(o.Counted)
}

// denseParams is the parameter block of losses over labels and numbers. dense_count counts the
// targets (one block), loss_NAME computes the loss of each row and its gradient, and dense_sum
// takes the mean (one block). It is over all targets that are there.
type denseParams struct {
	Outputs   cuda.DevicePtr // float32[Rows, Cols]
	Targets   cuda.DevicePtr // float32[Rows, Cols], NaN = none; 0 = no targets at all
	Grad      cuda.DevicePtr // float32[Rows, Cols], or 0: gradient of the mean loss by the outputs
	Loss      cuda.DevicePtr // float64[Rows], the sum of each row
	Right     cuda.DevicePtr // int32[Rows]: 1 where the outputs' signs say all labels, and some are
	Outcome   cuda.DevicePtr // outcome
	Weights   cuda.DevicePtr // float32[Cols] of labels that are there, or 0
	Rows      int64
	Cols      int64
	Smoothing float64 // a label is so much nearer to 1/2
}

const (
	_ = uint(unsafe.Sizeof(denseParams{}) - 80)
	_ = uint(80 - unsafe.Sizeof(denseParams{}))
	_ = uint(unsafe.Sizeof(outcome{}) - 32)
	_ = uint(32 - unsafe.Sizeof(outcome{}))
)

func known(t float32) bool { return t == t }

// denseCount counts rows with targets, and targets.
func denseCount(b *cuda.Block, p *denseParams) error {
	if b.Index != 0 {
		return nil
	}
	var rows, all int64
	if p.Targets != 0 {
		t := cuda.View[float32](p.Targets, p.Rows*p.Cols)
		for i := range p.Rows {
			n := int64(0)
			for _, v := range t[i*p.Cols : (i+1)*p.Cols] {
				if known(v) {
					n++
				}
			}
			all += n
			rows += min(n, 1)
		}
	}
	cuda.View[outcome](p.Outcome, 1)[0] = outcome{Counted: rows, Mass: float64(all)}
	return nil
}

// rows is the kernel of a dense loss. Sums are in float64, a row's in the order of its columns.
func (l *Loss) rows(b *cuda.Block, p *denseParams) error {
	loss, right := cuda.View[float64](p.Loss, p.Rows), cuda.View[int32](p.Right, p.Rows)
	lo, hi := b.Range(p.Rows)
	if p.Targets == 0 {
		clear(loss[lo:hi])
		clear(right[lo:hi])
		return nil
	}
	outputs, targets := view(p.Outputs, p.Rows*p.Cols), view(p.Targets, p.Rows*p.Cols)
	var grad, weights []float32
	scale := 0.0
	if p.Grad != 0 {
		grad = view(p.Grad, p.Rows*p.Cols)
		if n := cuda.View[outcome](p.Outcome, 1)[0].Mass; n > 0 {
			scale = 1 / n
		}
	}
	if p.Weights != 0 {
		weights = view(p.Weights, p.Cols)
	}
	for i := lo; i < hi; i++ {
		sum, some, all := 0.0, false, true
		for c := range p.Cols {
			z, t := outputs[i*p.Cols+c], targets[i*p.Cols+c]
			slope := 0.0
			if known(t) {
				some, all = true, all && (z > 0) == (t > 0.5)
				weight, to := 1.0, float64(t)
				if weights != nil {
					weight = float64(weights[c])
				}
				if p.Smoothing > 0 {
					to = float64(to*(1-p.Smoothing)) + float64(p.Smoothing/2)
				}
				var e float64
				e, slope = l.element(float64(z), to, weight)
				sum += e
			}
			if grad != nil {
				grad[i*p.Cols+c] = float32(slope * scale)
			}
		}
		loss[i], right[i] = sum, 0
		if some && all {
			right[i] = 1
		}
	}
	return nil
}

// The losses of lossLeaf rows, those of one thread of a GPU, are summed before their sum is added
// to that of the rows before.
const lossLeaf = 64

// sumLeaves adds up the values of rows in order, lossLeaf at a time.
func sumLeaves(rows int64, value func(i int64) float64) float64 {
	sum, leaf := 0.0, 0.0
	for i := range rows {
		leaf += value(i)
		if i%lossLeaf == lossLeaf-1 {
			sum, leaf = sum+leaf, 0
		}
	}
	return sum + leaf
}

// denseSum adds up the rows.
func denseSum(b *cuda.Block, p *denseParams) error {
	if b.Index != 0 || p.Targets == 0 {
		return nil
	}
	o := &cuda.View[outcome](p.Outcome, 1)[0]
	loss := cuda.View[float64](p.Loss, p.Rows)
	sum := sumLeaves(p.Rows, func(i int64) float64 { return loss[i] })
	if o.Mass > 0 {
		o.Loss = sum / o.Mass
	}
	for _, r := range cuda.View[int32](p.Right, p.Rows) {
		o.Correct += int64(r)
	}
	return nil
}

// lossOf enqueues the loss of the last layer's outputs, whose mean goes to outcome.
func (s *step) lossOf(outputs, targets, outcome cuda.DevicePtr) (last lastRun, err error) {
	p, seeds, cols := &s.plan, int64(s.mb.NumSeeds), int64(s.cfg.Classes)
	last = lastRun{seeds: seeds, pred: p.ptr(p.pred), logits: outputs, embedding: p.ptr(p.embedAt)}
	grad := cuda.DevicePtr(0)
	if s.set != nil {
		grad, last.embedding = p.ptr(p.logitGrad), 0
	}
	names := s.loss.kernels()
	configs := [3]cuda.LaunchConfig{s.oneBlock(), s.blocks(seeds, 64, seeds), s.oneBlock()}
	for i, name := range names {
		if s.loss.dense() {
			err = launch(s, name, configs[i], denseParams{Outputs: outputs, Targets: targets,
				Grad: grad, Loss: p.ptr(p.loss), Right: last.pred, Outcome: outcome,
				Weights: s.weights, Rows: seeds, Cols: cols, Smoothing: s.cfg.LabelSmoothing})
		} else {
			err = launch(s, name, configs[i], xentParams{Logits: outputs, Labels: targets,
				Grad: grad, Loss: p.ptr(p.loss), Pred: last.pred, Outcome: outcome,
				Weights: s.weights, Rows: seeds, Classes: cols, Smoothing: s.cfg.LabelSmoothing})
		}
		if err != nil {
			return last, err
		}
	}
	return last, nil
}

// sigmoid returns 1/(1+exp(-z)) and ln(1+exp(-z)).
func sigmoid(z float64) (p, softplus float64) {
	e := math.Exp(-math.Abs(z))
	softplus = math.Log(1 + e)
	if z < 0 {
		return e / (1 + e), softplus - z
	}
	return 1 / (1 + e), softplus
}
