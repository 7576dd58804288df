package simd

import "unsafe"

// headArgs is the assembly's view of HeadSum.add; gen/heads has the offsets.
type headArgs struct {
	out, x, weights *float32
	heads, dim      int64
	ahead           *float32 // asked of memory as x is read
}

// headsAhead is how many rows further on in the list memory is asked for.
const headsAhead = 4

// HeadSum is a weighted sum of rows of X, each Heads × Dim float32s, over parts of one list, with a
// weight of its own for each element of the list and each head. Every product and every sum is
// rounded, in the order of the list.
type HeadSum struct {
	X          []float32
	Heads, Dim int
	// List has edges, and Rows the row of X of each edge; where Rows is nil, List has the rows of
	// edges 0, 1, ….
	List, Rows []uint32
	Weights    []float32 // Heads of each edge
}

// edge is the edge at place n of the list, and its row.
func (s *HeadSum) edge(n int) (edge, row int) {
	if s.Rows == nil {
		return n, int(s.List[n])
	}
	e := s.List[n]
	return int(e), int(s.Rows[e])
}

// SumHeads sets out to the sum over List[lo:hi]. init, which may be nil, comes first, times start
// for each head.
func (l Level) SumHeads(s *HeadSum, out []float32, lo, hi int, init, start []float32) {
	wide := s.Heads * s.Dim
	out = out[:wide]
	clear(out)
	if wide == 0 {
		return
	}
	if init != nil {
		l.AddHeads(out, init, start, s.Dim)
	}
	for n := lo; n < hi; n++ {
		edge, row := s.edge(n)
		_, next := s.edge(min(n+headsAhead, len(s.List)-1))
		addHeads(l, out, s.X[row*wide:], s.Weights[edge*s.Heads:], s.X[next*wide:], s.Dim)
	}
}

// AddHeads adds x, as long as out, to out, each dim elements times the weight of their head.
func (l Level) AddHeads(out, x, weights []float32, dim int) {
	addHeads(l, out, x, weights, x, dim)
}

// addHeads is AddHeads, and asks memory for what is ahead.
func addHeads(l Level, out, x, weights, ahead []float32, dim int) {
	if len(out) == 0 {
		return
	}
	heads := len(out) / dim
	x, weights = x[:len(out)], weights[:heads]
	if l >= AVX2 && dim >= 8 {
		a := headArgs{&out[0], &x[0], &weights[0], int64(heads), int64(dim), &ahead[0]}
		if l == AVX512 && dim >= 16 {
			addHeadsAVX512((*byte)(unsafe.Pointer(&a)))
		} else {
			addHeadsAVX2((*byte)(unsafe.Pointer(&a)))
		}
		return
	}
	for k, w := range weights {
		o := out[k*dim : (k+1)*dim]
		for f, v := range x[k*dim : (k+1)*dim] {
			o[f] += float32(w * v)
		}
	}
}
