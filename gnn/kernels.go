package gnn

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
)

// aggParams is the parameter block of sage_mean, gcn_agg, the transposes and the backward
// kernels. The block of the mini-batch is in CSC form; see graph.Block.
type aggParams struct {
	Indptr  cuda.DevicePtr // int64[NumDst+1]
	Src     cuda.DevicePtr // uint32[NumEdges]
	Degrees cuda.DevicePtr // uint32[NumSrc], true in-degrees (GCN)
	X       cuda.DevicePtr // forward: float32[NumSrc, Dim] inputs
	Out     cuda.DevicePtr // forward: float32[NumDst, Dim]; backward: float32[NumSrc, Dim], see *_bwd
	Grad    cuda.DevicePtr // backward: float32[NumDst, Dim], gradient of the aggregate
	Self    cuda.DevicePtr // backward of SAGE: float32[NumDst, Dim], gradient by the self weight
	TEnd    cuda.DevicePtr // uint32[NumSrc]: end of each source's list in TDst
	TDst    cuda.DevicePtr // uint32[NumEdges]: destinations by source
	NumDst  int64
	NumSrc  int64
	Edges   int64
	Dim     int64
	Scale   float32 // backward: of what dropout kept, 1 without
	_       uint32
}

const (
	_ = uint(unsafe.Sizeof(aggParams{}) - 112)
	_ = uint(112 - unsafe.Sizeof(aggParams{}))
)

func init() {
	cuda.RegisterHost("sage_mean", func(b *cuda.Block, p *aggParams) error { return aggregate(b, p, false) })
	cuda.RegisterHost("gcn_agg", func(b *cuda.Block, p *aggParams) error { return aggregate(b, p, true) })
	cuda.RegisterHost("sage_mean_bwd", func(b *cuda.Block, p *aggParams) error { return aggregateBwd(b, p, false) })
	cuda.RegisterHost("gcn_agg_bwd", func(b *cuda.Block, p *aggParams) error { return aggregateBwd(b, p, true) })
	cuda.RegisterHost("transpose_count", transposeCount)
	cuda.RegisterHost("transpose_scan", transposeScan)
	cuda.RegisterHost("transpose_fill", transposeFill)
	cuda.RegisterHost("col_sum", colSum)
	cuda.RegisterHost("xent_count", xentCount)
	cuda.RegisterHost("softmax_xent", softmaxXent)
	cuda.RegisterHost("xent_sum", xentSum)
	cuda.RegisterHost("adam", adam)
}

// edgeWeights gives the weight of an edge in an aggregate. SAGE: the mean, 1/s with s neighbours sampled.
// GCN: symmetric normalisation with self loops (Kipf and Welling, ICLR 2017) by true in-degrees
// D, times D/s for the neighbours that were not sampled:
//
//	w_ij = (D_i/s_i) / sqrt((D_i+1)(D_j+1)),  self loop 1/(D_i+1)
//
// so the sum over samples has the sum over all neighbours as its mean, and equals it when all
// were taken.
type edgeWeights struct {
	gcn    bool
	indptr []int64
	deg    []uint32
}

func (p *aggParams) weights(gcn bool) edgeWeights {
	w := edgeWeights{gcn: gcn, indptr: cuda.View[int64](p.Indptr, p.NumDst+1)}
	if gcn {
		w.deg = cuda.View[uint32](p.Degrees, p.NumSrc)
	}
	return w
}

func rsqrt1(d uint32) float32 { return 1 / float32(math.Sqrt(float64(float32(d)+1))) }

// dst is the part of the weight that a destination with edges has in common for all of them.
func (w *edgeWeights) dst(i int64) float32 {
	s := float32(w.indptr[i+1] - w.indptr[i])
	if !w.gcn {
		return 1 / s
	}
	return float32(float32(w.deg[i])/s) * rsqrt1(w.deg[i])
}

// src is the other part.
func (w *edgeWeights) src(j uint32) float32 {
	if !w.gcn {
		return 1
	}
	return rsqrt1(w.deg[j])
}

func (w *edgeWeights) self(i int64) float32 { return 1 / (float32(w.deg[i]) + 1) }

