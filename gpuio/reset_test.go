package gpuio

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// softBus has the methods of a software controller's bus.
type softBus interface {
	nvme.Bus
	nvme.Kicker
	nvme.Waiter
	nvme.GroupWaiter
	nvme.DoorbellMapper
}

// regBus is a software controller whose registers misbehave when told to.
type regBus struct {
	softBus
	cfs       atomic.Bool  // CSTS.CFS, until a reset
	cfsKicks  atomic.Int64 // CFS comes with so many more I/O doorbells
	cfsTimes  atomic.Int64 // and so often again, each time after a reset
	every     int64
	gone      atomic.Bool // registers read all ones
	goneKicks atomic.Int64
	notReady  atomic.Int64 // so many enables that RDY does not follow
	stayReady atomic.Int64 // so many disables that RDY does not follow
	masked    atomic.Int32 // what CSTS.RDY shows now: 1 always 0, 2 always 1
	began     atomic.Int64 // when it was first disabled
	ended     atomic.Int64 // when it was last enabled
	faults    *faultinject.Set
	healing   atomic.Bool // a reset ends the faults, too
}

func (b *regBus) Kick(qid uint16) {
	if qid != 0 {
		if b.cfsKicks.Load() > 0 && b.cfsKicks.Add(-1) == 0 {
			b.cfs.Store(true)
		}
		if b.goneKicks.Load() > 0 && b.goneKicks.Add(-1) == 0 {
			b.gone.Store(true)
		}
	}
	b.softBus.Kick(qid)
}

func (b *regBus) Read32(off uint32) (uint32, error) {
	if b.gone.Load() {
		return 0xffffffff, nil
	}
	v, err := b.softBus.Read32(off)
	switch off {
	case nvme.RegCAP:
		v &^= 0xff << 24 // CAP.TO: 500 ms
	case nvme.RegCSTS:
		if b.cfs.Load() {
			v |= uint32(nvme.CSTSFatal)
		}
		switch b.masked.Load() {
		case 1:
			v &^= uint32(nvme.CSTSReady)
		case 2:
			v |= uint32(nvme.CSTSReady)
		}
	}
	return v, err
}

func (b *regBus) Read64(off uint32) (uint64, error) {
	lo, err := b.Read32(off)
	if err != nil {
		return 0, err
	}
	hi, err := b.Read32(off + 4)
	return uint64(lo) | uint64(hi)<<32, err
}

func (b *regBus) Write32(off, v uint32) error {
	if b.gone.Load() {
		return nil
	}
	if off == nvme.RegCC {
		b.masked.Store(0)
		if !nvme.CC(v).EN() {
			b.began.CompareAndSwap(0, nanotime())
		}
		switch {
		case nvme.CC(v).EN():
			b.ended.Store(nanotime())
			if b.notReady.Load() > 0 {
				b.notReady.Add(-1)
				b.masked.Store(1)
			}
		case b.stayReady.Load() > 0:
			b.stayReady.Add(-1)
			b.masked.Store(2)
		default:
			b.cfs.Store(false)
			if b.healing.Load() {
				b.faults.Disarm()
			}
			if b.cfsTimes.Load() > 0 {
				b.cfsTimes.Add(-1)
				b.cfsKicks.Store(b.every)
			}
		}
	}
	return b.softBus.Write32(off, v)
}

func (b *regBus) Write64(off uint32, v uint64) error {
	if err := b.Write32(off, uint32(v)); err != nil {
		return err
	}
	return b.Write32(off+4, uint32(v>>32))
}

func (b *regBus) GroupCQs(refs []nvme.CQRef) (nvme.CQGroup, error) {
	for i := range refs {
		refs[i].Bus = refs[i].Bus.(*regBus).softBus
	}
	g, err := b.softBus.GroupCQs(refs)
	return regGroup{g}, err
}

type regGroup struct{ nvme.CQGroup }

func (g regGroup) Rejoin(ref nvme.CQRef) error {
	ref.Bus = ref.Bus.(*regBus).softBus
	return g.CQGroup.Rejoin(ref)
}

