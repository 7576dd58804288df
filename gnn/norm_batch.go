package gnn

import "helios/cuda"

// batchNorm normalises each column over the destinations of a mini-batch (Ioffe and Szegedy, ICML
// 2015). Inference takes running means and variances, of which each step makes one tenth anew.
//
// The running values are tensors of the model: their Value is what inference reads and a checkpoint
// of the best epoch holds. A step that fails for want of memory is done again, so an update reads
// one of the two moments that Adam would have and writes the other one, in turn, so a repeated
// update changes nothing more.
type batchNorm struct{}

const batchMomentum = 0.1

// Places of the running values behind normState.
const (
	runningMean = normState + iota
	runningVar
)

func init() {

	cuda.RegisterHost("batch_square", batchSquare)
	cuda.RegisterHost("batch_spread", batchSpread)
	cuda.RegisterHost("batch_norm", batchForward)
	cuda.RegisterHost("batch_dot", batchDot)
	cuda.RegisterHost("batch_norm_bwd", batchBackward)
	cuda.RegisterHost("batch_running", batchRunning)
}

func (batchNorm) Name() string { return "batch" }
func (batchNorm) Summary() string {
	return "each activation by its mean and variance in the mini-batch; inference takes running ones"
}

func (batchNorm) kernels() []string {
	return []string{"batch_square", "batch_spread", "batch_norm", "batch_dot", "batch_norm_bwd",
		"batch_running"}
}

func (batchNorm) state(x *normSite, t *tensors) {
	x.at = append(x.at, t.addFilled(x.name+"running_mean", 1, x.cols, 0),
		t.addFilled(x.name+"running_var", 1, x.cols, 1))
}

func (batchNorm) floats(rows, cols int64) int64 { return 3 * align(cols) }

func (batchNorm) work(rows, cols int64, backward bool) []Work {
	sum, pass := bytesWork(4*rows*cols), bytesWork(2*4*rows*cols)
	if backward {
		wide := bytesWork(3 * 4 * rows * cols)
		return []Work{wide, sum, sum, wide, bytesWork(12 * cols), bytesWork(12 * cols)}
	}
	return []Work{sum, pass, sum, bytesWork(8 * cols), pass}
}

// stats places the squares and spreads of columns behind the sums.
func (batchNorm) stats(p *normParams) {
	if p.Rows > 0 {
		p.Share = float32(1 / float64(p.Rows))
	}
	p.Squares = p.Sum + cuda.DevicePtr(4*align(p.Cols))
	p.Spread = p.Squares + cuda.DevicePtr(4*align(p.Cols))
}

func (n batchNorm) forward(s *step, x *normSite, p normParams) error {
	n.stats(&p)
	if s.set == nil {
		p.Sum, p.Squares, p.Share = s.ptr(x.at[runningMean]), s.ptr(x.at[runningVar]), 1
	} else {
		if err := s.colSum(&sumParams{X: p.X, Out: p.Sum, Rows: p.Rows, Cols: p.Cols}); err != nil {
			return err
		}
		if err := launch(s, "batch_square", s.quadBlocks(p.Rows, p.Cols),
			p); err != nil {
			return err
		}
		if err := s.colSum(&sumParams{X: p.Out, Out: p.Squares, Rows: p.Rows,
			Cols: p.Cols}); err != nil {
			return err
		}
	}
	if err := launch(s, "batch_spread", s.blocks(p.Cols, 4096, p.Cols/32),
		p); err != nil {
		return err
	}
	return launch(s, "batch_norm", s.quadBlocks(p.Rows, p.Cols), p)
}

func (n batchNorm) backward(s *step, _ *normSite, p normParams) error {
	n.stats(&p)
	if err := launch(s, "batch_dot", s.quadBlocks(p.Rows, p.Cols), p); err != nil {
		return err
	}
	if err := s.scaleGradients(&p); err != nil {
		return err
	}
	return launch(s, "batch_norm_bwd", s.quadBlocks(p.Rows, p.Cols), p)
}

func (n batchNorm) finish(s *step, x *normSite) error {
	return n.update(s, x, batchMomentum, func(p *normParams, offset int64, now cuda.DevicePtr) {
		p.Out, p.Grad = now, s.ptr(offset)
	})
}

// leave puts a shard's own mean and variance among the gradients, or the running ones where it has
// none to give: then they stay as they are by its weight.
func (n batchNorm) leave(s *step, x *normSite) error {
	return n.update(s, x, 1, func(p *normParams, offset int64, _ cuda.DevicePtr) {
		p.Out, p.Grad = s.grad(offset), s.grad(offset)
	})
}

// update enqueues changes of the running mean and variance by those of a mini-batch, with a share
// of momentum, to the places that to sets.
func (n batchNorm) update(s *step, x *normSite, momentum float32, to func(p *normParams,
	offset int64, now cuda.DevicePtr)) error {
	mean, variance, momentum := n.seen(s, x, momentum)
	return n.running(s, x, func(p *normParams, offset int64, old, now cuda.DevicePtr) {
		*p = mean
		if offset == x.at[runningVar] {
			*p = variance
		}
		p.X, p.Momentum = old, momentum
		to(p, offset, now)
	})
}

func (n batchNorm) take(s *step, x *normSite) error {
	return n.running(s, x, func(p *normParams, offset int64, old, now cuda.DevicePtr) {
		*p = normParams{Rows: 1, Cols: x.cols, Share: 1, Momentum: batchMomentum,
			Sum: s.sum + cuda.DevicePtr(offset*4), X: old, Out: now, Grad: s.ptr(offset)}
	})
}

