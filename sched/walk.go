package sched

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// slot is a credit: what one mini-batch in flight needs, from its first sample to the end of its
// training. Over a dynamic tier the feature tensor x is a credit of its own, which a batch has from
// the arrival of its rows on: more batches may be sampled and read than have one.
//
// The feature tensor x is one reservation of address space for the most rows a batch can have:
// min(seeds * product(1 + fanout), nodes). The frontier grows while reads into x are in flight,
// so x must never move; a kernel takes x as one pointer, so it can't be in segments either; and
// pages that no batch touches cost nothing. A device whose memory is not lazy reserves
// addresses and gets the memory as HopEnd grows, between the hops.
type slot struct {
	mb     *graph.MiniBatch
	x      cuda.Growable
	own    cuda.Growable // the engine's, where x may be a consumer's in its place
	labels cuda.Buffer   // int32[batch], written by the CPU
	segs   []segment     // one per hop and one for the seeds
	used   int           // segments of this batch
	ready  cuda.Event    // the gathers are done

	index int
	seeds []int64
	local []int64 // the seeds, as the sampler numbers them
	// where the scales of a mega-batch's rows lie by the sampler's numbers, of a frontier that has
	// them; the zero value: by the dataset's
	scales cache.Scales
	rows   []int64 // the frontier, of a batch that was sampled with its superbatch
	adj    []byte  // its blocks, on their way to mb

	packedSlot
}

// segment is a contiguous part of a frontier whose rows are looked up, read and gathered together.
type segment struct {
	first, count      int64
	hop               int
	ngpu, ncpu, nmiss int64
	moved             int64 // rows that gathering brings to their places
	stats             gpuio.ReadStats
	// Lines that a dynamic tier took in for it, let go for those, and found no place for.
	inserted, evicted, bypassed int64
	gatherFrom, gatherTo        cuda.Event // nil without a timeline

	staticPart
	dynamicPart
	plannedPart
	packedPart
}

// begin makes g a segment for w. What is made once per segment stays.
func (g *segment) begin(w work) {
	was := *g
	*g = segment{first: w.first, count: w.count, hop: w.hop, gatherFrom: was.gatherFrom,
		gatherTo: was.gatherTo}
	g.buckets, g.ticket, g.places = was.buckets, was.ticket, was.places
}

// reads is how many rows or pages the stack is asked for.
func (g *segment) reads() int64 {
	if g.pages > 0 {
		return g.pages
	}
	return g.nmiss
}

// work is a contiguous part of a slot's frontier, on its way from sampling to lookup.
type work struct {
	s *slot
	// as of this part: a later hop may grow the frontier into another buffer
	nodes        cuda.DevicePtr
	first, count int64
	hop          int  // that completed it; 0: the seeds
	last         bool // the batch's last part
}

// walk is one way of a pass through the pipeline, to the first error or to batch end.
type walk struct {
	e      *engine
	p      *pass
	end    int
	most   int        // slots that there can be
	free   chan *slot // credits
	stages stages

	cancel  context.CancelCauseFunc
	once    sync.Once
	failure error // the first
}

// fail ends the walk.
func (w *walk) fail(err error) {
	w.once.Do(func() { w.failure = err; w.cancel(err) })
}

