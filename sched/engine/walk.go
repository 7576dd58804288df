package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	"helios/sched/walk"
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
	// Rows has the rows of all nodes by their numbers, where those of the last hop are not copied
	// into Features; else 0. See Pass.InPlace.
	Rows     cuda.DevicePtr
	Labels   cuda.Buffer // of prepare.Targets.Write, by the CPU
	Segments []Segment   // one per hop and one for the seeds
	Used     int         // segments of this batch
	seeded   cuda.Event  // the frontier has the seeds
	Ready    cuda.Event  // the gathers are done
	gathered bool        // Ready is recorded for this batch
	waited   bool        // waitOnce has waited for the batch's reads
	placed   bool        // waitOnce has waited for Ready, too

	parts []Work    // by hop, from the sampling of their rows on
	began time.Time // the operator of sampling; for the timeline

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
	// when; pending is nil when none is in flight.
	asks      *gpuio.ReadSet
	pending   gpuio.Pending
	lists     cuda.Buffer // of a merged set that it asks for; nil: none so far
	Asked     int64
	submitted time.Time

	GatherFrom, GatherTo cuda.Event // nil without a timeline
	Part                 any        // the tiers' own, which stays from batch to batch
}

// Begin makes g the segment of a part. Its events, its lists and its Part stay.
func (g *Segment) Begin(w *Work) {
	*g = Segment{First: w.First, Count: w.Count, Hop: w.Hop, GatherFrom: g.GatherFrom,
		GatherTo: g.GatherTo, Part: g.Part, lists: g.lists}
	w.Segment = g
}

// Ask has the reads of a segment into the slot go out next, so many rows or pages.
func (g *Segment) Ask(asked int64, set *gpuio.ReadSet) { g.Asked, g.asks = asked, set }

// Work is a contiguous part of a slot's frontier, on its way from sampling to its place.
type Work struct {
	Slot *Slot
	// as of this part: a later hop may grow the frontier into another buffer
	Nodes        cuda.DevicePtr
	First, Count int64
	Hop          int      // that completed it; 0: the seeds
	Last         bool     // the batch's last part
	Segment      *Segment // nil until it is looked up, and where it has no rows
}

// Set is the parts whose reads go out together.
type Set = walk.Set[*Slot]

// WorkOf returns a part of a set.
func WorkOf(p walk.Part[*Slot]) *Work { return &p.Batch.parts[p.Hop] }

// Walk is one way of a pass through the pipeline, to the first error or to batch end.
type Walk struct {
	Engine *Engine
	Pass   *Pass
	End    int
	walk   walk.Walk[*Slot]
	free   []*Slot // that no batch has
	stages Stages
	ctx    context.Context
	// trained has the end of the last training; for the timeline.
	trained time.Time
}

// Fail ends the walk.
func (w *Walk) Fail(err error) { w.walk.Fail(err) }

// walk runs until the first error or batch end. still is what could not be brought to an end after
// an error.
func (e *Engine) walk(ctx context.Context, p *Pass, end int) (err, still error) {
	if err := e.Trace.beginPass(ctx, e); err != nil {
		return nil, err
	}
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &Walk{Engine: e, Pass: p, End: end, ctx: inner}
	w.stages = e.Tiers.Begin(w)
	run, c := walk.NewGoroutines(), e.Config
	c.Unpacked = p.Sampled == nil
	w.walk = walk.Walk[*Slot]{Executor: run, Operators: operators{w},
		Graph: c.Operators(true), First: p.First, End: end,
		From: p.First + len(p.Waiting), To: min(end+e.Tiers.Lookahead(), p.Batches),
		Waiting: p.Waiting, Restored: p.Sampled != nil, Samples: w.credits(), Failed: cancel}
	w.walk.Start()
	run.Go(func() {
		select {
		case <-e.Store.lease.Lost():
			w.Fail(e.Store.lease.Err())
		case <-inner.Done():
		}
		run.Stop()
	})
	if p.Train != nil {
		p.Train(inner, w)
	} else {
		w.walk.Train()
	}
	if stopped := prepare.Interrupted(ctx); stopped != nil {
		e.Store.Stopped = true
		w.Fail(stopped)
	}
	cancel(nil)
	run.Wait()
	p.Waiting = w.walk.Left()
	failure := w.walk.Failure()
	still = e.drain(ctx, failure == nil)
	return e.Store.lease.Blame(ctx, failure), still
}

