package engine

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

// Slot is a credit: what one mini-batch in flight needs, from its first sample to the end of its
// training. Over a dynamic tier the feature tensor x is a credit of its own, which a batch has from
// the arrival of its rows on: more batches may be sampled and read than have one.
//
// The feature tensor x is one reservation of address space for the most rows a batch can have:
// min(seeds * product(1 + fanout), nodes). The frontier grows while reads into x are in flight,
// so x must never move; a kernel takes x as one pointer, so it can't be in segments either; and
// pages that no batch touches cost nothing. A device whose memory is not lazy reserves
// addresses and gets the memory as HopEnd grows, between the hops.
type Slot struct {
	Batch    *graph.MiniBatch
	Features cuda.Growable
	Own      cuda.Growable // the engine's, where x may be a consumer's in its place
	Labels   cuda.Buffer   // int32[batch], written by the CPU
	Segments []Segment     // one per hop and one for the seeds
	Used     int           // segments of this batch
	Ready    cuda.Event    // the gathers are done

	Index int
	Seeds []int64
	local []int64 // the seeds, as the sampler numbers them
	// where the scales of a mega-batch's rows lie by the sampler's numbers, of a frontier that has
	// them; the zero value: by the dataset's
	Scales   cache.Scales
	Frontier []int64 // the frontier, of a batch that was sampled with its superbatch
	adj      []byte  // its blocks, on their way to mb

	Part any // the tiers' own; nil: they have none
}

// Segment is a contiguous part of a frontier whose rows are looked up, read and gathered together.
type Segment struct {
	First, Count              int64
	Hop                       int
	RowsGPU, RowsCPU, RowsSSD int64
	Moved                     int64 // rows that gathering brings to their places
	// Lines that came into the tiers for it, left them for those, and found no place.
	Inserted, Evicted, Bypassed int64
	Chunk                       int64 // rows that its mini-batch's own chunk alone has
	Stats                       gpuio.ReadStats
	// The set of reads that go straight to the slot: how many rows or pages it asks for, and since
	// when; nil when none is in flight.
	pending   gpuio.Pending
	Asked     int64
	submitted time.Time

	GatherFrom, GatherTo cuda.Event // nil without a timeline
	Part                 any        // the tiers' own, which stays from batch to batch
}

// Begin makes g a segment for w. What is made once per segment stays.
func (g *Segment) Begin(w Work) {
	*g = Segment{First: w.First, Count: w.Count, Hop: w.Hop, GatherFrom: g.GatherFrom,
		GatherTo: g.GatherTo, Part: g.Part}
}

// Submit sends out the reads of a segment into the slot, so many rows or pages. Under a serial
// pipeline it waits for them.
func (w *Walk) Submit(ctx context.Context, s *Slot, g *Segment, asked int64,
	set *gpuio.ReadSet) (err error) {
	e := w.Engine
	if e.Store.Reader == nil {
		return fmt.Errorf("batch %d: %d rows or pages are in no tier and no SSD is open", s.Index,
			asked)
	}
	rd, end := e.ReadContext(ctx)
	defer end()
	g.Asked, g.submitted = asked, time.Now()
	if g.pending, err = e.Store.Reader.Submit(rd, set); err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, ReadError(err))
	}
	e.Trace.Read(asked)
	if e.Plan.Serial {
		return w.wait(rd, s, g)
	}
	return nil
}

// Work is a contiguous part of a slot's frontier, on its way from sampling to lookup.
type Work struct {
	Slot *Slot
	// as of this part: a later hop may grow the frontier into another buffer
	Nodes        cuda.DevicePtr
	First, Count int64
	Hop          int  // that completed it; 0: the seeds
	Last         bool // the batch's last part
}

// Walk is one way of a pass through the pipeline, to the first error or to batch end.
type Walk struct {
	Engine *Engine
	Pass   *Pass
	End    int
	most   int        // slots that there can be
	Free   chan *Slot // credits
	stages Stages

	cancel  context.CancelCauseFunc
	once    sync.Once
	failure error // the first
}

// Fail ends the walk.
func (w *Walk) Fail(err error) {
	w.once.Do(func() { w.failure = err; w.cancel(err) })
}

