// Package inorder makes parts of an output on all cores and hands them on in order.
package inorder

import (
	"context"

	"helios/internal/hostcpu"
)

// Map calls produce(0..n-1) on all cores and consume in order, on the caller's goroutine,
// with a bounded number of results waiting.
func Map[T any](ctx context.Context, n int64, produce func(int64) T,
	consume func(int64, T) error) error {
	workers := hostcpu.Count()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queue := make(chan chan T, workers) // its capacity bounds what is in flight
	go func() {
		defer close(queue)
		for i := range n {
			res := make(chan T, 1)
			select {
			case queue <- res:
				go func() { res <- produce(i) }()
			case <-ctx.Done():
				return
			}
		}
	}()
	i := int64(0)
	for res := range queue {
		err := consume(i, <-res)
		if err == nil {
			err = ctx.Err() // what waits in the queue is not wanted any more
		}
		if err != nil {
			cancel()
			for res := range queue { // wait for what runs, so that nothing outlives the call
				<-res
			}
			return err
		}
		i++
	}
	if i < n {
		return ctx.Err()
	}
	return nil
}
