package gpuio

import (
	"context"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
)

// patience bounds how long freeing memory waits for kernels, which are the CPU's on the shim: a
// machine that stands still for the default of 10 s is no failure.
const patience = 3 * time.Minute

// openGPU opens the driver's device: the machine's GPU with HELIOS_GPU=1, else the CUDA kernels on
// the CPU shim.
func openGPU(t testing.TB) cuda.Device {
	t.Helper()
	lib := ""
	if os.Getenv("HELIOS_GPU") != "1" {
		lib = fakecuda.Build(t)
	}
	d, err := driver.Open(driver.Options{Library: lib, CloseTimeout: patience})
	require.NoError(t, err)
	return d
}

// onGPU has the rigs of a test on the driver's device.
func onGPU(t *testing.T) {
	// skips without a compiler; builds outside of the tests' deadlines
	require.NoError(t, openGPU(t).Close())
	rigDevice = openGPU
	t.Cleanup(func() { rigDevice = nil })
}

// TestGPUReads: the CUDA kernels, through the driver, against the software SSDs.
func TestGPUReads(t *testing.T) {
	onGPU(t)
	for _, c := range []struct {
		name               string
		ssds, lba, rowSize int
		o                  AsyncOptions
		ram                bool
		mdts               int
	}{
		{"packed", 2, 4096, 400, AsyncOptions{Depth: 64}, true, 0},
		{"whole LBAs", 3, 512, 512, AsyncOptions{Depth: 48, QueuePairs: 2}, true, 0},
		{"one command", 1, 4096, 4096, AsyncOptions{Depth: 1}, true, 0},
		{"deep", 1, 512, 512, AsyncOptions{Depth: 1023, QueuePairs: 1}, true, 0},
		{"PRP lists", 1, 4096, 20480, AsyncOptions{Depth: 33, QueuePairs: 1}, true, 0},
		{"files, several warps in a block", 2, 4096, 4096, AsyncOptions{Depth: 32, QueuePairs: 4,
			Blocks: 3, Threads: 64}, false, 0},
		{"rows that share commands", 2, 4096, 512, AsyncOptions{Depth: 64, CoalesceBytes: 64 << 10},
			true, 0},
		{"rows of whole pages that share commands", 1, 4096, 4096,
			AsyncOptions{Depth: 16, QueuePairs: 2, CoalesceBytes: 128 << 10}, true, 0},
		{"rows that share commands, several warps in a block", 3, 512, 1000,
			AsyncOptions{Depth: 48, QueuePairs: 4, Blocks: 3, Threads: 96, CoalesceBytes: 8 << 10},
			false, 0},
		{"rows in parts", 2, 512, 20000, AsyncOptions{Depth: 24}, true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			if wide.Lean() && (c.lba == 512 && c.mdts == 0 || c.name == "files, several warps in a block") {
				t.Skip("the others are enough")
			}
			r := newRig(t, rigOptions{ssds: c.ssds, lba: c.lba, rowBytes: c.rowSize, rows: 600,
				ram: c.ram, proxy: func(p *proxy.Config) {
					if c.mdts != 0 {
						p.MDTS = c.mdts
					}
				}})
			rd := r.async(c.o)
			rng := rand.New(rand.NewPCG(1, 2))
			var all []*testSet
			for range 4 {
				s := r.newSet(rng, 1+rng.IntN(500), int64(c.rowSize+3)&^3, int64(rng.IntN(2)*512))
				s.read(rd)
				all = append(all, s)
			}
			st := rd.Stats()
			require.Zero(t, st.Errors+st.Foreign+st.Failed+st.Timeouts)
			require.Equal(t, c.o.CoalesceBytes > 0, st.Coalesced > 0)
			require.Equal(t, c.mdts != 0, st.Commands > st.Rows)
			idle(t, rd)
			freeSets(rd, all)
			more, _, failures := runSets(r, rd, 7, 6, 300) // at the same time
			for i, err := range failures {
				require.NoError(t, err)
				more[i].check(nil)
			}
			idle(t, rd)
			freeSets(rd, more)
		})
	}
}

// idle fails when a queue has a command, or lacks a CID, with no set in flight.
func idle(t *testing.T, rd Reader) {
	t.Helper()
	e := pulled(t, rd)
	for g := range e.pairs {
		q := e.queue(g)
		require.Zero(t, q.Frozen)
		for cid := range q.NumCommands {
			require.NotZero(t, q.Free[cid/32]>>(cid&31)&1, "queue %d: CID %d is not free", g, cid)
		}
		require.Equal(t, q.Issued, q.Completed+q.Dropped)
	}
}