// cure ends all that is wrong.
func (b *regBus) cure() {
	b.cfs.Store(false)
	b.cfsKicks.Store(0)
	b.cfsTimes.Store(0)
	b.goneKicks.Store(0)
	b.gone.Store(false)
	b.notReady.Store(0)
	b.stayReady.Store(0)
	b.masked.Store(0)
}

// resetRig is a rig over regBuses; faults are those of each SSD, or of all.
func resetRig(t *testing.T, o rigOptions, faults ...string) (*rig, []*regBus) {
	t.Helper()
	var buses []*regBus
	o.wrap = func(b nvme.Bus) nvme.Bus {
		var set *faultinject.Set
		// all in front of the same kind of bus, so that they can be waited for at once
		if i := len(buses); len(faults) > 0 {
			text := faults[0]
			if len(faults) > 1 {
				text = faults[i]
			}
			set = mustParse(t, text)
			b = faultbus.New(b, set, faultbus.Options{PollDoorbells: rigDevice != nil})
		}
		buses = append(buses, &regBus{softBus: b.(softBus), every: 20, faults: set})
		return buses[len(buses)-1]
	}
	if o.lba == 0 {
		o.lba, o.rowBytes, o.rows, o.ram = 512, 512, 300, true
	}
	r := newRig(t, o)
	t.Cleanup(func() { // before the controllers are closed
		for _, b := range buses {
			b.cure()
		}
	})
	return r, buses
}

func mustParse(t *testing.T, faults string) *faultinject.Set {
	t.Helper()
	set, err := faultinject.Parse(faults)
	require.NoError(t, err)
	return set
}

// bothStacks runs a test for async and sync, of the same shape.
func bothStacks(t *testing.T, test func(t *testing.T, mk func(r *rig, o AsyncOptions) Reader)) {
	t.Run("async", func(t *testing.T) {
		test(t, func(r *rig, o AsyncOptions) Reader { return r.async(o) })
	})
	t.Run("sync", func(t *testing.T) {
		test(t, func(r *rig, o AsyncOptions) Reader {
			o.Blocks, o.Threads = 8, 64
			return r.sync(o)
		})
	})
}

// deadAbort has Abort succeed and do nothing.
func deadAbort(e *async) {
	e.abort = func(context.Context, *nvme.Controller, uint16, uint16) error { return nil }
}

// healed runs sets and checks that every byte of theirs is right, twice, and that nothing is left
// over.
func healed(t *testing.T, r *rig, rd Reader, sets, n int) Stats {
	t.Helper()
	all, stats, failures := runSets(r, rd, 17, sets, n)
	for i, err := range failures {
		require.NoError(t, err)
		require.EqualValues(t, n, stats[i].Rows)
		all[i].check(nil)
	}
	st := rd.Stats()
	for _, s := range all {
		s.poison()
		s.read(rd)
	}
	idle(t, rd)
	freeSets(rd, all)
	return st
}

// TestFatalStatus: a controller that sets CFS is reset at once; nobody is charged an attempt for
// it, not even where none is left, and every set that was under way gets its rows.
func TestFatalStatus(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		for _, ram := range []bool{true, false} {
			t.Run(fmt.Sprintf("ram=%v", ram), func(t *testing.T) {
				r, buses := resetRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 200, rows: 300,
					ram: ram}, "lost(op=read,after=20,times=6)", "")
				rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 750 * time.Millisecond,
					Retries: -1})
				// A slow machine may be late before a read is lost: none is lost behind the reset.
				buses[0].healing.Store(true)
				buses[0].cfs.Store(true)
				st := healed(t, r, rd, 4, 120)
				require.EqualValues(t, 1, st.Resets)
				require.EqualValues(t, 1, st.PerSSD[0].Resets)
				require.Zero(t, st.PerSSD[1].Resets)
				require.Zero(t, st.Aborts+st.Timeouts+st.Recreated+st.Failed)
				require.Positive(t, st.PerSSD[0].Retries)
				require.Zero(t, st.PerSSD[1].Retries)
				require.Equal(t, st.Retries, st.PerSSD[0].Retries)
				require.EqualValues(t, 1, r.ssds[0].Ctrl.Counters().Resets)
			})
		}
	})
}

