package sched

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/dataset"
	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/outfile"
	"helios/internal/rowtype"
	"helios/internal/units"
)

// Inputs are what a run works on. The caller opens and closes them.
type Inputs struct {
	Dev     cuda.Device
	Dataset *dataset.Dataset
	SSDs    []*gpuio.SSD // any order: the superblocks say which stripe each holds
}

// The epoch numbers that sampling is keyed by. Training counts from 0; every other use has
// numbers of its own, so that placing rows and evaluating never see training's samples. The
// sampler's counter has 24 bits for them.
const (
	maxEpochs      = 1 << 20
	presampleEpoch = 1 << 22 // + pass
	valEpoch       = 2 << 22 // + epoch
	testEpoch      = 3 << 22
	predictEpoch   = 3<<22 + 1
)

// engine is everything that lives as long as a run.
type engine struct {
	cfg  Config
	plan plan
	obs  Observer
	dev  cuda.Device
	// grace is how long reads may go on after an interrupt.
	grace time.Duration

	rows     int64
	rowType  rowtype.Type // of the rows on the SSDs, in the slots and in the tiers
	rowBytes int64        // of one of them
	dim      int
	// Training takes float32. Rows of another type are widened for one batch at a time, right before its
	// training and by its stream: wide is the run's, not the slots', so a batch in flight costs its stored
	// bytes. Both nil for float32.
	wide      cuda.Growable
	converter *cache.Converter

	verify *rowVerifier // of cfg.VerifyRows, else nil

	layout    gpuio.Layout
	ssds      []*gpuio.SSD
	opening   context.Context // ends the opening of a topology on storage; nil: nothing does
	topo      *graph.Topology
	dtopo     *graph.DeviceTopology
	labels    []int32
	sampler   *graph.Sampler
	model     *gnn.Model
	copier    *paramCopier
	het       *cache.Hetero // of static tiers
	dyn       dynTier       // of a dynamic one
	acc       AccumulatorInfo
	rec       recording
	ahead     stager        // announced rows
	turn      chan struct{} // whose operator runs, where one does at a time
	reader    gpuio.Reader  // nil when every row is in a tier
	readStats gpuio.Stats   // of a reader that is closed
	slots     []*slot
	trace     *tracer // nil without a timeline

	sampleS, lookupS, gatherS, trainS cuda.Stream
	busyBefore                        StageSeconds // of streams that the tuner has replaced
	tuned                             *TuneResult  // nil: not yet, or not asked for

	presampled func(*graph.MiniBatch) // optional: sees what presampling samples
	hotness    *HotnessInfo           // what placed the tiers; nil: nothing had to

	memory    *gpuio.Memory // of the I/O kernels; nil: as the stack does without
	blas      cuda.BLAS     // nil: our kernels
	tiers     budgets       // as they are placed
	gpuShrunk int64         // bytes that the GPU tier has given back
	seen      frontier
	in        Inputs
	look      [2]stager // nodes, rows

	placement cache.Placement
	presample time.Duration
	fill      time.Duration
	closers   []func() error
	stopped   bool // the user interrupted: nothing is worth a long wait any more
}

// slot is a credit: what one mini-batch in flight needs, from its first sample to the end of
// its training. Over a dynamic tier the feature tensor x is a credit of its own, which a batch has from the arrival of
// its rows on: more batches may be sampled and read than have one.
//
// The feature tensor x is one reservation of address space for the most rows a batch can have:
// min(seeds * product(1 + fanout), nodes). The frontier grows while reads into x are in flight,
// so x must never move; a kernel takes x as one pointer, so it can't be in segments either; and
// pages that no batch touches cost nothing. A device whose memory is not lazy reserves
// addresses and gets the memory as HopEnd grows, between the hops.
type slot struct {
	mb     *graph.MiniBatch
	x      cuda.Growable
	labels cuda.Buffer // int32[batch], written by the CPU
	segs   []segment   // one per hop and one for the seeds
	used   int         // segments of this batch
	ready  cuda.Event  // the gathers are done

	index int
	seeds []int64
}