// walk runs until the first error or batch end. still is what could not be brought to an end after
// an error.
func (e *Engine) walk(ctx context.Context, p *Pass, end int) (err, still error) {
	if err := e.Trace.beginPass(ctx, e); err != nil {
		return nil, err
	}
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	most := max(len(e.Slots), e.Plan.Samples+plan.MaxGroup)
	w := &Walk{Engine: e, Pass: p, End: end, most: most, Free: make(chan *Slot, most),
		cancel: cancel}
	w.stages = e.Tiers.Begin(w)
	w.credits()
	parts := make(chan Work, most*(len(e.Config.Fanouts)+1))
	ready := make(chan *Slot, most)
	var wg sync.WaitGroup
	stage := func(run func() error) {
		wg.Go(func() {
			if err := run(); err != nil {
				w.Fail(err)
			}
		})
	}
	from, to := p.First, end // before a batch that an earlier walk left is trained on
	if ahead := e.Tiers.Lookahead(); ahead > 0 {
		from, to = p.Heard, min(end+ahead, p.Batches)
	}
	stage(func() error { defer close(parts); return w.sampleAll(inner, from, to, parts) })
	stage(func() error { return w.stages.Admit(inner, parts) })
	stage(func() error { defer close(ready); return w.stages.Deliver(inner, ready) })
	stage(func() error {
		select {
		case <-e.Store.lease.Lost():
			return e.Store.lease.Err()
		case <-inner.Done():
			return nil
		}
	})
	if p.Train != nil {
		p.Train(inner, w, ready)
	} else {
		w.train(inner, ready)
	}
	if stopped := prepare.Interrupted(ctx); stopped != nil {
		e.Store.Stopped = true
		w.Fail(stopped)
	}
	cancel(nil)
	wg.Wait()
	still = e.drain(ctx, w.failure == nil)
	return e.Store.lease.Blame(ctx, w.failure), still
}

// credits hands the slots out that the plan has now and no earlier walk has left a batch in.
func (w *Walk) credits() {
	e := w.Engine
	held := map[*Slot]bool{}
	for _, x := range w.Pass.Waiting {
		held[x.Slot] = true
	}
	for _, s := range e.Slots {
		// Slots may be more than the plan has now; what the accumulator has made is its own.
		if !held[s] && (e.Plan.Group || len(w.Free)+len(held) < e.Plan.Samples) {
			w.Free <- s
		}
	}
}

