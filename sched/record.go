package sched

import (
	"context"
	"errors"
	"fmt"

	"helios/cache/trace"
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/outfile"
	"helios/sched/prepare"
)

// recording is a run's trace (Config.Trace). The accesses of each lookup are written in the order
// in which the tiers see them, so a replay asks its policies what the run's own was asked. Without
// a trace it does nothing.
type recording struct {
	of     *prepare.Sampling
	w      *trace.Writer
	scores []uint32 // what the tiers were placed by, until the trace begins
	rows   prepare.Stager
}

// on tells whether accesses are recorded.
func (r *recording) on() bool { return r.of.Config.Trace != "" }

// check finds out before the long work whether the trace can be written.
func (r *recording) check() error {
	if !r.on() {
		return nil
	}
	return r.named(outfile.Check("trace", r.of.Config.Trace, r.of.Config.Overwrite))
}

// keepScores keeps what the static tiers are placed by for the trace: a score for each row, which
// the caller leaves alone from here on.
func (r *recording) keepScores(scores []uint32) error {
	if r.w == nil {
		r.scores = scores
	}
	return nil
}

// placed makes the trace once the tiers are placed. After a shrink it notes that they were placed
// anew.
func (r *recording) placed(l gpuio.Layout, tiers featureTiers) (err error) {
	if !r.on() {
		return nil
	}
	s := r.of
	h := trace.Header{
		Dataset: s.In.Dataset.Meta.UUID, Name: s.In.Dataset.Meta.Name, Rows: s.Rows,
		RowBytes: s.RowBytes, SSDs: int64(l.SSDs),
		SlotBytes: int64(l.LBABytes) * int64(l.LBAsPerRow) / int64(l.RowsPerLBA),
		LBABytes:  int64(l.LBABytes),
		Seed:      s.Config.Seed, Sampler: s.Config.Sampler, Batch: int64(s.Config.Batch),
		BatchDependency: int64(s.Config.BatchDependency),
		Mode:            s.Config.Mode, IOStack: s.Config.IOStack, Policy: s.Config.Policy,
		Window: int64(s.Config.Window),
	}
	if s.Config.Planned() {
		h.SuperbatchFill = s.Config.SuperbatchFill
	}
	rows := tiers.record(&h)
	h.CPURows = int64(len(rows.CPU))
	if r.w != nil {
		if err := r.w.Reset(h.GPULines); err != nil {
			return r.named(err)
		}
		return r.named(r.w.Place(rows.GPU, rows.CPU))
	}
	for _, f := range s.Config.Fanouts {
		h.Fanouts = append(h.Fanouts, int64(f))
	}
	if s.Hotness != nil {
		h.HotnessBy = s.Hotness.By
	}
	if r.w, err = trace.Create(s.Config.Trace, h, s.Config.Overwrite); err != nil {
		r.w = nil
		return r.named(err)
	}
	scores := r.scores
	r.scores = nil
	if err := r.w.Hotness(scores); err != nil {
		return r.named(err)
	}
	return r.named(r.w.Place(rows.GPU, rows.CPU))
}

// named names the file.
func (r *recording) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("option trace %s: %w", r.of.Config.Trace, err)
}

// begin begins a batch's accesses.
func (r *recording) begin(p *pass, index int) error {
	if r.w == nil {
		return nil
	}
	return r.named(r.w.Begin(p.kind, p.number, index))
}

// superbatch begins the accesses of a superbatch.
func (r *recording) superbatch(p *pass, s trace.Superbatch) error {
	if r.w == nil {
		return nil
	}
	s.Kind, s.Epoch = p.kind, p.number
	return r.named(r.w.Superbatch(s))
}

// part records a lookup.
func (r *recording) part(op context.Context, st cuda.Stream, nodes cuda.DevicePtr, first,
	count int64) error {
	if r.w == nil {
		return nil
	}
	rows, err := r.of.HostRows(op, &r.rows, st, nodes, first, count)
	if err != nil {
		return err
	}
	return r.named(r.w.Part(rows))
}

// live records what a whole pass came to, of the batches that this run trained.
func (r *recording) live(p *pass) error {
	if r.w == nil {
		return nil
	}
	s, b := p.stats, p.base
	bytes := s.BytesSSD - b.BytesSSD
	if s.Retries != b.Retries { // what was read again is no part of what the accesses ask for
		bytes = 0
	}
	return r.named(r.w.Live(trace.Live{
		Kind: p.kind, Epoch: p.number, Batches: int64(s.Batches - b.Batches),
		RowsGPU: s.RowsGPU - b.RowsGPU, RowsCPU: s.RowsCPU - b.RowsCPU, RowsSSD: s.RowsSSD -
			b.RowsSSD, BytesSSD: bytes,
		Inserted: s.Inserted - b.Inserted, Evicted: s.Evicted - b.Evicted, Bypassed: s.Bypassed -
			b.Bypassed,
	}))
}

// close leaves nothing of a trace that has not come to its end.
func (r *recording) close() error {
	w, rows := r.w, r.rows.Close()
	r.w, r.scores = nil, nil
	if w == nil {
		return rows
	}
	return errors.Join(r.named(w.Discard()), rows)
}

// end gives the trace its name, where the run came to its end or was interrupted; else nothing is
// left of it.
func (r *recording) end(err error) error {
	w := r.w
	r.w, r.scores = nil, nil
	if w == nil {
		return err
	}
	if err != nil && errs.ClassOf(err) != errs.Interrupted {
		return errors.Join(err, r.named(w.Discard()))
	}
	return errors.Join(err, r.named(w.Close()))
}
