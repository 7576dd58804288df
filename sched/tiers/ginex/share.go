package ginex

import (
	"context"
	"time"

	"helios/cache"
	"helios/cache/superbatch"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
)

// Under plan.Config.NeighborShared one budget serves sampling and training in turn. While a
// superbatch is sampled, neighbour lists lie in the CPU tier's last slots, as many as they need.
// These lose their rows; the others keep what the superbatch before left.

// Share divides the budget CPUCache between the neighbour cache and the CPU tier. The neighbour
// cache takes at most limit, the bytes of all lists, and nothing below least. Where one memory
// serves both in turn, each has the whole.
func Share(c plan.Config, features, least, limit int64) (neighbor, cpu int64) {
	cpu = min(c.CPUCache.Of(features), features)
	neighbor = cpu
	if c.SuperbatchOverlap {
		neighbor /= 2
	}
	if neighbor = min(neighbor, limit); neighbor < least {
		neighbor = 0
	}
	if c.SuperbatchOverlap {
		cpu -= neighbor
	}
	return neighbor, cpu
}

// divide turns a budget that serves both into the two.
func divide(c *plan.Config, features, least, limit int64) {
	neighbor, cpu := Share(*c, features, least, limit)
	c.NeighborCache = units.Budget{Bytes: neighbor}
	if c.SuperbatchOverlap {
		c.CPUCache = units.Budget{Bytes: cpu}
	}
}

// lends reports whether the CPU tier has the neighbour lists while superbatches are sampled.
func lends(c *plan.Config) bool {
	return c.NeighborShared && !c.SuperbatchOverlap && c.NeighborCache.Bytes > 0
}

// lend has the neighbour lists read into the CPU tier's last slots, before a superbatch is sampled
// over tiers that hold before. It returns what they hold then.
func (t *Tiers) lend(ctx context.Context, before *superbatch.State) (*superbatch.State, error) {
	e, c, mem := t.Engine, t.tier.Config(), t.tier.Buffer(cache.CPU).Bytes()
	from := (int64(len(mem)) - e.ListBytes()) &^ 7
	t.after = nil
	begin := time.Now()
	bytes, err := e.LendToSampling(ctx, mem[from:])
	t.mu.Lock()
	t.info.SharedBytes = int64(len(mem)) - from
	t.info.ListSeconds += time.Since(begin).Seconds()
	t.info.ListBytes += bytes
	t.mu.Unlock()
	e.Trace.Run("read neighbour lists", begin)
	if stopped := prepare.Interrupted(ctx); err != nil && stopped != nil {
		return nil, stopped
	}
	if before != nil {
		before = before.Without(c.GPUSlots + min(from/c.RowBytes, c.CPUSlots))
	}
	return before, err
}

// takeBack ends lend once a superbatch is sampled.
func (t *Tiers) takeBack() error {
	if !lends(&t.Engine.Config) {
		return nil
	}
	return t.Engine.TakeBack()
}
