package gnn

import (
	"fmt"
	"math"
	"unsafe"

	"helios/cuda"
	"helios/internal/simd"
)

// aggParams is the parameter block of sage_mean, sage_weighted, gcn_agg, gcn_weights, agg_weights,
// self_weights, transpose and the backward kernels. The block of the mini-batch is in CSC form; see
// graph.Block.
type aggParams struct {
	Indptr  cuda.DevicePtr // int64[NumDst+1]
	Src     cuda.DevicePtr // uint32[NumEdges]
	Degrees cuda.DevicePtr // uint32[NumSrc], true in-degrees (GCN)
	X       cuda.DevicePtr // forward: float32[NumSrc, Dim] inputs
	// forward: float32[NumDst, Dim]; backward: float32[NumSrc, Dim], see *_bwd
	Out  cuda.DevicePtr
	Grad cuda.DevicePtr // backward: float32[NumDst, Dim], gradient of the aggregate
	Self cuda.DevicePtr // backward of SAGE: float32[NumDst, Dim], gradient by the self weight
	// see edgeWeights: forward of GCN float32[NumSrc], backward float32[NumDst]
	Weights cuda.DevicePtr
	TEnd    cuda.DevicePtr // uint32[NumSrc]: end of each source's list in TDst
	TDst    cuda.DevicePtr // uint32[NumEdges]: destinations by source
	// Blocks with weights (graph.Block); else 0.
	SrcWeights cuda.DevicePtr // float32[NumSrc], the block's
	// float32[NumDst], by agg_weights or self_weights: destinations' parts of the edges' weights
	DstWeights  cuda.DevicePtr
	SelfWeights cuda.DevicePtr // float32[NumDst], by self_weights: of the self loops; 0: none
	Eps         cuda.DevicePtr // float32[1], the ε of GIN; 0: none
	NumDst      int64
	NumSrc      int64
	Edges       int64
	Dim         int64
	Scale       float32 // backward: of what dropout kept, 1 without
	Open        uint32  // backward: 1 lets gradients pass as they are
}

const (
	_ = uint(unsafe.Sizeof(aggParams{}) - 152)
	_ = uint(152 - unsafe.Sizeof(aggParams{}))
)

func init() {
	mean := func(b *cuda.Block, p *aggParams, t *placedParams) error {
		return aggregate(b, p, t, false)
	}
	registerSum("sage_mean", mean)
	registerSum("sage_weighted", mean)
	registerSum("gcn_agg", func(b *cuda.Block, p *aggParams, t *placedParams) error {
		return aggregate(b, p, t, true)
	})
	cuda.RegisterHost("sage_mean_bwd",
		func(b *cuda.Block, p *aggParams) error { return aggregateBwd(b, p, false) })
	cuda.RegisterHost("gcn_agg_bwd",
		func(b *cuda.Block, p *aggParams) error { return aggregateBwd(b, p, true) })
	cuda.RegisterHost("gcn_weights", gcnWeights)
	cuda.RegisterHost("agg_weights", aggWeights)
	cuda.RegisterHost("self_weights", selfWeights)
	cuda.RegisterHost("sage_transpose",
		func(b *cuda.Block, p *aggParams) error { return transpose(b, p, false) })
	cuda.RegisterHost("gcn_transpose",
		func(b *cuda.Block, p *aggParams) error { return transpose(b, p, true) })
	cuda.RegisterHost("col_sum", colSum)
	cuda.RegisterHost("square_sum", squareSum)
	cuda.RegisterHost("clip_factor", clipFactor)
	cuda.RegisterHost("adam", adam)
}

// edgeWeights gives the weight of an edge in an aggregate. SAGE: the mean, 1/s with s neighbours
// sampled. GCN: symmetric normalisation with self loops (Kipf and Welling, ICLR 2017) by true
// in-degrees D, times D/s for the neighbours that were not sampled:
//
//	w_ij = (D_i/s_i) / sqrt((D_i+1)(D_j+1)),  self loop 1/(D_i+1)
//
// so the sum over samples has the sum over all neighbours as its mean, and equals it when all
// were taken.
//
// In a block with weights b (layer-wise sampling) b_j / Σ b over i's sampled neighbours stands in
// the place of 1/s.
//
// Where only the remaining self loops are added, D and s leave out a node's edges to itself, and
// selfWeights has the self loop's weight.
type edgeWeights struct {
	gcn    bool
	indptr []int64
	deg    []uint32
	src    []float32 // of blocks with weights: b
	dst    []float32 // what agg_weights or self_weights made
	loops  []float32 // what self_weights made
}

