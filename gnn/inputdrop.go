package gnn

import (
	"unsafe"

	"helios/cuda"
)

// inputLayer is the layer number in the counters of the input's dropout mask; hidden layers stay
// below it.
const inputLayer = 255

// dropInputParams is the parameter block of drop_input.
type dropInputParams struct {
	X          cuda.DevicePtr // float32[Rows, Cols], in place
	Rows, Cols int64
	Drop       dropout
}

const (
	_ = uint(unsafe.Sizeof(dropInputParams{}) - 56)
	_ = uint(56 - unsafe.Sizeof(dropInputParams{}))
)

func init() { cuda.RegisterHost("drop_input", dropInput) }

// dropInput drops and scales elements of the rows that a batch trains on, where they stand: the
// first layer's backward pass needs them that way too. Element (row, col) is chosen like a hidden
// one, by the row's place in the frontier, so that neither workers nor caches nor modes change the
// mask. It reads and writes Rows × Cols × 4 bytes.
func dropInput(b *cuda.Block, p *dropInputParams) error {
	x := cuda.View[float32](p.X, p.Rows*p.Cols)
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		p.Drop.apply(b.SIMD(), x[i*p.Cols:(i+1)*p.Cols], i, 0)
	}
	return nil
}

// dropInput enqueues the dropout of the rows x that were read.
func (s *step) dropInput(x cuda.DevicePtr, rows int64) error {
	cols := s.stride
	return launch(s, "drop_input", s.blocks(rows, 16, rows*cols/gpuItems),
		dropInputParams{X: x, Rows: rows, Cols: cols,
			Drop: s.drop(s.cfg.FeatureDropout, inputLayer)})
}
