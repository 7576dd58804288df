package prepare

import (
	"context"
	"errors"

	"helios/cache"
	"helios/cache/trace"
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/outfile"
	"helios/sched/report"
)

// Recording is a run's trace (Config.Trace). The accesses of each lookup are written in the order
// in which the tiers see them, so a replay asks its policies what the run's own was asked. Without
// a trace it does nothing. The run that reads and the modelled one have it in common, so that the
// same accesses make the same file.
type Recording struct {
	Of     *Sampling
	w      *trace.Writer
	scores []uint32 // what the tiers were placed by, until the trace begins
	rows   Stager
}

// On reports whether accesses are recorded.
func (r *Recording) On() bool { return r.Of.Config.Trace != "" }

// Check finds out before the long work whether the trace can be written.
func (r *Recording) Check() error {
	if !r.On() {
		return nil
	}
	return r.named(outfile.Check("trace", r.Of.Config.Trace, r.Of.Config.Overwrite))
}

// KeepScores keeps what the static tiers are placed by for the trace: a score for each row, which
// the caller leaves alone from here on.
func (r *Recording) KeepScores(scores []uint32) error {
	if r.w == nil {
		r.scores = scores
	}
	return nil
}

// Placed makes the trace once the tiers are placed over rows that l lays out; tiers adds to its
// header, and returns the rows that static tiers hold. After a shrink it notes that they were
// placed anew.
func (r *Recording) Placed(l gpuio.Layout,
	tiers func(*trace.Header) cache.Placement) (err error) {
	if !r.On() {
		return nil
	}
	s := r.Of
	h := trace.Header{
		Dataset: s.In.Dataset.Meta.UUID, Name: s.In.Dataset.Meta.Name, Rows: s.Rows,
		RowBytes: s.RowBytes, SSDs: int64(l.SSDs),
		SlotBytes: int64(l.LBABytes) * int64(l.LBAsPerRow) / int64(l.RowsPerLBA),
		LBABytes:  int64(l.LBABytes),
		Seed:      s.Config.Seed, Sampler: s.Config.Sampler, Batch: int64(s.Config.Batch),
		BatchDependency: int64(s.Config.BatchDependency),
		Mode:            s.Config.Mode, IOStack: s.Config.IOStack, Policy: s.Config.Policy,
		Window: int64(s.Config.Window), SuperbatchFill: s.Config.SuperbatchFill,
	}
	rows := tiers(&h)
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
func (r *Recording) named(err error) error {
	if err == nil {
		return nil
	}
	return errs.Errorf("{trace} %s: %w", r.Of.Config.Trace, err)
}

// Begin begins a batch's accesses.
func (r *Recording) Begin(kind, epoch, index int) error {
	if r.w == nil {
		return nil
	}
	return r.named(r.w.Begin(kind, epoch, index))
}

// Superbatch begins the accesses of a superbatch.
func (r *Recording) Superbatch(s trace.Superbatch) error {
	if r.w == nil {
		return nil
	}
	return r.named(r.w.Superbatch(s))
}

// Part records a lookup.
func (r *Recording) Part(op context.Context, st cuda.Stream, nodes cuda.DevicePtr, first,
	count int64) error {
	if r.w == nil {
		return nil
	}
	rows, err := r.Of.HostRows(op, &r.rows, st, nodes, first, count)
	if err != nil {
		return err
	}
	return r.Rows(rows)
}

// Rows records a lookup of rows that the CPU sees.
func (r *Recording) Rows(rows []int64) error {
	if r.w == nil {
		return nil
	}
	return r.named(r.w.Part(rows))
}

// Live records what a whole pass came to, of the batches that this run trained.
func (r *Recording) Live(kind, epoch int, s report.Partial) error {
	if r.w == nil {
		return nil
	}
	bytes := s.BytesSSD
	if s.Retries != 0 { // what was read again is no part of what the accesses ask for
		bytes = 0
	}
	return r.named(r.w.Live(trace.Live{
		Kind: kind, Epoch: epoch, Batches: int64(s.Batches),
		RowsGPU: s.RowsGPU, RowsCPU: s.RowsCPU, RowsSSD: s.RowsSSD, BytesSSD: bytes,
		Inserted: s.Inserted, Evicted: s.Evicted, Bypassed: s.Bypassed,
	}))
}

// Close leaves nothing of a trace that has not come to its end.
func (r *Recording) Close() error {
	w, rows := r.w, r.rows.Close()
	r.w, r.scores = nil, nil
	if w == nil {
		return rows
	}
	return errors.Join(r.named(w.Discard()), rows)
}

// End gives the trace its name, where the run came to its end or was interrupted; else nothing is
// left of it.
func (r *Recording) End(err error) error {
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
