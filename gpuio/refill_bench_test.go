package gpuio

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkGPURefill measures how long a warp of the GPU takes to hand 32 commands to an idle
// queue: to take its submission side, fill it, ring and let go. It is the device's own clock over a
// submit kernel of one warp: what 16 queues take more than one, for each of the 15. The fake
// library's times say nothing.
func BenchmarkGPURefill(b *testing.B) {
	rigDevice = openGPU
	defer func() { rigDevice = nil }()
	const few, many = 1, 16
	submit := func(queues int) time.Duration {
		r := newRig(b, rigOptions{ssds: 1, lba: 512, rowBytes: 512, rows: 2000, ram: true})
		rd := r.async(AsyncOptions{Blocks: 1, QueuePairs: queues, Depth: 64})
		s := r.newSet(rand.New(rand.NewPCG(1, 2)), 32*queues, 512, 0)
		var took []time.Duration
		for range b.N {
			took = append(took, s.read(rd).Submit)
		}
		require.EqualValues(b, 32*queues*b.N, rd.Stats().Commands)
		s.free(rd)
		return slices.Sorted(slices.Values(took))[len(took)/2]
	}
	alone := submit(few)
	b.ReportMetric(float64(submit(many)-alone)/float64(many-few), "ns/refill")
	b.ReportMetric(float64(alone), "ns/submit")
}
