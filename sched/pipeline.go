package sched

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// pass is one walk over an order of seed nodes: an epoch of training, or an evaluation.
type pass struct {
	name    string // for the timeline
	epoch   int    // sampling key
	kind    int    // trace.Train, trace.Validate or trace.Test
	number  int    // of the epoch, from 0, in the trace
	order   []int64
	first   int // batch to begin with; run leaves it at the next one
	end     int // where run stops; 0: with the last batch. It may be called again to go on
	sampler *graph.Sampler
	onBatch func(index int, mb *graph.MiniBatch) // optional
	// step trains or infers with a whole batch. It runs in order, on run's goroutine.
	step func(ctx context.Context, s *slot) (outcome, error)
	// after is called when step's batch is counted; index is the batch's.
	after func(index int) error

	stats partial // of the batches for which step has returned
	base  partial // of those before this run
	clock *clock
	shown int // batches that the observers have seen
	n     int // batches

	// Under a window: parts of batches that are announced and not looked up, how many batches they are, and the first
	// batch that is not announced. They outlive a walk that stops before the pass's end.
	waiting            []work
	announced, sampled int
}

type outcome struct {
	loss             float64
	correct, counted int64
}

// clock measures a pass. Reads of several hops overlap, so their time is a union of intervals,
// which arrive in the order of their beginnings.
type clock struct {
	start            time.Time
	before           StageSeconds // of the streams, when the pass began
	mu               sync.Mutex
	submit, complete time.Duration
	lookup           time.Duration // by the CPU, over a dynamic tier
	completeEnd      time.Time
	waited           time.Duration
	groups, grouped  int // sets of merged reads, and the batches in them
	topology         *graph.StorageStats
}

// lookedUp counts a lookup of a dynamic tier.
func (c *clock) lookedUp(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lookup += d
}

// group counts a set of reads.
func (c *clock) group(g *readGroup) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if g.batches > 0 {
		c.groups++
		c.grouped += g.batches
	}
}

// streamSeconds is how long the operators on streams have been busy since the run began.
func (e *engine) streamSeconds() StageSeconds {
	s := StageSeconds{
		Sample: e.sampleS.Busy().Seconds(), Lookup: e.lookupS.Busy().Seconds(),
		Gather: e.gatherS.Busy().Seconds(), Train: e.trainS.Busy().Seconds(),
	}
	s.Sample += e.sampler.Busy().Seconds()
	s.add(e.busyBefore, 1)
	return s
}

func (c *clock) read(submitted time.Time, st gpuio.ReadStats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.submit += st.Submit
	from := submitted.Add(st.Submit)
	to := from.Add(st.Complete)
	if from.Before(c.completeEnd) {
		from = c.completeEnd
	}
	if to.After(from) {
		c.complete += to.Sub(from)
		c.completeEnd = to
	}
}

// snapshot is the pass so far: what earlier runs of it left in base, and its own times.
func (e *engine) snapshot(p *pass, base partial) partial {
	s := p.stats
	c := p.clock
	s.Seconds = base.Seconds + time.Since(c.start).Seconds()
	s.Waited = base.Waited + c.waited.Seconds()
	c.mu.Lock()
	own := StageSeconds{Lookup: c.lookup.Seconds(), Submit: c.submit.Seconds(), Complete: c.complete.Seconds()}
	if e.plan.group {
		s.Groups, s.Grouped = base.Groups+c.groups, base.Grouped+c.grouped
	}
	c.mu.Unlock()
	s.Stages = base.Stages
	s.Stages.add(own, 1)
	s.Stages.add(e.streamSeconds(), 1)
	s.Stages.add(c.before, -1)
	if r := e.topologyReads(c.topology); r != nil {
		s.Stages.Topology += r.Wait.Seconds()
		if base.TopologyReads != nil {
			*r = r.Add(*base.TopologyReads)
		}
		s.TopologyReads = r
	}
	return s
}

// work is a contiguous part of a slot's frontier, on its way from sampling to lookup.
type work struct {
	s            *slot
	nodes        cuda.DevicePtr // as of this part: a later hop may grow the frontier into another buffer
	first, count int64
	last         bool // the batch's last part
}

