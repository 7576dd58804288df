package walk

import (
	"slices"
	"sync"
	"time"
)

// Goroutines run stages on the wall clock.
type Goroutines struct {
	mu      sync.Mutex
	waiting []*waiting
	stopped bool
	stages  sync.WaitGroup
	begin   time.Time
}

// waiting is a goroutine that waits for a condition.
type waiting struct {
	cond func() bool
	ends chan bool // it holds, or the walk is stopped
}

// NewGoroutines makes an executor of a walk.
func NewGoroutines() *Goroutines { return &Goroutines{begin: time.Now()} }

// Go implements Executor.
func (x *Goroutines) Go(stage func()) { x.stages.Go(stage) }

// Wait waits until all stages have ended.
func (x *Goroutines) Wait() { x.stages.Wait() }

// Await implements Executor.
func (x *Goroutines) Await(cond func() bool) bool {
	x.mu.Lock()
	if x.stopped || cond() {
		defer x.mu.Unlock()
		return !x.stopped
	}
	w := &waiting{cond, make(chan bool, 1)}
	x.waiting = append(x.waiting, w)
	x.mu.Unlock()
	return <-w.ends
}

// Do implements Executor. A change asks the conditions itself, so that nobody wakes for nothing.
func (x *Goroutines) Do(change func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	change()
	x.waiting = slices.DeleteFunc(x.waiting, func(w *waiting) bool {
		if !x.stopped && !w.cond() {
			return false
		}
		w.ends <- !x.stopped
		return true
	})
}

// Stop implements Executor.
func (x *Goroutines) Stop() { x.Do(func() { x.stopped = true }) }

// Now implements Executor.
func (x *Goroutines) Now() int64 { return time.Since(x.begin).Nanoseconds() }
