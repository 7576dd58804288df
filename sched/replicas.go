package sched

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/errs"
	"helios/sched/engine"
	"helios/sched/plan"
)

// Under Config.Replicas several devices train, each with a copy of the model. One engine samples,
// reads and caches, all on the first device; a step's mini-batches go to the replicas in turns, and
// a mini-batch's slot is free when its gradient is there. Each gradient is then added on the first
// device, in the order of shards whichever replica was ready first, so their number changes no bit.
// The sum goes back to all of them, and each applies the same step to the same parameters.

// leafPlaces is the number of gradients of a replica that may wait for those of shards before them.
const leafPlaces = 2

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
	had    map[int]engine.Outcome
	flying int // mini-batches that are not counted yet
	turn   int // of leafPlaces
}

// flight is a mini-batch on its way through a replica.
type flight struct {
	s     *engine.Slot
	r     *replica
	set   gnn.Step
	at    gnn.Shard
	place int
	begin time.Time
	done  chan struct{} // what follows is there
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
	if r.mirror, err = newMirror(r.dev, e.Config.Batch); err != nil {
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
			return errStopped
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
	if err := wide.Widen(st, mb, x, s.Batch.HopEnd[len(e.Config.Fanouts)], s.Scales); err != nil {
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
	loss, correct, counted, err := r.model.Outcome(op, st)
	if err != nil {
		return engine.Applied(err)
	}
	f.out = engine.Outcome{Loss: loss, Correct: correct, Counted: counted}
	if e.collective != nil {
		if r.had == nil {
			r.had = map[int]engine.Outcome{}
		}
		r.had[f.at.Index] = f.out
	}
	return nil
}

// errStopped ends a flight of a walk that has ended.
var errStopped = errors.New("stopped")

// fleet is the replicas at work in a walk.
type fleet struct {
	e      *runner
	w      *engine.Walk
	steps  *steps
	flying []*flight // in the order of mini-batches
	queues []chan *flight
	wg     sync.WaitGroup
}

// trainReplicas trains on batches as they become whole, on several replicas.
func (e *runner) trainReplicas(ctx context.Context, w *engine.Walk, steps *steps,
	ready <-chan *engine.Slot) {
	f := &fleet{e: e, w: w, steps: steps}
	for range e.replicas {
		q := make(chan *flight, leafPlaces)
		f.queues = append(f.queues, q)
		f.wg.Go(func() {
			for x := range q {
				x.err = x.gradient(ctx, e)
				close(x.done)
			}
		})
	}
	err := f.run(ctx, ready)
	for _, q := range f.queues {
		close(q)
	}
	f.wg.Wait()
	for _, x := range f.flying { // begun and not counted: they will be done again
		x.r.flying--
	}
	if err != nil && !errors.Is(err, errStopped) {
		w.Fail(err)
	}
}

// run sends mini-batches out as they become whole, and counts those whose gradients are there.
func (f *fleet) run(ctx context.Context, ready <-chan *engine.Slot) error {
	for waitFrom := time.Now(); ; waitFrom = time.Now() {
		var oldest chan struct{}
		if len(f.flying) > 0 {
			oldest = f.flying[0].done
		}
		select {
		case <-oldest:
			if err := f.land(ctx); err != nil {
				return err
			}
		case s, ok := <-ready:
			if len(f.flying) == 0 {
				f.w.Pass.Clock.Waited += time.Since(waitFrom)
			}
			if !ok || ctx.Err() != nil {
				return f.landAll(ctx)
			}
			if err := f.send(ctx, s); err != nil {
				return err
			}
			if !f.steps.ends(s.Index) {
				continue
			}
			if err := f.landAll(ctx); err != nil {
				return err
			}
		}
	}
}

// send hands a mini-batch to its replica.
func (f *fleet) send(ctx context.Context, s *engine.Slot) error {
	w, e := f.w, f.e
	index := f.steps.mine.Index(s.Index)
	first, shard := f.steps.shardOf(index)
	f.steps.weigh(first, shard.Of)
	shard.Weight = f.steps.weights[shard.Index]
	r := e.replicas[shard.Index%len(e.replicas)]
	for r.flying == leafPlaces {
		if err := f.land(ctx); err != nil {
			return err
		}
	}
	widen := e.Config.OnRows != nil && e.Wide != nil // whose rows are in the first replica's memory
	if widen {
		if err := f.landAll(ctx); err != nil {
			return err
		}
	}
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	if err := w.Inspect(op, s, widen); err != nil {
		return err
	}
	x := &flight{s: s, r: r, set: f.steps.set(index), at: shard, place: r.turn,
		done: make(chan struct{})}
	r.turn = (r.turn + 1) % leafPlaces
	r.flying++
	f.flying = append(f.flying, x)
	f.queues[r.number] <- x // has room
	return nil
}

// landAll lands what is under way.
func (f *fleet) landAll(ctx context.Context) error {
	for len(f.flying) > 0 {
		if err := f.land(ctx); err != nil {
			return err
		}
	}
	return nil
}

// land waits for the oldest mini-batch under way, adds its gradient to those of its step and counts
// it. After the last one of a step parameters change.
func (f *fleet) land(ctx context.Context) error {
	w, e, x := f.w, f.e, f.flying[0]
	<-x.done
	if x.err == nil {
		op, cancel := e.OperatorContext(ctx)
		defer cancel()
		x.err = f.steps.add(op, x)
		if index := f.steps.mine.Index(x.s.Index); f.steps.summed != index-x.at.Index {
			e.others.add(index, len(x.s.Seeds), x.out)
		}
		if x.err == nil && f.steps.ends(x.s.Index) {
			first, _ := f.steps.shardOf(f.steps.mine.Index(x.s.Index))
			x.err = f.steps.apply(op, first, x.at.Of, x.set)
		}
	}
	if x.err != nil {
		if errors.Is(x.err, errStopped) {
			return errStopped
		}
		return fmt.Errorf("batch %d: %w", x.s.Index, x.err)
	}
	f.flying = f.flying[1:]
	x.r.flying--
	if err := w.Count(x.s, x.out, x.begin); err != nil {
		return err
	}
	w.Done(x.s)
	return nil
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
	return nil
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
