package gpuio

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The planner's commands are those of the stacks.
func TestPlannerAgreesWithTheStacks(t *testing.T) {
	for i, c := range []struct {
		rowBytes, ssds, lba int
		stack               string
		coalesce            int
	}{
		{64, 2, 512, "async", 0}, {64, 3, 512, "async", -1}, {100, 2, 4096, "async", 8 << 10},
		{512, 1, 512, "async", 0}, {512, 2, 512, "async", 64 << 10},
		{2408, 3, 512, "async", 1 << 20}, {4096, 2, 512, "async", 0},
		{300 << 10, 2, 512, "async", 0}, {300 << 10, 1, 512, "sync", 0}, {64, 2, 512, "sync", 0},
		{128, 2, 512, "cpu", 0}, {128, 2, 512, "mmap", 0},
	} {
		t.Run(fmt.Sprintf("%s %d", c.stack, c.rowBytes), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(i), 3))
			r := newRig(t, rigOptions{rows: int64(1200 / max(c.rowBytes/4096, 1)),
				rowBytes: c.rowBytes, ssds: c.ssds, lba: c.lba, ram: true, sms: 2})
			speed := Speed{1, 1e5, true}
			p, err := NewPlanner(r.layout, PlanOptions{Stack: c.stack, CoalesceBytes: c.coalesce,
				MaxTransferBytes: r.ssds[0].Ctrl.MaxTransferBytes(), Speed: speed})
			require.NoError(t, err)
			var rd Reader
			switch c.stack {
			case "sync":
				rd = r.reader(NewSync(r.dev, r.ssds, r.layout, AsyncOptions{}))
			case "cpu":
				rd = r.reader(NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Speed: speed}))
			case "mmap":
				rd = r.reader(NewMmap(r.dev, r.ssds, r.layout))
			default:
				rd = r.reader(NewAsync(r.dev, r.ssds, r.layout,
					AsyncOptions{CoalesceBytes: c.coalesce, Speed: speed}))
			}
			for _, n := range []int{1, 40, 900} {
				s := r.newSet(rng, min(n, 1+int(64<<20)/c.rowBytes/4), int64(c.rowBytes), 0)
				want := make([]Planned, c.ssds)
				p.Set(s.ids, s.rs.SSDOffset, want)
				var sum Planned
				for _, w := range want {
					sum.Commands += w.Commands
					sum.Bytes += w.Bytes
					sum.Shared += w.Shared
				}
				before := rd.Stats().Coalesced
				st := s.read(rd)
				shared := rd.Stats().Coalesced - before
				require.Equal(t, sum, Planned{st.Commands, st.Bytes, shared}, "%d rows", n)
				s.free(rd)
			}
		})
	}
}

// Two sets are better one where their rows lie so close that it saves a tenth of the commands.
func TestPlannerMerges(t *testing.T) {
	l, err := NewLayout(100_000, 1024, 2, 512)
	require.NoError(t, err)
	p, err := NewPlanner(l, PlanOptions{Stack: StackAsync,
		Speed: Speed{Commands: 1e5, Bytes: 2e9, OfFiles: true}})
	require.NoError(t, err)
	require.Equal(t, 2, p.Joined(2000, 2))
	require.Equal(t, 1, p.Joined(2000, 1), "it is one")
	require.Zero(t, p.Joined(50, 2), "too far apart")
	require.Zero(t, p.Joined(0, 2))
	p, err = NewPlanner(l, PlanOptions{Stack: StackAsync, Speed: Speed{Commands: 1e5, Bytes: 2e9}})
	require.NoError(t, err)
	require.Equal(t, 1, p.Joined(2000, 2), "a command of no file is cheap")
	p, err = NewPlanner(l, PlanOptions{Stack: StackAsync, CoalesceBytes: -1})
	require.NoError(t, err)
	require.Zero(t, p.Joined(2000, 2), "each row has a command")
}
