package engine

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gpuio"
	"helios/sched/prepare"
)

// Reads that overlap count their time once; gaps count nothing.
func TestCompleteTimeIsAUnion(t *testing.T) {
	c := &clock{}
	t0 := time.Now()
	after := func(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }
	rs := func(submit, complete int) gpuio.ReadStats {
		return gpuio.ReadStats{Submit: time.Duration(submit) * time.Millisecond,
			Complete: time.Duration(complete) * time.Millisecond}
	}
	c.Read(after(0), rs(1, 10))  // 1 to 11
	c.Read(after(2), rs(1, 5))   // 3 to 8: inside
	c.Read(after(9), rs(1, 5))   // 10 to 15: 4 more
	c.Read(after(20), rs(0, 10)) // after a gap
	require.Equal(t, 24*time.Millisecond, c.complete)
	require.Equal(t, 3*time.Millisecond, c.submit)
}

type sleepParams struct{ NS int64 }

func init() {
	cuda.RegisterHost("engine_test_sleep", func(_ *cuda.Block, p *sleepParams) error {
		time.Sleep(time.Duration(p.NS))
		return nil
	})
}

// Training waits for as long as others hold the worker that the kernels of T want, and no longer,
// also where it does other work: in a bubble, where time passes only in kernels and there.
func TestWaitsOfT(t *testing.T) {
	const elsewhere = 11 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
		require.NoError(t, err)
		sleep, err := dev.Kernel("engine_test_sleep")
		require.NoError(t, err)
		stream := func(priority int) cuda.Stream {
			s, err := dev.NewStream(cuda.StreamOptions{Name: "s", Priority: priority})
			require.NoError(t, err)
			return s
		}
		run := func(s cuda.Stream, d time.Duration) {
			require.NoError(t, cuda.Launch(s, sleep, cuda.LaunchConfig{Blocks: 1, Threads: 1},
				sleepParams{int64(d)}))
		}
		other := stream(1)
		e := &Engine{Sampling: &prepare.Sampling{Device: dev}, TrainStream: stream(0)}
		p := &Pass{Clock: &clock{}, Step: func(ctx context.Context, s *Slot) (Outcome, error) {
			run(e.TrainStream, 2*time.Millisecond)
			run(e.TrainStream, 5*time.Millisecond)
			err := e.TrainStream.Synchronize(ctx)
			time.Sleep(elsewhere)
			return Outcome{Loss: 1, Elsewhere: elsewhere}, err
		}}
		w := operators{&Walk{Engine: e, Pass: p}}
		for _, held := range []time.Duration{0, 3 * time.Millisecond} {
			p.Clock.Waited = 0
			begin, busy := time.Now(), e.TrainStream.Busy()
			if held > 0 {
				run(other, held)
				synctest.Wait() // it has the worker
			}
			out, err := w.step(t.Context(), &Slot{})
			require.NoError(t, err)
			require.Equal(t, Outcome{Loss: 1, Elsewhere: elsewhere}, out)
			require.Equal(t, held, p.Clock.Waited)
			require.Equal(t, 7*time.Millisecond, e.TrainStream.Busy()-busy)
			require.Equal(t, time.Since(begin), p.Clock.Waited+e.TrainStream.Busy()-busy+elsewhere)
		}
		require.NoError(t, errors.Join(other.Close(), e.TrainStream.Close(), dev.Close()))
	})
}
