package gpuio

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
)

func TestAsyncSimple(t *testing.T) {
	for _, ram := range []bool{true, false} {
		t.Run(fmt.Sprintf("ram=%v", ram), func(t *testing.T) {
			r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 4096, rows: 300, ram: ram})
			rd := r.async(AsyncOptions{})
			before := smartReads(t, r.ssds[0])
			s := r.newSet(rand.New(rand.NewPCG(1, 2)), 200, 4096, 0)
			defer s.free(rd)
			st := s.read(rd)
			require.EqualValues(t, 200, st.Commands)
			require.EqualValues(t, 200*4096, st.Bytes)
			require.EqualValues(t, 200, smartReads(t, r.ssds[0])-before)
			all := rd.Stats()
			require.EqualValues(t, 200, all.Direct)
			require.EqualValues(t, 200, all.Latency.Count())
		})
	}
}

// TestStacksRandom is metamorphic: random read sets through random equivalent configurations of
// all stacks give the rows' bytes, nothing else is written, and the SSDs' counters agree.
func TestStacksRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 28
	if wide.Lean() || raceEnabled {
		rounds = 10
	}
	for round := range rounds {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		pick := func(v ...int) int { return v[rng.IntN(len(v))] }
		o := rigOptions{
			ssds: pick(1, 1, 2, 3), lba: pick(512, 4096), rowBytes: pick(64, 100, 400, 512, 600,
				1024, 4000, 4096, 8192, 12288, 16384),
			rows: int64(pick(1, 7, 100, 700)), ram: rng.IntN(2) == 0, sms: pick(1, 2, 3),
			together: rng.IntN(3) == 0,
		}
		outOfOrder := rng.IntN(3) == 0
		noRing := rng.IntN(4) == 0
		o.proxy = func(c *proxy.Config) { c.OutOfOrder, c.NoIOUring = outOfOrder, noRing }
		depth, pairs, blocks := pick(1, 2, 3, 31, 32, 33, 64, 200), pick(0, 0, 1, 2, 5),
			pick(1, 2, 8, 32)
		pairs = min(pairs, depth)
		stack := rng.IntN(6)
		n, sets := pick(1, 5, 31, 64, 300, 900), pick(1, 3, 6)
		name := fmt.Sprintf(
			"seed=%d/%d stack=%d ssds=%d lba=%d row=%d ram=%v sms=%d depth=%d pairs=%d blocks=%d n=%d sets=%d ooo=%v together=%v",
			seed, round, stack, o.ssds, o.lba, o.rowBytes, o.ram, o.sms, depth, pairs, blocks, n,
			sets, outOfOrder, o.together)
		t.Run(name, func(t *testing.T) {
			r := newRig(t, o)
			var rd Reader
			switch stack {
			case 0:
				rd = r.reader(NewCPU(r.dev, r.ssds, r.layout,
					CPUOptions{Depth: depth, Threads: pick(0, 1, 3),
						Engine: []string{"", "pread"}[rng.IntN(2)], CoalesceBytes: -1}))
			case 1:
				rd = r.reader(NewMmap(r.dev, r.ssds, r.layout))
			default:
				rd = r.async(AsyncOptions{Blocks: blocks, QueuePairs: pairs, Depth: depth})
			}
			before := int64(0)
			for _, s := range Distinct(r.ssds) {
				before += smartReads(t, s)
			}
			stride := int64(o.rowBytes + pick(0, 0, 4, 3, 512))
			offset := int64(pick(0, 0, 4, 8192, 2))
			ctx := testCtx(t)
			var all []*testSet
			var pend []Pending
			for range sets {
				s := r.newSet(rng, n, stride, offset)
				p, err := rd.Submit(ctx, s.rs)
				require.NoError(t, err)
				all, pend = append(all, s), append(pend, p)
			}
			var commands int64
			for _, i := range rng.Perm(sets) {
				st, err := pend[i].Wait(ctx)
				require.NoError(t, err)
				require.EqualValues(t, n, st.Rows)
				commands += st.Commands
				all[i].check(nil)
				all[i].free(rd)
			}
			require.EqualValues(t, n*sets, commands)
			require.Equal(t, commands, rd.Stats().Commands)
			if rd.Name() == "async" {
				after := int64(0)
				for _, s := range Distinct(r.ssds) {
					after += smartReads(t, s)
				}
				require.Equal(t, commands, after-before)
			}
		})
	}
}

// TestAsyncConcurrent has goroutines submit and wait on their own, over and over, with depth 2, so
// that pending lists and ring wrap-around are the rule.
func TestAsyncConcurrent(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 1024, rows: 500, ram: true, sms: 2})
	rd := r.async(AsyncOptions{Depth: 2, QueuePairs: 1})
	ctx := testCtx(t)
	var wg sync.WaitGroup
	var sets []*testSet
	for g := range 4 {
		s := r.newSet(rand.New(rand.NewPCG(7, uint64(g))), 150, 1024, 0)
		sets = append(sets, s)
		wg.Go(func() {
			for range 15 {
				s.poison()
				p, err := rd.Submit(ctx, s.rs)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := p.Wait(ctx); err != nil {
					t.Error(err)
					return
				}
				s.check(nil)
			}
		})
	}
	wg.Wait()
	st := rd.Stats()
	require.EqualValues(t, 4*15*150, st.Rows)
	require.Positive(t, st.Pended)
	for _, s := range sets {
		s.free(rd)
	}
}