// aggregate computes Out[i] = Σ_j w_ij X[j] over the edges in order, for GCN after the self
// loop. It reads (edges + GCN's NumDst) rows and writes NumDst.
func aggregate(b *cuda.Block, p *aggParams, gcn bool) error {
	w := p.weights(gcn)
	src := cuda.View[uint32](p.Src, p.Edges)
	x := cuda.View[float32](p.X, p.NumSrc*p.Dim)
	out := cuda.View[float32](p.Out, p.NumDst*p.Dim)
	d := p.Dim
	row := func(j uint32) []float32 { return x[int64(j)*d : (int64(j)+1)*d] }
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		o := out[i*d : (i+1)*d]
		if gcn {
			scaleTo(o, row(uint32(i)), w.self(i))
		} else {
			clear(o)
		}
		list := src[w.indptr[i]:w.indptr[i+1]]
		if len(list) == 0 {
			continue
		}
		wi := w.dst(i)
		for len(list) >= 4 {
			axpy4(o, row(list[0]), row(list[1]), row(list[2]), row(list[3]),
				float32(wi*w.src(list[0])), float32(wi*w.src(list[1])), float32(wi*w.src(list[2])), float32(wi*w.src(list[3])))
			list = list[4:]
		}
		for _, j := range list {
			axpy(o, row(j), float32(wi*w.src(j)))
		}
	}
	return nil
}

// scaleTo sets o = w·x.
func scaleTo(o, x []float32, w float32) {
	x = x[:len(o)]
	for k := range o {
		o[k] = w * x[k]
	}
}

// axpy adds w·x to o.
func axpy(o, x []float32, w float32) {
	x = x[:len(o)]
	for k := range o {
		o[k] += float32(w * x[k])
	}
}

// axpy4 is four axpys in order with one load and store of o.
func axpy4(o, x0, x1, x2, x3 []float32, w0, w1, w2, w3 float32) {
	n := len(o)
	x0, x1, x2, x3 = x0[:n], x1[:n], x2[:n], x3[:n]
	for k := range o {
		v := o[k] + float32(w0*x0[k])
		v += float32(w1 * x1[k])
		v += float32(w2 * x2[k])
		o[k] = v + float32(w3*x3[k])
	}
}

// The backward pass gathers: source j sums over the destinations that sampled it. Their list
// comes from a counting sort of the edges by source: count (atomic), prefix sums, fill
// (atomic cursors). The fill's order within a list depends on who came first, so the backward kernel sorts
// each list before use; from there on everything has a fixed order.

func transposeCount(b *cuda.Block, p *aggParams) error {
	count := cuda.View[uint32](p.TEnd, p.NumSrc)
	lo, hi := b.Range(p.Edges)
	for _, j := range cuda.View[uint32](p.Src, p.Edges)[lo:hi] {
		atomic.AddUint32(&count[j], 1)
	}
	return nil
}

// transposeScan turns counts into starts. One block.
func transposeScan(b *cuda.Block, p *aggParams) error {
	if b.Index != 0 {
		return nil
	}
	sum := uint32(0)
	count := cuda.View[uint32](p.TEnd, p.NumSrc)
	for j, c := range count {
		count[j] = sum
		sum += c
	}
	return nil
}

// transposeFill moves each start to its list's end, which is where the next list starts.
func transposeFill(b *cuda.Block, p *aggParams) error {
	at := cuda.View[uint32](p.TEnd, p.NumSrc)
	indptr := cuda.View[int64](p.Indptr, p.NumDst+1)
	src := cuda.View[uint32](p.Src, p.Edges)
	dst := cuda.View[uint32](p.TDst, p.Edges)
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		for _, j := range src[indptr[i]:indptr[i+1]] {
			dst[atomic.AddUint32(&at[j], 1)-1] = uint32(i)
		}
	}
	return nil
}

func sortList(l []uint32) {
	if len(l) > 24 {
		slices.Sort(l)
		return
	}
	for i := 1; i < len(l); i++ {
		v, k := l[i], i
		for ; k > 0 && l[k-1] > v; k-- {
			l[k] = l[k-1]
		}
		l[k] = v
	}
}

