package gnn

import (
	"fmt"
	"math"

	"helios/cuda"
	"helios/internal/philox"
	"helios/internal/simd"
)

// The host's kernels of gat. Each product and each sum is rounded by itself and has an order of its
// own, which cuda/kernels/gat.cu follows: over a list the self loop first, then the edges in order;
// dot products as simd's Dot.

func init() {
	cuda.RegisterHost("gat_score", gatScore)
	cuda.RegisterHost("gat_softmax", gatSoftmax)
	cuda.RegisterHost("gat_sum", gatSum)
	cuda.RegisterHost("gat_mean", gatMean)
	cuda.RegisterHost("gat_spread", gatSpread)
	cuda.RegisterHost("gat_edges", gatEdges)
	cuda.RegisterHost("gat_dot", gatDot)
	cuda.RegisterHost("gat_softmax_bwd", gatSoftmaxBwd)
	cuda.RegisterHost("gat_score_bwd", gatScoreBwd)
	cuda.RegisterHost("gat_sum_bwd", gatSumBwd)
	cuda.RegisterHost("gat_scale", gatScale)
	cuda.RegisterHost("bias_act", biasAct)
}

// One call of the vector code makes headLists rows, as a call costs as much as a short list.
const headLists = 64

func view(p cuda.DevicePtr, n int64) []float32 { return cuda.View[float32](p, n) }

// gatScore computes ScoreSrc[j, k] = AttSrc[k] · Z[j, k], and ScoreDst in the same way for
// destinations.
func gatScore(b *cuda.Block, p *gatParams) error {
	z, level, wide := view(p.Z, p.NumSrc*p.Heads*p.Dim), b.SIMD(), p.Heads*p.Dim
	src := simd.HeadDots{A: view(p.AttSrc, wide), Heads: int(p.Heads), Dim: int(p.Dim)}
	dst := src
	dst.A = view(p.AttDst, wide)
	scoreSrc, scoreDst := view(p.ScoreSrc, p.NumSrc*p.Heads), view(p.ScoreDst, p.NumDst*p.Heads)
	lo, hi := b.Range(p.NumSrc)
	for lo < hi { // rows that are in the caches the second time
		to := min(hi, lo+headLists)
		src.B = z[lo*wide : to*wide]
		level.DotRows(&src, scoreSrc[lo*p.Heads:to*p.Heads])
		if lo < p.NumDst {
			dst.B = src.B
			level.DotRows(&dst, scoreDst[lo*p.Heads:min(to, p.NumDst)*p.Heads])
		}
		lo = to
	}
	return nil
}

func leaky(v float32) float32 {
	if v > 0 {
		return v
	}
	return leakySlope * v
}

// attention is the exp of a score, as a share of what the largest one is, times the neighbour's
// weight.
func attention(score, largest, weight float32) float32 {
	return float32(float32(math.Exp(float64(score-largest))) * weight)
}

// keeps reports whether dropout keeps the attention of head k in row i of a layer's counters.
func (d *dropout) keeps(layer uint32, i, k int64) bool {
	w := philox.Block(d.Key, [4]uint32{layer<<24 | uint32(k/4), uint32(i), d.Epoch, d.Batch})
	return !(philox.Float32(w[k%4]) < d.P)
}

// kept is a's value behind dropout.
func (p *gatParams) kept(layer uint32, i, k int64, a float32) float32 {
	if p.Drop.P == 0 {
		return a
	}
	if p.Drop.keeps(layer, i, k) {
		return a * p.Drop.Scale
	}
	return 0
}

// gatViews holds the arrays that the kernels of the softmax read.
type gatViews struct {
	indptr                      []int64
	src                         []uint32
	weights, scoreSrc, scoreDst []float32
	largest, inverse            []float32
	alpha, alphaSelf            []float32
	edges, heads                int64
	layer, selfLayer            uint32
}

func (p *gatParams) views() (v gatViews) {
	v = gatViews{
		indptr: cuda.View[int64](p.Indptr, p.NumDst+1), src: cuda.View[uint32](p.Src, p.Edges),
		scoreSrc: view(p.ScoreSrc, p.NumSrc*p.Heads), scoreDst: view(p.ScoreDst, p.NumDst*p.Heads),
		largest: view(p.Max, p.NumDst*p.Heads), inverse: view(p.Inverse, p.NumDst*p.Heads),
		alpha: view(p.Alpha, p.Edges*p.Heads), alphaSelf: view(p.AlphaSelf, p.NumDst*p.Heads),
		edges: p.Edges, heads: p.Heads, layer: p.Drop.Layer, selfLayer: p.Drop.Layer -
			attentionLayer + attentionSelf,
	}
	if p.SrcWeights != 0 {
		v.weights = view(p.SrcWeights, p.NumSrc)
	}
	return v
}

