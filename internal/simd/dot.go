package simd

import "unsafe"

//go:generate go run ./gen/heads -out heads_amd64.s -stubs heads_amd64.go -pkg simd

// dotLanes is how many partial sums a dot product has.
const dotLanes = 32

// dotArgs is the assembly's view of Dot; gen/heads has the offsets.
type dotArgs struct {
	a, b         *float32
	n            int64
	tailA, tailB *float32
	ahead        *float32 // asked of memory as b is read
	out          float32
	_            uint32
}

// Dot is the sum of a[k]·b[k]. Lane k mod 32 sums its products in order, each product and each sum
// rounded, and the lanes are added as a tree: 16 apart, then 8, 4, 2 and 1. A warp of a GPU does
// the same, so the bits are equal there.
func (l Level) Dot(a, b []float32) float32 { return l.DotAhead(a, b, b) }

// DotAhead is Dot, and asks memory for as many elements from the start of ahead on: the b of a
// later call. ahead has at least one element unless a has none.
func (l Level) DotAhead(a, b, ahead []float32) float32 {
	b = b[:len(a)]
	if l >= AVX2 && len(a) >= dotLanes {
		return dotVector(a, b, &ahead[0])
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

func dotVector(a, b []float32, ahead *float32) float32 {
	q := dotArgs{a: &a[0], b: &b[0], n: int64(len(a)), ahead: ahead}
	if rest := len(a) % dotLanes; rest > 0 {
		var tailA, tailB [dotLanes]float32
		copy(tailA[:], a[len(a)-rest:])
		copy(tailB[:], b[len(b)-rest:])
		q.tailA, q.tailB = &tailA[0], &tailB[0]
		dotAVX2((*byte)(unsafe.Pointer(&q)))
		return q.out
	}
	dotAVX2((*byte)(unsafe.Pointer(&q)))
	return q.out
}
