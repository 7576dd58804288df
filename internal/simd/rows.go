package simd

import (
	"math"
	"math/bits"
	"runtime"
	"unsafe"
)

//go:generate go -C ../../tools run ./simdgen/rows -out ../internal/simd/rows_amd64.s -stubs ../internal/simd/rows_amd64.go -pkg simd

// RowSum is a weighted sum of rows of X, each Dim float32s and adjacent, over parts of one list of
// row numbers. Every product and every sum is rounded to float32, in the order of the list, so all
// levels give the same bits.
type RowSum struct {
	X    []float32
	Dim  int
	List []uint32 // all of it: what is behind a part is prefetched
	// Map gives the rows of X that List names: row j is Map[j]. Where it is nil, row j is j.
	Map []int64
	// Table has a weight for each row that List can name; nil for 1.
	Table []float32
	// Gate: the result is multiplied by Scale where the element of out that it replaces is greater
	// than 0, and 0 elsewhere.
	Gate  bool
	Scale float32
	// Stream stores around the caches, which pays when out is larger than they are. The caller ends
	// with StoreFence.
	Stream bool

	partial []float32 // AVX2: of a list that is added in parts
}

// rowsArgs is the assembly's view of SumLists; gen/rows has the offsets. At AVX2 the first fields
// are about the rows that are added at one time.
type rowsArgs struct {
	x                    *float32
	idx                  *uint32
	n                    int64
	table                *float32
	dim, left            int64
	factor, start, scale float32
	mode                 uint32
	last                 *float32 // where x's last row begins
	weights              int64    // that table has

	lists           *RowList
	count           int64 // of lists
	allInit, allOut *float32
	partial         *float32
	todo            int64 // rows of the list
	allMode         uint64

	rowMap       *int64
	mapped, rows int64 // that it has, and that x has
}

// sideRows is the number of rows that AVX2 adds at one time.
const sideRows = 8

const (
	modeGate   = 1
	modeStream = 2
)

const (
	_ = -(unsafe.Offsetof(rowsArgs{}.dim) ^ 32)
	_ = -(unsafe.Offsetof(rowsArgs{}.mode) ^ 60)
	_ = -(unsafe.Offsetof(rowsArgs{}.weights) ^ 72)
	_ = -(unsafe.Offsetof(rowsArgs{}.allMode) ^ 128)
	_ = -(unsafe.Offsetof(rowsArgs{}.rowMap) ^ 136)
	_ = -(unsafe.Sizeof(RowList{}) ^ 12)
)

// RowList is the part of RowSum.List that makes one row: of N rows, Factor times their weights. The
// row that comes first counts Start times.
type RowList struct {
	N             uint32
	Factor, Start float32
}

// SumLists makes a row of out for each of lists, which stand one behind the other in List from lo
// on: Start·init plus the sum of Factor·Table[j]·X[j] over its rows j, with a Map of
// Factor·Table[j]·X[Map[j]]. init has a row for each of out's, or is nil for 0, and may not overlap
// out; but where all lists are empty it may be out. SumLists panics on a row that X does not have.
// One s serves one goroutine.
func (l Level) SumLists(s *RowSum, out []float32, lo int, lists []RowList, init []float32) {
	wide := len(lists) * s.Dim
	if wide == 0 {
		return
	}
	out = out[:wide]
	if init != nil {
		init = init[:wide]
	}
	rows, longest := 0, uint32(0)
	for i := range lists {
		rows += int(lists[i].N)
		longest = max(longest, lists[i].N)
	}
	list := s.List[lo : lo+rows]
	if l < AVX2 {
		s.sumAll(out, list, lists, init)
		return
	}
	a := rowsArgs{
		x: unsafe.SliceData(s.X), idx: unsafe.SliceData(list), table: unsafe.SliceData(s.Table),
		dim: int64(s.Dim), left: int64(len(s.List) - lo), scale: s.Scale,
		weights: int64(len(s.Table)), lists: &lists[0], count: int64(len(lists)), allOut: &out[0],
		allInit: unsafe.SliceData(init),
	}
	if rows > 0 {
		a.last = &s.X[len(s.X)-s.Dim]
		if s.Map != nil {
			a.rowMap, a.mapped, a.rows = &s.Map[0], int64(len(s.Map)), int64(len(s.X)/s.Dim)
		}
	}
	if longest > sideRows && l == AVX2 {
		if len(s.partial) < s.Dim {
			s.partial = make([]float32, s.Dim)
		}
		a.partial = &s.partial[0]
	}
	if s.Gate {
		a.allMode = modeGate
	}
	if s.Stream && (uintptr(unsafe.Pointer(a.allOut))|uintptr(4*s.Dim))%64 == 0 {
		a.allMode |= modeStream
	}
	there := false
	if l == AVX2 {
		there = sumListsAVX2((*byte)(unsafe.Pointer(&a)))
	} else {
		there = sumListsAVX512((*byte)(unsafe.Pointer(&a)))
	}
	if !there {
		panic("simd: SumLists: a row of a list is not there")
	}
}

