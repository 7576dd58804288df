package simd

import (
	"math"
	"unsafe"
)

//go:generate go -C ../../tools run ./simdgen/act -out ../internal/simd/act_amd64.s -stubs ../internal/simd/act_amd64.go -pkg simd

// Constants of the exponential, which gen/act and cuda/kernels/act.h repeat. The polynomial is that
// of Cephes' expf: e^r - 1 for |r| <= ln(2)/2, with ln(2) in two parts.
const (
	expLeast = -87                 // 2^k is a normal number from there on
	expMagic = 12582912            // 1.5·2^23: a sum with it is rounded to an integer
	expLog2e = 1.44269504088896341 // 1 / ln(2)
	expLn2Hi = 0.693359375         // its product with a small integer is exact
	expLn2Lo = 2.12194440e-4       // ln(2) is expLn2Hi - expLn2Lo
	exp5     = 1.9875691500e-4
	exp4     = 1.3981999507e-3
	exp3     = 8.3334519073e-3
	exp2     = 4.1665795894e-2
	exp1     = 1.6666665459e-1
	exp0     = 5.0000001201e-1
	geluA    = 1.5957691216057308  // 2·sqrt(2/π)
	geluB    = 0.07135481627260025 // geluA · 0.044715
	geluC    = 3 * geluB
	geluFar  = 16
)

// actArgs is the assembly's view of a row and its gradient; gen/act has the offsets.
type actArgs struct {
	out, x, grad *float32
	n            int64
}

// down splits e^x, for x <= 0 or NaN, into s·(1+p), s a power of two. Each step is rounded by
// itself, so that vectors and GPUs give the same bits. Below expLeast it gives e^expLeast, which is
// 2·10^-38.
func down(x float32) (p, s float32) {
	if x < expLeast {
		x = expLeast
	}
	m := float32(x*expLog2e) + expMagic
	k := m - expMagic
	r := x - float32(k*expLn2Hi)
	r += float32(k * expLn2Lo)
	y := float32(float32(exp5)*r) + exp4
	y = float32(y*r) + exp3
	y = float32(y*r) + exp2
	y = float32(y*r) + exp1
	y = float32(y*r) + exp0
	p = float32(y*float32(r*r)) + r
	return p, math.Float32frombits(math.Float32bits(m)<<23 + 127<<23)
}

func elu(x float32) float32 {
	if x > 0 {
		return x
	}
	p, s := down(x)
	return float32(p*s) + (s - 1)
}

func eluSlope(x, grad float32) float32 {
	if x > 0 {
		return grad
	}
	p, s := down(x)
	return grad * (float32(p*s) + s)
}

// gate is the logistic function of the argument of geluOf, and 1 minus it.
func geluGate(x float32) (sigma, rest float32) {
	v := x * (geluA + float32(geluB*float32(x*x)))
	p, s := down(math.Float32frombits(math.Float32bits(v) | 1<<31))
	e := float32(p*s) + s
	if v > 0 {
		return 1 / (1 + e), e / (1 + e)
	}
	return e / (1 + e), 1 / (1 + e)
}

func gelu(x float32) float32 {
	sigma, _ := geluGate(x)
	return x * sigma
}

func geluSlope(x, grad float32) float32 {
	sigma, rest := geluGate(x)
	// Beyond 16 the product of both is 0 but for what the exponential's bound leaves of it, which
	// a large x would blow up.
	if x > geluFar {
		x = geluFar
	}
	if x < -geluFar {
		x = -geluFar
	}
	steep := geluA + float32(geluC*float32(x*x))
	return grad * (sigma + float32(float32(sigma*rest)*float32(x*steep)))
}

// ELU sets out to x where x is above 0, and to e^x - 1 elsewhere (Clevert et al., ICLR 2016). out
// may be x.
func (l Level) ELU(out, x []float32) { l.activate(eluAVX2, elu, out, x) }

// ELUSlope multiplies grad by the derivative of ELU at x, in x's place.
func (l Level) ELUSlope(x, grad []float32) { l.slope(eluSlopeAVX2, eluSlope, x, grad) }

// GELU sets out to x·Φ(x) in the form with tanh (Hendrycks and Gimpel, 2016), which is x times the
// logistic function of 2·sqrt(2/π)·(x + 0.044715 x³). out may be x.
func (l Level) GELU(out, x []float32) { l.activate(geluAVX2, gelu, out, x) }

// GELUSlope multiplies grad by the derivative of GELU at x, in x's place.
func (l Level) GELUSlope(x, grad []float32) { l.slope(geluSlopeAVX2, geluSlope, x, grad) }

// actLanes are the floats of a vector of gen/act.
const actLanes = 8

func (l Level) activate(vector func(*byte), scalar func(float32) float32, out, x []float32) {
	out = out[:len(x)]
	i := 0
	if n := len(x) / actLanes * actLanes; l >= AVX2 && n > 0 {
		a := actArgs{out: &out[0], x: &x[0], n: int64(n)}
		vector((*byte)(unsafe.Pointer(&a)))
		i = n
	}
	for ; i < len(x); i++ {
		out[i] = scalar(x[i])
	}
}

func (l Level) slope(vector func(*byte), scalar func(x, grad float32) float32, x, grad []float32) {
	grad = grad[:len(x)]
	i := 0
	if n := len(x) / actLanes * actLanes; l >= AVX2 && n > 0 {
		a := actArgs{out: &x[0], x: &x[0], grad: &grad[0], n: int64(n)}
		vector((*byte)(unsafe.Pointer(&a)))
		i = n
	}
	for ; i < len(x); i++ {
		x[i] = scalar(x[i], grad[i])
	}
}
