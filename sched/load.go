package sched

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"helios/cache/trace"
	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// LoaderOptions say which mini-batches a Loader makes.
type LoaderOptions struct {
	// Nodes are the seeds; nil: those of Split, one of dataset.Splits.
	Nodes []int64
	Split string
	// Shuffle deals the seeds anew in each epoch, and draws as training does. Without it they keep
	// their order, and each node's draws are its own, whatever batch it is in, as in evaluation.
	Shuffle bool
	// Any has the loader make any mini-batches, in any order. Without it an epoch is made from one
	// of them to the end.
	Any bool
}

// Loader hands mini-batches to a consumer in place of training with them: the same ones, sampled,
// read and cached in the same way. One goroutine at a time may use it.
type Loader struct {
	e     *engine
	o     LoaderOptions
	seeds []int64
	looks []prepare.Stager
	leave bool // rows where they are
	at    places
}

// Loaded is a mini-batch where the CPU sees it. It is valid until the consumer returns.
type Loaded struct {
	Epoch, Index int
	Seeds        int
	HopEnd       []int64 // nodes after each hop, the seeds' first
	Nodes        []int64 // HopEnd's last
	Rows         []byte  // their features, as the SSDs store them; nil after LeaveRows
	At           *Place  // that Rows lie in; nil: the loader's own memory
	// RowsAt is where these are on the loader's device, for work on its Stream.
	RowsAt  cuda.DevicePtr
	Labels  []int32 // of the seeds; -1 where there is none
	Blocks  []LoadedBlock
	Degrees []uint32 // of Nodes; nil where the configuration's model needs none
}

// LoadedBlock has the edges of a hop, as graph.Block.
type LoadedBlock struct {
	NumDst, NumSrc int64
	Indptr         []int64
	Src            []uint32
	Weights        []float32 // nil: none
}

