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
	"helios/internal/hostcpu"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Pass is one walk over an order of seed nodes: an epoch of training, or an evaluation.
type Pass struct {
	Name    string // for the timeline
	Epoch   int    // sampling key
	Number  int    // of an epoch of training, from 0
	Order   prepare.Order
	First   int // batch to begin with; run leaves it at the next one
	End     int // where run stops; 0: with the last batch. It may be called again
	Sampler *graph.Sampler
	OnBatch func(index int, mb *graph.MiniBatch) // optional
	// Training: the pass is an epoch of training, else an evaluation.
	Training bool
	// InPlace: Step takes the rows of a batch's last hop where Slot.Rows says, if that is set.
	InPlace bool
	// Place gives memory for the rows of a batch, by its place in order, in place of the engine's
	// own; nil: it has none. It is called by one goroutine at a time, and again for a batch that is
	// made anew.
	Place func(i int) cuda.Growable
	// Step trains or infers with a whole batch. It runs in order, on run's goroutine.
	Step func(ctx context.Context, s *Slot) (Outcome, error)
	// Start is Step up to its wait; nil: there is only Step. Where operators overlap, a GPU gets
	// the next batch before the end of one is waited for.
	Start Start
	// Train trains on the batches of a walk with several devices; nil: step does with the engine's
	// own.
	Train func(ctx context.Context, w *Walk)
	// Together: other processes count the batches' figures with this one's.
	Together bool
	// Next returns the pass that is likely to come next, of which Epoch and Order are set; nil, and
	// where it is nil: none is. Its mini-batches may be sampled while this one's train.
	Next func() *Pass
	// After is called when step's batch is counted; index is the batch's.
	After func(index int) error

	Stats   report.Partial // of the batches for which step has returned
	Base    report.Partial // of those before this run
	Clock   *clock
	shown   int // batches that the observers have seen
	Batches int // batches
	// Prepared is the time between walks in which superbatches were sampled.
	Prepared time.Duration

	// Waiting has the batches of a window that are announced and not looked up, First and those
	// behind it. They outlive a walk that ends before the pass.
	Waiting []*Slot

	// Sampled has the batches of the next walk; nil: they are sampled in it.
	Sampled Kept
	// IDs has the numbers of nodes where the sampler has others than the dataset; nil: it has not.
	IDs NodeIDs
}

// Start enqueues the work of a batch, and end waits for it.
type Start func(ctx context.Context, s *Slot) (end func(ctx context.Context) (Outcome, error),
	err error)

// Step returns the step that waits at once.
func (f Start) Step(ctx context.Context, s *Slot) (Outcome, error) {
	end, err := f(ctx, s)
	if err != nil {
		return Outcome{}, err
	}
	return end(ctx)
}

// Draws reports whether a pass has the mini-batches of another.
func (p *Pass) Draws(q *Pass) bool { return p.Epoch == q.Epoch && p.Order.Equal(q.Order) }

// NodeIDs translate between the dataset's numbers of nodes and the sampler's.
type NodeIDs interface {
	// Seeds are those of mini-batch i of the whole pass, as the sampler numbers them; to's memory
	// is used again.
	Seeds(i int, to []int64) []int64
	// Name turns the n nodes of a frontier that nothing looks up any more into the dataset's.
	Name(op context.Context, e *Engine, mb *graph.MiniBatch, n int64) error
	// Scales are those of rows by the sampler's numbers; the zero value where rows have none.
	Scales() cache.Scales
}

// PlaceOf returns the feature tensor of batch i: that of a consumer, or else the engine's own.
func (p *Pass) PlaceOf(i int, own cuda.Growable) cuda.Growable {
	if p.Place != nil {
		if x := p.Place(i); x != nil {
			return x
		}
	}
	return own
}

// Outcome has the figures of a mini-batch that has trained, or was classified.
type Outcome struct {
	Loss             float64
	Correct, Counted int64
	Mass             float64 // Loss is the mean by this; 0: by Counted
	// Elsewhere is time of the step in which T had nothing for workers: other processes had.
	Elsewhere time.Duration
}

// Finite reports whether the loss is a number.
func (o Outcome) Finite() bool { return !math.IsNaN(o.Loss) && !math.IsInf(o.Loss, 0) }

