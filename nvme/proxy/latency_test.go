package proxy

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/nvme"
)

// TestLatency: no completion comes before its time, reads that are out together wait together, and
// the time is the modelled one and not a timer's resolution.
func TestLatency(t *testing.T) {
	const latency = 80 * time.Microsecond
	for name, cfg := range map[string]Config{"waited": {}, "polled": {PollDoorbells: true}, "out of order": {OutOfOrder: true}} {
		t.Run(name, func(t *testing.T) {
			cfg.RAM, cfg.Latency = true, latency
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
			assert.Less(t, best, time.Millisecond)
			best = time.Hour
			for range 20 {
				var cmds []nvme.Command
				for i := range 100 {
					cmds = append(cmds, nvme.ReadCommand(uint16(i), 1, 0, 1, uint64(g.iova)+uint64(i)*4096, 0))
				}
				start := time.Now()
				q.put(cmds...)
				for range 100 {
					e, ok := q.get(5 * time.Second)
					require.True(t, ok)
					require.True(t, e.Status().OK())
				}
				best = min(best, time.Since(start))
			}
			assert.Less(t, best, 50*latency, "100 reads at once")
		})
	}
}

// TestLatencyDeletedQueue: completions that were not due are gone with their queue, and their
// entries are free again.
func TestLatencyDeletedQueue(t *testing.T) {
	g := newRig(t, Config{RAM: true, Latency: 50 * time.Millisecond})
	q := g.pair(1, 8)
	for range 3 { // more reads than the completion queue has entries
		var cmds []nvme.Command
		for i := range 7 {
			cmds = append(cmds, nvme.ReadCommand(uint16(i), 1, 0, 1, uint64(g.iova), 0))
		}
		q.put(cmds...)
		_, ok := q.get(time.Millisecond)
		require.False(t, ok)
		g.adm.must(nvme.DeleteSQCommand(g.nextCID(), 1))
		q.tail = 0
		g.adm.must(nvme.CreateSQCommand(g.nextCID(), 1, 8, q.sq, 1))
	}
	q.must(nvme.ReadCommand(1, 1, 0, 1, uint64(g.iova), 0))
	_, ok := q.get(60 * time.Millisecond)
	require.False(t, ok, "a completion of a deleted queue")
}

func TestLatencyOptions(t *testing.T) {
	for _, cfg := range []Config{{Latency: time.Millisecond}, {RAM: true, Latency: -1}, {RAM: true, Latency: time.Second}} {
		cfg.Path = newFile(t, 1<<20, cfg.RAM)
		_, err := Open(cfg)
		require.ErrorContains(t, err, "a latency of")
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
}
