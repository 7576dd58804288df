package engine

import (
	"context"
	"fmt"
)

// SlotStages are the stages of a walk over tiers whose rows a batch has a feature tensor for from
// its first sample on: what such tiers have in common.
//
//	sample ──work──▶ look up, submit ──slot──▶ complete, gather ──slot──▶ train
type SlotStages struct {
	Walk      *Walk
	submitted chan *Slot
	// FindRows runs L and I for a part.
	FindRows func(ctx context.Context, w Work) error
	// GatherRows enqueues G for a batch whose reads have ended, and records the slot's ready behind
	// it; nil: findRows did.
	GatherRows func(s *Slot) error
}

// NewSlotStages makes the stages of a walk; who embeds them sets FindRows.
func NewSlotStages(w *Walk) SlotStages {
	return SlotStages{Walk: w, submitted: make(chan *Slot, w.most)}
}

// Room grows the feature tensor for the rows of the next part.
func (a *SlotStages) Room(s *Slot, rows int64) error { return a.Walk.grow(s, rows) }

// Admit looks up what the sampler hands on, and hands on the batches whose reads are all out.
func (a *SlotStages) Admit(ctx context.Context, parts <-chan Work) error {
	defer close(a.submitted)
	for w := range parts {
		if ctx.Err() != nil {
			continue // drain: the sampler never blocks on us
		}
		if err := a.FindRows(ctx, w); err != nil {
			return err
		}
		if w.Last {
			a.submitted <- w.Slot
		}
	}
	return nil
}

// Deliver waits for the rows of one batch after the other.
func (a *SlotStages) Deliver(ctx context.Context, ready chan<- *Slot) error {
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
func (a *SlotStages) complete(ctx context.Context, s *Slot) error {
	e := a.Walk.Engine
	rd, end := e.ReadContext(ctx)
	defer end()
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	for i := range s.Segments[:s.Used] {
		if g := &s.Segments[i]; g.pending != nil {
			if err := a.Walk.wait(rd, s, g); err != nil {
				return err
			}
		}
	}
	var err error
	if a.GatherRows != nil {
		err = a.GatherRows(s)
	}
	if err == nil {
		err = s.Ready.Synchronize(op)
	}
	if err != nil {
		return fmt.Errorf("batch %d: gather: %w", s.Index, err)
	}
	return e.Trace.Gathers(a.Walk.Pass, s)
}

// Release implements Stages.
func (a *SlotStages) Release(*Slot) {}
