package sched

import (
	"context"
	"errors"
	"fmt"

	"helios/cache/trace"
	"helios/cuda"
	"helios/internal/errs"
)

// recording is a run's trace (Config.Trace). The accesses of each lookup are written in the order in which the tiers
// see them, so a replay asks its policies what the run's own was asked.
type recording struct {
	w      *trace.Writer
	scores []uint32 // what the tiers were placed by, until the trace begins
	rows   stager
}

// tracing tells whether accesses are recorded.
func (e *engine) tracing() bool { return e.cfg.Trace != "" }

// recordScores keeps what the static tiers are placed by for the trace: a score for each row, which the caller leaves
// alone from here on.
func (e *engine) recordScores(scores []uint32) error {
	if e.tracing() && e.rec.w == nil {
		e.rec.scores = scores
	}
	return nil
}

// beginTrace makes the trace once the tiers are placed. After a shrink it notes that they were placed anew.
func (e *engine) beginTrace() (err error) {
	if !e.tracing() {
		return nil
	}
	gpuLines := e.tiers.gpuRows
	if e.cfg.dynamic() {
		gpuLines = e.dyn.Config().Slots
	}
	if e.rec.w != nil {
		if err := e.rec.w.Reset(gpuLines); err != nil {
			return e.traced(err)
		}
		return e.tracePlacement()
	}
	l := e.layout
	h := trace.Header{
		Dataset: e.in.Dataset.Meta.UUID, Name: e.in.Dataset.Meta.Name, Rows: e.rows, RowBytes: e.rowBytes, SSDs: int64(l.SSDs),
		SlotBytes: int64(l.LBABytes) * int64(l.LBAsPerRow) / int64(l.RowsPerLBA), LBABytes: int64(l.LBABytes),
		Seed: e.cfg.Seed, Sampler: e.cfg.Sampler, Batch: int64(e.cfg.Batch), Mode: e.cfg.Mode, IOStack: e.cfg.IOStack, Policy: e.cfg.Policy,
		GPULines: gpuLines, RowsPerLine: 1, CPURows: e.tiers.cpuRows, Window: int64(e.cfg.Window),
	}
	for _, f := range e.cfg.Fanouts {
		h.Fanouts = append(h.Fanouts, int64(f))
	}
	if e.hotness != nil {
		h.HotnessBy = e.hotness.By
	}
	if e.cfg.dynamic() {
		h.LineBytes, h.RowsPerLine = e.dyn.lines.LineBytes, e.dyn.lines.RowsPerLine
	}
	if e.rec.w, err = trace.Create(e.cfg.Trace, h, e.cfg.Overwrite); err != nil {
		e.rec.w = nil
		return e.traced(err)
	}
	scores := e.rec.scores
	e.rec.scores = nil
	if err := e.rec.w.Hotness(scores); err != nil {
		return e.traced(err)
	}
	return e.tracePlacement()
}

// tracePlacement records what the static tiers hold.
func (e *engine) tracePlacement() error {
	if e.cfg.dynamic() {
		return e.traced(e.rec.w.Place(nil, e.dyn.Config().CPU))
	}
	return e.traced(e.rec.w.Place(e.placement.GPU, e.placement.CPU))
}

// traced names the file.
func (e *engine) traced(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("--trace %s: %w", e.cfg.Trace, err)
}

// traceBegin begins a batch's accesses.
func (e *engine) traceBegin(p *pass, index int) error {
	if e.rec.w == nil {
		return nil
	}
	return e.traced(e.rec.w.Begin(p.kind, p.number, index))
}

// tracePart records a lookup.
func (e *engine) tracePart(op context.Context, nodes cuda.DevicePtr, first, count int64) error {
	if e.rec.w == nil {
		return nil
	}
	rows, err := e.hostRows(op, &e.rec.rows, e.lookupS, nodes, first, count)
	if err != nil {
		return err
	}
	return e.traced(e.rec.w.Part(rows))
}

// traceLive records what a whole pass came to, of the batches that this run trained.
func (e *engine) traceLive(p *pass) error {
	if e.rec.w == nil {
		return nil
	}
	s, b := p.stats, p.base
	bytes := s.BytesSSD - b.BytesSSD
	if s.Retries != b.Retries { // what was read again is no part of what the accesses ask for
		bytes = 0
	}
	return e.traced(e.rec.w.Live(trace.Live{
		Kind: p.kind, Epoch: p.number, Batches: int64(s.Batches - b.Batches),
		RowsGPU: s.RowsGPU - b.RowsGPU, RowsCPU: s.RowsCPU - b.RowsCPU, RowsSSD: s.RowsSSD - b.RowsSSD, BytesSSD: bytes,
		Inserted: s.Inserted - b.Inserted, Evicted: s.Evicted - b.Evicted, Bypassed: s.Bypassed - b.Bypassed,
	}))
}

// closeTrace leaves nothing of a trace that has not come to its end.
func (e *engine) closeTrace() error {
	w := e.rec.w
	e.rec.w, e.rec.scores = nil, nil
	if w == nil {
		return nil
	}
	return e.traced(w.Discard())
}

// endTrace gives the trace its name, where the run came to its end or was interrupted; else nothing is left of it.
func (e *engine) endTrace(err error) error {
	w := e.rec.w
	e.rec.w, e.rec.scores = nil, nil
	if w == nil {
		return err
	}
	if err != nil && errs.ClassOf(err) != errs.Interrupted {
		return errors.Join(err, e.traced(w.Discard()))
	}
	return errors.Join(err, e.traced(w.Close()))
}
