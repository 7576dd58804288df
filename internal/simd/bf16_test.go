package simd

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// exactStep is bf16Step by exact arithmetic. ok is false for what big.Float does not have: infinite
// operands and NaN.
func exactStep(c, a, b float32) (sum float32, ok bool) {
	for _, v := range []float32{c, a, b} {
		if math.IsInf(float64(v), 0) || v != v {
			return 0, false
		}
	}
	of := func(v float32) *big.Float {
		return new(big.Float).SetPrec(2000).SetFloat64(float64(v))
	}
	exact := of(0).Add(of(c), of(0).Mul(of(a), of(b)))
	if exact.Sign() == 0 {
		return float32(a*b) + c, true // of zeros, or of equal sizes: its sign is float32's affair
	}
	rounded := new(big.Float).SetPrec(24).SetMode(big.ToNearestEven).Set(exact)
	if rounded.MantExp(nil) < -125 { // of a mantissa below 1: less than 2^-126
		return float32(math.Copysign(0, float64(rounded.Sign()))), true
	}
	sum, _ = rounded.Float32()
	return sum, true
}

// withoutExact is a step with infinite operands or NaN, of which float64 has the products.
func withoutExact(c, a, b float32) float32 {
	return float32(float64(c) + float64(a)*float64(b))
}

// hostileFactor is a float32 of any exponent, or of those that make sums cancel, vanish or
// overflow.
func hostileFactor(r *rand.Rand, kind int) float32 {
	bits := r.Uint32()
	exponent := func(from, n int) float32 {
		return math.Float32frombits(bits&0x807fffff | uint32(from+r.IntN(n))<<23)
	}
	switch kind {
	case 0:
		return math.Float32frombits(bits)
	case 1:
		return exponent(120, 10)
	case 2: // products at the least normal number
		return exponent(60, 8)
	case 3: // at the largest
		return exponent(185, 10)
	case 4: // ties of rounding
		return math.Float32frombits(math.Float32bits(exponent(100, 60))&^0xffff | 0x8000)
	}
	return []float32{0, float32(math.Copysign(0, -1)), float32(math.NaN()), float32(math.Inf(1)),
		float32(math.Inf(-1)), math.Float32frombits(0xffffffff), math.Float32frombits(0x7f800001),
		math.MaxFloat32, -math.MaxFloat32, math.SmallestNonzeroFloat32, 0x1p-126,
		math.Float32frombits(0x007fffff), math.Float32frombits(0x807fffff), 1, -1}[r.IntN(15)]
}

// A step is rounded once, from the exact sum, and flushed by x86's rule of tininess.
func TestBF16Step(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 1))
	rounds := 200_000
	if testing.Short() {
		rounds = 40_000
	}
	flushed, edges := 0, 0
	for round := range rounds {
		kind := round % 6
		a, b := roundBF16(hostileFactor(r, kind)), roundBF16(hostileFactor(r, kind))
		c := hostileFactor(r, []int{0, 1, 0, 0, 1, 5}[kind])
		if kind == 2 {
			c = math.Float32frombits(r.Uint32()&0x807fffff | uint32(r.IntN(4))<<23)
			if round%4 == 0 { // so that the sum is near the least normal number
				c = float32(math.Copysign(0x1p-126, float64(-a*b))) - a*b
			}
		}
		if math.Float32bits(c)&0x7f800000 == 0 {
			c = 0 // sums are never below normal
		}
		got := bf16Step(c, a, b)
		want, ok := exactStep(c, a, b)
		if !ok {
			want = withoutExact(c, a, b)
		}
		require.True(t, sameFloat(want, got), "%x + %x·%x is %x, expected %x", c, a, b, got, want)
		if got == 0 && (c != 0 || a != 0 && b != 0) {
			flushed++
		}
		if math.Abs(float64(got)) == 0x1p-126 {
			edges++
		}
	}
	require.Positive(t, flushed)
	require.Positive(t, edges)
	// Less than half a unit below the least normal number, a quarter unit more, and the tie.
	least := math.Float32frombits(0x00800000)
	for _, v := range []struct {
		a, b float32
		want float32
	}{
		{-0x1p-75, 0x1p-76, least},                    // 2^-126 - 2^-151: the tie, to even
		{-0x1.02p-75, 0x1p-76, 0},                     // a little more: tiny
		{-0x1.fep-76, 0x1p-76, least},                 // a little less
		{-0x1p-75, 0x1p-75, 0},                        // 2^-126 - 2^-150: exact, below normal
		{0x1p-75, 0x1p-76, least}, {0x1p-2, 0, least}, // above
	} {
		require.Equal(t, v.want, bf16Step(least, v.a, v.b), "%x·%x", v.a, v.b)
		require.Equal(t, -v.want, bf16Step(-least, -v.a, v.b))
	}
}

