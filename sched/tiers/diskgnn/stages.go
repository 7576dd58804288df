package diskgnn

import (
	"context"
	"fmt"
	"time"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/units"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/report"
)

// stages are the stages of a walk over mini-batches that were laid out beforehand.
type stages struct {
	*Tiers
	engine.SlotStages
}

// Lookup implements engine.Stages: it reads and lists the places of a mini-batch's rows.
func (a *stages) Lookup(_ context.Context, w *engine.Work) error {
	e, p, s := a.Engine, a.Walk.Pass, w.Slot
	if w.Count == 0 {
		return nil
	}
	g := &s.Segments[0]
	s.Used = 1
	g.Begin(w)
	begin, from := e.Trace.Now(), time.Now()
	o, ok := s.Part.(*slot)
	if !ok {
		o = &slot{}
		s.Part = o
	}
	pack, l := a.now, &o.assembly
	if err := pack.batch(a.first+s.Index, &o.batch); err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	ssds := max(len(pack.pages.SSDs), 1)
	section := hostcpu.Begin()
	err := a.ranked.Assemble(l, &o.batch, pack.shape, ssds, w.Count)
	section.End(hostcpu.Lookups)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	p.Clock.LookedUp(time.Since(from))
	g.RowsGPU, g.RowsCPU, g.RowsSSD, g.Moved = l.NGPU, l.NCPU, l.NPaged, w.Count
	shared := uint32((o.batch.ReadPages - o.batch.ChunkPages) * pack.shape.RowsPerPage)
	for _, place := range o.batch.Slot {
		if place >= shared {
			g.Chunk++
		}
	}
	e.Trace.Op(report.TrackLookup, plan.OperatorName("L", w.Hop), begin, p, s.Index, w.Count)
	if l.Pages == 0 {
		return nil
	}
	size := l.Pages * pack.shape.PageBytes
	if err := a.stage(o, size); err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	g.Ask(l.Pages, &gpuio.ReadSet{
		Rows: l.Page, Pos: l.Place, SSDOffset: l.SSDOffset,
		Dst: o.staging, DstStride: pack.shape.PageBytes, DstBytes: size,
	})
	return nil
}

// stage makes the staging buffer of a slot hold the pages of any mini-batch, at least so many
// bytes. No read of the slot is in flight.
func (a *stages) stage(s *slot, bytes int64) error {
	if s.staging != nil && s.staging.Size() >= bytes {
		return nil
	}
	if b := s.staging; b != nil {
		s.staging = nil
		if err := gpuio.Forget(a.Engine.Store.Reader, b); err != nil {
			return err
		}
		if err := b.Free(); err != nil {
			return err
		}
	}
	bytes = max(bytes, a.now.most*a.now.shape.PageBytes)
	b, err := a.Engine.Device.Alloc(cuda.MemDevice, bytes, "packed pages")
	if err != nil {
		return fmt.Errorf(
			"the pages of a mini-batch, up to %s in each of %d slots: %w; lower %v or %v",
			units.FormatBytes(bytes), a.Engine.Plan.Credits, err, errs.Key("prefetch-depth"),
			errs.Key("gpu-cache"))
	}
	s.staging = b
	return nil
}

// Gather enqueues two gathers: of rows that stay in memory, and of those in pages.
func (a *stages) Gather(_ context.Context, w *engine.Work) error {
	e, g, s := a.Engine, w.Segment, w.Slot
	if g == nil {
		return nil
	}
	o := s.Part.(*slot)
	err := a.ranked.GatherHot(e.GatherStream, &o.assembly, s.Features.Ptr(), e.RowBytes)
	if err == nil && g.Asked > 0 {
		err = a.ranked.GatherPages(e.GatherStream, &o.assembly, o.staging.Ptr(), s.Features.Ptr(),
			e.RowBytes)
	}
	return err
}
