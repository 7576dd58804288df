package proxy

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
	read(10)
	before := CPUTime()
	read(10)
	require.Equal(t, before, CPUTime(), "not asked for")

	stop := MeterCPU()
	defer stop()
	process := cpuTime()
	read(300)
	spent := CPUTime() - before
	process = cpuTime() - process
	require.Positive(t, spent)
	require.LessOrEqual(t, spent, process+20*time.Millisecond, "the two clocks tick apart")
	stop()
	stop()
	before = CPUTime()
	read(10)
	require.Equal(t, before, CPUTime())
}
