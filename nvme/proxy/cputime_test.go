package proxy

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/hostcpu"
	"helios/nvme"
)

// The controllers' CPU time is there while it is asked for, is part of the process's, and waiting
// does not count.
func TestCPUTime(t *testing.T) {
	g := newRig(t, Config{Path: newFile(t, 1<<20, false)})
	q := g.pair(1, 64)
	read := func(n int) {
		for range n {
			q.must(nvme.ReadCommand(g.nextCID(), 1, 0, 8, uint64(g.iova), 0))
		}
	}
	spent := func() (all time.Duration) {
		for by, d := range hostcpu.Spent() {
			if by.Stage == Stage {
				all += d
			}
		}
		return all
	}
	read(10)
	before := spent()
	read(10)
	require.Equal(t, before, spent(), "not asked for")

	stop := hostcpu.Meter()
	defer stop()
	process := cpuTime()
	read(300)
	during := spent() - before
	process = cpuTime() - process
	require.Positive(t, during)
	require.LessOrEqual(t, during, process+20*time.Millisecond, "the two clocks tick apart")
	stop()
	before = spent()
	read(10)
	require.Equal(t, before, spent())
}