// credits takes the slots that no earlier walk has left a batch in, and returns how many batches
// may be sampled and not trained.
func (w *Walk) credits() int {
	e := w.Engine
	for _, s := range e.Slots {
		if !slices.Contains(w.Pass.Waiting, s) {
			w.free = append(w.free, s)
		}
	}
	if e.Plan.Group { // those that merged reads have made are theirs
		return max(len(e.Slots), e.Plan.Samples)
	}
	return e.Plan.Samples
}

// Stages are the stages of the walk.
func (w *Walk) Stages() *walk.Walk[*Slot] { return &w.walk }

// operators do the work of a walk on the wall clock.
type operators struct{ *Walk }

// take waits for the turn of an operator.
func (w operators) take() error {
	if !w.Engine.Turn.Take(w.ctx) {
		return walk.ErrStopped
	}
	return nil
}

// Waited implements walk.Operators.
func (w operators) Waited(ns int64) { w.Pass.Clock.Waited += time.Duration(ns) }

// Release implements walk.Operators.
func (w operators) Release(s *Slot) {
	w.Engine.Trace.credit(-1)
	w.stages.Release(s)
	w.walk.Executor.Do(func() { w.free = append(w.free, s) })
}

// slot returns one that no batch has.
func (w operators) slot() (s *Slot, err error) {
	w.walk.Executor.Do(func() {
		if n := len(w.free); n > 0 {
			s, w.free = w.free[n-1], w.free[:n-1]
		}
	})
	if s == nil {
		s, err = w.Engine.NewSlot()
	}
	return s, err
}

// Begin implements walk.Operators.
func (w operators) Begin(i int) (*Slot, error) {
	e, p := w.Engine, w.Pass
	s, err := w.slot()
	if err != nil {
		return nil, err
	}
	e.Trace.credit(1)
	s.Index, s.Seeds, s.Used, s.Rows = i, p.Order.Seeds(i), 0, 0
	s.gathered, s.waited, s.placed = false, false, false
	if s.Own != nil {
		s.Features = p.PlaceOf(i, s.Own)
	}
	if e.In.Seeds == nil {
		e.Targets.Write(s.Seeds, s.Labels.Bytes())
	}
	if err := w.take(); err != nil {
		return nil, err
	}
	defer e.Turn.End()
	op, cancel := e.SampleContext(w.ctx)
	defer cancel()
	s.began = e.Trace.Now()
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
	if err == nil {
		err = e.Stream.Record(s.seeded)
	}
	if err != nil {
		return nil, fmt.Errorf("batch %d: %w", i, err)
	}
	if p.Sampled != nil {
		e.Trace.Op(report.TrackSample, plan.NameRestore, s.began, p, i,
			s.Batch.HopEnd[len(e.Config.Fanouts)])
	}
	return s, nil
}

// Sample implements walk.Operators.
func (w operators) Sample(s *Slot, h int) error {
	e := w.Engine
	if err := w.take(); err != nil {
		return err
	}
	defer e.Turn.End()
	op, cancel := e.SampleContext(w.ctx)
	defer cancel()
	if err := w.Pass.Sampler.Hop(op, e.Stream, s.Batch, h-1); err != nil {
		if w.ctx.Err() != nil && op.Err() != nil {
			return walk.ErrStopped
		}
		return fmt.Errorf("batch %d hop %d: %w", s.Index, h, err)
	}
	e.Trace.Op(report.TrackSample, plan.OperatorName("S", h), s.began, w.Pass, s.Index,
		s.Batch.HopEnd[h])
	s.began = e.Trace.Now()
	return nil
}

// Reach implements walk.Operators.
func (w operators) Reach(s *Slot, h int) error {
	from, to := int64(0), s.Batch.RowCount(h)
	if w.Engine.Plan.PerHop && h > 0 {
		from = s.Batch.RowCount(h - 1)
	}
	if err := w.stages.Room(s, to); err != nil {
		return err
	}
	s.parts[h] = Work{Slot: s, Nodes: s.Batch.RowNumbers().Ptr(), First: from, Count: to - from,
		Hop: h, Last: h == len(w.Engine.Config.Fanouts)}
	return nil
}

// Announce implements walk.Operators.
func (w operators) Announce(s *Slot) error {
	for h := range s.parts {
		s.parts[h].Nodes = s.Batch.RowNumbers().Ptr()
	}
	return w.stages.Announce(w.ctx, &s.parts[len(s.parts)-1])
}

// Lookup implements walk.Operators.
func (w operators) Lookup(s *Slot, h int) error {
	if err := w.take(); err != nil {
		return err
	}
	e := w.Engine
	defer e.Turn.End()
	if h == 0 { // later hops are waited for
		if err := e.LookupStream.Wait(s.seeded); err != nil {
			return fmt.Errorf("batch %d: %w", s.Index, err)
		}
	}
	return w.stages.Lookup(w.ctx, &s.parts[h])
}

