package gpuio

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
)

// runSets submits sets sets of n rows at once and returns their errors.
func runSets(r *rig, rd Reader, seed uint64, sets, n int) (all []*testSet, stats []ReadStats,
	failures []error) {
	ctx := testCtx(r.t)
	var pend []Pending
	for i := range sets {
		s := r.newSet(rand.New(rand.NewPCG(seed, uint64(i))), n, int64(r.layout.RowBytes+3)&^3, 0)
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(r.t, err)
		all, pend = append(all, s), append(pend, p)
	}
	for _, p := range pend {
		st, err := p.Wait(ctx)
		require.NoError(r.t, ctx.Err())
		stats, failures = append(stats, st), append(failures, err)
	}
	return all, stats, failures
}

func freeSets(rd Reader, all []*testSet) {
	for _, s := range all {
		s.free(rd)
	}
}

func (r *rig) faultCount() int64 {
	var n int64
	for _, c := range r.faults.Counts() {
		n += c
	}
	return n
}

// TestFaultsRecovered: faults that a retry overcomes are seen in the counters and nowhere else.
func TestFaultsRecovered(t *testing.T) {
	for _, c := range []struct {
		name, faults string
		rowBytes     int
		check        func(t *testing.T, st Stats, n int64)
	}{
		{"error once", "error(op=read,sct=0,sc=0x06,times=7)", 4096, func(t *testing.T, st Stats,
			n int64) {
			require.Equal(t, n, st.Errors)
			require.Equal(t, n, st.Retries)
		}},
		{"error, staged rows", "error(op=read,sct=2,sc=0x81,times=3)", 400,
			func(t *testing.T, st Stats, n int64) {
				require.Equal(t, n, st.Retries)
				require.Positive(t, st.Staged)
			}},
		{"lost", "lost(op=read,after=20,times=1)", 4096, func(t *testing.T, st Stats, n int64) {
			require.GreaterOrEqual(t, st.Timeouts, n) // more on a machine that stalls
			require.Positive(t, st.Aborts)
		}},
		{"many lost", "lost(op=read,after=3,times=5)", 100, func(t *testing.T, st Stats, n int64) {
			require.GreaterOrEqual(t, st.Timeouts, n) // more on a machine that stalls
		}},
		{"late within the deadline", "late(op=read,ms=20,times=4)", 4096,
			func(t *testing.T, st Stats, n int64) {
				require.Zero(t, st.Timeouts)
				require.Zero(t, st.Retries)
			}},
		{"late", "late(op=read,ms=250,after=5,times=2)", 512,
			func(t *testing.T, st Stats, n int64) {
				require.GreaterOrEqual(t, st.Timeouts, n) // more on a machine that stalls
			}},
		{"very late", "late(op=read,ms=1500,after=5,times=1)", 16384,
			func(t *testing.T, st Stats, n int64) {
				require.GreaterOrEqual(t, st.Timeouts, n) // more on a machine that stalls
			}},
		{"all kinds",
			"error(op=read,sct=0,sc=6,after=2,times=2);lost(op=read,after=11,times=1);late(ms=200,op=read,after=30,times=1)",
			1024, func(t *testing.T, st Stats, n int64) {
				require.Positive(t, st.Errors)
				require.Positive(t, st.Timeouts)
			}},
	} {
		for _, ram := range []bool{true, false} {
			name := c.name + "/file"
			if ram {
				name = c.name + "/ram"
			}
			t.Run(name, func(t *testing.T) {
				r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: c.rowBytes, rows: 400,
					ram: ram, faults: c.faults})
				timeout := 120 * time.Millisecond
				// also on a machine that stalls
				if c.name == "late within the deadline" || strings.HasPrefix(c.name, "error") {
					timeout = 5 * time.Second
				}
				rd := r.async(AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: timeout})
				before := smartReads(t, r.ssds[0])
				all, stats, failures := runSets(r, rd, 11, 3, 120)
				var timeouts int64
				for i, err := range failures {
					require.NoError(t, err)
					require.EqualValues(t, 120, stats[i].Rows)
					timeouts += stats[i].Timeouts
					all[i].check(nil)
				}
				st := rd.Stats()
				require.Positive(t, r.faultCount(), "the fault was hit")
				require.Zero(t, st.Failed)
				require.Equal(t, st.Timeouts, timeouts)
				require.EqualValues(t, 360, st.Rows)
				// the shim is slow: more may be late there than the faults make so
				if rigDevice == nil {
					c.check(t, st, r.faultCount())
				}
				// Each command is counted, retries included; the SSD need not count an aborted one.
				counted := smartReads(t, r.ssds[0]) - before
				require.LessOrEqual(t, counted, st.PerSSD[0].Commands)
				require.GreaterOrEqual(t, counted, st.PerSSD[0].Commands-st.Timeouts)
				// Once more, to see that nothing late comes back to bite.
				for _, s := range all {
					s.poison()
					s.read(rd)
				}
				freeSets(rd, all)
			})
		}
	}
}

