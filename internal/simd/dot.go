package simd

import "unsafe"

//go:generate go -C ../../tools run ./simdgen/heads -out ../internal/simd/heads_amd64.s -stubs ../internal/simd/heads_amd64.go -pkg simd

// dotLanes is the number of partial sums of a dot product.
const dotLanes = 32

// dotArgs is the assembly's view of DotHeads; gen/heads has the offsets.
type dotArgs struct {
	a, b, out      *float32
	heads, dim     int64
	rows           int64
	pitchA, pitchB int64 // bytes
	list, final    *uint32
	last           *float32 // where b's last row begins
	counts         *uint32
	left           int64 // lists
}

const (
	_ = -(unsafe.Offsetof(dotArgs{}.rows) ^ 40)
	_ = -(unsafe.Offsetof(dotArgs{}.left) ^ 96)
)

// Dot is the sum of a[k]·b[k]. Lane k mod 32 sums its products in order, each product and each sum
// rounded, and the lanes are added as a tree: 16 apart, then 8, 4, 2 and 1. A warp of a GPU does
// the same, so the bits are equal there.
func (l Level) Dot(a, b []float32) float32 {
	b = b[:len(a)]
	if l >= AVX2 && len(a) >= dotLanes {
		q := dotArgs{a: &a[0], b: &b[0], heads: 1, dim: int64(len(a)), rows: 1}
		var out [1]float32
		q.out = &out[0]
		dots(l, &q)
		return out[0]
	}
	var p [dotLanes]float32
	// Lanes that no element reaches hold 0, which changes no sum: no lane is -0. So a short tree
	// will do for short rows.
	d := dotLanes / 2
	for d > 0 && len(a) <= d {
		d /= 2
	}
	for len(a) >= dotLanes {
		x, y := (*[dotLanes]float32)(a), (*[dotLanes]float32)(b)
		for k := range p {
			p[k] += float32(x[k] * y[k])
		}
		a, b = a[dotLanes:], b[dotLanes:]
	}
	for k, x := range a {
		p[k] += float32(x * b[k])
	}
	for ; d > 0; d /= 2 {
		for k := range d {
			p[k] += p[k+d]
		}
	}
	return p[0]
}

func dots(l Level, q *dotArgs) {
	there := false
	if l == AVX512 {
		there = dotHeadsAVX512((*byte)(unsafe.Pointer(q)))
	} else {
		there = dotHeadsAVX2((*byte)(unsafe.Pointer(q)))
	}
	if !there {
		panic("simd: DotHeads: a row of a list is not there")
	}
}

// HeadDots are dot products of rows of A and B, each Heads × Dim float32s, head by head.
type HeadDots struct {
	A, B       []float32
	Heads, Dim int
}

// DotRows sets out, Heads for each row, to the products of rows of A and B in order. One row of A
// serves for all.
func (l Level) DotRows(s *HeadDots, out []float32) {
	wide := s.Heads * s.Dim
	if s.Heads == 0 || len(out) < s.Heads {
		return
	}
	n := len(out) / s.Heads
	a, b, step := s.A[:wide], s.B[:n*wide], 0
	if len(s.A) > wide {
		a, step = s.A[:n*wide], wide
	}
	if l >= AVX2 && s.Dim > 0 {
		dots(l, &dotArgs{a: &a[0], b: &b[0], out: &out[0], heads: int64(s.Heads), dim: int64(s.Dim),
			rows: int64(n), pitchA: int64(4 * step), pitchB: int64(4 * wide)})
		return
	}
	for i := range n {
		dotHeads(l, out[i*s.Heads:], a[i*step:], b[i*wide:], s.Heads, s.Dim)
	}
}

// DotHeads sets out, Heads for each element of the list from lo on, to the products of a row of A
// and the row of B that the element names: counts has the number of elements of each row of A.
// DotHeads panics on a row that B does not have.
func (l Level) DotHeads(s *HeadDots, out []float32, list []uint32, lo int, counts []uint32) {
	wide, total := s.Heads*s.Dim, 0
	for _, n := range counts {
		total += int(n)
	}
	out = out[:total*s.Heads]
	if len(out) == 0 {
		return
	}
	a, rows := s.A[:len(counts)*wide], list[lo:lo+total]
	if l >= AVX2 && s.Dim > 0 {
		dots(l, &dotArgs{a: &a[0], b: &s.B[0], out: &out[0], heads: int64(s.Heads),
			dim: int64(s.Dim), pitchA: int64(4 * wide), pitchB: int64(4 * wide), list: &rows[0],
			final: &list[len(list)-1], last: &s.B[len(s.B)-wide], counts: &counts[0],
			left: int64(len(counts))})
		return
	}
	for i, n := range counts {
		for _, j := range rows[:n] {
			dotHeads(l, out, a[i*wide:], s.B[int(j)*wide:], s.Heads, s.Dim)
			out = out[s.Heads:]
		}
		rows = rows[n:]
	}
}

func dotHeads(l Level, out, a, b []float32, heads, dim int) {
	for k := range heads {
		out[k] = l.Dot(a[k*dim:(k+1)*dim], b[k*dim:(k+1)*dim])
	}
}
