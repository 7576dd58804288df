package sched

import (
	"context"
	"fmt"
)

// slotStages are the stages of a walk over tiers whose rows a batch has a feature tensor for from
// its first sample on: what such tiers have in common.
//
//	sample ──work──▶ look up, submit ──slot──▶ complete, gather ──slot──▶ train
type slotStages struct {
	w         *walk
	submitted chan *slot
	// findRows runs L and I for a part.
	findRows func(ctx context.Context, w work) error
	// gatherRows enqueues G for a batch whose reads have ended, and records the slot's ready behind
	// it; nil: findRows did.
	gatherRows func(s *slot) error
}

func newSlotStages(w *walk) slotStages {
	return slotStages{w: w, submitted: make(chan *slot, w.most)}
}

// room grows the feature tensor for the rows of the next part.
func (a *slotStages) room(s *slot, rows int64) error { return a.w.grow(s, rows) }

// admit looks up what the sampler hands on, and hands on the batches whose reads are all out.
func (a *slotStages) admit(ctx context.Context, parts <-chan work) error {
	defer close(a.submitted)
	for w := range parts {
		if ctx.Err() != nil {
			continue // drain: the sampler never blocks on us
		}
		if err := a.findRows(ctx, w); err != nil {
			return err
		}
		if w.last {
			a.submitted <- w.s
		}
	}
	return nil
}

// deliver waits for the rows of one batch after the other.
func (a *slotStages) deliver(ctx context.Context, ready chan<- *slot) error {
	for s := range a.submitted {
		if ctx.Err() != nil {
			continue
		}
		if err := a.complete(ctx, s); err != nil {
			return err
		}
		ready <- s
	}
	return nil
}

// complete runs C and G for a batch: it holds it until all of its rows are in place.
func (a *slotStages) complete(ctx context.Context, s *slot) error {
	e := a.w.e
	rd, end := e.ReadContext(ctx)
	defer end()
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	for i := range s.segs[:s.used] {
		if g := &s.segs[i]; g.pending != nil {
			if err := a.w.wait(rd, s, g); err != nil {
				return err
			}
		}
	}
	var err error
	if a.gatherRows != nil {
		err = a.gatherRows(s)
	}
	if err == nil {
		err = s.ready.Synchronize(op)
	}
	if err != nil {
		return fmt.Errorf("batch %d: gather: %w", s.index, err)
	}
	return e.trace.gathers(a.w.p, s)
}

func (a *slotStages) release(*slot) {}