// TestFaultsSurface: what retries cannot overcome is a typed error that names the command; the
// other rows of the set and other sets are not touched.
func TestFaultsSurface(t *testing.T) {
	t.Run("do not retry", func(t *testing.T) {
		// row 5
		r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 64, ram: true,
			faults: "error(op=read,lba=45-52,sct=2,sc=0x81,dnr=1)"})
		rd := r.async(AsyncOptions{Depth: 8})
		all, stats, failures := runSets(r, rd, 1, 3, 400)
		for i, s := range all {
			hit := int64(0)
			for _, id := range s.ids {
				if id == 5 {
					hit++
				}
			}
			require.Positive(t, hit)
			var se *SetError
			require.ErrorAs(t, failures[i], &se)
			require.Equal(t, hit, se.Failed)
			require.EqualValues(t, 400-hit, stats[i].Rows)
			require.EqualValues(t, 5, se.First[0].Row)
			var st *nvme.StatusError
			require.ErrorAs(t, failures[i], &st)
			require.EqualValues(t, 45, st.LBA)
			require.True(t, st.Status.DNR())
			require.Equal(t, errs.Device, errs.ClassOf(failures[i]))
			require.Regexp(t,
				`nvme ssd0 q\d: read LBA 45\+8: unrecovered read error \(SCT 2h, SC 81h\), not retryable`,
				failures[i].Error())
			s.check(map[int64]bool{5: true})
		}
		require.Zero(t, rd.Stats().Retries)
		freeSets(rd, all)
	})
	t.Run("retries run out", func(t *testing.T) {
		// row 4
		r := newRig(t, rigOptions{ssds: 2, lba: 4096, rowBytes: 4096, rows: 64, ram: true,
			faults: "error(op=read,lba=7,sct=2,sc=0x81)"})
		rd := r.async(AsyncOptions{Depth: 4, Retries: 2})
		all, _, failures := runSets(r, rd, 1, 1, 200)
		var se *SetError
		require.ErrorAs(t, failures[0], &se)
		require.EqualValues(t, 4, se.First[0].Row)
		require.Equal(t, 2*se.Failed, rd.Stats().Retries)
		require.Equal(t, se.Failed, rd.Stats().Failed)
		all[0].check(map[int64]bool{4: true})
		freeSets(rd, all)
	})
	t.Run("never completes", func(t *testing.T) {
		// row 3
		r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
			faults: "lost(op=read,lba=8)"})
		rd := r.async(AsyncOptions{Depth: 8, Retries: 1, Timeout: 40 * time.Millisecond})
		all, _, failures := runSets(r, rd, 2, 2, 300)
		for i, err := range failures {
			var te *TimeoutError
			require.ErrorAs(t, err, &te)
			require.EqualValues(t, 8, te.LBA)
			require.Equal(t, 2, te.Attempts)
			require.Contains(t, err.Error(), "no completion within 40ms, 2 attempts")
			all[i].check(map[int64]bool{3: true})
		}
		require.Positive(t, rd.Stats().Aborts)
		freeSets(rd, all)
	})
	t.Run("many failures", func(t *testing.T) {
		r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
			faults: "error(op=read,sct=2,sc=0x81,dnr=1)"})
		rd := r.async(AsyncOptions{Depth: 8})
		all, stats, failures := runSets(r, rd, 2, 1, 300)
		var se *SetError
		require.ErrorAs(t, failures[0], &se)
		require.EqualValues(t, 300, se.Failed)
		require.Len(t, se.First, maxFails)
		require.Zero(t, stats[0].Rows)
		freeSets(rd, all)
	})
}