// TestStripesShareResets: stripes on one SSD are recovered together, with one reset.
func TestStripesShareResets(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		shape := rigOptions{ssds: 3, lba: 512, rowBytes: 200, rows: 300, ram: true, together: true}
		r, buses := resetRig(t, shape, "lost(op=read,after=20,times=6)")
		rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 750 * time.Millisecond,
			Retries: -1})
		buses[0].healing.Store(true)
		buses[0].cfs.Store(true)
		st := healed(t, r, rd, 4, 120)
		require.Len(t, st.PerSSD, 1)
		require.EqualValues(t, 1, st.Resets)
		require.EqualValues(t, 1, r.ssds[0].Ctrl.Counters().Resets)
		require.Zero(t, st.Aborts+st.Timeouts+st.Recreated+st.Failed)
	})
}

// TestRecoverySteps: each step that fails leads to the next one.
func TestRecoverySteps(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		for _, c := range []struct {
			name, faults string
			set          func(e *async)
			check        func(t *testing.T, st SSDStats)
		}{
			{"abort helps", "lost(op=read,after=20,times=2)", func(*async) {},
				func(t *testing.T, st SSDStats) {
					require.Positive(t, st.Aborts)
					require.Zero(t, st.Recreated+st.Resets)
				}},
			{"abort in vain, new queue pair", "lost(op=read,after=20,times=2)", deadAbort,
				func(t *testing.T, st SSDStats) {
					require.Positive(t, st.Aborts)
					require.Positive(t, st.Recreated)
					require.Zero(t, st.Resets)
				}},
			{"abort fails, new queue pair", "lost(op=read,after=20,times=2)", noAbort,
				func(t *testing.T, st SSDStats) {
					require.Positive(t, st.Recreated)
					require.Zero(t, st.Resets)
				}},
			{"no new queue pair, reset", "lost(op=read,after=20,times=2)",
				func(e *async) { noAbort(e); noDelete(e) }, func(t *testing.T, st SSDStats) {
					require.EqualValues(t, 1, st.Resets)
				}},
			// All that is outstanding, twice: on the first queue pairs and on the new ones.
			{"new queue pair in vain, reset", "lost(op=read,times=32)", deadAbort,
				func(t *testing.T, st SSDStats) {
					require.Positive(t, st.Recreated)
					require.Positive(t, st.Resets)
				}},
		} {
			t.Run(c.name, func(t *testing.T) {
				r, _ := resetRig(t, rigOptions{ssds: 2}, c.faults, "")
				rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 100 * time.Millisecond,
					Retries: 6})
				c.set(rd.(*async))
				st := healed(t, r, rd, 3, 120)
				require.Zero(t, st.Failed)
				require.Positive(t, st.PerSSD[0].Timeouts)
				require.Equal(t, st.Timeouts, st.PerSSD[0].Timeouts+st.PerSSD[1].Timeouts)
				c.check(t, st.PerSSD[0])
			})
		}
	})
}

// TestNotReady: a controller that does not come up costs its time and one of the resets; one that
// never does is given up, and since CC.EN = 0 has completed its rows are safe to fail.
func TestNotReady(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		t.Run("once", func(t *testing.T) {
			r, buses := resetRig(t, rigOptions{ssds: 2}, "lost(op=read,after=20,times=6)", "")
			rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 60 * time.Millisecond})
			buses[0].cfs.Store(true)
			buses[0].notReady.Store(1)
			st := healed(t, r, rd, 3, 100)
			require.EqualValues(t, 2, st.Resets)
		})
		t.Run("never", func(t *testing.T) {
			r, buses := resetRig(t, rigOptions{ssds: 2}, "lost(op=read,after=20,times=6)", "")
			rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 60 * time.Millisecond,
				Resets: 1})
			buses[0].cfs.Store(true)
			buses[0].notReady.Store(1 << 30)
			began := time.Now()
			givenUp(t, r, rd, false, "1 reset", nvme.ErrTimeout)
			require.Less(t, time.Since(began), 8*time.Second)
			require.EqualValues(t, 1, rd.Stats().Resets)
		})
	})
}

