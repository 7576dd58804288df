package ranks

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"helios/internal/errs"
	"helios/internal/mpi"
)

// leaveTime bounds the wait for what is told to the others at the end.
const leaveTime = 5 * time.Second

const sayTime = 500 * time.Millisecond

type overMPI struct {
	ended
	world *mpi.World
	o     Options
	hosts []string
	sent  atomic.Int64
}

func joinMPI(ctx context.Context, l Launch, o Options) (_ Group, err error) {
	g := &overMPI{ended: newEnded(), o: o}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Join, errs.New(errs.Failed,
		"not all %d ranks came within %v", l.Size, o.Join))
	defer cancel()
	g.world, err = mpi.Start(ctx, o.Library, l.MPI, func(from int, text []byte) {
		f, err := readFailure(text)
		if err != nil {
			f = &failure{Rank: from, Host: "its machine", Text: "ended", Class: int(errs.Failed)}
		}
		g.end(f.err())
	})
	if err != nil {
		return nil, err
	}
	if g.world.Size != l.Size || g.world.Rank != l.Rank {
		err := errs.New(errs.Capability,
			"MPI: %s makes this rank %d of %d, mpirun said %d of %d; give the library of that mpirun by {mpi} FILE",
			g.world.Name(), g.world.Rank, g.world.Size, l.Rank, l.Size)
		return nil, err
	}
	g.hosts = make([]string, l.Size)
	names, err := g.AllGather(ctx, []byte(hostname()))
	if err != nil {
		return nil, err
	}
	for r, b := range names {
		g.hosts[r] = string(b)
	}
	return g, nil
}

func (g *overMPI) Rank() int        { return g.world.Rank }
func (g *overMPI) Size() int        { return g.world.Size }
func (g *overMPI) Name() string     { return g.world.Name() }
func (g *overMPI) SentBytes() int64 { return g.sent.Load() }

func (g *overMPI) AllGather(ctx context.Context, mine []byte) ([][]byte, error) {
	return g.Exchange(ctx, same(mine, g.Size()))
}

func (g *overMPI) Exchange(ctx context.Context, out [][]byte) ([][]byte, error) {
	if err := wrong(out, g.Size()); err != nil {
		return nil, err
	}
	if err := g.Err(); err != nil {
		return nil, err
	}
	op, cancel := context.WithTimeoutCause(ctx, g.o.Wait, errs.New(errs.Failed,
		"a rank did not answer within %v; raise {rank-timeout} if it is only slow", g.o.Wait))
	defer cancel()
	op, stop := context.WithCancelCause(op)
	defer stop(nil)
	go func() {
		select {
		case <-g.Failed():
			stop(g.Err())
		case <-op.Done():
		}
	}()
	lengths, sizes := make([][]byte, g.Size()), make([]int, g.Size())
	for r, b := range out {
		lengths[r] = binary.LittleEndian.AppendUint64(nil, uint64(len(b)))
		sizes[r] = 8
		if r != g.Rank() {
			g.sent.Add(int64(len(b)))
		}
	}
	in, err := g.world.Exchange(op, lengths, sizes)
	if err == nil {
		for r, b := range in {
			n := binary.LittleEndian.Uint64(b)
			if n > mostMessage {
				err = tooLong(r, g.hosts[r], n)
				break
			}
			sizes[r] = int(n)
		}
	}
	if err == nil {
		in, err = g.world.Exchange(op, out, sizes)
	}
	if err != nil {
		if why := g.Err(); why != nil {
			err = why
		}
		g.end(err)
		return nil, err
	}
	return in, nil
}

func (g *overMPI) Abort(cause error) {
	if why := g.Err(); why != nil && why != errClosed {
		cause = why // the others hear the first one
	}
	text, err := json.Marshal(failure{g.Rank(), g.hosts[g.Rank()], cut(cause.Error()),
		int(errs.ClassOf(cause))})
	if err == nil && g.end(fmt.Errorf("%w: %w", errAborted, cause)) {
		ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
		defer cancel()
		// Whom it does not reach, mpirun ends.
		_ = g.world.Abort(ctx, text)
		// mpirun ends the others as soon as this process has: they get a moment to say why.
		time.Sleep(sayTime)
	}
}

func (g *overMPI) Close() error {
	failed := !g.end(errClosed)
	ctx, cancel := context.WithTimeout(context.Background(), g.o.Silence)
	defer cancel()
	if failed {
		// The others may never leave: mpirun ends them.
		return nil
	}
	return g.world.Close(ctx)
}