// TestAbortDoesNothing: no completion comes after Abort either, or only when the queue pair is
// gone already. Then the queue pair is replaced and what was outstanding on it is read again.
func TestAbortDoesNothing(t *testing.T) {
	for name, faults := range map[string]string{
		"lost":         "lost(op=read,after=9,times=3)",
		"late":         "late(op=read,ms=900,after=9,times=3)",
		"lost, staged": "lost(op=read,after=30,times=1);late(op=read,ms=700,after=31,times=2)",
	} {
		for _, ram := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/ram=%v", name, ram), func(t *testing.T) {
				rowBytes := 4096
				if strings.Contains(name, "staged") {
					rowBytes = 200
				}
				r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: rowBytes, rows: 200,
					ram: ram, faults: faults})
				rd := r.async(AsyncOptions{Depth: 16, QueuePairs: 2,
					Timeout: 60 * time.Millisecond})
				rd.(*async).abort = func(context.Context, *nvme.Controller, uint16,
					uint16) error {
					return nil
				}
				all, stats, failures := runSets(r, rd, 21, 4, 150)
				for i, err := range failures {
					require.NoError(t, err)
					require.EqualValues(t, 150, stats[i].Rows)
					all[i].check(nil)
				}
				require.Positive(t, rd.Stats().Recreated)
				require.Positive(t, rd.Stats().Retries)
				require.Zero(t, rd.Stats().Failed)
				// The queue pairs' successors work, and late completions of the old ones hurt
				// nobody.
				for range 3 {
					for _, s := range all {
						s.poison()
						s.read(rd)
					}
				}
				freeSets(rd, all)
			})
		}
	}
	t.Run("for ever", func(t *testing.T) {
		// row 3
		r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
			faults: "lost(op=read,lba=8)"})
		rd := r.async(AsyncOptions{Depth: 8, Retries: 1, Timeout: 40 * time.Millisecond})
		rd.(*async).abort = func(context.Context, *nvme.Controller, uint16,
			uint16) error {
			return nil
		}
		all, _, failures := runSets(r, rd, 2, 2, 300)
		for i, err := range failures {
			var te *TimeoutError
			require.ErrorAs(t, err, &te)
			require.Equal(t, 2, te.Attempts)
			all[i].check(map[int64]bool{3: true})
		}
		require.Positive(t, rd.Stats().Recreated)
		freeSets(rd, all)
	})
}

// TestChaos: several goroutines read at once through random faults of all kinds, with an Abort that
// works, does nothing or fails. Sets either come out whole or name their failed rows.
func TestChaos(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 5
	if wide.Lean() || raceEnabled {
		rounds = 3
	}
	for round := range rounds {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		faults := chaosFaults(rng)
		abort := rng.IntN(3)
		name := fmt.Sprintf("seed=%d/%d %s abort=%d", seed, round, faults, abort)
		t.Run(name, func(t *testing.T) {
			ram := rng.IntN(2) == 0
			r := newRig(t, rigOptions{ssds: 2, lba: 512,
				rowBytes: []int{512, 200, 8192}[rng.IntN(3)], rows: 300, ram: ram,
				sms: 1 + rng.IntN(3), faults: faults})
			rd := r.async(AsyncOptions{Depth: 2 + rng.IntN(30), QueuePairs: 1 + rng.IntN(2),
				Timeout: 50 * time.Millisecond, Retries: 5})
			switch e := rd.(*async); abort {
			case 1:
				e.abort = func(context.Context, *nvme.Controller, uint16,
					uint16) error {
					return nil
				}
			case 2:
				e.abort = func(context.Context, *nvme.Controller, uint16,
					uint16) error {
					return errors.New("no answer")
				}
			}
			chaos(t, r, rd, seed)
		})
	}
}

// chaosFaults is one to five faults at random commands.
func chaosFaults(rng *rand.Rand) string {
	var faults []string
	for range 1 + rng.IntN(5) {
		after, times := rng.IntN(600), 1+rng.IntN(4)
		faults = append(faults, []string{
			fmt.Sprintf("lost(op=read,after=%d,times=%d)", after, times),
			fmt.Sprintf("late(op=read,ms=%d,after=%d,times=%d)", 1+rng.IntN(250), after, times),
			fmt.Sprintf("error(op=read,sct=0,sc=0x06,after=%d,times=%d)", after, times),
			fmt.Sprintf("error(op=read,sct=2,sc=0x81,dnr=1,after=%d,times=%d)", after, times),
		}[rng.IntN(4)])
	}
	return strings.Join(faults, ";")
}

