package gpuio

import (
	"fmt"
	"math"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
)

// Kernel "coalesce": finds the rows of a set that one command can read together.
//
// For each SSD it sorts the bucket by slot, so that Order has the indices of its rows by place on
// the SSD, and cuts that order into runs: a run's rows lie in one window, each close behind the one
// before, and a command reads all of them and what lies between. Windows are aligned and no larger
// than one command may move, so where a run ends depends on rows near it and not on where earlier
// runs began. Then it writes the SSD's Units and the shares of its queues (Remaining).
//
// Exactly, for every device's kernel (Order, Runs, Units and Remaining are compared byte for byte;
// f, t are the bucket's bounds in Offsets and s the SSD):
//
//   - A row at index i is invalid when submit would refuse it (rowAt): its number is not in the
//     layout or not of this SSD, or its position lies outside the destination.
//   - key(i) is row div SSDs; of an invalid row all ones, which no slot is.
//   - KeysA[i] = key(i) and IdxA[i] = i for f ≤ i < t. Pass j = 0, 1, … sorts by bits 8j to 8j+7,
//     stably, from A to B when j is even and from B to A when it is odd. No pass is left out. When
//     the last pass did not write to Order, the indices are copied there.
//   - lba(k) is the first LBA of the k-th row in order, counted from DataStart: key × LBAsPerRow, or
//     key div RowsPerLBA where rows are packed. A run begins at k when k = f, or k or k-1 is invalid,
//     or lba(k) div Window ≠ lba(k-1) div Window, or lba(k) > lba(k-1) + Reach.
//   - Runs[f+s+u] is the first place in Order of the bucket's u-th run. With m runs Runs[f+s+m] = t,
//     and Units[2s] = f+s, Units[2s+1] = f+s+m. Entries of Runs behind that are not touched.
//   - Remaining[g] of the SSD's queues is the length of share(m, g mod QueuesPerSSD, QueuesPerSSD,
//     Rotate).
//
// Here each bucket is one block's work.
//
// Traffic: 12 bytes read per row for the keys, 24 read and written per row and pass, and 8 for
// Order and Runs.
func init() {
	cuda.RegisterHost("coalesce", coalesceKernel)
}

func coalesceKernel(b *cuda.Block, p *coalesceParams) error {
	set := at[setState](p.Sets, int(p.Set))
	if p.Passes > 8 {
		return fmt.Errorf("coalesce: %d passes over the slot, which has 64 bits", p.Passes)
	}
	if per := uint32(set.Layout.LBAsPerRow); p.Window == 0 || p.Window%per != 0 {
		return fmt.Errorf("coalesce: a window of %d LBAs is no whole number of rows of %d LBAs",
			p.Window, per)
	}
	lo, hi := b.Range(int64(set.Layout.SSDs))
	for s := lo; s < hi; s++ {
		p.bucket(set, s)
	}
	return nil
}

// bucket sorts one SSD's bucket and cuts it into runs.
func (p *coalesceParams) bucket(set *setState, s int64) {
	from, to := *at[int64](set.Offsets, int(s)), *at[int64](set.Offsets, int(s)+1)
	keys, other := view[uint64](p.KeysA, from, to), view[uint64](p.KeysB, from, to)
	idx, otherIdx := view[uint32](p.IdxA, from, to), view[uint32](p.IdxB, from, to)
	for k := range keys {
		i := from + int64(k)
		slot, _, bad := set.rowAt(i, uint32(s))
		keys[k], idx[k] = uint64(slot), uint32(i)
		if bad != 0 {
			keys[k] = invalidKey
		}
	}
	keys, idx = sortSlots(keys, other, idx, otherIdx, p.Passes)
	if order := view[uint32](set.Order, from, to); len(order) > 0 && &order[0] != &idx[0] {
		copy(order, idx)
	}
	runs := view[uint32](set.Runs, from+s, to+s+1)
	m := set.Layout.cut(keys, int64(p.Window), int64(p.Reach), uint32(from), runs)
	runs[m] = uint32(to)
	*at[int64](set.Units, int(2*s)) = from + s
	*at[int64](set.Units, int(2*s)+1) = from + s + int64(m)
	for q := range p.QueuesPerSSD {
		lo, hi := share(int64(m), q, p.QueuesPerSSD, set.Rotate)
		atomic.StoreUint32(at[uint32](set.Remaining, int(uint32(s)*p.QueuesPerSSD+q)),
			uint32(hi-lo))
	}
}