// aggregateBwd is the gradient by the layer's inputs, in one pass with ReLU and dropout of the
// layer below. Out holds that layer's activations h = dropout(relu(z)) and gets the gradient by z in
// their place:
//
//	Out[j] = (h[j] > 0) · Scale · (self part + Σ_i w_ij Grad[i])
//
// h > 0 says both that ReLU was open and that dropout kept the element, so no mask is stored.
// The self part is Self[j] (SAGE) or Grad[j]/(D_j+1) (GCN) for destinations, else 0.
func aggregateBwd(b *cuda.Block, p *aggParams, gcn bool) error {
	w := p.weights(gcn)
	d := p.Dim
	out := cuda.View[float32](p.Out, p.NumSrc*d)
	grad := cuda.View[float32](p.Grad, p.NumDst*d)
	end := cuda.View[uint32](p.TEnd, p.NumSrc)
	lists := cuda.View[uint32](p.TDst, p.Edges)
	var self []float32
	if !gcn {
		self = cuda.View[float32](p.Self, p.NumDst*d)
	}
	row := func(i uint32) []float32 { return grad[int64(i)*d : (int64(i)+1)*d] }
	s := aggPool.Get().(*aggScratch)
	defer aggPool.Put(s)
	lo, hi := b.Range(p.NumSrc)
	for j := lo; j < hi; j++ {
		start := uint32(0)
		if j > 0 {
			start = end[j-1]
		}
		list := lists[start:end[j]]
		sortList(list)
		wj := w.src(uint32(j))
		h := out[j*d : (j+1)*d]
		for c := int64(0); c < d; c += aggChunk { // columns that the scratch row can hold
			n := min(aggChunk, d-c)
			sum := s.row[:n]
			switch {
			case j >= p.NumDst:
				clear(sum)
			case gcn:
				scaleTo(sum, row(uint32(j))[c:], w.self(j))
			default:
				copy(sum, self[j*d+c:])
			}
			l := list
			for len(l) >= 4 {
				axpy4(sum, row(l[0])[c:], row(l[1])[c:], row(l[2])[c:], row(l[3])[c:],
					float32(w.dst(int64(l[0]))*wj), float32(w.dst(int64(l[1]))*wj), float32(w.dst(int64(l[2]))*wj), float32(w.dst(int64(l[3]))*wj))
				l = l[4:]
			}
			for _, i := range l {
				axpy(sum, row(i)[c:], float32(w.dst(int64(i))*wj))
			}
			for k, v := range sum {
				if h[c+int64(k)] > 0 {
					h[c+int64(k)] = v * p.Scale
				} else {
					h[c+int64(k)] = 0
				}
			}
		}
	}
	return nil
}

// aggScratch is a block's row of sums.
const aggChunk = 1024

type aggScratch struct{ row [aggChunk]float32 }

var aggPool = sync.Pool{New: func() any { return new(aggScratch) }}

// sumParams is the parameter block of col_sum: Out[c] = Σ_r X[r,c], rows in order.
type sumParams struct {
	X, Out     cuda.DevicePtr
	Rows, Cols int64
}

func colSum(b *cuda.Block, p *sumParams) error {
	lo, hi := b.Range(p.Cols)
	if lo == hi {
		return nil
	}
	x := cuda.View[float32](p.X, p.Rows*p.Cols)
	out := cuda.View[float32](p.Out, p.Cols)[lo:hi]
	clear(out)
	r := int64(0)
	at := func(r int64) []float32 { return x[r*p.Cols+lo : r*p.Cols+hi] }
	for ; r+4 <= p.Rows; r += 4 {
		x0, x1, x2, x3 := at(r), at(r+1), at(r+2), at(r+3)
		for c := range out {
			out[c] = out[c] + x0[c] + x1[c] + x2[c] + x3[c]
		}
	}
	for ; r < p.Rows; r++ {
		for c, v := range at(r) {
			out[c] += v
		}
	}
	return nil
}

// xentParams is the parameter block of the loss kernels.
type xentParams struct {
	Logits  cuda.DevicePtr // float32[Rows, Classes]
	Labels  cuda.DevicePtr // int32[Rows], -1 = not labelled; 0 = no labels at all
	Grad    cuda.DevicePtr // float32[Rows, Classes], or 0: gradient of the mean loss by the logits
	Loss    cuda.DevicePtr // float64[Rows]
	Pred    cuda.DevicePtr // int32[Rows]: class of the largest logit, the first of equals
	Outcome cuda.DevicePtr // outcome
	Rows    int64
	Classes int64
}

// outcome is what a step leaves for the host, in pinned memory.
type outcome struct {
	Loss    float64 // mean over Counted rows
	Correct int64
	Counted int64
}