// segment is a contiguous part of a frontier whose rows are looked up, read and gathered together.
type segment struct {
	buckets      *cache.Buckets
	pending      gpuio.Pending // nil when nothing is in flight
	submitted    time.Time
	ngpu, ncpu   int64
	nmiss        int64
	first, count int64
	stats        gpuio.ReadStats
	// Over a dynamic tier:
	ticket                      *cache.Ticket
	out                         int // where it is
	seq                         uint64
	slot                        *slot
	last                        bool  // the batch's last
	nlines                      int64 // to be read
	inserted, evicted, bypassed int64
	gatherFrom, gatherTo        cuda.Event // nil without a timeline
}

// onClose adds f to what close does, in reverse order.
func (e *engine) onClose(f func() error) { e.closers = append(e.closers, f) }

// close releases everything; it reports the first failure but tries all.
func (e *engine) close() error {
	var all []error
	for i := len(e.closers) - 1; i >= 0; i-- {
		if err := e.closers[i](); err != nil {
			all = append(all, err)
		}
	}
	e.closers = nil
	return errors.Join(all...)
}

// opCtx bounds one wait for an operator. It does not end when the user interrupts: what has
// been started is finished (reads have their own deadlines), and no buffer is let go while a
// kernel or an SSD may still write to it.
func (e *engine) opCtx(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), e.cfg.OpTimeout)
}

// interruptGrace is a new engine's grace. Tests shorten it.
var interruptGrace = 3 * time.Second

// readCtx is opCtx for reads, which may have to wait until an SSD has been recovered: after an
// interrupt it goes on for e.grace only. What is still in flight then ends with the reader,
// which is closed before any buffer is let go.
func (e *engine) readCtx(ctx context.Context) (context.Context, context.CancelFunc) {
	op, cancel := e.opCtx(ctx)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(e.grace, cancel) })
	return op, func() {
		stop()
		cancel()
	}
}

// interrupted is the error of a run that the user stopped; nil when they did not.
func interrupted(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return errs.New(errs.Interrupted, "interrupted: %w", context.Cause(ctx))
}

// newEngine opens what every kind of run needs. On error nothing stays open; the engine that comes
// with it says only what was read until then.
func newEngine(ctx context.Context, cfg Config, in Inputs, obs Observer, mc gnn.ModelConfig) (*engine, error) {
	e := &engine{cfg: cfg, plan: cfg.plan(), obs: obs, dev: in.Dev, in: in, grace: interruptGrace, turn: make(chan struct{}, 1)}
	if err := e.open(ctx, in, mc); err != nil {
		return e, errors.Join(err, e.close())
	}
	return e, nil
}

