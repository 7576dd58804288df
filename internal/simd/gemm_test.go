package simd

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/philox"
)

// gemmCase is a random problem with slack between and behind the rows.
type gemmCase struct {
	Product
	k [2]int
}

func newGemmCase(r *rand.Rand, m, n, k, k2 int, transA, transB bool, odd float64) *gemmCase {
	fill := func(rows, cols int) ([]float32, int) {
		ld := cols + r.IntN(2)*r.IntN(20)
		v := make([]float32, max(0, (rows-1)*ld+cols))
		for i := range v {
			v[i] = float32(r.NormFloat64())
			if r.Float64() < odd {
				v[i] = []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)),
					float32(math.Copysign(0, -1)), math.SmallestNonzeroFloat32,
					math.MaxFloat32}[r.IntN(6)]
			}
		}
		return v, ld
	}
	c := &gemmCase{Product: Product{M: m, N: n, TransA: transA, TransB: transB}, k: [2]int{k, k2}}
	for i, k := range c.k {
		t := &c.Terms[i]
		t.K = k
		if transA {
			t.A, t.LDA = fill(k, m)
		} else {
			t.A, t.LDA = fill(m, k)
		}
		if transB {
			t.B, t.LDB = fill(n, k)
		} else {
			t.B, t.LDB = fill(k, n)
		}
	}
	c.LDC = n + r.IntN(2)*r.IntN(20)
	return c
}

// run computes the case into a C full of guards and checks that nothing but C was written.
func (c *gemmCase) run(t *testing.T, l Level) []float32 { return c.runBy(t, l.Multiply) }

// runBy is run by some way to multiply.
func (c *gemmCase) runBy(t *testing.T, multiply func(p *Product)) []float32 {
	const guard = -12345
	all := make([]float32, c.M*c.LDC+64)
	for i := range all {
		all[i] = guard
	}
	p := c.Product
	p.C = all[:(c.M-1)*c.LDC+c.N]
	done := make([]int, c.M)
	p.Finish = func(i0, i1 int) {
		for i := i0; i < i1; i++ {
			done[i]++
			require.NotEqual(t, float32(guard), p.C[i*c.LDC],
				"row %d is finished before it is computed", i)
		}
	}
	multiply(&p)
	for i, n := range done {
		require.Equal(t, 1, n, "row %d finished", i)
	}
	for i, v := range all {
		if i%c.LDC >= c.N || i/c.LDC >= c.M {
			require.Equal(t, float32(guard), v, "element %d of row %d (of %d x %d) was written",
				i%c.LDC, i/c.LDC, c.M, c.N)
		}
	}
	return p.C
}

func (c *gemmCase) ab(t Term, i, j, k int) (a, b float64) {
	if c.TransA {
		a = float64(t.A[k*t.LDA+i])
	} else {
		a = float64(t.A[i*t.LDA+k])
	}
	if c.TransB {
		return a, float64(t.B[j*t.LDB+k])
	}
	return a, float64(t.B[k*t.LDB+j])
}

// chain is the sum that every level must give: one fused multiply-add a step. math.FMA of float64
// rounds twice when its result goes to float32, so the product, exact in float64, is added with
// round to odd.
func (c *gemmCase) chain(i, j int) float32 {
	sum := float32(0)
	for _, t := range c.Terms {
		for k := range t.K {
			a, b := c.ab(t, i, j, k)
			sum = fma32(a, b, sum)
		}
	}
	return sum
}

// fma32 is a·b + s rounded once; a and b are float32 values.
func fma32(a, b float64, s float32) float32 {
	p := a * b // exact but for overflow, which float64 does not have here
	x := float64(s)
	sum := p + x
	if math.IsNaN(sum) || math.IsInf(sum, 0) {
		return float32(sum)
	}
	// 2Sum's error says on which side of sum the exact value lies; an odd last bit keeps it there.
	z := sum - p
	e := (p - (sum - z)) + (x - z)
	if e != 0 && math.Float64bits(sum)&1 == 0 {
		if (e > 0) == (sum > 0) {
			sum = math.Float64frombits(math.Float64bits(sum) + 1)
		} else {
			sum = math.Float64frombits(math.Float64bits(sum) - 1)
		}
	}
	return float32(sum)
}

