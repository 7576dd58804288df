package rowtype

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/simd"
)

func TestNames(t *testing.T) {
	for _, rt := range Types() {
		got, err := Parse(rt.String())
		require.NoError(t, err)
		require.Equal(t, rt, got)
	}
	_, err := Parse("fp8")
	require.ErrorContains(t, err, "float32, float16, bfloat16, int8")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.Equal(t, []int{4 * 5, 12, 12, 8}, []int{Float32.RowBytes(5), Float16.RowBytes(5),
		BFloat16.RowBytes(5), Int8.RowBytes(5)})
	require.Equal(t, 256, Int8.RowBytes(256))
}

// nearest checks got, which came from x, against both of its neighbours in the type.
func nearest(t *testing.T, x float32, got, below, above float64, even bool) {
	d := math.Abs(float64(x) - got)
	for _, n := range []float64{below, above} {
		other := math.Abs(float64(x) - n)
		require.True(t, d < other || d == other && even, "%v (%08x) became %v, %v is nearer", x,
			math.Float32bits(x), got, n)
	}
}

func TestRounding(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for i := range 60_000 {
		bits := r.Uint32()
		if i%2 == 0 { // into the range of halves, with ties
			bits = bits&^0x7f8fffff | (0x38800000+
				r.Uint32N(0x0f000000))&0x7f800000 | bits&0xff000 | uint32(i/2%2)<<23
		}
		if i%8 == 0 {
			bits &^= 0xfff
		}
		x := math.Float32frombits(bits)
		if x-x != 0 {
			continue
		}
		if a := math.Abs(float64(x)); a < 65504 {
			h := half(x)
			mag := h & 0x7fff
			require.Equal(t, uint16(bits>>31), h>>15)
			wide := func(m uint16) float64 { return math.Abs(float64(simd.Float16(m))) }
			below := math.Inf(-1)
			if mag > 0 {
				below = wide(mag - 1)
			}
			above := wide(mag + 1) // 65536 is no half, but far enough
			nearest(t, float32(a), wide(mag), below, above, mag%2 == 0)
		}
		if a := math.Abs(float64(x)); a < 3e38 {
			h := brain(x)
			mag := h & 0x7fff
			wide := func(m uint16) float64 { return float64(math.Float32frombits(uint32(m) << 16)) }
			below := math.Inf(-1)
			if mag > 0 {
				below = wide(mag - 1)
			}
			nearest(t, float32(a), wide(mag), below, wide(mag+1), mag%2 == 0)
		}
	}
}

func TestEncodeDecode(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, rt := range Types() {
		for _, dim := range []int{1, 2, 3, 7, 8, 15, 16, 33, 100, 602} {
			src := make([]float32, dim)
			for i := range src {
				src[i] = float32(r.NormFloat64())
			}
			row := make([]byte, rt.RowBytes(dim))
			for i := range row {
				row[i] = 0xff // padding must be written
			}
			scale, err := rt.Encode(row, src)
			require.NoError(t, err)
			require.Zero(t, len(row)%4)
			var first []float32
			for _, l := range simd.Levels() {
				got := make([]float32, dim)
				rt.Decode(l, got, row, scale)
				if first == nil {
					first = got
				}
				require.Equal(t, first, got, "%v at %v", rt, l)
			}
			var largest float64
			for _, x := range src {
				largest = max(largest, math.Abs(float64(x)))
			}
			want := float32(1)
			if rt.Scaled() {
				want = float32(largest) / 127
			}
			require.Equal(t, want, scale)
			for i, x := range src {
				limit := map[Type]float64{Float32: 0, Float16: math.Abs(float64(x)) / 2048,
					BFloat16: math.Abs(float64(x)) / 256, Int8: largest / 253.9}[rt]
				require.LessOrEqual(t, math.Abs(float64(x)-float64(first[i])),
					limit+1e-7*largest*float64(min(1, rt)), "%v", rt)
			}
			// A row that was stored once is stored again without loss, but for int8's rounded
			// scale.
			if rt != Int8 {
				again := make([]byte, len(row))
				_, err := rt.Encode(again, first)
				require.NoError(t, err)
				require.Equal(t, row, again)
			}
		}
	}
}

func TestRange(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(-1))
	const none = Type(99)
	for _, c := range []struct {
		t     Type
		x     float32
		want  string // empty: fits
		wider Type
	}{
		{Float16, 65504, "", none}, {Float16, 65519.99, "", none},
		{Float16, -65520, "feature 1 is -65520, which float16 cannot hold (it ends at 65504)",
			BFloat16},
		{Float16, math.MaxFloat32, "cannot hold", Float32}, {Float16, nan, "NaN", none},
		{Float16, inf, "-Inf", none},
		{BFloat16, 65520, "", none}, {BFloat16, 3.4e38, "which bfloat16 cannot hold", Float32},
		{BFloat16, inf, "-Inf", none},
		{Int8, nan, "feature 1 is NaN, which int8 cannot hold", none}, {Int8, inf, "-Inf", none},
		{Int8, 1e38, "", none},
		{Int8, 1e-45, "", none}, {Int8, 3e-44, "", none}, {Float32, nan, "", none},
	} {
		_, err := c.t.Encode(make([]byte, c.t.RowBytes(3)), []float32{1e-46, c.x, 0})
		if c.want == "" {
			require.NoError(t, err, "%v %v", c.t, c.x)
			continue
		}
		var re *RangeError
		require.ErrorAs(t, err, &re)
		require.Equal(t, 1, re.Index)
		require.ErrorContains(t, err, c.want)
		wider, ok := re.Wider()
		require.Equal(t, c.wider != none, ok)
		if ok {
			require.Equal(t, c.wider, wider)
		}
	}
	// A row whose scale is subnormal stays in range.
	row := make([]byte, Int8.RowBytes(2))
	scale, err := Int8.Encode(row, []float32{2e-43, -2e-43})
	require.NoError(t, err)
	got := make([]float32, 2)
	Int8.Decode(simd.Generic, got, row, scale)
	require.InDelta(t, 2e-43, float64(got[0]), 1e-43)
	require.Equal(t, got[0], -got[1])
}

// Dim is the most that fits.
func TestDim(t *testing.T) {
	for _, typ := range Types() {
		require.Equal(t, 1, typ.Dim(0), typ)
		for bytes := 8; bytes < 200; bytes++ {
			d := typ.Dim(bytes)
			require.LessOrEqual(t, typ.RowBytes(d), bytes, typ)
			require.Greater(t, typ.RowBytes(d+1), bytes, typ)
		}
	}
}
