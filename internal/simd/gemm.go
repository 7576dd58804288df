package simd

import (
	"math"
	"sync"
	"time"
	"unsafe"

	"helios/internal/philox"
)

//go:generate go -C ../../tools run ./simdgen/gemm -out ../internal/simd/gemm_amd64.s -stubs ../internal/simd/gemm_amd64.go -pkg simd

// Product is a sum of products of float32 matrices, C[M,N] = Σ A·B over Terms. A and B are
// row-major or, as TransA and TransB say, given as their transposes (A[K,M], B[N,K]). With BF16
// factors are rounded, see bf16Step.
type Product struct {
	M, N           int
	TransA, TransB bool
	BF16           bool
	Terms          [2]Term
	C              []float32
	LDC            int
	Finish         func(i0, i1 int) // called when rows i0 to i1 of C are complete, or nil
}

// Term is one product of K steps. Its slices begin with the first element that is used, rows are
// LDA and LDB apart.
type Term struct {
	A, B     []float32
	LDA, LDB int
	K        int
}

// The blocks are those of Goto and van de Geijn ("Anatomy of high-performance matrix
// multiplication", TOMS 34(3), 2008): a panel of gemmKC steps of the vectors' side for all of
// gemmNC columns stays in L2, one of the rows' side in L1, the tile of C in registers. C is stored
// between blocks of steps and loaded again, so each element is one chain of fused multiply-adds
// over k in index order, whatever the blocks and tiles are: AVX2 and AVX512 agree to the bit.
const (
	gemmKC = 512
	gemmNC = 512
	gemmMC = 48 // whole tiles of both levels
	// From here on both sides are packed. A side whose elements lie in order of k is used where it
	// is if fewer rows or columns than that want it, and both sides are if their rows are short: to
	// copy them costs more than to read their lines from L2, where one block of steps asks for the
	// next one's. Rows further apart would share too few sets of the caches.
	gemmPackRows = 24
	gemmInPlace  = 512 // floats
	// floats between panels: a power of two would put all of them into one set of L1
	gemmPad      = 80
	gemmThin     = 8 // up to so many columns, C is computed as its transpose
	gemmThinRows = 1024
	lineFloats   = 16 // of a line of the caches
)

// side is the operand of one side of the tile: with major the elements for one k lie together.
type side struct {
	p     *float32
	ld    int
	major bool
}

func elem(p *float32, i int) *float32 { return (*float32)(unsafe.Add(unsafe.Pointer(p), i*4)) }

// from is the operand beginning at step k, row or column i.
func (s side) from(k, i int) side {
	if s.major {
		s.p = elem(s.p, k*s.ld+i)
	} else {
		s.p = elem(s.p, i*s.ld+k)
	}
	return s
}

// ahead names the lines that will be read next of the operands, by columns. Tiles ask memory for
// them, one column a tile.
type ahead [2]lines

type lines struct {
	side
	n int // floats of a step that are left
}

// line is the next column, of lines fs bytes apart; none repeats a line of the caches.
func (a *ahead) line(none *float32) (far *float32, fs int) {
	for i := range a {
		if s := &a[i]; s.n > 0 {
			far = s.p
			if s.n -= lineFloats; s.n > 0 {
				s.p = elem(s.p, lineFloats)
			}
			return far, s.ld * 4
		}
	}
	return none, 0
}

// set names the lines of the next gemmMC rows of kc steps at x, of which there may be fewer, where
// rows are adjacent: they are the floats of kc rows of gemmMC. No column begins behind the last
// float, for Go's garbage collector looks where pointers lead.
func (a *lines) set(x side, rows, kc int) {
	if !x.major && x.ld == kc {
		*a = lines{side{p: x.p, ld: gemmMC}, min(gemmMC, rows*kc)}
	}
}

type gemmScratch struct {
	x    [gemmMC*(gemmKC+32) + 16*gemmPad]float32
	y    [gemmNC*(gemmKC+32) + 64*gemmPad]float32
	thin [gemmThin * gemmThinRows]float32
	zero [gemmKC + 32]float32
	rows [32]*float32

	terms [2]thinTerm
	half  [16 * (halfSteps + 16)]float32 // rounded rows of a side
}

var gemmPool = sync.Pool{New: func() any { return new(gemmScratch) }}

