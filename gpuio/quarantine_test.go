package gpuio

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/nvme"
)

// TestStrideOverflow: a stride whose product with a position wraps must not name memory before the
// destination.
func TestStrideOverflow(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	for name, rd := range map[string]Reader{
		"async": r.async(AsyncOptions{Depth: 8}),
		"cpu":   r.reader(NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Depth: 4})),
	} {
		t.Run(name, func(t *testing.T) {
			s := r.newSet(rand.New(rand.NewPCG(9, 9)), 2, 512, 0)
			*at[uint32](s.rs.Pos, 0), *at[uint32](s.rs.Pos, 1) = 0, 4
			s.rs.DstStride = 1<<62 - 512 // 4 × it is −2048
			_, err := rd.Submit(testCtx(t), s.rs)
			require.ErrorContains(t, err, "stride")
			s.free(rd)
		})
	}
}

// TestBrokenEngineRefuses: sets that were abandoned keep their slots; with all slots gone so,
// Submit explains why at once.
func TestBrokenEngineRefuses(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	rd := r.async(AsyncOptions{Depth: 8})
	e := rd.(*async)
	for range maxSets {
		<-e.free
	}
	e.mu.Lock()
	e.broken = errors.New("broken for the test")
	e.mu.Unlock()
	s := r.newSet(rand.New(rand.NewPCG(9, 9)), 2, 512, 0)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_, err := rd.Submit(ctx, s.rs)
	require.ErrorContains(t, err, "broken for the test")
	s.free(rd)
}

// TestStrandedSetsRefuse: sets that an SSD may still write to keep their slots; with all slots gone
// so, Submit explains why at once.
func TestStrandedSetsRefuse(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	rd := r.async(AsyncOptions{Depth: 8})
	e := rd.(*async)
	for range maxSets {
		<-e.free
	}
	e.mu.Lock()
	e.strands = maxSets
	e.mu.Unlock()
	s := r.newSet(rand.New(rand.NewPCG(9, 9)), 2, 512, 0)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_, err := rd.Submit(ctx, s.rs)
	require.ErrorContains(t, err, "may still write to the buffers of 32 sets; close the reader")
	s.free(rd)
}

// stubborn is a bus with mappings that cannot be taken back, and resets that fail, for a while.
type stubborn struct {
	waitBus
	noUnmap, noReset atomic.Bool
}

func (b *stubborn) UnmapDMA(iova nvme.IOVA, n int64) error {
	if b.noUnmap.Load() {
		return fmt.Errorf("transfers in progress did not end")
	}
	return b.waitBus.UnmapDMA(iova, n)
}

func (b *stubborn) Write32(off, v uint32) error {
	if off == nvme.RegCC && b.noReset.Load() {
		return errors.New("register does not answer")
	}
	return b.waitBus.Write32(off, v)
}

// TestUnsafeSSDKeepsRows: while neither the deletion of a queue pair nor a reset ended an SSD's
// DMA, no set with rows there may be told that nothing will be written any more.
func TestUnsafeSSDKeepsRows(t *testing.T) {
	var bus *stubborn
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 200, ram: true,
		faults: "lost(op=read)",
		wrap: func(b nvme.Bus) nvme.Bus {
			bus = &stubborn{waitBus: waitBus{b, b.(nvme.Kicker), b.(nvme.Waiter)}}
			return bus
		}})
	rd := r.async(AsyncOptions{Depth: 64, QueuePairs: 2, Timeout: 60 * time.Millisecond})
	noAbort(rd.(*async))
	noDelete(rd.(*async))
	bus.noReset.Store(true)
	ctx := testCtx(t)
	// The second set alone lies on the other queue, or waits behind the first: those of its rows
	// that the SSD has not seen are simply not read.
	a := r.newSet(rand.New(rand.NewPCG(1, 1)), 64, 512, 0)
	b := r.newSet(rand.New(rand.NewPCG(1, 2)), 20, 512, 0)
	pa, err := rd.Submit(ctx, a.rs)
	require.NoError(t, err)
	pb, err := rd.Submit(ctx, b.rs)
	require.NoError(t, err)
	for i, p := range []Pending{pa, pb} {
		_, err = p.Wait(ctx)
		var given *GivenUpError
		require.ErrorAs(t, err, &given)
		require.True(t, given.Unsafe)
		require.Regexp(t,
			`read LBA \d+\+1: nvme ssd0 was given up after .* and 3 resets: .*register does not answer; and it could not be disabled`,
			err.Error())
		if i == 0 {
			require.ErrorContains(t, err, "close the reader before the buffers are used again")
		}
	}
	require.Error(t, Forget(rd, a.rs.Dst), "its memory may still be written to")
	require.EqualValues(t, 84, rd.Stats().Failed)
	bus.noReset.Store(false)
	require.NoError(t, rd.Close(ctx))
	a.free(rd)
	b.free(rd)
}

