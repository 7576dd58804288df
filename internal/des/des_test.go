package des

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEventsByTimeThenByInsertion(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	s := New()
	type stamp struct {
		t   int64
		seq int
	}
	var want, got []stamp
	for i := range 5000 {
		at := int64(rng.IntN(300))
		want = append(want, stamp{at, i})
		s.At(at, func() {
			require.Equal(t, at, s.Now())
			got = append(got, stamp{at, i})
		})
	}
	slices.SortStableFunc(want, func(a, b stamp) int { return int(a.t - b.t) })
	s.Run()
	require.Equal(t, want, got)
	require.EqualValues(t, 5000, s.Events())
}

func TestEventsThatScheduleEvents(t *testing.T) {
	s := New()
	var order []int
	s.At(10, func() {
		order = append(order, 1)
		s.At(3, func() { order = append(order, 3) }) // past: now, after what was there
		s.After(5, func() { order = append(order, 4) })
	})
	s.At(10, func() { order = append(order, 2) })
	s.RunUntil(10)
	require.Equal(t, []int{1, 2, 3}, order)
	next, ok := s.Next()
	require.True(t, ok)
	require.EqualValues(t, 15, next)
	s.RunUntil(100)
	require.Equal(t, []int{1, 2, 3, 4}, order)
	require.EqualValues(t, 100, s.Now())
	require.False(t, s.Step())
}

func TestLink(t *testing.T) {
	s := New()
	l := NewLink(s, 1e9, 50)
	require.EqualValues(t, 1050, l.Send(1000))
	require.EqualValues(t, 2050, l.Send(1000), "behind the first")
	require.EqualValues(t, 2000, l.Backlog())
	s.RunUntil(5000)
	require.EqualValues(t, 5150, l.Send(100), "an idle link has no memory")
	require.EqualValues(t, 2100, l.Bytes())
	require.EqualValues(t, 2100, l.BusyNS())
	require.EqualValues(t, 150, l.Time(100))

	// Parts of a nanosecond are not lost.
	f := NewLink(s, 25e9, 0)
	for range 100_000 {
		f.Send(512)
	}
	require.InEpsilon(t, 100_000*512/25.0, float64(f.BusyNS()), 1e-3)
	require.EqualValues(t, s.Now(), NewLink(s, 0, 0).Send(1<<40), "no bandwidth given: at once")
}

func TestPoolIsFirstComeFirstServed(t *testing.T) {
	s := New()
	p := NewPool(s, 4)
	var order []int
	run := func(id, n int, d int64) { p.Do(n, d, func(int64) { order = append(order, id) }) }
	run(1, 3, 100)
	run(2, 4, 10) // needs all; nobody passes it
	run(3, 1, 1)
	require.Equal(t, 2, p.Waiting())
	s.Run()
	require.Equal(t, []int{1, 2, 3}, order)
	require.EqualValues(t, 111, s.Now())
	require.EqualValues(t, 3*100+4*10+1, p.BusyNS())
	require.Equal(t, 4, p.Free())
	require.Panics(t, func() { p.Release(1) })
}

func TestPoolWithLongLine(t *testing.T) {
	s := New()
	p := NewPool(s, 2)
	var last int64
	for i := range 1000 {
		p.Do(1, 10, func(start int64) {
			require.Equal(t, int64(i/2*10), start)
			last = s.Now()
		})
	}
	s.Run()
	require.EqualValues(t, 5000, last)
	require.Equal(t, 8, p.Acquire(8, func() {})+6, "more than there are means all")
}

type ticker struct {
	s *Sim
	n int
}

func (k *ticker) Event(arg uint64) {
	if k.n--; k.n > 0 {
		k.s.Call(k.s.Now()+int64(arg), k, arg*6364136223846793005>>52|1)
	}
}

// Events per second with the few thousand events pending that a dozen SSDs have.
func BenchmarkEvents(b *testing.B) {
	s := New()
	k := &ticker{s, b.N + 4096}
	for i := range 4096 {
		s.Call(int64(i), k, uint64(i*7919)|1)
	}
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		s.Step()
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds()/1e6, "Mevents/s")
}