const (
	_ = uint(unsafe.Sizeof(xentParams{}) - 64)
	_ = uint(64 - unsafe.Sizeof(xentParams{}))
	_ = uint(unsafe.Sizeof(outcome{}) - 24)
	_ = uint(24 - unsafe.Sizeof(outcome{}))
)

// xentCount counts the labelled rows, by which the gradient is divided. One block.
func xentCount(b *cuda.Block, p *xentParams) error {
	if b.Index != 0 {
		return nil
	}
	n := int64(0)
	if p.Labels != 0 {
		for i, y := range cuda.View[int32](p.Labels, p.Rows) {
			if y < -1 || int64(y) >= p.Classes {
				return fmt.Errorf("label %d of seed %d is out of range: -1 (none) to %d; check the dataset's labels", y, i, p.Classes-1)
			}
			if y >= 0 {
				n++
			}
		}
	}
	cuda.View[outcome](p.Outcome, 1)[0] = outcome{Counted: n}
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
		if n := cuda.View[outcome](p.Outcome, 1)[0].Counted; n > 0 {
			scale = 1 / float64(n)
		}
	}
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
		loss[i] = 0
		if labels == nil || labels[i] < 0 {
			if grad != nil {
				clear(grad[i*p.Classes : (i+1)*p.Classes])
			}
			continue
		}
		top, sum := float64(z[best]), 0.0
		for _, v := range z {
			sum += math.Exp(float64(v) - top)
		}
		y := labels[i]
		loss[i] = math.Log(sum) - (float64(z[y]) - top)
		if grad != nil {
			g := grad[i*p.Classes : (i+1)*p.Classes]
			for c, v := range z {
				q := math.Exp(float64(v)-top) / sum
				if int32(c) == y {
					q--
				}
				g[c] = float32(q * scale)
			}
		}
	}
	return nil
}

// xentSum adds up the rows in order. One block.
func xentSum(b *cuda.Block, p *xentParams) error {
	if b.Index != 0 || p.Labels == 0 {
		return nil
	}
	o := &cuda.View[outcome](p.Outcome, 1)[0]
	loss := cuda.View[float64](p.Loss, p.Rows)
	pred := cuda.View[int32](p.Pred, p.Rows)
	sum, correct := 0.0, int64(0)
	for i, y := range cuda.View[int32](p.Labels, p.Rows) {
		if y >= 0 {
			sum += loss[i]
			if pred[i] == y {
				correct++
			}
		}
	}
	if o.Counted > 0 {
		o.Loss = sum / float64(o.Counted)
	}
	o.Correct = correct
	return nil
}

// adamParams is the parameter block of adam, which updates N parameters (Kingma and Ba, ICLR
// 2015, algorithm 1, in the form with the corrections moved into StepSize and RootC2):
//
//	g += L2·p;  p -= Decay·p;  m = B1·m + (1-B1)·g;  v = B2·v + (1-B2)·g²
//	p -= StepSize · m / (sqrt(v)·RootC2 + Eps)
type adamParams struct {
	P, G, M, V       cuda.DevicePtr
	N                int64
	B1, C1, B2, C2   float32 // C = 1 - B
	StepSize, RootC2 float32 // lr/(1-B1^t), 1/sqrt(1-B2^t)
	Eps, L2, Decay   float32
	_                uint32
}

const (
	_ = uint(unsafe.Sizeof(adamParams{}) - 80)
	_ = uint(80 - unsafe.Sizeof(adamParams{}))
)

func adam(b *cuda.Block, q *adamParams) error {
	lo, hi := b.Range(q.N)
	p := cuda.View[float32](q.P, q.N)[lo:hi]
	g := cuda.View[float32](q.G, q.N)[lo:hi]
	m := cuda.View[float32](q.M, q.N)[lo:hi]
	v := cuda.View[float32](q.V, q.N)[lo:hi]
	for i, x := range p {
		d := g[i] + float32(q.L2*x)
		x -= float32(q.Decay * x)
		mi := float32(q.B1*m[i]) + float32(q.C1*d)
		vi := float32(q.B2*v[i]) + float32(q.C2*float32(d*d))
		m[i], v[i] = mi, vi
		root := float32(math.Sqrt(float64(vi)))
		p[i] = x - float32(q.StepSize*mi)/(float32(root*q.RootC2)+q.Eps)
	}
	return nil
}
