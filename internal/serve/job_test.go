package serve

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/wide"
)

// rank makes a client a rank of a job over dataset "a".
func (r *rig) rank(t testing.TB, rank, world int, more map[string]any) (*client, answer) {
	t.Helper()
	c := r.client(t)
	m := map[string]any{"rank": rank, "world": world, "slots": 2}
	for k, v := range more {
		m[k] = v
	}
	return c, c.loader("a", m)
}

func (c *client) epoch(l answer, epoch, first int) {
	c.send(map[string]any{"type": "epoch", "id": l.ID, "epoch": epoch, "first": first})
}

// rest takes the batches of an epoch, from the first-th of a rank on, to its end.
func (c *client) rest(epoch, first, rank, world, batches, rows int) {
	c.t.Helper()
	for i := first*world + rank; i < batches; i += world {
		a := c.want("batch")
		require.Equal(c.t, []int{epoch, i}, []int{a.Epoch, a.Index})
		c.check(a, "a", rows)
		c.release(a)
	}
	require.Equal(c.t, epoch, c.want("epoch_end").Epoch)
}

// Ranks of the same settings share one loader; of others, or as a rank that is there, they don't.
func TestRanksShareAJob(t *testing.T) {
	r := start(t, nil)
	r.b.batches = 20
	var clients []*client
	var loaders []answer
	for rank := range 3 {
		c, l := r.rank(t, rank, 3, map[string]any{"visible": fmt.Sprint(rank)}) // of a GPU each
		require.Equal(t, []int{7, 7, 6}[rank], l.Batches)
		clients, loaders = append(clients, c), append(loaders, l)
	}
	require.EqualValues(t, 3+1, r.b.open.Load(), "three clients' datasets, and one loader")
	for epoch := range 3 {
		for rank, c := range clients {
			c.epoch(loaders[rank], epoch, 0)
		}
		var wg sync.WaitGroup
		for rank, c := range clients {
			wg.Go(func() { c.rest(epoch, 0, rank, 3, 20, 100) })
		}
		wg.Wait()
	}
	for i, more := range []map[string]any{{"job": "another"}, {"rank": 1}, {"shuffle": true},
		{"split": "val"}, {"world": 4}, {"options": map[string]any{"seed": 2}}} {
		r.rank(t, 0, 3, more)
		require.EqualValues(t, 4+2*(i+1), r.b.open.Load(), "%v", more)
	}
	require.Equal(t, Stats{Clients: 9, Jobs: 7, Ranks: 9, RingBytes: 9 * 2 * firstSlot,
		Batches: 60}, r.s.Stats())
	clients[0].send(map[string]any{"type": "close", "id": loaders[0].ID})
	clients[0].want("closed")
	clients[1].epoch(loaders[1], 9, 5)
	clients[1].rest(9, 5, 1, 3, 20, 100)
	c, l := r.rank(t, 0, 3, nil) // the rank comes back, and takes its place in the job
	require.EqualValues(t, 4+2*6+1, r.b.open.Load())
	c.epoch(l, 9, 4)
	c.rest(9, 4, 0, 3, 20, 100)
}

// A rank that dies in the middle of an epoch is left out of it, and goes on where it says when it
// is back; the dataset that the first one opened stays until the job ends.
func TestDeadRank(t *testing.T) {
	r := start(t, nil)
	r.b.batches = 30
	a, la := r.rank(t, 0, 2, nil)
	b, lb := r.rank(t, 1, 2, nil)
	a.epoch(la, 0, 0)
	b.epoch(lb, 0, 0)
	a.want("batch")
	b.release(b.want("batch"))
	a.close()
	b.rest(0, 1, 1, 2, 30, 100)
	settles(t, func() bool {
		r.s.mu.Lock()
		defer r.s.mu.Unlock()
		j := r.s.jobs[0]
		j.mu.Lock()
		defer j.mu.Unlock()
		return len(j.ranks) == 1
	}, "the dead rank stays")
	again, l := r.rank(t, 0, 2, nil)
	require.EqualValues(t, 3+1, r.b.open.Load(), "the job is the one that was there")
	again.epoch(l, 0, 1)
	again.rest(0, 1, 0, 2, 30, 100)
}

// A rank that keeps its slots holds the others up for a moment, once an epoch, and gets all of its
// batches in the end.
func TestSlowRank(t *testing.T) {
	r := start(t, func(c *Config) { c.patience = 20 * time.Millisecond })
	r.b.batches = 40
	slow, ls := r.rank(t, 0, 3, nil)
	b, lb := r.rank(t, 1, 3, nil)
	c, lc := r.rank(t, 2, 3, nil)
	slow.epoch(ls, 0, 0)
	b.epoch(lb, 0, 0)
	c.epoch(lc, 0, 0)
	held := []answer{slow.want("batch"), slow.want("batch")}
	var wg sync.WaitGroup
	wg.Go(func() {
		b.rest(0, 0, 1, 3, 40, 100)
		b.epoch(lb, 1, 0)
		b.rest(1, 0, 1, 3, 40, 100)
	})
	wg.Go(func() { c.rest(0, 0, 2, 3, 40, 100) })
	wg.Wait()
	for _, a := range held {
		slow.check(a, "a", 100)
		slow.release(a)
	}
	slow.rest(0, 2, 0, 3, 40, 100)
}