// run walks a pass through the pipeline:
//
//	sample ──work──▶ look up, submit, gather ──slot──▶ complete ──slot──▶ train ──▶ free slots
//
// Each arrow is a channel that can hold everything the credits allow, so a stage blocks only
// for work or for a credit. Under a plan without perHop a batch travels as one piece; with one
// credit the next batch waits for training.
//
// Over a dynamic tier lookups are an admission (dynamic.go): a window makes them wait for the samples of coming batches,
// the accumulator merges their reads, and what is read is gathered when it is whole:
//
//	sample ──work──▶ announce, look up, submit ──group──▶ complete, gather ──slot──▶ train ──▶ free slots
//
// When run returns, also by error or interrupt, no stage runs and nothing is in flight. An
// interrupt ends it between two steps, with errs.Interrupted.
//
// When the device's memory runs out, in whichever stage, the walk stops, the GPU tier gives back what is missing, and it
// goes on with the first batch that has not been through step: a batch that was sampled before is sampled again, to the
// same blocks.
func (e *engine) run(ctx context.Context, p *pass) error {
	p.n = batches(len(p.order), e.cfg.Batch)
	end := p.n
	if p.end > 0 {
		end = min(p.end, p.n)
	}
	if p.first > p.n {
		return fmt.Errorf("pass of %d batches can't begin with batch %d", p.n, p.first)
	}
	begin := time.Now()
	if p.clock == nil {
		p.clock = &clock{start: begin, before: e.streamSeconds(), topology: e.topologyReads(nil)}
		p.shown, p.base = p.first, p.stats
	}
	p.sampled = max(p.sampled, p.first)
	defer func() { e.trace.run(p.name, begin) }()
	for {
		err, still := e.walk(ctx, p, end)
		if err == nil {
			err = still
		} else {
			p.waiting, p.announced, p.sampled = nil, 0, p.first
			if e.dyn.Dynamic != nil { // what was announced is sampled again
				e.dyn.Forget()
			}
			if still == nil && interrupted(ctx) == nil {
				if err = e.shrink(ctx, err); err == nil {
					continue
				}
			} else {
				err = errors.Join(err, still)
			}
		}
		if stopped := interrupted(ctx); stopped != nil && errs.ClassOf(err) != errs.Interrupted {
			// A wait that the interrupt cut short is no error of what it waited for.
			return stopped
		}
		if err == nil && p.first == p.n {
			err = e.traceLive(p)
		}
		return overdue(err)
	}
}

// overdue attaches class Device to a wait for an operator that took too long.
func overdue(err error) error {
	if errs.ClassOf(err) == errs.Failed && errors.Is(err, context.DeadlineExceeded) {
		return errs.With(errs.Device, err)
	}
	return err
}

