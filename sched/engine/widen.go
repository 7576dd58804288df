package engine

import (
	"helios/cache"
	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/units"
)

// Widener makes rows float32, which training takes, for one batch at a time, right before its
// training and by its stream. The wide rows are the run's, not the slots', so that a batch in
// flight costs its stored bytes. A nil widener is for rows that are stored as float32.
type Widener struct {
	converter *cache.Converter
	x         cuda.Growable
	dim       int64
	scales    cache.Scales // of all rows, by the dataset's numbers of nodes
}

// NewWidener makes room on a device for the rows of a batch, which are stored as t.
func (e *Engine) NewWidener(dev cuda.Device, t rowtype.Type, rows int64) (w *Widener, err error) {
	if t == rowtype.Float32 {
		return nil, nil
	}
	w = &Widener{dim: int64(e.Dim)}
	if w.converter, err = cache.NewConverter(dev, t, e.Dim); err != nil {
		return nil, err
	}
	var free func() error
	if w.scales, free, err = e.Store.scalesAt(dev); err != nil {
		return nil, err
	}
	if free != nil {
		e.OnClose(free)
	}
	bytes := rows * w.dim * 4
	if w.x, err = cuda.Reserve(dev, bytes, "float32 features"); err != nil {
		return nil,
			errs.Errorf(
				"feature tensor of training (%s of address space): %w; lower {batch-size} or {fanout}",
				units.FormatBytes(bytes), err)
	}
	e.OnClose(w.x.Free)
	return w, nil
}

// Widen enqueues the conversion of a batch's rows. They are in of(x) then. Row i is of row number i
// of mb, whose scale is where own says, or, in its zero value, among those of all rows.
func (w *Widener) Widen(st cuda.Stream, mb *graph.MiniBatch, x cuda.Buffer, rows int64,
	own cache.Scales) error {
	if w == nil {
		return nil
	}
	s := w.scales
	if own.Table != 0 {
		s = own
	}
	if s.Table != 0 {
		s.Nodes = mb.RowNumbers().Ptr()
	}
	if err := w.x.Grow(rows * w.dim * 4); err != nil {
		return err
	}
	return w.converter.Convert(st, w.x.Ptr(), x.Ptr(), rows, s)
}

// Of is the feature tensor that a batch trains on, whose rows as they are stored lie in x.
func (w *Widener) Of(x cuda.Buffer) cuda.Buffer {
	if w == nil {
		return x
	}
	return w.x
}