// chaos reads three pairs of sets at one time, each four times over poisoned buffers. Every row is
// either right or named as failed, and the reader counts the same.
func chaos(t *testing.T, r *rig, rd Reader, seed uint64) {
	ctx := testCtx(t)
	var wg sync.WaitGroup
	var failed, rows atomic.Int64
	sets := make([][]*testSet, 3)
	for g := range sets {
		for i := range 2 {
			sets[g] = append(sets[g], r.newSet(rand.New(rand.NewPCG(seed, uint64(10*g+i))), 100,
				max(8192, int64(r.layout.RowBytes)), 0))
		}
		wg.Go(func() {
			for range 4 {
				var pend []Pending
				for _, s := range sets[g] {
					s.poison()
					p, err := rd.Submit(ctx, s.rs)
					if err != nil {
						t.Error(err)
						return
					}
					pend = append(pend, p)
				}
				for i, p := range pend {
					st, err := p.Wait(ctx)
					rows.Add(st.Rows)
					lost := map[int64]bool{}
					var se *SetError
					if errors.As(err, &se) {
						failed.Add(se.Failed)
						for _, f := range se.First {
							lost[f.Row] = true
						}
						if int(se.Failed) > len(se.First) {
							continue
						}
					} else if err != nil {
						t.Error(err)
						return
					}
					sets[g][i].check(lost)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 3*2*4*100, rows.Load()+failed.Load())
	st := rd.Stats()
	require.Equal(t, failed.Load(), st.Failed)
	require.Equal(t, rows.Load(), st.Rows)
	for _, s := range sets {
		freeSets(rd, s)
	}
}

// noDelete has the first SSD's queue pairs not be deleted until its controller went through CC.EN =
// 0.
func noDelete(e *async) {
	e.deleteQueue = func(ctx context.Context, c *nvme.Controller, qp *nvme.QueuePair) error {
		if c == e.ssds[0].Ctrl && c.Generation() == 1 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithCancel(ctx)
			cancel()
			return fmt.Errorf("no answer to delete: %w", c.DeleteQueuePair(ctx, qp))
		}
		return c.DeleteQueuePair(ctx, qp)
	}
}

// noAbort has Abort fail.
func noAbort(e *async) {
	e.abort = func(context.Context, *nvme.Controller, uint16,
		uint16) error {
		return errors.New("no answer")
	}
}

// TestQueueCannotBeReplaced: a controller that does not even delete a queue, and may not be reset,
// is disabled, and its SSD given up; nothing hangs and no row is reported that was not read.
func TestQueueCannotBeReplaced(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 200, ram: true,
		faults: "lost(op=read,after=20,times=1)"})
	rd := r.async(AsyncOptions{Depth: 8, QueuePairs: 2, Timeout: 60 * time.Millisecond, Resets: -1})
	noAbort(rd.(*async))
	noDelete(rd.(*async))
	all, stats, failures := runSets(r, rd, 5, 4, 100)
	failed := 0
	for i, err := range failures {
		if err == nil {
			all[i].check(nil)
			continue
		}
		failed++
		var se *SetError
		require.ErrorAs(t, err, &se)
		var given *GivenUpError
		require.ErrorAs(t, err, &given)
		require.False(t, given.Unsafe)
		require.Equal(t, errs.Device, errs.ClassOf(err))
		require.Regexp(t,
			`nvme ssd0 q\d: read LBA \d+\+1: nvme ssd0 was given up after 1 abort: nvme ssd0 q\d: its queue pair could not be replaced: no answer to delete: .*; look at it with "heliosctl ssds"`,
			err.Error())
		require.EqualValues(t, 100, stats[i].Rows+se.Failed)
		all[i].check(onSSD(all[i], 0))
	}
	require.Positive(t, failed)
	_, err := rd.Submit(testCtx(t), all[0].rs)
	require.ErrorContains(t, err, "nvme ssd0 was given up")
	st := rd.Stats().PerSSD
	require.Contains(t, st[0].GivenUp, "no answer to delete")
	require.Empty(t, st[1].GivenUp)
	require.Zero(t, rd.Stats().Resets)
	other := r.newSetOf(rand.New(rand.NewPCG(5, 5)), 80, 1)
	other.read(rd)
	other.free(rd)
	freeSets(rd, all)
}

// newSetOf makes a set of rows of one SSD.
func (r *rig) newSetOf(rng *rand.Rand, n, ssd int) *testSet {
	r.t.Helper()
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = rng.Int64N(r.layout.RowsOn(ssd))*int64(r.layout.SSDs) + int64(ssd)
	}
	return r.setOf(rng, ids, int64(r.layout.RowBytes+3)&^3, 0)
}

// onSSD are the rows of a set that lie on one SSD.
func onSSD(s *testSet, ssd int64) map[int64]bool {
	m := map[int64]bool{}
	for _, id := range s.ids {
		if id%int64(s.r.layout.SSDs) == ssd {
			m[id] = true
		}
	}
	return m
}

