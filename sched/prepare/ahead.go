package prepare

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/cuda"
	"helios/graph"
	"helios/internal/hostmem"
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

// NewAhead makes one with a stream of its own. Its owner closes it before s.
func (s *Sampling) NewAhead(o cuda.StreamOptions) (*Ahead, error) {
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

// Wait waits for what is under way.
func (a *Ahead) Wait(op context.Context) error { return a.stream.Synchronize(op) }

// Close is Wait, and frees what it has.
func (a *Ahead) Close(ctx context.Context) error {
	op, cancel := a.s.OperatorContext(ctx)
	defer cancel()
	return errors.Join(a.stream.Synchronize(op), a.stream.Close(), a.mb.Close(), a.look.Close())
}

// Busy is the time that its sampling has taken.
func (a *Ahead) Busy() time.Duration { return a.stream.Busy() }

// Draw samples all hops of a mini-batch as training does that draws it under a sample epoch, and
// returns the rows of its frontier.
func (a *Ahead) Draw(ctx context.Context, epoch, index int, seeds []int64) (rows int64, err error) {
	s := a.s
	op, cancel := s.SampleContext(ctx)
	defer cancel()
	err = s.Sampler.Begin(op, a.stream, a.mb, epoch, DrawsOf(epoch, index), seeds)
	for h := 0; err == nil && h < len(s.Config.Fanouts); h++ {
		err = s.Sampler.Hop(op, a.stream, a.mb, h)
	}
	if err != nil {
		if stopped := Interrupted(ctx); stopped != nil && op.Err() != nil {
			return 0, stopped
		}
		return 0, fmt.Errorf("sample epoch %d, batch %d: %w", epoch, index, err)
	}
	return a.mb.RowCount(len(s.Config.Fanouts)), nil
}

// Keep appends the mini-batch that Draw has drawn last, and returns the time that this took beside
// what its stream did.
func (a *Ahead) Keep(ctx context.Context, to Keeper) (took time.Duration, err error) {
	op, cancel := a.s.OperatorContext(ctx)
	defer cancel()
	return Beside(a.stream, func() error { return a.keep(op, to) })
}

func (a *Ahead) keep(op context.Context, to Keeper) error {
	view := func(b cuda.Buffer, bytes int64) ([]byte, error) {
		return a.look.View(op, a.s.Device, a.stream, b, 0, bytes)
	}
	adj, rows, err := a.mb.Save(a.adj[:0], view)
	if err != nil {
		return err
	}
	a.adj = adj
	nodes, err := view(a.mb.RowNumbers(), rows*8)
	if err == nil {
		err = to.Append(hostmem.View[int64](nodes), a.adj)
	}
	return err
}

// Beside does work and returns the part of its time in which no kernel of a stream ran.
func Beside(st cuda.Stream, work func() error) (time.Duration, error) {
	begin, busy := time.Now(), st.Busy()
	err := work()
	return time.Since(begin) - (st.Busy() - busy), err
}

// Keeper takes mini-batches one behind the other: the rows of their frontiers, and what else they
// are (graph.MiniBatch.Save). Both are the caller's again afterwards.
type Keeper interface {
	Append(nodes []int64, adj []byte) error
}

// LastingKeeper is a Keeper that outlives a process. It has some mini-batches already: Batches of
// them.
type LastingKeeper interface {
	Keeper
	Batches() int
	// Sync makes durable what was appended.
	Sync() error
}

// SampleEpochs samples the mini-batches of sample epochs first to end-1 that a keeper does not have
// yet, each epoch with its seeds in its own order of train. After an interrupt it returns with
// those durable that were whole.
func (a *Ahead) SampleEpochs(ctx context.Context, first, end int, train []int64,
	to LastingKeeper,
	report func(done, total int)) error {
	each := Batches(len(train), a.s.Config.Batch)
	kept := to.Batches()
	for e := first + kept/each; e < end; e++ {
		order := a.s.Shuffled(train, e)
		for i := kept % each; i < each; i++ {
			if stopped := Interrupted(ctx); stopped != nil {
				return errors.Join(stopped, to.Sync())
			}
			_, err := a.Draw(ctx, e, i, order.Seeds(i))
			if err == nil {
				_, err = a.Keep(ctx, to)
			}
			if err != nil {
				return err
			}
			kept++
			report(kept, each*(end-first))
		}
	}
	return nil
}
