// Package sched trains a graph neural network out of core. It decomposes a mini-batch into
// operators (S_h sample hop h, L_h look its rows up, I_h submit their reads, C complete them, G
// gather the cached ones, T train), puts them on streams with SM plan.TierSizes, and bounds what is
// in flight by credits: mini-batch slots that a batch holds from its first sample to its last
// gradient. Every mode is one configuration of it: package plan turns the configuration into the
// operator graph, package report holds what a run tells.
package sched

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/dataset/stripe"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// engine is everything that lives as long as a run of training or evaluation.
type engine struct {
	*prepare.Sampling
	plan   plan.Schedule
	store  store
	verify *rowVerifier // of cfg.VerifyRows, else nil

	features  featureTiers
	tiers     plan.TierSizes // as they are placed
	placement cache.Placement
	fill      time.Duration // that filling the tiers took
	gpuShrunk int64         // bytes that the GPU tier has given back

	model  *gnn.Model
	blas   cuda.BLAS // nil: our kernels
	copier *paramCopier
	// replicas are the devices that train, the engine's own first; sumS adds their gradients.
	replicas []*replica
	sumS     cuda.Stream
	// collective adds the replicas' gradients in place of the tree; nil: none.
	collective cuda.Collective
	others     *others     // nil: this process has all shards of a step
	summed     cuda.Buffer // pinned, for others
	wide       *widener

	slots      []*slot
	slotBytes  int64 // of a feature tensor
	turn       turns
	rec        prepare.Recording
	trace      *tracer           // nil without a timeline
	look       [2]prepare.Stager // nodes, rows
	lookupS    cuda.Stream
	gatherS    cuda.Stream
	trainS     cuda.Stream
	busyBefore report.StageSeconds // of streams that the tuner has replaced
	tuned      *report.TuneResult  // nil: not yet, or not asked for
	closers    []func() error
}

// onClose adds f to what close does, in reverse order.
func (e *engine) onClose(f func() error) { e.closers = append(e.closers, f) }

// close releases everything; it reports all failures.
func (e *engine) close() error {
	err := prepare.CloseAll(e.closers)
	e.closers = nil
	return errors.Join(err, e.Sampling.Close())
}

// newEngine opens what every kind of run needs. On error nothing stays open; the engine that comes
// with it says only what was read until then.
func newEngine(ctx context.Context, cfg plan.Config, in prepare.Inputs, obs report.Observer,
	mc gnn.ModelConfig) (*engine, error) {
	e := &engine{plan: cfg.Schedule()}
	if e.plan.Serial {
		e.turn = make(turns, 1)
	}
	err := prepare.Interrupted(ctx)
	if err != nil {
		return e, err
	}
	var notes []string
	note := func(s string) {
		notes = append(notes, s)
		obs.TellNote(s)
	}
	a, err := stripe.Find(ctx, in.Dataset, in.SSDs, stripe.AttachOptions{Note: note, Tables: true,
		RowTables: cfg.CheckReads == plan.ChecksOff})
	if err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return e, stopped
		}
		return e, err
	}
	if want := cfg.RowType; want != "" && want != a.RowType.String() {
		return e, errs.New(errs.Usage,
			"option row-dtype %s: the SSDs hold rows of %s; run \"heliosctl load --dataset %s --row-dtype %s\", or leave the option out",
			want, a.RowType, in.Dataset.Dir(), want)
	}
	e.Sampling = prepare.New(cfg, in, obs, a.RowType)
	e.store = store{of: e.Sampling, layout: a.Layout, ssds: a.SSDs, unchecked: a.Unchecked,
		notes: notes}
	e.rec.Of = e.Sampling
	if e.store.lease, err = a.Hold(ctx, note); err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			err = stopped
		}
		return e, errors.Join(err, e.close())
	}
	e.onClose(e.store.lease.Close) // the last that reads is closed before it
	e.others = newOthers(ctx, cfg, in)
	if err := e.open(ctx, mc); err != nil {
		return e, errors.Join(err, e.close())
	}
	return e, nil
}

func (e *engine) open(ctx context.Context, mc gnn.ModelConfig) (err error) {
	if e.verify, err = newRowVerifier(e.Sampling); err != nil {
		return err
	}
	if e.features, err = e.newTiers(); err != nil {
		return err
	}
	e.onClose(e.store.closeChecks)
	if err := e.store.openChecks(ctx); err != nil {
		return err
	}
	e.onClose(e.store.closeScales)
	if err := e.store.openScales(ctx); err != nil {
		return err
	}
	if e.verify != nil {
		e.verify.WithScales(e.store.allScales())
	}
	if e.tiers, err = e.budgets(); err != nil {
		return err
	}
	if err := e.Sampling.Open(ctx); err != nil {
		return err
	}
	if err := e.openStreams(); err != nil {
		return err
	}
	if err := e.store.openMemory(); err != nil {
		return err
	}
	if mc != noModel {
		if err := openModel(e, mc); err != nil {
			return err
		}
	}
	if err := e.newSlots(); err != nil {
		return err
	}
	// the trace begins once rows are placed, which may take long
	if err := e.rec.Check(); err != nil {
		return err
	}
	if err := e.newTracer(); err != nil {
		return err
	}
	e.onClose(func() error { return errors.Join(e.look[0].Close(), e.look[1].Close()) })
	e.onClose(e.rec.Close)
	e.onClose(e.features.close)
	e.onClose(e.store.close) // before the tiers, which it may still write to
	e.Observer.TellNote(e.store.checked.String())
	return e.place(ctx)
}

