package engine

import (
	"math"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/hostmem"
	"helios/sched/plan"
)

// Rows of several mini-batches are denser on the SSDs than those of one, so more of them share a
// command, and a row that two of them need is read once. Where files play the SSDs, a command costs
// about as much as 28 KiB. There the tensors of mini-batches are parts of one reservation, so one
// set of reads reaches them all.

// Joined returns how many mini-batches are to be read as one set where each reads so many rows, as
// gpuio.Planner does: 1 at most where the consumer places rows in memory of its own, outside the
// reservation, or where that has more rows than a place, a number of 32 bits, can count.
func (w *Walk) Joined(rows int64) int {
	e, n := w.Engine, 1
	if e.Store.planner == nil {
		return 0
	}
	places := int64(len(e.Slots)) * e.SlotBytes / max(e.RowBytes, 1)
	if w.Pass.Place == nil && places <= math.MaxUint32 {
		n = e.Plan.Merges
	}
	return e.Store.planner.Joined(rows, n)
}

// tensor is the feature tensor of one mini-batch within the reservation of all.
type tensor struct {
	all      cuda.Growable
	at, size int64
}

func (t *tensor) Ptr() cuda.DevicePtr { return t.all.Ptr() + cuda.DevicePtr(t.at) }
func (t *tensor) Size() int64         { return t.size }
func (t *tensor) Kind() cuda.MemKind  { return t.all.Kind() }
func (t *tensor) Bytes() []byte       { return t.all.Bytes()[t.at : t.at+t.size] }
func (t *tensor) Purpose() string     { return t.all.Purpose() }
func (t *tensor) Free() error         { return nil } // the reservation is freed
func (t *tensor) Backed() int64       { return t.size }
func (t *tensor) Grow(n int64) error  { return t.all.Grow(t.at + n) }

// Replan makes the plan of the configuration's pipeline.
func (e *Engine) Replan() {
	e.Plan = e.Config.Schedule()
	if !e.OnGPU() && gpuio.OverFiles(e.Store.SSDs) {
		e.Plan = e.Plan.Merging()
	}
}

// Operators returns the graph of the run's operators, with the plan's credits.
func (e *Engine) Operators(reads bool) *plan.OpGraph {
	g := e.Config.Operators(reads)
	g.Credits, g.Samples = e.Plan.Credits, e.Plan.Samples
	return g
}

// merge makes the first of several segments ask for the reads of all, whose destinations are
// tensors of one reservation. The lists stay until the slot's next mini-batch.
func (e *Engine) merge(segs []*Segment) error {
	g, total := segs[0], int64(0)
	if t, ok := g.asks.Dst.(*tensor); ok && len(segs) == 1 {
		g.asks.Dst, g.asks.DstOffset = t.all, t.at
	}
	if len(segs) == 1 {
		return nil
	}
	for _, x := range segs {
		total += x.Asked
	}
	if err := g.growLists(e.Device, total); err != nil {
		return err
	}
	room := g.lists.Size() / listed
	set := gpuio.ReadSet{Rows: g.lists.Ptr(), Pos: g.lists.Ptr() + cuda.DevicePtr(room*8),
		Dst: g.asks.Dst.(*tensor).all, DstStride: e.RowBytes}
	rows := hostmem.View[int64](g.lists.Bytes()[:room*8])
	pos := hostmem.View[uint32](g.lists.Bytes()[room*8 : room*listed])
	n := int64(0)
	for s := range len(g.asks.SSDOffset) - 1 {
		set.SSDOffset = append(set.SSDOffset, n)
		for _, x := range segs {
			t, lo, hi := x.asks.Dst.(*tensor), x.asks.SSDOffset[s], x.asks.SSDOffset[s+1]
			copy(rows[n:], cuda.View[int64](x.asks.Rows, hi)[lo:])
			for i, p := range cuda.View[uint32](x.asks.Pos, hi)[lo:] {
				pos[n+int64(i)] = uint32(t.at/e.RowBytes) + p
			}
			n += hi - lo
			set.DstBytes = max(set.DstBytes, t.at+x.asks.DstBytes)
		}
	}
	set.SSDOffset = append(set.SSDOffset, n)
	for _, x := range segs[1:] {
		x.Asked, x.asks = 0, nil
	}
	g.Ask(n, &set)
	return nil
}

// listed is the bytes of a row in the lists of a set: its number and its place.
const listed = 12

// growLists makes room for so many rows in the lists of a merged set.
func (g *Segment) growLists(d cuda.Device, rows int64) (err error) {
	if g.lists != nil && g.lists.Size() >= rows*listed {
		return nil
	}
	if err := g.freeLists(); err != nil {
		return err
	}
	rows = (rows + rows/4 + 1) / 2 * 2 // an even number keeps the places aligned
	g.lists, err = d.Alloc(cuda.MemPinned, rows*listed, "merged reads")
	return err
}

func (g *Segment) freeLists() error {
	if g.lists == nil {
		return nil
	}
	b := g.lists
	g.lists = nil
	return b.Free()
}
