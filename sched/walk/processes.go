package walk

import (
	"iter"
	"slices"

	"helios/internal/des"
)

// Processes run stages on a virtual clock. They take turns on the simulation's goroutine: one runs
// until it waits, so a walk is a pure function of its operators' times.
type Processes struct {
	sim     *des.Sim
	all     []*process
	running *process
	waiting []waiter // in the order in which they began to wait
	asking  bool     // conditions are about to be asked
	stopped bool
}

// process is a stage that can be suspended.
type process struct {
	resume func() (struct{}, bool)
	stop   func()
	yield  func(struct{}) bool
}

// waiter is a process that waits for a condition.
type waiter struct {
	of   *process
	cond func() bool
	ok   *bool
}

// NewProcesses makes an executor of a walk on a clock.
func NewProcesses(sim *des.Sim) *Processes { return &Processes{sim: sim} }

// Go implements Executor.
func (x *Processes) Go(stage func()) {
	p := &process{}
	p.resume, p.stop = iter.Pull(func(yield func(struct{}) bool) {
		p.yield = yield
		stage()
	})
	x.all = append(x.all, p)
	x.sim.After(0, func() { x.run(p) })
}

// run lets a process go on until it waits.
func (x *Processes) run(p *process) {
	was := x.running
	x.running = p
	p.resume()
	x.running = was
}

// Await implements Executor.
func (x *Processes) Await(cond func() bool) (ok bool) {
	if x.stopped {
		return false
	}
	if cond() {
		return true
	}
	x.waiting = append(x.waiting, waiter{x.running, cond, &ok})
	x.running.yield(struct{}{})
	return ok
}

// Do implements Executor.
func (x *Processes) Do(change func()) {
	change()
	if !x.asking {
		x.asking = true
		x.sim.After(0, x.ask)
	}
}

// ask lets those go on whose condition holds.
func (x *Processes) ask() {
	x.asking = false
	for i := 0; i < len(x.waiting); {
		w := x.waiting[i]
		if *w.ok = !x.stopped && w.cond(); !*w.ok && !x.stopped {
			i++
			continue
		}
		x.waiting = slices.Delete(x.waiting, i, i+1)
		x.run(w.of)
	}
}

// Run lets a process wait for an operator that calls done when it has ended.
func (x *Processes) Run(begin func(done func())) {
	p, ended, parked := x.running, false, false
	begin(func() {
		ended = true
		if parked {
			x.run(p)
		}
	})
	if !ended {
		parked = true
		p.yield(struct{}{})
	}
}

// Sleep lets a process wait until a time.
func (x *Processes) Sleep(until int64) {
	if until > x.sim.Now() {
		x.Run(func(done func()) { x.sim.At(until, done) })
	}
}

// Close ends the processes, of which those are stuck that have not ended.
func (x *Processes) Close() {
	x.stopped = true
	for _, p := range x.all {
		p.stop()
	}
}

// Stop implements Executor.
func (x *Processes) Stop() { x.Do(func() { x.stopped = true }) }

// Now implements Executor.
func (x *Processes) Now() int64 { return x.sim.Now() }
