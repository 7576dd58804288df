package sched

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/sched/prepare"
	"helios/sched/report"
)

// pass is one walk over an order of seed nodes: an epoch of training, or an evaluation.
type pass struct {
	name    string // for the timeline
	epoch   int    // sampling key
	kind    int    // trace.Train, trace.Validate or trace.Test
	number  int    // of the epoch, from 0, in the trace
	order   prepare.Order
	first   int // batch to begin with; run leaves it at the next one
	end     int // where run stops; 0: with the last batch. It may be called again to go on
	sampler *graph.Sampler
	onBatch func(index int, mb *graph.MiniBatch) // optional
	// place gives memory for the rows of a batch, by its place in order, in place of the engine's
	// own; nil: it has none. It is called by one goroutine at a time, and again for a batch that is
	// made anew.
	place func(i int) cuda.Growable
	// step trains or infers with a whole batch. It runs in order, on run's goroutine.
	step func(ctx context.Context, s *slot) (outcome, error)
	// steps, in training, takes batches through steps of several; see Config.Replicas.
	steps *steps
	// after is called when step's batch is counted; index is the batch's.
	after func(index int) error

	stats report.Partial // of the batches for which step has returned
	base  report.Partial // of those before this run
	clock *clock
	shown int // batches that the observers have seen
	n     int // batches
	// prepared is the time between walks in which superbatches were sampled.
	prepared time.Duration

	// Under a window: parts of batches that are announced and not looked up, how many batches they
	// are, and the first batch that is not announced. They outlive a walk that stops before the
	// pass's end.
	waiting          []work
	announced, heard int

	// sampled has the batches of the next walk; nil: they are sampled in it.
	sampled kept
	// ids has the numbers of nodes where the sampler has others than the dataset; nil: it has not.
	ids nodeIDs
}

// nodeIDs translate between the dataset's numbers of nodes and the sampler's.
type nodeIDs interface {
	// seeds are those of mini-batch i of the whole pass, as the sampler numbers them; to's memory
	// is used again.
	seeds(i int, to []int64) []int64
	// name turns the n nodes of a frontier that nothing looks up any more into the dataset's.
	name(op context.Context, e *engine, mb *graph.MiniBatch, n int64) error
	// scales are those of rows by the sampler's numbers; the zero value where rows have none.
	scales() cache.Scales
}

// placeOf returns the feature tensor of batch i: that of a consumer, or else the engine's own.
func (p *pass) placeOf(i int, own cuda.Growable) cuda.Growable {
	if p.place != nil {
		if x := p.place(i); x != nil {
			return x
		}
	}
	return own
}

type outcome struct {
	loss             float64
	correct, counted int64
}

// clock measures a pass. Reads of several hops overlap, so their time is a union of intervals,
// which arrive in the order of their beginnings.
type clock struct {
	start            time.Time
	before           report.StageSeconds // of the streams, when the pass began
	mu               sync.Mutex
	submit, complete time.Duration
	lookup           time.Duration // by the CPU, over a dynamic tier
	completeEnd      time.Time
	waited           time.Duration
	groups, grouped  int // sets of merged reads, and the batches in them
	topology         *graph.StorageStats
	cpu              hostcpu.Usage
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
func (e *engine) streamSeconds() report.StageSeconds {
	s := report.StageSeconds{
		Sample: e.Stream.Busy().Seconds(), Lookup: e.lookupS.Busy().Seconds(),
		Gather: e.gatherS.Busy().Seconds(), Train: e.trainS.Busy().Seconds(),
	}
	for _, r := range otherReplicas(e) {
		s.Train += r.own.Busy().Seconds()
	}
	s.Sample += e.Sampler.Busy().Seconds()
	s.AddTimes(e.features.beside(), 1)
	s.AddTimes(e.busyBefore, 1)
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
func (e *engine) snapshot(p *pass, base report.Partial) report.Partial {
	s := p.stats
	c := p.clock
	s.Seconds = base.Seconds + time.Since(c.start).Seconds()
	s.Waited = base.Waited + c.waited.Seconds()
	c.mu.Lock()
	own := report.StageSeconds{Lookup: c.lookup.Seconds(), Submit: c.submit.Seconds(),
		Complete: c.complete.Seconds()}
	if e.plan.Group {
		s.Groups, s.Grouped = base.Groups+c.groups, base.Grouped+c.grouped
	}
	c.mu.Unlock()
	s.Stages = base.Stages
	s.Stages.AddTimes(own, 1)
	s.Stages.AddTimes(e.streamSeconds(), 1)
	s.Stages.AddTimes(c.before, -1)
	if r := e.TopologyReads(c.topology); r != nil {
		s.Stages.Topology += r.Wait.Seconds()
		if base.TopologyReads != nil {
			*r = r.Add(*base.TopologyReads)
		}
		s.TopologyReads = r
	}
	return s
}

// run walks a pass through the pipeline:
//
//	sample ──work──▶ look up, submit, gather ──slot──▶ complete ──slot──▶ train ──▶ free slots
//
// Each arrow is a channel that can hold everything the credits allow, so a stage blocks only
// for work or for a credit. Under a plan without perHop a batch travels as one piece; with one
// credit the next batch waits for training.
//
// Over a dynamic tier lookups are an admission (dynamic.go): a window makes them wait for the
// samples of coming batches, the accumulator merges their reads, and what is read is gathered when
// it is whole:
//
//	sample ──work──▶ announce, look up, submit ──group──▶ complete, gather ──slot──▶ train ──▶ free slots
//
// When run returns, also by error or interrupt, no stage runs and nothing is in flight. An
// interrupt ends it between two steps, with errs.Interrupted.
//
// When the device's memory runs out, in whichever stage, the walk stops, the GPU tier gives back
// what is missing, and it goes on with the first batch that has not been through step: a batch that
// was sampled before is sampled again, to the same blocks.
func (e *engine) run(ctx context.Context, p *pass) error {
	p.n = p.order.Len()
	end := p.n
	if p.end > 0 {
		end = min(p.end, p.n)
	}
	if p.first > p.n {
		return fmt.Errorf("pass of %d batches can't begin with batch %d", p.n, p.first)
	}
	begin := time.Now()
	if p.clock == nil {
		p.clock = &clock{start: begin, before: e.streamSeconds(), topology: e.TopologyReads(nil),
			cpu: hostcpu.Now()}
		p.shown, p.base = p.first, p.stats
	}
	p.heard = max(p.heard, p.first)
	defer func() { e.trace.run(p.name, begin) }()
	if p.n == 0 { // a rank may have none
		return prepare.Interrupted(ctx)
	}
	for {
		began := time.Now()
		to, err := e.features.prepare(ctx, p, end)
		p.clock.waited += time.Since(began)
		p.prepared += time.Since(began)
		var still error
		if err == nil {
			err, still = e.walk(ctx, p, to)
		}
		if err == nil {
			err = still
		} else {
			p.waiting, p.announced, p.heard = nil, 0, p.first
			e.features.forget()
			if still == nil && prepare.Interrupted(ctx) == nil {
				if err = e.shrink(ctx, err); err == nil {
					continue
				}
			} else {
				err = errors.Join(err, still)
			}
		}
		if err == nil && to < end {
			continue
		}
		if stopped := prepare.Interrupted(ctx); stopped != nil &&
			errs.ClassOf(err) != errs.Interrupted {
			// A wait that the interrupt cut short is no error of what it waited for.
			return stopped
		}
		if err == nil && p.first == p.n {
			err = e.rec.Live(p.kind, p.number, p.stats.Since(p.base))
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
