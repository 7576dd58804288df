package proxy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/ssdmodel"
	"helios/nvme"
)

func fixed(t testing.TB, d time.Duration) *ssdmodel.Model {
	t.Helper()
	m, err := ssdmodel.Fixed(d)
	require.NoError(t, err)
	return m
}

func builtin(t testing.TB, name string) *ssdmodel.Model {
	t.Helper()
	m, err := ssdmodel.Load(name)
	require.NoError(t, err)
	return m
}

func TestTimedHeap(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var h timedHeap
	qs := []*squeue{{id: 1}, {id: 2}}
	var want []timedEntry
	for i := range uint64(500) {
		e := timedEntry{entry{sq: qs[i%2]}, int64(rng.IntN(50)), i}
		h.push(e)
		want = append(want, e)
	}
	require.Equal(t, 250, h.remove(qs[0]))
	want = slices.DeleteFunc(want, func(e timedEntry) bool { return e.sq == qs[0] })
	slices.SortStableFunc(want, func(a, b timedEntry) int { return int(a.due - b.due) })
	for i := range want {
		require.Equal(t, want[i], h.pop(), i)
	}
	h.push(timedEntry{})
	require.Equal(t, 1, h.remove(nil))
	require.Empty(t, h)
}

// TestModelLatency: no completion comes before its time, reads that are out together wait together,
// and the time is the modelled one and not a timer's resolution.
func TestModelLatency(t *testing.T) {
	for _, latency := range []time.Duration{80 * time.Microsecond, 300 * time.Microsecond} {
		for name, cfg := range map[string]Config{"waited": {}, "polled": {PollDoorbells: true},
			"out of order": {OutOfOrder: true}} {
			t.Run(fmt.Sprint(latency, " ", name), func(t *testing.T) {
				cfg.RAM, cfg.Model = true, fixed(t, latency)
				g := newRig(t, cfg)
				q := g.pair(1, 128)
				best := time.Hour
				for range 40 {
					start := time.Now()
					q.must(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova), 0))
					took := time.Since(start)
					require.GreaterOrEqual(t, took, latency)
					best = min(best, took)
				}
				assert.Less(t, best, latency+900*time.Microsecond)
				best = time.Hour
				for range 20 {
					var cmds []nvme.Command
					for i := range 100 {
						cmds = append(cmds, nvme.ReadCommand(uint16(i), 1, 0, 1,
							uint64(g.iova)+uint64(i)*4096, 0))
					}
					start := time.Now()
					q.Put(cmds...)
					for range 100 {
						e, ok := q.Get(5 * time.Second)
						require.True(t, ok)
						require.True(t, e.Status().OK())
					}
					best = min(best, time.Since(start))
				}
				assert.Less(t, best, 50*latency, "100 reads at once")
			})
		}
	}
}

// TestModelOverFiles: a medium of its own bounds a modelled SSD from below, and the model does too.
func TestModelOverFiles(t *testing.T) {
	for name, cfg := range map[string]Config{"io_uring": {}, "pread": {NoIOUring: true},
		"buffered": {Buffered: true}} {
		t.Run(name, func(t *testing.T) {
			const latency = 3 * time.Millisecond
			cfg.Model = fixed(t, latency)
			g := newRig(t, cfg)
			q := g.pair(1, 64)
			g.mem[0], g.mem[511] = 17, 18
			for _, cmd := range []nvme.Command{
				nvme.WriteCommand(1, 1, 3, 1, uint64(g.iova), 0),
				nvme.FlushCommand(2, 1),
				nvme.ReadCommand(3, 1, 3, 1, uint64(g.iova)+4096, 0),
			} {
				start := time.Now()
				q.must(cmd)
				require.GreaterOrEqual(t, time.Since(start), latency)
			}
			require.EqualValues(t, []byte{17, 18}, []byte{g.mem[4096], g.mem[4096+511]})
			// A command that is wrong in itself never reaches the medium.
			e := q.Do(q.g.t, nvme.ReadCommand(4, 1, 1<<40, 1, uint64(g.iova), 0))
			require.Equal(t, nvme.StatusLBAOutOfRange.WithDNR(), e.Status())
		})
	}
}

// TestModelOvertaking: completions come in the order of their times, which is not that of the
// commands, and a waiting party that sleeps for a late one learns of an earlier one.
func TestModelOvertaking(t *testing.T) {
	text := "name: x\nread: {latency: {quantiles: [{q: 1, us: 2000}], source: x}}\n" +
		"write: {latency: {quantiles: [{q: 1, us: 60000}], source: x}}\nflush: {latency: {quantiles: [{q: 1, us: 60000}], source: x}}\n"
	m, err := ssdmodel.Parse([]byte(text))
	require.NoError(t, err)
	g := newRig(t, Config{RAM: true, Model: m})
	q := g.pair(1, 64)
	start := time.Now()
	q.Put(nvme.WriteCommand(1, 1, 0, 1, uint64(g.iova), 0),
		nvme.ReadCommand(2, 1, 0, 1, uint64(g.iova)+4096, 0))
	e, ok := q.Get(time.Second)
	require.True(t, ok)
	require.EqualValues(t, 2, e.CID)
	// The party sleeps for the write now; another thread submits a read.
	var done sync.WaitGroup
	done.Go(func() {
		time.Sleep(2 * time.Millisecond)
		q.Put(nvme.ReadCommand(3, 1, 0, 1, uint64(g.iova)+4096, 0))
	})
	e, ok = q.Get(time.Second)
	done.Wait()
	require.True(t, ok)
	require.EqualValues(t, 3, e.CID)
	e, ok = q.Get(time.Second)
	require.True(t, ok)
	require.EqualValues(t, 1, e.CID)
	require.GreaterOrEqual(t, time.Since(start), 60*time.Millisecond)
}

