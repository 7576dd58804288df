package cache

import (
	"fmt"
	"math"
	"unsafe"

	"helios/cuda"
	"helios/internal/rowtype"
)

// convertParams are the parameters of the kernel "convert_rows": rows of RowBytes at Src, as
// rowtype stores them, become Dim float32 each at Dst, adjacent. Of a type with scales, row i is of
// node Nodes[i], whose scale is Scales[Nodes[i]] of Table. Memory bound: RowBytes + 4×Dim bytes
// moved per row, and 12 for a scale.
type convertParams struct {
	Src, Dst            cuda.DevicePtr
	Nodes, Scales       cuda.DevicePtr // int64[Rows], float32[Table]; 0: the type has no scales
	Rows, RowBytes, Dim int64
	Table               int64
	Type                uint32 // a rowtype.Type
	_                   uint32
}

const (
	_ = -(unsafe.Sizeof(convertParams{}) ^ 72)
	_ = -(unsafe.Offsetof(convertParams{}.Type) ^ 64)
)

func init() { cuda.RegisterHost("convert_rows", convertKernel) }

func convertKernel(b *cuda.Block, p *convertParams) error {
	t := rowtype.Type(p.Type)
	if t < rowtype.Float16 || t > rowtype.Int8 || p.RowBytes != int64(t.RowBytes(int(p.Dim))) {
		return fmt.Errorf("convert_rows: rows of type %d with %d bytes for %d features", p.Type,
			p.RowBytes, p.Dim)
	}
	lo, hi := b.Range(p.Rows)
	src := cuda.View[byte](p.Src, p.Rows*p.RowBytes)
	dst := cuda.View[float32](p.Dst, p.Rows*p.Dim)
	var nodes []int64
	var scales []float32
	if t.Scaled() {
		nodes, scales = cuda.View[int64](p.Nodes, p.Rows), cuda.View[float32](p.Scales, p.Table)
	}
	level, scale := b.SIMD(), float32(1)
	for r := lo; r < hi; r++ {
		if nodes != nil {
			if uint64(nodes[r]) >= uint64(p.Table) {
				return fmt.Errorf("convert_rows: row %d is of node %d, there are scales of %d", r,
					nodes[r], p.Table)
			}
			scale = scales[nodes[r]]
		}
		t.Decode(level, dst[r*p.Dim:(r+1)*p.Dim], src[r*p.RowBytes:(r+1)*p.RowBytes], scale)
	}
	return nil
}

// Converter widens rows as they are stored to float32.
type Converter struct {
	dev      cuda.Device
	kernel   cuda.Kernel
	t        rowtype.Type
	dim      int
	rowBytes int64
}

// NewConverter makes a converter of rows of dim values. There is nothing to convert in float32.
func NewConverter(dev cuda.Device, t rowtype.Type, dim int) (*Converter, error) {
	if t == rowtype.Float32 || dim < 1 {
		return nil, fmt.Errorf("cache: no conversion of rows of %d values of %s", dim, t)
	}
	k, err := dev.Kernel("convert_rows")
	if err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	return &Converter{dev: dev, kernel: k, t: t, dim: dim, rowBytes: int64(t.RowBytes(dim))}, nil
}

// Scales locates the scales of a conversion's rows. Table has a float32 for each of Rows nodes, and
// Nodes has the node of each row to convert (int64). Row types without scales take the zero value.
type Scales struct {
	Nodes, Table cuda.DevicePtr
	Rows         int64
}

// Convert enqueues the conversion of rows adjacent rows at src to dst, which has room for rows ×
// dim float32; both are aligned to 4 bytes.
func (c *Converter) Convert(st cuda.Stream, dst, src cuda.DevicePtr, rows int64, s Scales) error {
	if rows < 0 || rows > math.MaxInt64/(4*int64(c.dim)) || (dst|src)%4 != 0 {
		return fmt.Errorf("cache: conversion of %d rows from %#x to %#x", rows, src, dst)
	}
	if rows == 0 {
		return nil
	}
	if c.t.Scaled() && (s.Nodes == 0 || s.Table == 0 || s.Nodes%8 != 0 || s.Table%4 != 0) {
		return fmt.Errorf("cache: conversion of %d rows of %s: nodes at %#x, scales at %#x", rows,
			c.t, s.Nodes, s.Table)
	}
	p := convertParams{Src: src, Dst: dst, Nodes: s.Nodes, Scales: s.Table, Rows: rows,
		RowBytes: c.rowBytes, Dim: int64(c.dim), Table: s.Rows, Type: uint32(c.t)}
	share := int64(16 << 10) // as in Gather
	if c.dev.Info().Backend == "host" {
		share = 64 << 10
	}
	blocks := min(max(rows*4*int64(c.dim)/grain(c.dev, share), 1), 4*int64(c.dev.Info().SMs))
	if err := cuda.Launch(st, c.kernel, cuda.LaunchConfig{Blocks: int(blocks), Threads: threads},
		p); err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	return nil
}