// Closes implements walk.Operators.
func (w operators) Closes(s *Set) bool { return w.stages.Closes(s) }

// Submit implements walk.Operators.
func (w operators) Submit(set *Set) error {
	return w.stages.Submit(w.ctx, set)
}

// Complete implements walk.Operators.
func (w operators) Complete(set *Set) error {
	if err := w.take(); err != nil {
		return err
	}
	defer w.Engine.Turn.End()
	return w.stages.Complete(w.ctx, set)
}

// Gather implements walk.Operators.
func (w operators) Gather(s *Slot, h int) error {
	if err := w.take(); err != nil {
		return err
	}
	defer w.Engine.Turn.End()
	e, part := w.Engine, &s.parts[h]
	g, err := part.Segment, error(nil)
	if g != nil {
		err = e.Trace.Mark(e.GatherStream, g.GatherFrom)
	}
	if err == nil {
		err = w.stages.Gather(w.ctx, part)
	}
	if err == nil && g != nil {
		err = e.Trace.Mark(e.GatherStream, g.GatherTo)
	}
	if err == nil && part.Last {
		if err = w.stages.Change(s); err == nil {
			err = e.GatherStream.Record(s.Ready)
			s.gathered = true
		}
	}
	if err != nil {
		return fmt.Errorf("batch %d: gather: %w", s.Index, err)
	}
	return nil
}

// Place implements walk.Operators.
func (w operators) Place(s *Slot) error {
	op, cancel := w.Engine.OperatorContext(w.ctx)
	defer cancel()
	err := error(nil)
	if !s.placed {
		err = s.Ready.Synchronize(op)
	}
	if err == nil {
		err = w.stages.Placed(s)
	}
	if err != nil {
		return fmt.Errorf("batch %d: gather: %w", s.Index, err)
	}
	return w.Engine.Trace.Gathers(w.Pass, s)
}

// Train implements walk.Operators: it runs T, and counts the batch.
func (w operators) Train(s *Slot) (end func() error, err error) {
	e := w.Engine
	if w.ctx.Err() != nil {
		return nil, walk.ErrStopped
	}
	if err := w.take(); err != nil {
		return nil, err
	}
	defer e.Turn.End()
	op, cancel := e.OperatorContext(w.ctx)
	defer cancel()
	if err := w.Inspect(op, s, true); err != nil {
		return nil, err
	}
	begin := e.Trace.Now()
	count := func(out Outcome, err error) error {
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.Index, err)
		}
		if begin.Before(w.trained) {
			begin = w.trained
		}
		err = w.Count(s, out, begin)
		w.trained = e.Trace.Now()
		return err
	}
	if w.Pass.Start == nil || !e.OnGPU() || e.Plan.Serial {
		return nil, count(w.step(op, s))
	}
	wait, err := w.Pass.Start(op, s)
	if err != nil {
		return nil, count(Outcome{}, err)
	}
	return func() error {
		op, cancel := e.OperatorContext(w.ctx)
		defer cancel()
		return count(wait(op))
	}, nil
}

// step runs T. On the host device it counts the time in which none of T's kernels had a worker slot
// as waited, but for that which T spent elsewhere; a GPU's events do not tell it apart.
func (w operators) step(op context.Context, s *Slot) (out Outcome, err error) {
	if w.Engine.OnGPU() {
		return w.Pass.Step(op, s)
	}
	waited, err := prepare.Beside(w.Engine.TrainStream, func() (err error) {
		out, err = w.Pass.Step(op, s)
		return err
	})
	w.Waited((waited - out.Elsewhere).Nanoseconds())
	return out, err
}

// Inspect holds the rows of a batch that is whole against what they have to be, and lets the
// observers see it; widen makes them float32 for the engine's own device.
func (w *Walk) Inspect(op context.Context, s *Slot, widen bool) error {
	e, p := w.Engine, w.Pass
	rows := s.Batch.RowCount(len(e.Config.Fanouts))
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
	if !out.Finite() {
		// Nothing after it would mean anything, and a checkpoint would keep it.
		return Applied(errs.New(errs.Failed,
			"batch %d: the loss is %v: the parameters have grown beyond what a float32 holds; train with a smaller %v, or check the features",
			s.Index, out.Loss, errs.Key("lr")))
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
		nodes, err := e.Look[0].View(op, e.Device, e.TrainStream, s.Batch.RowNumbers(), 0,
			rows*8)
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