// sumAll is SumLists in Go.
func (s *RowSum) sumAll(out []float32, list []uint32, lists []RowList, init []float32) {
	for i, q := range lists {
		var first []float32
		if init != nil {
			first = init[i*s.Dim : (i+1)*s.Dim]
		}
		s.sum(out[i*s.Dim:(i+1)*s.Dim], list[:q.N], q.Factor, first, q.Start)
		list = list[q.N:]
	}
}

// sum makes one row in Go: four rows at a time, which saves loads and stores of the result.
func (s *RowSum) sum(out []float32, list []uint32, factor float32, init []float32, start float32) {
	var buf [256]float32
	row := func(at uint32, c int) []float32 {
		j := int(at)
		if s.Map != nil {
			j = int(s.Map[at])
		}
		return s.X[j*s.Dim+c : (j+1)*s.Dim]
	}
	weight := func(j uint32) float32 {
		if s.Table == nil {
			return factor
		}
		return factor * s.Table[j]
	}
	for c := 0; c < s.Dim; c += len(buf) {
		n := min(len(buf), s.Dim-c)
		h := out[c : c+n]
		o := h
		if s.Gate {
			o = buf[:n]
		}
		if init != nil {
			for k, v := range init[c : c+n] {
				o[k] = start * v
			}
		} else {
			clear(o)
		}
		l := list
		for ; len(l) >= 4; l = l[4:] {
			axpy4(o, row(l[0], c), row(l[1], c), row(l[2], c), row(l[3], c), weight(l[0]),
				weight(l[1]), weight(l[2]), weight(l[3]))
		}
		for _, j := range l {
			x, w := row(j, c)[:n], weight(j)
			for k := range o {
				o[k] += float32(w * x[k])
			}
		}
		if s.Gate {
			for k, v := range o {
				if h[k] > 0 {
					h[k] = v * s.Scale
				} else {
					h[k] = 0
				}
			}
		}
	}
}

// axpy4 adds w0·x0 … w3·x3 to o in this order.
func axpy4(o, x0, x1, x2, x3 []float32, w0, w1, w2, w3 float32) {
	n := len(o)
	x0, x1, x2, x3 = x0[:n], x1[:n], x2[:n], x3[:n]
	for k := range o {
		v := o[k] + float32(w0*x0[k])
		v += float32(w1 * x1[k])
		v += float32(w2 * x2[k])
		o[k] = v + float32(w3*x3[k])
	}
}

// colsArgs is the assembly's view of SumColumns.
type colsArgs struct {
	out, x          *float32
	rows, n, stride int64
}

// SumColumns sets out[c] to the sum of x[r·stride+c] over so many rows, in order.
func (l Level) SumColumns(out, x []float32, rows, stride int) {
	if rows == 0 || len(out) == 0 {
		clear(out)
		return
	}
	x = x[:(rows-1)*stride+len(out)]
	a := colsArgs{&out[0], &x[0], int64(rows), int64(len(out)), int64(stride)}
	switch l {
	case AVX2:
		sumColumnsAVX2((*byte)(unsafe.Pointer(&a)))
	case AVX512:
		sumColumnsAVX512((*byte)(unsafe.Pointer(&a)))
	default:
		clear(out)
		r := 0
		row := func(r int) []float32 { return x[r*stride : r*stride+len(out)] }
		for ; r+4 <= rows; r += 4 {
			x0, x1, x2, x3 := row(r), row(r+1), row(r+2), row(r+3)
			for c := range out {
				out[c] = out[c] + x0[c] + x1[c] + x2[c] + x3[c]
			}
		}
		for ; r < rows; r++ {
			for c, v := range row(r) {
				out[c] += v
			}
		}
	}
}

// AdamStep has the constants of a step of Adam (Kingma and Ba, ICLR 2015, algorithm 1), see
// Level.Adam.
type AdamStep struct {
	B1, C1, B2, C2   float32 // C = 1 - B
	StepSize, RootC2 float32
	Eps, L2, Decay   float32
}

type adamArgs struct {
	p, g, m, v *float32
	n          int64
	AdamStep
}

const _ = -(unsafe.Offsetof(adamArgs{}.AdamStep) ^ 40)