// TestBadSets: rows and positions that only the kernel can see.
func TestBadSets(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 64, ram: true})
	for name, mk := range map[string]func() Reader{
		"async": func() Reader { return r.async(AsyncOptions{Depth: 8}) },
		"cpu": func() Reader {
			return r.reader(NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Depth: 4}))
		},
		"mmap": func() Reader { return r.reader(NewMmap(r.dev, r.ssds, r.layout)) },
	} {
		t.Run(name, func(t *testing.T) {
			rd := mk()
			ctx := testCtx(t)
			try := func(change func(s *testSet), want string) {
				s := r.newSet(rand.New(rand.NewPCG(9, 9)), 50, 512, 0)
				dst := s.rs.Dst
				defer func() {
					s.rs.Dst = dst
					s.free(rd)
				}()
				change(s)
				p, err := rd.Submit(ctx, s.rs)
				if err == nil {
					_, err = p.Wait(ctx)
				}
				require.ErrorContains(t, err, want)
			}
			row := func(s *testSet) *int64 { return at[int64](s.rs.Rows, 0) }
			try(func(s *testSet) { *row(s) = -2 }, "row -2")
			try(func(s *testSet) { *row(s) = 64 }, "row 64")
			try(func(s *testSet) { *row(s) = 1 }, "row 1")
			try(func(s *testSet) { *at[uint32](s.rs.Pos, 3) = 1 << 20 },
				"position 1048576 is outside the destination")
			try(func(s *testSet) { s.rs.DstStride = 100 }, "do not fit stride 100")
			try(func(s *testSet) { s.rs.SSDOffset = s.rs.SSDOffset[:2] }, "bucket bounds")
			try(func(s *testSet) { s.rs.SSDOffset[1] = 51 }, "do not ascend")
			try(func(s *testSet) { s.rs.Dst = nil }, "without rows, positions or destination")
			try(func(s *testSet) { s.rs.DstOffset = s.rs.Dst.Size() }, "do not fit")
			empty := &ReadSet{SSDOffset: []int64{0, 0, 0}}
			p, err := rd.Submit(ctx, empty)
			require.NoError(t, err)
			_, err = p.Wait(ctx)
			require.NoError(t, err)
			s := r.newSet(rand.New(rand.NewPCG(9, 10)), 50, 512, 0)
			s.read(rd)
			s.free(rd)
		})
	}
}

// TestForeignCompletion: a completion for a CID that is not in flight must not complete anything;
// the queue pair is replaced.
func TestForeignCompletion(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
		faults: "late(op=read,ms=500,times=1)"})
	rd := r.async(AsyncOptions{Depth: 8, QueuePairs: 1})
	e := rd.(*async)
	ctx := testCtx(t)
	s := r.newSet(rand.New(rand.NewPCG(4, 4)), 1, 512, 0)
	q := e.queue(0)
	// The only command in flight is late; before it, an entry that the SSD has no business to
	// write.
	p, err := rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	require.NoError(t, e.submitEv[0].Synchronize(ctx))
	free := uint32(0)
	pulled(t, rd)
	for atomic.LoadUint32(&q.command(free).State) != cmdFree {
		free++
	}
	nvme.StoreCompletion((*nvme.Completion)(pointer(q.CQ)), nvme.Completion{CID: uint16(free),
		StatusPhase: nvme.StatusPhase(0, true)})
	st, err := p.Wait(ctx)
	require.NoError(t, err)
	s.check(nil)
	require.EqualValues(t, 1, rd.Stats().Foreign)
	require.EqualValues(t, 1, rd.Stats().Recreated)
	require.EqualValues(t, 1, st.Retries)
	s.read(rd)
	s.free(rd)
}

// pollBus hides all that a software controller offers beyond nvme.Bus, as a real SSD would.
type pollBus struct{ nvme.Bus }

// TestPolledBus: a bus without Kicker, Waiter and GroupWaiter is polled.
func TestPolledBus(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 64, ram: true,
		faults: "lost(op=read,after=50,times=1)",
		proxy:  func(c *proxy.Config) { c.PollDoorbells = true },
		wrap:   func(b nvme.Bus) nvme.Bus { return pollBus{b} }})
	rd := r.async(AsyncOptions{Depth: 8, Timeout: 100 * time.Millisecond})
	all, _, failures := runSets(r, rd, 5, 3, 60)
	for i, s := range all {
		require.NoError(t, failures[i])
		s.check(nil)
	}
	require.EqualValues(t, 1, rd.Stats().Timeouts)
	freeSets(rd, all)
}

// waitBus can wait for one queue, but not for groups.
type waitBus struct {
	nvme.Bus
	nvme.Kicker
	nvme.Waiter
}

func (b waitBus) DoorbellMemory() ([]byte, bool, error) {
	return b.Bus.(nvme.DoorbellMapper).DoorbellMemory()
}