// TestBarren: an SSD that answers admin commands and never completes a read is reset, and then
// given up, after as many late commands as fill its queues for all their attempts, however many
// rows there are.
func TestBarren(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		for name, set := range map[string]func(
			*async){"abort helps": func(*async) {}, "abort in vain": deadAbort} {
			for _, resets := range []int{2, -1} {
				t.Run(fmt.Sprintf("%s, %d resets", name, max(resets, 0)), func(t *testing.T) {
					r, _ := resetRig(t, rigOptions{ssds: 2}, "drop(op=read,after=40)", "")
					const depth, retries = 16, 1
					rd := mk(r, AsyncOptions{Depth: depth, QueuePairs: 2,
						Timeout: 10 * time.Millisecond, Retries: retries, Resets: resets})
					set(rd.(*async))
					s := r.newSet(rand.New(rand.NewPCG(7, 7)), 4000, 512, 0)
					p, err := rd.Submit(testCtx(t), s.rs)
					require.NoError(t, err)
					_, err = p.Wait(testCtx(t))
					// the first rows that failed were late
					require.Equal(t, errs.Device, errs.ClassOf(err))
					s.check(onSSD(s, 0))
					_, err = rd.Submit(testCtx(t), s.rs)
					var given *GivenUpError
					require.ErrorAs(t, err, &given)
					require.False(t, given.Unsafe)
					st := rd.Stats()
					require.Contains(t, st.PerSSD[0].GivenUp, "nvme ssd0 was given up")
					require.Empty(t, st.PerSSD[1].GivenUp)
					require.EqualValues(t, max(resets, 0), st.Resets)
					require.LessOrEqual(t, st.PerSSD[0].Timeouts,
						int64((st.Resets+1)*(warp*(retries+1)+depth)))
					s.free(rd)
				})
			}
		}
	})
}

// givenUp runs sets of which those with rows on the first SSD must fail, after what was tried and
// because of is; checks that the others go on, and that the SSD is refused from then on.
func givenUp(t *testing.T, r *rig, rd Reader, unsafe bool, tried string, is error) {
	t.Helper()
	ctx := testCtx(t)
	all, stats, failures := runSets(r, rd, 19, 3, 100)
	failed := 0
	for i, err := range failures {
		if err == nil {
			all[i].check(nil)
			continue
		}
		failed++
		var given *GivenUpError
		require.ErrorAs(t, err, &given)
		require.Equal(t, unsafe, given.Unsafe)
		require.Equal(t, "ssd0", given.SSD)
		require.Contains(t, given.Tried, tried)
		require.ErrorIs(t, err, is)
		require.Equal(t, errs.Device, errs.ClassOf(err))
		require.Regexp(t,
			`nvme ssd0 q\d: read LBA \d+\+1: nvme ssd0 was given up.*: .*; (look at it with|check that the SSD is still plugged in)`,
			err.Error())
		var se *SetError
		require.ErrorAs(t, err, &se)
		require.EqualValues(t, 100, stats[i].Rows+se.Failed)
		all[i].check(onSSD(all[i], 0))
	}
	require.Positive(t, failed)
	_, err := rd.Submit(ctx, all[0].rs)
	require.ErrorContains(t, err, "nvme ssd0 was given up")
	require.ErrorIs(t, err, is)
	other := r.newSetOf(rand.New(rand.NewPCG(5, 5)), 80, 1)
	other.read(rd)
	other.free(rd)
	st := rd.Stats()
	require.Contains(t, st.PerSSD[0].GivenUp, "nvme ssd0 was given up")
	require.Empty(t, st.PerSSD[1].GivenUp)
	require.Positive(t, st.Failed)
	if !unsafe {
		freeSets(rd, all)
		return
	}
	t.Cleanup(func() { // after Close
		for _, s := range all {
			require.NoError(t, errors.Join(s.rs.Dst.Free(), s.rowBuf.Free(), s.posBuf.Free()))
		}
	})
}

// afterClose closes the reader now, for tests whose buffers stay taken until then.
func afterClose(t *testing.T, rd Reader) {
	t.Helper()
	require.NoError(t, rd.Close(testCtx(t)))
}

