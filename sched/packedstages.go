package sched

import (
	"context"
	"fmt"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/report"
)

// packedStages are the stages of a walk over mini-batches that were laid out beforehand:
//
//	restore ──work──▶ find places, submit pages ──slot──▶ complete, gather twice ──slot──▶ train
type packedStages struct {
	*packedTiers
	slotStages
}

// lookup runs L and I for a mini-batch: the places of its rows are read and listed, and the reads
// of its pages go out.
func (a *packedStages) lookup(ctx context.Context, w work) error {
	e, p, s := a.e, a.w.p, w.s
	if !e.turn.take(ctx) {
		return nil
	}
	defer e.turn.end()
	if w.count == 0 {
		return nil
	}
	g := &s.segs[0]
	s.used = 1
	g.begin(w)
	begin, from := e.trace.now(), time.Now()
	if s.assembly == nil {
		s.assembly = &cache.Assembly{}
	}
	pack, l := a.now, s.assembly
	if err := pack.batch(a.first+s.index, &s.at); err != nil {
		return fmt.Errorf("batch %d: %w", s.index, err)
	}
	ssds := max(len(pack.pages.ssds), 1)
	section := hostcpu.Begin()
	err := a.ranked.Assemble(l, &s.at, pack.shape, ssds, w.count)
	section.End(hostcpu.Lookups)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.index, err)
	}
	p.clock.lookedUp(time.Since(from))
	g.ngpu, g.ncpu, g.nmiss, g.moved = l.NGPU, l.NCPU, l.NPaged, w.count
	g.pages = l.Pages
	shared := uint32((s.at.ReadPages - s.at.ChunkPages) * pack.shape.RowsPerPage)
	for _, at := range s.at.Slot {
		if at >= shared {
			g.chunk++
		}
	}
	e.trace.op(report.TrackLookup, plan.OperatorName("L", w.hop), begin, p, s.index, w.count)
	if g.pages == 0 {
		return nil
	}
	if e.store.reader == nil {
		return fmt.Errorf("batch %d: %d pages are to be read and no SSD is open", s.index, g.pages)
	}
	size := g.pages * pack.shape.PageBytes
	if err := a.stage(s, size); err != nil {
		return fmt.Errorf("batch %d: %w", s.index, err)
	}
	rd, end := e.ReadContext(ctx)
	defer end()
	g.submitted = time.Now()
	if g.pending, err = e.store.reader.Submit(rd, &gpuio.ReadSet{
		Rows: l.Page, Pos: l.Place, SSDOffset: l.SSDOffset,
		Dst: s.staging, DstStride: pack.shape.PageBytes, DstBytes: size,
	}); err != nil {
		return fmt.Errorf("batch %d: %w", s.index, readError(err))
	}
	e.trace.read(g.pages)
	if e.plan.Serial {
		return a.w.wait(rd, s, g)
	}
	return nil
}

// stage makes the staging buffer of a slot hold the pages of any mini-batch, at least so many
// bytes. No read of the slot is in flight.
func (a *packedStages) stage(s *slot, bytes int64) error {
	if s.staging != nil && s.staging.Size() >= bytes {
		return nil
	}
	if b := s.staging; b != nil {
		s.staging = nil
		if err := gpuio.Forget(a.e.store.reader, b); err != nil {
			return err
		}
		if err := b.Free(); err != nil {
			return err
		}
	}
	bytes = max(bytes, a.now.most*a.now.shape.PageBytes)
	b, err := a.e.Device.Alloc(cuda.MemDevice, bytes, "packed pages")
	if err != nil {
		return fmt.Errorf(
			"the pages of a mini-batch, up to %s in each of %d slots: %w; lower %v or %v",
			units.FormatBytes(bytes), a.e.plan.Credits, err, errs.Key("prefetch-depth"),
			errs.Key("gpu-cache"))
	}
	s.staging = b
	return nil
}

// gather enqueues a batch's two gathers: of rows that stay in memory, and of those in its pages.
func (a *packedStages) gather(s *slot) error {
	e := a.e
	for i := range s.segs[:s.used] {
		g := &s.segs[i]
		err := e.trace.mark(e.gatherS, g.gatherFrom)
		if err == nil {
			err = a.ranked.GatherHot(e.gatherS, s.assembly, s.x.Ptr(), e.RowBytes)
		}
		if err == nil && g.pages > 0 {
			err = a.ranked.GatherPages(e.gatherS, s.assembly, s.staging.Ptr(), s.x.Ptr(),
				e.RowBytes)
		}
		if err == nil {
			err = e.trace.mark(e.gatherS, g.gatherTo)
		}
		if err != nil {
			return err
		}
	}
	return e.gatherS.Record(s.ready)
}
