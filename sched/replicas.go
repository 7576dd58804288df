package sched

import (
	"context"
	"fmt"
	"time"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/errs"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/walk"
)

// Under Config.Replicas several devices train, each with a copy of the model. One engine samples,
// reads and caches, all on the first device; a step's mini-batches go to the replicas in turns, and
// a mini-batch's slot is free when its gradient is there. Each gradient is then added on the first
// device, in the order of shards whichever replica was ready first, so their number changes no bit.
// The sum goes back to all of them, and each applies the same step to the same parameters.

// replica is a device that trains. The first one is the engine's own device with its model.
type replica struct {
	number int
	dev    cuda.Device
	model  *gnn.Model
	own    cuda.Stream // of training; nil: the engine's
	wide   *engine.Widener
	way    *bridge      // nil: of the first
	mirror *mirror      // nil where the replica reads the engine's memory
	copier *paramCopier // of all but the first
	// had has the outcomes of this step's shards that a collective will add: the model holds their
	// sum already.
	had  map[int]engine.Outcome
	turn int // of walk.ReplicaPlaces
}

// flight is a mini-batch on its way through a replica.
type flight struct {
	s     *engine.Slot
	r     *replica
	set   gnn.Step
	at    gnn.Shard
	place int
	begin time.Time
	leaf  cuda.DevicePtr
	out   engine.Outcome
	err   error
}

// openReplicas makes the other devices' copies of the model.
func (e *runner) openReplicas(mc gnn.ModelConfig) error {
	e.replicas = []*replica{{dev: e.Device, model: e.model}}
	if e.Config.Replicas == 1 {
		return nil
	}
	if have := 1 + len(e.In.More); have != e.Config.Replicas {
		return errs.New(errs.Usage, "%v %d: %d devices are open", errs.Key("replicas"),
			e.Config.Replicas, have)
	}
	var err error
	if e.sumS, err = e.Device.NewStream(cuda.StreamOptions{Name: "sums of gradients"}); err != nil {
		return err
	}
	e.OnClose(func() error { return e.sumS.Close() })
	for i, dev := range e.In.More {
		r := &replica{number: i + 1, dev: dev}
		if err := r.open(e, mc); err != nil {
			return fmt.Errorf("replica %d on %s: %w", r.number, dev.Info().Name, err)
		}
		e.replicas = append(e.replicas, r)
	}
	return e.openCollective()
}

// openCollective opens the library of Config.Reduce.
func (e *runner) openCollective() error {
	library := e.Config.Reduce
	switch library {
	case plan.ReduceTree:
		return nil
	case plan.ReduceNCCL:
		library = ""
	}
	o, ok := e.Device.(cuda.CollectiveOpener)
	if !ok {
		return errs.New(errs.Capability, "{reduce} %s: device %s knows of no such library",
			e.Config.Reduce, e.Device.Info().Name)
	}
	c, err := o.OpenCollective(e.In.More, library)
	if err != nil {
		return errs.Errorf("{reduce} %s: %w", e.Config.Reduce, err)
	}
	e.collective = c
	e.OnClose(c.Close)
	e.Observer.TellNote(
		"gradients by %s: parameters may differ in their last bits from those of {reduce} tree", c.Name())
	return nil
}

// local is a shard's place among those that a replica has of a step, in which it adds them up for a
// collective.
func (e *runner) local(at gnn.Shard) gnn.Shard {
	q := len(e.replicas)
	at.Index, at.Of = at.Index/q, (at.Of-at.Index%q+q-1)/q
	return at
}

// open makes a replica beside the first.
func (r *replica) open(e *runner, mc gnn.ModelConfig) (err error) {
	if r.own, err = r.dev.NewStream(cuda.StreamOptions{Name: plan.OpTrain}); err != nil {
		return err
	}
	e.OnClose(r.own.Close)
	if e.blas != nil {
		if mc.BLAS, err = r.dev.(cuda.BLASOpener).OpenBLAS(e.blasLibrary()); err != nil {
			return err
		}
		e.OnClose(mc.BLAS.Close)
	}
	if r.model, err = gnn.NewModel(r.dev, mc); err != nil {
		return err
	}
	e.OnClose(r.model.Close)
	if r.copier, err = newParamCopier(r.dev, r.own, r.model); err != nil {
		return err
	}
	e.OnClose(r.copier.close)
	if r.way, err = newBridge(e.Device, r.dev); err != nil {
		return err
	}
	e.OnClose(r.way.close)
	if r.way.there == nil {
		return nil
	}
	if r.mirror, err = newMirror(r.dev, e.Targets.Bytes(e.Config.Batch)); err != nil {
		return err
	}
	e.OnClose(r.mirror.close)
	return nil
}

