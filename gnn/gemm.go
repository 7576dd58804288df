package gnn

import (
	"sync"
	"unsafe"

	"helios/cuda"
	"helios/internal/simd"
)

// gemmParams is the parameter block of gemm_nn, gemm_nt and gemm_tn. All matrices are row-major
// float32 with a distance of LD* elements between rows:
//
//	gemm_nn  C[M,N] = A[M,K] · B[K,N]  + A2[M,K2] · B2[K2,N]
//	gemm_nt  C[M,N] = A[M,K] · B[N,K]ᵀ
//	gemm_tn  C[M,N] = A[K,M]ᵀ · B[K,N]
//
// then, as flags say: + Bias[N], ReLU, dropout. Every element is one sum over k in index order
// (first all of A·B, then all of A2·B2), rounded to float32 after each step (at level Generic also
// before each addition), so neither tiles nor workers change a bit. The kernels gemm_*_bf16 round
// the factors to bfloat16 and sum in pairs of steps (simd.Product), equal at all levels. The grid
// is ceil(M/MB) × ceil(N/NB) blocks; block i has row tile i / ceil(N/NB).
//
// The sum over a row of inputs and a row of neighbour means (GraphSAGE) is one launch with two
// products, which saves a pass over C and the concatenated input.
type gemmParams struct {
	A, B, A2, B2, C, Bias     cuda.DevicePtr
	M, N, K, K2               int64
	LDA, LDB, LDA2, LDB2, LDC int64
	MB, NB                    int64 // tile of a block; NB is a multiple of 4
	Drop                      dropout
	Flags                     uint32
	_                         uint32
}

const (
	gemmReLU    = 1 << iota // C = max(C, 0), NaN stays NaN
	gemmDropout             // C = C × Scale or 0
)

// dropout selects the elements of a matrix of activations to zero: element (row, col) by word col&3
// of the Philox block with counter (Layer<<24 | col/4, row, Epoch, Batch).
type dropout struct {
	Key                 [2]uint32
	Epoch, Batch, Layer uint32
	P, Scale            float32 // probability; 1/(1-P)
	_                   uint32
}

const (
	_ = uint(unsafe.Sizeof(gemmParams{}) - 176)
	_ = uint(176 - unsafe.Sizeof(gemmParams{}))
	_ = uint(unsafe.Offsetof(gemmParams{}.Drop) - 136)
	_ = uint(136 - unsafe.Offsetof(gemmParams{}.Drop))
)

// These products are our own, as no library promises the same bits on all machines. Above Generic
// the host kernels are simd's. At Generic they are a scalar GEMM after Goto and van
// de Geijn ("Anatomy of high-performance matrix multiplication", TOMS 34(3), 2008): panels of B for
// a tile's columns and gemmKC rows stay in L2, panels of A in L1, and a 2×4 tile of C in registers.
// (Go has 15 free SSE registers: 8 sums, 2 of A, 1 of B and 1 product; larger tiles spill.)
const (
	gemmMR = 2
	gemmNR = 4
	gemmMC = 32
	gemmKC = 256
	gemmNB = 128 // columns at a time
)

type gemmPanels struct {
	a [gemmMC * gemmKC]float32
	b [gemmNB * gemmKC]float32
}

var gemmPool = sync.Pool{New: func() any { return new(gemmPanels) }}

func init() {
	for _, op := range []gemmOp{opNN, opNT, opTN} {
		for _, prec := range hostPrecisions {
			cuda.RegisterHost(gemmName(op, false, prec, gemmVariant{}),
				func(b *cuda.Block, p *gemmParams) error {
					return gemm(b, p, op == opTN, op == opNT, prec == cuda.BF16)
				})
		}
	}
}

// hostPrecisions are HostPrecisions.
var hostPrecisions = []cuda.Precision{cuda.FP32, cuda.BF16}

// HostPrecisions are those of a host device's products.
func HostPrecisions() []cuda.Precision { return hostPrecisions }

// matrix views rows × cols elements at p.
func matrix(p cuda.DevicePtr, rows, cols, ld int64) []float32 {
	if rows == 0 || cols == 0 {
		return nil
	}
	return cuda.View[float32](p, (rows-1)*ld+cols)
}

// gemm computes a block's tile. Above Generic the sums are fused multiply-adds, still one chain an
// element: then all levels, tiles and workers agree to the bit.
func gemm(blk *cuda.Block, p *gemmParams, transA, transB, bf16 bool) error {
	nTiles := (p.N + p.NB - 1) / p.NB
	i0, j0 := int64(blk.Index)/nTiles*p.MB, int64(blk.Index)%nTiles*p.NB
	i1, j1 := min(i0+p.MB, p.M), min(j0+p.NB, p.N)
	if i0 >= i1 || j0 >= j1 {
		return nil
	}
	if l := blk.SIMD(); l > simd.Generic || bf16 {
		p.vector(l, transA, transB, bf16, i0, i1, j0, j1)
		return nil
	}
	for ; j0 < j1; j0 += gemmNB {
		p.scalar(transA, transB, i0, i1, j0, min(j0+gemmNB, j1))
	}
	return nil
}

