package gpuio

import (
	"context"
	"fmt"
	"time"

	"helios/cuda"
)

// syncOptions are the sync stack's own part of the engine.
type syncOptions struct {
	blocks, threads int
	// limit ends a launch that has rows left; the host then launches again, so that a kernel
	// always ends by itself.
	limit time.Duration
}

const (
	defaultSyncThreads = 128
	syncLimit          = launchLimit
)

// StackSync is the stack of BaM and GIDS.
const StackSync = "sync"

var syncStack = &Stack{
	Name: StackSync, Summary: "a warp reads a row and waits for it", Queued: true,
	Threads: defaultSyncThreads, Blocks: residentBlocks,
	Open: func(dev cuda.Device, ssds []*SSD, l Layout, o StackOptions) (Reader, error) {
		return NewSync(dev, ssds, l, o.AsyncOptions)
	},
}

// NewSync makes the sync stack over ssds: the data path of BaM and GIDS, as a baseline on the very
// queues, commands and recovery of the async stack. One warp reads one row: its leader takes a
// command, submits it and waits for the completion, while whoever holds the queue's lock reaps for
// all (kernel read_sync). So what is outstanding is bounded by the warps on the device, Blocks ×
// Threads/32 (by default 128 threads a block, and as many blocks as the device keeps resident),
// where in async it is bounded by the queues alone. Rows never share a command.
func NewSync(dev cuda.Device, ssds []*SSD, l Layout, o AsyncOptions) (Reader, error) {
	info := dev.Info()
	if o.Threads == 0 {
		o.Threads = defaultSyncThreads
	}
	if o.Blocks == 0 {
		if o.SMs > 0 {
			info.SMs = min(info.SMs, o.SMs)
		}
		o.Blocks = residentBlocks(info, o.Threads)
	}
	return newEngine(StackSync, &syncOptions{blocks: o.Blocks, threads: o.Threads,
		limit: syncLimit}, dev, ssds, l, o)
}

// residentBlocks is a full grid of blocks of so many threads: an SM keeps as many as its registers
// suffice for, which is 512 threads of read_sync (cuda/kernels/RESOURCES.md). The host device keeps
// 32 blocks of any size.
func residentBlocks(info cuda.Info, threads int) int {
	perSM := 32
	if info.Backend != "host" {
		perSM = min(perSM, max(512/max(threads, 1), 1))
	}
	return info.SMs * perSM
}

// Rows that read_sync leaves behind, and how sets with such rows end.
//
// When a queue freezes, the warps that serve it leave. The commands that they had out stay in
// quarantine, and the rows that nobody had begun are Taken..end of the queue's share. The host then
// recovers the queue as it does for async, makes a pending segment of those rows, and has the
// complete kernel finish the set. read_sync and complete must not reap the same queue, and a warp
// of read_sync knows only its own set's commands, so they take turns:
//
//   - a set that has rows left is sick; before its queues are touched the read_sync kernels that
//     are already launched come to their ends (they leave frozen queues alone);
//   - while a set is sick no read_sync is launched: settle, called by Submit, finishes it first.
//
// A healthy launch that only ran out of its time is launched again.

// resumeSync prepares the recovery of a set that read_sync left with rows. True: the kernel was
// launched again and there is nothing to recover. Its error is ctx's.
func (e *async) resumeSync(ctx context.Context, p *asyncPending) (again bool, err error) {
	e.mu.Lock()
	p.sick = true
	broken := e.broken
	e.mu.Unlock()
	if broken != nil {
		return false, nil // complete finds it again, and abandons the set
	}
	if err := e.quiet(ctx, e.submitS, p); err != nil {
		return false, err
	}
	e.mu.Lock()
	// Their commands may come back to life with the queues that this set thaws.
	others := false
	for _, x := range e.live {
		x.sick = x.sick || e.unfinished(x.slot)
		others = others || x.sick && x != p
	}
	e.mu.Unlock()
	if others || !e.calm() {
		return false, nil
	}
	if err := e.quiet(ctx, e.complS, p); err != nil {
		return false, err
	}
	calm := e.calm() // no set is launched while one is sick
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broken != nil || !calm {
		return false, nil
	}
	p.sick = false
	if err := e.launchSync(p.slot); err != nil {
		e.broken = fmt.Errorf("gpuio %s: launch: %w", e.name, err)
	}
	return e.broken == nil, nil
}

// quiet waits for the end of a stream's kernels. Its error is ctx's; a stream that failed breaks
// the engine.
func (e *async) quiet(ctx context.Context, s cuda.Stream, p *asyncPending) error {
	err := s.Synchronize(ctx)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return p.late(ctx.Err())
	}
	e.breakWith(err)
	return nil
}

// settle finishes the sick sets of the sync stack. Needs e.mu, which it gives up meanwhile. Its
// error is ctx's.
func (e *async) settle(ctx context.Context) error {
	for e.sync != nil {
		var sick *asyncPending
		for _, x := range e.live {
			if x.sick {
				sick = x
				break
			}
		}
		if sick == nil {
			return nil
		}
		e.mu.Unlock()
		err := sick.complete(ctx)
		e.mu.Lock()
		if err != nil {
			return err
		}
	}
	return nil
}
