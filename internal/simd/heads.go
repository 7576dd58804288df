package simd

import "unsafe"

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
	// Stream stores around the caches, which pays when out is larger than they are. The caller ends
	// with StoreFence.
	Stream bool

	headOf []uint32 // of the columns of as many heads as a vector has lanes
}

// HeadTerm is a row that is added beside those of the list, times a weight for each head; without
// X there is none.
type HeadTerm struct {
	X       []float32 // a row for each result, or one for all
	Weights []float32 // Heads for each result
}

// row gives the row and the weights for result i.
func (t *HeadTerm) row(i, wide, heads int) (x, weights []float32) {
	x = t.X
	if len(x) > wide {
		x = x[i*wide:]
	}
	return x[:wide], t.Weights[i*heads:][:heads]
}

// headTerms is the number of rows that are added beside those of a list.
const headTerms = 3

// HeadTerms are the row that comes before those of the list, and two that come after.
type HeadTerms [headTerms]HeadTerm

// headArgs is the assembly's view of SumHeads; gen/heads has the offsets.
type headArgs struct {
	out, x, last    *float32 // last: where x's last row begins
	headOf          *uint32
	cols, pitch     int64 // floats, bytes
	weights         *float32
	stride, heads   int64 // bytes from edge to edge, heads of cols
	list, final     *uint32
	rows            *uint32
	edges           int64
	counts          *uint32
	left, streaming int64
	terms           [headTerms]termArgs
}

type termArgs struct {
	x       *float32
	pitch   int64
	weights *float32
}

const (
	_ = -(unsafe.Offsetof(headArgs{}.pitch) ^ 40)
	_ = -(unsafe.Offsetof(headArgs{}.list) ^ 72)
	_ = -(unsafe.Offsetof(headArgs{}.counts) ^ 104)
	_ = -(unsafe.Offsetof(headArgs{}.terms) ^ 128)
	_ = -(unsafe.Sizeof(termArgs{}) ^ 24)
)

// SumHeads makes a row of out for each of counts: the first of terms, then the sum over so many
// elements of the list, which stand one behind the other from lo on, then the other terms. out may
// overlap nothing else. SumHeads panics on an edge or a row that is not there. One s serves one
// goroutine.
func (l Level) SumHeads(s *HeadSum, out []float32, lo int, counts []uint32, terms *HeadTerms) {
	wide := s.Heads * s.Dim
	out = out[:len(counts)*wide]
	if len(out) == 0 {
		return
	}
	total := 0
	for _, n := range counts {
		total += int(n)
	}
	list, edges, weights := s.List[lo:lo+total], len(s.Rows), s.Weights
	if s.Rows == nil {
		weights = weights[lo*s.Heads : (lo+total)*s.Heads]
	} else {
		weights = weights[:edges*s.Heads]
	}
	for i := range terms {
		if t := &terms[i]; t.X != nil {
			t.row(0, wide, s.Heads)
			t.row(len(counts)-1, wide, s.Heads)
		}
	}
	if l < AVX2 {
		s.sum(out, list, weights, counts, terms)
		return
	}
	lanes := 8
	if l == AVX512 {
		lanes = 16
	}
	s.fillHeadOf(min(lanes, s.Heads) * s.Dim)
	for k := 0; k < s.Heads; k += lanes {
		heads := min(lanes, s.Heads-k)
		c := k * s.Dim
		a := headArgs{
			out: &out[c], headOf: &s.headOf[0], cols: int64(heads * s.Dim), pitch: int64(4 * wide),
			stride: int64(4 * s.Heads), heads: int64(heads), list: unsafe.SliceData(list),
			rows: unsafe.SliceData(s.Rows), edges: int64(edges), counts: &counts[0],
			left: int64(len(counts)),
		}
		if total > 0 {
			a.x, a.last = &s.X[c], &s.X[len(s.X)-wide+c]
			a.weights, a.final = &weights[k], &s.List[len(s.List)-1]
		}
		a.setTerms(terms, c, k, wide)
		if s.Stream && (uintptr(unsafe.Pointer(a.out))|uintptr(4*wide))%64 == 0 {
			a.streaming = 1
		}
		there := false
		if l == AVX512 {
			there = sumHeadsAVX512((*byte)(unsafe.Pointer(&a)))
		} else {
			there = sumHeadsAVX2((*byte)(unsafe.Pointer(&a)))
		}
		if !there {
			panic("simd: SumHeads: an edge or a row of a list is not there")
		}
	}
}

// fillHeadOf gives each of n columns its head's number.
func (s *HeadSum) fillHeadOf(n int) {
	if len(s.headOf) == n {
		return
	}
	s.headOf = make([]uint32, n)
	for c := range s.headOf {
		s.headOf[c] = uint32(c / s.Dim)
	}
}

// setTerms points to column c and head k of the terms, whose rows have wide columns.
func (a *headArgs) setTerms(terms *HeadTerms, c, k, wide int) {
	for i := range terms {
		if t := &terms[i]; t.X != nil {
			a.terms[i] = termArgs{x: &t.X[c], weights: &t.Weights[k]}
			if len(t.X) > wide {
				a.terms[i].pitch = a.pitch
			}
		}
	}
}

// sum is SumHeads in Go.
func (s *HeadSum) sum(out []float32, list []uint32, weights []float32, counts []uint32,
	terms *HeadTerms) {
	wide, edge := s.Heads*s.Dim, 0
	for i, n := range counts {
		o := out[i*wide:][:wide]
		clear(o)
		add := func(t *HeadTerm) {
			if t.X != nil {
				x, w := t.row(i, wide, s.Heads)
				addHeads(o, x, w, s.Dim)
			}
		}
		add(&terms[0])
		for _, e := range list[edge:][:n] {
			weight, row := edge, int(e)
			if s.Rows != nil {
				weight, row = row, int(s.Rows[e])
			}
			addHeads(o, s.X[row*wide:][:wide], weights[weight*s.Heads:][:s.Heads], s.Dim)
			edge++
		}
		for t := range terms[1:] {
			add(&terms[1+t])
		}
	}
}

// addHeads adds x to out, each dim elements times the weight of their head.
func addHeads(out, x, weights []float32, dim int) {
	for k, w := range weights {
		o := out[k*dim : (k+1)*dim]
		for f, v := range x[k*dim : (k+1)*dim] {
			o[f] += float32(w * v)
		}
	}
}
