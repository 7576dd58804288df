// Package prepare opens what every run begins with: a dataset's topology and labels, a sampler with
// its stream, and the rows' hotness by which tiers are filled. Training, evaluation and the
// modelled run all open a Sampling.
package prepare

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"helios/cuda"
	"helios/dataset"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/ranks"
	"helios/internal/rowtype"
	"helios/sched/plan"
	"helios/sched/report"
)

// The epoch numbers that sampling is keyed by. Training's are plan.Config.SampleEpoch's, from 0 on;
// every other use has numbers of its own, so that placing rows and evaluating never see training's
// samples. The sampler's counter has 24 bits for them.
const (
	maxEpochs      = 1 << 20
	PresampleEpoch = 1 << 22 // + pass
	ValEpoch       = 2 << 22 // + epoch
	TestEpoch      = 3 << 22
	PredictEpoch   = 3<<22 + 1
)

// Sampling is a dataset that a run samples from: its topology and labels, the sampler with its
// stream, and what the rows' hotness is found by. Training, evaluation, the modelled run and cache
// planning all begin with one.
type Sampling struct {
	Config   plan.Config // settled: Check has passed and the device has had its say
	Observer report.Observer
	Device   cuda.Device
	In       Inputs
	// Grace is the time that reads may take after an interrupt.
	Grace time.Duration

	Rows     int64
	Dim      int
	RowType  rowtype.Type // of the rows on the SSDs, in the slots and in the tiers
	RowBytes int64        // of one of them

	schema   *graph.Schema // nil: one type, one relation
	Topology *graph.Topology
	dtopo    *graph.DeviceTopology
	Targets  *Targets
	Sampler  *graph.Sampler
	Stream   cuda.Stream

	// EachHop, where given, sees a mini-batch behind each hop that SampleWhole has sampled.
	EachHop func(mb *graph.MiniBatch, hop int)
	// Presampled, where given, sees what presampling samples.
	Presampled    func(*graph.MiniBatch)
	Scratch       *graph.MiniBatch    // for sampling outside of a walk
	Seen          Frontier            // of it
	Hotness       *report.HotnessInfo // what placed the tiers; nil: nothing had to
	PresampleTime time.Duration       // that finding it took
	closers       []func() error
}

// New takes over the shape of the features, which are stored as t. Nothing is open yet.
func New(cfg plan.Config, in Inputs, obs report.Observer, t rowtype.Type) *Sampling {
	m := in.Dataset.Meta
	rows, dim := m.Stored()
	s := &Sampling{
		Config: cfg, Observer: obs, Device: in.Dev, In: in, Grace: InterruptGrace,
		schema: sampled(&cfg, &m),
		Rows:   rows, Dim: dim, RowType: t, RowBytes: int64(t.RowBytes(dim)),
	}
	if in.Seeds != nil {
		s.schema.Seeds = in.Seeds.Type
	}
	s.share()
	return s
}

// ScaleBytes is the CPU memory that the scales of all rows take; 0 where their type has none.
func (s *Sampling) ScaleBytes() int64 {
	if !s.RowType.Scaled() {
		return 0
	}
	return 4 * s.Rows
}