// walk is run until the first error or batch end. still is what could not be brought to an end after an error.
func (e *engine) walk(ctx context.Context, p *pass, end int) (err, still error) {
	if err := e.beginPass(ctx); err != nil {
		return nil, err
	}
	dynamic := e.cfg.dynamic()

	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var once sync.Once
	var failure error
	fail := func(err error) {
		once.Do(func() { failure = err; cancel(err) })
	}
	most := max(len(e.slots), e.plan.samples+maxGroup)
	free := make(chan *slot, most)
	held := map[*slot]bool{}
	for _, w := range p.waiting {
		held[w.s] = true
	}
	for _, s := range e.slots {
		// Slots may be more than the plan has now; what the accumulator has made is its own.
		if !held[s] && (e.plan.group || len(free)+len(held) < e.plan.samples) {
			free <- s
		}
	}
	parts := make(chan work, most*(len(e.cfg.Fanouts)+1))
	submitted := make(chan *slot, most)
	ready := make(chan *slot, most)
	// Of a dynamic tier:
	groups := make(chan *readGroup, len(e.dyn.groups))
	reading := make(chan *readGroup, len(e.dyn.groups))
	xs := make(chan cuda.Growable, len(e.dyn.xs))
	for _, g := range e.dyn.groups {
		groups <- g
	}
	for _, x := range e.dyn.xs[:min(len(e.dyn.xs), e.plan.credits)] {
		xs <- x
	}

	from, to := p.first, end
	if e.cfg.Window > 0 { // the window looks beyond where this walk ends
		from, to = p.sampled, min(end+e.cfg.Window, p.n)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(parts)
		for i := from; i < to; i++ {
			select {
			case s := <-free:
				e.trace.credit(1)
				if err := e.sample(inner, p, s, i, parts); err != nil {
					fail(err)
					return
				}
			case <-inner.Done():
				return
			}
		}
	})
	if dynamic {
		wg.Go(func() {
			defer close(reading)
			a := &admission{e: e, p: p, end: end, free: free, groups: groups, out: reading}
			if err := a.run(inner, parts); err != nil {
				fail(err)
			}
		})
		wg.Go(func() {
			defer close(ready)
			var held []*readGroup
			for g := range reading {
				if inner.Err() == nil {
					if err := e.finish(inner, p, g, xs, groups, ready, &held); err != nil {
						fail(err)
					}
				}
			}
		})
	} else {
		wg.Go(func() {
			defer close(submitted)
			for w := range parts {
				if inner.Err() != nil {
					continue // drain: the sampler never blocks on us
				}
				if err := e.lookup(inner, p, w); err != nil {
					fail(err)
				} else if w.last {
					submitted <- w.s
				}
			}
		})
		wg.Go(func() {
			defer close(ready)
			for s := range submitted {
				if inner.Err() != nil {
					continue
				}
				if err := e.complete(inner, p, s); err != nil {
					fail(err)
				} else {
					ready <- s
				}
			}
		})
	}

	for waitFrom := time.Now(); ; waitFrom = time.Now() {
		s, ok := <-ready
		p.clock.waited += time.Since(waitFrom)
		if !ok || inner.Err() != nil || !e.takeTurn(inner) {
			break
		}
		err := e.step(inner, p, s)
		e.endTurn()
		if err != nil {
			fail(err)
			break
		}
		e.trace.credit(-1)
		if dynamic {
			xs <- s.x
			s.x = nil
		}
		free <- s
	}
	stopped := interrupted(ctx)
	if stopped != nil {
		e.stopped = true
		fail(stopped)
	}
	cancel(nil)
	wg.Wait()
	return failure, e.drain(ctx, failure == nil)
}

// sample runs S_1..S_h for batch i and hands the parts of its frontier on.
func (e *engine) sample(ctx context.Context, p *pass, s *slot, i int, parts chan<- work) error {
	s.index, s.seeds, s.used = i, seedsOf(p.order, i, e.cfg.Batch), 0
	e.labelsOf(s)
	if !e.takeTurn(ctx) {
		return nil // stopped: run knows why
	}
	defer e.endTurn()
	op, cancel := e.sampleCtx(ctx)
	defer cancel()
	begin := e.trace.now()
	if err := p.sampler.Begin(op, e.sampleS, s.mb, p.epoch, drawsOf(p.epoch, i), s.seeds); err != nil {
		return fmt.Errorf("batch %d: %w", i, err)
	}
	hops := len(e.cfg.Fanouts)
	from := int64(0)
	var later []work
	for h := 0; h <= hops; h++ {
		if h > 0 {
			if ctx.Err() != nil {
				return nil // stopped: run knows why
			}
			if err := p.sampler.Hop(op, e.sampleS, s.mb, h-1); err != nil {
				if ctx.Err() != nil && op.Err() != nil {
					return nil // stopped, too
				}
				return fmt.Errorf("batch %d hop %d: %w", i, h, err)
			}
			e.trace.op(trackSample, hopNames[h], begin, p, i, s.mb.HopEnd[h])
			begin = e.trace.now()
		}
		if e.plan.perHop || h == hops {
			to := s.mb.HopEnd[h]
			if !e.cfg.dynamic() { // else there is a tensor when the rows are
				if err := e.fits(i, to, s.x.Size()); err != nil {
					return err
				}
				// The reads of earlier hops are in flight: what is behind x grows, and x stays where it is.
				if err := s.x.Grow(to * e.rowBytes); err != nil {
					return fmt.Errorf("batch %d: features of %d rows: %w", i, to, err)
				}
			}
			w := work{s, s.mb.Nodes.Ptr(), from, to - from, h == hops}
			if e.cfg.Window > 0 { // a batch is looked up when it has been announced, and that is as a whole
				later = append(later, w)
			} else {
				parts <- w
			}
			from = to
		}
	}
	for _, w := range later {
		w.nodes = s.mb.Nodes.Ptr()
		parts <- w
	}
	return nil
}