func (e *engine) open(ctx context.Context, in Inputs, mc gnn.ModelConfig) error {
	e.opening = ctx
	if err := interrupted(ctx); err != nil {
		return err
	}
	a, err := dataset.Find(ctx, in.Dataset, in.SSDs, dataset.AttachOptions{})
	if err != nil {
		if stopped := interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	e.layout, e.ssds = a.Layout, a.SSDs
	if want := e.cfg.RowType; want != "" && want != a.RowType.String() {
		return errs.New(errs.Usage, "--row-dtype %s: the SSDs hold rows of %s; run \"heliosctl load --dataset %s --row-dtype %s\", or leave the flag out",
			want, a.RowType, in.Dataset.Dir(), want)
	}
	e.sizes(in, a.RowType)
	if err := e.openVerify(in); err != nil {
		return err
	}
	if e.cfg.dynamic() {
		if err := e.setLines(); err != nil {
			return err
		}
	}
	if e.tiers, err = e.budgets(); err != nil {
		return err
	}
	if err := e.openGraph(in); err != nil {
		return err
	}
	if err := e.openMemory(); err != nil {
		return err
	}
	if err := e.openBLAS(); err != nil {
		return err
	}
	mc.Precision, mc.BLAS = e.cfg.precision(), e.blas
	if e.model, err = gnn.NewModel(e.dev, mc); err != nil {
		return err
	}
	e.onClose(e.model.Close)
	if e.copier, err = newParamCopier(e.dev, e.trainS, e.model); err != nil {
		return err
	}
	e.onClose(e.copier.close)
	if err := e.newSlots(); err != nil {
		return err
	}
	if e.tracing() { // the trace begins once rows are placed, which may take long
		if err := e.traced(outfile.Check("trace", e.cfg.Trace, e.cfg.Overwrite)); err != nil {
			return err
		}
	}
	if err := e.newTracer(); err != nil {
		return err
	}
	e.onClose(func() error {
		return errors.Join(e.look[0].close(), e.look[1].close(), e.ahead.close(), e.rec.rows.close())
	})
	e.onClose(e.closeTrace)
	e.onClose(e.closeTiers)
	e.onClose(e.closeReader) // before the tiers, which it may still write to
	return e.place(ctx)
}

// sizes takes over the shape of the features, stored as t.
func (e *engine) sizes(in Inputs, t rowtype.Type) {
	m := in.Dataset.Meta
	e.rows, e.dim, e.rowType, e.rowBytes = m.Nodes, m.Dim, t, int64(t.RowBytes(m.Dim))
}

// openGraph opens what sampling needs, and the streams.
func (e *engine) openGraph(in Inputs) (err error) {
	if err := e.openTopology(in); err != nil {
		return err
	}
	if e.labels, err = in.Dataset.Labels(); err != nil {
		return err
	}
	g := e.cfg.graph(true)
	for _, s := range []struct {
		to   *cuda.Stream
		name string
	}{{&e.sampleS, OpSample}, {&e.lookupS, OpLookup}, {&e.gatherS, OpGather}, {&e.trainS, OpTrain}} {
		if *s.to, err = e.dev.NewStream(g.options(s.name)); err != nil {
			return err
		}
		e.onClose(func() error { return (*s.to).Close() }) // the tuner may have made another
	}
	if e.sampler, err = e.newSampler(e.cfg.Fanouts); err != nil {
		return err
	}
	e.onClose(e.sampler.Close)
	return nil
}

// budgets sizes the tiers against the memory that there is.
func (e *engine) budgets() (budgets, error) {
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return budgets{}, err
	}
	free, err := deviceFree(e.dev)
	if err != nil {
		return budgets{}, err
	}
	need := e.topologyNeeds()
	if lists := e.neighborCacheNeeds(); lists > 0 && need > avail && need-lists < avail {
		return budgets{}, errs.New(errs.Usage, "--neighbor-cache %v: the lists of this topology take %s of it, and with offsets that is %s; %s of memory are free, give less",
			e.cfg.NeighborCache, units.FormatBytes(lists), units.FormatBytes(need), units.FormatBytes(avail))
	}
	avail = max(avail-need, 0)
	return e.cfg.tierRows(e.rows, e.rowBytes, avail, free)
}

// maxFrontier is the most rows a batch can need.
func (e *engine) maxFrontier(batch int) int64 {
	n := int64(batch)
	if e.cfg.Sampler == SamplerLadies { // so many nodes a layer
		for _, f := range e.cfg.Fanouts {
			n += int64(f)
		}
		return min(n, e.rows)
	}
	for _, f := range e.cfg.Fanouts {
		if f < 0 || n > math.MaxInt64/int64(1+f) {
			return e.rows
		}
		n *= int64(1 + f)
	}
	return min(n, e.rows)
}