// CountBatch adds a mini-batch's figures to those of a pass.
func CountBatch(t *report.Partial, seeds int, out Outcome) {
	t.Batches++
	t.Seeds += int64(seeds)
	by := float64(out.Counted)
	if out.Mass != 0 {
		by = out.Mass
	}
	t.LossSum += float64(out.Loss * by)
	t.Mass += out.Mass
	t.Correct += out.Correct
	t.Counted += out.Counted
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
	Waited           time.Duration
	groups, grouped  int // sets of merged reads, and the batches in them
	topology         *graph.StorageStats
	CPU              hostcpu.Usage
}

// LookedUp counts a lookup of a dynamic tier.
func (c *clock) LookedUp(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lookup += d
}

// Group counts a set of reads for so many batches.
func (c *clock) Group(batches int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if batches > 0 {
		c.groups++
		c.grouped += batches
	}
}

// streamSeconds is the time in which streams have been busy since the run began.
func (e *Engine) streamSeconds() report.StageSeconds {
	s := report.StageSeconds{
		Sample: e.Stream.Busy().Seconds(), Lookup: e.LookupStream.Busy().Seconds(),
		Gather: e.GatherStream.Busy().Seconds(), Train: e.TrainStream.Busy().Seconds(),
	}
	for _, st := range e.consumer.Streams() {
		s.Train += st.Busy().Seconds()
	}
	s.Sample += e.Sampler.Busy().Seconds()
	s.AddTimes(e.Tiers.Beside(), 1)
	s.AddTimes(e.BusyBefore, 1)
	return s
}

func (c *clock) Read(submitted time.Time, st gpuio.ReadStats) {
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

// Snapshot is the pass so far: what earlier runs of it left in base, and its own times.
func (e *Engine) Snapshot(p *Pass, base report.Partial) report.Partial {
	s := p.Stats
	c := p.Clock
	s.Seconds = base.Seconds + time.Since(c.start).Seconds()
	s.Waited = base.Waited + c.Waited.Seconds()
	c.mu.Lock()
	own := report.StageSeconds{Lookup: c.lookup.Seconds(), Submit: c.submit.Seconds(),
		Complete: c.complete.Seconds()}
	if e.Plan.Group || e.Plan.Merges > 1 {
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

// Run walks a pass through the pipeline (package walk).
//
// When run returns, also by error or interrupt, no stage runs and nothing is in flight; the
// mini-batches of Next may be sampled on. An interrupt ends it between two steps, with
// errs.Interrupted.
//
// When the device's memory runs out, in whichever stage, the walk stops, the GPU tier gives back
// what is missing, and it resumes at the first batch that has not been through step: a batch that
// was sampled before is sampled again, to the same blocks.
func (e *Engine) Run(ctx context.Context, p *Pass) error {
	p.Batches = p.Order.Len()
	end := p.Batches
	if p.End > 0 {
		end = min(p.End, p.Batches)
	}
	if p.First > p.Batches {
		return fmt.Errorf("pass of %d batches can't begin with batch %d", p.Batches, p.First)
	}
	begin := time.Now()
	if p.Clock == nil {
		p.Clock = &clock{start: begin, before: e.streamSeconds(), topology: e.TopologyReads(nil),
			CPU: hostcpu.Now()}
		p.shown, p.Base = p.First, p.Stats
	}
	defer func() { e.Trace.Run(p.Name, begin) }()
	if p.Batches == 0 { // a rank may have none
		return prepare.Interrupted(ctx)
	}
	for {
		began := time.Now()
		to, err := e.Tiers.Prepare(ctx, p, end)
		p.Clock.Waited += time.Since(began)
		p.Prepared += time.Since(began)
		var still error
		if err == nil {
			err, still = e.walk(ctx, p, to)
		}
		if err == nil {
			err = still
		} else {
			p.Waiting = nil
			e.Tiers.Forget()
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
			errs.ClassOf(err) != errs.Interrupted && !errors.As(err, new(applied)) {
			// A wait that the interrupt cut short is no error of what it waited for. That of a step
			// is not cut short, and who saved its parameters would do it twice.
			return stopped
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
