package gnn

import (
	"math"
	"slices"

	"helios/cuda"
)

// layerNorm normalises each row (Ba et al., 2016): gamma (x - mean) / sqrt(variance + ε) + beta
// over the columns of a node.
type layerNorm struct{}

func init() {

	cuda.RegisterHost("layer_norm", layerNormForward)
	cuda.RegisterHost("layer_norm_bwd", layerNormBackward)
}

func (layerNorm) Name() string { return "layer" }
func (layerNorm) Summary() string {
	return "each node's activations by their own mean and variance"
}
func (layerNorm) kernels() []string             { return []string{"layer_norm", "layer_norm_bwd"} }
func (layerNorm) state(*normSite, *tensors)     {}
func (layerNorm) floats(rows, cols int64) int64 { return 2 * align(rows) }

func (layerNorm) work(rows, cols int64, backward bool) []Work {
	if backward {
		return []Work{bytesWork(4 * 4 * rows * cols), bytesWork(4 * rows * cols),
			bytesWork(4 * rows * cols)}
	}
	return []Work{bytesWork(2 * 4 * rows * cols)}
}

// stats places the spreads of rows behind the sums.
func (layerNorm) stats(p *normParams) {
	p.Share = float32(1 / float64(p.Cols))
	p.Spread = p.Sum + cuda.DevicePtr(4*align(p.Rows))
}

func (n layerNorm) forward(s *step, _ *normSite, p normParams) error {
	n.stats(&p)
	return launch(s, "layer_norm", s.blocks(p.Rows, 16, p.Rows), p)
}

func (n layerNorm) backward(s *step, _ *normSite, p normParams) error {
	n.stats(&p)
	if err := launch(s, "layer_norm_bwd", s.blocks(p.Rows, 16, p.Rows),
		p); err != nil {
		return err
	}
	return s.scaleGradients(&p)
}

func (layerNorm) finish(*step, *normSite) error { return nil }
func (layerNorm) leave(*step, *normSite) error  { return nil }
func (layerNorm) take(*step, *normSite) error   { return nil }

// layerNormForward computes Out[i] = Gamma · (X[i] - mean) · Spread[i] + Beta, and leaves Sum[i] =
// Σ X[i] and Spread. Sums have the order of simd's Dot. Out may be X.
func layerNormForward(b *cuda.Block, p *normParams) error {
	d, level := p.Cols, b.SIMD()
	x, out, gamma, beta := view(p.X, p.Rows*d), view(p.Out, p.Rows*d), view(p.Gamma, d),
		view(p.Beta, d)
	sums, spreads := view(p.Sum, p.Rows), view(p.Spread, p.Rows)
	ones := slices.Repeat([]float32{1}, int(d))
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		row, to := x[i*d:(i+1)*d], out[i*d:(i+1)*d]
		sum := level.Dot(row, ones)
		mean := float32(sum * p.Share)
		for c, v := range row {
			to[c] = v - mean
		}
		spread := inverseRoot(float32(level.Dot(to, to)*p.Share) + p.Eps)
		for c, v := range to {
			to[c] = float32(float32(v*spread)*gamma[c]) + beta[c]
		}
		sums[i], spreads[i] = sum, spread
	}
	return nil
}

// inverseRoot is 1/sqrt(v), each step rounded to float32: a root that is taken in float64 and then
// rounded is the same (see cuda/kernels, agg.h).
func inverseRoot(v float32) float32 { return 1 / float32(math.Sqrt(float64(v))) }

// layerNormBackward computes, with x^ = (X[i] - mean) · Spread[i], Out[i] = Grad[i] · x^, whose
// sums over rows are the gradient of Gamma, and in X's place the gradient by it, (Gamma · Grad - Σ
// Gamma · Grad / Cols - x^ Σ Gamma · Out / Cols) · Spread[i].
func layerNormBackward(b *cuda.Block, p *normParams) error {
	d, level := p.Cols, b.SIMD()
	x, out, grad, gamma := view(p.X, p.Rows*d), view(p.Out, p.Rows*d), view(p.Grad, p.Rows*d),
		view(p.Gamma, d)
	sums, spreads := view(p.Sum, p.Rows), view(p.Spread, p.Rows)
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		row, to, g := x[i*d:(i+1)*d], out[i*d:(i+1)*d], grad[i*d:(i+1)*d]
		mean, spread := float32(sums[i]*p.Share), spreads[i]
		for c, v := range row {
			row[c] = float32(v-mean) * spread
			to[c] = g[c] * row[c]
		}
		shift := float32(level.Dot(g, gamma) * p.Share)
		turn := level.Dot(to, gamma) * p.Share
		for c, v := range row {
			row[c] = (float32(g[c]*gamma[c]) - shift - float32(v*turn)) * spread
		}
	}
	return nil
}