// train is the stream that a replica trains on.
func (r *replica) train(e *runner) cuda.Stream {
	if r.own == nil {
		return e.TrainStream
	}
	return r.own
}

// gradient makes a mini-batch's gradient on its replica, and waits for it.
func (f *flight) gradient(ctx context.Context, e *runner) (err error) {
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	r, s := f.r, f.s
	if r.number == 0 {
		if !e.Turn.Take(ctx) { // where one operator has the device at a time
			return walk.ErrStopped
		}
		defer e.Turn.End()
	} else {
		defer func() {
			if err != nil {
				err = engine.Elsewhere(fmt.Errorf("replica %d on %s: %w", r.number, r.dev.Info().Name, err))
			}
		}()
	}
	f.begin = e.Trace.Now()
	if out, ok := r.had[f.at.Index]; ok {
		f.out = out
		return nil
	}
	st, mb, x, labels, wide := r.train(e), s.Batch, cuda.Buffer(s.Features), s.Labels, e.Wide
	if r.number > 0 {
		wide = r.wide
	}
	if r.mirror != nil {
		if mb, x, err = r.mirror.take(op, r.way, s, e.RowBytes, e.Sampling); err != nil {
			return err
		}
		labels = r.mirror.labels
	}
	if err := wide.Widen(st, mb, x, s.Batch.RowCount(len(e.Config.Fanouts)), s.Scales); err != nil {
		return err
	}
	if e.collective != nil {
		err = r.model.Gradient(st, mb, wide.Of(x).Ptr(), labels.Ptr(), f.set, e.local(f.at))
	} else {
		f.leaf, err = r.model.Leaf(st, mb, wide.Of(x).Ptr(), labels.Ptr(), f.set, f.at.Weight,
			f.place)
	}
	if err != nil {
		return err
	}
	mark, err := r.model.Mark(st)
	if err == nil {
		f.out, err = outcomeOf(op, mark, e.Targets, s.Seeds)
	}
	if err != nil {
		return engine.Applied(err)
	}
	if e.collective != nil {
		if r.had == nil {
			r.had = map[int]engine.Outcome{}
		}
		r.had[f.at.Index] = f.out
	}
	return nil
}

// fleet is the replicas at work in a walk.
type fleet struct {
	ctx   context.Context
	e     *runner
	w     *engine.Walk
	steps *steps
}

// trainReplicas trains on batches as they become whole, on several replicas.
func (e *runner) trainReplicas(ctx context.Context, w *engine.Walk, steps *steps) {
	f := &walk.Fleet[*engine.Slot, *flight]{Walk: w.Stages(), Trainers: fleet{ctx, e, w, steps},
		Alone: shows(e)}
	f.Start(len(e.replicas))
	f.Train()
}

// shows reports whether somebody sees rows that are made float32 in the first replica's memory.
func shows(e *runner) bool { return e.Config.OnRows != nil && e.Wide != nil }

// Replica implements walk.Trainers.
func (f fleet) Replica(index int) (replica int, ends bool) {
	_, shard := f.steps.shardOf(f.steps.mine.Index(index))
	return shard.Index % len(f.e.replicas), f.steps.ends(index)
}

// Send implements walk.Trainers.
func (f fleet) Send(s *engine.Slot) (*flight, error) {
	index := f.steps.mine.Index(s.Index)
	first, shard := f.steps.shardOf(index)
	f.steps.weigh(first, shard.Of)
	shard.Weight = f.steps.weights[shard.Index]
	r := f.e.replicas[shard.Index%len(f.e.replicas)]
	op, cancel := f.e.OperatorContext(f.ctx)
	defer cancel()
	if err := f.w.Inspect(op, s, shows(f.e)); err != nil {
		return nil, err
	}
	x := &flight{s: s, r: r, set: f.steps.set(index), at: shard, place: r.turn}
	r.turn = (r.turn + 1) % walk.ReplicaPlaces
	return x, nil
}

// Gradient implements walk.Trainers.
func (f fleet) Gradient(x *flight) { x.err = x.gradient(f.ctx, f.e) }