func TestBusWithoutGroups(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 3, lba: 512, rowBytes: 512, rows: 64, sms: 1,
		wrap: func(b nvme.Bus) nvme.Bus { return waitBus{b, b.(nvme.Kicker), b.(nvme.Waiter)} }})
	rd := r.async(AsyncOptions{Depth: 8})
	all, _, failures := runSets(r, rd, 5, 3, 60)
	for i, s := range all {
		require.NoError(t, failures[i])
		s.check(nil)
	}
	freeSets(rd, all)
}

// TestCancelledWait: a Wait that ends early leaves the set in flight; it can be waited for again.
func TestCancelledWait(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 64, ram: true,
		faults: "late(op=read,ms=300,times=1)"})
	rd := r.async(AsyncOptions{Depth: 8})
	s := r.newSet(rand.New(rand.NewPCG(4, 4)), 20, 4096, 0)
	p, err := rd.Submit(testCtx(t), s.rs)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	_, err = p.Wait(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	if s.rs.Dst.Bytes() != nil { // SSDs write there
		require.ErrorContains(t, Forget(rd, s.rs.Dst), "in flight")
	}
	_, err = p.Wait(testCtx(t))
	require.NoError(t, err)
	s.check(nil)
	s.free(rd)
}

// TestCloseWithSetsInFlight: Close finishes them, and a Wait after it gives the result.
func TestCloseWithSetsInFlight(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 64, ram: true,
		faults: "late(op=read,ms=60,times=1)"})
	rd, err := NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 8})
	require.NoError(t, err)
	ctx := testCtx(t)
	s := r.newSet(rand.New(rand.NewPCG(4, 4)), 200, 4096, 0)
	p, err := rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	require.NoError(t, rd.Close(ctx))
	_, err = p.Wait(ctx)
	require.NoError(t, err)
	s.check(nil)
	require.EqualValues(t, 200, rd.Stats().Rows)
	_, err = rd.Submit(ctx, s.rs)
	require.ErrorContains(t, err, "closed")
	require.NoError(t, rd.Close(ctx))
	s.free(rd)
}

// TestCloseGivesUp: when ctx is over, Close deletes the queues, after which no late read may
// touch the destination.
func TestCloseGivesUp(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 64, ram: true,
		faults: "late(op=read,ms=700)"})
	rd, err := NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 8})
	require.NoError(t, err)
	s := r.newSet(rand.New(rand.NewPCG(4, 4)), 30, 4096, 0)
	p, err := rd.Submit(testCtx(t), s.rs)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, rd.Close(ctx), context.DeadlineExceeded)
	_, err = p.Wait(testCtx(t))
	require.Error(t, err, "rows that were not read are never reported as read")
	s.poison()
	time.Sleep(800 * time.Millisecond) // longer than any late completion: the subject of this test
	for _, b := range s.rs.Dst.Bytes() {
		require.Equal(t, s.gap, b)
	}
	s.free(rd)
}

// TestDMACache: a buffer freed behind the engine's back, and another at its place.
func TestDMACache(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	rd := r.async(AsyncOptions{Depth: 8})
	e := rd.(*async)
	for i := range 3 * dmaCacheMax {
		s := r.newSet(rand.New(rand.NewPCG(4, uint64(i))), 20, 512, 0)
		s.read(rd)
		require.LessOrEqual(t, len(e.dma.m), dmaCacheMax)
		if i%2 == 0 {
			s.free(rd)
			require.Nil(t, e.dma.m[s.rs.Dst])
			continue
		}
		require.NoError(t, s.rs.Dst.Free()) // and never Forget
		require.NoError(t, s.rowBuf.Free())
		require.NoError(t, s.posBuf.Free())
	}
	require.LessOrEqual(t, len(e.dma.m), 2, "mappings of freed buffers were dropped")
}

func TestReady(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	for _, mk := range []func() Reader{
		func() Reader { return r.async(AsyncOptions{Depth: 8}) },
		func() Reader { return r.reader(NewMmap(r.dev, r.ssds, r.layout)) },
	} {
		rd := mk()
		ctx := testCtx(t)
		s := r.newSet(rand.New(rand.NewPCG(4, 1)), 20, 512, 0)
		// The row list comes from another stream, which waits for the test.
		src, err := r.dev.Alloc(cuda.MemPinned, 20*8, "src")
		require.NoError(t, err)
		copy(src.Bytes(), s.rowBuf.Bytes())
		fill(s.rowBuf)
		st, err := r.dev.NewStream(cuda.StreamOptions{Name: "rows"})
		require.NoError(t, err)
		ev, err := r.dev.NewEvent()
		require.NoError(t, err)
		require.NoError(t, st.Copy(s.rowBuf.Ptr(), src.Ptr(), 20*8))
		require.NoError(t, st.Record(ev))
		s.rs.Ready = ev
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(t, err)
		_, err = p.Wait(ctx)
		require.NoError(t, err)
		s.check(nil)
		require.NoError(t, errors.Join(ev.Close(), st.Close(), src.Free()))
		s.free(rd)
	}
}