// terms gives the operands that tile (i0, j0) begins with.
func (p *gemmParams) terms(transA, transB bool, i0, j0 int64) [2]simd.Term {
	var terms [2]simd.Term
	for seg := range terms {
		k, lda, ldb, pa, pb := p.K, p.LDA, p.LDB, p.A, p.B
		if seg == 1 {
			k, lda, ldb, pa, pb = p.K2, p.LDA2, p.LDB2, p.A2, p.B2
		}
		if k == 0 {
			continue
		}
		t := simd.Term{LDA: int(lda), LDB: int(ldb), K: int(k)}
		if transA {
			t.A = matrix(pa, k, p.M, lda)[i0:]
		} else {
			t.A = matrix(pa, p.M, k, lda)[i0*lda:]
		}
		if transB {
			t.B = matrix(pb, p.N, k, ldb)[j0*ldb:]
		} else {
			t.B = matrix(pb, k, p.N, ldb)[j0:]
		}
		terms[seg] = t
	}
	return terms
}

// bias is that of columns j0 to j1, or nil.
func (p *gemmParams) bias(j0, j1 int64) []float32 {
	if p.Bias == 0 {
		return nil
	}
	return cuda.View[float32](p.Bias, p.N)[j0:j1]
}

func (p *gemmParams) vector(l simd.Level, transA, transB, bf16 bool, i0, i1, j0, j1 int64) {
	c := matrix(p.C, p.M, p.N, p.LDC)[i0*p.LDC+j0:]
	bias := p.bias(j0, j1)
	l.Multiply(&simd.Product{
		M: int(i1 - i0), N: int(j1 - j0), TransA: transA, TransB: transB, BF16: bf16,
		Terms: p.terms(transA, transB, i0, j0), C: c, LDC: int(p.LDC),
		Finish: func(from, to int) { // while the rows are in L1 and L2
			for i := int64(from); i < int64(to); i++ {
				p.epilogue(l, c[i*p.LDC:][:j1-j0], bias, i0+i, j0)
			}
		},
	})
}

func (p *gemmParams) scalar(transA, transB bool, i0, i1, j0, j1 int64) {
	c := matrix(p.C, p.M, p.N, p.LDC)
	for i := i0; i < i1; i++ {
		clear(c[i*p.LDC+j0 : i*p.LDC+j1])
	}
	s := gemmPool.Get().(*gemmPanels)
	defer gemmPool.Put(s)
	for _, t := range p.terms(transA, transB, i0, j0) {
		for k0 := 0; k0 < t.K; k0 += gemmKC {
			kc := min(gemmKC, t.K-k0)
			if transB {
				pack(s.b[:], t.B[k0:], int(j1-j0), kc, gemmNR, t.LDB, 1)
			} else {
				pack(s.b[:], t.B[k0*t.LDB:], int(j1-j0), kc, gemmNR, 1, t.LDB)
			}
			for i := i0; i < i1; i += gemmMC {
				mc, row := int(min(gemmMC, i1-i)), int(i-i0)
				if transA {
					pack(s.a[:], t.A[k0*t.LDA+row:], mc, kc, gemmMR, 1, t.LDA)
				} else {
					pack(s.a[:], t.A[row*t.LDA+k0:], mc, kc, gemmMR, t.LDA, 1)
				}
				gemmTile(s, c[i*p.LDC+j0:], mc, int(j1-j0), kc, int(p.LDC))
			}
		}
	}
	bias := p.bias(j0, j1)
	for i := i0; i < i1; i++ {
		p.epilogue(simd.Generic, c[i*p.LDC+j0:i*p.LDC+j1], bias, i, j0)
	}
}

// gemmTiles are the rows and columns of the blocks of a launch with some SMs: blocks enough for all
// of them, halving the longer side, and otherwise large, because each block packs its operands for
// itself. A block ends after about a millisecond where K allows it: others wait for its slot.
func gemmTiles(m, n, k, sms int64) (mb, nb int64) {
	want := 4 * sms
	if k > m && k > n {
		want = sms // gradients of weights: each split reads an operand once more
	}
	rows, cols := int64(1), (n+511)/512
	for rows*cols < want {
		r, c := m/rows, n/cols
		switch {
		case r >= 96 && (r >= c || c < 128):
			rows *= 2
		case c >= 128:
			cols *= 2
		default:
			want = 0
		}
	}
	rows = max(rows, (m+1023)/1024)
	return ((m+rows-1)/rows + 11) / 12 * 12, ((n+cols-1)/cols + 31) &^ 31
}

