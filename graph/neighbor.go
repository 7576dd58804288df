package graph

import "math"

// Neighbor draws for each destination so many of its in-neighbours, uniformly and without
// replacement (Hamilton et al., "Inductive Representation Learning on Large Graphs", NeurIPS 2017).
const Neighbor = "neighbor"

var neighborMethod = &Method{
	Name: Neighbor, Summary: "in-neighbours of each node", Fanout: "neighbours of each node",
	MostFanout: 1 << 20,
	Bound: func(n int64, fanout int) int64 {
		if fanout < 0 || n > math.MaxInt64/int64(1+fanout) {
			return Unbounded
		}
		return n * int64(1+fanout)
	},
	open: openNeighbor,
}

// openNeighbor chooses the hopper: the CPU's own where a node fits its tables, that for lists on
// storage, else a GPU's.
func openNeighbor(c sampling) (hopper, error) {
	switch {
	case c.topo.Host.Schema != nil:
		return openTyped(c)
	case c.topo.Host.OnStorage():
		return newStoredHopper(c)
	case c.hostTables():
		return newHostHopper(c)
	}
	return newDeviceHopper(c)
}