// seen describes the mean and the variance of a mini-batch, and by how much they change running
// ones that take a share of momentum.
func (n batchNorm) seen(s *step, x *normSite, momentum float32) (mean, variance normParams,
	m float32) {
	mean = s.normOf(x)
	n.stats(&mean)
	variance = mean
	variance.Sum = mean.Squares
	switch rows := mean.Rows; {
	case rows <= 1: // one node has no spread
		momentum = 0
	case rows > 1: // the variance of all nodes is larger than that of a sample around its own mean
		variance.Share = float32(1 / float64(rows-1))
	}
	return mean, variance, momentum
}

// running enqueues a change of the running mean and of the running variance of a place, as shape
// describes it: at is the tensor's place, old and now the moment that has its value and the one
// that gets it.
func (batchNorm) running(s *step, x *normSite, shape func(p *normParams, offset int64, old,
	now cuda.DevicePtr)) error {
	for _, offset := range x.at[runningMean : runningVar+1] {
		var p normParams
		shape(&p, offset, s.moment(s.adamStep%2, offset), s.moment(1-s.adamStep%2, offset))
		if err := launch(s, "batch_running", s.blocks(p.Cols, 4096, p.Cols/32), p); err != nil {
			return err
		}
	}
	return nil
}

// means are the means of columns.
func (p *normParams) means() []float32 {
	means := make([]float32, p.Cols)
	for c, v := range view(p.Sum, p.Cols) {
		means[c] = v * p.Share
	}
	return means
}

// batchSquare computes Out = (X - mean)².
func batchSquare(b *cuda.Block, p *normParams) error {
	x, out, means, d := view(p.X, p.Rows*p.Cols), view(p.Out, p.Rows*p.Cols), p.means(), p.Cols
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		to := out[i*d : (i+1)*d]
		for c, v := range x[i*d : (i+1)*d] {
			v -= means[c]
			to[c] = v * v
		}
	}
	return nil
}

// batchSpread computes Spread[c] = 1/sqrt(Share · Squares[c] + Eps).
func batchSpread(b *cuda.Block, p *normParams) error {
	squares, spread := view(p.Squares, p.Cols), view(p.Spread, p.Cols)
	lo, hi := b.Range(p.Cols)
	for c := lo; c < hi; c++ {
		spread[c] = inverseRoot(float32(squares[c]*p.Share) + p.Eps)
	}
	return nil
}

// batchForward computes Out = Gamma · (X - mean) · Spread + Beta. Out may be X.
func batchForward(b *cuda.Block, p *normParams) error {
	x, out, means, d := view(p.X, p.Rows*p.Cols), view(p.Out, p.Rows*p.Cols), p.means(), p.Cols
	spread, gamma, beta := view(p.Spread, d), view(p.Gamma, d), view(p.Beta, d)
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		to := out[i*d : (i+1)*d]
		for c, v := range x[i*d : (i+1)*d] {
			to[c] = float32(float32(float32(v-means[c])*spread[c])*gamma[c]) + beta[c]
		}
	}
	return nil
}

// batchDot computes Out = Grad · (X - mean) · Spread, whose sums over rows are the gradient of
// Gamma.
func batchDot(b *cuda.Block, p *normParams) error {
	x, out, grad, means, d := view(p.X, p.Rows*p.Cols), view(p.Out, p.Rows*p.Cols),
		view(p.Grad, p.Rows*p.Cols), p.means(), p.Cols
	spread := view(p.Spread, d)
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		to, g := out[i*d:(i+1)*d], grad[i*d:(i+1)*d]
		for c, v := range x[i*d : (i+1)*d] {
			to[c] = g[c] * float32(float32(v-means[c])*spread[c])
		}
	}
	return nil
}

// batchBackward computes in X's place the gradient by it: Gamma · Spread · (Grad - Share · DBeta -
// x^ · Share · DGamma) with x^ = (X - mean) · Spread.
func batchBackward(b *cuda.Block, p *normParams) error {
	x, grad, means, d := view(p.X, p.Rows*p.Cols), view(p.Grad, p.Rows*p.Cols), p.means(), p.Cols
	spread, gamma, dGamma, dBeta := view(p.Spread, d), view(p.Gamma, d), view(p.DGamma, d),
		view(p.DBeta, d)
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		row, g := x[i*d:(i+1)*d], grad[i*d:(i+1)*d]
		for c, v := range row {
			hat := float32(v-means[c]) * spread[c]
			part := g[c] - float32(dBeta[c]*p.Share) - float32(hat*float32(dGamma[c]*p.Share))
			row[c] = float32(gamma[c]*spread[c]) * part
		}
	}
	return nil
}

// batchRunning computes Out[c] = Grad[c] = (1 - Momentum) · X[c] + Momentum · Share · Sum[c].
func batchRunning(b *cuda.Block, p *normParams) error {
	old, sum, now, value := view(p.X, p.Cols), view(p.Sum, p.Cols), view(p.Out, p.Cols),
		view(p.Grad, p.Cols)
	lo, hi := b.Range(p.Cols)
	for c := lo; c < hi; c++ {
		now[c] = float32(old[c]*(1-p.Momentum)) + float32(float32(sum[c]*p.Share)*p.Momentum)
		value[c] = now[c]
	}
	return nil
}