// fits refuses a batch with more rows than a feature tensor of so many bytes holds.
func (e *engine) fits(batch int, rows, bytes int64) error {
	if rows*e.rowBytes <= bytes {
		return nil
	}
	return errs.New(errs.Capability, "batch %d needs %d rows of features, a mini-batch slot has room for %d; lower --batch-size, --fanout or --prefetch-depth",
		batch, rows, bytes/e.rowBytes)
}

// labelsOf writes the labels of a slot's seeds.
func (e *engine) labelsOf(s *slot) {
	dst := hostmem.View[int32](s.labels.Bytes())
	for k, v := range s.seeds {
		dst[k] = e.labels[v]
	}
}

// lookup runs L, I and G for a part: its rows are found in the tiers, the reads of the others go
// out, and the cached ones are gathered meanwhile.
func (e *engine) lookup(ctx context.Context, p *pass, w work) error {
	s := w.s
	if !e.takeTurn(ctx) {
		return nil
	}
	defer e.endTurn()
	op, cancel := e.opCtx(ctx)
	defer cancel()
	if w.count > 0 {
		if s.used == 0 {
			if err := e.traceBegin(p, s.index); err != nil {
				return err
			}
		}
		if err := e.tracePart(op, w.nodes, w.first, w.count); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		g := &s.segs[s.used]
		s.used++
		b := g.buckets
		*g = segment{buckets: b, first: w.first, count: w.count, gatherFrom: g.gatherFrom, gatherTo: g.gatherTo}
		begin := e.trace.now()
		err := e.het.Lookup(op, e.lookupS, w.nodes, w.first, w.count, b)
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		g.ngpu, g.ncpu, g.nmiss = b.NGPU, b.NCPU, b.NMiss
		e.trace.op(trackLookup, "L", begin, p, s.index, w.count)
		if g.nmiss > 0 {
			if e.reader == nil {
				return fmt.Errorf("batch %d: %d rows are in no tier and no SSD is open", s.index, g.nmiss)
			}
			rd, end := e.readCtx(ctx)
			defer end()
			g.submitted = time.Now()
			g.pending, err = e.reader.Submit(rd, &gpuio.ReadSet{
				Rows: b.MissRow.Ptr(), Pos: b.MissPos.Ptr(), SSDOffset: b.SSDOffset,
				Dst: s.x, DstStride: e.rowBytes, DstBytes: (w.first + w.count) * e.rowBytes,
			})
			if err != nil {
				return fmt.Errorf("batch %d: %w", s.index, readError(err))
			}
			e.trace.read(g.nmiss)
			if e.plan.serial {
				if err := e.wait(rd, p, s, g); err != nil {
					return err
				}
			}
		}
		err = e.mark(g.gatherFrom)
		if err == nil {
			err = e.het.Gather(e.gatherS, b, s.x.Ptr(), e.rowBytes)
		}
		if err == nil {
			err = e.mark(g.gatherTo)
		}
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
	}
	if w.last {
		return e.gatherS.Record(s.ready)
	}
	return nil
}

// wait runs C for one part.
func (e *engine) wait(op context.Context, p *pass, s *slot, g *segment) error {
	st, err := g.pending.Wait(op)
	if err != nil && op.Err() != nil {
		return errs.New(errs.Device, "batch %d: reads of %d rows did not end within %v: %w", s.index, g.nmiss, e.cfg.OpTimeout, err)
	}
	g.pending = nil
	e.trace.read(-g.nmiss)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.index, readError(err))
	}
	if st.Rows != g.nmiss {
		return errs.New(errs.Device, "batch %d: %d rows were asked for, %d were read", s.index, g.nmiss, st.Rows)
	}
	g.stats = st
	p.clock.read(g.submitted, st)
	e.trace.span(trackSubmit, "I", g.submitted, st.Submit, p, s.index, g.nmiss)
	e.trace.span(trackComplete, "C", g.submitted.Add(st.Submit), st.Complete, p, s.index, g.nmiss)
	return nil
}