// Adam updates parameters p and moments m and v by gradients g:
//
//	g += L2·p;  p -= Decay·p;  m = B1·m + C1·g;  v = B2·v + C2·g²
//	p -= StepSize · m / (sqrt(v)·RootC2 + Eps)
func (l Level) Adam(p, g, m, v []float32, q *AdamStep) {
	if len(p) == 0 {
		return
	}
	g, m, v = g[:len(p)], m[:len(p)], v[:len(p)]
	a := adamArgs{&p[0], &g[0], &m[0], &v[0], int64(len(p)), *q}
	switch l {
	case AVX2:
		adamAVX2((*byte)(unsafe.Pointer(&a)))
	case AVX512:
		adamAVX512((*byte)(unsafe.Pointer(&a)))
	default:
		for i, x := range p {
			d := g[i] + float32(q.L2*x)
			x -= float32(q.Decay * x)
			mi := float32(q.B1*m[i]) + float32(q.C1*d)
			vi := float32(q.B2*v[i]) + float32(q.C2*float32(d*d))
			m[i], v[i] = mi, vi
			root := float32(math.Sqrt(float64(vi)))
			p[i] = x - float32(q.StepSize*mi)/(float32(root*q.RootC2)+q.Eps)
		}
	}
}

// copyArgs is the assembly's view of CopyRows.
type copyArgs struct {
	dst, src                  *byte
	pos, slot                 *uint32
	n, left, rowBytes, stride int64
}

// CopyRows copies row slot[i] of src to row pos[i] of dst for the first n, where rows of src are
// rowBytes long and adjacent, those of dst stride bytes apart. The rest of slot is prefetched. The
// stores go around the caches: the caller ends with StoreFence. It reports false and copies nothing
// where that is not possible: at Generic, or when rows do not fill one or more aligned lines of 64
// bytes. The caller has checked that the rows are there.
func (l Level) CopyRows(dst, src []byte, pos, slot []uint32, n, rowBytes, stride int) bool {
	if l < AVX2 || n == 0 || rowBytes < 64 || rowBytes%64 != 0 || stride%64 != 0 ||
		uintptr(unsafe.Pointer(unsafe.SliceData(dst)))%64 != 0 {
		return false
	}
	a := copyArgs{&dst[0], &src[0], &pos[:n][0], &slot[:n][0], int64(n), int64(len(slot)),
		int64(rowBytes), int64(stride)}
	if l == AVX2 {
		copyRowsAVX2((*byte)(unsafe.Pointer(&a)))
	} else {
		copyRowsAVX512((*byte)(unsafe.Pointer(&a)))
	}
	return true
}

// Divisor divides by a number without a division: rows below 2^48, by 2 to the Shift times an odd
// number below 2^12.
type Divisor struct{ Shift, Magic uint64 }

// DivisorOf is the divisor of n: the high half of Magic times a shifted row is the quotient.
func DivisorOf(n uint64) Divisor {
	shift := uint64(bits.TrailingZeros64(n))
	odd := n >> shift
	if odd == 1 && shift > 0 { // 2^64 does not fit: halve once less
		shift, odd = shift-1, 2
	}
	return Divisor{shift, ^uint64(0)/odd + 1}
}

// prefetchArgs is the assembly's view of PrefetchParts.
type prefetchArgs struct {
	base           *byte
	rows           *int64
	n              int64
	shift, divisor uint64
}

// PrefetchParts asks memory for the 64-byte part row/d of mem for each of rows, and does not wait.
// Rows may be outside. It does nothing at Generic.
func (l Level) PrefetchParts(mem []byte, rows []int64, d Divisor) {
	if l < AVX2 || len(rows) == 0 || len(mem) == 0 {
		return
	}
	a := prefetchArgs{&mem[0], &rows[0], int64(len(rows)), d.Shift, d.Magic}
	prefetchParts((*byte)(unsafe.Pointer(&a)))
}

// readArgs is the assembly's view of ReadRows.
type readArgs struct {
	x     *float32
	pitch int64 // bytes
	list  *uint32
	n     int64
	final *uint32
	last  *float32
}

// ReadRows reads one word of each line of the rows of x, each dim float32s and adjacent, that
// list[lo:hi] names, and does nothing with it: the floor of a kernel that reads those rows in that
// order. Rows behind hi are asked of memory. ReadRows panics on a row that x does not have.
func ReadRows(l Level, x []float32, dim int, list []uint32, lo, hi int) {
	rows := list[lo:hi]
	if len(rows) == 0 || dim == 0 {
		return
	}
	if l >= AVX2 {
		a := readArgs{x: &x[0], pitch: int64(4 * dim), list: &rows[0], n: int64(len(rows)),
			final: &list[len(list)-1], last: &x[len(x)-dim]}
		if !readRows((*byte)(unsafe.Pointer(&a))) {
			panic("simd: ReadRows: a row of a list is not there")
		}
		return
	}
	const line = 16
	word := float32(0)
	for _, j := range rows {
		for row := x[int(j)*dim:][:dim]; len(row) > 0; row = row[min(line, len(row)):] {
			word = row[0]
		}
	}
	runtime.KeepAlive(word)
}

// StoreFence orders the stores around the caches before all later ones.
func (l Level) StoreFence() {
	if l >= AVX2 {
		storeFence()
	}
}
