package sched

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"helios/cuda"
	"helios/dataset"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
)

// LoaderOptions say which mini-batches a Loader makes.
type LoaderOptions struct {
	// Nodes are the seeds; nil: those of Split, one of dataset.Splits. A node may stand twice.
	Nodes []int64
	// Type is that of Nodes in a typed graph, where they count; empty: the one that has targets.
	Type  string
	Split string
	// Shuffle deals the seeds anew in each epoch, and draws as training does. Without it they keep
	// their order, and each node's draws are its own, whatever batch it is in, as in evaluation.
	Shuffle bool
	// Anew draws anew in each epoch and for each mini-batch without Shuffle, too.
	Anew bool
	// AllLabels has Loaded.Labels of all nodes.
	AllLabels bool
	// Positions fills Loaded.Positions.
	Positions bool
	// Any has the loader make any mini-batches, in any order. Without it an epoch is made from one
	// of them to the end.
	Any bool
}

// Loader hands mini-batches to a consumer in place of training with them: the same ones, sampled,
// read and cached in the same way. One goroutine at a time may use it.
type Loader struct {
	e     *runner
	o     LoaderOptions
	seeds []int64
	// With LoaderOptions.Positions: 0 to len(seeds)-1, and they in the order of the epoch.
	positions []int64
	dealt     prepare.Order
	targets   []int32 // or float32, of a mini-batch, with LoaderOptions.AllLabels
	local     []int64 // its nodes of one type
	looks     []prepare.Stager
	leave     bool // rows where they are
	schema    *graph.Schema
	at        places
}

// Loaded is a mini-batch where the CPU sees it. It is valid until the consumer returns.
type Loaded struct {
	Epoch, Index int
	Seeds        int
	HopEnd       []int64 // nodes after each hop, the seeds' first
	Nodes        []int64 // HopEnd's last
	Rows         []byte  // their features, as the SSDs store them; nil after LeaveRows
	At           *Place  // that Rows lie in; nil: the loader's own memory
	// RowsAt is their address on the loader's device, for work on its Stream.
	RowsAt cuda.DevicePtr
	// Labels are those of the seeds, or of all nodes (LoaderOptions.AllLabels); -1: none; nil where
	// the task asks for no class.
	Labels []int32
	// Targets are labels (0, 1) or numbers of the same nodes, a row each, where the task asks for
	// these; NaN where there is none.
	Targets []float32
	Columns int // of Targets
	Blocks  []LoadedBlock
	// Positions are those of the seeds among the loader's; nil without LoaderOptions.Positions.
	Positions []int64
	Degrees   []uint32 // of Nodes; nil where the configuration's model needs none
	// Of a typed graph: as graph.MiniBatch.TypeEnd. Labels are then of nodes of the type that has
	// targets alone, in their order.
	TypeEnd [][]int64
}

// TypeRange returns the part of Nodes that has those of type t that hop h added; hop 0 has the
// seeds.
func (b *Loaded) TypeRange(h, t int) (lo, hi int64) {
	return graph.TypeRange(b.HopEnd, b.TypeEnd, h, t)
}

// LoadedBlock has the edges of a hop, as graph.Block.
type LoadedBlock struct {
	NumDst, NumSrc int64
	Indptr         []int64
	Src            []uint32
	Weights        []float32 // nil: none
	Lists          []graph.ListRange
}

