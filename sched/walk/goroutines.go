package walk

import (
	"sync"
	"time"
)

// Goroutines run stages on the wall clock.
type Goroutines struct {
	mu      sync.Mutex
	changed sync.Cond
	stopped bool
	stages  sync.WaitGroup
	begin   time.Time
}

// NewGoroutines makes an executor of a walk.
func NewGoroutines() *Goroutines {
	x := &Goroutines{begin: time.Now()}
	x.changed.L = &x.mu
	return x
}

// Go implements Executor.
func (x *Goroutines) Go(stage func()) { x.stages.Go(stage) }

// Wait waits until all stages have ended.
func (x *Goroutines) Wait() { x.stages.Wait() }

// Await implements Executor.
func (x *Goroutines) Await(cond func() bool) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for !x.stopped {
		if cond() {
			return true
		}
		x.changed.Wait()
	}
	return false
}

// Do implements Executor.
func (x *Goroutines) Do(change func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	change()
	x.changed.Broadcast()
}

// Stop implements Executor.
func (x *Goroutines) Stop() { x.Do(func() { x.stopped = true }) }

// Now implements Executor.
func (x *Goroutines) Now() int64 { return time.Since(x.begin).Nanoseconds() }
