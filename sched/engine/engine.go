// Package engine brings mini-batches with their rows to whoever trains on them. It decomposes a
// mini-batch into operators (S_h sample hop h, L_h look its rows up, I_h submit their reads, C
// complete them, G gather the cached ones, T train), puts them on streams with SM budgets, and
// bounds what is in flight by credits: mini-batch slots that a batch holds from its first sample to
// its last gradient. Where rows live is for the run's Tiers to decide: packages below sched/tiers
// are ways to keep them. Package plan turns a configuration into the operator graph, package report
// holds results.
package engine

import (
	"context"
	"errors"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/dataset/stripe"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Engine brings mini-batches with their rows to whoever trains on them. It lives as long as a run.
type Engine struct {
	*prepare.Sampling
	Plan   plan.Schedule
	Store  Store
	Verify *RowVerifier // of cfg.VerifyRows, else nil

	Tiers     Tiers
	Sizes     plan.TierSizes // as they are placed
	Placement cache.Placement
	Fill      time.Duration // that filling the tiers took
	GPUShrunk int64         // bytes that the GPU tier has given back
	system    *System
	consumer  Consumer
	Wide      *Widener

	Slots        []*Slot
	SlotBytes    int64 // of a feature tensor
	Turn         Turns
	Trace        *Tracer           // nil without a timeline
	Look         [2]prepare.Stager // nodes, rows
	LookupStream cuda.Stream
	GatherStream cuda.Stream
	TrainStream  cuda.Stream
	BusyBefore   report.StageSeconds // of streams that the tuner has replaced
	closers      []func() error
}

// Consumer trains on an engine's mini-batches, or hands them on. It shares the device's memory.
type Consumer interface {
	// Open takes memory before the mini-batches do.
	Open() error
	// MakeRoom prepares for mini-batches of at most so many rows.
	MakeRoom(rows int64) error
	// Streams are those that train on other devices than the engine's.
	Streams() []cuda.Stream
	// Mirrors reports whether another device has its own copies of mini-batches.
	Mirrors() bool
	// WorkspaceBytes returns the device memory that a mini-batch of these sizes trains in.
	// ReleaseWorkspace frees it.
	WorkspaceBytes(hopEnd, edges []int64) int64
	ReleaseWorkspace() error
}

// OnClose adds f to what close does, in reverse order.
func (e *Engine) OnClose(f func() error) { e.closers = append(e.closers, f) }

// Close releases everything; it reports all failures.
func (e *Engine) Close() error {
	err := prepare.CloseAll(e.closers)
	e.closers = nil
	return errors.Join(err, e.Sampling.Close())
}

// NewEngine returns an engine that openFor opens.
func NewEngine(cfg plan.Config) *Engine {
	e := &Engine{Plan: cfg.Schedule()}
	if e.Plan.Serial {
		e.Turn = make(Turns, 1)
	}
	return e
}

// OpenFor opens what every kind of run needs. On error nothing stays open; the engine then says
// only what was read until then.
func (e *Engine) OpenFor(ctx context.Context, c Consumer, s *System, cfg plan.Config,
	in prepare.Inputs, obs report.Observer) error {
	err := prepare.Interrupted(ctx)
	if err == nil {
		err = prepare.CheckTypes(&cfg, &in.Dataset.Meta)
	}
	if err != nil {
		return err
	}
	var notes []string
	note := func(s string) {
		notes = append(notes, s)
		obs.TellNote("%s", s)
	}
	a, err := stripe.Find(ctx, in.Dataset, in.SSDs, stripe.AttachOptions{Note: note, Tables: true,
		RowTables: cfg.CheckReads == plan.ChecksOff})
	if err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	if want := cfg.RowType; want != "" && want != a.RowType.String() {
		return errs.New(errs.Usage,
			"{row-dtype} %s: the SSDs hold rows of %s; run \"heliosctl load --dataset %s --row-dtype %s\", or leave it out",
			want, a.RowType, in.Dataset.Dir(), want)
	}
	e.Sampling = prepare.New(cfg, in, obs, a.RowType)
	e.Store = Store{of: e.Sampling, Layout: a.Layout, SSDs: a.SSDs, unchecked: a.Unchecked,
		Notes: notes}
	if e.Store.lease, err = a.Hold(ctx, note); err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			err = stopped
		}
		return errors.Join(err, e.Close())
	}
	e.OnClose(e.Store.lease.Close) // the last that reads is closed before it
	e.consumer, e.system = c, s
	if err := e.open(ctx); err != nil {
		return errors.Join(err, e.Close())
	}
	return nil
}

// open takes what a run needs of the machine, in the order in which memory is wanted.
func (e *Engine) open(ctx context.Context) (err error) {
	if e.Verify, err = newRowVerifier(e.Sampling); err != nil {
		return err
	}
	if e.Tiers, err = e.system.New(e); err != nil {
		return err
	}
	e.OnClose(e.Store.closeChecks)
	if err := e.Store.openChecks(ctx, e.Tiers.Pages()); err != nil {
		return err
	}
	e.OnClose(e.Store.closeScales)
	if err := e.Store.openScales(ctx); err != nil {
		return err
	}
	if e.Verify != nil {
		e.Verify.WithScales(e.Store.Scales())
	}
	if e.Sizes, err = e.budgets(); err != nil {
		return err
	}
	if err := e.Sampling.Open(ctx); err != nil {
		return err
	}
	if err := e.openStreams(); err != nil {
		return err
	}
	if err := e.Store.openMemory(); err != nil {
		return err
	}
	if err := e.consumer.Open(); err != nil {
		return err
	}
	if err := e.newSlots(); err != nil {
		return err
	}
	if err := e.newTracer(); err != nil {
		return err
	}
	e.OnClose(func() error { return errors.Join(e.Look[0].Close(), e.Look[1].Close()) })
	e.OnClose(e.Tiers.Close)
	e.OnClose(e.Store.Close) // before the tiers, which it may still write to
	e.Observer.TellNote("%v", e.Store.Checked)
	return e.place(ctx)
}