// complete holds a batch until all of its rows are in place.
func (e *engine) complete(ctx context.Context, p *pass, s *slot) error {
	rd, end := e.readCtx(ctx)
	defer end()
	op, cancel := e.opCtx(ctx)
	defer cancel()
	for i := range s.segs[:s.used] {
		if g := &s.segs[i]; g.pending != nil {
			if err := e.wait(rd, p, s, g); err != nil {
				return err
			}
		}
	}
	if err := s.ready.Synchronize(op); err != nil {
		return fmt.Errorf("batch %d: gather: %w", s.index, err)
	}
	return e.drawGathers(p, s)
}

// step runs T for a batch that is whole, and counts it.
func (e *engine) step(ctx context.Context, p *pass, s *slot) error {
	op, cancel := e.opCtx(ctx)
	defer cancel()
	rows := s.mb.HopEnd[len(e.cfg.Fanouts)]
	if err := e.verifyRows(op, s); err != nil {
		return err
	}
	if err := e.widen(s); err != nil {
		return fmt.Errorf("batch %d: %w", s.index, err)
	}
	if s.index >= p.shown {
		p.shown = s.index + 1
		if err := e.show(op, p, s, rows); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
	}
	begin := e.trace.now()
	out, err := p.step(op, s)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.index, err)
	}
	if math.IsNaN(out.loss) || math.IsInf(out.loss, 0) {
		// Nothing after it would mean anything, and a checkpoint would keep it.
		return errs.New(errs.Failed, "batch %d: the loss is %v: the parameters have grown beyond what a float32 holds; train with a smaller --lr, or check the features",
			s.index, out.loss)
	}
	e.trace.op(trackTrain, "T", begin, p, s.index, rows)
	t := &p.stats
	t.Batches++
	t.Seeds += int64(len(s.seeds))
	t.LossSum += out.loss * float64(out.counted)
	t.Correct += out.correct
	t.Counted += out.counted
	for i := range s.segs[:s.used] {
		g := &s.segs[i]
		t.RowsGPU += g.ngpu
		t.RowsCPU += g.ncpu
		t.RowsSSD += g.nmiss
		t.Inserted += g.inserted
		t.Evicted += g.evicted
		t.Bypassed += g.bypassed
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
func (e *engine) show(op context.Context, p *pass, s *slot, rows int64) error {
	if f := e.cfg.OnRows; f != nil {
		nodes, err := e.look[0].view(op, e.dev, e.trainS, s.mb.Nodes, 0, rows*8)
		if err != nil {
			return err
		}
		x, err := e.look[1].view(op, e.dev, e.trainS, e.features(s), 0, rows*int64(e.dim)*4)
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
	rd, end := e.readCtx(ctx)
	defer end()
	op, cancel := e.opCtx(ctx)
	defer cancel()
	var all []error
	for _, g := range e.dyn.groups {
		if g.pending != nil {
			_, err := g.pending.Wait(rd)
			if err != nil && rd.Err() != nil {
				all = append(all, fmt.Errorf("merged reads still in flight: %w", err))
			}
			g.pending = nil
		}
	}
	for _, s := range e.slots {
		for i := range s.segs {
			if g := &s.segs[i]; g.pending != nil {
				_, err := g.pending.Wait(rd)
				if err != nil && rd.Err() != nil {
					all = append(all, fmt.Errorf("batch %d: reads still in flight: %w", s.index, err))
				}
				// Another failure beside the first one tells nothing new.
				g.pending = nil
			}
		}
	}
	for _, st := range []interface {
		Synchronize(context.Context) error
	}{e.sampleS, e.lookupS, e.gatherS, e.trainS} {
		if err := st.Synchronize(op); err != nil && clean {
			all = append(all, err)
		}
	}
	if e.cfg.dynamic() {
		for _, s := range e.slots {
			s.x = nil
		}
		if err := e.settleTickets(); err != nil {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}
