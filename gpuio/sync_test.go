package gpuio

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
)

func (r *rig) sync(o AsyncOptions) Reader {
	if o.Memory == nil {
		o.Memory = rigMemory
	}
	return r.reader(NewSync(r.dev, r.ssds, r.layout, o))
}

// TestSyncStatusIsNoDeadline: a completion's status takes the place of its command's deadline
// before the command is marked as done. Once a warp that looked in between took it for a deadline
// long past, and froze a healthy queue: one read at a time on many queues, and no row may come from
// elsewhere.
func TestSyncStatusIsNoDeadline(t *testing.T) {
	rounds := 60
	if wide.Lean() || raceEnabled {
		rounds = 10
	}
	for round := range rounds {
		rng := rand.New(rand.NewPCG(13, uint64(round)))
		r := newRig(t, rigOptions{ssds: 2, lba: 4096, rowBytes: 512, rows: 700, ram: true, sms: 3})
		rd := r.sync(AsyncOptions{Threads: 256, QueuePairs: 4, Depth: 4})
		ctx := testCtx(t)
		var all []*testSet
		var pend []Pending
		for range 3 {
			s := r.newSet(rng, 900, 512, 0)
			p, err := rd.Submit(ctx, s.rs)
			require.NoError(t, err)
			all, pend = append(all, s), append(pend, p)
		}
		for i, s := range all {
			_, err := pend[i].Wait(ctx)
			require.NoError(t, err)
			s.check(nil)
			s.free(rd)
		}
		st := rd.Stats()
		require.Zero(t, st.Pended, "round %d", round)
		require.NoError(t, rd.Close(ctx))
	}
}

// TestSyncRandom reads random sets under random grids, queues and layouts: every byte is where it
// belongs, and each command was counted by the SSDs.
func TestSyncRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 16
	if wide.Lean() || raceEnabled {
		rounds = 6
	}
	for round := range rounds {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		pick := func(v ...int) int { return v[rng.IntN(len(v))] }
		o := rigOptions{
			ssds: 1 + rng.IntN(3), lba: pick(512, 4096), rowBytes: pick(16, 100, 512, 602, 4096,
				12288), rows: 700,
			ram: rng.IntN(2) == 0, sms: 1 + rng.IntN(3),
			proxy: func(c *proxy.Config) { c.OutOfOrder = rng.IntN(2) == 0 },
		}
		so := AsyncOptions{Blocks: pick(0, 1, 2, 7, 64, 200), Threads: pick(0, 32, 64, 128, 256),
			QueuePairs: pick(0, 1, 2, 4), Depth: pick(4, 16, 63, 256)}
		t.Run(fmt.Sprintf("seed=%d/%d", seed, round), func(t *testing.T) {
			t.Logf("%+v %+v", o, so)
			r := newRig(t, o)
			rd := r.sync(so)
			require.Equal(t, "sync", rd.Name())
			before := int64(0)
			for _, s := range r.ssds {
				before += smartReads(t, s)
			}
			ctx := testCtx(t)
			n, sets := pick(1, 31, 200, 900), 3
			var all []*testSet
			var pend []Pending
			for range sets {
				s := r.newSet(rng, n, int64(o.rowBytes+pick(0, 4, 3)), int64(pick(0, 4, 2)))
				p, err := rd.Submit(ctx, s.rs)
				require.NoError(t, err)
				all, pend = append(all, s), append(pend, p)
			}
			for _, i := range rng.Perm(sets) {
				st, err := pend[i].Wait(ctx)
				require.NoError(t, err)
				require.EqualValues(t, n, st.Rows)
				require.EqualValues(t, n, st.Commands)
				require.Positive(t, st.Complete)
				require.Less(t, st.Complete, time.Minute)
				all[i].check(nil)
				all[i].free(rd)
			}
			st := rd.Stats()
			require.EqualValues(t, n*sets, st.Commands)
			require.EqualValues(t, n*sets, st.Latency.Count())
			require.Equal(t, st.Commands, st.Direct+st.Staged)
			if rigDevice == nil {
				require.Zero(t, st.Pended)
			} else if st.Pended != 0 { // slow kernels, whose deadlines passed: the host's part
				return
			}
			after := int64(0)
			for _, s := range r.ssds {
				after += smartReads(t, s)
			}
			require.Equal(t, st.Commands, after-before)
		})
	}
}