// openStreams makes the operators' streams, that of sampling aside.
func (e *Engine) openStreams() (err error) {
	g := e.Config.Operators(true)
	for _, s := range []struct {
		to   *cuda.Stream
		name string
	}{{&e.LookupStream, plan.OpLookup}, {&e.GatherStream, plan.OpGather}, {&e.TrainStream,
		plan.OpTrain}} {
		if *s.to, err = e.Device.NewStream(g.StreamOptions(s.name)); err != nil {
			return err
		}
		e.OnClose(func() error { return (*s.to).Close() }) // the tuner may have made another
	}
	return nil
}

// budgets sizes the tiers against the memory that there is.
func (e *Engine) budgets() (plan.TierSizes, error) {
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return plan.TierSizes{}, err
	}
	free, err := deviceFree(e.Device)
	if err != nil {
		return plan.TierSizes{}, err
	}
	need := e.TopologyNeeds()
	if lists := e.NeighborCacheNeeds(); lists > 0 && need > avail && need-lists < avail {
		return plan.TierSizes{}, errs.New(errs.Usage,
			"{neighbor-cache} %v: the lists of this topology take %s of it, and with offsets that is %s; %s of memory are free, give less",
			e.Config.NeighborCache, units.FormatBytes(lists), units.FormatBytes(need),
			units.FormatBytes(avail))
	}
	avail = max(avail-need, 0)
	return e.Config.TierRows(e.Rows, e.RowBytes, avail, free)
}

// newSlots allocates the credits.
func (e *Engine) newSlots() error {
	e.Replan()
	rows := max(e.MaxFrontier(e.Config.Batch), 1)
	// With every neighbour (-1) the bound is the whole graph, which need not be what a batch
	// takes: the slots share what memory there is, and sample says when that was too little.
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return err
	}
	perRow := int64(e.Plan.Credits) * e.RowBytes
	if e.RowType != rowtype.Float32 {
		perRow += int64(e.Dim) * 4
	}
	if total := e.Device.Info().MemTotal; e.OnGPU() {
		// of addresses: what is mapped is what batches take
		rows = min(rows, max(total/e.RowBytes, 1))
	} else {
		rows = min(rows, max(avail/2/perRow, 1))
	}
	bytes := rows * e.RowBytes
	if e.Plan.Merges > 1 {
		page := e.RowBytes * hostmem.PageBytes // tensors begin on pages and at whole rows
		bytes = (bytes + page - 1) / page * page
	}
	e.SlotBytes = bytes
	if err := e.consumer.MakeRoom(rows); err != nil {
		return err
	}
	tensors := 1 // of a reservation
	if e.Plan.Merges > 1 {
		tensors = e.Plan.Credits
	}
	var all cuda.Growable
	for i := range e.Plan.Credits {
		if i%tensors == 0 {
			if all, err = cuda.Reserve(e.Device, bytes*int64(tensors),
				"mini-batch features"); err != nil {
				return errs.Errorf(
					"feature tensor of mini-batch slot %d of %d (%s of address space): %w; lower {batch-size}, {fanout} or {prefetch-depth}",
					i+1, e.Plan.Credits, units.FormatBytes(bytes), err)
			}
			e.OnClose(all.Free)
		}
		x := all
		if tensors > 1 {
			x = &tensor{all, int64(i) * bytes, bytes}
		}
		if err := e.Tiers.Credit(x); err != nil {
			return err
		}
	}
	for len(e.Slots) < e.Plan.Samples {
		if _, err := e.NewSlot(); err != nil {
			return err
		}
	}
	e.Scratch = e.Slots[0].Batch
	return nil
}

// NewSlot makes a slot without a feature tensor.
func (e *Engine) NewSlot() (s *Slot, err error) {
	s = &Slot{Segments: make([]Segment, len(e.Config.Fanouts)+1),
		parts: make([]Work, len(e.Config.Fanouts)+1)}
	if s.Batch, err = e.Sampler.NewMiniBatch(); err != nil {
		return nil, err
	}
	e.OnClose(s.Batch.Close)
	if s.Labels, err = e.Device.Alloc(cuda.MemPinned, e.Targets.Bytes(e.Config.Batch),
		"labels"); err != nil {
		return nil, err
	}
	e.OnClose(s.Labels.Free)
	for _, to := range []*cuda.Event{&s.seeded, &s.Ready} {
		if *to, err = e.Device.NewEvent(); err != nil {
			return nil, err
		}
		e.OnClose((*to).Close)
	}
	if e.Trace != nil {
		if err := e.traceSlot(s); err != nil {
			return nil, err
		}
	}
	e.OnClose(func() (err error) {
		for i := range s.Segments {
			err = errors.Join(err, s.Segments[i].freeLists())
		}
		return err
	})
	e.Slots = append(e.Slots, s)
	return s, nil
}
