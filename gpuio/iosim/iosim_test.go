package iosim

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/des"
	"helios/internal/hardware"
)

// bench keeps sets in flight for a while and reports reads a second after a warm-up.
type bench struct {
	profile  string
	ssds     int
	c        Config
	set      int64 // commands of a set, over all SSDs
	sets     int   // in flight
	warm, ns int64
}

func (b bench) run(t testing.TB) (iops float64, st Stats, s *Stack) {
	t.Helper()
	p, err := hardware.Load(b.profile)
	require.NoError(t, err)
	m, err := NewMachine(des.New(), p, b.ssds)
	require.NoError(t, err)
	s, err = New(m, b.c)
	require.NoError(t, err)
	stop := false
	per := make([]int64, b.ssds)
	for i := range per {
		per[i] = b.set / int64(b.ssds)
	}
	var next func(Times)
	next = func(x Times) {
		require.LessOrEqual(t, x.SubmitNS, x.SubmitEndNS)
		require.LessOrEqual(t, x.SubmitEndNS, x.DoneNS)
		if !stop {
			s.Submit(per, next)
		}
	}
	for range b.sets {
		s.Submit(per, next)
	}
	m.Sim.RunUntil(b.warm)
	before := s.Stats().Commands
	m.Sim.RunUntil(b.warm + b.ns)
	iops = float64(s.Stats().Commands-before) / float64(b.ns) * 1e9
	stop = true
	m.Sim.Run()
	st = s.Stats()
	require.Zero(t, s.InFlight())
	require.Zero(t, s.Outstanding())
	require.Equal(t, st.Commands, st.Sets*per[0]*int64(b.ssds))
	require.Equal(t, st.Commands, st.Latency.Count())
	return iops, st, s
}

func TestSmoke(t *testing.T) {
	for _, stack := range []string{Async, Sync, CPU, Mmap} {
		iops, st, s := bench{profile: "a100-p5510x12", ssds: 2, c: Config{Stack: stack}, set: 8192, sets: 4, warm: 2e6, ns: 20e6}.run(t)
		t.Logf("%-5s %.0f k IOPS of %.0f, latency p50 %v p99 %v, %d+%d doorbells, %d launches, %d commands, %d events, %+v", stack, iops/1e3, s.m.Bound(4096)/1e3,
			st.Latency.Quantile(0.5), st.Latency.Quantile(0.99), st.SQDoorbells, st.CQDoorbells, st.Launches, st.Commands, s.m.Sim.Events(), s.Config())
	}
}