func (p *aggParams) weights(gcn bool) edgeWeights {
	w := edgeWeights{gcn: gcn, indptr: cuda.View[int64](p.Indptr, p.NumDst+1)}
	if gcn {
		w.deg = cuda.View[uint32](p.Degrees, p.NumSrc)
	}
	for _, f := range []struct {
		to   *[]float32
		from cuda.DevicePtr
		n    int64
	}{{&w.src, p.SrcWeights, p.NumSrc}, {&w.dst, p.DstWeights, p.NumDst},
		{&w.loops, p.SelfWeights, p.NumDst}} {
		if f.from != 0 {
			*f.to = cuda.View[float32](f.from, f.n)
		}
	}
	return w
}

func rsqrt1(d uint32) float32 { return 1 / float32(math.Sqrt(float64(float32(d)+1))) }

// ofDst is the part of the weight that a destination with edges has in common for all of them.
func (w *edgeWeights) ofDst(i int64) float32 {
	if w.dst != nil {
		return w.dst[i]
	}
	return w.over(i, float32(w.indptr[i+1]-w.indptr[i]))
}

// over is ofDst for s sampled neighbours, or for a sum of their weights.
func (w *edgeWeights) over(i int64, s float32) float32 {
	if !w.gcn {
		return 1 / s
	}
	return float32(float32(w.deg[i])/s) * rsqrt1(w.deg[i])
}

// ofSrc is the other part.
func (w *edgeWeights) ofSrc(j int64) float32 {
	switch {
	case w.gcn && w.src != nil:
		return w.src[j] * rsqrt1(w.deg[j])
	case w.gcn:
		return rsqrt1(w.deg[j])
	case w.src != nil:
		return w.src[j]
	}
	return 1
}

// self is the weight of the self loop.
func (w *edgeWeights) self(i int64) float32 {
	if w.loops != nil {
		return w.loops[i]
	}
	return w.loop(i)
}

// loop is the weight of the self loop of a node without an edge to itself.
func (w *edgeWeights) loop(i int64) float32 { return 1 / (float32(w.deg[i]) + 1) }

// gcnWeights writes each source's part of its edges' weights: once a node instead of once an edge.
func gcnWeights(b *cuda.Block, p *aggParams) error {
	w := p.weights(true)
	weights := cuda.View[float32](p.Weights, p.NumSrc)
	lo, hi := b.Range(p.NumSrc)
	for j := lo; j < hi; j++ {
		weights[j] = w.ofSrc(j)
	}
	return nil
}

// aggWeights writes the destinations' parts of the edges' weights of a block with weights: sums
// over the edges in order.
func aggWeights(b *cuda.Block, p *aggParams) error {
	w := p.weights(p.Degrees != 0)
	src := cuda.View[uint32](p.Src, p.Edges)
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		w.dst[i] = 0 // nobody asks for that of an empty list
		if list := src[w.indptr[i]:w.indptr[i+1]]; len(list) > 0 {
			sum := float32(0)
			for _, j := range list {
				sum += w.src[j]
			}
			w.dst[i] = w.over(i, sum)
		}
	}
	return nil
}

// selfWeights makes a node its own neighbour exactly once, as PyG's layers have it, whatever edges
// to itself were drawn: the self loop gets the weight that these lack. SelfWeights[i] is that of
// GCN less those of i's n edges to itself, and DstWeights[i] leaves them out; without Degrees, for
// attention, it is 1 - n, each edge as often as its source's weight says.
func selfWeights(b *cuda.Block, p *aggParams) error {
	w := p.weights(p.Degrees != 0)
	src := cuda.View[uint32](p.Src, p.Edges)
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		from, to := w.indptr[i], w.indptr[i+1]
		if from < 0 || from > to || to > p.Edges {
			return fmt.Errorf("self loops: row %d: %d to %d are no edges of the block", i, from, to)
		}
		own, sum := int64(0), float32(0)
		for _, j := range src[from:to] {
			if int64(j) == i {
				own++
			} else if w.src != nil {
				sum += w.src[j]
			}
		}
		if w.src == nil {
			sum = float32(to - from - own)
		}
		all, each := float32(1), float32(1)
		if w.gcn {
			w.dst[i] = 0
			if sum > 0 {
				w.dst[i] = w.over(i, sum)
			}
			all, each = w.loop(i), float32(w.dst[i]*w.ofSrc(i))
		} else if w.src != nil {
			each = w.src[i]
		}
		w.loops[i] = all - float32(float32(own)*each)
	}
	return nil
}