// Open opens a dataset for a run that reads no rows, on the host device: rows are of the type that
// cfg names, or the dataset's. Close it.
func Open(ctx context.Context, cfg plan.Config, in Inputs, obs report.Observer) (*Sampling, error) {
	cfg, err := cfg.Filled()
	if err != nil {
		return nil, err
	}
	if i := in.Dev.Info(); i.Backend != "host" {
		return nil, errs.New(errs.Capability,
			"a run that reads no rows samples on the host device, not on %s; use {device} host",
			i.Name)
	}
	if cfg, err = cfg.OnDevice(in.Dev.Info()); err != nil {
		return nil, err
	}
	if err := CheckTypes(&cfg, &in.Dataset.Meta); err != nil {
		return nil, err
	}
	t := in.Dataset.Meta.RowType()
	if cfg.RowType != "" {
		if t, err = rowtype.Parse(cfg.RowType); err != nil {
			return nil, err
		}
	}
	s := New(cfg, in, obs, t)
	if err := s.Open(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Open opens the topology, the labels and the sampler. On error the caller closes s.
func (s *Sampling) Open(ctx context.Context) (err error) {
	if err := s.OpenTopology(ctx); err != nil {
		return err
	}
	if s.Targets, err = ReadTargets(s.In.Dataset); err != nil {
		return err
	}
	if s.Stream, err = s.Device.NewStream(s.Config.Operators(true).StreamOptions(
		plan.OpSample)); err != nil {
		return err
	}
	s.OnClose(func() error { return s.Stream.Close() }) // the tuner may have made another
	if s.Sampler, err = s.newSampler(s.Config.Fanouts); err != nil {
		return err
	}
	s.OnClose(s.Sampler.Close)
	return nil
}

// OnClose adds f to what close does, in reverse order.
func (s *Sampling) OnClose(f func() error) { s.closers = append(s.closers, f) }

// Close releases everything; it reports all failures.
func (s *Sampling) Close() error {
	err := CloseAll(s.closers)
	s.closers = nil
	return err
}

// CloseAll calls closers from the last to the first, all of them.
func CloseAll(closers []func() error) error {
	var all []error
	for _, f := range slices.Backward(closers) {
		all = append(all, f())
	}
	return errors.Join(all...)
}

// NewBatch makes a mini-batch that lasts as long as s.
func (s *Sampling) NewBatch() (*graph.MiniBatch, error) {
	mb, err := s.Sampler.NewMiniBatch()
	if err == nil {
		s.OnClose(mb.Close)
	}
	return mb, err
}

// scratchBatch is the mini-batch for sampling outside of a walk.
func (s *Sampling) scratchBatch() (*graph.MiniBatch, error) {
	if s.Scratch != nil {
		return s.Scratch, nil
	}
	mb, err := s.NewBatch()
	s.Scratch = mb
	return mb, err
}

// OperatorContext bounds one wait for an operator. It does not end when the user interrupts: what
// has been started is finished (reads have their own deadlines), and no buffer is let go while a
// kernel or an SSD may still write to it.
func (s *Sampling) OperatorContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), s.Config.OpTimeout)
}

// InterruptGrace is a new engine's grace. Tests shorten it.
var InterruptGrace = 3 * time.Second

// ReadContext is opCtx for reads, which may have to wait until an SSD has been recovered: after an
// interrupt it goes on for s.grace only. Reads that are still in flight then end with the
// reader, which is closed before any buffer is freed.
func (s *Sampling) ReadContext(ctx context.Context) (context.Context, context.CancelFunc) {
	op, cancel := s.OperatorContext(ctx)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(s.Grace, cancel) })
	return op, func() {
		stop()
		cancel()
	}
}

// Interrupted is the error of a run that the user stopped; nil when they did not.
func Interrupted(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return errs.New(errs.Interrupted, "interrupted: %w", context.Cause(ctx))
}

// MaxFrontier is the most rows a batch can need.
func (s *Sampling) MaxFrontier(batch int) int64 {
	if s.schema != nil {
		return s.typedFrontier(batch)
	}
	n, method := int64(batch), s.Config.Method()
	for _, f := range s.Config.Fanouts {
		if n = method.Bound(n, f); n >= s.Rows {
			return s.Rows
		}
	}
	return n
}

// SampleWhole samples all hops of a batch.
func (s *Sampling) SampleWhole(ctx context.Context, mb *graph.MiniBatch, epoch, index int,
	seeds []int64) error {
	op, cancel := s.SampleContext(ctx)
	defer cancel()
	if err := s.Sampler.Begin(op, s.Stream, mb, epoch, DrawsOf(epoch, index), seeds); err != nil {
		return err
	}
	for h := range s.Config.Fanouts {
		if err := s.Sampler.Hop(op, s.Stream, mb, h); err != nil {
			if stopped := Interrupted(ctx); stopped != nil && op.Err() != nil {
				return stopped
			}
			return err
		}
		if s.EachHop != nil {
			s.EachHop(mb, h)
		}
	}
	return nil
}

// DrawsOf is a batch's index for the sampler. Batches of training draw for themselves; what
// evaluation and prediction find out about a node must not depend on the batch that it is in.
func DrawsOf(epoch, index int) int {
	if epoch >= ValEpoch {
		return graph.SharedDraws(index)
	}
	return index
}