// edge is the score of an edge and the weight of its source.
func (v *gatViews) edge(e, k int64, own float32) (score, weight float32) {
	j, weight := int64(v.src[e]), float32(1)
	if v.weights != nil {
		weight = v.weights[j]
	}
	return leaky(own + v.scoreSrc[j*v.heads+k]), weight
}

// gatSoftmax computes attention for all edges of a destination and its self loop, behind dropout,
// and leaves the largest score and the inverse of the sum for the backward pass.
func gatSoftmax(b *cuda.Block, p *gatParams) error {
	v := p.views()
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		from, to := v.indptr[i], v.indptr[i+1]
		if from < 0 || from > to || to > p.Edges {
			return fmt.Errorf("attention: row %d: %d to %d are no edges of the block", i, from, to)
		}
		for k := range p.Heads {
			pos := i*p.Heads + k
			own := v.scoreDst[pos]
			self := leaky(own + v.scoreSrc[pos])
			largest := self
			for e := from; e < to; e++ {
				if s, _ := v.edge(e, k, own); s > largest {
					largest = s
				}
			}
			x := attention(self, largest, 1)
			sum := x
			v.alphaSelf[pos] = x
			for e := from; e < to; e++ {
				s, w := v.edge(e, k, own)
				x := attention(s, largest, w)
				sum += x
				v.alpha[e*p.Heads+k] = x
			}
			inverse := 1 / sum
			v.largest[pos], v.inverse[pos] = largest, inverse
			v.alphaSelf[pos] = p.kept(v.selfLayer, i, k, v.alphaSelf[pos]*inverse)
			for e := from; e < to; e++ {
				a := &v.alpha[e*p.Heads+k]
				*a = p.kept(v.layer, e, k, *a*inverse)
			}
		}
	}
	return nil
}

// gatSum computes Out[i, k] = AlphaSelf[i, k] Z[i, k] + Σ_e Alpha[e, k] Z[Src[e], k], float32[N, K,
// D].
func gatSum(b *cuda.Block, p *gatParams) error {
	wide := p.Heads * p.Dim
	z, out, level := view(p.Z, p.NumSrc*wide), view(p.Out, p.NumDst*wide), b.SIMD()
	indptr, self := cuda.View[int64](p.Indptr, p.NumDst+1), view(p.AlphaSelf, p.NumDst*p.Heads)
	s := simd.HeadSum{X: z, Heads: int(p.Heads), Dim: int(p.Dim), List: cuda.View[uint32](p.Src,
		p.Edges), Weights: view(p.Alpha, p.Edges*p.Heads), Stream: 4*p.NumDst*wide >= streamBytes}
	var counts [headLists]uint32
	lo, hi := b.Range(p.NumDst)
	for lo < hi {
		to := min(hi, lo+headLists)
		for i := lo; i < to; i++ {
			counts[i-lo] = uint32(indptr[i+1] - indptr[i])
		}
		level.SumHeads(&s, out[lo*wide:to*wide], int(indptr[lo]), counts[:to-lo], &simd.HeadTerms{
			{X: z[lo*wide : to*wide], Weights: self[lo*p.Heads : to*p.Heads]}})
		lo = to
	}
	if s.Stream {
		level.StoreFence()
	}
	return nil
}

// gatMean computes Out[i] = 1/K Σ_k Z[i, k], float32[N, D], of the outputs of all heads Z.
func gatMean(b *cuda.Block, p *gatParams) error {
	z, out, d := view(p.Z, p.NumDst*p.Heads*p.Dim), view(p.Out, p.NumDst*p.Dim), p.Dim
	share := 1 / float32(p.Heads)
	lo, hi := b.Range(p.NumDst * d)
	for r := lo; r < hi; r++ {
		first, sum := r/d*p.Heads*d+r%d, float32(0)
		for k := range p.Heads {
			sum += z[first+k*d]
		}
		out[r] = sum * share
	}
	return nil
}

// gatSpread is the gradient of gatMean: Out[i, k] = 1/K Z[i], Z float32[N, D].
func gatSpread(b *cuda.Block, p *gatParams) error {
	z, out, d := view(p.Z, p.NumDst*p.Dim), view(p.Out, p.NumDst*p.Heads*p.Dim), p.Dim
	share := 1 / float32(p.Heads)
	lo, hi := b.Range(p.NumDst * p.Heads * d)
	for r := lo; r < hi; r++ {
		out[r] = z[r/(d*p.Heads)*d+r%d] * share
	}
	return nil
}