// newSlots allocates the credits.
func (e *engine) newSlots() error {
	rows := max(e.maxFrontier(e.cfg.Batch), 1)
	// With every neighbour (-1) the bound is the whole graph, which need not be what a batch
	// takes: the slots share what memory there is, and sample says when that was too little.
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return err
	}
	perRow := int64(e.plan.credits) * e.rowBytes
	if e.rowType != rowtype.Float32 {
		perRow += int64(e.dim) * 4
	}
	if total := e.dev.Info().MemTotal; e.onGPU() {
		rows = min(rows, max(total/e.rowBytes, 1)) // of addresses: what is mapped is what batches take
	} else {
		rows = min(rows, max(avail/2/perRow, 1))
	}
	bytes := rows * e.rowBytes
	if e.rowType != rowtype.Float32 {
		if e.converter, err = cache.NewConverter(e.dev, e.rowType, e.dim); err != nil {
			return err
		}
		if e.wide, err = cuda.Reserve(e.dev, rows*int64(e.dim)*4, "float32 features"); err != nil {
			return fmt.Errorf("feature tensor of training (%s of address space): %w; lower --batch-size or --fanout", units.FormatBytes(rows*int64(e.dim)*4), err)
		}
		e.onClose(e.wide.Free)
	}
	for i := range e.plan.credits {
		x, err := cuda.Reserve(e.dev, bytes, "mini-batch features")
		if err != nil {
			return fmt.Errorf("feature tensor of mini-batch slot %d of %d (%s of address space): %w; lower --batch-size, --fanout or --prefetch-depth",
				i+1, e.plan.credits, units.FormatBytes(bytes), err)
		}
		e.onClose(x.Free)
		if e.cfg.dynamic() {
			e.dyn.xs = append(e.dyn.xs, x)
			continue
		}
		s, err := e.newSlot()
		if err != nil {
			return err
		}
		s.x = x
	}
	for e.cfg.dynamic() && len(e.slots) < e.plan.samples {
		if _, err := e.newSlot(); err != nil {
			return err
		}
	}
	return nil
}