// TestSyncConcurrency: what is outstanding is what the warps and the CIDs allow, and no more,
// however few cores there are.
func TestSyncConcurrency(t *testing.T) {
	for _, c := range []struct{ blocks, threads, depth, want int }{
		{64, 128, 512, 256}, // 256 warps on 2 SMs
		{32, 256, 300, 256},
		{3, 32, 256, 3},
		{64, 128, 40, 40}, // more warps than CIDs
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			// Reads take far longer than it takes to see how many are out.
			r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 2000, ram: true,
				sms: 2, faults: "late(op=read,ms=300)"})
			rd := r.sync(AsyncOptions{Blocks: c.blocks, Threads: c.threads, Depth: c.depth,
				QueuePairs: 1})
			s := r.newSet(rand.New(rand.NewPCG(1, 1)), c.want+c.want/2, 512, 0)
			ctx := testCtx(t)
			p, err := rd.Submit(ctx, s.rs)
			require.NoError(t, err)
			e := rd.(*async)
			limit := uint64(0)
			for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); time.Sleep(
				time.Millisecond) {
				queues, err := e.states()
				require.NoError(t, err)
				limit = max(limit, queues[0].inFlight())
			}
			require.EqualValues(t, c.want, limit)
			_, err = p.Wait(ctx)
			require.NoError(t, err)
			s.check(nil)
			s.free(rd)
		})
	}
}

// TestSyncSetsInTurn: sets come one after the other in one stream, also from several goroutines and
// with more of them than slots.
func TestSyncSetsInTurn(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 1024, rows: 500, ram: true, sms: 2})
	rd := r.sync(AsyncOptions{Blocks: 4, Depth: 2, QueuePairs: 1})
	ctx := testCtx(t)
	var wg sync.WaitGroup
	var sets []*testSet
	for g := range 4 {
		s := r.newSet(rand.New(rand.NewPCG(7, uint64(g))), 150, 1024, 0)
		sets = append(sets, s)
		wg.Go(func() {
			var pend []Pending
			for range 12 {
				p, err := rd.Submit(ctx, s.rs)
				if err != nil {
					t.Error(err)
					return
				}
				pend = append(pend, p)
			}
			for _, p := range pend {
				if _, err := p.Wait(ctx); err != nil {
					t.Error(err)
				}
			}
			s.check(nil)
		})
	}
	wg.Wait()
	require.EqualValues(t, 4*12*150, rd.Stats().Rows)
	for _, s := range sets {
		s.free(rd)
	}
}

// TestSyncLimit: a launch that runs out of its time ends, and the next goes on where it was.
func TestSyncLimit(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 500, ram: true, sms: 2,
		faults: "late(op=read,ms=3,times=60)"})
	rd := r.sync(AsyncOptions{Blocks: 2, Threads: 64, Depth: 8})
	rd.(*async).sync.limit = 500 * time.Microsecond
	all, stats, failures := runSets(r, rd, 5, 3, 200)
	for i, err := range failures {
		require.NoError(t, err)
		require.EqualValues(t, 200, stats[i].Rows)
		all[i].check(nil)
	}
	st := rd.Stats()
	require.EqualValues(t, 600, st.Commands)
	require.Zero(t, st.Timeouts)
	freeSets(rd, all)
}