// gatEdges writes what makes each edge a destination, EdgePtr[e] = e, and the one that it has,
// EdgeDst.
func gatEdges(b *cuda.Block, p *gatParams) error {
	indptr := cuda.View[int64](p.Indptr, p.NumDst+1)
	ptr, dst := cuda.View[int64](p.EdgePtr, p.Edges+1), cuda.View[uint32](p.EdgeDst, p.Edges)
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		for e := indptr[i]; e < indptr[i+1]; e++ {
			ptr[e], dst[e] = e, uint32(i)
		}
	}
	if b.Index == 0 {
		ptr[p.Edges] = p.Edges
	}
	return nil
}

// gatDot computes the gradients by attention: DotSelf[i, k] = Grad[i, k] · Z[i, k], Dot[e, k] =
// Grad[EdgeDst[e], k] · Z[Src[e], k].
func gatDot(b *cuda.Block, p *gatParams) error {
	level, wide := b.SIMD(), p.Heads*p.Dim
	z, grad := view(p.Z, p.NumSrc*wide), view(p.Grad, p.NumDst*wide)
	indptr, src := cuda.View[int64](p.Indptr, p.NumDst+1), cuda.View[uint32](p.Src, p.Edges)
	dot, self := view(p.Dot, p.Edges*p.Heads), view(p.DotSelf, p.NumDst*p.Heads)
	s := simd.HeadDots{Heads: int(p.Heads), Dim: int(p.Dim)}
	var counts [headLists]uint32
	lo, hi := b.Range(p.NumDst)
	for lo < hi {
		to := min(hi, lo+headLists)
		for i := lo; i < to; i++ {
			counts[i-lo] = uint32(indptr[i+1] - indptr[i])
		}
		s.A, s.B = grad[lo*wide:to*wide], z[lo*wide:to*wide]
		level.DotRows(&s, self[lo*p.Heads:to*p.Heads])
		s.B = z
		level.DotHeads(&s, dot[indptr[lo]*p.Heads:], src, int(indptr[lo]), counts[:to-lo])
		lo = to
	}
	return nil
}

// gatSoftmaxBwd turns Dot and DotSelf into the gradients by the scores before LeakyReLU, whose sums
// are DDst, and computes Alpha and AlphaSelf once more: other layers have used them since.
func gatSoftmaxBwd(b *cuda.Block, p *gatParams) error {
	v := p.views()
	dot, dotSelf, dDst := view(p.Dot, p.Edges*p.Heads), view(p.DotSelf, p.NumDst*p.Heads),
		view(p.DDst, p.NumDst*p.Heads)
	slope := func(s float32) float32 {
		if s > 0 {
			return 1
		}
		return leakySlope
	}
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		from, to := v.indptr[i], v.indptr[i+1]
		for k := range p.Heads {
			pos := i*p.Heads + k
			own, largest, inverse := v.scoreDst[pos], v.largest[pos], v.inverse[pos]
			self := leaky(own + v.scoreSrc[pos])
			aSelf := attention(self, largest, 1) * inverse
			dSelf := p.kept(v.selfLayer, i, k, dotSelf[pos])
			mean := float32(aSelf * dSelf)
			for e := from; e < to; e++ {
				s, w := v.edge(e, k, own)
				a := attention(s, largest, w) * inverse
				d := p.kept(v.layer, e, k, dot[e*p.Heads+k])
				mean += float32(a * d)
				v.alpha[e*p.Heads+k], dot[e*p.Heads+k] = a, d
			}
			g := float32(aSelf*(dSelf-mean)) * slope(self)
			sum := g
			dotSelf[pos], v.alphaSelf[pos] = g, p.kept(v.selfLayer, i, k, aSelf)
			for e := from; e < to; e++ {
				s, _ := v.edge(e, k, own)
				a := v.alpha[e*p.Heads+k]
				g := float32(a*(dot[e*p.Heads+k]-mean)) * slope(s)
				sum += g
				dot[e*p.Heads+k], v.alpha[e*p.Heads+k] = g, p.kept(v.layer, e, k, a)
			}
			dDst[pos] = sum
		}
	}
	return nil
}