// sortSlots sorts indices by their keys, stably, and returns both where the last pass wrote them.
func sortSlots(keys, other []uint64, idx, otherIdx []uint32, passes uint32) ([]uint64, []uint32) {
	for pass := range passes {
		sortPass(keys, other, idx, otherIdx, 8*pass)
		keys, other, idx, otherIdx = other, keys, otherIdx, idx
	}
	return keys, idx
}

// sortPass is one pass of a radix sort, stable: it orders by 8 bits from shift on.
func sortPass(keys, out []uint64, idx, outIdx []uint32, shift uint32) {
	var next [256]uint32
	for _, key := range keys {
		next[key>>shift&255]++
	}
	sum := uint32(0)
	for d, n := range next {
		next[d] = sum
		sum += n
	}
	idx, out, outIdx = idx[:len(keys)], out[:len(keys)], outIdx[:len(keys)]
	for k, key := range keys {
		d := key >> shift & 255
		o := next[d]
		next[d] = o + 1
		out[o], outIdx[o] = key, idx[k]
	}
}

// invalidKey is the key of a row that cannot be read.
const invalidKey = ^uint64(0)

// cut writes where runs begin in sorted keys and returns their number; keys[0] is at place from in
// Order.
func (l *Layout) cut(keys []uint64, window, reach int64, from uint32, runs []uint32) int {
	per, packed := int64(l.LBAsPerRow), uint64(l.RowsPerLBA)
	m := 0
	end, prev := int64(-1), int64(0) // end of the window that prev is in
	for k, key := range keys {
		lba := int64(key) * per
		if packed > 1 {
			lba = int64(key / packed)
		}
		if key != invalidKey && lba < end && lba <= prev+reach {
			prev = lba
			continue
		}
		runs[m] = from + uint32(k)
		m++
		if end = -1; key != invalidKey {
			end, prev = (lba/window+1)*window, lba
		}
	}
	return m
}

// view is device memory from index lo to hi of an array.
func view[T any](p cuda.DevicePtr, lo, hi int64) []T {
	return unsafe.Slice(at[T](p, 0), hi)[lo:hi]
}

// passes returns how many passes of 8 bits sort the slots of a layout.
func (l Layout) passes() uint32 {
	return max(uint32(bits.Len64(uint64(max(l.RowsOn(0)-1, 0)))+7)/8, 1)
}

// Coalescing is worth a pass over the set when it is expected to save this share of its commands.
const coalesceSaves = 0.05

// expectedCommands returns how many commands a set takes when rows of a window that are close share
// one, if the rows of each bucket were drawn without repetition and evenly.
//
// An SSD with N slots has B groups: the LBA of RowsPerLBA slots, or the LBAs of one row. With n of
// the N slots drawn each is in the set with probability d = n/N, nearly independently, so a group
// of m slots is read with q = 1 - (1-d)^m. A read group begins a run unless one of the g before it
// in its window is read too, where g groups are within reach. The j-th of the w groups of a window
// has min(j, g) before it, so it begins a run with q(1-q)^min(j, g). Rows that come in clusters or
// more than once need fewer commands than that: even spreading is the worst case.
func expectedCommands(l Layout, offsets []int64, window, reach uint32) float64 {
	sum := 0.0
	m := float64(l.RowsPerLBA)
	w := float64(window) / float64(l.LBAsPerRow)
	g := float64(reach / uint32(l.LBAsPerRow))
	for s := range int(l.SSDs) {
		slots, n := float64(l.RowsOn(s)), float64(offsets[s+1]-offsets[s])
		if n == 0 || slots == 0 {
			continue
		}
		q := -math.Expm1(m * math.Log1p(-min(n/slots, 1)))
		begin, none := 0.0, 1.0 // of the window's groups, and of the j-th
		for j := 0.0; j < min(w, g); j++ {
			begin += none
			none *= 1 - q
		}
		begin += max(w-g, 0) * none
		sum += math.Ceil(slots/m) * q * begin / w
	}
	return sum
}

// coalesces reports whether a set's rows are to share commands.
func (e *queueSet) coalesces(rs *ReadSet) bool {
	return e.pays(e.layout, rs.SSDOffset, e.opt.CoalesceBytes)
}