// OpenLoader opens a run of cfg without a model. cfg's options of models say nothing here. Modes
// that lay mini-batches out beforehand do so for a loader of the shuffled split train in its order;
// their other loaders read rows, as evaluation does. Modes that train on mega-batches are refused.
func OpenLoader(ctx context.Context, cfg plan.Config, in prepare.Inputs, o LoaderOptions,
	obs report.Observer) (l *Loader, err error) {
	cfg.CheckpointDir, cfg.Resume, cfg.CheckpointEvery = "", false, 0
	if in.Seeds, err = typedSeeds(&in.Dataset.Meta, &o); err != nil {
		return nil, err
	}
	if cfg, err = Choose(ctx, cfg, in, obs); err != nil {
		return nil, err
	}
	if refuse := tiers.Of(&cfg).Run.Loads; refuse != nil {
		if err := refuse(&cfg); err != nil {
			return nil, err
		}
	}
	cfg.Unpacked = o.Split != "train" || o.Nodes != nil || !o.Shuffle || o.Any
	if cfg, err = cfg.Filled(); err != nil {
		return nil, err
	}
	if cfg.Replicas > 1 || cfg.Tuning() {
		return nil, errs.New(errs.Usage, "a loader trains nothing; leave %v and %v out",
			errs.Key("replicas"), errs.Key("tune"))
	}
	if cfg, err = cfg.OnDevice(in.Dev.Info()); err != nil {
		return nil, err
	}
	l = &Loader{o: o, looks: make([]prepare.Stager, 3+3*len(cfg.Fanouts)),
		schema: prepare.SchemaOf(&in.Dataset.Meta)}
	if l.seeds, err = seedsOf(in, o); err != nil {
		return nil, err
	}
	l.place()
	if l.e, err = newRunner(ctx, cfg, in, obs, noModel); err != nil {
		return nil, err
	}
	tellChoice(&cfg, obs)
	return l, nil
}

// Seed sets the nodes of later epochs. It is for a loader of LoaderOptions.Nodes.
func (l *Loader) Seed(nodes []int64) error {
	o := l.o
	o.Nodes = nodes
	seeds, err := seedsOf(l.e.In, o)
	if err != nil {
		return err
	}
	l.o, l.seeds = o, seeds
	l.place()
	return nil
}

// place numbers the seeds, where positions are asked for.
func (l *Loader) place() {
	l.positions = l.positions[:0]
	if !l.o.Positions {
		return
	}
	for i := range l.seeds {
		l.positions = append(l.positions, int64(i))
	}
}

// seedsOf returns the seeds of a loader.
func seedsOf(in prepare.Inputs, o LoaderOptions) ([]int64, error) {
	m := in.Dataset.Meta
	if o.Nodes == nil {
		nodes, err := in.Dataset.Split(o.Split)
		if err == nil && len(nodes) == 0 {
			err = errs.New(errs.Usage,
				"dataset %s has no nodes in split %s; name others, or import it with that split",
				m.Name, o.Split)
		}
		return nodes, err
	}
	g := m.Graph()
	t := &g.NodeTypes[g.TypeOf(cmp.Or(o.Type, g.Tasks[0].Type))]
	for _, v := range o.Nodes {
		if v < 0 || v >= t.Nodes {
			of := "dataset " + m.Name
			if !m.Homogeneous() {
				of = "type " + t.Name + " of " + of
			}
			return nil, errs.New(errs.Usage, "node %d is not in %s, whose nodes are 0 to %d", v, of,
				t.Nodes-1)
		}
	}
	if len(o.Nodes) == 0 {
		return nil, errs.New(errs.Usage, "no nodes to load; name at least one")
	}
	return slices.Clone(o.Nodes), nil
}

// typedSeeds returns a loader's nodes where they are of another type than those that have targets;
// else nil.
func typedSeeds(m *dataset.Meta, o *LoaderOptions) (*prepare.TypedSeeds, error) {
	if o.Type == "" {
		return nil, nil
	}
	g := m.Graph()
	t := g.TypeOf(o.Type)
	switch {
	case m.Homogeneous() || t < 0:
		var names []string
		for i := range g.NodeTypes {
			names = append(names, g.NodeTypes[i].Name)
		}
		return nil, errs.New(errs.Usage, "dataset %s has no nodes of type %q; its types are %s", m.Name,
			o.Type, strings.Join(names, ", "))
	case o.Type == g.Tasks[0].Type:
		return nil, nil
	case o.Nodes == nil:
		return nil, errs.New(errs.Usage, "split %s has nodes of type %s, not %s; name nodes", o.Split,
			g.Tasks[0].Type, o.Type)
	}
	return &prepare.TypedSeeds{Type: t, Nodes: o.Nodes}, nil
}