// walk runs until the first error or batch end. still is what could not be brought to an end after
// an error.
func (e *engine) walk(ctx context.Context, p *pass, end int) (err, still error) {
	if err := e.trace.beginPass(ctx, e); err != nil {
		return nil, err
	}
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	most := max(len(e.slots), e.plan.Samples+plan.MaxGroup)
	w := &walk{e: e, p: p, end: end, most: most, free: make(chan *slot, most), cancel: cancel}
	w.stages = e.features.begin(w)
	w.credits()
	parts := make(chan work, most*(len(e.Config.Fanouts)+1))
	ready := make(chan *slot, most)
	var wg sync.WaitGroup
	stage := func(run func() error) {
		wg.Go(func() {
			if err := run(); err != nil {
				w.fail(err)
			}
		})
	}
	from, to := p.first, end // before a batch that an earlier walk left is trained on
	if ahead := e.features.lookahead(); ahead > 0 {
		from, to = p.heard, min(end+ahead, p.n)
	}
	stage(func() error { defer close(parts); return w.sampleAll(inner, from, to, parts) })
	stage(func() error { return w.stages.admit(inner, parts) })
	stage(func() error { defer close(ready); return w.stages.deliver(inner, ready) })
	stage(func() error {
		select {
		case <-e.store.lease.Lost():
			return e.store.lease.Err()
		case <-inner.Done():
			return nil
		}
	})
	if len(e.replicas) > 1 && p.steps != nil {
		w.trainReplicas(inner, ready)
	} else {
		w.train(inner, ready)
	}
	if stopped := prepare.Interrupted(ctx); stopped != nil {
		e.store.stopped = true
		w.fail(stopped)
	}
	cancel(nil)
	wg.Wait()
	still = e.drain(ctx, w.failure == nil)
	return e.store.lease.Blame(ctx, w.failure), still
}

// credits hands the slots out that the plan has now and no earlier walk has left a batch in.
func (w *walk) credits() {
	e := w.e
	held := map[*slot]bool{}
	for _, x := range w.p.waiting {
		held[x.s] = true
	}
	for _, s := range e.slots {
		// Slots may be more than the plan has now; what the accumulator has made is its own.
		if !held[s] && (e.plan.Group || len(w.free)+len(held) < e.plan.Samples) {
			w.free <- s
		}
	}
}