func fill(b cuda.Buffer) {
	for i := range b.Bytes() {
		b.Bytes()[i] = 0xff
	}
}

// TestShortBacking: the file behind an SSD loses its end.
func TestShortBacking(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 4096, rowBytes: 4096, rows: 64})
	readers := map[string]Reader{
		"io_uring": r.reader(NewCPU(r.dev, r.ssds, r.layout,
			CPUOptions{Depth: 4, Engine: "io_uring", CoalesceBytes: -1})),
		"pread": r.reader(NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Depth: 4, Engine: "pread",
			CoalesceBytes: -1})),
		"mmap": r.reader(NewMmap(r.dev, r.ssds, r.layout)),
	}
	require.NoError(t, os.Truncate(r.ssds[0].BackingPath, (rigDataStart+30)*4096))
	for name, rd := range readers {
		t.Run(name, func(t *testing.T) {
			s := r.newSet(rand.New(rand.NewPCG(4, 1)), 40, 4096, 0)
			defer s.free(rd)
			p, err := rd.Submit(testCtx(t), s.rs)
			require.NoError(t, err)
			_, err = p.Wait(testCtx(t))
			var be *BackingError
			require.ErrorAs(t, err, &be)
			require.ErrorIs(t, err, ErrShort)
			require.Equal(t, errs.Device, errs.ClassOf(err))
			require.Contains(t, err.Error(), r.ssds[0].BackingPath)
			lost := map[int64]bool{}
			for i := int64(30); i < 64; i++ {
				lost[i] = true
			}
			s.check(lost)
		})
	}
	_, err := NewMmap(r.dev, r.ssds, r.layout)
	require.ErrorIs(t, err, ErrShort)
	_, err = NewCPU(r.dev, r.ssds, r.layout, CPUOptions{})
	require.ErrorIs(t, err, ErrShort)
}

func TestOptions(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
		proxy: func(c *proxy.Config) { c.MaxQueuePairs, c.MaxQueueEntries, c.MDTS = 4, 16, 1 }})
	// Nobody asked for a depth: it is what the SSD takes, with a queue pair left for loads.
	for pairs, want := range map[int]int{0: 45, 1: 15, 4: 60} {
		fits, err := NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{QueuePairs: pairs})
		require.NoError(t, err)
		require.Equal(t, want, fits.(*async).opt.Depth)
		require.NoError(t, fits.Close(t.Context()))
	}
	two, err := NewLayout(4, 512, 2, 512)
	require.NoError(t, err)
	far, err := NewLayout(1<<30, 512, 1, 512)
	require.NoError(t, err)
	for want, f := range map[string]func() (Reader, error){
		"takes at most 45 commands": func() (Reader,
			error) {
			return NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 1000})
		},
		"9 queue pairs per SSD": func() (Reader,
			error) {
			return NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{QueuePairs: 9})
		},
		"read timeout": func() (Reader,
			error) {
			return NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Timeout: 1})
		},
		"blocks for the I/O": func() (Reader,
			error) {
			return NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Blocks: -1})
		},
		"layout over 2 SSDs": func() (Reader,
			error) {
			return NewAsync(r.dev, r.ssds, two, AsyncOptions{})
		},
		"bind a larger SSD": func() (Reader, error) { return NewMmap(r.dev, r.ssds, far) },
		"layout": func() (Reader,
			error) {
			return NewMmap(r.dev, r.ssds, Layout{})
		},
		"I/O engine": func() (Reader,
			error) {
			return NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Engine: "x"})
		},
		"threads": func() (Reader,
			error) {
			return NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Threads: -1})
		},
		"no file behind it": func() (Reader, error) {
			return NewCPU(r.dev, []*SSD{{Ctrl: r.ssds[0].Ctrl, DataStart: rigDataStart}}, r.layout,
				CPUOptions{})
		},
	} {
		_, err := f()
		require.ErrorContains(t, err, want)
		require.NotEqual(t, errs.Failed, errs.ClassOf(err), want)
	}
	// One of the four queue pairs is taken: what was made before that showed is given back.
	b, err := NewBulk(testCtx(t), r.ssds[0].Ctrl, 1)
	require.NoError(t, err)
	_, err = NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{QueuePairs: 4, Depth: 8})
	require.ErrorContains(t, err, "queue pairs")
	require.NoError(t, b.Close(testCtx(t)))
	// 15 commands per queue: depth 45 takes three queue pairs.
	rd := r.async(AsyncOptions{Depth: 45})
	require.Equal(t, 3, rd.(*async).perSSD)
	s := r.newSet(rand.New(rand.NewPCG(4, 1)), 140, 512, 0)
	s.read(rd)
	s.free(rd)
}