// labelled returns the nodes of a batch that Labels are of, where they are not the seeds' alone.
func (l *Loader) labelled(b *Loaded) []int64 {
	if l.schema == nil {
		return b.Nodes
	}
	l.local = l.local[:0]
	if !l.o.AllLabels {
		return l.local
	}
	t := l.schema.Seeds // of the task's
	first := l.schema.First(t)
	for h := range b.TypeEnd {
		lo, hi := b.TypeRange(h, t)
		for _, v := range b.Nodes[lo:hi] {
			l.local = append(l.local, v-first)
		}
	}
	return l.local
}

// Close releases what the loader holds.
func (l *Loader) Close() error {
	err := errors.Join(l.e.Close(), l.at.end())
	for i := range l.looks {
		err = errors.Join(err, l.looks[i].Close())
	}
	return err
}

// Batches returns how many mini-batches an epoch has.
func (l *Loader) Batches() int { return l.order(l.seeds, 0).Len() }

// RowBytes and RowType say how Loaded.Rows are stored.
func (l *Loader) RowBytes() int64 { return l.e.RowBytes }

// RowType returns the name of the type of the rows' elements.
func (l *Loader) RowType() string { return l.e.RowType.String() }

// Scales returns the scales of the rows of all nodes; nil where their type has none.
func (l *Loader) Scales() []float32 { return l.e.Store.Scales() }

// LeaveRows has batches come without Rows from now on, for a consumer on the device.
func (l *Loader) LeaveRows() { l.leave = true }

// Stream returns the stream of the consumer's work on the device. It waits for what makes a batch.
func (l *Loader) Stream() cuda.Stream { return l.e.TrainStream }

// BytesRead returns how much the loader has read from SSDs so far.
func (l *Loader) BytesRead() (n int64) {
	for _, s := range l.e.Store.IO().SSDs {
		n += s.Bytes
	}
	return n
}

func (l *Loader) order(seeds []int64, sampleEpoch int) prepare.Order {
	if l.o.Shuffle {
		return l.e.Tiers.Shuffled(seeds, sampleEpoch)
	}
	return prepare.NewOrder(seeds, l.e.Config.Batch)
}

// Epoch hands mini-batches of an epoch, both counted from 0, to emit, in the order given and one at
// a time. Those behind it are made meanwhile. It ends with emit's first error. When ctx ends, which
// emit has to heed where it waits, the error has class errs.Interrupted. Another epoch may follow
// either.
func (l *Loader) Epoch(ctx context.Context, epoch int, batches []int,
	emit func(*Loaded) error) error {
	return l.EpochInto(ctx, epoch, batches, nil, emit)
}

// EpochInto is Epoch for a consumer with memory for rows. place gives those of the batch of that
// index a place; nil: the loader's own memory. It is called on another goroutine than emit, in the
// order of the batches, and again with the same index for a batch that is made anew. A place is the
// batch's until emit has returned, or EpochInto.
func (l *Loader) EpochInto(ctx context.Context, epoch int, batches []int,
	place func(index int) *Place, emit func(*Loaded) error) error {
	e := l.e
	if epoch < 0 || epoch >= plan.MaxEpochs {
		return errs.New(errs.Usage, "epoch %d is not between 0 and %d", epoch, plan.MaxEpochs-1)
	}
	if err := e.Tiers.HasEpoch(epoch); err != nil {
		return err
	}
	p := &engine.Pass{Name: fmt.Sprintf("epoch %d", epoch+1), Number: epoch,
		Training: l.o.Shuffle, Epoch: e.Config.SampleEpoch(epoch), Sampler: e.Sampler}
	if !l.o.Shuffle && !l.o.Anew {
		p.Epoch = prepare.PredictEpoch
		switch {
		case l.o.Nodes != nil:
		case l.o.Split == "val":
			p.Epoch = prepare.ValEpoch + epoch
		case l.o.Split == "test":
			p.Epoch = prepare.TestEpoch
		}
	}
	p.Order, l.dealt = l.order(l.seeds, p.Epoch), l.order(l.positions, p.Epoch)
	n := p.Order.Len()
	for i, b := range batches {
		if b < 0 || b >= n {
			return errs.New(errs.Usage, "batch %d is not between 0 and %d", b, n-1)
		}
		if !l.o.Any && b != n-len(batches)+i {
			return errs.New(errs.Usage,
				"batch %d of the last %d: this loader makes an epoch in its order, to the end", b,
				len(batches))
		}
	}
	if p.First = n - len(batches); l.o.Any {
		p.First, p.Order = 0, p.Order.Pick(append([]int{}, batches...))
	}
	p.Step = func(op context.Context, s *engine.Slot) (engine.Outcome, error) {
		if err := l.at.sweep(e, false); err != nil {
			return engine.Outcome{}, err
		}
		b, err := l.view(op, p, s)
		if err != nil {
			return engine.Outcome{}, err
		}
		b.Epoch = epoch
		return engine.Outcome{}, emit(b)
	}
	if place != nil && l.Ahead() > 0 {
		p.Place = func(i int) cuda.Growable {
			if own := place(p.Order.Index(i)); own != nil {
				return own
			}
			return nil
		}
	}
	e.Store.Stopped = false
	l.at.begin()
	err := e.Run(ctx, p)
	return errors.Join(err, l.at.sweep(e, true))
}

