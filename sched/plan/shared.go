package plan

import (
	"helios/internal/errs"
	"helios/internal/units"
)

// Memory that moves (Ginex: Park et al., VLDB 2022, section 4): sampling needs neighbour lists and
// no features, training the reverse. Where a superbatch is sampled before it trains, one budget
// serves both, each in its time.

// shareNeighborCache gives the neighbour cache the CPU tier's memory, where no size is given.
func (c *Config) shareNeighborCache() {
	c.NeighborShared = c.NeighborShared ||
		c.Topology == TopologySSD && c.NeighborCache == units.Budget{}
}

// checkShared refuses a shared budget that nothing could move.
func (c Config) checkShared() error {
	if c.NeighborShared && !c.Superbatched() {
		return errs.New(errs.Usage,
			"%v shared is memory that the CPU cache lends while a superbatch is sampled, and under %v %s none is; give a size, or use %v %s",
			errs.Key("neighbor-cache"), errs.Key("policy"), c.Policy, errs.Key("policy"),
			PolicyBelady)
	}
	return nil
}

// Share divides the budget of CPUCache, which is of all features' bytes: into that of the
// neighbour cache, which is at most what all lists take and 0 below least, and that of the CPU
// tier. Where memory moves both are of the whole.
func (c Config) Share(features, least, most int64) (neighbor, cpu int64) {
	cpu = min(c.CPUCache.Of(features), features)
	neighbor = cpu
	if c.SuperbatchOverlap {
		neighbor /= 2
	}
	if neighbor = min(neighbor, most); neighbor < least {
		neighbor = 0
	}
	if c.SuperbatchOverlap {
		cpu -= neighbor
	}
	return neighbor, cpu
}

// MemoryMoves reports whether the CPU tier's memory is the neighbour cache's while superbatches are
// sampled.
func (c Config) MemoryMoves() bool {
	return c.NeighborShared && !c.SuperbatchOverlap && c.NeighborCache.Bytes > 0
}