// Rounding keeps its promises at every boundary.
func TestRoundBF16(t *testing.T) {
	for in, want := range map[uint32]uint32{
		0: 0, 1 << 31: 1 << 31, 1: 0, 0x80000001: 1 << 31, 0x007fffff: 0, 0x807fffff: 1 << 31,
		0x00800000: 0x00800000, 0x3f800000: 0x3f800000, 0x3f808000: 0x3f800000,
		0x3f808001: 0x3f810000, 0x3f818000: 0x3f820000, 0x3f817fff: 0x3f810000,
		0x7f7f7fff: 0x7f7f0000, 0x7f7f8000: 0x7f800000, 0x7f7fffff: 0x7f800000,
		0xff7fffff: 0xff800000, 0x7f800000: 0x7f800000, 0xff800000: 0xff800000,
		0x7f800001: 0x7fc00000, 0x7fffffff: 0x7fff0000, 0xffffffff: 0xffff0000,
		0x7fabcdef: 0x7feb0000,
	} {
		got := math.Float32bits(roundBF16(math.Float32frombits(in)))
		require.Equal(t, want, got, "%08x gives %08x", in, got)
	}
}

// way is one way to compute a product, with its name.
type way struct {
	name string
	run  func(p *Product)
}

// allBF16Ways are all that this machine has, not only the one that Multiply takes.
func allBF16Ways() []way {
	ways := []way{{"generic", func(p *Product) { p.bf16Chains() }}}
	for _, l := range Levels()[1:] {
		for _, w := range bf16Ways(l) {
			ways = append(ways, way{w.name, func(p *Product) { p.by(w) }})
		}
		ways = append(ways, way{fmt.Sprintf("Multiply at %v", l), l.Multiply})
	}
	return ways
}

// Every way gives the same bits as the chain of steps in Go, whatever the shape, the place and the
// numbers, and they are those of exact arithmetic.
func TestMultiplyBF16(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 2))
	sizes := []int{1, 2, 3, 5, 7, 8, 9, 12, 13, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 63, 65, 100}
	rounds := 400
	if testing.Short() {
		rounds = 120
	}
	ways := allBF16Ways()
	for round := range rounds {
		pick := func() int { return sizes[r.IntN(len(sizes))] }
		m, n, k, k2 := pick(), pick(), pick(), 0
		switch r.IntN(12) {
		case 0:
			k = 0
		case 1: // several blocks of steps, odd ends
			m, n, k = 1+r.IntN(14), 1+r.IntN(40), 500+r.IntN(1700)
		case 2:
			m, n = 100+r.IntN(100), 1+r.IntN(30)
		case 3: // several blocks of columns
			m, n, k = 1+r.IntN(14), 500+r.IntN(100), 1+r.IntN(20)
		case 4: // as its transpose
			m, n, k = 1020+r.IntN(20), 1+r.IntN(9), 1+r.IntN(20)
		}
		if r.IntN(2) == 0 {
			k2 = pick()
		}
		kind, numbers := r.IntN(3), round%7
		c := newGemmCase(r, m, n, k, k2, kind == 2, kind == 1, 0)
		c.BF16 = true
		if numbers < 6 {
			for i := range c.Terms {
				for _, v := range [][]float32{c.Terms[i].A, c.Terms[i].B} {
					for j := range v {
						if of := numbers; of != 5 || r.IntN(50) == 0 {
							v[j] = hostileFactor(r, of)
						}
					}
				}
			}
		}
		want := c.runBy(t, ways[0].run)
		for _, w := range ways[1:] {
			got := c.runBy(t, w.run)
			for i := range got {
				if !sameFloat(want[i], got[i]) {
					t.Fatalf("%s: M %d N %d K %d+%d kind %d numbers %d: element %d is %x, in Go %x",
						w.name, m, n, k, k2, kind, numbers, i, got[i], want[i])
				}
			}
		}
		for range 5 {
			i, j := r.IntN(m), r.IntN(n)
			require.True(t, sameFloat(c.bf16Chain(i, j), want[i*c.LDC+j]))
		}
	}
}