// sampleAll samples the walk's batches, and those that the tiers want to know of beyond.
func (w *walk) sampleAll(ctx context.Context, from, to int, parts chan<- work) error {
	for i := from; i < to; i++ {
		select {
		case s := <-w.free:
			w.e.trace.credit(1)
			if err := w.sample(ctx, s, i, parts); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// train trains on batches as they become whole, and frees their slots.
func (w *walk) train(ctx context.Context, ready <-chan *slot) {
	e := w.e
	for waitFrom := time.Now(); ; waitFrom = time.Now() {
		s, ok := <-ready
		w.p.clock.waited += time.Since(waitFrom)
		if !ok || ctx.Err() != nil || !e.turn.take(ctx) {
			return
		}
		err := w.step(ctx, s)
		e.turn.end()
		if err != nil {
			w.fail(err)
			return
		}
		w.done(s)
	}
}

// done frees the slot of a batch that is counted.
func (w *walk) done(s *slot) {
	w.e.trace.credit(-1)
	w.stages.release(s)
	w.free <- s
}

// sample runs S_1..S_h for batch i and hands the parts of its frontier on.
func (w *walk) sample(ctx context.Context, s *slot, i int, parts chan<- work) error {
	e, p := w.e, w.p
	s.index, s.seeds, s.used = i, p.order.Seeds(i), 0
	if s.own != nil {
		s.x = p.placeOf(i, s.own)
	}
	e.WriteLabels(s.seeds, s.labels)
	if !e.turn.take(ctx) {
		return nil // stopped: run knows why
	}
	defer e.turn.end()
	op, cancel := e.SampleContext(ctx)
	defer cancel()
	begin := e.trace.now()
	var err error
	seeds := s.seeds
	if p.ids != nil {
		s.local = p.ids.seeds(p.order.Index(i), s.local)
		seeds = s.local
	}
	if p.sampled != nil {
		err = p.sampled.restore(op, s, i)
	} else {
		err = p.sampler.Begin(op, e.Stream, s.mb, p.epoch,
			prepare.DrawsOf(p.epoch, p.order.Index(i)), seeds)
	}
	if err != nil {
		return fmt.Errorf("batch %d: %w", i, err)
	}
	hops := len(e.Config.Fanouts)
	from := int64(0)
	if p.sampled != nil {
		e.trace.op(report.TrackSample, plan.NameRestore, begin, p, i, s.mb.HopEnd[hops])
	}
	var later []work
	for h := 0; h <= hops; h++ {
		if h > 0 && p.sampled == nil {
			if ctx.Err() != nil {
				return nil // stopped: run knows why
			}
			if err = p.sampler.Hop(op, e.Stream, s.mb, h-1); err != nil {
				if ctx.Err() != nil && op.Err() != nil {
					return nil // stopped, too
				}
				return fmt.Errorf("batch %d hop %d: %w", i, h, err)
			}
			e.trace.op(report.TrackSample, plan.OperatorName("S", h), begin, p, i, s.mb.HopEnd[h])
			begin = e.trace.now()
		}
		if e.plan.PerHop || h == hops {
			to := s.mb.HopEnd[h]
			if err := w.stages.room(s, to); err != nil {
				return err
			}
			part := work{s, s.mb.Nodes.Ptr(), from, to - from, h, h == hops}
			// a batch is looked up when the tiers have heard of all of it
			if e.features.lookahead() > 0 {
				later = append(later, part)
			} else {
				parts <- part
			}
			from = to
		}
	}
	for _, part := range later {
		part.nodes = s.mb.Nodes.Ptr()
		parts <- part
	}
	return nil
}

// grow makes the feature tensor of a slot, which the batch has from its first sample on, hold so
// many rows. The reads of earlier hops are in flight: what is behind the tensor grows, and it stays
// where it is.
func (w *walk) grow(s *slot, rows int64) error {
	if err := w.e.fits(s.index, rows, s.x.Size()); err != nil {
		return err
	}
	if err := s.x.Grow(rows * w.e.RowBytes); err != nil {
		return fmt.Errorf("batch %d: features of %d rows: %w", s.index, rows, err)
	}
	return nil
}

// wait runs C for a part whose reads go straight into the batch's feature tensor.
func (w *walk) wait(op context.Context, s *slot, g *segment) error {
	e, p := w.e, w.p
	st, err := g.pending.Wait(op)
	if err != nil && op.Err() != nil {
		return errs.New(errs.Device, "batch %d: %d reads did not end within %v: %w",
			s.index, g.reads(), e.Config.OpTimeout, err)
	}
	g.pending = nil
	e.trace.read(-g.reads())
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.index, readError(err))
	}
	if st.Rows != g.reads() {
		return errs.New(errs.Device, "batch %d: %d rows or pages were asked for, %d were read",
			s.index, g.reads(), st.Rows)
	}
	g.stats = st
	p.clock.read(g.submitted, st)
	e.trace.span(report.TrackSubmit, plan.OperatorName("I", g.hop), g.submitted, st.Submit, p,
		s.index, g.nmiss)
	e.trace.span(report.TrackComplete, plan.OperatorName("C", g.hop), g.submitted.Add(st.Submit),
		st.Complete, p, s.index, g.nmiss)
	return nil
}

// step runs T for a batch that is whole, and counts it.
func (w *walk) step(ctx context.Context, s *slot) error {
	e, p := w.e, w.p
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	if err := w.inspect(op, s, true); err != nil {
		return err
	}
	begin := e.trace.now()
	out, err := p.step(op, s)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.index, err)
	}
	return w.count(s, out, begin)
}

// inspect holds the rows of a batch that is whole against what they have to be, and lets the
// observers see it; widen makes them float32 for the engine's own device.
func (w *walk) inspect(op context.Context, s *slot, widen bool) error {
	e, p := w.e, w.p
	rows := s.mb.HopEnd[len(e.Config.Fanouts)]
	s.scales = cache.Scales{}
	switch {
	case p.ids == nil:
	case namesNodes(e):
		if err := p.ids.name(op, e, s.mb, rows); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
	default:
		s.scales = p.ids.scales()
	}
	if err := e.verify.check(op, e, s); err != nil {
		return err
	}
	if widen {
		if err := e.wide.widen(e.trainS, s.mb, s.x, rows, s.scales); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
	}
	if s.index >= p.shown {
		p.shown = s.index + 1
		if err := w.show(op, s, rows); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
	}
	return nil
}