// view brings a mini-batch to where the CPU sees it.
func (l *Loader) view(ctx context.Context, p *engine.Pass, s *engine.Slot) (*Loaded, error) {
	e, mb := l.e, s.Batch
	rows := mb.HopEnd[len(mb.HopEnd)-1]
	next := 0
	look := func(b cuda.Buffer, n int64) (raw []byte, err error) {
		if b == nil || n == 0 {
			next++
			return nil, nil
		}
		raw, err = l.looks[next].View(ctx, e.Device, e.TrainStream, b, 0, n)
		next++
		return raw, err
	}
	var all []error
	nodes, err := look(mb.Nodes, rows*8)
	all = append(all, err)
	var x []byte
	if l.leave {
		next++
	} else {
		x, err = look(s.Features, rows*e.RowBytes)
		all = append(all, err)
	}
	deg, err := look(mb.Degrees, rows*4)
	all = append(all, err)
	b := &Loaded{Index: p.Order.Index(s.Index), Seeds: len(s.Seeds),
		HopEnd: slices.Clone(mb.HopEnd), Nodes: hostmem.View[int64](nodes), Rows: x,
		RowsAt: s.Features.Ptr()}
	if l.schema != nil {
		b.TypeEnd = mb.TypeEnd
	}
	targets := s.Labels.Bytes()[:e.Targets.Bytes(len(s.Seeds))]
	if l.o.AllLabels || e.In.Seeds != nil {
		of := l.labelled(b)
		n := int(e.Targets.Bytes(len(of)))
		l.targets = slices.Grow(l.targets[:0], n/4)[:n/4]
		targets = unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(l.targets))), n)
		e.Targets.Write(of, targets)
	}
	if e.Targets.Dense() {
		b.Targets, b.Columns = hostmem.View[float32](targets), e.Targets.Columns
	} else {
		b.Labels = hostmem.View[int32](targets)
	}
	if l.o.Positions {
		b.Positions = l.dealt.Seeds(b.Index)
	}
	b.At, _ = s.Features.(*Place)
	if e.Config.Arch().Degrees() {
		b.Degrees = hostmem.View[uint32](deg)
	}
	for i := range mb.Blocks {
		k := &mb.Blocks[i]
		indptr, err := look(k.Indptr, (k.NumLists()+1)*8)
		all = append(all, err)
		src, err := look(k.Src, k.NumEdges*4)
		all = append(all, err)
		weights, err := look(k.Weights, k.NumSrc*4)
		all = append(all, err)
		b.Blocks = append(b.Blocks, LoadedBlock{NumDst: k.NumDst, NumSrc: k.NumSrc,
			Indptr: hostmem.View[int64](indptr), Src: hostmem.View[uint32](src),
			Weights: hostmem.View[float32](weights), Lists: k.Lists})
	}
	if err := errors.Join(all...); err != nil {
		return nil, fmt.Errorf("batch %d: %w", s.Index, err)
	}
	return b, nil
}