// TestNeverDisabled: an SSD whose CC.EN = 0 never completes may still write: what it holds stays
// taken.
func TestNeverDisabled(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		r, buses := resetRig(t, rigOptions{ssds: 2}, "lost(op=read,after=4,times=40)", "")
		rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 60 * time.Millisecond,
			Resets: 1})
		buses[0].cfs.Store(true)
		buses[0].stayReady.Store(1 << 30)
		givenUp(t, r, rd, true, "1 reset", nvme.ErrTimeout)
		taken := 0
		for g := range rd.(*async).perSSD {
			pulled(t, rd).queue(g).commands(func(uint32, *command) { taken++ })
		}
		require.Positive(t, taken, "commands that the SSD may still have")
		buses[0].cure()
		afterClose(t, rd)
	})
}

// TestGone: a controller that does not answer any more is given up at once, whatever resets are
// left.
func TestGone(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		r, buses := resetRig(t, rigOptions{ssds: 2}, "lost(op=read,after=4,times=40)", "")
		rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 60 * time.Millisecond})
		buses[0].gone.Store(true)
		began := time.Now()
		givenUp(t, r, rd, true, "", nvme.ErrGone)
		if rigDevice == nil { // kernels that poll make it a matter of the CPU's load
			require.Less(t, time.Since(began), 4*time.Second)
		}
		require.Zero(t, rd.Stats().Resets)
		afterClose(t, rd)
	})
}

// TestResetsUsedUp: an SSD that fails again after each reset is given up when these are used up.
func TestResetsUsedUp(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		r, buses := resetRig(t, rigOptions{ssds: 2}, "lost(op=read)", "")
		rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 30 * time.Millisecond,
			Resets: 2})
		buses[0].cfs.Store(true)
		buses[0].every = 1
		buses[0].cfsTimes.Store(1 << 30)
		if rigDevice != nil { // no doorbell is seen there
			t.Skip("needs Kick")
		}
		givenUp(t, r, rd, false, "2 resets", nvme.ErrFatal)
		require.EqualValues(t, 2, rd.Stats().Resets)
	})
}

// TestSeveralResets: SSDs are reset at the same time, and one that is not does not wait for them.
func TestSeveralResets(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		r, buses := resetRig(t, rigOptions{ssds: 3}, "lost(op=read,after=9,times=3)")
		rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 60 * time.Millisecond})
		for _, b := range buses {
			b.cfs.Store(true)
			b.notReady.Store(1)
		}
		st := healed(t, r, rd, 4, 150)
		lastBegin, firstEnd := int64(0), int64(math.MaxInt64)
		for s, per := range st.PerSSD {
			require.EqualValues(t, 2, per.Resets)
			lastBegin, firstEnd = max(lastBegin, buses[s].began.Load()),
				min(firstEnd, buses[s].ended.Load())
		}
		require.Less(t, lastBegin, firstEnd, "one after the other")
	})
}

// TestOthersGoOn: while an SSD is reset, sets on other SSDs are read as always, and sets with rows
// on both wait for nothing but their rows.
func TestOthersGoOn(t *testing.T) {
	r, buses := resetRig(t, rigOptions{ssds: 2}, "lost(op=read,after=9,times=3)", "")
	rd := r.async(AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 60 * time.Millisecond})
	buses[0].cfs.Store(true)
	buses[0].notReady.Store(2) // a second
	ctx := testCtx(t)
	both := r.newSet(rand.New(rand.NewPCG(1, 1)), 100, 512, 0)
	p, err := rd.Submit(ctx, both.rs)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := p.Wait(ctx)
		done <- err
	}()
	for rd.Stats().Resets == 0 {
		time.Sleep(time.Millisecond)
	}
	n := 0
	for ; len(done) == 0; n++ {
		s := r.newSetOf(rand.New(rand.NewPCG(2, uint64(n))), 60, 1)
		s.read(rd)
		s.free(rd)
	}
	least := 3
	if rigDevice != nil {
		least = 0
	}
	require.Greater(t, n, least)
	require.NoError(t, <-done)
	both.check(nil)
	require.EqualValues(t, 3, rd.Stats().Resets)
	idle(t, rd)
	both.free(rd)
}

