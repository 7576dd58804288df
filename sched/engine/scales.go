package engine

import (
	"context"
	"fmt"

	"helios/cache"
	"helios/cuda"
	"helios/dataset/stripe"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/sched/prepare"
)

// openScales reads the scales of all rows into pinned memory, where rows have some: kernels that
// widen rows read them there.
func (s *Store) openScales(ctx context.Context) (err error) {
	of := s.of
	if !of.RowType.Scaled() {
		return nil
	}
	if s.ScaleTable, err = of.Device.Alloc(cuda.MemPinned, of.ScaleBytes(),
		"scales of rows"); err != nil {
		return fmt.Errorf("the scales of %d rows of %s (%s): %w; free memory, or load rows of float16",
			of.Rows, of.RowType, units.FormatBytes(of.ScaleBytes()), err)
	}
	err = stripe.Scales(ctx, of.In.Dataset, s.SSDs, s.Scales())
	if stopped := prepare.Interrupted(ctx); err != nil && stopped != nil {
		return stopped
	}
	return err
}

// closeScales frees them.
func (s *Store) closeScales() error {
	if s.ScaleTable == nil {
		return nil
	}
	return s.ScaleTable.Free()
}

// Scales are the scales by row; nil where rows have none.
func (s *Store) Scales() []float32 {
	if s.ScaleTable == nil {
		return nil
	}
	return hostmem.View[float32](s.ScaleTable.Bytes())[:s.of.Rows]
}

// scalesAt gives a device the scales of all rows; the zero value where rows have none.
// free, which may be nil, ends that.
func (s *Store) scalesAt(dev cuda.Device) (at cache.Scales, free func() error, err error) {
	if s.ScaleTable == nil {
		return at, nil, nil
	}
	b := s.ScaleTable
	if dev != s.of.Device && dev.Info().Backend != "host" {
		if b, err = cuda.Share(dev, s.ScaleTable); err != nil {
			return at, nil, err
		}
		free = b.Free
	}
	return cache.Scales{Table: b.Ptr(), Rows: s.of.Rows}, free, nil
}

// NamesNodes reports whether the nodes of a mega-batch's frontier get the dataset's numbers before
// it trains: somebody asks for them, or a replica that has its own copies looks their scales up.
func NamesNodes(e *Engine) bool {
	if e.Verify != nil || e.Config.OnRows != nil || e.Config.OnBatch != nil {
		return true
	}
	return e.Store.ScaleTable != nil && e.consumer.Mirrors()
}
