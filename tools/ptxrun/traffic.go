package ptxrun

import "math/bits"

// Traffic counts the accesses of a launch's warps to the global space, caches left out.
type Traffic struct {
	// Trips counts the loads and atomics that the slowest warp waits for one after the other.
	// As on a GPU a warp goes on behind a load, up to the first instruction that reads its value; a
	// block's warps wait for each other at barriers.
	Trips int64
	// Far counts those to regions that are Far, as if there were no others.
	Far int64
	// Sectors of 32 bytes are counted for each load and store of a warp, Atomics for each lane.
	Sectors, Atomics int64
}

func (t *Traffic) add(o Traffic) {
	t.Trips, t.Far = max(t.Trips, o.Trips), max(t.Far, o.Far)
	t.Sectors += o.Sectors
	t.Atomics += o.Atomics
}

const sectorBits = 5

// trips counts loads and atomics one after the other: all, and those that are Far.
type trips struct{ all, far int64 }

func (t *trips) await(o trips) { t.all, t.far = max(t.all, o.all), max(t.far, o.far) }

// travel counts an instruction that is about to run in some lanes.
func (w *warp) travel(in *inst, lanes uint32) {
	for _, s := range in.uses {
		w.trips.await(w.arrives[s])
	}
	b, there := w.block, w.trips
	if in.mem != nil && w.toGlobal(in, lanes) {
		there.all++
		if w.isFar(in, lanes) {
			there.far++
		}
		if in.mem.rmw != "" {
			b.moved.Atomics += int64(bits.OnesCount32(lanes))
		} else {
			b.moved.Sectors += w.sectors(in, lanes)
		}
	}
	for _, d := range in.defs {
		w.arrives[d] = there
		b.moved.Trips, b.moved.Far = max(b.moved.Trips, there.all), max(b.moved.Far, there.far)
	}
	if in.kind == barrier {
		b.trips.await(w.trips)
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

// isFar reports whether the first of these lanes accesses a region that is Far.
func (w *warp) isFar(in *inst, lanes uint32) bool {
	addr := w.regs[in.a][bits.TrailingZeros32(lanes)&31] + uint64(in.imm)
	for _, r := range w.block.run.memory {
		if addr-r.Base < r.Size {
			return r.Far
		}
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
