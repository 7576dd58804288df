package ginex

import (
	"context"
	"runtime/debug"
	"time"

	"helios/cache/superbatch"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
)

// Under plan.Config.NeighborShared one budget serves sampling and training in turn: the neighbour
// cache has it while a superbatch is sampled, the CPU tier while one trains. The two never exist at
// once:
//
//	tier freed → lists read → sample → lists freed → inspect → tier allocated → first rows read → train
//
// What the CPU tier held is lost, so each superbatch reads its first rows.

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

// lends reports whether the CPU tier's memory is the neighbour cache's while superbatches are
// sampled.
func lends(c *plan.Config) bool {
	return c.NeighborShared && !c.SuperbatchOverlap && c.NeighborCache.Bytes > 0
}

// lend frees the CPU tier and has the neighbour lists read, before a superbatch is sampled over
// tiers that hold before. It returns what they hold then.
func (t *Tiers) lend(ctx context.Context, before *superbatch.State) (*superbatch.State,
	error) {
	e := t.Engine
	if !lends(&e.Config) {
		return before, nil
	}
	if err := t.tier.Lend(); err != nil {
		return nil, err
	}
	debug.FreeOSMemory() // of the superbatch before: free memory bounds the length of the next
	begin := time.Now()
	bytes, err := e.LendToSampling(ctx)
	t.mu.Lock()
	t.info.SharedBytes = t.CPUBytes()
	if bytes > 0 {
		t.info.ListSeconds += time.Since(begin).Seconds()
		t.info.ListBytes += bytes
		e.Trace.Run("read neighbour lists", begin)
	}
	t.mu.Unlock()
	if stopped := prepare.Interrupted(ctx); err != nil && stopped != nil {
		return nil, stopped
	}
	if before != nil {
		before = before.Without(t.tier.Config().GPUSlots)
	}
	return before, err
}

// takeBack frees the neighbour lists once a superbatch is sampled. The tier gets its memory when
// the superbatch's changes are found, which takes memory of its own.
func (t *Tiers) takeBack() error {
	if !lends(&t.Engine.Config) {
		return nil
	}
	return t.Engine.TakeBack()
}

// regain gives the CPU tier its memory back. Garbage of planning in Go's heap goes first: where
// memory is tight the tier is to have it.
func (t *Tiers) regain() error {
	if lends(&t.Engine.Config) {
		debug.FreeOSMemory()
	}
	return t.tier.TakeBack()
}
