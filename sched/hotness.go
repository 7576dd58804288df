package sched

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/cache"
	"helios/graph"
)

// choose presamples where that matters: when a tier has room for some of the rows.
func (e *engine) choose(ctx context.Context, b budgets, in Inputs) (p cache.Placement, err error) {
	if b.gpuRows+b.cpuRows == 0 && !b.auto {
		return p, nil
	}
	h, err := cache.NewHotness(e.dev, e.rows)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	if b.auto || b.gpuRows < e.rows && b.cpuRows < e.rows {
		start := time.Now()
		if err := e.countAccesses(ctx, in, h); err != nil {
			return p, err
		}
		e.presample += time.Since(start)
		e.trace.run("presample", start)
	}
	if b.auto {
		if b, err = e.measured(b, h); err != nil {
			return p, err
		}
	}
	op, cancel := e.opCtx(ctx)
	defer cancel()
	return h.Place(op, e.sampleS, b.gpuRows, b.cpuRows)
}

// countAccesses adds to h how often each row is needed in cfg.Presample epochs of sampling.
func (e *engine) countAccesses(ctx context.Context, in Inputs, h *cache.Hotness) error {
	train, err := in.Dataset.Split("train")
	if err != nil {
		return err
	}
	mb := e.slots[0].mb
	order := make([]int64, len(train))
	last := len(e.cfg.Fanouts)
	total := e.cfg.Presample * batches(len(train), e.cfg.Batch)
	done := 0
	for p := 0; p < e.cfg.Presample; p++ {
		graph.Shuffle(order, train, e.cfg.Seed, presampleEpoch+p)
		for i := 0; i < batches(len(order), e.cfg.Batch); i++ {
			if err := interrupted(ctx); err != nil {
				return err
			}
			if err := e.sampleWhole(ctx, mb, presampleEpoch+p, i, seedsOf(order, i, e.cfg.Batch)); err != nil {
				return fmt.Errorf("presampling, before the first epoch: %w", err)
			}
			if err := h.Add(e.sampleS, mb.Nodes.Ptr(), mb.HopEnd[last]); err != nil {
				return err
			}
			e.seen.add(mb)
			if e.presampled != nil {
				e.presampled(mb)
			}
			done++
			e.obs.step("presample", done, total)
		}
	}
	op, cancel := e.opCtx(ctx)
	defer cancel()
	return e.sampleS.Synchronize(op)
}