// TestAsyncManySets submits more sets than there are slots, and waits only afterwards.
func TestAsyncManySets(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 100, ram: true})
	rd := r.async(AsyncOptions{Depth: 8})
	ctx := testCtx(t)
	s := r.newSet(rand.New(rand.NewPCG(3, 3)), 40, 512, 0)
	var pend []Pending
	for range 3 * maxSets {
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(t, err)
		pend = append(pend, p)
	}
	for _, p := range pend {
		st, err := p.Wait(ctx)
		require.NoError(t, err)
		require.EqualValues(t, 40, st.Rows)
		again, err := p.Wait(ctx)
		require.NoError(t, err)
		require.Equal(t, st, again)
	}
	s.check(nil)
	s.free(rd)
}

func TestPRPMatchesBuilder(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	mem := make([]uint64, 1024)
	for range 2000 {
		total := 512 * (1 + rng.IntN(64))
		a := uint64(rng.IntN(1<<20)) * 4
		lists := make([]byte, 8192) // stays where it is while prp writes to it
		q := &queueState{PageBytes: 4096, ReadBytes: uint32(total),
			ListBytes: uint32(listBytes(total, 4096)), ListsIOVA: 1 << 40}
		q.Lists = addr(lists)
		var cmd command
		q.prp(&cmd, 3, a, uint64(total))
		want1, want2, err := nvme.BuildPRP(nvme.IOVA(a), total, 4096,
			func() ([]uint64, nvme.IOVA, error) {
				return mem, nvme.IOVA(q.ListsIOVA + 3*uint64(q.ListBytes)), nil
			})
		require.NoError(t, err)
		require.Equal(t, want1, cmd.PRP1)
		require.Equal(t, want2, cmd.PRP2)
		pages := (int(a%4096) + total + 4095) / 4096
		for i := 0; pages > 2 && i < pages-1; i++ {
			require.Equal(t, mem[i], *at[uint64](q.Lists, int(3*q.ListBytes)/8+i))
		}
	}
}

// TestNoAllocationPerCommand: what a set allocates does not depend on its rows, coalesced or not.
func TestNoAllocationPerCommand(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, coalesce := range []int{-1, 1024} {
		r := newRig(t, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 64, ram: true})
		rd := r.async(AsyncOptions{Depth: 32, CoalesceBytes: coalesce})
		ctx := testCtx(t)
		per := func(n int) float64 {
			s := r.newSet(rand.New(rand.NewPCG(1, 2)), n, 512, 0)
			defer s.free(rd)
			read := func() {
				p, err := rd.Submit(ctx, s.rs)
				if err == nil {
					_, err = p.Wait(ctx)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			for range maxSets { // each slot's memory grows once
				read()
			}
			return testing.AllocsPerRun(20, read)
		}
		small, large := per(32), per(32*200)
		require.Less(t, large, small+32, "200 times the commands: %v and %v allocations",
			small, large)
	}
}

// BenchmarkSet measures one set at a time, the latency that a mini-batch sees.
func BenchmarkSet(b *testing.B) {
	for _, n := range []int{1, 32, 1024} {
		b.Run(fmt.Sprintf("rows=%d", n), func(b *testing.B) {
			r := newRig(b, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 4096, ram: true})
			rd := r.async(AsyncOptions{})
			s := r.newSet(rand.New(rand.NewPCG(1, 2)), n, 512, 0)
			defer s.free(rd)
			ctx := testCtx(b)
			b.ReportAllocs()
			for b.Loop() {
				p, err := rd.Submit(ctx, s.rs)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := p.Wait(ctx); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/row")
		})
	}
}

// TestBlocksOverFiles: SSDs over files have one block for some SMs, those in memory one for each.
func TestBlocksOverFiles(t *testing.T) {
	if rigDevice != nil {
		t.Skip("of the host device")
	}
	for _, c := range []struct {
		ram           bool
		sms, at, want int
	}{{false, 1, 0, 1}, {false, 2, 0, 1}, {false, 8, 0, 2}, {false, 8, 1, 1}, {true, 8, 0, 8}} {
		r := newRig(t, rigOptions{rows: 100, rowBytes: 512, lba: 512, ssds: 2, sms: c.sms,
			ram: c.ram})
		if e := r.buses[0].Engine(); !c.ram && e != "io_uring" {
			t.Skipf("files by %s here", e)
		}
		e := r.async(AsyncOptions{Blocks: c.at}).(*async)
		n, why := e.RunningBlocks()
		require.Equal(t, c.want, n, "%+v", c)
		require.Equal(t, c.at == c.want, why == "", "%+v", c)
	}
}
