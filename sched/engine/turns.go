package engine

import "context"

// Turns let one operator run at a time. Nil turns are for pipelines in which operators overlap:
// nobody waits.
type Turns chan struct{}

// Take waits until no other operator runs. False: the walk has ended.
func (t Turns) Take(ctx context.Context) bool {
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

// End lets the next operator run.
func (t Turns) End() {
	if t != nil {
		<-t
	}
}