// TestMappedMemoryIsNotFreed: memory that the SSD may still write to is not given back.
func TestMappedMemoryIsNotFreed(t *testing.T) {
	var bus *stubborn
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 200, ram: true,
		wrap: func(b nvme.Bus) nvme.Bus {
			bus = &stubborn{waitBus: waitBus{b, b.(nvme.Kicker), b.(nvme.Waiter)}}
			return bus
		}})
	ctx := testCtx(t)
	b, err := NewBulk(ctx, r.ssds[0].Ctrl, 2)
	require.NoError(t, err)
	require.NoError(t, b.c.DeleteQueuePair(ctx, b.q))
	b.q = nil
	mem := b.mem
	bus.noUnmap.Store(true)
	require.Error(t, b.Close(ctx))
	mem[0] = 1 // still there
	bus.noUnmap.Store(false)
	require.NoError(t, b.freeMemory())

	rd := r.async(AsyncOptions{Depth: 8})
	e := rd.(*async)
	area, err := e.area(r.ssds[0], 4096, "test area")
	require.NoError(t, err)
	mem = area.buf.Bytes()
	bus.noUnmap.Store(true)
	require.Error(t, e.giveBack(r.ssds[0], &area))
	mem[0] = 1
	bus.noUnmap.Store(false)
	require.NoError(t, e.giveBack(r.ssds[0], &area))
}

// TestCloseDuringRecovery: a recovery that is under way when the reader is closed must not bring
// its queue back to life.
func TestCloseDuringRecovery(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 200, ram: true,
		faults: "lost(op=read)"})
	rd, err := NewAsync(r.dev, r.ssds, r.layout,
		AsyncOptions{Depth: 8, Timeout: 40 * time.Millisecond})
	require.NoError(t, err)
	e := rd.(*async)
	entered, proceed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	e.abort = func(context.Context, *nvme.Controller, uint16, uint16) error {
		once.Do(func() { close(entered); <-proceed })
		// refused; the grace period decides
		return &nvme.StatusError{Status: nvme.StatusInternalError}
	}
	s := r.newSet(rand.New(rand.NewPCG(1, 1)), 64, 512, 0)
	p, err := rd.Submit(testCtx(t), s.rs)
	require.NoError(t, err)
	waited := make(chan error, 1)
	go func() {
		_, err := p.Wait(testCtx(t))
		waited <- err
	}()
	<-entered
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	closed := make(chan error, 1)
	go func() { closed <- rd.Close(ctx) }()
	time.Sleep(50 * time.Millisecond) // Close reaches its teardown
	close(proceed)
	require.ErrorIs(t, <-closed, context.Canceled)
	require.Error(t, <-waited)
	for g := range e.pairs {
		require.Nil(t, e.pairs[g].qp, "a queue pair outlived Close")
	}
	s.free(rd)
}

// gate is an event that happens when the test says so.
type gate chan struct{}

func (g gate) Synchronize(ctx context.Context) error {
	select {
	case <-g:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g gate) Done() bool {
	select {
	case <-g:
		return true
	default:
		return false
	}
}

func (g gate) Since(cuda.Event) (time.Duration, error) { return 0, errors.New("not timed") }
func (g gate) Close() error                            { return nil }

// TestReadyOfALaterSet: reads that have begun must end while the next set's row list is not there
// yet, since it may depend on them.
func TestReadyOfALaterSet(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64})
	rd := r.reader(NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Depth: 64, Threads: 1,
		Engine: "io_uring"}))
	ctx := testCtx(t)
	var sets []*testSet
	var pend []Pending
	gates := []gate{make(gate), nil, make(gate)}
	for i, g := range gates {
		s := r.newSet(rand.New(rand.NewPCG(4, uint64(i))), 4, 512, 0)
		if g != nil {
			s.rs.Ready = g
		}
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(t, err)
		sets, pend = append(sets, s), append(pend, p)
	}
	close(gates[0])
	wctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err := pend[1].Wait(wctx)
	close(gates[2])
	require.NoError(t, err)
	for i, p := range pend {
		_, err := p.Wait(ctx)
		require.NoError(t, err)
		sets[i].check(nil)
		sets[i].free(rd)
	}
}

// TestFreedDestination: a buffer that was freed and never forgotten still has a mapping, which must
// not be used: its memory may be somebody else's.
func TestFreedDestination(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	rd := r.async(AsyncOptions{Depth: 8})
	s := r.newSet(rand.New(rand.NewPCG(4, 4)), 20, 512, 0)
	s.read(rd)
	require.NoError(t, s.rs.Dst.Free())
	_, err := rd.Submit(testCtx(t), s.rs)
	require.Error(t, err)
	require.NoError(t, Forget(rd, s.rs.Dst))
	require.NoError(t, s.rowBuf.Free())
	require.NoError(t, s.posBuf.Free())
}

// TestAbortOfNothing: when what was late is done by the time of the recovery, the queue is looked
// at again all the same, as the next commands may be late too.
func TestAbortOfNothing(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	rd := r.async(AsyncOptions{Depth: 8, QueuePairs: 1, Timeout: time.Minute})
	e := rd.(*async)
	q := e.queue(0)
	q.ScanAt = nanotime()
	q.Frozen = frozenTimeout
	require.NoError(t, e.recoverQueue(testCtx(t), 0))
	require.EqualValues(t, frozenNo, q.Frozen)
	require.LessOrEqual(t, q.ScanAt, nanotime()+q.TimeoutNS)
	s := r.newSet(rand.New(rand.NewPCG(1, 1)), 20, 512, 0)
	s.read(rd)
	s.free(rd)
}