// streamBytes is the size from which an aggregate is stored around the caches: they will not keep
// it for the product that reads it.
const streamBytes = 16 << 20

// aggregate computes Out[i] = Σ_j w_ij X[j] over the edges in order, for GCN after the self loop
// (sage_mean, gcn_agg; sage_weighted, of which a GPU has a kernel of its own, for blocks with
// weights). It reads (edges + GCN's NumDst) rows and writes NumDst.
func aggregate(b *cuda.Block, p *aggParams, t *placedParams, gcn bool) error {
	w := p.weights(gcn)
	out := cuda.View[float32](p.Out, p.NumDst*p.Dim)
	d, level := p.Dim, b.SIMD()
	sum := simd.RowSum{
		Dim: int(d), List: cuda.View[uint32](p.Src, p.Edges),
		Stream: p.NumDst*d*4 >= streamBytes,
	}
	t.rows(p, &sum)
	if gcn {
		sum.Table = cuda.View[float32](p.Weights, p.NumSrc)
	} else if w.src != nil {
		sum.Table = w.src
	}
	var own []float32
	if gcn {
		own = cuda.View[float32](p.X, p.NumDst*d)
	}
	lo, hi := b.Range(p.NumDst)
	sumLists(level, &sum, out, own, lo, hi, w.indptr[lo], func(i int64) (q simd.RowList) {
		if q.N = uint32(w.indptr[i+1] - w.indptr[i]); q.N > 0 {
			q.Factor = w.ofDst(i)
		}
		if gcn {
			q.Start = w.self(i)
		}
		return q
	})
	if sum.Stream {
		level.StoreFence()
	}
	return nil
}

// sumLists makes rows lo to hi-1 of out, whose lists begin at the place at of sum's. The first rows
// have a row of own that comes first.
func sumLists(l simd.Level, sum *simd.RowSum, out, own []float32, lo, hi, pos int64,
	list func(row int64) simd.RowList) {
	var lists [64]simd.RowList // at one time: a call costs as much as a short list
	d := int64(sum.Dim)
	for lo < hi {
		to := min(hi, lo+int64(len(lists)))
		var first []float32
		if lo*d < int64(len(own)) {
			to = min(to, int64(len(own))/d)
			first = own[lo*d : to*d]
		}
		n := int64(0)
		for i := lo; i < to; i++ {
			q := list(i)
			lists[i-lo] = q
			n += int64(q.N)
		}
		l.SumLists(sum, out[lo*d:to*d], int(pos), lists[:to-lo], first)
		lo, pos = to, pos+n
	}
}

// The backward pass gathers: source j sums over the destinations that sampled it. transpose makes
// their lists, in order of destination, by a counting sort of the edges by source, and the
// destinations' parts of the edges' weights. A block sorts the edges of its share of the sources
// and reads all of them for it, which is cheap beside its random writes; so nothing is atomic, and
// the lists need no sorting.
func transpose(b *cuda.Block, p *aggParams, gcn bool) error {
	w := p.weights(gcn)
	src := cuda.View[uint32](p.Src, p.Edges)
	lists := cuda.View[uint32](p.TDst, p.Edges)
	weights := cuda.View[float32](p.Weights, p.NumDst)
	first, last := b.Range(p.NumDst)
	for i := first; i < last; i++ {
		weights[i] = 0 // nobody asks for that of an empty list
		if w.indptr[i+1] > w.indptr[i] {
			weights[i] = w.ofDst(i)
		}
	}
	lo, hi := b.Range(p.NumSrc)
	next := cuda.View[uint32](p.TEnd, p.NumSrc)[lo:hi]
	clear(next)
	sum := uint32(0)
	for _, j := range src {
		if k := j - uint32(lo); k < uint32(len(next)) {
			next[k]++
		} else if int64(j) < lo {
			sum++
		}
	}
	for k, n := range next {
		next[k] = sum
		sum += n
	}
	for i := range p.NumDst {
		for _, j := range src[w.indptr[i]:w.indptr[i+1]] {
			if k := j - uint32(lo); k < uint32(len(next)) {
				lists[next[k]] = uint32(i)
				next[k]++ // in the end where the next list starts
			}
		}
	}
	return nil
}