// TestWaitLeavesReset: a Wait whose context ends does not wait for a reset, which goes on without
// it.
func TestWaitLeavesReset(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		r, buses := resetRig(t, rigOptions{ssds: 1}, "lost(op=read,after=9,times=3)")
		rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 60 * time.Millisecond})
		buses[0].cfs.Store(true)
		buses[0].notReady.Store(1)
		s := r.newSet(rand.New(rand.NewPCG(1, 1)), 100, 512, 0)
		p, err := rd.Submit(testCtx(t), s.rs)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			for rd.Stats().Resets == 0 {
				time.Sleep(time.Millisecond)
			}
			cancel()
		}()
		began := time.Now()
		_, err = p.Wait(ctx)
		require.ErrorIs(t, err, context.Canceled)
		if rigDevice == nil {
			require.Less(t, time.Since(began), 450*time.Millisecond)
		}
		_, err = p.Wait(testCtx(t))
		require.NoError(t, err)
		s.check(nil)
		idle(t, rd)
		s.free(rd)
	})
}

// TestCloseDuringReset: Close ends a reset that is under way, at any point of it, and leaves a
// controller that works.
func TestCloseDuringReset(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		off := []time.Duration{0, time.Millisecond, 20 * time.Millisecond, 520 * time.Millisecond}
		if wide.Lean() {
			off = off[1:2]
		}
		for _, after := range off {
			t.Run(fmt.Sprint(after), func(t *testing.T) {
				r, buses := resetRig(t, rigOptions{ssds: 2}, "lost(op=read,after=9,times=3)", "")
				rd := mk(r, AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: 60 * time.Millisecond})
				buses[0].cfs.Store(true)
				buses[0].notReady.Store(2)
				s := r.newSet(rand.New(rand.NewPCG(1, 1)), 100, 512, 0)
				p, err := rd.Submit(testCtx(t), s.rs)
				require.NoError(t, err)
				waited := make(chan error, 1)
				go func() {
					_, err := p.Wait(testCtx(t))
					waited <- err
				}()
				for rd.Stats().Resets == 0 {
					time.Sleep(100 * time.Microsecond)
				}
				time.Sleep(after)
				buses[0].notReady.Store(0)
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				began := time.Now()
				err = rd.Close(ctx)
				require.ErrorIs(t, err, context.Canceled)
				require.Less(t, time.Since(began), 5*time.Second)
				werr := <-waited
				require.Error(t, werr)
				s.free(rd)
				again := mk(r, AsyncOptions{Depth: 16, Timeout: 5 * time.Second})
				o := r.newSet(rand.New(rand.NewPCG(1, 2)), 100, 512, 0)
				o.read(again)
				o.free(again)
			})
		}
	})
}

// TestResetUnderLoad: several goroutines read through resets, each of which finds all queues busy.
func TestResetUnderLoad(t *testing.T) {
	bothStacks(t, func(t *testing.T, mk func(*rig, AsyncOptions) Reader) {
		r, buses := resetRig(t, rigOptions{ssds: 2},
			"lost(op=read,after=100,times=2);lost(op=read,after=700,times=2)", "")
		rd := mk(r, AsyncOptions{Depth: 32, QueuePairs: 4, Timeout: 50 * time.Millisecond,
			Retries: -1})
		if rigDevice != nil {
			t.Skip("needs Kick")
		}
		buses[0].every = 40
		buses[0].cfsKicks.Store(20)
		buses[0].cfsTimes.Store(1)
		noAbort(rd.(*async)) // whatever is late before CFS is seen would be charged
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				for i := range 8 {
					s := r.newSet(rand.New(rand.NewPCG(uint64(g), uint64(i))), 90, 512, 0)
					p, err := rd.Submit(testCtx(t), s.rs)
					if err != nil {
						t.Error(err)
						return
					}
					_, err = p.Wait(testCtx(t))
					lost := map[int64]bool{}
					var se *SetError
					if errors.As(err, &se) {
						for _, f := range se.First {
							lost[f.Row] = true
						}
					} else if err != nil {
						t.Error(err)
					}
					s.check(lost)
					s.free(rd)
				}
			})
		}
		wg.Wait()
		require.Positive(t, rd.Stats().Resets)
		require.LessOrEqual(t, rd.Stats().Resets, int64(3))
		idle(t, rd)
	})
}

