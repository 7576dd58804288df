package sched

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
func (s *store) openScales(ctx context.Context) (err error) {
	of := s.of
	if !of.RowType.Scaled() {
		return nil
	}
	if s.scales, err = of.Device.Alloc(cuda.MemPinned, of.ScaleBytes(),
		"scales of rows"); err != nil {
		return fmt.Errorf("the scales of %d rows of %s (%s): %w; free memory, or load rows of float16",
			of.Rows, of.RowType, units.FormatBytes(of.ScaleBytes()), err)
	}
	err = stripe.Scales(ctx, of.In.Dataset, s.ssds, s.allScales())
	if stopped := prepare.Interrupted(ctx); err != nil && stopped != nil {
		return stopped
	}
	return err
}

// closeScales frees them.
func (s *store) closeScales() error {
	if s.scales == nil {
		return nil
	}
	return s.scales.Free()
}

// allScales are the scales by row; nil where rows have none.
func (s *store) allScales() []float32 {
	if s.scales == nil {
		return nil
	}
	return hostmem.View[float32](s.scales.Bytes())[:s.of.Rows]
}

// scalesAt says where the scales of all rows lie for a device; the zero value where rows have none.
// free, which may be nil, ends that.
func (s *store) scalesAt(dev cuda.Device) (at cache.Scales, free func() error, err error) {
	if s.scales == nil {
		return at, nil, nil
	}
	b := s.scales
	if dev != s.of.Device && dev.Info().Backend != "host" {
		if b, err = cuda.Share(dev, s.scales); err != nil {
			return at, nil, err
		}
		free = b.Free
	}
	return cache.Scales{Table: b.Ptr(), Rows: s.of.Rows}, free, nil
}

// namesNodes tells whether the nodes of a mega-batch's frontier get the dataset's numbers before it
// trains: somebody asks for them, or a replica that has its own copies looks their scales up.
func namesNodes(e *engine) bool {
	if e.verify != nil || e.Config.OnRows != nil || e.Config.OnBatch != nil {
		return true
	}
	for _, r := range otherReplicas(e) {
		if r.mirror != nil && e.store.scales != nil {
			return true
		}
	}
	return false
}