// aggregateBwd is the gradient by the layer's inputs, in one pass with ReLU and dropout of the
// layer below. Out holds that layer's activations h = dropout(relu(z)) and gets the gradient by z
// in their place:
//
//	Out[j] = (h[j] > 0) · Scale · (self part + Σ_i w_ij Grad[i])
//
// h > 0 says both that ReLU was open and that dropout kept the element, so no mask is stored.
// With Open set, all gradients pass: what comes between layers then has kernels of its own.
// The self part is Self[j] (SAGE) or Grad[j]/(D_j+1) (GCN) for destinations, else 0.
func aggregateBwd(b *cuda.Block, p *aggParams, gcn bool) error {
	w := p.weights(gcn)
	d, level := p.Dim, b.SIMD()
	out := cuda.View[float32](p.Out, p.NumSrc*d)
	end := cuda.View[uint32](p.TEnd, p.NumSrc)
	sum := simd.RowSum{
		X: cuda.View[float32](p.Grad, p.NumDst*d), Dim: int(d), List: cuda.View[uint32](p.TDst,
			p.Edges),
		Table: cuda.View[float32](p.Weights, p.NumDst), Gate: p.Open == 0, Scale: p.Scale,
	}
	self := sum.X
	if !gcn {
		// lists of relations may be more than the sources
		self = cuda.View[float32](p.Self, min(p.NumDst, p.NumSrc)*d)
	}
	lo, hi := b.Range(p.NumSrc)
	from := uint32(0)
	if lo > 0 {
		from = end[lo-1]
	}
	sumLists(level, &sum, out, self, lo, hi, int64(from), func(j int64) simd.RowList {
		q := simd.RowList{N: end[j] - from, Factor: w.ofSrc(j), Start: 1}
		if from = end[j]; gcn && j < p.NumDst {
			q.Start = w.self(j)
		}
		return q
	})
	return nil
}

// sumParams is the parameter block of col_sum: Out[c] = Σ_r X[r,c]. The sum is a tree, the same on
// every device: sumLeaf rows in order make one row of partial sums, sumLeaf of those one of the
// next level, until there is only one. So no error grows with the number of rows, and a GPU can do
// the groups of a level at one time.
type sumParams struct {
	X, Out     cuda.DevicePtr
	Rows, Cols int64
}

// sumLeaf rows of a level of col_sum make one of the next.
const sumLeaf = 64

// A block sums colSumPer columns or more: four cache lines of a row, which memory gives at nearly
// the rate of whole rows.
const colSumPer = 64

func colSum(b *cuda.Block, p *sumParams) error {
	lo, hi := b.Range(p.Cols)
	if lo == hi {
		return nil
	}
	x := cuda.View[float32](p.X, p.Rows*p.Cols)
	sumTree(b.SIMD(), cuda.View[float32](p.Out, p.Cols)[lo:hi], x[min(lo, int64(len(x))):],
		p.Rows, p.Cols)
	return nil
}

// sumTree sets out to the sums of the columns of some rows of x, stride apart.
func sumTree(l simd.Level, out, x []float32, rows, stride int64) {
	if rows <= sumLeaf {
		l.SumColumns(out, x, int(rows), int(stride))
		return
	}
	per := int64(sumLeaf) // rows below one of the top level
	for per*sumLeaf < rows {
		per *= sumLeaf
	}
	n := len(out)
	two := make([]float32, 2*n) // the sum so far and the next one
	for r := int64(0); r < rows; r += per {
		sumTree(l, two[n:], x[r*stride:], min(per, rows-r), stride)
		l.SumColumns(out, two, 2, n) // not in place: the generic level clears its output first
		copy(two, out)
	}
}

// adamParams is the parameter block of adam, which updates N parameters (Kingma and Ba, ICLR
// 2015, algorithm 1, in the form with the corrections moved into StepSize and RootC2):
//
//	g *= *Factor;  g += L2·p;  p -= Decay·p;  m = B1·m + (1-B1)·g;  v = B2·v + (1-B2)·g²
//	p -= StepSize · m / (sqrt(v)·RootC2 + Eps)
type adamParams struct {
	P, G, M, V cuda.DevicePtr
	Factor     cuda.DevicePtr // float32[1], by clip_factor; 0: 1
	N          int64
	simd.AdamStep
	_ uint32
}

const (
	_ = uint(unsafe.Sizeof(adamParams{}) - 88)
	_ = uint(88 - unsafe.Sizeof(adamParams{}))
)