// TestModelUnattended: completions of a queue for which nobody waits any more are posted by the
// background goroutine.
func TestModelUnattended(t *testing.T) {
	g := newRig(t, Config{RAM: true, Model: fixed(t, 5*time.Millisecond)})
	q := g.pair(1, 64)
	q.must(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova), 0)) // there is a waiter, who leaves
	start := time.Now()
	q.Put(nvme.ReadCommand(2, 1, 0, 1, uint64(g.iova), 0))
	for {
		if _, ok := q.Poll(); ok {
			break
		}
		require.Less(t, time.Since(start), 10*time.Second)
		time.Sleep(100 * time.Microsecond)
	}
	require.GreaterOrEqual(t, time.Since(start), 5*time.Millisecond)
}

// TestModelSleeps: who waits for a slow SSD sleeps, with and without somebody that waits.
func TestModelSleeps(t *testing.T) {
	for name, cfg := range map[string]Config{"ram": {RAM: true}, "file": {},
		"polled": {RAM: true, PollDoorbells: true}} {
		t.Run(name, func(t *testing.T) {
			cfg.Model = fixed(t, 20*time.Millisecond)
			g := newRig(t, cfg)
			q := g.pair(1, 64)
			q.must(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova), 0))
			start, cpu := time.Now(), cpuTime()
			for range 10 {
				q.must(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova), 0))
			}
			share := float64(cpuTime()-cpu) / float64(time.Since(start))
			require.Less(t, share, 0.5, "of a core while nothing is to be done")
		})
	}
}

// TestModelDeletedQueue: completions that were not due are gone with their queue, and their
// entries are free again.
func TestModelDeletedQueue(t *testing.T) {
	g := newRig(t, Config{RAM: true, Model: fixed(t, 50*time.Millisecond)})
	q := g.pair(1, 8)
	for range 3 { // more reads than the completion queue has entries
		var cmds []nvme.Command
		for i := range 7 {
			cmds = append(cmds, nvme.ReadCommand(uint16(i), 1, 0, 1, uint64(g.iova), 0))
		}
		q.Put(cmds...)
		_, ok := q.Get(time.Millisecond)
		require.False(t, ok)
		g.adm.must(nvme.DeleteSQCommand(g.nextCID(), 1))
		q.Tail = 0
		g.adm.must(nvme.CreateSQCommand(g.nextCID(), 1, 8, q.sq, 1))
	}
	q.must(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova), 0))
	_, ok := q.Get(60 * time.Millisecond)
	require.False(t, ok, "a completion of a deleted queue")
}

func TestModelOptions(t *testing.T) {
	_, err := Open(Config{Path: newFile(t, 1<<20, true), RAM: true, LBABytes: 4096,
		Model: builtin(t, "980pro")})
	require.ErrorContains(t, err, "SSD model 980pro has [512]")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// TestFakeTime: in a bubble of testing/synctest a modelled SSD keeps the bubble's time, to the
// nanosecond and without taking any.
func TestFakeTime(t *testing.T) {
	require.False(t, hostcpu.InBubble())
	path := newFile(t, 1<<20, true)
	real := time.Now()
	synctest.Test(t, func(t *testing.T) {
		require.True(t, hostcpu.InBubble())
		m := builtin(t, "p5510")
		bus, err := Open(Config{Path: path, RAM: true, Serial: "BUBBLE", Model: m})
		require.NoError(t, err)
		g := &rig{t: t, bus: bus}
		g.mem, g.iova = g.dma(rigMem)
		g.adm = g.ring(0, 0, 32)
		g.enable()
		q := g.pair(1, 64)
		server := play(m, "BUBBLE").server
		off := int64(time.Since(bus.opened))
		for range 100 {
			q.Put(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova), 0))
			start := time.Now()
			_, ok := q.Get(time.Hour)
			require.True(t, ok)
			took := int64(time.Since(start))
			require.Equal(t, server.Admit(off, ssdmodel.Read, 512)-off, took)
			off += took
		}
		start := time.Now()
		_, ok := q.Get(time.Hour)
		require.False(t, ok)
		require.Equal(t, time.Hour, time.Since(start))
		g.close()
	})
	require.Less(t, time.Since(real), time.Minute)
}