// deviceOnly is a destination that the CPU cannot address.
type deviceOnly struct{ cuda.Buffer }

func (deviceOnly) Bytes() []byte { return nil }

func TestDestinationBeyondCPU(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 64, ram: true})
	for _, rd := range []Reader{
		r.async(AsyncOptions{Depth: 8}),
		r.reader(NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Depth: 4})),
		r.reader(NewMmap(r.dev, r.ssds, r.layout)),
	} {
		s := r.newSet(rand.New(rand.NewPCG(4, 1)), 70, 700, 64)
		real := s.rs.Dst
		s.rs.Dst = deviceOnly{real}
		p, err := rd.Submit(testCtx(t), s.rs)
		require.NoError(t, err)
		_, err = p.Wait(testCtx(t))
		require.NoError(t, err)
		s.rs.Dst = real
		s.check(nil)
		s.free(rd)
	}
}

// No warp has over 4/3 of its part of the queues, whatever the SSDs. Where a depth allows few
// pairs, no other number of pairs has a better split.
func TestEvenPairs(t *testing.T) {
	over := func(ssds, warps, pairs int) float64 { // the busiest warp's queues over the mean
		b := cuda.Block{Blocks: min(warps, ssds*pairs)}
		_, most := b.Range(int64(ssds * pairs))
		b.Index = b.Blocks - 1
		lo, hi := b.Range(int64(ssds * pairs))
		require.LessOrEqual(t, most-(hi-lo), int64(1))
		return float64(most) * float64(warps) / float64(ssds*pairs)
	}
	for warps := 1; warps <= 64; warps++ {
		for ssds := 1; ssds <= 24; ssds++ {
			got := over(ssds, warps, EvenPairs(ssds, warps, 1, 3*warps))
			require.LessOrEqual(t, got, 1.334, "%d SSDs, %d warps", ssds, warps)
			got = over(ssds, warps, EvenPairs(ssds, warps, 1, 8))
			for p := 1; p <= 8 && got > 1.334; p++ {
				require.LessOrEqual(t, got, over(ssds, warps, p), "%d SSDs, %d warps", ssds, warps)
			}
		}
	}
	for ssds := 1; ssds <= 32; ssds *= 2 {
		require.Equal(t, 32/ssds, EvenPairs(ssds, 32, 1, 32), "%d SSDs: a queue a warp", ssds)
	}
	require.Equal(t, 6, EvenPairs(5, 32, 1, 8), "30 queues: two warps have none")
	require.Equal(t, 2, EvenPairs(12, 32, 1, 8), "24 queues, one a warp")
	require.Equal(t, 4, EvenPairs(12, 32, 3, 8), "a depth that needs three pairs")
}

func TestSharesCoverTheBucket(t *testing.T) {
	for n := int64(0); n < 700; n += 7 {
		for _, per := range []uint32{1, 2, 3, 8} {
			for rotate := range uint32(5) {
				seen := make([]int, n)
				for q := range per {
					lo, hi := share(n, q, per, rotate)
					for i := lo; i < hi; i++ {
						seen[i]++
					}
				}
				for _, c := range seen {
					require.Equal(t, 1, c)
				}
			}
		}
	}
	for blocks := 1; blocks < 9; blocks++ {
		for queues := blocks; queues < 30; queues++ {
			for b := range blocks {
				lo, hi := (&cuda.Block{Index: b, Blocks: blocks}).Range(int64(queues))
				for g := lo; g < hi; g++ {
					require.Equal(t, b, blockOf(int(g), blocks, queues))
				}
			}
		}
	}
}

func TestOwnership(t *testing.T) {
	mem := make([]byte, unsafe.Sizeof(queueState{}))
	q := (*queueState)(unsafe.Pointer(&mem[0]))
	require.True(t, q.take())
	require.False(t, q.take(), "held")
	require.False(t, q.take())
	require.False(t, q.release(), "somebody came: look again")
	require.True(t, q.release())
	require.True(t, q.take())
	require.True(t, q.release())
}
