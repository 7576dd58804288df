package serve

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// claimed are the batches that are being made in slots.
func (r *rig) claimed() (n int) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	for _, j := range r.s.jobs {
		j.mu.Lock()
		n += len(j.claims)
		j.mu.Unlock()
	}
	return n
}

// Batches that are made in their slots come whole, also those that are larger than these, and a
// client has no more of them than its credits.
func TestInPlace(t *testing.T) {
	r := start(t, nil)
	r.b.ahead, r.b.batches = 3, 30
	r.b.rows = func(i int) int { return 100 << (i / 3) } // up to 400 KiB
	c := r.client(t)
	l := c.loader("a", map[string]any{"slots": 2})
	require.Equal(t, []int{5, 2}, []int{l.Slots, l.Credits})
	for epoch := range 3 { // from the second one on no ring is replaced
		c.send(map[string]any{"type": "epoch", "id": l.ID, "epoch": epoch})
		var held *answer
		for i := range 30 {
			a := c.next()
			grown := a.Type == "ring"
			if grown {
				require.Zero(t, epoch)
				require.Equal(t, 5, a.Slots)
				a = c.next()
			}
			require.Equal(t, i, a.Index)
			c.check(a, "a", r.b.rows(i))
			if held != nil {
				if !grown { // else the client of this test has lost it from sight
					c.check(*held, "a", r.b.rows(i-1)) // nobody writes to what the client has
				}
				c.release(*held)
			}
			held = &a
		}
		c.release(*held)
		c.want("epoch_end")
	}
}

// Slots whose batches are being made stay as they are when their client dies, and come back with
// the end of the pass: of a rank that another one outlives, and of a client alone.
func TestDiesBetweenClaimAndPut(t *testing.T) {
	for _, world := range []int{1, 2} {
		r := start(t, func(c *Config) { c.patience = 20 * time.Millisecond })
		r.b.ahead, r.b.batches = 4, 40
		r.b.rows = func(int) int { return 20_000 }
		var other *client
		var lo answer
		a, la := r.rank(t, 0, world, map[string]any{"slots": 1})
		if world == 2 {
			other, lo = r.rank(t, 1, 2, nil)
			other.epoch(lo, 0, 0)
		}
		a.epoch(la, 0, 0)
		a.want("batch") // its only credit: what is made next has to wait
		settles(t, func() bool { return r.claimed() > 0 }, "no slot is claimed")
		a.close()
		if world == 2 {
			other.rest(0, 0, 1, 2, 40, 20_000)
			other.epoch(lo, 1, 0)
			other.rest(1, 0, 1, 2, 40, 20_000)
		}
		settles(t, func() bool {
			left := int64(0)
			if world == 2 {
				left = int64(lo.Slots) * lo.SlotBytes
			}
			return r.claimed() == 0 && r.s.memory.used.Load() == left
		}, "the dead client's slots stay")
	}
}

// A client that stops gets the slots of batches that were being made for the next epoch.
func TestStopGivesClaimsBack(t *testing.T) {
	r := start(t, nil)
	r.b.ahead = 3
	c := r.client(t)
	l := c.loader("a", map[string]any{"slots": 1})
	for epoch := range 20 {
		c.send(map[string]any{"type": "epoch", "id": l.ID, "epoch": epoch})
		a := c.want("batch")
		c.send(map[string]any{"type": "stop", "id": l.ID})
		c.want("stopped")
		c.check(a, "a", 100)
		c.release(a)
	}
	settles(t, func() bool { return r.claimed() == 0 }, "claims stay")
}