// OpenLoader opens a run of cfg without a model. cfg's options of models say nothing here. Modes
// that lay mini-batches out beforehand do so for a loader of the shuffled split train in its order;
// their other loaders read rows, as evaluation does. Modes that train on mega-batches are refused.
func OpenLoader(ctx context.Context, cfg plan.Config, in prepare.Inputs, o LoaderOptions,
	obs report.Observer) (l *Loader, err error) {
	cfg.CheckpointDir, cfg.Resume, cfg.CheckpointEvery, cfg.Trace = "", false, 0, ""
	if cfg.MegaBatched() {
		return nil, errs.New(errs.Capability,
			"%v %s trains on parts of the graph in which nodes have other numbers, which no loader hands on; use another mode",
			errs.Key("mode"), cfg.Mode)
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
	l = &Loader{o: o, looks: make([]prepare.Stager, 3+3*len(cfg.Fanouts))}
	if l.seeds, err = seedsOf(in, o); err != nil {
		return nil, err
	}
	if l.e, err = newEngine(ctx, cfg, in, obs, noModel); err != nil {
		return nil, err
	}
	return l, nil
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
	sorted := slices.Clone(o.Nodes)
	slices.Sort(sorted)
	for i, v := range sorted {
		if v < 0 || v >= m.Nodes {
			return nil, errs.New(errs.Usage,
				"node %d is not in dataset %s, whose nodes are 0 to %d", v, m.Name, m.Nodes-1)
		}
		if i > 0 && v == sorted[i-1] {
			return nil, errs.New(errs.Usage, "node %d is asked for twice; name each node once", v)
		}
	}
	if len(sorted) == 0 {
		return nil, errs.New(errs.Usage, "no nodes to load; name at least one")
	}
	return slices.Clone(o.Nodes), nil
}

// Close releases what the loader holds.
func (l *Loader) Close() error {
	err := errors.Join(l.e.close(), l.at.end())
	for i := range l.looks {
		err = errors.Join(err, l.looks[i].Close())
	}
	return err
}

// Batches returns how many mini-batches an epoch has.
func (l *Loader) Batches() int { return l.order(0).Len() }

// RowBytes and RowType say how Loaded.Rows are stored.
func (l *Loader) RowBytes() int64 { return l.e.RowBytes }

// RowType returns the name of the type of the rows' elements.
func (l *Loader) RowType() string { return l.e.RowType.String() }

// Scales returns the scales of the rows of all nodes; nil where their type has none.
func (l *Loader) Scales() []float32 { return l.e.store.allScales() }

// LeaveRows has batches come without Rows from now on, for a consumer on the device.
func (l *Loader) LeaveRows() { l.leave = true }

// Stream returns the stream of the consumer's work on the device. It waits for what makes a batch.
func (l *Loader) Stream() cuda.Stream { return l.e.trainS }

// BytesRead returns how much the loader has read from SSDs so far.
func (l *Loader) BytesRead() (n int64) {
	for _, s := range l.e.store.io().SSDs {
		n += s.Bytes
	}
	return n
}

func (l *Loader) order(sampleEpoch int) prepare.Order {
	o := prepare.NewOrder(l.seeds, l.e.Config.Batch)
	if l.o.Shuffle {
		o = l.e.features.shuffled(l.seeds, sampleEpoch)
	}
	return o
}

// Epoch hands mini-batches of an epoch, both counted from 0, to emit, in the order given and one at
// a time. Those behind it are made meanwhile. It ends with emit's first error. When ctx ends, which
// emit has to heed where it waits, the error has class errs.Interrupted. Another epoch may follow
// either.
func (l *Loader) Epoch(ctx context.Context, epoch int, batches []int,
	emit func(*Loaded) error) error {
	return l.EpochInto(ctx, epoch, batches, nil, emit)
}

// EpochInto is Epoch for a consumer with memory for rows. place says where those of the batch of
// that index go; nil: the loader's own memory. It is called on another goroutine than emit, in the
// order of the batches, and again with the same index for a batch that is made anew. A place is the
// batch's until emit has returned, or EpochInto.
func (l *Loader) EpochInto(ctx context.Context, epoch int, batches []int,
	place func(index int) *Place, emit func(*Loaded) error) error {
	e := l.e
	if epoch < 0 || epoch >= plan.MaxEpochs {
		return errs.New(errs.Usage, "epoch %d is not between 0 and %d", epoch, plan.MaxEpochs-1)
	}
	if e.Config.LaidOut() && epoch >= e.Config.Epochs {
		return errs.New(errs.Usage,
			"epoch %d: %v %s lays mini-batches out beforehand, of %d epochs; give a larger %v",
			epoch, errs.Key("mode"), e.Config.Mode, e.Config.Epochs, errs.Key("epochs"))
	}
	p := &pass{name: fmt.Sprintf("epoch %d", epoch+1), number: epoch, kind: trace.Train,
		epoch: e.Config.SampleEpoch(epoch), sampler: e.Sampler}
	if !l.o.Shuffle {
		p.kind, p.epoch = trace.Test, prepare.PredictEpoch
		switch {
		case l.o.Nodes != nil:
		case l.o.Split == "val":
			p.kind, p.epoch = trace.Validate, prepare.ValEpoch+epoch
		case l.o.Split == "test":
			p.epoch = prepare.TestEpoch
		}
	}
	p.order = l.order(p.epoch)
	n := p.order.Len()
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
	if p.first = n - len(batches); l.o.Any {
		p.first, p.order = 0, p.order.Pick(append([]int{}, batches...))
	}
	p.step = func(op context.Context, s *slot) (outcome, error) {
		if err := l.at.sweep(e, false); err != nil {
			return outcome{}, err
		}
		b, err := l.view(op, p, s)
		if err != nil {
			return outcome{}, err
		}
		b.Epoch = epoch
		return outcome{}, emit(b)
	}
	if place != nil && l.Ahead() > 0 {
		p.place = func(i int) cuda.Growable {
			if at := place(p.order.Index(i)); at != nil {
				return at
			}
			return nil
		}
	}
	e.store.stopped = false
	l.at.begin()
	err := e.run(ctx, p)
	return errors.Join(err, l.at.sweep(e, true))
}

// view brings a mini-batch to where the CPU sees it.
func (l *Loader) view(ctx context.Context, p *pass, s *slot) (*Loaded, error) {
	e, mb := l.e, s.mb
	rows := mb.HopEnd[len(mb.HopEnd)-1]
	next := 0
	look := func(b cuda.Buffer, n int64) (raw []byte, err error) {
		if b == nil || n == 0 {
			next++
			return nil, nil
		}
		raw, err = l.looks[next].View(ctx, e.Device, e.trainS, b, 0, n)
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
		x, err = look(s.x, rows*e.RowBytes)
		all = append(all, err)
	}
	deg, err := look(mb.Degrees, rows*4)
	all = append(all, err)
	b := &Loaded{Index: p.order.Index(s.index), Seeds: len(s.seeds),
		HopEnd: slices.Clone(mb.HopEnd), Nodes: hostmem.View[int64](nodes), Rows: x,
		RowsAt: s.x.Ptr(),
		Labels: hostmem.View[int32](s.labels.Bytes())[:len(s.seeds)]}
	b.At, _ = s.x.(*Place)
	if e.Config.Arch().Degrees() {
		b.Degrees = hostmem.View[uint32](deg)
	}
	for i := range mb.Blocks {
		k := &mb.Blocks[i]
		indptr, err := look(k.Indptr, (k.NumDst+1)*8)
		all = append(all, err)
		src, err := look(k.Src, k.NumEdges*4)
		all = append(all, err)
		weights, err := look(k.Weights, k.NumSrc*4)
		all = append(all, err)
		b.Blocks = append(b.Blocks, LoadedBlock{NumDst: k.NumDst, NumSrc: k.NumSrc,
			Indptr: hostmem.View[int64](indptr), Src: hostmem.View[uint32](src),
			Weights: hostmem.View[float32](weights)})
	}
	if err := errors.Join(all...); err != nil {
		return nil, fmt.Errorf("batch %d: %w", s.index, err)
	}
	return b, nil
}
