package simd

import (
	"math"
	"sync"
)

// Products of factors rounded to bfloat16 are sums of pairs of steps, as VDPBF16PS adds them (Intel
// SDM, volume 2; AMD's Zen 5 does the same): bf16Step of the pair's odd step, then of its even one.
// A term with an odd K gets a step of zeros. The product of two factors is exact in float32, so
// each step rounds once, and all levels agree to the bit, Generic too. AMX's TDPBF16PS has other
// bits: it sums odd and even steps by themselves and adds the two.

// Bits of a kernel's argument load; gen/gemm has the same.
const (
	loadC     = 1
	flushSums = 2
)

// bf16KC is a block's steps of K for a way that packs so many into 32 bits: the bytes of gemmKC
// float32.
func bf16KC(perWord int) int { return gemmKC * perWord }

// halfSteps is the words of a row that are rounded before they are transposed.
const halfSteps = 256

// roundBF16 rounds to bfloat16, to nearest even. A number below normal becomes 0 of the same sign,
// a NaN becomes quiet.
func roundBF16(v float32) float32 {
	b := math.Float32bits(v)
	switch {
	case b&0x7f800000 == 0:
		b &= 1 << 31
	case v != v:
		b = (b | 0x400000) &^ 0xffff
	default:
		b = (b + 0x7fff + b>>16&1) &^ 0xffff
	}
	return math.Float32frombits(b)
}

// bf16Step is c + a·b of two bfloat16 factors, rounded once; a sum below the least normal number
// becomes 0 of the same sign. c is normal or 0.
func bf16Step(c, a, b float32) float32 {
	p := float32(a * b)
	if e := math.Float32bits(p) >> 23 & 0xff; e == 0 || e == 0xff {
		return bf16StepOdd(c, a, b)
	}
	// p is exact, and so is a sum below normal: both are multiples of the least number there is.
	return flushed(c + p)
}

// flushed makes a number below normal 0 of the same sign.
func flushed(s float32) float32 {
	if b := math.Float32bits(s); b&0x7f800000 == 0 {
		return math.Float32frombits(b & (1 << 31))
	}
	return s
}

// bf16StepOdd is bf16Step where the product is 0, infinite, NaN, or not to be had in float32.
func bf16StepOdd(c, a, b float32) float32 {
	x, y := float64(float64(a)*float64(b)), float64(c) // exact: factors have 8 bits
	z := x + y
	if x == 0 || math.IsNaN(z) || math.IsInf(z, 0) {
		return flushed(float32(z))
	}
	// An odd last bit keeps a sum that is not exact on its side of what float32 has (Boldo and
	// Melquiond, 2008); the error is that of 2Sum.
	t := z - x
	if e := (x - (z - t)) + (y - t); e != 0 && math.Float64bits(z)&1 == 0 {
		step := int64(1)
		if (e > 0) != (z > 0) {
			step = -1
		}
		z = math.Float64frombits(math.Float64bits(z) + uint64(step))
	}
	// A tiny result is one that would be below normal if float32 had more exponents (IEEE 754, 7.5,
	// after rounding: x86).
	if math.Abs(z) < 0x1p-126-0x1p-151 {
		return float32(math.Copysign(0, z))
	}
	return float32(z)
}

// multiplyBF16 is Multiply of factors in bfloat16.
func multiplyBF16(l Level, g *Product) {
	if l <= Generic {
		g.bf16Chains()
		return
	}
	g.by(bf16WayOf(l))
}

// bf16WayOf is the fastest way of level l.
func bf16WayOf(l Level) *bf16Way {
	if l == AVX512 {
		return bestBF16()
	}
	ways := bf16Ways(l)
	return ways[len(ways)-1]
}

// bestBF16 takes AVX512-BF16 if it gives the bits of the fused multiply-adds: makers of processors
// are not bound to Intel's order of sums.
var bestBF16 = sync.OnceValue(func() *bf16Way {
	ways := bf16Ways(AVX512)
	for _, w := range ways[1:] {
		if !w.agrees(ways[0]) {
			return ways[0]
		}
	}
	return ways[len(ways)-1]
})

// agrees compares ways by sums where the order, rounding or flushing of steps shows.
func (w *bf16Way) agrees(other *bf16Way) bool {
	const m, n, k = 12, 32, 64
	state := uint32(1)
	fill := func(size int) []float32 {
		v := make([]float32, size)
		for i := range v {
			state = state*1664525 + 1013904223
			// exponents about 1, and about what the least normal product has
			e := [2]uint32{120, 60}[i/k&1] + state>>27
			v[i] = math.Float32frombits(state<<8&(1<<31) | e<<23 | state>>4&0x7fffff)
		}
		return v
	}
	p := Product{M: m, N: n, TransB: true, BF16: true, LDC: n,
		Terms: [2]Term{{A: fill(m * k), B: fill(n * k), LDA: k, LDB: k, K: k}}}
	var c [2][m * n]float32
	for i, way := range []*bf16Way{w, other} {
		p.C = c[i][:]
		p.by(way)
	}
	for i, v := range c[0] {
		if math.Float32bits(v) != math.Float32bits(c[1][i]) {
			return false
		}
	}
	return true
}