// count adds a batch that a step is done with to the pass's figures. begin is when that began.
func (w *walk) count(s *slot, out outcome, begin time.Time) error {
	e, p := w.e, w.p
	if math.IsNaN(out.loss) || math.IsInf(out.loss, 0) {
		// Nothing after it would mean anything, and a checkpoint would keep it.
		return errs.New(errs.Failed,
			"batch %d: the loss is %v: the parameters have grown beyond what a float32 holds; train with a smaller --lr, or check the features",
			s.index, out.loss)
	}
	e.trace.op(report.TrackTrain, "T", begin, p, s.index, s.mb.HopEnd[len(e.Config.Fanouts)])
	t := &p.stats
	if e.others == nil { // else all ranks' are counted together
		countBatch(t, len(s.seeds), out)
	}
	for i := range s.segs[:s.used] {
		g := &s.segs[i]
		t.RowsGPU += g.ngpu
		t.RowsCPU += g.ncpu
		t.RowsSSD += g.nmiss
		t.Inserted += g.inserted
		t.Evicted += g.evicted
		t.Bypassed += g.bypassed
		t.RowsChunk += g.chunk
		t.BytesSSD += g.stats.Bytes
		t.Commands += g.stats.Commands
		t.Retries += g.stats.Retries
		t.Timeouts += g.stats.Timeouts
	}
	p.first = s.index + 1
	if p.after != nil {
		return p.after(s.index)
	}
	return nil
}

// show lets the observers see a batch that is about to be trained on.
func (w *walk) show(op context.Context, s *slot, rows int64) error {
	e, p := w.e, w.p
	if f := e.Config.OnRows; f != nil {
		nodes, err := e.look[0].View(op, e.Device, e.trainS, s.mb.Nodes, 0, rows*8)
		if err != nil {
			return err
		}
		x, err := e.look[1].View(op, e.Device, e.trainS, e.wide.of(s.x), 0, rows*int64(e.Dim)*4)
		if err != nil {
			return err
		}
		f(hostmem.View[int64](nodes), hostmem.View[float32](x))
	}
	if p.onBatch != nil {
		p.onBatch(s.index, s.mb)
	}
	return nil
}

// drain waits until nothing that a pass has started is in flight any more, so that its slots
// can be used again or freed. After a clean pass it has nothing to wait for.
func (e *engine) drain(ctx context.Context, clean bool) error {
	rd, end := e.ReadContext(ctx)
	defer end()
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	var all []error
	all = append(all, e.features.drain(rd))
	for _, s := range e.slots {
		for i := range s.segs {
			if g := &s.segs[i]; g.pending != nil {
				_, err := g.pending.Wait(rd)
				if err != nil && rd.Err() != nil {
					all = append(all, fmt.Errorf("batch %d: reads still in flight: %w",
						s.index, err))
				}
				// Another failure beside the first one tells nothing new.
				g.pending = nil
			}
		}
	}
	streams := []cuda.Stream{e.Stream, e.lookupS, e.gatherS, e.trainS}
	for _, r := range otherReplicas(e) {
		streams = append(streams, r.own)
	}
	for _, st := range streams {
		if err := st.Synchronize(op); err != nil && clean {
			all = append(all, err)
		}
	}
	return errors.Join(append(all, e.features.settle())...)
}

// fits refuses a batch with more rows than a feature tensor of so many bytes holds.
func (e *engine) fits(batch int, rows, bytes int64) error {
	if rows*e.RowBytes <= bytes {
		return nil
	}
	return errs.New(errs.Capability,
		"batch %d needs %d rows of features, a mini-batch slot has room for %d; lower --batch-size, --fanout or --prefetch-depth",
		batch, rows, bytes/e.RowBytes)
}