// TestSyncFaultsRecovered: as TestFaultsRecovered.
func TestSyncFaultsRecovered(t *testing.T) {
	for _, c := range []struct {
		name, faults string
		rowBytes     int
		stuck        bool // Abort does nothing
		check        func(t *testing.T, st Stats, n int64)
	}{
		{"error once", "error(op=read,sct=0,sc=0x06,times=3)", 4096, false,
			func(t *testing.T, st Stats, n int64) {
				require.Equal(t, n, st.Errors)
				require.Equal(t, n, st.Retries)
			}},
		{"error, staged rows", "error(op=read,sct=2,sc=0x81,times=3)", 400, false,
			func(t *testing.T, st Stats, n int64) {
				require.Equal(t, n, st.Retries)
				require.Positive(t, st.Staged)
			}},
		{"lost", "lost(op=read,after=20,times=1)", 4096, false,
			func(t *testing.T, st Stats, n int64) {
				require.GreaterOrEqual(t, st.Timeouts, n) // more on a machine that stalls
				require.Positive(t, st.Aborts)
			}},
		{"many lost", "lost(op=read,after=3,times=5)", 100, false, func(t *testing.T, st Stats,
			n int64) {
			require.GreaterOrEqual(t, st.Timeouts, n) // more on a machine that stalls
		}},
		{"late within the deadline", "late(op=read,ms=20,times=4)", 4096, false,
			func(t *testing.T, st Stats, _ int64) {
				require.Zero(t, st.Timeouts)
				require.Zero(t, st.Retries)
			}},
		{"late", "late(op=read,ms=250,after=5,times=2)", 512, false, func(t *testing.T, st Stats,
			n int64) {
			require.GreaterOrEqual(t, st.Timeouts, n) // more on a machine that stalls
		}},
		{"queue replaced", "lost(op=read,after=9,times=3)", 200, true, func(t *testing.T, st Stats,
			_ int64) {
			require.Positive(t, st.Recreated)
		}},
		{"queue replaced, late", "late(op=read,ms=900,after=9,times=3)", 4096, true,
			func(t *testing.T, st Stats, _ int64) {
				require.Positive(t, st.Recreated)
			}},
	} {
		for _, ram := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/ram=%v", c.name, ram), func(t *testing.T) {
				r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: c.rowBytes, rows: 400,
					ram: ram, faults: c.faults})
				timeout := 120 * time.Millisecond
				if c.name == "late within the deadline" { // also on a machine that stalls
					timeout = 5 * time.Second
				}
				rd := r.sync(AsyncOptions{Blocks: 8, Threads: 64, Depth: 16, QueuePairs: 2,
					Timeout: timeout})
				if c.stuck {
					rd.(*async).abort = func(context.Context, *nvme.Controller, uint16,
						uint16) error {
						return nil
					}
				}
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
				c.check(t, st, r.faultCount())
				for range 2 { // nothing late comes back to bite, and every CID is there again
					for _, s := range all {
						s.poison()
						s.read(rd)
					}
				}
				e := pulled(t, rd)
				for g := range e.queues() {
					free := uint32(0)
					for cid := range e.queue(g).NumCommands {
						free += e.queue(g).Free[cid/32] >> (cid & 31) & 1
					}
					require.Equal(t, e.queue(g).NumCommands, free, "CIDs of queue %d", g)
				}
				freeSets(rd, all)
			})
		}
	}
}

// TestSyncFaultsSurface: what retries cannot overcome names the command.
func TestSyncFaultsSurface(t *testing.T) {
	t.Run("do not retry", func(t *testing.T) {
		// row 5
		r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 64, ram: true,
			faults: "error(op=read,lba=45-52,sct=2,sc=0x81,dnr=1)"})
		rd := r.sync(AsyncOptions{Blocks: 4, Depth: 8})
		all, stats, failures := runSets(r, rd, 1, 2, 400)
		for i, s := range all {
			hit := int64(0)
			for _, id := range s.ids {
				if id == 5 {
					hit++
				}
			}
			var se *SetError
			require.ErrorAs(t, failures[i], &se)
			require.Equal(t, "sync", se.Stack)
			require.Equal(t, hit, se.Failed)
			require.EqualValues(t, 400-hit, stats[i].Rows)
			require.EqualValues(t, 5, se.First[0].Row)
			require.Regexp(t,
				`nvme ssd0 q\d: read LBA 45\+8: unrecovered read error \(SCT 2h, SC 81h\), not retryable`,
				failures[i].Error())
			require.Equal(t, errs.Device, errs.ClassOf(failures[i]))
			s.check(map[int64]bool{5: true})
		}
		freeSets(rd, all)
	})
	t.Run("never completes", func(t *testing.T) {
		// row 3
		r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
			faults: "lost(op=read,lba=8)"})
		rd := r.sync(AsyncOptions{Blocks: 4, Depth: 8, Retries: 1, Timeout: 40 * time.Millisecond})
		all, _, failures := runSets(r, rd, 2, 2, 300)
		for i, err := range failures {
			var te *TimeoutError
			require.ErrorAs(t, err, &te)
			require.EqualValues(t, 8, te.LBA)
			require.Equal(t, 2, te.Attempts)
			all[i].check(map[int64]bool{3: true})
		}
		freeSets(rd, all)
	})
	t.Run("rows and positions", func(t *testing.T) {
		r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 64, ram: true})
		rd := r.sync(AsyncOptions{Blocks: 2})
		s := r.newSet(rand.New(rand.NewPCG(4, 4)), 50, 512, 0)
		at[struct{ v [50]int64 }](s.rowBuf.Ptr(), 0).v[7] = 1 << 40
		at[struct{ v [50]uint32 }](s.posBuf.Ptr(), 0).v[9] = 1 << 20
		p, err := rd.Submit(testCtx(t), s.rs)
		require.NoError(t, err)
		st, err := p.Wait(testCtx(t))
		var se *SetError
		require.ErrorAs(t, err, &se)
		require.EqualValues(t, 2, se.Failed)
		require.EqualValues(t, 48, st.Rows)
		s.check(map[int64]bool{s.ids[7]: true, s.ids[9]: true})
		s.free(rd)
	})
	t.Run("queue cannot be replaced", func(t *testing.T) {
		r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 200, ram: true,
			faults: "lost(op=read,after=30,times=4)"})
		rd := r.sync(AsyncOptions{Blocks: 4, Depth: 16, QueuePairs: 2,
			Timeout: 60 * time.Millisecond, Resets: -1})
		noAbort(rd.(*async))
		noDelete(rd.(*async))
		all, stats, failures := runSets(r, rd, 3, 3, 200)
		require.ErrorContains(t, errors.Join(failures...), "no answer to delete")
		for i, err := range failures {
			lost := map[int64]bool{}
			if err != nil {
				var se *SetError
				require.ErrorAs(t, err, &se)
				require.EqualValues(t, 200, stats[i].Rows+se.Failed)
				for _, id := range all[i].ids {
					if id%2 == 0 { // those of the first SSD
						lost[id] = true
					}
				}
			}
			all[i].check(lost)
		}
		_, err := rd.Submit(testCtx(t), all[0].rs)
		require.ErrorContains(t, err, "nvme ssd0 was given up")
		freeSets(rd, all)
	})
}