// gemmTile adds the product of the packed panels to mc × nc elements of C.
func gemmTile(s *gemmPanels, c []float32, mc, nc, kc, ldc int) {
	for j := 0; j < nc; j += gemmNR {
		pb := s.b[j*kc:][:gemmNR*kc]
		for i := 0; i < mc; i += gemmMR {
			pa := s.a[i*kc:][:gemmMR*kc]
			if i+1 < mc && j+gemmNR <= nc {
				micro(pa, pb, (*[4]float32)(c[i*ldc+j:]), (*[4]float32)(c[(i+1)*ldc+j:]))
				continue
			}
			var t0, t1 [4]float32 // an edge: the panels are padded with zeros, C is not
			n := min(gemmNR, nc-j)
			copy(t0[:n], c[i*ldc+j:])
			if i+1 < mc {
				copy(t1[:n], c[(i+1)*ldc+j:])
			}
			micro(pa, pb, &t0, &t1)
			copy(c[i*ldc+j:], t0[:n])
			if i+1 < mc {
				copy(c[(i+1)*ldc+j:], t1[:n])
			}
		}
	}
}

// pack makes panels of w of n rows (of A) or columns (of B), interleaved by the kc steps of k.
// They lie outer apart in src, and their elements inner. The last panel is padded with zeros.
func pack(dst, src []float32, n, kc, w, outer, inner int) {
	for i := 0; i < n; i += w {
		d := dst[i*kc:][:w*kc]
		if n-i < w {
			clear(d)
		}
		for c := range min(w, n-i) {
			from := src[(i+c)*outer:]
			for k := range kc {
				d[k*w+c] = from[k*inner]
			}
		}
	}
}

// epilogue finishes columns j0… of row i of C. j0 is a multiple of 4.
func (p *gemmParams) epilogue(l simd.Level, c, bias []float32, i, j0 int64) {
	l.BiasReLU(c, bias, p.Flags&gemmReLU != 0)
	if p.Flags&gemmDropout != 0 {
		p.Drop.apply(l, c, i, j0)
	}
}

// apply drops and scales columns j0… of row i.
func (d *dropout) apply(l simd.Level, c []float32, i, j0 int64) {
	l.Dropout(c, d.Key, [4]uint32{d.Layer<<24 | uint32(j0/4), uint32(i), d.Epoch, d.Batch}, d.P,
		d.Scale)
}

// micro adds to a 2×4 tile of C the product of a panel of A (2 × k) and one of B (k × 4). The loop
// is unrolled because the moves that Go's register allocator places on a loop's edge cost more than
// two steps of work. The conversions forbid fused multiply-add, so that all processors give the
// same bits.
func micro(pA, pB []float32, r0, r1 *[4]float32) {
	c00, c01, c02, c03 := r0[0], r0[1], r0[2], r0[3]
	c10, c11, c12, c13 := r1[0], r1[1], r1[2], r1[3]
	var a0, a1, b0, b1, b2, b3 float32
	for len(pA) >= 16 && len(pB) >= 32 {
		pa, pb := (*[16]float32)(pA), (*[32]float32)(pB)
		a0, a1, b0, b1, b2, b3 = pa[0], pa[1], pb[0], pb[1], pb[2], pb[3]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		a0, a1, b0, b1, b2, b3 = pa[2], pa[3], pb[4], pb[5], pb[6], pb[7]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		a0, a1, b0, b1, b2, b3 = pa[4], pa[5], pb[8], pb[9], pb[10], pb[11]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		a0, a1, b0, b1, b2, b3 = pa[6], pa[7], pb[12], pb[13], pb[14], pb[15]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		a0, a1, b0, b1, b2, b3 = pa[8], pa[9], pb[16], pb[17], pb[18], pb[19]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		a0, a1, b0, b1, b2, b3 = pa[10], pa[11], pb[20], pb[21], pb[22], pb[23]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		a0, a1, b0, b1, b2, b3 = pa[12], pa[13], pb[24], pb[25], pb[26], pb[27]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		a0, a1, b0, b1, b2, b3 = pa[14], pa[15], pb[28], pb[29], pb[30], pb[31]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		pA, pB = pA[16:], pB[32:]
	}
	for len(pA) >= 2 && len(pB) >= 4 {
		pa, pb := (*[2]float32)(pA), (*[4]float32)(pB)
		a0, a1, b0, b1, b2, b3 = pa[0], pa[1], pb[0], pb[1], pb[2], pb[3]
		c00, c10 = c00+float32(a0*b0), c10+float32(a1*b0)
		c01, c11 = c01+float32(a0*b1), c11+float32(a1*b1)
		c02, c12 = c02+float32(a0*b2), c12+float32(a1*b2)
		c03, c13 = c03+float32(a0*b3), c13+float32(a1*b3)
		pA, pB = pA[2:], pB[4:]
	}
	*r0, *r1 = [4]float32{c00, c01, c02, c03}, [4]float32{c10, c11, c12, c13}
}