// Batches returns how many batches n seeds make.
func Batches(n, batch int) int { return (n + batch - 1) / batch }

// CountEpoch samples one epoch and counts its rows.
func (s *Sampling) CountEpoch(ctx context.Context, epoch int, train []int64,
	counts []uint32) (accesses int64, err error) {
	mb, err := s.scratchBatch()
	if err != nil {
		return 0, err
	}
	order := s.Shuffled(train, epoch)
	n := order.Len()
	for i := range n {
		if err := Interrupted(ctx); err != nil {
			return 0, err
		}
		if err := s.SampleWhole(ctx, mb, epoch, order.Index(i), order.Seeds(i)); err != nil {
			return 0, err
		}
		rows := hostmem.View[int64](mb.RowNumbers().Bytes())[:mb.RowCount(len(s.Config.Fanouts))]
		for _, v := range rows {
			if counts[v] < math.MaxUint32 {
				counts[v]++
			}
			accesses++
		}
		s.Observer.TellStep("sample", i+1, n)
	}
	return accesses, nil
}

// TrainSplit is the dataset's, which must not be empty.
func TrainSplit(in Inputs) ([]int64, error) {
	train, err := in.Dataset.Split("train")
	if err == nil && len(train) == 0 {
		err = errs.New(errs.Usage,
			"dataset %s has no training nodes; import or generate it with a training split",
			in.Dataset.Meta.Name)
	}
	return train, err
}

// Frontier is the largest of the mini-batches that were sampled beforehand, hop by hop.
type Frontier struct {
	HopEnd, Edges []int64
}

// BucketBytes is the memory behind a looked-up position (cache.Buckets), beside the lookup's own
// rounding.
const BucketBytes = 36

// BatchBytes is the device memory of the mini-batches that are under way, each of the frontier's
// sizes. As many as credits have a feature tensor, of so many rows of rowBytes, and a lookup; as
// many as samples have a sample. One of them also has its rows as float32, of wide bytes each; 0:
// none has.
func (f *Frontier) BatchBytes(credits, samples, rows, rowBytes, wide int64, degrees bool) int64 {
	n := credits*rows*rowBytes + rows*wide
	n += credits * rows * BucketBytes * 9 / 8 // they grow by an eighth more
	mb := rows * 8
	if degrees {
		mb += rows * 4
	}
	for h, edges := range f.Edges {
		mb += (f.HopEnd[h]+1)*8 + edges*4
	}
	return n + samples*mb*5/4 // when one grows it is there twice for a while
}

func (f *Frontier) add(mb *graph.MiniBatch) {
	if f.HopEnd == nil {
		f.HopEnd, f.Edges = make([]int64, len(mb.HopEnd)), make([]int64, len(mb.Blocks))
	}
	for i, n := range mb.HopEnd {
		f.HopEnd[i] = max(f.HopEnd[i], n)
	}
	for i := range mb.Blocks {
		f.Edges[i] = max(f.Edges[i], mb.Blocks[i].NumEdges)
	}
}

// OnGPU reports whether the device's memory is its own, not the CPU's.
func (s *Sampling) OnGPU() bool { return s.Device.Info().Backend != "host" }

// Inputs hold what a run works on. The caller opens and closes them.
type Inputs struct {
	Dev cuda.Device
	// More are the devices beside Dev that train with copies of the model (plan.Config.Replicas).
	More    []cuda.Device
	Dataset *dataset.Dataset
	// Group, where given, is the processes that train together (plan.Config.Ranks).
	Group ranks.Group
	SSDs  []*gpuio.SSD // any order: the superblocks say which stripe each holds
	// Seeds are given for a loader of a typed graph whose seeds are of another type than those that
	// have targets.
	Seeds *TypedSeeds
}

// TypedSeeds are nodes of a type of a typed graph, by their numbers in the type.
type TypedSeeds struct {
	Type  int
	Nodes []int64
}

// HotFrom returns the nodes from which rows are sampled to find their hotness.
func (in *Inputs) HotFrom() ([]int64, error) {
	if in.Seeds != nil {
		return in.Seeds.Nodes, nil
	}
	return in.Dataset.Split("train")
}

// FillRows is the number of rows that one set of a tier's filling reads. Tests lower it.
var FillRows = 1 << 15