// micro is the kernels of one level.
type micro struct {
	lanes, rows int
	sizes       []int // rows of the tiles there are, largest first
	tile        [13][9]func(k int, x *float32, xs int, y *float32, ys int, c *float32, ldc, n,
		load int, far *float32, fs int)
	transpose func(dst *float32, ds int, rows **float32, k int)
	panels    func(dst *float32, ps int, src *float32, ld, k, n int)
	columns   func(dst *float32, ps int, src *float32, ld, k, n int)
	finish    func(c, bias *float32, n, relu int)
	dropout   func(c *float32, n int, p *uint32, limit uint32, scale float32)
	peak      func(n int)
}

// check panics where an operand is too short: the loops in assembly do not look.
func (g *Product) check() {
	whole := func(v []float32, rows, cols, ld int, turned bool) {
		if turned {
			rows, cols = cols, rows
		}
		if ld < cols {
			panic("simd: rows of a matrix overlap")
		}
		_ = v[(rows-1)*ld+cols-1]
	}
	whole(g.C, g.M, g.N, g.LDC, false)
	for _, t := range g.Terms {
		if t.K > 0 {
			whole(t.A, g.M, t.K, t.LDA, g.TransA)
			whole(t.B, t.K, g.N, t.LDB, g.TransB)
		}
	}
}

// blocker computes rows × cols elements of C (at c) from column j0 of the operands on.
type blocker interface {
	block(s *gemmScratch, terms []thinTerm, j0, rows, cols int, c *float32, ldc int,
		finish func(i0, i1 int))
}

// Multiply computes g's product. It is for levels above Generic, but for products with BF16. It
// panics where an operand is too short.
func (l Level) Multiply(g *Product) {
	if g.M == 0 || g.N == 0 {
		return
	}
	g.check()
	if g.BF16 {
		multiplyBF16(l, g)
		return
	}
	g.by(microOf(l))
}

// by computes g's product by m.
func (g *Product) by(m blocker) {
	s := gemmPool.Get().(*gemmScratch)
	defer gemmPool.Put(s)
	terms := s.terms[:0]
	for _, t := range g.Terms {
		if t.K > 0 {
			terms = append(terms, thinTerm{side{&t.A[0], t.LDA, g.TransA},
				side{&t.B[0], t.LDB, !g.TransB}, t.K})
		}
	}
	switch {
	case len(terms) == 0:
		for i := range g.M {
			clear(g.C[i*g.LDC:][:g.N])
		}
		if g.Finish != nil {
			g.Finish(0, g.M)
		}
	case g.N <= gemmThin && g.M > g.N:
		g.byColumns(m, s, terms)
	default:
		for j := 0; j < g.N; j += gemmNC {
			n := min(gemmNC, g.N-j)
			finish := g.Finish
			if j+n < g.N {
				finish = nil
			}
			m.block(s, terms, j, g.M, n, &g.C[j], g.LDC, finish)
		}
	}
}

type thinTerm struct {
	x, y side
	k    int
}

// inPlace reports whether tiles read both sides where they are.
func (t thinTerm) inPlace() bool {
	return t.x.major && t.y.major && max(t.x.ld, t.y.ld) <= gemmInPlace
}

// blocks is the number of blocks of steps.
func (t thinTerm) blocks() int {
	depth := gemmKC
	if t.inPlace() {
		depth /= 2 // a tile's columns of y fit L1
	}
	return (t.k + depth - 1) / depth
}

// together is the number of terms, 1 or 2, whose steps are one block: two that are packed save a
// pass over C.
func (m *micro) together(terms []thinTerm, rows, cols int) int {
	steps := 0
	for i, t := range terms {
		steps += t.k
		packed := rows > gemmPackRows && (!t.x.major || cols > 2*m.lanes) && !t.inPlace()
		if i > 0 && steps <= gemmKC && packed {
			return 2
		}
		if !packed {
			break
		}
	}
	return 1
}

// stepsFrom names the lines that the steps from k on read of some rows, and of columns from j on.
func (t thinTerm) stepsFrom(k, j, rows, cols int) (a ahead) {
	if k < t.k && t.x.major && t.y.major {
		a = ahead{{t.x.from(k, 0), rows}, {t.y.from(k, j), cols}}
	}
	return a
}

