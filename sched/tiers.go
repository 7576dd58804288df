package sched

import (
	"context"
	"time"

	"helios/cache"
	"helios/cache/trace"
	"helios/cuda"
	"helios/gpuio"
	"helios/sched/prepare"
	"helios/sched/report"
)

// featureTiers are where a run's rows live, and how the rows of a mini-batch get from there into
// its feature tensor. A way to keep rows is one implementation. Calls are for a run, a walk, a
// mini-batch or a part of one, never for a row.
type featureTiers interface {
	// place makes the tiers by engine.tiers and fills them, for which it opens the I/O stack. It
	// leaves the stack open for rows or lines as layout says, or closed where no batch will read.
	// After close it may be called again.
	place(ctx context.Context) error
	// close frees the tiers. Nothing may be in flight.
	close() error
	layout() gpuio.Layout
	// credit adds a feature tensor for a mini-batch in flight.
	credit(x cuda.Growable) error
	// places tells whether a consumer's memory may take a feature tensor's place.
	places() bool
	// lookahead is how many batches beyond the one that is looked up must have been sampled.
	lookahead() int

	// shuffled is the order of an epoch of training under the number of its samples.
	shuffled(train []int64, sampleEpoch int) prepare.Order
	// prepare does what comes before a walk from p.first on, and says where that walk has to end,
	// at the latest at end.
	prepare(ctx context.Context, p *pass, end int) (int, error)
	// beside is how long the tiers have been busy since the run began with operators that are no
	// walk's.
	beside() report.StageSeconds
	// begin makes the stages of a walk.
	begin(w *walk) stages
	// drain waits for what a walk left in flight outside of its slots. settle then ends what it
	// left in the tiers.
	drain(rd context.Context) error
	settle() error
	// forget drops what lookahead has told the tiers: it will be sampled again.
	forget()

	// gpuBytes and cpuBytes are the sizes of the tiers. describe and record say in results and in a
	// trace what the tiers are; record returns the rows that never move.
	gpuBytes() int64
	cpuBytes() int64
	describe(r *report.RunInfo)
	record(h *trace.Header) cache.Placement
	// batchBytes is the device memory that batches of so many rows take beside their feature
	// tensors, and how many batches are sampled at once.
	batchBytes(rows int64) (bytes, samples int64)
}

// stages are what a walk does between sampling and training. admit and deliver run at the same
// time, each on a goroutine of its own, until their input ends; when the walk stops early ctx ends,
// and they return soon without an error.
type stages interface {
	// room is called before a part of a batch's frontier that ends at so many rows is handed on.
	room(s *slot, rows int64) error
	// admit looks parts up and sends the reads of their misses out.
	admit(ctx context.Context, parts <-chan work) error
	// deliver sends the batches on whose rows are all in place, in their order.
	deliver(ctx context.Context, ready chan<- *slot) error
	// release takes back what a batch that has trained held, its slot aside.
	release(s *slot)
}

// newTiers makes the tiers of the run's policy. They hold nothing yet.
func (e *engine) newTiers() (featureTiers, error) {
	if e.Config.Dynamic() {
		return newDynamicTiers(e)
	}
	if e.Config.LaidOut() {
		return newPackedTiers(e), nil
	}
	if e.Config.MegaBatched() {
		return newMegaTiers(e), nil
	}
	if e.Config.Superbatched() {
		return newPlannedTiers(e), nil
	}
	return &staticTiers{e: e}, nil
}

// place decides where each row lives, by e.tiers, and fills the tiers from the SSDs. Where the
// device's memory does not suffice the GPU tier gets smaller.
func (e *engine) place(ctx context.Context) error {
	err := e.features.place(ctx)
	if err == nil {
		err = e.rec.Placed(e.store.layout, e.features.record)
	}
	if err != nil && prepare.Interrupted(ctx) == nil {
		return overdue(e.shrink(ctx, err))
	}
	return err
}

// hooks are what the engine adds to the choice of rows.
func (e *engine) hooks() prepare.Hooks {
	h := prepare.Hooks{Measure: e.measured,
		Found: func(start time.Time) { e.trace.run("presample", start) }}
	if e.rec.On() {
		h.Scores = e.rec.KeepScores
	}
	return h
}

// filled counts the time that filling the tiers took.
func (e *engine) filled(start time.Time) {
	e.fill += time.Since(start)
	e.trace.run("fill tiers", start)
}
