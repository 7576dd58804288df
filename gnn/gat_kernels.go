package gnn

import (
	"fmt"

	"helios/cuda"
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
	cuda.RegisterHost("gat_scaled_sum", gatScaledSum)
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

// keep sends values through the dropout of attention in a layer's counters: the heads of rows from
// row on.
func (p *gatParams) keep(l simd.Level, layer uint32, v []float32, row int64) {
	for h := p.Heads; p.Drop.P > 0 && len(v) > 0; row, v = row+1, v[h:] {
		d := p.Drop
		d.Layer = layer
		d.apply(l, v[:h], row, 0)
	}
}

// softmax is the attention of p's block.
func (p *gatParams) softmax() (s simd.HeadSoftmax) {
	s = simd.HeadSoftmax{Heads: int(p.Heads), Src: view(p.ScoreSrc, p.NumSrc*p.Heads),
		Dst: view(p.ScoreDst, p.NumDst*p.Heads), Largest: view(p.Max, p.NumDst*p.Heads),
		Inverse: view(p.Inverse, p.NumDst*p.Heads), Alpha: view(p.Alpha, p.Edges*p.Heads),
		AlphaSelf: view(p.AlphaSelf, p.NumDst*p.Heads)}
	if p.SrcWeights != 0 {
		s.Weights = view(p.SrcWeights, p.NumSrc)
	}
	if p.SelfWeights != 0 {
		s.Loops = view(p.SelfWeights, p.NumDst)
	}
	return s
}

// overLists calls do for some destinations of a block of the grid at a time: rows lo to to-1 with
// edges from to last-1.
func (p *gatParams) overLists(b *cuda.Block, do func(lo, to, from, last int64,
	counts []uint32)) error {
	indptr := cuda.View[int64](p.Indptr, p.NumDst+1)
	var counts [headLists]uint32
	lo, hi := b.Range(p.NumDst)
	for lo < hi {
		to := min(hi, lo+headLists)
		for i := lo; i < to; i++ {
			from, last := indptr[i], indptr[i+1]
			if from < 0 || from > last || last > p.Edges {
				return fmt.Errorf("attention: row %d: %d to %d are no edges of the block", i, from,
					last)
			}
			counts[i-lo] = uint32(last - from)
		}
		do(lo, to, indptr[lo], indptr[to], counts[:to-lo])
		lo = to
	}
	return nil
}

// Between the layers of the counters of edges and those of self loops.
const selfLayers = attentionSelf - attentionLayer

// gatSoftmax computes attention for all edges of a destination and its self loop, behind dropout,
// and leaves the largest score and the inverse of the sum for the backward pass.
func gatSoftmax(b *cuda.Block, p *gatParams) error {
	s, level, src := p.softmax(), b.SIMD(), cuda.View[uint32](p.Src, p.Edges)
	return p.overLists(b, func(lo, to, from, last int64, counts []uint32) {
		level.Softmax(&s, int(lo), src, int(from), counts)
		p.keepAlpha(level, &s, lo, to, from, last)
	})
}

// keepAlpha sends attention through its dropout.
func (p *gatParams) keepAlpha(l simd.Level, s *simd.HeadSoftmax, lo, to, from, last int64) {
	p.keep(l, p.Drop.Layer, s.Alpha[from*p.Heads:last*p.Heads], from)
	p.keep(l, p.Drop.Layer+selfLayers, s.AlphaSelf[lo*p.Heads:to*p.Heads], lo)
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
	s, level, src := p.softmax(), b.SIMD(), cuda.View[uint32](p.Src, p.Edges)
	s.Dot, s.DotSelf, s.DDst = view(p.Dot, p.Edges*p.Heads), view(p.DotSelf, p.NumDst*p.Heads),
		view(p.DDst, p.NumDst*p.Heads)
	return p.overLists(b, func(lo, to, from, last int64, counts []uint32) {
		p.keep(level, p.Drop.Layer, s.Dot[from*p.Heads:last*p.Heads], from)
		p.keep(level, p.Drop.Layer+selfLayers, s.DotSelf[lo*p.Heads:to*p.Heads], lo)
		level.SoftmaxSlope(&s, int(lo), src, int(from), counts)
		p.keepAlpha(level, &s, lo, to, from, last)
	})
}

// gatScoreBwd computes DSrc[j, k] = DotSelf[j, k] (destinations) + Σ Dot[e, k] over the source's
// edges.
func gatScoreBwd(b *cuda.Block, p *gatParams) error {
	end := cuda.View[uint32](p.TEnd, p.NumSrc)
	sum := simd.RowSum{X: view(p.Dot, p.Edges*p.Heads), Dim: int(p.Heads),
		List: cuda.View[uint32](p.TEdge, p.Edges)}
	lo, hi := b.Range(p.NumSrc)
	from := uint32(0)
	if lo > 0 {
		from = end[lo-1]
	}
	sumLists(b.SIMD(), &sum, view(p.DSrc, p.NumSrc*p.Heads), view(p.DotSelf, p.NumDst*p.Heads), lo,
		hi, int64(from), func(j int64) simd.RowList {
			n := end[j] - from
			from = end[j]
			return simd.RowList{N: n, Factor: 1, Start: 1}
		})
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

// gatScaledSum computes Out[g, k] = Σ_r Scale[r, k] Z[r, k] over rows r of group g, sumLeaf of Rows
// in order: the leaves of the tree of col_sum.
func gatScaledSum(b *cuda.Block, p *gatParams) error {
	wide, groups := p.Heads*p.Dim, leaves(p.Rows)
	z, out, scale := view(p.Z, p.Rows*wide), view(p.Out, groups*wide), view(p.Scale, p.Rows*p.Heads)
	var list [2 * sumLeaf]uint32 // rows behind the group are asked of memory
	for r := range list {
		list[r] = uint32(r)
	}
	s := simd.HeadSum{Heads: int(p.Heads), Dim: int(p.Dim)}
	lo, hi := b.Range(groups)
	for g := lo; g < hi; g++ {
		from, to := g*sumLeaf, min((g+1)*sumLeaf, p.Rows)
		s.List, s.X = list[:min(p.Rows-from, int64(len(list)))], z[from*wide:]
		s.Weights = scale[from*p.Heads : to*p.Heads]
		b.SIMD().SumHeads(&s, out[g*wide:(g+1)*wide], 0, []uint32{uint32(to - from)},
			&simd.HeadTerms{})
	}
	return nil
}

// leaves is the number of groups of gatScaledSum.
func leaves(rows int64) int64 { return (rows + sumLeaf - 1) / sumLeaf }

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