// TestResetChaos: random faults, aborts and deletions that work or do not, controllers that set
// CFS, do not come up or do not go down, vanish; sets come out whole or name what failed, nothing
// hangs, and nothing is lost. RESET_SEEDS describes how many seeds.
func TestResetChaos(t *testing.T) {
	seeds := 24
	if wide.Lean() || raceEnabled {
		seeds = 8
	}
	if v := os.Getenv("RESET_SEEDS"); v != "" {
		var err error
		seeds, err = strconv.Atoi(v)
		require.NoError(t, err)
	}
	base := uint64(time.Now().UnixNano())
	if v := os.Getenv("RESET_SEED"); v != "" {
		var err error
		base, err = strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
	}
	for i := range seeds {
		seed := base + uint64(i)
		t.Run(fmt.Sprintf("seed=%d", seed),
			func(t *testing.T) { resetChaos(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

func resetChaos(t *testing.T, rng *rand.Rand) {
	began := time.Now()
	ssds := 1 + rng.IntN(3)
	faults := make([]string, ssds)
	for i := range faults {
		if rng.IntN(2) == 0 {
			faults[i] = chaosFaults(rng)
		}
	}
	if ssds == 1 && rng.IntN(3) == 0 {
		faults = nil
	}
	r, buses := resetRig(t, rigOptions{ssds: ssds, lba: 512, rowBytes: []int{512, 200, 4096,
		20480}[rng.IntN(4)], rows: 300, ram: rng.IntN(3) > 0, sms: 1 + rng.IntN(3),
		// 8 KiB: rows of 20 KiB are read in parts
		proxy: func(c *proxy.Config) { c.MDTS = 1 }}, faults...)
	o := AsyncOptions{Depth: 2 + rng.IntN(30), QueuePairs: 1 + rng.IntN(3),
		Timeout: 30 * time.Millisecond, Retries: rng.IntN(5) - 1, Resets: rng.IntN(4) - 1,
		CoalesceBytes: []int{0, -1, 8192}[rng.IntN(3)]}
	o.Depth = max(o.Depth, o.QueuePairs)
	var rd Reader
	var err error
	if rng.IntN(3) == 0 {
		o.Blocks, o.Threads = 1+rng.IntN(12), 32<<rng.IntN(3)
		rd, err = NewSync(r.dev, r.ssds, r.layout, o)
	} else {
		rd, err = NewAsync(r.dev, r.ssds, r.layout, o)
	}
	require.NoError(t, err)
	e := rd.(*async)
	if e.sync != nil {
		e.sync.limit = []time.Duration{2 * time.Millisecond, time.Second}[rng.IntN(2)]
	}
	works := e.deleteQueue
	abort, del := rng.IntN(3), rng.IntN(3) == 0
	switch abort {
	case 1:
		deadAbort(e)
	case 2:
		noAbort(e)
	}
	if del {
		noDelete(e)
	}
	what := ""
	for _, b := range buses {
		b.every = 1 + rng.Int64N(40)
		k := rng.IntN(8)
		switch k {
		case 0, 1, 2:
			b.cfsKicks.Store(1 + rng.Int64N(40))
			b.cfsTimes.Store(rng.Int64N(4))
			b.cfs.Store(rigDevice != nil) // there no Kick is made
		case 3:
			b.goneKicks.Store(1 + rng.Int64N(60))
		}
		if rng.IntN(6) == 0 {
			b.notReady.Store(1 + rng.Int64N(2))
			what += " notready"
		}
		if rng.IntN(8) == 0 {
			b.stayReady.Store(1 + rng.Int64N(3))
			what += " stayready"
		}
		what += fmt.Sprint(" ", k)
	}
	t.Logf("%+v %s abort=%d delete=%v:%s", o, rd.Name(), abort, del, what)
	closing := rng.IntN(4) == 0 // while sets are under way
	cancelled, cancel := context.WithCancel(context.Background())
	defer cancel()
	if closing {
		time.AfterFunc(time.Duration(rng.IntN(120))*time.Millisecond, cancel)
	}
	var mu sync.Mutex
	var all []*testSet
	var rows, asked int64
	var wg sync.WaitGroup
	for g := range 3 {
		sub := rand.New(rand.NewPCG(rng.Uint64(), uint64(g)))
		var mine []*testSet
		for range 3 {
			mine = append(mine, r.newSet(sub, 1+sub.IntN(120), int64(r.layout.RowBytes+3)&^3, 0))
		}
		all = append(all, mine...)
		wg.Go(func() {
			for range 3 {
				for _, s := range mine {
					if !chaosRead(t, cancelled, rd, s, &mu, &rows, &asked) {
						return
					}
				}
			}
		})
	}
	if closing {
		<-cancelled.Done()
		if err := rd.Close(cancelled); err != nil && !errors.Is(err, context.Canceled) &&
			!errors.Is(err, nvme.ErrTimeout) {
			t.Errorf("close: %v", err)
		}
	}
	wg.Wait()
	if del && !closing {
		e.deleteQueue = works
	}
	if !closing {
		st := rd.Stats()
		require.Equal(t, rows, st.Rows)
		require.Equal(t, asked-rows, st.Failed)
		pulled(t, rd)
		for s := range r.ssds {
			if st.PerSSD[s].GivenUp == "" {
				for i := range e.perSSD {
					q := e.queue(s*e.perSSD + i)
					require.Zero(t, q.Frozen)
					require.Zero(t, q.Own+q.Reap)
					q.commands(func(cid uint32,
						_ *command) {
						t.Errorf("SSD %d: CID %d is still taken", s, cid)
					})
					require.Equal(t, q.Issued, q.Completed+q.Dropped)
				}
			}
			require.LessOrEqual(t, st.PerSSD[s].Resets, int64(max(e.opt.Resets, 0)))
		}
	}
	for _, b := range buses {
		b.cure()
	}
	if err := rd.Close(testCtx(t)); !closing {
		require.NoError(t, err)
	}
	for _, s := range all {
		require.NoError(t, errors.Join(s.rs.Dst.Free(), s.rowBuf.Free(), s.posBuf.Free()))
	}
	require.Less(t, time.Since(began), 30*time.Second)
}

// chaosRead reads a set once. False: there is no more to do.
func chaosRead(t *testing.T, ctx context.Context, rd Reader, s *testSet, mu *sync.Mutex, rows,
	asked *int64) bool {
	s.poison()
	p, err := rd.Submit(testCtx(t), s.rs)
	if err != nil {
		var given *GivenUpError
		if !errors.As(err, &given) && ctx.Err() == nil {
			t.Error(err)
		}
		return false
	}
	st, err := p.Wait(testCtx(t))
	mu.Lock()
	defer mu.Unlock()
	*asked += int64(len(s.ids))
	*rows += st.Rows
	lost := map[int64]bool{}
	var se *SetError
	switch {
	case errors.As(err, &se):
		if st.Rows+se.Failed != int64(len(s.ids)) {
			t.Errorf("%d rows read, %d failed, of %d", st.Rows, se.Failed, len(s.ids))
		}
		for _, f := range se.First {
			lost[f.Row] = true
		}
		if int(se.Failed) > len(se.First) {
			return true
		}
	case err != nil:
		if ctx.Err() == nil {
			t.Error(err)
		}
		return false
	}
	s.check(lost)
	// A set that the SSD may still write to must not be used again.
	var given *GivenUpError
	return !errors.As(err, &given) || !given.Unsafe
}

// TestGPUResets: the same on the driver's device, where no kernel may run while the host changes
// what both share. The quick ones always run, the others as in TestGPUAsHost.
func TestGPUResets(t *testing.T) {
	onGPU(t)
	all := os.Getenv("DIFF_BATCHES") != "" || os.Getenv("HELIOS_GPU") == "1"
	for _, c := range []struct {
		name  string
		quick bool
		test  func(*testing.T)
	}{
		{"fatal status", true, TestFatalStatus},
		{"gone", true, TestGone},
		{"never disabled", false, TestNeverDisabled},
		{"others go on", false, TestOthersGoOn},
		{"steps", false, TestRecoverySteps},
		{"not ready", false, TestNotReady},
		{"several", false, TestSeveralResets},
		{"wait leaves", false, TestWaitLeavesReset},
		{"close", false, TestCloseDuringReset},
		{"chaos", false, TestResetChaos},
	} {
		if all || c.quick {
			t.Run(c.name, c.test)
		}
	}
}
