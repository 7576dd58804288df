package walk

// Trainers are the replicas of a model that train on a walk's mini-batches. F is a mini-batch on
// its way through one of them.
type Trainers[B, F any] interface {
	// Replica returns the replica of a mini-batch, which is given by its place in the pass. ends: a
	// step of the optimiser ends with it.
	Replica(index int) (replica int, ends bool)
	// Send readies a mini-batch for its replica.
	Send(b B) (F, error)
	// Gradient has the replica make the gradient. Land tells of its error.
	Gradient(f F)
	// Land adds the gradient to those of its step and counts the mini-batch. With the last one of a
	// step the parameters change.
	Land(f F) error
}

// ReplicaPlaces is the number of mini-batches of a replica that may be under way.
const ReplicaPlaces = 2

// Fleet trains on the mini-batches of a walk with several replicas, in place of Walk.Train. They go
// out in their order up to the end of a step, and land in that order, whichever gradient was ready
// first. Those that are out when the walk stops have not trained.
type Fleet[B, F any] struct {
	Walk     *Walk[B]
	Trainers Trainers[B, F]
	// Alone: one mini-batch is out at a time.
	Alone bool

	lanes   []*lane[B, F] // by replica
	out     []*sent[B, F] // in the order of mini-batches
	closing bool          // the last of a step is out
	ended   bool
	idle    int64 // since when nothing is out
	waited  int64 // in which nothing was out, and that is not told yet
}

// lane is the way to a replica.
type lane[B, F any] struct {
	queue []*sent[B, F]
	out   int
}

// sent is a mini-batch that is out.
type sent[B, F any] struct {
	batch B
	f     F
	lane  *lane[B, F]
	done  bool // its gradient is there
}

// Start begins the stages of so many replicas.
func (x *Fleet[B, F]) Start(replicas int) {
	run := x.Walk.Executor
	x.idle = run.Now()
	for range replicas {
		x.lanes = append(x.lanes, &lane[B, F]{})
	}
	run.Go(func() {
		if err := x.send(); err != nil {
			x.Walk.Fail(err)
		}
	})
	for _, l := range x.lanes {
		run.Go(func() { x.work(l) })
	}
}

// send sends mini-batches that are whole to their replicas.
func (x *Fleet[B, F]) send() error {
	w := x.Walk
	for i := w.First; i < w.End; i++ {
		replica, ends := x.Trainers.Replica(i)
		l := x.lanes[replica]
		b, ok := w.Await(i, func(_ B, whole bool) bool {
			return whole && !x.closing && l.out < ReplicaPlaces && (!x.Alone || len(x.out) == 0)
		})
		if !ok {
			return nil
		}
		f, err := x.Trainers.Send(b)
		if err != nil {
			return err
		}
		w.Executor.Do(func() {
			if len(x.out) == 0 {
				x.waited += w.Executor.Now() - x.idle
			}
			s := &sent[B, F]{batch: b, f: f, lane: l}
			x.out, l.queue = append(x.out, s), append(l.queue, s)
			l.out++
			x.closing = ends
		})
	}
	return nil
}

// work has a replica make the gradients of its mini-batches.
func (x *Fleet[B, F]) work(l *lane[B, F]) {
	for {
		var s *sent[B, F]
		if !x.Walk.Executor.Await(func() bool {
			if len(l.queue) > 0 {
				s, l.queue = l.queue[0], l.queue[1:]
			}
			return s != nil || x.ended
		}) || s == nil {
			return
		}
		x.Trainers.Gradient(s.f)
		x.Walk.Executor.Do(func() { s.done = true })
	}
}

// Train lands the mini-batches.
func (x *Fleet[B, F]) Train() {
	w := x.Walk
	defer w.Executor.Do(func() { x.ended = true })
	for i := w.First; i < w.End; i++ {
		var s *sent[B, F]
		var waited int64
		if !w.Executor.Await(func() bool {
			if len(x.out) == 0 || !x.out[0].done {
				return false
			}
			s, waited, x.waited = x.out[0], x.waited, 0
			return true
		}) {
			return
		}
		w.Operators.Waited(waited)
		if err := x.Trainers.Land(s.f); err != nil {
			w.Fail(err)
			return
		}
		w.Executor.Do(func() {
			x.out = x.out[1:]
			s.lane.out--
			if len(x.out) == 0 {
				x.closing, x.idle = false, w.Executor.Now()
			}
		})
		w.Release(s.batch)
	}
}
