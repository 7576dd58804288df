package gnn

import (
	"math/bits"
	"unsafe"

	"helios/cuda"
)

// A GPU differs from the host's kernels in the transpose, a radix sort of several launches, in sums
// over many rows, and in bias, ReLU and dropout behind a BLAS.

// transposeParams is the parameter block of one pass of the transpose: a stable counting sort of
// (source, destination) pairs by Bits bits of the source at Shift. Three launches make a pass:
// transpose_count, transpose_scan and transpose_scatter; after the last one transpose_ends finds
// the ends of the lists.
type transposeParams struct {
	Agg            aggParams
	KeysIn, ValsIn cuda.DevicePtr // uint32[Edges]: sources, destinations; ValsIn 0: by Agg.Indptr
	KeysOut        cuda.DevicePtr // uint32[Edges]
	ValsOut        cuda.DevicePtr // uint32[Edges]
	Hist           cuda.DevicePtr // uint32[1<<Bits, Grid]: pairs by digit and share
	Totals         cuda.DevicePtr // uint32[1<<Bits]
	Shift, Bits    uint32
	Grid           uint32 // shares of the edges
	GCN            uint32 // 1: the weights of GCN
}

const (
	_ = uint(unsafe.Sizeof(transposeParams{}) - 216)
	_ = uint(216 - unsafe.Sizeof(transposeParams{}))
)

const (
	radixBits = 9 // of a digit at most: 2 passes up to 262144 sources
	radixBins = 1 << radixBits
	// A share of radixShare pairs is worth its counters; radixGrid is the largest number of shares.
	radixShare = 1024
	radixGrid  = 1024
)

// biasActParams is the parameter block of bias_act, the end of gemm_* for products that a BLAS has
// made: C = dropout(relu(C + Bias)), each where Flags says so, Bias where it is not 0. The masks
// are those of the products' kernels.
type biasActParams struct {
	C, Bias         cuda.DevicePtr // float32[Rows, LDC], float32[Cols]
	Rows, Cols, LDC int64
	Drop            dropout
	Flags           uint32 // gemmReLU, gemmDropout
	_               uint32
}

const (
	_ = uint(unsafe.Sizeof(biasActParams{}) - 80)
	_ = uint(80 - unsafe.Sizeof(biasActParams{}))
)

// radixPasses are the digits by which numSrc sources are sorted.
func radixPasses(numSrc int64) (passes, width int) {
	n := max(1, bits.Len64(uint64(max(numSrc-1, 0))))
	passes = (n + radixBits - 1) / radixBits
	return passes, (n + passes - 1) / passes
}

func radixShares(edges int64) int64 {
	return max(1, min((edges+radixShare-1)/radixShare, radixGrid))
}

// transposeScratch returns how many bytes transposeGPU needs beside the results.
func transposeScratch(numSrc, edges int64) int64 {
	passes, width := radixPasses(numSrc)
	words := align(edges) // keys
	if passes > 1 {
		words += 2 * align(edges) // keys, values
	}
	return 4 * (words + align(radixShares(edges)<<width) + align(1<<width))
}

// transposeGPU enqueues what the host's transpose kernels do: the lists of destinations by source
// (a.TDst, a.TEnd), each in order, and the destinations' parts of the edges' weights (a.Weights).
// a.Degrees is set for GCN alone.
func (o *launcher) transposeGPU(s *stepSink, a *aggParams, scratch cuda.DevicePtr) error {
	var k [4]cuda.Kernel
	for i, name := range []string{"transpose_count", "transpose_scan", "transpose_scatter",
		"transpose_ends"} {
		var err error
		if k[i], err = o.kernel(name); err != nil {
			return err
		}
	}
	passes, width := radixPasses(a.NumSrc)
	grid := radixShares(a.Edges)
	next := scratch
	take := func(words int64) cuda.DevicePtr {
		p := next
		next += cuda.DevicePtr(4 * align(words))
		return p
	}
	p := transposeParams{Agg: *a, Bits: uint32(width), Grid: uint32(grid), KeysIn: a.Src}
	if a.Degrees != 0 {
		p.GCN = 1
	}
	keys := [2]cuda.DevicePtr{take(a.Edges)}
	var vals cuda.DevicePtr
	if passes > 1 {
		keys[1], vals = take(a.Edges), take(a.Edges)
	}
	p.Hist, p.Totals = take(grid<<width), take(1<<width)
	shares := cuda.LaunchConfig{Blocks: int(grid), Threads: aggThreads}
	for pass := range passes {
		p.Shift = uint32(pass * width)
		p.KeysOut, p.ValsOut = keys[pass%2], a.TDst
		if (passes-1-pass)%2 == 1 { // the last pass ends in TDst
			p.ValsOut = vals
		}
		if err := put(s, k[0], shares, p); err != nil {
			return err
		}
		if err := put(s, k[1], o.warpBlocks(1<<width), p); err != nil {
			return err
		}
		if err := put(s, k[2], shares, p); err != nil {
			return err
		}
		p.KeysIn, p.ValsIn = p.KeysOut, p.ValsOut
	}
	return put(s, k[3], o.warpBlocks((a.NumSrc+31)/32), p)
}

// sumShort is up to how many rows a column is summed by one thread.
const sumShort = 4 * sumLeaf

// colSumScratch returns how many bytes colSumGPU needs.
func colSumScratch(rows, cols int64) int64 {
	n := int64(0)
	for rows > sumShort {
		rows = (rows + sumLeaf - 1) / sumLeaf
		n += align(rows * cols)
	}
	return 4 * n
}

// colSumGPU enqueues col_sum as one launch for each level of its tree of sums: the same bits.
func (o *launcher) colSumGPU(s *stepSink, p *sumParams, scratch cuda.DevicePtr) error {
	whole, err := o.kernel("col_sum")
	if err != nil {
		return err
	}
	part, err := o.kernel("col_sum_part")
	if err != nil {
		return err
	}
	q := *p
	stripes := (p.Cols + 31) / 32
	if p.Cols%4 == 0 {
		stripes = (p.Cols + 127) / 128
	}
	for q.Rows > sumShort {
		groups := (q.Rows + sumLeaf - 1) / sumLeaf
		l := q
		l.Out = scratch
		if err := put(s, part, o.warpBlocks(groups*stripes), l); err != nil {
			return err
		}
		q.X, q.Rows = scratch, groups
		scratch += cuda.DevicePtr(4 * align(groups*q.Cols))
	}
	return put(s, whole, o.warpBlocks((p.Cols+31)/32), q)
}
