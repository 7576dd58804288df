package simd

// dotLanes is how many partial sums a dot product has.
const dotLanes = 32

// Dot is the sum of a[k]·b[k]. Lane k mod 32 sums its products in order, each product and each sum rounded, and the lanes
// are added as a tree: 16 apart, then 8, 4, 2 and 1. A warp of a GPU does the same, so the bits are equal there.
func (l Level) Dot(a, b []float32) float32 {
	b = b[:len(a)]
	var p [dotLanes]float32
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
	for d := dotLanes / 2; d > 0; d /= 2 {
		for k := range d {
			p[k] += p[k+d]
		}
	}
	return p[0]
}