// gatScoreBwd computes DSrc[j, k] = DotSelf[j, k] (destinations) + Σ Dot[e, k] over the source's
// edges.
func gatScoreBwd(b *cuda.Block, p *gatParams) error {
	end, list := cuda.View[uint32](p.TEnd, p.NumSrc), cuda.View[uint32](p.TEdge, p.Edges)
	dot, self, out := view(p.Dot, p.Edges*p.Heads), view(p.DotSelf, p.NumDst*p.Heads),
		view(p.DSrc, p.NumSrc*p.Heads)
	lo, hi := b.Range(p.NumSrc)
	from := uint32(0)
	if lo > 0 {
		from = end[lo-1]
	}
	for j := lo; j < hi; j++ {
		for k := range p.Heads {
			sum := float32(0)
			if j < p.NumDst {
				sum = self[j*p.Heads+k]
			}
			for _, e := range list[from:end[j]] {
				sum += dot[int64(e)*p.Heads+k]
			}
			out[j*p.Heads+k] = sum
		}
		from = end[j]
	}
	return nil
}

// gatSumBwd computes the gradient by z, Out float32[S, K, D]:
//
//	Out[j, k] = AlphaSelf[j, k] Grad[j, k] + Σ_e Alpha[e, k] Grad[EdgeDst[e], k] + DSrc[j, k] AttSrc[k] + DDst[j, k] AttDst[k]
//
// whose first and last term only destinations have.
func gatSumBwd(b *cuda.Block, p *gatParams) error {
	heads, level, wide := p.Heads, b.SIMD(), p.Heads*p.Dim
	out, grad := view(p.Out, p.NumSrc*wide), view(p.Grad, p.NumDst*wide)
	end, self := cuda.View[uint32](p.TEnd, p.NumSrc), view(p.AlphaSelf, p.NumDst*heads)
	attSrc, attDst, dSrc, dDst := view(p.AttSrc, wide), view(p.AttDst, wide),
		view(p.DSrc, p.NumSrc*heads), view(p.DDst, p.NumDst*heads)
	s := simd.HeadSum{X: grad, Heads: int(heads), Dim: int(p.Dim), List: cuda.View[uint32](p.TEdge,
		p.Edges), Rows: cuda.View[uint32](p.EdgeDst, p.Edges), Weights: view(p.Alpha,
		p.Edges*heads), Stream: 4*p.NumSrc*wide >= streamBytes}
	var counts [headLists]uint32
	lo, hi := b.Range(p.NumSrc)
	from := uint32(0)
	if lo > 0 {
		from = end[lo-1]
	}
	for lo < hi {
		to := min(hi, lo+headLists)
		terms := simd.HeadTerms{1: {X: attSrc, Weights: dSrc[lo*heads : to*heads]}}
		if lo < p.NumDst {
			to = min(to, p.NumDst)
			terms[0] = simd.HeadTerm{X: grad[lo*wide : to*wide], Weights: self[lo*heads : to*heads]}
			terms[2] = simd.HeadTerm{X: attDst, Weights: dDst[lo*heads : to*heads]}
		}
		begin := from
		for j := lo; j < to; j++ {
			counts[j-lo] = end[j] - begin
			begin = end[j]
		}
		level.SumHeads(&s, out[lo*wide:to*wide], int(from), counts[:to-lo], &terms)
		lo, from = to, begin
	}
	if s.Stream {
		level.StoreFence()
	}
	return nil
}

// gatScale computes Out[r, k] = Scale[r, k] Z[r, k] for Rows rows. Out may be Z.
func gatScale(b *cuda.Block, p *gatParams) error {
	d := p.Dim
	z, out, scale := view(p.Z, p.Rows*p.Heads*d), view(p.Out, p.Rows*p.Heads*d),
		view(p.Scale, p.Rows*p.Heads)
	lo, hi := b.Range(p.Rows * p.Heads)
	sumLists(b.SIMD(), &simd.RowSum{Dim: int(d)}, out, z, lo, hi, 0, func(r int64) simd.RowList {
		return simd.RowList{Start: scale[r]}
	})
	return nil
}

// biasAct finishes the sums of a layer that are no product: bias, activation, dropout.
func biasAct(b *cuda.Block, p *biasActParams) error {
	c := matrix(p.C, p.Rows, p.Cols, p.LDC)
	var bias []float32
	if p.Bias != 0 {
		bias = view(p.Bias, p.Cols)
	}
	g := gemmParams{Flags: p.Flags, Drop: p.Drop}
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		g.epilogue(b.SIMD(), c[i*p.LDC:i*p.LDC+p.Cols], bias, i, 0)
	}
	return nil
}