// TestSyncChaos: as TestChaos, with grids that are larger and smaller than the queues.
func TestSyncChaos(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 5
	if wide.Lean() || raceEnabled {
		rounds = 3
	}
	for round := range rounds {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		faults := chaosFaults(rng)
		abort := rng.IntN(3)
		t.Run(fmt.Sprintf("seed=%d/%d %s abort=%d", seed, round, faults, abort),
			func(t *testing.T) {
				r := newRig(t, rigOptions{ssds: 2, lba: 512,
					rowBytes: []int{512, 200, 8192}[rng.IntN(3)], rows: 300, ram: rng.IntN(2) == 0,
					sms: 1 + rng.IntN(3), faults: faults})
				rd := r.sync(AsyncOptions{Blocks: 1 + rng.IntN(12), Threads: 32 << rng.IntN(4),
					Depth: 2 + rng.IntN(30), QueuePairs: 1 + rng.IntN(2),
					Timeout: 50 * time.Millisecond, Retries: 5})
				e := rd.(*async)
				e.sync.limit = []time.Duration{2 * time.Millisecond, time.Second}[rng.IntN(2)]
				switch abort {
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

// TestSyncClose: a reader that is closed with sets in flight, some of them hopeless, ends in time.
func TestSyncClose(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true,
		faults: "lost(op=read,after=40)"})
	rd := r.sync(AsyncOptions{Blocks: 4, Depth: 8, Timeout: 20 * time.Second})
	var pend []Pending
	var all []*testSet
	for i := range 3 {
		s := r.newSet(rand.New(rand.NewPCG(9, uint64(i))), 60, 512, 0)
		p, err := rd.Submit(testCtx(t), s.rs)
		require.NoError(t, err)
		pend, all = append(pend, p), append(all, s)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	require.ErrorIs(t, rd.Close(ctx), context.DeadlineExceeded)
	require.Less(t, time.Since(began), 10*time.Second)
	for _, p := range pend {
		_, err := p.Wait(testCtx(t))
		require.Error(t, err)
	}
	freeSets(rd, all)
}

func TestSyncOptions(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
	for want, o := range map[string]AsyncOptions{
		"-1 blocks":   {Blocks: -1},
		"33 threads":  {Threads: 33},
		"2048 thread": {Threads: 2048},
		"-4 threads":  {Threads: -4},
		"depth -1":    {Depth: -1},
	} {
		_, err := NewSync(r.dev, r.ssds, r.layout, o)
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
}