func sameFloat(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

// Every element is the chain, to the bit (NaNs are alike), whatever the level, shape, distance of
// rows and place; and lies as near the exact sum as K roundings allow.
func TestMultiply(t *testing.T) {
	if Best() == Generic {
		t.Skip("no vectors on this machine")
	}
	r := rand.New(rand.NewPCG(6, 1))
	sizes := []int{1, 2, 3, 7, 8, 9, 12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 63, 64, 65, 96,
		97, 100}
	rounds := 500
	if testing.Short() {
		rounds = 150
	}
	for round := range rounds {
		pick := func() int { return sizes[r.IntN(len(sizes))] }
		m, n, k, k2 := pick(), pick(), pick(), 0
		switch r.IntN(13) {
		case 0:
			k = 0
		case 1:
			k = 500 + r.IntN(600)
		case 2:
			m = 100 + r.IntN(200)
		case 3:
			n = 500 + r.IntN(200)
		case 4:
			k, m, n = 602, 47, 1+r.IntN(8)
		case 5:
			m, n = 1020+r.IntN(20), 1+r.IntN(9)
		case 6:
			m, n = 1+r.IntN(3), 128*(1+r.IntN(3))+r.IntN(40) // the long tiles
		}
		if r.IntN(2) == 0 {
			k2 = pick()
		}
		if r.IntN(10) == 0 { // two terms around a whole block of steps
			k = 1 + r.IntN(gemmKC-1)
			k2 = max(1, gemmKC-k-20+r.IntN(25))
		}
		odd := 0.0
		if round%3 == 0 {
			odd = 0.001
		}
		kind := r.IntN(3)
		c := newGemmCase(r, m, n, k, k2, kind == 2, kind == 1, odd)
		var first []float32
		for _, l := range Levels()[1:] {
			got := c.run(t, l)
			if first == nil {
				first = got
			}
			for i := range got {
				require.True(t, sameFloat(first[i], got[i]),
					"%v: M %d N %d K %d+%d kind %d: element %d is %v, at the level below %v", l, m,
					n, k, k2, kind, i, got[i], first[i])
			}
		}
		for range 40 {
			i, j := r.IntN(m), r.IntN(n)
			got, want := first[i*c.LDC+j], c.chain(i, j)
			require.True(t, sameFloat(want, got),
				"M %d N %d K %d+%d kind %d: C[%d,%d] is %v, the chain gives %v", m, n, k, k2, kind,
				i, j, got, want)
			if odd > 0 {
				continue
			}
			exact, size := 0.0, 0.0
			for _, term := range c.Terms {
				for k := range term.K {
					a, b := c.ab(term, i, j, k)
					exact += a * b
					size += math.Abs(a * b)
				}
			}
			// |error| <= K·u·Σ|a·b| with u = 2^-24, to first order
			// (Higham, Accuracy and Stability of Numerical Algorithms, 3.1)
			require.LessOrEqual(t, math.Abs(float64(got)-exact), float64(k+k2)*size*0x1p-24*1.001)
		}
	}
}

// Operands that are too short are refused at once.
func TestMultiplyRefuses(t *testing.T) {
	good := func() *Product {
		v := func(n int) []float32 { return make([]float32, n) }
		p := &Product{M: 5, N: 20, C: v(4*22 + 20), LDC: 22}
		for i := range p.Terms {
			p.Terms[i] = Term{A: v(4*9 + 7), B: v(6*20 + 20), LDA: 9, LDB: 20, K: 7}
		}
		return p
	}
	for _, l := range Levels()[1:] {
		require.NotPanics(t, func() { l.Multiply(good()) })
		for i, spoil := range []func(p *Product){
			func(p *Product) { p.C = p.C[1:] },
			func(p *Product) { p.LDC = 19 },
			func(p *Product) { p.Terms[0].A = p.Terms[0].A[1:] },
			func(p *Product) { p.Terms[0].LDA = 6 },
			func(p *Product) { p.Terms[1].B = p.Terms[1].B[1:] },
			func(p *Product) { p.Terms[1].LDB = 19 },
			func(p *Product) { p.TransA = true },
			func(p *Product) { p.TransB = true },
		} {
			p := good()
			spoil(p)
			require.Panics(t, func() { l.Multiply(p) }, "%v, %d", l, i)
		}
	}
}

// The operators behind a product give the same bits at every level, for any length, and the masks
// that the counters say.
func TestBiasReLUAndDropout(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 2))
	special := []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)),
		float32(math.Copysign(0, -1)), 0, -1e-45, 1e-45, -1}
	for n := range 200 {
		c, bias := make([]float32, n), make([]float32, n+3)
		for i := range c {
			c[i] = float32(r.NormFloat64())
			if r.IntN(4) == 0 {
				c[i] = special[r.IntN(len(special))]
			}
		}
		for i := range bias {
			bias[i] = float32(r.NormFloat64())
			if r.IntN(8) == 0 {
				bias[i] = special[r.IntN(len(special))]
			}
		}
		key, ctr := [2]uint32{r.Uint32(), r.Uint32()}, [4]uint32{r.Uint32() >> 1, r.Uint32(),
			r.Uint32(), r.Uint32()}
		p, scale := r.Float32(), 1+r.Float32()
		for _, l := range Levels() {
			got := func(f func(v []float32)) []float32 {
				v := append(append([]float32{}, c...), -7)
				f(v[:n:n])
				require.Equal(t, float32(-7), v[n], "%v wrote past the end of %d elements", l, n)
				return v[:n]
			}
			for kind := range 4 {
				b, relu := bias, kind&1 == 1
				if kind&2 == 0 {
					b = nil
				}
				for i, v := range got(func(v []float32) { l.BiasReLU(v, b, relu) }) {
					want := c[i]
					if b != nil {
						want += b[i]
					}
					if relu {
						want = max(want, 0)
					}
					require.True(t, sameFloat(want, v),
						"%v, n %d, kind %d: element %d of %v is %v, expected %v", l, n, kind, i,
						c[i], v, want)
				}
			}
			for i, v := range got(func(v []float32) { l.Dropout(v, key, ctr, p, scale) }) {
				w := philox.Block(key, [4]uint32{ctr[0] + uint32(i/4), ctr[1], ctr[2], ctr[3]})
				want := float32(c[i] * scale)
				if philox.Float32(w[i%4]) < p {
					want = 0
				}
				require.True(t, sameFloat(want, v), "%v, n %d: element %d of %v is %v, expected %v",
					l, n, i, c[i], v, want)
			}
		}
	}
}

// No column of lines to ask for begins behind the operand: a pointer there may lead to memory that
// Go has freed, which its garbage collector takes for a fault.
func TestAheadStaysInside(t *testing.T) {
	for rows := 1; rows <= gemmMC; rows++ {
		for _, k := range []int{1, 2, 7, 16, 47, 300} {
			m := make([]float32, rows*k)
			end := uintptr(unsafe.Pointer(&m[0])) + uintptr(4*len(m))
			var a ahead
			a[0].set(side{p: &m[0], ld: k}, rows, k)
			for range gemmMC {
				if a.line(nil); a[0].p != nil {
					require.Less(t, uintptr(unsafe.Pointer(a[0].p)), end, "%d rows of %d", rows, k)
				}
			}
		}
	}
}
