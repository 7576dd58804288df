package work

import (
	"context"

	"helios/internal/hostcpu"
)

// InOrder calls produce(0..n-1) on all cores and consume in order, on the caller's goroutine, with
// a bounded number of results waiting.
func InOrder[T any](ctx context.Context, n int64, produce func(int64) T,
	consume func(int64, T) error) error {
	made, used := int64(0), int64(0)
	return Pipe(ctx, func() (int64, bool, error) {
		made++
		return made - 1, made <= n, nil
	}, func(i int64) (T, error) {
		return produce(i), nil
	}, func(v T) error {
		used++
		return consume(used-1, v)
	})
}

// Pipe calls next on a goroutine of its own until it reports no more, do with each of its values on
// all cores, and take with the results in order, on the caller's goroutine. A bounded number of
// results waits. The first error ends it, and nothing runs any more when it returns.
func Pipe[In, Out any](ctx context.Context, next func() (In, bool, error),
	do func(In) (Out, error), take func(Out) error) error {
	type result struct {
		v   Out
		err error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queue := make(chan chan result, hostcpu.Count()) // its capacity bounds what is in flight
	go func() {
		defer close(queue)
		for {
			in, more, err := next()
			if !more && err == nil {
				return
			}
			res := make(chan result, 1)
			select {
			case queue <- res:
			case <-ctx.Done():
				return
			}
			if err != nil {
				res <- result{err: err}
				return
			}
			go func() {
				v, err := do(in)
				res <- result{v, err}
			}()
		}
	}()
	for res := range queue {
		x := <-res
		err := x.err
		if err == nil {
			err = ctx.Err() // the waiting results are not wanted any more
		}
		if err == nil {
			err = take(x.v)
		}
		if err != nil {
			cancel()
			for res := range queue {
				<-res
			}
			return err
		}
	}
	return ctx.Err()
}
