package virtual

import (
	"context"

	"helios/cache"
	"helios/cache/trace"
	"helios/gpuio"
	"helios/sched/cost"
	"helios/sched/prepare"
	"helios/sched/report"
)

// A trace of a modelled run (plan.Config.Trace). The accesses are real, so the file is the one that
// a run with SSDs of this number and block size would write. That run ends with a test pass, which
// is not played here; its accesses are recorded in no time.

// recorder records a modelled run.
type recorder struct {
	v *run
	prepare.Recording
}

// tiers adds to a trace's header what is known of the tiers. gpu is the rows that a GPU tier
// without lines holds.
func (r *recorder) tiers(gpu int64) func(*trace.Header) cache.Placement {
	v := r.v
	return func(h *trace.Header) cache.Placement {
		if v.dyn == nil {
			h.GPULines, h.RowsPerLine = gpu, 1
			return v.placement
		}
		c := v.dyn.Config()
		h.GPULines, h.LineBytes, h.RowsPerLine = c.Slots, v.lines.LineBytes, v.lines.RowsPerLine
		h.Directory = c.Directory
		return cache.Placement{CPU: c.CPU}
	}
}

// super records that a superbatch begins.
func (r *recorder) super(x *vsuper) error {
	v, t := r.v, r.v.planned
	return r.Superbatch(trace.Superbatch{Kind: v.src.kind, Epoch: v.src.epoch, First: x.first,
		Batches: x.end - x.first, GPURows: t.tiers.GPURows, CPURows: t.tiers.CPURows,
		Kept: x.kept})
}

// test records the test pass. No figure of the run counts it.
func (r *recorder) test(ctx context.Context) error {
	v := r.v
	test, err := v.In.Dataset.Split("test")
	if err != nil || !r.On() || v.Config.NoEval || len(test) == 0 {
		return err
	}
	order := prepare.NewOrder(test, v.Config.Batch)
	v.src = source{kind: trace.Test, key: prepare.TestEpoch, n: order.Len(), order: order}
	read := append([]gpuio.Planned(nil), v.perSSD...)
	var sum report.Partial
	if v.planned != nil {
		info := v.planned.info
		err = r.supers(ctx, &sum)
		v.planned.info = info
	} else {
		err = lookUp(0, order.Len(), &sum, func(i int) (*cost.Shape, error) {
			if err := prepare.Interrupted(ctx); err != nil {
				return nil, err
			}
			return v.shape(ctx, i)
		})
	}
	v.perSSD = read
	if err != nil {
		return err
	}
	return r.Live(v.src.kind, v.src.epoch, sum)
}

// lookUp looks mini-batches up that are played by nobody.
func lookUp(first, end int, sum *report.Partial,
	shape func(i int) (*cost.Shape, error)) error {
	for i := first; i < end; i++ {
		s, err := shape(i)
		if err != nil {
			return err
		}
		count(sum, &vbatch{Shape: s})
	}
	return nil
}

// supers looks the superbatches of a pass up.
func (r *recorder) supers(ctx context.Context, sum *report.Partial) error {
	v, t, n := r.v, r.v.planned, r.v.src.n
	size := v.Config.SuperbatchMost(n)
	for first := 0; first < n; first += size {
		x := &vsuper{first: first, from: first, end: min(first+size, n)}
		if err := v.makeSuper(ctx, x, "test"); err != nil {
			return err
		}
		t.after = &x.changes.After
		if err := r.super(x); err != nil {
			return err
		}
		rows := t.firstRows(x)
		sum.RowsLoaded += int64(len(rows[0]) + len(rows[1]))
		_, bytes := planSets(ctx, v, rows[:], func([]int64, int64) {})
		sum.BytesSSD += bytes
		if err := lookUp(x.first, x.end, sum, func(i int) (*cost.Shape, error) {
			return v.plannedShape(x, i)
		}); err != nil {
			return err
		}
		if err := t.drop(x); err != nil {
			return err
		}
	}
	return nil
}
