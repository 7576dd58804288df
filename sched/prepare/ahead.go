package prepare

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/cuda"
	"helios/graph"
	"helios/internal/hostmem"
	"helios/sched/plan"
)

// Ahead samples mini-batches that train later, on a stream and into a mini-batch of its own, so
// that others may be sampled meanwhile. One goroutine has it.
type Ahead struct {
	s      *Sampling
	mb     *graph.MiniBatch
	stream cuda.Stream
	look   Stager
	adj    []byte
}

// NewAhead makes one, whose stream has a name for the timeline. meanwhile: others train, and go
// first. Its owner closes it before s.
func (s *Sampling) NewAhead(name string, meanwhile bool) (*Ahead, error) {
	o := s.Config.Operators(true).StreamOptions(plan.OpSample)
	o.Name = name
	if meanwhile {
		o.Priority, o.SMs = o.Priority-1, 1
	}
	stream, err := s.Device.NewStream(o)
	if err != nil {
		return nil, err
	}
	mb, err := s.Sampler.NewMiniBatch()
	if err != nil {
		return nil, errors.Join(err, stream.Close())
	}
	return &Ahead{s: s, mb: mb, stream: stream}, nil
}

// Close waits for what is under way and frees it.
func (a *Ahead) Close(ctx context.Context) error {
	op, cancel := a.s.OperatorContext(ctx)
	defer cancel()
	return errors.Join(a.stream.Synchronize(op), a.stream.Close(), a.mb.Close(), a.look.Close())
}

// Busy is how long its sampling has taken.
func (a *Ahead) Busy() time.Duration { return a.stream.Busy() }

// Sample samples all hops of a mini-batch as training does that draws it under a sample epoch, and
// returns its frontier, where the CPU sees it, and what else it is (graph.MiniBatch.Save). Both are
// valid until the next call.
func (a *Ahead) Sample(ctx context.Context, epoch, index int, seeds []int64) (nodes []int64,
	adj []byte, err error) {
	s := a.s
	op, cancel := s.SampleContext(ctx)
	defer cancel()
	err = s.Sampler.Begin(op, a.stream, a.mb, epoch, DrawsOf(epoch, index), seeds)
	for h := 0; err == nil && h < len(s.Config.Fanouts); h++ {
		err = s.Sampler.Hop(op, a.stream, a.mb, h)
	}
	if err != nil {
		if stopped := Interrupted(ctx); stopped != nil && op.Err() != nil {
			return nil, nil, stopped
		}
		return nil, nil, fmt.Errorf("sample epoch %d, batch %d: %w", epoch, index, err)
	}
	end, stop := s.OperatorContext(ctx)
	defer stop()
	var n int64
	a.adj, n, err = a.mb.Save(a.adj[:0], func(b cuda.Buffer, bytes int64) ([]byte, error) {
		return a.look.View(end, s.Device, a.stream, b, 0, bytes)
	})
	if err != nil {
		return nil, nil, err
	}
	mem, err := a.look.View(end, s.Device, a.stream, a.mb.Nodes, 0, n*8)
	return hostmem.View[int64](mem), a.adj, err
}

// Keeper takes mini-batches one behind the other. It has some already: Batches of them.
type Keeper interface {
	Batches() int
	Append(nodes []int64, adj []byte) error
	// Sync makes durable what was appended.
	Sync() error
}

// SampleEpochs samples the mini-batches of sample epochs first to end-1 that a keeper does not have
// yet, each epoch with its seeds in its own order of train. After an interrupt it returns with
// those durable that were whole.
func (a *Ahead) SampleEpochs(ctx context.Context, first, end int, train []int64, to Keeper,
	told func(done, total int)) error {
	each := Batches(len(train), a.s.Config.Batch)
	order := make([]int64, len(train))
	at := to.Batches()
	for e := first + at/each; e < end; e++ {
		graph.Shuffle(order, train, a.s.Config.Seed, e)
		for i := at % each; i < each; i++ {
			if stopped := Interrupted(ctx); stopped != nil {
				return errors.Join(stopped, to.Sync())
			}
			nodes, adj, err := a.Sample(ctx, e, i, SeedsOf(order, i, a.s.Config.Batch))
			if err == nil {
				err = to.Append(nodes, adj)
			}
			if err != nil {
				return err
			}
			at++
			told(at, each*(end-first))
		}
	}
	return nil
}
