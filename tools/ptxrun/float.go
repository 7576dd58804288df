package ptxrun

import (
	"math"
	"math/bits"
)

// A NaN that an instruction of float32 makes is this one (PTX ISA, "Floating Point Instructions").
const nan32 = 0x7fffffff

func f32(v uint64) float32 { return math.Float32frombits(uint32(v)) }
func f64(v uint64) float64 { return math.Float64frombits(v) }

func bits32(f float32) uint64 {
	if f != f {
		return nan32
	}
	return uint64(math.Float32bits(f))
}

func bits64(f float64) uint64 { return math.Float64bits(f) }

// flush is .ftz: a subnormal float32 becomes a zero of its sign.
func flush(v uint64) uint64 {
	if v&0x7f800000 == 0 {
		return v & 0x80000000
	}
	return v
}

// fma32 rounds once. The product of two float32 is exact in float64; the sum is rounded to odd
// there, so that the second rounding cannot see a tie that is none (Boldo and Melquiond, "Emulation
// of FMA and correctly rounded sums", 2008).
func fma32(a, b, c float32) float32 {
	p := float64(a) * float64(b)
	s := p + float64(c)
	if s-s != 0 { // infinite or NaN
		return float32(s)
	}
	t := s - p
	e := (p - (s - t)) + (float64(c) - t)
	if u := math.Float64bits(s); e != 0 && u&1 == 0 {
		if (e > 0) == (s > 0) {
			u++
		} else {
			u--
		}
		s = math.Float64frombits(u)
	}
	return float32(s)
}

// min32 and max32: a NaN gives way to a number, and -0 is less than +0.
func min32(a, b uint64) uint64 {
	x, y := f32(a), f32(b)
	switch {
	case x != x:
		return bits32(y)
	case y != y:
		return a
	case x < y || x == y && a>>31 != 0:
		return a
	}
	return b
}

func max32(a, b uint64) uint64 {
	x, y := f32(a), f32(b)
	switch {
	case x != x:
		return bits32(y)
	case y != y:
		return a
	case x > y || x == y && a>>31 == 0:
		return a
	}
	return b
}

func min64(a, b uint64) uint64 {
	x, y := f64(a), f64(b)
	switch {
	case x != x:
		return b
	case y != y:
		return a
	case x < y || x == y && a>>63 != 0:
		return a
	}
	return b
}

func max64(a, b uint64) uint64 {
	x, y := f64(a), f64(b)
	switch {
	case x != x:
		return b
	case y != y:
		return a
	case x > y || x == y && a>>63 == 0:
		return a
	}
	return b
}

// integral rounds to an integer by rn, rz, rm or rp.
func integral(x float64, mode string) float64 {
	switch mode {
	case "rz":
		return math.Trunc(x)
	case "rm":
		return math.Floor(x)
	case "rp":
		return math.Ceil(x)
	}
	return math.RoundToEven(x)
}

// toInt is cvt of a float to an integer: it clamps. from is the width of the float (PTX ISA, cvt:
// what NaN becomes depends on both widths).
func toInt(x float64, mode string, t ptype, from int) uint64 {
	if x != x {
		if from == 64 || t.bits == 64 {
			return 1 << (t.bits - 1)
		}
		return 0
	}
	x = integral(x, mode)
	if t.kind == 's' {
		limit := math.Ldexp(1, t.bits-1)
		switch {
		case x >= limit:
			return 1<<(t.bits-1) - 1
		case x <= -limit:
			return 1 << (t.bits - 1)
		}
		return truncate(uint64(int64(x)), t.bits)
	}
	switch {
	case x <= 0:
		return 0
	case x >= math.Ldexp(1, t.bits):
		return truncate(math.MaxUint64, t.bits)
	}
	return uint64(x)
}

// fromInt rounds a magnitude to a float of 24 or 53 bits.
func fromInt(neg bool, mag uint64, mode string, mantissa int) float64 {
	sign := 1.0
	if neg {
		sign = -1
	}
	over := bits.Len64(mag) - mantissa
	if over <= 0 {
		return sign * float64(mag)
	}
	kept, rest := mag>>over, mag&(1<<over-1)
	half := uint64(1) << (over - 1)
	up := false
	switch mode {
	case "rz":
	case "rm":
		up = neg && rest != 0
	case "rp":
		up = !neg && rest != 0
	default:
		up = rest > half || rest == half && kept&1 != 0
	}
	if up {
		kept++
	}
	return sign * math.Ldexp(float64(kept), over)
}

// narrow is cvt of float64 to float32.
func narrow(x float64, mode string) float32 {
	r := float32(x)
	if x != x || float64(r) == x || math.IsInf(x, 0) {
		return r
	}
	away := float64(r) > x // the nearest lies above
	inf := float32(math.Inf(1))
	switch {
	case mode == "rm" && away, mode == "rz" && away && x > 0:
		return math.Nextafter32(r, -inf)
	case mode == "rp" && !away, mode == "rz" && !away && x < 0:
		return math.Nextafter32(r, inf)
	}
	return r
}

// toTF32 rounds to nearest with ties away from zero; the lowest 13 bits are zero.
func toTF32(v uint32) uint32 {
	if v&0x7f800000 == 0x7f800000 {
		if v&0x7fffff != 0 {
			return nan32
		}
		return v
	}
	return (v + 0x1000) &^ 0x1fff
}

// toBF16 rounds to nearest even.
func toBF16(v uint32) uint32 {
	if v&0x7fffffff > 0x7f800000 {
		return 0x7fff
	}
	return (v + 0x7fff + v>>16&1) >> 16
}

// toF16 rounds to nearest even.
func toF16(v uint32) uint32 {
	sign := v >> 16 & 0x8000
	mag := v & 0x7fffffff
	switch {
	case mag > 0x7f800000:
		return 0x7fff
	case mag >= 0x477ff000: // 65520 and more round to infinity
		return sign | 0x7c00
	case mag < 0x33000001: // up to 2^-25, which is a tie with zero
		return sign
	}
	exp := int(mag>>23) - 127
	frac := mag&0x7fffff | 0x800000
	shift := 13
	base := uint32(exp+14) << 10 // what carries from the hidden bit makes the exponent
	if exp < -14 {
		shift = -exp - 1
		base = 0
	}
	kept, rest, half := frac>>shift, frac&(1<<shift-1), uint32(1)<<(shift-1)
	if rest > half || rest == half && kept&1 != 0 {
		kept++
	}
	return sign | (base + kept)
}

// ofF16 is exact.
func ofF16(h uint32) uint32 {
	sign := h & 0x8000 << 16
	exp, frac := h>>10&31, h&0x3ff
	switch {
	case exp == 31 && frac != 0:
		return nan32
	case exp == 31:
		return sign | 0x7f800000
	case exp == 0:
		f := math.Float32bits(float32(frac) * (1.0 / (1 << 24)))
		return sign | f
	}
	return sign | (exp+112)<<23 | frac<<13
}
