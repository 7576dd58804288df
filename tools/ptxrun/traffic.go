package ptxrun

import "math/bits"

// Traffic counts the accesses of a launch's warps to the global space, caches left out.
type Traffic struct {
	// Trips counts the loads and atomics that the slowest warp waits for one after the other.
	// As on a GPU a warp goes on behind a load, up to the first instruction that reads its value; a
	// block's warps wait for each other at barriers.
	Trips int64
	// Sectors of 32 bytes are counted for each load and store of a warp, Atomics for each lane.
	Sectors, Atomics int64
}

func (t *Traffic) add(o Traffic) {
	t.Trips = max(t.Trips, o.Trips)
	t.Sectors += o.Sectors
	t.Atomics += o.Atomics
}

const sectorBits = 5

// travel counts an instruction that is about to run in some lanes.
func (w *warp) travel(in *inst, lanes uint32) {
	for _, s := range in.uses {
		w.trips = max(w.trips, w.arrives[s])
	}
	b, late := w.block, int64(0)
	if in.mem != nil && w.toGlobal(in, lanes) {
		late = 1
		if in.mem.rmw != "" {
			b.moved.Atomics += int64(bits.OnesCount32(lanes))
		} else {
			b.moved.Sectors += w.sectors(in, lanes)
		}
	}
	for _, d := range in.defs {
		w.arrives[d] = w.trips + late
		b.moved.Trips = max(b.moved.Trips, w.trips+late)
	}
	if in.kind == barrier {
		b.trips = max(b.trips, w.trips)
	}
}

func (w *warp) toGlobal(in *inst, lanes uint32) bool {
	switch in.mem.space {
	case global:
		return true
	case generic:
		switch w.regs[in.a][bits.TrailingZeros32(lanes)&31] >> windowShift {
		case windows[shared] >> windowShift, windows[local] >> windowShift,
			windows[parameter] >> windowShift:
			return false
		}
		return true
	}
	return false
}

// sectors is the number of sectors that a load or store of these lanes touches.
func (w *warp) sectors(in *inst, lanes uint32) int64 {
	var seen [64]uint64
	n := 0
	size := uint64(in.mem.bytes * len(in.list))
	for m := lanes; m != 0; m &= m - 1 {
		first := w.regs[in.a][bits.TrailingZeros32(m)&31] + uint64(in.imm)
		for pos := first >> sectorBits; pos <= (first+size-1)>>sectorBits; pos++ {
			known := false
			for _, s := range seen[:n] {
				known = known || s == pos
			}
			if !known && n < len(seen) {
				seen[n] = pos
				n++
			}
		}
	}
	return int64(n)
}