// byColumns computes g's product of few columns as the transposed one of few rows.
func (g *Product) byColumns(m blocker, s *gemmScratch, terms []thinTerm) {
	for j := range terms {
		terms[j].x, terms[j].y = terms[j].y, terms[j].x
	}
	for i := 0; i < g.M; i += gemmThinRows {
		n := min(gemmThinRows, g.M-i)
		for j := 0; j < n; j += gemmNC {
			m.block(s, terms, i+j, g.N, min(gemmNC, n-j), &s.thin[j], gemmThinRows, nil)
		}
		for j := range g.N {
			t, c := s.thin[j*gemmThinRows:][:n], g.C[i*g.LDC+j:]
			for r, v := range t {
				c[r*g.LDC] = v
			}
		}
		if g.Finish != nil {
			g.Finish(i, i+n)
		}
	}
}

// block implements blocker.
func (m *micro) block(s *gemmScratch, terms []thinTerm, j0, rows, cols int, c *float32, ldc int,
	finish func(i0, i1 int)) {
	nr := 2 * m.lanes
	load := 0
	for len(terms) > 0 {
		group := terms[:m.together(terms, rows, cols)]
		terms = terms[len(group):]
		t := group[0]
		inPlace, blocks := t.inPlace(), t.blocks()
		for b := range blocks {
			k0, k1 := t.k*b/blocks, t.k*(b+1)/blocks
			own := k1 - k0
			kc := own
			if len(group) > 1 {
				kc += group[1].k
			}
			last := len(terms) == 0 && b == blocks-1
			next := t.stepsFrom(k1, j0, rows, cols)
			// The vectors' side.
			y := t.y.from(k0, j0)
			yp := nr*((kc+15)&^15) + gemmPad // from panel to panel
			packed := 0                      // the first column that is in s.y
			if inPlace || y.major && rows <= gemmPackRows {
				packed = cols / nr * nr
			}
			if packed < cols {
				m.packY(s, s.y[:], y.from(0, packed), cols-packed, own, yp)
				if len(group) > 1 {
					m.packY(s, s.y[own*nr:], group[1].y.from(0, j0), cols, group[1].k, yp)
				}
			}
			for i := 0; i < rows; i += gemmMC {
				mc := min(gemmMC, rows-i)
				x := t.x.from(k0, i)
				if i+gemmMC < rows {
					next[0].set(t.x.from(k0, i+gemmMC), rows-i-gemmMC, own)
					if len(group) > 1 {
						next[1].set(group[1].x.from(0, i+gemmMC), rows-i-gemmMC, group[1].k)
					}
				}
				xs, xp := x.ld*4, m.rows
				xbase := x.p
				if !x.major || cols > nr && !inPlace {
					xs, xp, xbase = m.rows*4, m.rows*((kc+15)&^15)+gemmPad, &s.x[0]
					m.packX(s, s.x[:], x, mc, own, xp)
					if len(group) > 1 { // behind, and over what the first has spilled
						m.packX(s, s.x[own*m.rows:], group[1].x.from(0, i), mc, group[1].k, xp)
					}
				}
				for j, n := 0, 0; j < cols; j += n {
					n = min(nr, cols-j)
					v := 2
					switch {
					case j+8*m.lanes <= packed && m.tile[min(mc, 12)][8] != nil:
						v, n = 8, 8*m.lanes // a few rows: longer pieces of the operand's
					case n <= m.lanes:
						v = 1
					}
					var py *float32
					ys := nr * 4
					if j < packed {
						py, ys = elem(y.p, j), y.ld*4
					} else {
						py = &s.y[(j-packed)/nr*yp]
					}
					for q := 0; q < mc; {
						size := m.size(mc - q)
						px, to := elem(xbase, q/m.rows*xp+q%m.rows), elem(c, (i+q)*ldc+j)
						far, fs := next.line(to)
						m.tile[size][v](kc, px, xs, py, ys, to, ldc*4, n, load, far, fs)
						q += size
					}
				}
				if last && finish != nil {
					finish(i, i+mc)
				}
			}
			load = loadC
		}
	}
}

// size is the rows of the largest tile that has at most n, which is at least 1.
func (m *micro) size(n int) int {
	for _, z := range m.sizes {
		if z <= n {
			return z
		}
	}
	return 1
}

