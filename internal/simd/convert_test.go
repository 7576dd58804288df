package simd

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// wideHalf is IEEE 754's definition, in float64 arithmetic.
func wideHalf(h uint16) float64 {
	sign := 1 - 2*float64(h>>15)
	exp, frac := int(h>>10&31), float64(h&1023)
	switch exp {
	case 31:
		if frac != 0 {
			return math.NaN()
		}
		return sign * math.Inf(1)
	case 0:
		return math.Copysign(math.Ldexp(frac, -24), sign)
	}
	return sign * math.Ldexp(1024+frac, exp-25)
}

func TestFromFloat16(t *testing.T) {
	src := make([]byte, 2<<16)
	for h := range 1 << 16 {
		binary.LittleEndian.PutUint16(src[2*h:], uint16(h))
	}
	for _, l := range Levels() {
		dst := make([]float32, 1<<16)
		l.FromFloat16(dst, src)
		for h, x := range dst {
			want := wideHalf(uint16(h))
			if math.IsNaN(want) {
				// The payload stays, quiet: every level alike.
				require.Equal(t, uint32(h&0x8000)<<16|0x7fc00000|uint32(h&0x3ff)<<13,
					math.Float32bits(x), "%v %04x", l, h)
				continue
			}
			require.Equal(t, math.Float32bits(float32(want)), math.Float32bits(x), "%v %04x", l, h)
		}
	}
}

// TestFromLengths has every length around the vectors, at unaligned places, and guards behind the
// end.
func TestFromLengths(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	src := make([]byte, 2*300+3)
	for i := range src {
		src[i] = byte(r.Uint32())
	}
	const scale = 0.37
	for _, l := range Levels() {
		for n := range 200 {
			b := src[n%3:]
			f16, bf16, i8 := make([]float32, n+1), make([]float32, n+1), make([]float32, n+1)
			u32, i64 := make([]uint32, n), make([]int64, n+1)
			f16[n], bf16[n], i8[n], i64[n] = 7, 7, 7, 7
			for i := range u32 {
				u32[i] = r.Uint32()
			}
			l.FromFloat16(f16[:n], b)
			l.FromBFloat16(bf16[:n], b)
			l.FromInt8(i8[:n], b, scale)
			l.FromUint32(i64[:n], u32)
			for i := range n {
				h := binary.LittleEndian.Uint16(b[2*i:])
				require.Equal(t, math.Float32bits(Float16(h)), math.Float32bits(f16[i]),
					"%v %d of %d", l, i, n)
				require.Equal(t, uint32(h)<<16, math.Float32bits(bf16[i]), "%v %d of %d", l, i, n)
				require.Equal(t, float32(int8(b[i]))*scale, i8[i], "%v %d of %d", l, i, n)
				require.Equal(t, int64(u32[i]), i64[i], "%v %d of %d", l, i, n)
			}
			require.Equal(t, []float32{7, 7, 7, 7}, []float32{f16[n], bf16[n], i8[n],
				float32(i64[n])}, "%v length %d", l, n)
		}
	}
}

// TestRepeat has lists of every length around the vectors, with room behind them and without.
func TestRepeat(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, l := range Levels() {
		for lists := range 60 {
			indptr, want := []int64{5}, []int64{}
			for i := range lists {
				n := r.IntN(1 + r.IntN(40))
				indptr = append(indptr, indptr[i]+int64(n))
				want = append(want, slices.Repeat([]int64{1<<40 + int64(i)}, n)...)
			}
			got := make([]int64, len(want)+1)
			got[len(want)] = -7
			l.Repeat(got[:len(want)], indptr, 1<<40)
			require.Equal(t, append(want, -7), got, "%v, %d lists", l, lists)
		}
		for _, indptr := range [][]int64{{0, -3, 40}, {0, 9, 8, 40}, {0, 30, 61}} {
			require.Panics(t, func() { l.Repeat(make([]int64, 60), indptr, 1) }, "%v, %v", l, indptr)
		}
	}
}

func BenchmarkFrom(b *testing.B) {
	dst, src := make([]float32, 1024), make([]byte, 2048)
	for _, l := range Levels() {
		for _, f := range []struct {
			name string
			run  func()
		}{
			{"float16", func() { l.FromFloat16(dst, src) }},
			{"bfloat16", func() { l.FromBFloat16(dst, src) }},
			{"int8", func() { l.FromInt8(dst, src, 2) }},
		} {
			b.Run(l.String()+"/"+f.name, func(b *testing.B) {
				b.SetBytes(4 * 1024)
				for b.Loop() {
					f.run()
				}
			})
		}
	}
}