// newSlot makes a slot without a feature tensor.
func (e *engine) newSlot() (s *slot, err error) {
	s = &slot{segs: make([]segment, len(e.cfg.Fanouts)+1)}
	if s.mb, err = e.sampler.NewMiniBatch(); err != nil {
		return nil, err
	}
	e.onClose(s.mb.Close)
	if s.labels, err = e.dev.Alloc(cuda.MemPinned, int64(e.cfg.Batch)*4, "labels"); err != nil {
		return nil, err
	}
	e.onClose(s.labels.Free)
	if s.ready, err = e.dev.NewEvent(); err != nil {
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

// openReader opens the run's I/O stack, and what checks its rows where that was asked for.
func (e *engine) openReader(ctx context.Context, in Inputs, l gpuio.Layout) (gpuio.Reader, error) {
	if !e.cfg.CheckReads {
		return e.newReader(e.cfg.IOStack, l)
	}
	// The checksums are read before the stack takes the SSDs' queues.
	sums, err := dataset.RowSums(ctx, in.Dataset, e.ssds)
	if err != nil {
		return nil, fmt.Errorf("--check-reads: %w", err)
	}
	r, err := e.newReader(e.cfg.IOStack, l)
	if err != nil {
		return nil, err
	}
	checked, err := gpuio.NewChecked(e.dev, r, e.ssds, l, sums)
	if err != nil {
		op, cancel := context.WithTimeout(context.Background(), e.cfg.OpTimeout)
		defer cancel()
		return nil, errors.Join(err, r.Close(op))
	}
	return checked, nil
}

// widen enqueues what makes a batch's rows float32. They are in features(s) then.
func (e *engine) widen(s *slot) error {
	if e.converter == nil {
		return nil
	}
	rows := s.mb.HopEnd[len(e.cfg.Fanouts)]
	if err := e.wide.Grow(rows * int64(e.dim) * 4); err != nil {
		return err
	}
	return e.converter.Convert(e.trainS, e.wide.Ptr(), s.x.Ptr(), rows)
}

// features is the feature tensor of a batch that trains: float32.
func (e *engine) features(s *slot) cuda.Buffer {
	if e.converter == nil {
		return s.x
	}
	return e.wide
}

// newReader opens an I/O stack by name, for rows or lines that lie as l says.
func (e *engine) newReader(stack string, l gpuio.Layout) (gpuio.Reader, error) {
	c := e.cfg
	switch stack {
	case StackCPU:
		o := gpuio.CPUOptions{Depth: c.QueueDepth, Engine: c.CPUEngine, Timeout: c.ReadTimeout, Retries: c.ReadRetries, CoalesceBytes: c.CoalesceBytes}
		if c.CPUEngine != "pread" { // there a thread is one read in flight
			o.Threads = c.Workers
		}
		return gpuio.NewCPU(e.dev, e.ssds, l, o)
	case StackMmap: // the page cache takes no options
		return gpuio.NewMmap(e.dev, e.ssds, l)
	case StackSync:
		return gpuio.NewSync(e.dev, e.ssds, l, gpuio.SyncOptions{
			Blocks: c.Blocks, Depth: c.QueueDepth, Timeout: c.ReadTimeout, Retries: c.ReadRetries,
			Resets: c.ReadResets, SMs: c.SMs.IO, Priority: ioPriority, Memory: e.memory,
		})
	default:
		return gpuio.NewAsync(e.dev, e.ssds, l, gpuio.AsyncOptions{
			Blocks: c.Blocks, Depth: c.QueueDepth, Timeout: c.ReadTimeout, Retries: c.ReadRetries,
			Resets: c.ReadResets, CoalesceBytes: c.CoalesceBytes, SMs: c.SMs.IO, Priority: ioPriority, Memory: e.memory,
		})
	}
}

// closeReader ends the stack: afterwards nothing writes to a slot or a tier.
func (e *engine) closeReader() error {
	if e.reader == nil {
		return nil
	}
	limit := e.cfg.OpTimeout
	if e.stopped {
		limit = e.grace
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	r := e.reader
	e.readStats, e.reader = together(e.readStats, r.Stats()), nil
	return r.Close(ctx)
}

// closeTiers frees the tiers and what looks rows up in them. Nothing may be in flight.
func (e *engine) closeTiers() error {
	all := []error{e.closeDynamic()}
	for _, s := range e.slots {
		for i := range s.segs {
			if b := s.segs[i].buckets; b != nil {
				all = append(all, b.Close())
				s.segs[i].buckets = nil
			}
		}
	}
	if e.het != nil {
		all = append(all, e.het.Close())
		e.het = nil
	}
	return errors.Join(all...)
}

// place decides where each row lives, by e.tiers, and fills the tiers from the SSDs. Where the device's memory does not
// suffice the GPU tier gets smaller.
func (e *engine) place(ctx context.Context) error {
	try := e.tryPlace
	if e.cfg.dynamic() {
		try = e.placeDynamic
	}
	err := try(ctx)
	if err != nil && interrupted(ctx) == nil {
		return overdue(e.shrink(ctx, err))
	}
	return err
}

func (e *engine) tryPlace(ctx context.Context) (err error) {
	// The stack comes first: the tiers get what it leaves of the device's memory.
	if e.reader == nil {
		if e.reader, err = e.openReader(ctx, e.in, e.layout); err != nil {
			return untiered{err}
		}
	}
	if e.placement, err = e.choose(ctx, e.tiers, e.in); err != nil {
		return untiered{err}
	}
	e.tiers = budgets{gpuRows: int64(len(e.placement.GPU)), cpuRows: int64(len(e.placement.CPU))}
	if e.het, err = cache.NewHetero(e.dev, e.rows, e.rowBytes, len(e.ssds), e.placement); err != nil {
		return err
	}
	for _, s := range e.slots {
		for i := range s.segs {
			if s.segs[i].buckets, err = e.het.NewBuckets(); err != nil {
				return err
			}
		}
	}
	start := time.Now()
	for _, t := range []cache.Tier{cache.GPU, cache.CPU} {
		if err := e.fillTier(ctx, t); err != nil {
			return err
		}
	}
	e.fill += time.Since(start)
	e.trace.run("fill tiers", start)
	if err := e.beginTrace(); err != nil {
		return err
	}
	if e.tiers.gpuRows+e.tiers.cpuRows == e.rows { // inmem, or budgets that hold everything
		return e.closeReader()
	}
	return nil
}

// gpuCacheBytes is the GPU tier's size.
func (e *engine) gpuCacheBytes() int64 {
	if e.dyn.Dynamic != nil {
		return e.dyn.Config().Slots * e.dyn.lines.LineBytes
	}
	return int64(len(e.placement.GPU)) * e.rowBytes
}

// stack is the I/O stack that batches read through.
func (e *engine) stack() string {
	if e.reader == nil {
		return StackNone
	}
	return e.cfg.IOStack
}

func (e *engine) sampleWhole(ctx context.Context, mb *graph.MiniBatch, epoch, index int, seeds []int64) error {
	op, cancel := e.sampleCtx(ctx)
	defer cancel()
	if err := e.sampler.Begin(op, e.sampleS, mb, epoch, drawsOf(epoch, index), seeds); err != nil {
		return err
	}
	for h := range e.cfg.Fanouts {
		if err := e.sampler.Hop(op, e.sampleS, mb, h); err != nil {
			if stopped := interrupted(ctx); stopped != nil && op.Err() != nil {
				return stopped
			}
			return err
		}
	}
	return nil
}

// drawsOf is a batch's index for the sampler. Batches of training draw for themselves; what evaluation and prediction
// find out about a node must not depend on the batch that it is in.
func drawsOf(epoch, index int) int {
	if epoch >= valEpoch {
		return graph.SharedDraws(index)
	}
	return index
}

func batches(n, batch int) int { return (n + batch - 1) / batch }

// seedsOf is batch i of an order; the last one may be shorter.
func seedsOf(order []int64, i, batch int) []int64 {
	return order[i*batch : min((i+1)*batch, len(order))]
}

// fillRows is how many rows one set of a tier's filling reads. Tests lower it.
var fillRows = 1 << 15

// fillTier reads a tier's rows to their slots through the stack that the run uses.
func (e *engine) fillTier(ctx context.Context, t cache.Tier) error {
	name := map[cache.Tier]string{cache.GPU: "fill gpu cache", cache.CPU: "fill cpu cache"}[t]
	return e.fillRowsTo(ctx, e.het.TierRows(t), e.het.TierBuffer(t), name)
}

// fillRowsTo reads rows one after the other into a buffer.
func (e *engine) fillRowsTo(ctx context.Context, rows []int64, dst cuda.Buffer, name string) error {
	if len(rows) == 0 {
		return nil
	}
	n := min(fillRows, len(rows))
	ids, err := e.dev.Alloc(cuda.MemPinned, int64(n)*8, "tier fill rows")
	if err != nil {
		return err
	}
	defer func() { _ = ids.Free() }()
	pos, err := e.dev.Alloc(cuda.MemPinned, int64(n)*4, "tier fill slots")
	if err != nil {
		return err
	}
	defer func() { _ = pos.Free() }()
	idv, posv := hostmem.View[int64](ids.Bytes()), hostmem.View[uint32](pos.Bytes())
	ssds := len(e.ssds)
	for at := 0; at < len(rows); at += n {
		if err := interrupted(ctx); err != nil {
			return err
		}
		part := rows[at:min(at+n, len(rows))]
		off := make([]int64, ssds+1)
		for _, r := range part {
			off[r%int64(ssds)+1]++
		}
		for s := range ssds {
			off[s+1] += off[s]
		}
		next := append([]int64(nil), off...)
		for i, r := range part {
			k := next[r%int64(ssds)]
			next[r%int64(ssds)]++
			idv[k], posv[k] = r, uint32(at+i)
		}
		op, cancel := e.readCtx(ctx)
		p, err := e.reader.Submit(op, &gpuio.ReadSet{
			Rows: ids.Ptr(), Pos: pos.Ptr(), SSDOffset: off, Dst: dst, DstStride: e.rowBytes, DstBytes: int64(at+len(part)) * e.rowBytes,
		})
		if err == nil {
			_, err = p.Wait(op)
		}
		cancel()
		if err != nil {
			// The set's buffers may be freed only when nothing can read or write them.
			e.stopped = ctx.Err() != nil
			cerr := e.closeReader()
			if stopped := interrupted(ctx); stopped != nil {
				return errs.With(errs.Interrupted, errors.Join(stopped, cerr))
			}
			return fmt.Errorf("filling the %s: %w", name[len("fill "):], errors.Join(readError(err), cerr))
		}
		e.obs.step(name, at+len(part), len(rows))
	}
	return gpuio.Forget(e.reader, dst) // no SSD writes there again
}

// readError attaches class Device to a failed read that has no class yet.
func readError(err error) error {
	if errs.ClassOf(err) == errs.Failed {
		return errs.With(errs.Device, err)
	}
	return err
}