// onGPUToo are tests of the host device that also hold for the CUDA kernels. The quick ones always
// run; the others do in the shim's tier (make test-shim, which sets DIFF_BATCHES) and on a GPU.
var onGPUToo = []struct {
	name  string
	quick bool
	test  func(*testing.T)
}{
	{"faults surface", true, TestFaultsSurface},
	{"reset", true, TestQueueCannotBeReplaced},
	{"foreign", true, TestForeignCompletion},
	{"bad sets", true, TestBadSets},
	{"units", false, TestUnits},
	{"unit failures", false, TestUnitFailures},
	{"scatter", false, TestScatter},
	{"coalesce when it pays", false, TestCoalesceAuto},
	{"coalesce concurrently", false, TestCoalesceConcurrent},
	{"unit chaos", false, TestUnitChaos},
	{"sync faults surface", true, TestSyncFaultsSurface},
	{"sync limit", true, TestSyncLimit},
	{"sync random", false, TestSyncRandom},
	{"faults recovered", false, TestFaultsRecovered},
	{"abort is vain", false, TestAbortDoesNothing},
	{"chaos", false, TestChaos},
	{"cancelled wait", false, TestCancelledWait},
	{"close finishes", false, TestCloseWithSetsInFlight},
	{"close during recovery", false, TestCloseDuringRecovery},
	{"concurrent", false, TestAsyncConcurrent},
	{"many sets", false, TestAsyncManySets},
	{"unsafe SSD", false, TestUnsafeSSDKeepsRows},
	{"sync chaos", false, TestSyncChaos},
}

// TestGPUAsHost runs them: errors, lost and late completions, aborts that do nothing, queue pairs
// that cannot be replaced, for submit and complete and for read_sync.
func TestGPUAsHost(t *testing.T) {
	onGPU(t)
	all := os.Getenv("DIFF_BATCHES") != "" || os.Getenv("HELIOS_GPU") == "1"
	for _, c := range onGPUToo {
		if all || c.quick {
			t.Run(c.name, c.test)
		}
	}
}

// TestGPUStateCopies: a copy of kernel state that fails or ends late leaves both copies alike.
func TestGPUStateCopies(t *testing.T) {
	if os.Getenv("HELIOS_GPU") == "1" {
		t.Skip("no copy of a GPU fails on request")
	}
	onGPU(t)
	lib := fakecuda.Build(t)
	t.Run("new staging slots", func(t *testing.T) {
		r := newRig(t, rigOptions{ssds: 1, lba: 4096, rowBytes: 4096, rows: 64, ram: true})
		rd := r.async(AsyncOptions{Depth: 8, CoalesceBytes: -1})
		e := rd.(*async)
		require.Nil(t, e.stageBuf[0].buf, "they are made for the set below")
		s := r.newSet(rand.New(rand.NewPCG(1, 2)), 20, 4097, 0) // between pages: by a copy
		fakecuda.Control(t, lib, "fail=cuMemcpyAsync:1:1")
		_, err := rd.Submit(testCtx(t), s.rs)
		require.ErrorContains(t, err, "cuMemcpyAsync")
		s.read(rd)
		idle(t, rd)
		s.free(rd)
	})
	t.Run("a recovery that ends", func(t *testing.T) {
		r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
		e := r.async(AsyncOptions{Depth: 8}).(*async)
		ctx, cancel := context.WithCancel(testCtx(t))
		copies := func() string { return fakecuda.Control(t, lib, "calls=cuMemcpyAsync") }
		before, ran, done := copies(), false, make(chan error, 1)
		fakecuda.Control(t, lib, "hang=cuMemcpyAsync")
		t.Cleanup(func() { fakecuda.Control(t, lib, "hang=") })
		go func() { done <- e.stopped(ctx, func() error { ran = true; return nil }) }()
		require.Eventually(t, func() bool { return copies() != before }, 10*time.Second,
			time.Millisecond)
		cancel()
		fakecuda.Control(t, lib, "hang=")
		require.NoError(t, <-done)
		require.True(t, ran, "a pull that has begun ends, and what it is for is done")
	})
}

// TestGPURefusals: what a device of the driver needs of the SSDs is told when it is missing.
func TestGPURefusals(t *testing.T) {
	onGPU(t)
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
		proxy: func(c *proxy.Config) { c.PollDoorbells = false }}) // controllers that wait for Kick
	_, err := NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 8})
	require.ErrorContains(t, err, "PollDoorbells")
	wrapped := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
		wrap: func(b nvme.Bus) nvme.Bus { return pollBus{b} }})
	_, err = NewAsync(wrapped.dev, wrapped.ssds, wrapped.layout, AsyncOptions{Depth: 8})
	require.ErrorContains(t, err, "no doorbells that device")
}

