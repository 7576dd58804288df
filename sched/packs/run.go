package packs

import (
	"context"
	"errors"
	"math"
	"slices"

	"helios/cache"
	"helios/cache/packed"
	"helios/dataset/pages"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/samples"
)

// Options set up a run's packs.
type Options struct {
	Dir     string // the folder
	Budget  int64  // most bytes of the pages of plan.Config.SampleEpochs; 0: no bound
	Segment int    // mini-batches that share a disk cache; 0: what is best within Budget
	Hot     int64  // rows that stay in memory while training
	Pages   pages.Place
	// InTurn: a refresh's pack is made before the epoch that needs it, not while others train.
	InTurn bool
	// Source opens the rows in the type of the run, and returns the function that closes them; nil,
	// and while others train: the dataset's file.
	Source func(ctx context.Context) (packed.Source, func() error, error)
}

// Run has the packs of a run. Its methods are of one goroutine.
type Run struct {
	s       *prepare.Sampling
	o       Options
	folder  *Folder
	train   []int64
	batches int // of an epoch
	open    []*Pack
	hot     []int64 // of the first pack
	coming  *coming
}

// coming is a pack that is made while others train.
type coming struct {
	cancel context.CancelFunc
	done   chan struct{}
	pack   *Pack // valid once done is closed, as err
	err    error
}

// Start takes the folder for a run over s, which is open. Close it before s.
func Start(s *prepare.Sampling, o Options) (*Run, error) {
	train, err := prepare.TrainSplit(s.In)
	if err != nil {
		return nil, err
	}
	r := &Run{s: s, o: o, train: train, batches: prepare.Batches(len(train), s.Config.Batch)}
	if o.Hot >= math.MaxInt32 {
		return nil, errs.New(errs.Usage,
			"%d rows would stay in memory, and packed mini-batches keep below 2^31 there; lower %v or %v",
			o.Hot, errs.Key("gpu-cache"), errs.Key("cpu-cache"))
	}
	if r.folder, err = Open(o.Dir, r.key(), o.Pages); err != nil {
		return nil, err
	}
	return r, nil
}

// key has the facts that the run's packs depend on.
func (r *Run) key() Key {
	c, m := &r.s.Config, r.s.In.Dataset.Meta
	_, epochs := Epochs(c, 0)
	return Key{Dataset: r.s.In.Dataset.UUID().String(), Edges: m.Edges,
		Train: cache.HashNodes(r.train), Seed: c.Seed, Sampler: c.Sampler,
		Dependency: c.BatchDependency, Fanouts: c.Fanouts, Relations: c.RelationFanouts,
		Batch: c.Batch, Degrees: c.Arch().Degrees(), Loopless: c.LooplessDegrees(),
		SampleEpochs: epochs,
		RowDType:     r.s.RowType.String(), RowBytes: r.s.RowBytes, PagesOn: c.PagesOn,
		LBABytes: r.o.Pages.LBABytes(), Segment: r.o.Segment, Budget: r.o.Budget}
}

// Close ends what is made in the background, which the next run resumes, and gives the folder
// back.
func (r *Run) Close() error {
	var all []error
	if n := r.coming; n != nil {
		n.cancel()
		if p, err := r.arrived(); err == nil {
			all = append(all, p.Close())
		} else if !errors.Is(err, context.Canceled) && errs.ClassOf(err) != errs.Interrupted {
			all = append(all, err)
		}
	}
	for _, p := range r.open {
		all = append(all, p.Close())
	}
	r.open = nil
	return errors.Join(append(all, r.folder.Close())...)
}

// Find gives the pack that an epoch of training is in, counted from 0, and the place of the epoch's
// first mini-batch in it. A missing pack is made. Packs of refreshes that no epoch needs
// from here on are removed. The pack stays until a Find of an epoch that is in another one.
func (r *Run) Find(ctx context.Context, epoch int) (_ *Pack, first int, err error) {
	c := &r.s.Config
	sample := c.SampleEpoch(epoch)
	p := r.held(sample)
	if p == nil {
		if r.coming != nil {
			p, err := r.arrived()
			switch {
			case err == nil:
				r.open = append(r.open, p)
			case ctx.Err() != nil:
				return nil, 0, stopped(ctx, err)
			default: // nothing else needs the SSDs and the memory now
				r.s.Observer.TellNote(
					"preparing mini-batches beside training failed, and goes on without training: %v",
					err)
			}
		}
		live, _ := c.LiveEpochs(epoch)
		if c.SampleEpochs == 0 {
			live = 0
		}
		if err := r.forget(ctx, live); err != nil {
			return nil, 0, err
		}
		if p, err = r.get(ctx, sample); err != nil {
			return nil, 0, stopped(ctx, err)
		}
	}
	return p, (sample - p.Entry.First) * r.batches, nil
}

// Ahead begins the pack of the refresh that follows an epoch of training, where there is one and
// nothing is being made, while that epoch trains: on one thread, a stream of the lowest priority
// and with a part of the memory. A Find that needs it waits for it.
func (r *Run) Ahead(ctx context.Context, epoch int) {
	if r.coming == nil && !r.o.InTurn {
		if next := r.next(epoch); next >= 0 {
			r.ahead(ctx, next)
		}
	}
}

// Held reports whether a Find of an epoch has nothing to make, to open or to remove.
func (r *Run) Held(epoch int) bool { return r.held(r.s.Config.SampleEpoch(epoch)) != nil }

// OpenPages opens the pages of a pack that Find has given, of which there are some.
func (r *Run) OpenPages(ctx context.Context, p *Pack) (*pages.Opened, error) {
	return r.folder.OpenPages(ctx, p)
}