// Land implements walk.Trainers.
func (f fleet) Land(x *flight) error {
	if x.err == nil {
		op, cancel := f.e.OperatorContext(f.ctx)
		defer cancel()
		x.err = f.steps.add(op, x)
		index := f.steps.mine.Index(x.s.Index)
		if f.steps.summed != index-x.at.Index {
			f.e.others.add(index, len(x.s.Seeds), x.out)
		}
		if x.err == nil && f.steps.ends(x.s.Index) {
			x.err = f.steps.apply(op, index-x.at.Index, x.at.Of, x.set)
		}
	}
	if x.err != nil {
		return fmt.Errorf("batch %d: %w", x.s.Index, x.err)
	}
	return f.w.Count(x.s, x.out, x.begin)
}

// add takes a flight's gradient in among those of its step.
func (s *steps) add(op context.Context, x *flight) error {
	e := s.e
	if e.collective != nil {
		return nil
	}
	err := e.model.Push(e.sumS, x.at, func(to cuda.DevicePtr) error {
		if err := e.sumS.Synchronize(op); err != nil { // the place may be one of a sum under way
			return err
		}
		n := e.model.GradientBytes()
		if x.r.way == nil {
			return e.sumS.Copy(to, x.leaf, n)
		}
		return x.r.way.back(op, to, x.leaf, n)
	})
	if err != nil {
		return err
	}
	if err := e.sumS.Synchronize(op); err != nil { // the leaf's place will be used again
		return engine.Applied(err)
	}
	return nil
}

// apply has all replicas take the step of n shards whose sum the first one has.
func (s *steps) apply(op context.Context, first, n int, set gnn.Step) error {
	e := s.e
	if e.collective != nil {
		if err := s.collect(op, n); err != nil {
			return engine.Applied(fmt.Errorf("sum of gradients: %w", err))
		}
	}
	if s.summed != first { // a step that could not be enqueued comes again
		if err := s.sumOthers(op, n); err != nil {
			return engine.Applied(fmt.Errorf("sum of gradients: %w", err))
		}
		if e.others != nil { // the wait for other ranks has taken of this one's time
			fresh, cancel := e.OperatorContext(op)
			defer cancel()
			op = fresh
		}
		if err := e.TrainStream.Synchronize(op); err != nil {
			return engine.Applied(err)
		}
		s.summed = first
	}
	for i, r := range e.replicas {
		if i > 0 && e.collective == nil {
			sum := e.model.Roots()[0].At
			if err := r.way.out(op, r.model.SetSum(n), sum, e.model.GradientBytes()); err != nil {
				return engine.Applied(err)
			}
		}
	}
	for i := len(e.replicas) - 1; i >= 0; i-- { // the sum stays with the first until all have it
		r := e.replicas[i]
		if err := r.model.Apply(r.train(e), set); err != nil {
			if i < len(e.replicas)-1 || i > 0 {
				return engine.Applied(err)
			}
			return err
		}
	}
	for _, r := range e.replicas {
		if err := r.train(e).Synchronize(op); err != nil {
			return engine.Applied(err)
		}
	}
	return s.note(set, e.model.GradientNorm())
}

// collect has the library add what the replicas have of a step of n shards. One that has none adds
// zeros.
func (s *steps) collect(op context.Context, n int) error {
	e := s.e
	var streams []cuda.Stream
	var sums []cuda.DevicePtr
	for _, r := range e.replicas {
		st := r.train(e)
		if r.number == 0 {
			st = e.sumS // the library takes streams that have all of a GPU
		}
		sum := r.model.SetSum(n)
		if r.number >= n {
			if err := st.Fill(sum, 0, r.model.GradientBytes()); err != nil {
				return err
			}
		}
		clear(r.had)
		streams, sums = append(streams, st), append(sums, sum)
	}
	if err := e.collective.AllReduce(streams, sums, e.model.GradientBytes()/4); err != nil {
		return err
	}
	for _, st := range streams {
		if err := st.Synchronize(op); err != nil {
			return err
		}
	}
	return nil
}

// restoreReplicas gives the other replicas the first one's parameters and optimiser.
func (e *runner) restoreReplicas(ctx context.Context) error {
	for _, r := range e.replicas[1:] {
		to := r.model.Params()
		for i, p := range e.model.Params() {
			for _, b := range [][2]cuda.Buffer{{p.Value, to[i].Value}, {p.M, to[i].M},
				{p.V, to[i].V}} {
				data, err := e.copier.get(ctx, b[0], paramBytes(p))
				if err == nil {
					err = r.copier.put(ctx, b[1], data)
				}
				if err != nil {
					return fmt.Errorf("copying parameter %s to replica %d: %w", p.Name, r.number,
						err)
				}
			}
		}
		r.model.SetAdamStep(e.model.AdamStep())
	}
	return nil
}