// sampleAll samples the walk's batches, and those that the tiers want to know of beyond.
func (w *Walk) sampleAll(ctx context.Context, from, to int, parts chan<- Work) error {
	for i := from; i < to; i++ {
		select {
		case s := <-w.Free:
			w.Engine.Trace.credit(1)
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
func (w *Walk) train(ctx context.Context, ready <-chan *Slot) {
	e := w.Engine
	for waitFrom := time.Now(); ; waitFrom = time.Now() {
		s, ok := <-ready
		w.Pass.Clock.Waited += time.Since(waitFrom)
		if !ok || ctx.Err() != nil || !e.Turn.Take(ctx) {
			return
		}
		err := w.step(ctx, s)
		e.Turn.End()
		if err != nil {
			w.Fail(err)
			return
		}
		w.Done(s)
	}
}

// Done frees the slot of a batch that is counted.
func (w *Walk) Done(s *Slot) {
	w.Engine.Trace.credit(-1)
	w.stages.Release(s)
	w.Free <- s
}

// sample runs S_1..S_h for batch i and hands the parts of its frontier on.
func (w *Walk) sample(ctx context.Context, s *Slot, i int, parts chan<- Work) error {
	e, p := w.Engine, w.Pass
	s.Index, s.Seeds, s.Used = i, p.Order.Seeds(i), 0
	if s.Own != nil {
		s.Features = p.PlaceOf(i, s.Own)
	}
	e.WriteLabels(s.Seeds, s.Labels)
	if !e.Turn.Take(ctx) {
		return nil // stopped: run knows why
	}
	defer e.Turn.End()
	op, cancel := e.SampleContext(ctx)
	defer cancel()
	begin := e.Trace.Now()
	var err error
	seeds := s.Seeds
	if p.IDs != nil {
		s.local = p.IDs.Seeds(p.Order.Index(i), s.local)
		seeds = s.local
	}
	if p.Sampled != nil {
		err = p.Sampled.Restore(op, s, i)
	} else {
		err = p.Sampler.Begin(op, e.Stream, s.Batch, p.Epoch,
			prepare.DrawsOf(p.Epoch, p.Order.Index(i)), seeds)
	}
	if err != nil {
		return fmt.Errorf("batch %d: %w", i, err)
	}
	hops := len(e.Config.Fanouts)
	from := int64(0)
	if p.Sampled != nil {
		e.Trace.Op(report.TrackSample, plan.NameRestore, begin, p, i, s.Batch.HopEnd[hops])
	}
	var later []Work
	for h := 0; h <= hops; h++ {
		if h > 0 && p.Sampled == nil {
			if ctx.Err() != nil {
				return nil // stopped: run knows why
			}
			if err = p.Sampler.Hop(op, e.Stream, s.Batch, h-1); err != nil {
				if ctx.Err() != nil && op.Err() != nil {
					return nil // stopped, too
				}
				return fmt.Errorf("batch %d hop %d: %w", i, h, err)
			}
			e.Trace.Op(report.TrackSample, plan.OperatorName("S", h), begin, p, i, s.Batch.HopEnd[h])
			begin = e.Trace.Now()
		}
		if e.Plan.PerHop || h == hops {
			to := s.Batch.HopEnd[h]
			if err := w.stages.Room(s, to); err != nil {
				return err
			}
			part := Work{s, s.Batch.Nodes.Ptr(), from, to - from, h, h == hops}
			// a batch is looked up when the tiers have heard of all of it
			if e.Tiers.Lookahead() > 0 {
				later = append(later, part)
			} else {
				parts <- part
			}
			from = to
		}
	}
	for _, part := range later {
		part.Nodes = s.Batch.Nodes.Ptr()
		parts <- part
	}
	return nil
}

// grow makes the feature tensor of a slot, which the batch has from its first sample on, hold so
// many rows. The reads of earlier hops are in flight: what is behind the tensor grows, and it stays
// where it is.
func (w *Walk) grow(s *Slot, rows int64) error {
	if err := w.Engine.Fits(s.Index, rows, s.Features.Size()); err != nil {
		return err
	}
	if err := s.Features.Grow(rows * w.Engine.RowBytes); err != nil {
		return fmt.Errorf("batch %d: features of %d rows: %w", s.Index, rows, err)
	}
	return nil
}

// wait runs C for a part whose reads go straight into the batch's feature tensor.
func (w *Walk) wait(op context.Context, s *Slot, g *Segment) error {
	e, p := w.Engine, w.Pass
	st, err := g.pending.Wait(op)
	if err != nil && op.Err() != nil {
		return errs.New(errs.Device, "batch %d: %d reads did not end within %v: %w",
			s.Index, g.Asked, e.Config.OpTimeout, err)
	}
	g.pending = nil
	e.Trace.Read(-g.Asked)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, ReadError(err))
	}
	if st.Rows != g.Asked {
		return errs.New(errs.Device, "batch %d: %d rows or pages were asked for, %d were read",
			s.Index, g.Asked, st.Rows)
	}
	g.Stats = st
	p.Clock.Read(g.submitted, st)
	e.Trace.span(report.TrackSubmit, plan.OperatorName("I", g.Hop), g.submitted, st.Submit, p,
		s.Index, g.RowsSSD)
	e.Trace.span(report.TrackComplete, plan.OperatorName("C", g.Hop), g.submitted.Add(st.Submit),
		st.Complete, p, s.Index, g.RowsSSD)
	return nil
}

// step runs T for a batch that is whole, and counts it.
func (w *Walk) step(ctx context.Context, s *Slot) error {
	e, p := w.Engine, w.Pass
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	if err := w.Inspect(op, s, true); err != nil {
		return err
	}
	begin := e.Trace.Now()
	out, err := p.Step(op, s)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	return w.Count(s, out, begin)
}

// Inspect holds the rows of a batch that is whole against what they have to be, and lets the
// observers see it; widen makes them float32 for the engine's own device.
func (w *Walk) Inspect(op context.Context, s *Slot, widen bool) error {
	e, p := w.Engine, w.Pass
	rows := s.Batch.HopEnd[len(e.Config.Fanouts)]
	s.Scales = cache.Scales{}
	switch {
	case p.IDs == nil:
	case NamesNodes(e):
		if err := p.IDs.Name(op, e, s.Batch, rows); err != nil {
			return fmt.Errorf("batch %d: %w", s.Index, err)
		}
	default:
		s.Scales = p.IDs.Scales()
	}
	if err := e.Verify.check(op, e, s); err != nil {
		return err
	}
	if widen {
		if err := e.Wide.Widen(e.TrainStream, s.Batch, s.Features, rows, s.Scales); err != nil {
			return fmt.Errorf("batch %d: %w", s.Index, err)
		}
	}
	if s.Index >= p.shown {
		p.shown = s.Index + 1
		if err := w.show(op, s, rows); err != nil {
			return fmt.Errorf("batch %d: %w", s.Index, err)
		}
	}
	return nil
}

// Count adds a batch that a step is done with to the pass's figures. begin is when that began.
func (w *Walk) Count(s *Slot, out Outcome, begin time.Time) error {
	e, p := w.Engine, w.Pass
	if math.IsNaN(out.Loss) || math.IsInf(out.Loss, 0) {
		// Nothing after it would mean anything, and a checkpoint would keep it.
		return errs.New(errs.Failed,
			"batch %d: the loss is %v: the parameters have grown beyond what a float32 holds; train with a smaller %v, or check the features",
			s.Index, out.Loss, errs.Key("lr"))
	}
	e.Trace.Op(report.TrackTrain, "T", begin, p, s.Index, s.Batch.HopEnd[len(e.Config.Fanouts)])
	t := &p.Stats
	if !p.Together {
		CountBatch(t, len(s.Seeds), out)
	}
	for i := range s.Segments[:s.Used] {
		g := &s.Segments[i]
		t.RowsGPU += g.RowsGPU
		t.RowsCPU += g.RowsCPU
		t.RowsSSD += g.RowsSSD
		t.Inserted += g.Inserted
		t.Evicted += g.Evicted
		t.Bypassed += g.Bypassed
		t.RowsChunk += g.Chunk
		t.BytesSSD += g.Stats.Bytes
		t.Commands += g.Stats.Commands
		t.Retries += g.Stats.Retries
		t.Timeouts += g.Stats.Timeouts
	}
	p.First = s.Index + 1
	if p.After != nil {
		return p.After(s.Index)
	}
	return nil
}

// show lets the observers see a batch that is about to be trained on.
func (w *Walk) show(op context.Context, s *Slot, rows int64) error {
	e, p := w.Engine, w.Pass
	if f := e.Config.OnRows; f != nil {
		nodes, err := e.Look[0].View(op, e.Device, e.TrainStream, s.Batch.Nodes, 0, rows*8)
		if err != nil {
			return err
		}
		x, err := e.Look[1].View(op, e.Device, e.TrainStream, e.Wide.Of(s.Features), 0,
			rows*int64(e.Dim)*4)
		if err != nil {
			return err
		}
		f(hostmem.View[int64](nodes), hostmem.View[float32](x))
	}
	if p.OnBatch != nil {
		p.OnBatch(s.Index, s.Batch)
	}
	return nil
}

// drain waits until nothing that a pass has started is in flight any more, so that its slots
// can be used again or freed. After a clean pass it has nothing to wait for.
func (e *Engine) drain(ctx context.Context, clean bool) error {
	rd, end := e.ReadContext(ctx)
	defer end()
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	var all []error
	all = append(all, e.Tiers.Drain(rd))
	for _, s := range e.Slots {
		for i := range s.Segments {
			if g := &s.Segments[i]; g.pending != nil {
				_, err := g.pending.Wait(rd)
				if err != nil && rd.Err() != nil {
					all = append(all, fmt.Errorf("batch %d: reads still in flight: %w",
						s.Index, err))
				}
				// Another failure beside the first one tells nothing new.
				g.pending = nil
			}
		}
	}
	streams := append([]cuda.Stream{e.Stream, e.LookupStream, e.GatherStream, e.TrainStream},
		e.consumer.Streams()...)
	for _, st := range streams {
		if err := st.Synchronize(op); err != nil && clean {
			all = append(all, err)
		}
	}
	return errors.Join(append(all, e.Tiers.Settle())...)
}

// Fits refuses a batch with more rows than a feature tensor of so many bytes holds.
func (e *Engine) Fits(batch int, rows, bytes int64) error {
	if rows*e.RowBytes <= bytes {
		return nil
	}
	return errs.New(errs.Capability,
		"batch %d needs %d rows of features, a mini-batch slot has room for %d; lower %v, %v or %v",
		batch, rows, bytes/e.RowBytes, errs.Key("batch-size"), errs.Key("fanout"),
		errs.Key("prefetch-depth"))
}