func adam(b *cuda.Block, q *adamParams) error {
	lo, hi := b.Range(q.N)
	p := cuda.View[float32](q.P, q.N)[lo:hi]
	g := cuda.View[float32](q.G, q.N)[lo:hi]
	m := cuda.View[float32](q.M, q.N)[lo:hi]
	v := cuda.View[float32](q.V, q.N)[lo:hi]
	factor := float32(1)
	if q.Factor != 0 {
		factor = cuda.View[float32](q.Factor, 1)[0]
	}
	if factor == 1 {
		b.SIMD().Adam(p, g, m, v, &q.AdamStep)
		return nil
	}
	var scaled [1024]float32 // the gradient stays: a step may be enqueued again
	for len(g) > 0 {
		n := min(len(g), len(scaled))
		for i, x := range g[:n] {
			scaled[i] = x * factor
		}
		b.SIMD().Adam(p[:n], scaled[:n], m[:n], v[:n], &q.AdamStep)
		p, g, m, v = p[n:], g[n:], m[n:], v[n:]
	}
	return nil
}

// clipParams is the parameter block of square_sum and clip_factor, which bring the norm of N
// gradients down to Limit:
//
//	Sum = Σ g²,  Factor = min(1, Limit / (sqrt(Sum) + 1e-6))
type clipParams struct {
	G      cuda.DevicePtr // float32[N]
	Parts  cuda.DevicePtr // float64, one for each squareUnit gradients
	Factor cuda.DevicePtr // float32[1]
	Sum    cuda.DevicePtr // float64[1]
	N      int64
	Limit  float32
	_      uint32
}

const (
	_ = uint(unsafe.Sizeof(clipParams{}) - 48)
	_ = uint(48 - unsafe.Sizeof(clipParams{}))
)

// squareUnit is the number of gradients whose squares a warp adds, in four sums for each lane.
const squareUnit = 2048

// squareSum adds the squares of whole units in the order of a tree, so that their sum depends on
// the gradients alone. The square of a float32 is exact in float64.
func squareSum(b *cuda.Block, q *clipParams) error {
	g := cuda.View[float32](q.G, q.N)
	parts := cuda.View[float64](q.Parts, squareUnits(q.N))
	lo, hi := b.Range(int64(len(parts)))
	for u := lo; u < hi; u++ {
		unit := g[u*squareUnit : min((u+1)*squareUnit, q.N)]
		var lanes [32]float64
		for l := range lanes {
			lanes[l] = laneSquares(unit, l)
		}
		parts[u] = sumOfLanes(&lanes)
	}
	return nil
}

// squareUnits is the number of units of n gradients.
func squareUnits(n int64) int64 { return (n + squareUnit - 1) / squareUnit }

// laneSquares adds the squares that a lane has of a unit: four floats of every 128, the first of
// all, the second of all, and so on.
func laneSquares(unit []float32, lane int) float64 {
	var s [4]float64
	i := lane * 4
	for ; i+4 <= len(unit); i += 128 {
		x := unit[i : i+4 : i+4]
		a, b, c, d := float64(x[0]), float64(x[1]), float64(x[2]), float64(x[3])
		s[0], s[1], s[2], s[3] = s[0]+float64(a*a), s[1]+float64(b*b), s[2]+float64(c*c),
			s[3]+float64(d*d)
	}
	for c := i; c < len(unit) && c < i+4; c++ {
		x := float64(unit[c])
		s[c-i] += float64(x * x)
	}
	return (s[0] + s[1]) + (s[2] + s[3])
}

func sumOfLanes(lanes *[32]float64) float64 {
	for n := len(lanes) / 2; n > 0; n /= 2 {
		for l := range n {
			lanes[l] += lanes[l+n]
		}
	}
	return lanes[0]
}

// clipFactor adds the sums of all units, each lane every 32nd of them, and makes the factor. One
// block.
func clipFactor(b *cuda.Block, q *clipParams) error {
	if b.Index != 0 {
		return nil
	}
	var lanes [32]float64
	for u, x := range cuda.View[float64](q.Parts, squareUnits(q.N)) {
		lanes[u%32] += x
	}
	sum := sumOfLanes(&lanes)
	root := float32(math.Sqrt(float64(float32(sum))))
	factor := q.Limit / (root + 1e-6)
	if factor > 1 {
		factor = 1
	}
	cuda.View[float32](q.Factor, 1)[0] = factor
	cuda.View[float64](q.Sum, 1)[0] = sum
	return nil
}