// bf16Chain is an element's sum by exact steps where they can be had.
func (c *gemmCase) bf16Chain(i, j int) (sum float32) {
	step := func(a, b float64) {
		x, y := roundBF16(float32(a)), roundBF16(float32(b))
		s, ok := exactStep(sum, x, y)
		if !ok {
			s = withoutExact(sum, x, y)
		}
		sum = s
	}
	for _, t := range c.Terms {
		for k := 0; k < t.K; k += 2 {
			if k+1 < t.K {
				a, b := c.ab(t, i, j, k+1)
				step(a, b)
			} else {
				step(0, 0)
			}
			a, b := c.ab(t, i, j, k)
			step(a, b)
		}
	}
	return sum
}

// Tiles change no bit: any part of C is the same when it is computed by itself.
func TestBF16PartsOfC(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 3))
	c := newGemmCase(r, 90, 130, 77, 31, false, false, 0)
	c.BF16 = true
	for _, w := range allBF16Ways() {
		want := c.runBy(t, w.run)
		for range 20 {
			i, j := r.IntN(c.M), r.IntN(c.N)
			part := *c
			part.M, part.N = 1+r.IntN(c.M-i), 1+r.IntN(c.N-j)
			for s := range part.Terms {
				p := &part.Terms[s]
				p.A, p.B = p.A[i*p.LDA:], p.B[j:]
			}
			got := part.runBy(t, w.run)
			for y := range part.M {
				for x := range part.N {
					require.Equal(t, math.Float32bits(want[(i+y)*c.LDC+j+x]),
						math.Float32bits(got[y*part.LDC+x]), "%s", w.name)
				}
			}
		}
	}
}

// MXCSR is as it was after products that flush.
func TestBF16LeavesFloatsAlone(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 4))
	runtime.LockOSThread() // whose register it is
	defer runtime.UnlockOSThread()
	for _, w := range allBF16Ways() {
		c := newGemmCase(r, 13, 33, 5, 0, false, false, 0)
		c.BF16 = true
		c.runBy(t, w.run)
		require.Equal(t, float32(0x1p-127), product(0x1p-126, 0.5), "%s left numbers below normal flushed", w.name)
	}
}

// product is computed when the test runs, not when it is compiled.
//
//go:noinline
func product(a, b float32) float32 { return a * b }

// A CPU whose pairs come in another order gets the kernels of float32.
func TestBF16WaysAgree(t *testing.T) {
	if Best() == Generic {
		t.Skip("no vectors on this machine")
	}
	for _, l := range Levels()[1:] {
		ways := bf16Ways(l)
		for _, w := range ways {
			require.True(t, w.agrees(ways[0]), w.name)
		}
		other := *ways[0]
		other.round = func(dst, src *float32, n int) { ways[0].round(dst, src, max(1, n-1)) }
		require.False(t, other.agrees(ways[0]), "a way that loses steps agrees")
		require.Positive(t, PeakBF16(l))
		require.NotEmpty(t, BF16Way(l))
	}
	require.Zero(t, PeakBF16(Generic))
	require.Equal(t, "generic", BF16Way(Generic))
}