// TestGPUDifferential: coalesce, submit and complete on both devices, step by step.
func TestGPUDifferential(t *testing.T) {
	host, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, host.Close()) })
	gpu := openGPU(t)
	t.Cleanup(func() { require.NoError(t, gpu.Close()) })
	n := uint64(600)
	if wide.Lean() || raceEnabled {
		n = 100
	}
	n = envNumber(t, "DIFF_BATCHES", n)
	t.Run("batches", func(t *testing.T) { runDiff(t, host, gpu, int(n)) })
	t.Run("coalesce",
		func(t *testing.T) { runCoalesceDiff(t, host, gpu, int(min(n/10, 300)), 20_000) })
}

// TestGPUWaitOnce: one wait brings several sets and what an event marks to their ends. What it
// finds wrong, or cannot wait for, Wait tells as it does alone, and the sets behind it are well.
func TestGPUWaitOnce(t *testing.T) {
	onGPU(t)
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 600})
	rd := r.checked(NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 32, CoalesceBytes: -1}))
	rng, ctx := rand.New(rand.NewPCG(1, 2)), testCtx(t)
	submit := func(n int, change func(s *testSet)) (all []*testSet, sets []Pending) {
		for range n {
			s := r.newSet(rng, 1+rng.IntN(200), 512, 0)
			if change != nil {
				change(s)
			}
			p, err := rd.Submit(ctx, s.rs)
			require.NoError(t, err)
			all, sets = append(all, s), append(sets, p)
		}
		return all, sets
	}
	well := func() {
		all, sets := submit(3, nil)
		require.True(t, WaitOnce(ctx, nil, sets))
		for i, p := range sets {
			_, err := p.Wait(ctx)
			require.NoError(t, err)
			all[i].check(nil)
		}
		freeSets(rd, all)
	}

	st, err := r.dev.NewStream(cuda.StreamOptions{Name: "beside"})
	require.NoError(t, err)
	after, err := r.dev.NewEvent()
	require.NoError(t, err)
	all, sets := submit(3, nil)
	require.NoError(t, st.Fill(all[0].rowBuf.Ptr()+cuda.DevicePtr(8*len(all[0].ids)), 1, 8))
	require.NoError(t, st.Record(after))
	require.True(t, WaitOnce(ctx, after, sets))
	require.True(t, after.Done())
	require.EqualValues(t, 1, *at[byte](all[0].rowBuf.Ptr(), 8*len(all[0].ids)))
	for i, p := range sets {
		if c := p.(*checkedPending); c.inner.(*asyncPending).ended { // else it met its limit
			require.True(t, c.right)
		}
		_, err := p.Wait(ctx)
		require.NoError(t, err)
		all[i].check(nil)
	}
	freeSets(rd, all)

	stopped, cancel := context.WithCancel(ctx)
	cancel()
	all, sets = submit(2, nil)
	WaitOnce(stopped, nil, sets)
	if _, err = sets[0].Wait(stopped); err != nil { // or it has ended already
		require.ErrorIs(t, err, context.Canceled)
	}
	for i, p := range sets {
		_, err := p.Wait(ctx)
		require.NoError(t, err)
		all[i].check(nil)
	}
	freeSets(rd, all)

	// Rows that there are not fail the kernel that checks, and the stream with it.
	all, sets = submit(1, func(s *testSet) { *at[int64](s.rs.Rows, 0) = 600 })
	WaitOnce(ctx, nil, sets)
	_, err = sets[0].Wait(ctx)
	require.ErrorContains(t, err, "row 600")
	freeSets(rd, all)
	well()

	r.corrupt(7)
	all, sets = submit(2, func(s *testSet) { *at[int64](s.rs.Rows, len(s.ids)-1) = 7 })
	require.True(t, WaitOnce(ctx, nil, sets))
	for _, p := range sets {
		_, err = p.Wait(ctx)
		require.ErrorContains(t, err, "row 7: nvme ssd1: LBA")
		require.ErrorContains(t, err, "wrong data: CRC32C")
	}
	require.GreaterOrEqual(t, rd.Stats().Mismatch, int64(4), "each row, both times")
	freeSets(rd, all)
	require.NoError(t, after.Close())
	require.NoError(t, st.Close())
}