// DiskBytes is the size of the folder's packs, as far as they are made.
func (r *Run) DiskBytes() int64 { return r.folder.disk.Load() }

// Holds reports whether a pack that Find has given is open still.
func (r *Run) Holds(p *Pack) bool { return slices.Contains(r.open, p) }

// stopped is the error of a run that the user has stopped, where they have.
func stopped(ctx context.Context, err error) error {
	if s := prepare.Interrupted(ctx); s != nil {
		return s
	}
	return err
}

// held returns the pack of a sample epoch that is open; nil: none is.
func (r *Run) held(sample int) *Pack {
	first, end := Epochs(&r.s.Config, sample)
	for _, p := range r.open {
		if p.Entry.First == first && p.Entry.End == end {
			return p
		}
	}
	return nil
}

// get opens the pack of a sample epoch, and makes it where it is not there.
func (r *Run) get(ctx context.Context, sample int) (*Pack, error) {
	if p := r.held(sample); p != nil {
		return p, nil
	}
	first, end := Epochs(&r.s.Config, sample)
	if first > 0 && r.hot == nil {
		// Its hot rows are those of the first pack, also where that trains no more.
		if _, err := r.get(ctx, 0); err != nil {
			return nil, err
		}
	}
	p, err := r.make(ctx, first, end, false)
	if err != nil {
		return nil, err
	}
	if first == 0 {
		if r.hot, err = p.Plan.Hot(); err != nil {
			return nil, errors.Join(err, p.Close())
		}
	}
	r.open = append(r.open, p)
	return p, nil
}

// forget closes and removes the packs of refreshes that have no sample epoch from live on.
func (r *Run) forget(ctx context.Context, live int) error {
	kept, all := r.open[:0], []error(nil)
	for _, p := range r.open {
		if p.Entry.First > 0 && p.Entry.End <= live {
			all = append(all, p.Close())
			continue
		}
		kept = append(kept, p)
	}
	r.open = kept
	return errors.Join(append(all, r.folder.Remove(ctx, live))...)
}

// next is the first sample epoch of the refresh that follows an epoch of training; below 0 where
// none follows, or it is there.
func (r *Run) next(epoch int) int {
	c := &r.s.Config
	if c.Refresh == 0 {
		return -1
	}
	from := (epoch/c.RefreshEvery + 1) * c.RefreshEvery
	if from >= c.Epochs {
		return -1
	}
	_, end := c.LiveEpochs(from)
	sample := end - c.Refresh
	if r.folder.Has(Epochs(c, sample)) {
		return -1
	}
	return sample
}

// ahead makes the pack of a sample epoch.
func (r *Run) ahead(ctx context.Context, sample int) {
	first, end := Epochs(&r.s.Config, sample)
	inner, cancel := context.WithCancel(ctx)
	n := &coming{cancel: cancel, done: make(chan struct{})}
	r.coming = n
	go func() {
		defer close(n.done)
		n.pack, n.err = r.make(inner, first, end, true)
	}()
}

// arrived waits for the pack that is made.
func (r *Run) arrived() (*Pack, error) {
	n := r.coming
	r.coming = nil
	<-n.done
	n.cancel()
	return n.pack, n.err
}

// packMemory is the share of the free memory that packing takes, and the most; meanwhile it is a
// quarter of that.
const (
	packShare  = 4
	mostMemory = 4 << 30
)

// make makes a pack. meanwhile: others train.
func (r *Run) make(ctx context.Context, first, end int, meanwhile bool) (*Pack, error) {
	s := r.s
	memory, err := hostmem.AvailableBytes()
	if err != nil {
		return nil, err
	}
	memory = min(memory/packShare, mostMemory)
	w := Work{Nodes: s.Rows, Batches: r.batches, Hot: r.o.Hot, HotRows: r.hot, Memory: memory,
		Workers: s.Device.Info().SMs, Source: r.source}
	if s.OnGPU() {
		w.Workers = 4
	}
	stream := s.Config.Operators(true).StreamOptions(plan.OpSample)
	stream.Name = "sample packs"
	if meanwhile { // others train, and go first
		stream.Name = "sample packs beside training"
		stream.Priority, stream.SMs = stream.Priority-1, 1
		w.Workers, w.Memory = 1, memory/packShare
	} else {
		w.Progress = r.tell
		if from := r.o.Source; from != nil {
			w.Source = func() (packed.Source, func() error, error) { return from(ctx) }
		}
	}
	w.Sample = func(ctx context.Context, first, end int, to *samples.Writer,
		report func(done, total int)) error {
		a, err := s.NewAhead(stream)
		if err != nil {
			return err
		}
		err = a.SampleEpochs(ctx, first, end, r.train, to, report)
		return errors.Join(err, a.Close(ctx))
	}
	return r.folder.Make(ctx, first, end, w)
}

// tell passes progress on.
func (r *Run) tell(phase string, done, total int64) {
	if phase == PhasePack {
		done, total = done>>20, max(total>>20, 1)
	}
	r.s.Observer.TellStep(phase, int(done), int(total))
}

// source opens the features as the dataset has them.
func (r *Run) source() (packed.Source, func() error, error) {
	d, width := r.s.In.Dataset, r.s.RowBytes
	rows := d.RowsAs(r.s.RowType)
	return readRows(func(ctx context.Context, first, n int64, dst []byte) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return rows.Read(first, dst[:n*width])
	}), func() error { return nil }, nil
}

type readRows func(ctx context.Context, first, n int64, dst []byte) error

func (f readRows) ReadRows(ctx context.Context, first, n int64, dst []byte) error {
	return f(ctx, first, n, dst)
}