// noModel is for a run that hands mini-batches on in place of training with them.
var noModel gnn.ModelConfig

// openModel makes the model, its copies, and what its steps need.
func openModel(e *engine, mc gnn.ModelConfig) (err error) {
	if err := e.openBLAS(); err != nil {
		return err
	}
	mc.Precision, mc.BLAS = e.Config.ProductPrecision(), e.blas
	if e.model, err = gnn.NewModel(e.Device, mc); err != nil {
		return err
	}
	e.onClose(e.model.Close)
	e.onClose(func() error {
		if e.summed == nil {
			return nil
		}
		return e.summed.Free()
	})
	if err := e.openReplicas(mc); err != nil {
		return err
	}
	if err := e.openSteps(); err != nil {
		return err
	}
	if e.copier, err = newParamCopier(e.Device, e.trainS, e.model); err != nil {
		return err
	}
	e.onClose(e.copier.close)
	return nil
}

// otherReplicas returns the replicas beside the first.
func otherReplicas(e *engine) []*replica { return e.replicas[min(1, len(e.replicas)):] }

// openStreams makes the operators' streams, that of sampling aside.
func (e *engine) openStreams() (err error) {
	g := e.Config.Operators(true)
	for _, s := range []struct {
		to   *cuda.Stream
		name string
	}{{&e.lookupS, plan.OpLookup}, {&e.gatherS, plan.OpGather}, {&e.trainS, plan.OpTrain}} {
		if *s.to, err = e.Device.NewStream(g.StreamOptions(s.name)); err != nil {
			return err
		}
		e.onClose(func() error { return (*s.to).Close() }) // the tuner may have made another
	}
	return nil
}

// budgets sizes the tiers against the memory that there is.
func (e *engine) budgets() (plan.TierSizes, error) {
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
			"option neighbor-cache %v: the lists of this topology take %s of it, and with offsets that is %s; %s of memory are free, give less",
			e.Config.NeighborCache, units.FormatBytes(lists), units.FormatBytes(need),
			units.FormatBytes(avail))
	}
	avail = max(avail-need, 0)
	return e.Config.TierRows(e.Rows, e.RowBytes, avail, free)
}

// newSlots allocates the credits.
func (e *engine) newSlots() error {
	rows := max(e.MaxFrontier(e.Config.Batch), 1)
	// With every neighbour (-1) the bound is the whole graph, which need not be what a batch
	// takes: the slots share what memory there is, and sample says when that was too little.
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return err
	}
	perRow := int64(e.plan.Credits) * e.RowBytes
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
	e.slotBytes = bytes
	if e.model != nil {
		if e.wide, err = e.newWidener(e.Device, e.RowType, rows); err != nil {
			return err
		}
	}
	for _, r := range otherReplicas(e) {
		if r.wide, err = e.newWidener(r.dev, e.RowType, rows); err != nil {
			return fmt.Errorf("replica %d on %s: %w", r.number, r.dev.Info().Name, err)
		}
	}
	for i := range e.plan.Credits {
		x, err := cuda.Reserve(e.Device, bytes, "mini-batch features")
		if err != nil {
			return fmt.Errorf(
				"feature tensor of mini-batch slot %d of %d (%s of address space): %w; lower option batch-size, option fanout or option prefetch-depth",
				i+1, e.plan.Credits, units.FormatBytes(bytes), err)
		}
		e.onClose(x.Free)
		if err := e.features.credit(x); err != nil {
			return err
		}
	}
	for len(e.slots) < e.plan.Samples {
		if _, err := e.newSlot(); err != nil {
			return err
		}
	}
	e.Scratch = e.slots[0].mb
	return nil
}

// newSlot makes a slot without a feature tensor.
func (e *engine) newSlot() (s *slot, err error) {
	s = &slot{segs: make([]segment, len(e.Config.Fanouts)+1)}
	if s.mb, err = e.Sampler.NewMiniBatch(); err != nil {
		return nil, err
	}
	e.onClose(s.mb.Close)
	if s.labels, err = e.Device.Alloc(cuda.MemPinned, int64(e.Config.Batch)*4,
		"labels"); err != nil {
		return nil, err
	}
	e.onClose(s.labels.Free)
	if s.ready, err = e.Device.NewEvent(); err != nil {
		return nil, err
	}
	e.onClose(s.ready.Close)
	if e.trace != nil {
		if err := e.traceSlot(s); err != nil {
			return nil, err
		}
	}
	e.slots = append(e.slots, s)
	return s, nil
}