// bf16Way is a way to multiply: kernels, and the packing for them.
type bf16Way struct {
	name       string
	m          *micro
	perWord    int // steps in 32 bits of a panel: 2, or 1 float32, the odd one first
	round      func(dst, src *float32, n int)
	zipY, zipX func(dst *float32, ps int, src *float32, ld, k, n int, none *float32)
}

// block implements blocker. All operands are packed; blocks begin at even steps.
func (w *bf16Way) block(s *gemmScratch, terms []thinTerm, j0, rows, cols int, c *float32, ldc int,
	finish func(i0, i1 int)) {
	m := w.m
	nr, mr := 2*m.lanes, m.rows
	load := flushSums
	for ti, t := range terms {
		blocks := (t.k + bf16KC(w.perWord) - 1) / bf16KC(w.perWord)
		for b := range blocks {
			k0, k1 := t.k*b/blocks&^1, t.k*(b+1)/blocks&^1
			last := b == blocks-1
			if last {
				k1 = t.k
			}
			kc := k1 - k0
			steps := (kc + 1) &^ 1 / w.perWord
			yp, xp := nr*((steps+15)&^15)+gemmPad, mr*((steps+15)&^15)+gemmPad
			if y := t.y.from(k0, j0); y.major {
				w.zipY(&s.y[0], yp*4, y.p, y.ld*4, kc, cols, &s.zero[0])
			} else {
				for j := 0; j < cols; j += m.lanes {
					w.turn(s, &s.y[j/nr*yp+j%nr], nr, y.from(0, j), min(m.lanes, cols-j), kc)
				}
			}
			for i := 0; i < rows; i += gemmMC {
				mc := min(gemmMC, rows-i)
				if x := t.x.from(k0, i); x.major {
					w.zipX(&s.x[0], xp*4, x.p, x.ld*4, kc, mc, &s.zero[0])
				} else {
					for q := 0; q < mc; q += mr {
						w.turn(s, &s.x[q/mr*xp], mr, x.from(0, q), min(mr, mc-q), kc)
					}
				}
				for j := 0; j < cols; j += nr {
					n := min(nr, cols-j)
					v := (n + m.lanes - 1) / m.lanes
					for q := 0; q < mc; {
						size := m.size(mc - q)
						to := elem(c, (i+q)*ldc+j)
						m.tile[size][v](steps, &s.x[q/mr*xp+q%mr], mr*4, &s.y[j/nr*yp], nr*4,
							to, ldc*4, n, load, to, 0)
						q += size
					}
				}
				if last && ti == len(terms)-1 && finish != nil {
					finish(i, i+mc)
				}
			}
			load |= loadC
		}
	}
}

// turn rounds n rows of k elements and writes them to dst as columns, width words apart.
func (w *bf16Way) turn(s *gemmScratch, dst *float32, width int, rows side, n, k int) {
	const stride = halfSteps + 16
	for k0 := 0; k0 < k; k0 += halfSteps * w.perWord {
		kc := min(halfSteps*w.perWord, k-k0)
		for r := range w.m.lanes {
			s.rows[r] = &s.zero[0]
			if r < n {
				s.rows[r] = &s.half[r*stride]
				w.round(s.rows[r], elem(rows.p, r*rows.ld+k0), kc)
			}
		}
		w.m.transpose(elem(dst, k0/w.perWord*width), width*4, &s.rows[0], (kc+1)&^1/w.perWord)
	}
}

// bf16Chains computes g in Go.
func (g *Product) bf16Chains() {
	const wide, deep = 64, 256
	var a [deep]float32
	var b [deep][wide]float32
	for j0 := 0; j0 < g.N; j0 += wide {
		n := min(wide, g.N-j0)
		for i := range g.M {
			clear(g.C[i*g.LDC+j0:][:n])
		}
		for _, t := range g.Terms {
			for k0 := 0; k0 < t.K; k0 += deep {
				kc := min(deep, t.K-k0)
				for k := range kc {
					for j := range n {
						pos := (k0+k)*t.LDB + j0 + j
						if g.TransB {
							pos = (j0+j)*t.LDB + k0 + k
						}
						b[k][j] = roundBF16(t.B[pos])
					}
				}
				if kc%2 == 1 {
					a[kc], b[kc] = 0, [wide]float32{}
				}
				for i := range g.M {
					for k := range kc {
						pos := i*t.LDA + k0 + k
						if g.TransA {
							pos = (k0+k)*t.LDA + i
						}
						a[k] = roundBF16(t.A[pos])
					}
					c := g.C[i*g.LDC+j0:][:n]
					for k := 0; k < kc; k += 2 {
						odd, even := b[k+1][:n], b[k][:n]
						for j, v := range c {
							c[j] = bf16Step(bf16Step(v, a[k+1], odd[j]), a[k], even[j])
						}
					}
				}
			}
		}
	}
	if g.Finish != nil {
		g.Finish(0, g.M)
	}
}

// PeakBF16 is PeakFLOPS of products with BF16 at a level.
func PeakBF16(l Level) float64 {
	if l <= Generic {
		return 0
	}
	w := bf16WayOf(l)
	return w.m.peakFLOPS(2 * w.perWord)
}

// BF16Way names the instructions of products with BF16: "avx512_bf16", or a level's.
func BF16Way(l Level) string {
	if l <= Generic {
		return l.String()
	}
	return bf16WayOf(l).name
}