// A rank without memory for its slots fails alone.
func TestRankFailsAlone(t *testing.T) {
	r := start(t, func(c *Config) { c.Memory, c.patience = 6<<20, 20*time.Millisecond })
	r.b.batches = 10
	r.b.rows = func(i int) int { return 100 + i/6*200_000 } // from the seventh on: 1.5 MiB
	a, la := r.rank(t, 0, 2, map[string]any{"slots": 1})
	b, lb := r.rank(t, 1, 2, map[string]any{"slots": 4})
	a.epoch(la, 0, 0)
	b.epoch(lb, 0, 0)
	for range 3 {
		b.release(b.want("batch"))
	}
	require.Contains(t, b.want("error").Message, "rings of this daemon's clients")
	for i := 0; i < 10; i += 2 {
		m := a.next()
		if m.Type == "ring" {
			m = a.want("batch")
		}
		require.Equal(t, i, m.Index)
		a.release(m)
	}
	a.want("epoch_end")
}

// Whatever ranks do, each gets its batches, in their order and none twice: they hold slots, stop
// and go on, die and come back, and ask for other epochs.
func TestRanksAtRandom(t *testing.T) {
	seeds := 3
	if !wide.Lean() {
		seeds = 40
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := start(t, func(c *Config) { c.patience = 5 * time.Millisecond })
			r.b.batches = 23
			r.b.rows = func(i int) int { return 50 << (i / 2) }
			r.b.ahead = seed % 3
			world := 1 + seed%4
			var wg sync.WaitGroup
			for rank := range world {
				rng := rand.New(rand.NewPCG(uint64(seed), uint64(rank)))
				wg.Go(func() { r.stray(t, rng, rank, world) })
			}
			wg.Wait()
		})
	}
}

// stray plays a rank of three epochs that does not go straight.
func (r *rig) stray(t *testing.T, rng *rand.Rand, rank, world int) {
	var c *client
	var l answer
	join := func() { c, l = r.rank(t, rank, world, map[string]any{"slots": 1 + rng.IntN(3)}) }
	join()
	count := (r.b.batches + world - 1 - rank) / world
	for epoch := range 3 {
		next := 0
		c.epoch(l, epoch, 0)
		var held []answer
		for next < count {
			a := c.next()
			if a.Type == "ring" {
				continue
			}
			require.Equal(t, "batch", a.Type, "%+v", a)
			require.Equal(t, []int{epoch, next*world + rank}, []int{a.Epoch, a.Index})
			next++
			c.check(a, "a", r.b.rows(a.Index))
			held = append(held, a)
			switch n := rng.IntN(20); {
			case n == 0: // dies
				c.close()
				held = nil
				join()
				c.epoch(l, epoch, next)
			case n == 1: // stops, and goes on
				c.send(map[string]any{"type": "stop", "id": l.ID})
				for a = c.next(); a.Type != "stopped"; a = c.next() {
					if a.Type == "batch" {
						c.release(a)
					}
				}
				c.epoch(l, epoch, next)
			case n < 4:
				time.Sleep(time.Duration(rng.IntN(10)) * time.Millisecond)
			}
			if len(held) == l.Credits || rng.IntN(2) == 0 {
				for _, a := range held {
					c.release(a)
				}
				held = nil
			}
		}
		for _, a := range held {
			c.release(a)
		}
		for a := c.next(); a.Type != "epoch_end"; a = c.next() {
			require.Equal(t, "ring", a.Type)
		}
	}
}

func TestOrderOf(t *testing.T) {
	rank := func(rank, next, count, slots int) *loader {
		return &loader{rank: rank, next: next, count: count, free: make(chan struct{}, slots)}
	}
	for _, q := range []struct {
		of   []*loader
		want []int
	}{
		{[]*loader{rank(0, 0, 3, 2), rank(1, 0, 2, 2)}, []int{0, 1, 2, 3, 4}},
		{[]*loader{rank(1, 1, 3, 2)}, []int{3, 5}},
		{[]*loader{rank(0, 0, 4, 2), rank(1, 2, 4, 2)}, []int{0, 2, 4, 5, 6, 7}},
		// far ahead: it goes on beside the other, not behind it
		{[]*loader{rank(0, 0, 6, 1), rank(1, 4, 6, 1)}, []int{0, 2, 9, 4, 11, 6, 8, 10}},
	} {
		got := orderOf(q.of, 2)
		require.Equal(t, q.want, got)
		slices.Sort(got)
		require.Len(t, slices.Compact(got), len(q.want))
	}
}