// packY makes panels of two vectors of columns, ps floats apart.
func (m *micro) packY(s *gemmScratch, to []float32, y side, n, kc, ps int) {
	if y.major {
		m.panels(&to[0], ps*4, y.p, y.ld*4, kc, n)
		return
	}
	w := 2 * m.lanes
	for j := 0; j < n; j += w {
		for h := 0; h < w; h += m.lanes {
			for r := range m.lanes {
				s.rows[r] = &s.zero[0]
				if j+h+r < n {
					s.rows[r] = elem(y.p, (j+h+r)*y.ld)
				}
			}
			m.transpose(&to[j/w*ps+h], w*4, &s.rows[0], kc)
		}
	}
}

// packX makes panels of m.rows rows.
func (m *micro) packX(s *gemmScratch, to []float32, x side, n, kc, ps int) {
	if x.major {
		m.columns(&to[0], ps*4, x.p, x.ld*4, kc, n)
		return
	}
	for i := 0; i < n; i += m.rows {
		for r := range m.lanes {
			s.rows[r] = &s.zero[0]
			if r < m.rows && i+r < n {
				s.rows[r] = elem(x.p, (i+r)*x.ld)
			}
		}
		m.transpose(&to[i/m.rows*ps], m.rows*4, &s.rows[0], kc)
	}
}

// BiasReLU adds bias (nil for none) to c, then with relu sets what is below 0 to 0. NaN stays NaN.
// The same bits at every level.
func (l Level) BiasReLU(c, bias []float32, relu bool) {
	if len(c) == 0 || bias == nil && !relu {
		return
	}
	if bias != nil {
		bias = bias[:len(c)]
	}
	if l > Generic {
		cut := 0
		if relu {
			cut = 1
		}
		microOf(l).finish(&c[0], unsafe.SliceData(bias), len(c), cut)
		return
	}
	switch {
	case bias != nil && relu:
		for j, v := range bias {
			c[j] = max(c[j]+v, 0)
		}
	case bias != nil:
		for j, v := range bias {
			c[j] += v
		}
	default:
		for j, v := range c {
			c[j] = max(v, 0)
		}
	}
}

// Dropout sets element j of c to 0 where philox.Float32 of word j&3 of the Philox block with
// counter ctr + (j/4, 0, 0, 0) is below p, and multiplies the others by scale. The same bits at
// every level.
func (l Level) Dropout(c []float32, key [2]uint32, ctr [4]uint32, p, scale float32) {
	// philox.Float32(w) < p exactly when w>>8 < p·2^24.
	limit := uint32(math.Ceil(float64(p) * (1 << 24)))
	if l > Generic && len(c) > 0 {
		m := microOf(l)
		words := [6]uint32{key[0], key[1], ctr[0], ctr[1], ctr[2], ctr[3]}
		n := len(c) / (4 * m.lanes) * (4 * m.lanes)
		if n > 0 {
			m.dropout(&c[0], n, &words[0], limit, scale)
			words[2] += uint32(n / 4)
		}
		if c = c[n:]; len(c) > 0 {
			var rest [64]float32
			copy(rest[:], c)
			m.dropout(&rest[0], 4*m.lanes, &words[0], limit, scale)
			copy(c, rest[:])
		}
		return
	}
	for g := 0; g < len(c); g += 4 {
		w := philox.Block(key, ctr)
		ctr[0]++
		for j, v := range c[g:min(g+4, len(c))] {
			// A branch would be mispredicted every other time.
			dropped := uint32(int32(w[j&3]>>8-limit) >> 31)
			c[g+j] = math.Float32frombits(math.Float32bits(v*scale) &^ dropped)
		}
	}
}

// PeakFLOPS measures what one thread can do at most at this level: fused multiply-adds on
// registers, the best of some short runs. 0 for Generic, which has none.
func (l Level) PeakFLOPS() float64 {
	if l <= Generic {
		return 0
	}
	return microOf(l).peakFLOPS(2)
}

// peakFLOPS is PeakFLOPS of an instruction that does so many operations in a lane.
func (m *micro) peakFLOPS(ops int) float64 {
	chains := 14 // registers of gen/gemm's peak
	if m.lanes == 16 {
		chains = 30
	}
	const steps = 100_000
	best := time.Duration(math.MaxInt64)
	for range 20 {
		start := time.Now()
		m.peak(steps)
		best = min(best, time.Since(start))
	}
	return float64(ops*steps*chains*m.lanes) / best.Seconds()
}
