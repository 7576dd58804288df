package sched

import "context"

// turns let one operator run at a time. Nil turns are for pipelines in which operators overlap:
// nobody waits.
type turns chan struct{}

// take waits until no other operator runs. False: the walk has ended.
func (t turns) take(ctx context.Context) bool {
	if t == nil {
		return true
	}
	select {
	case t <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// end lets the next operator run.
func (t turns) end() {
	if t != nil {
		<-t
	}
}
