package simd

import "unsafe"

// headArgs is the assembly's view of HeadSum.add; gen/heads has the offsets.
type headArgs struct {
	out, x, weights *float32
	heads, dim      int64
}

// HeadSum is a weighted sum of rows of X, each Heads × Dim float32s, by a list, with a weight of
// its own for each element of the list and each head. Every product and every sum is rounded, in
// the order of the list.
type HeadSum struct {
	X          []float32
	Heads, Dim int
	// Weights has Heads elements for each edge, Rows the row of X of each edge; nil: the list has
	// rows, and its edges are those from the first on.
	Weights []float32
	Rows    []uint32
}

// SumHeads sets out to the sum over a list: of edges, or, where Rows is nil, of the rows of edges
// first, first+1, …. init, which may be nil, comes first, times start for each head.
func (l Level) SumHeads(s *HeadSum, out []float32, list []uint32, first int, init,
	start []float32) {
	wide := s.Heads * s.Dim
	out = out[:wide]
	clear(out)
	if wide == 0 {
		return
	}
	if init != nil {
		s.add(l, out, init, start)
	}
	for n, e := range list {
		row, edge := int(e), first+n
		if s.Rows != nil {
			row, edge = int(s.Rows[e]), int(e)
		}
		s.add(l, out, s.X[row*wide:], s.Weights[edge*s.Heads:])
	}
}

// add adds a row times the weights of its heads.
func (s *HeadSum) add(l Level, out, x, weights []float32) {
	x, weights = x[:len(out)], weights[:s.Heads]
	if l >= AVX2 && s.Dim >= 8 {
		a := headArgs{&out[0], &x[0], &weights[0], int64(s.Heads), int64(s.Dim)}
		if l == AVX512 && s.Dim >= 16 {
			addHeadsAVX512((*byte)(unsafe.Pointer(&a)))
		} else {
			addHeadsAVX2((*byte)(unsafe.Pointer(&a)))
		}
		return
	}
	for k, w := range weights {
		o := out[k*s.Dim : (k+1)*s.Dim]
		for f, v := range x[k*s.Dim : (k+1)*s.Dim] {
			o[f] += float32(w * v)
		}
	}
}
