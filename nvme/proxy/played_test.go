package proxy

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/ssdmodel"
	"helios/nvme"
)

// loopResult holds what a closed loop saw: completions a second and latencies.
type loopResult struct {
	iops   float64
	took   []time.Duration
	sorted []time.Duration
	cpu    float64 // cores
}

func (r *loopResult) at(q float64) time.Duration {
	if len(r.sorted) != len(r.took) {
		r.sorted = slices.Clone(r.took)
		slices.Sort(r.sorted)
	}
	return r.sorted[int(q*float64(len(r.sorted)))]
}

// loopModel is a closed loop of n reads on a model, in its own time.
func loopModel(m *ssdmodel.Model, serial string, bytes int64, depth, n int) loopResult {
	s := play(m, serial).server
	var h timedHeap
	var r loopResult
	now := int64(0)
	for i := range n + depth {
		if i >= depth {
			now = h.pop().due
		}
		due := s.Admit(now, ssdmodel.Read, bytes)
		h.push(timedEntry{due: due})
		r.took = append(r.took, time.Duration(due-now))
	}
	r.iops = float64(n) / (float64(now) / 1e9)
	return r
}

// loopBus is the same on a software controller in wall time: one queue pair, one thread, which
// submits again what it has seen complete.
func loopBus(t testing.TB, g *rig, q *ring, bytes int64, depth, n int) loopResult {
	t.Helper()
	grp, err := g.bus.GroupCQs([]nvme.CQRef{{Bus: g.bus, QID: q.CQID}})
	require.NoError(t, err)
	defer func() { require.NoError(t, grp.Close()) }()
	var r loopResult
	since := make([]time.Duration, depth)
	cmds := make([]nvme.Command, 0, depth)
	blocks := uint32(bytes >> g.bus.lbaShift)
	const lists = rigMem / 2 // a page of PRPs for each command
	submit := func(cids []uint16, now time.Duration) {
		cmds = cmds[:0]
		for _, cid := range cids {
			since[cid] = now
			prp1, prp2 := g.prps(int(cid)*int(bytes), int(bytes), lists+int(cid)*4096)
			cmds = append(cmds, nvme.ReadCommand(cid, 1, nvme.LBA(uint32(cid)*blocks), blocks,
				prp1, prp2))
		}
		q.Put(cmds...)
	}
	var free []uint16
	for i := range depth {
		free = append(free, uint16(i))
	}
	start, cpu := time.Now(), cpuTime()
	for done := 0; done < n; {
		submit(free, time.Since(start))
		free = free[:0]
		for len(free) == 0 {
			for {
				c, ok := q.Poll()
				if !ok {
					break
				}
				require.True(t, c.Status().OK())
				r.took = append(r.took, time.Since(start)-since[c.CID])
				free = append(free, c.CID)
			}
			if len(free) == 0 {
				grp.Wait(time.Second)
			}
			require.Less(t, time.Since(start), time.Minute)
		}
		done += len(free)
	}
	wall := time.Since(start)
	r.iops, r.cpu = float64(len(r.took))/wall.Seconds(), float64(cpuTime()-cpu)/float64(wall)
	for inflight := depth - len(free); inflight > 0; inflight-- {
		_, ok := q.Get(time.Second)
		require.True(t, ok)
	}
	return r
}

// TestPlayedInWallTime: an SSD in RAM that plays a model has the throughput and the latencies of
// the model alone, never better ones, and not much worse ones where the machine lets it.
func TestPlayedInWallTime(t *testing.T) {
	m := builtin(t, "slow")
	for _, c := range []struct {
		depth, n int
		bytes    int64
	}{{1, 200, 4096}, {8, 1000, 4096}, {32, 2000, 4096}, {8, 200, 65536}} {
		t.Run(fmt.Sprintf("%d of %d", c.depth, c.bytes), func(t *testing.T) {
			g := newRig(t, Config{RAM: true, Model: m, Serial: "PLAYED"})
			q := g.pair(1, 64)
			want := loopModel(m, "PLAYED", c.bytes, c.depth, c.n)
			// Other load on the machine makes it late at times: the best of some runs counts.
			best := loopResult{}
			for range 10 {
				got := loopBus(t, g, q, c.bytes, c.depth, c.n)
				require.GreaterOrEqual(t, got.at(0), time.Duration(0.8*float64(want.at(0))))
				require.Less(t, got.iops, 1.1*want.iops)
				if got.iops > best.iops {
					best = got
				}
				if best.iops > 0.9*want.iops {
					break
				}
			}
			t.Logf("%.0f IOPS of %.0f, p50 %v of %v, %.2f cores", best.iops, want.iops,
				best.at(0.5), want.at(0.5), best.cpu)
			require.Greater(t, best.iops, 0.3*want.iops)
			require.Less(t, best.at(0.5), 3*want.at(0.5))
		})
	}
}

// TestPlayedTogether: queues with a party each share one SSD, and its IOPS.
func TestPlayedTogether(t *testing.T) {
	m := builtin(t, "slow")
	g := newRig(t, Config{RAM: true, Model: m})
	const queues, depth, n = 4, 16, 1000
	var rings []*ring
	for i := range queues {
		rings = append(rings, g.pair(uint16(i+1), 64))
	}
	var all sync.WaitGroup
	start := time.Now()
	for _, q := range rings {
		all.Go(func() { loopBus(t, g, q, 4096, depth, n) })
	}
	all.Wait()
	// All that was sent was admitted: no more than the cap and the first of each queue.
	require.GreaterOrEqual(t, time.Since(start).Seconds(), queues*n/m.Peak(ssdmodel.Read, 4096))
}

// BenchmarkPlayed compares a played model with the model alone: the ratios are 1 when they agree.
// At depth 1, where both draw the same latencies in the same order, late-p50-us and late-p99-us are
// how late completions were seen, submission included; cores is what playing it costs.
func BenchmarkPlayed(b *testing.B) {
	for _, name := range []string{"slow", "p5510", "optane"} {
		m := builtin(b, name)
		for _, depth := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("%s/depth=%d", name, depth), func(b *testing.B) {
				g := newRig(b, Config{RAM: true, Model: m, Serial: "PLAYED"})
				q := g.pair(1, 256)
				n := max(b.N, 4*depth)
				want := loopModel(m, "PLAYED", 4096, depth, n)
				b.ResetTimer()
				got := loopBus(b, g, q, 4096, depth, n)
				b.ReportMetric(got.iops, "IOPS")
				b.ReportMetric(got.iops/want.iops, "iops/model")
				b.ReportMetric(float64(got.at(0.5))/float64(want.at(0.5)), "p50/model")
				b.ReportMetric(float64(got.at(0.99))/float64(want.at(0.99)), "p99/model")
				if depth == 1 {
					var late loopResult
					for i, took := range got.took {
						late.took = append(late.took, took-want.took[i])
					}
					b.ReportMetric(late.at(0.5).Seconds()*1e6, "late-p50-us")
					b.ReportMetric(late.at(0.99).Seconds()*1e6, "late-p99-us")
				}
				b.ReportMetric(got.cpu, "cores")
			})
		}
	}
}
