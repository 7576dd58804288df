package superbatch

import (
	"context"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"helios/internal/errs"
)

// Static is a cache whose rows never change, as PaGraph's (Lin et al., SoCC 2020): what a
// superbatch finds in it, in the form that Inspect gives. It takes 0.19 bytes a node of the graph
// and 12 bytes a slot.
type Static struct {
	rows []int64  // by slot
	gpu  int64    // slots of the GPU tier, the first ones
	bits []uint64 // by node: whether it is cached
	rank []uint32 // by word of bits: cached rows before it
	slot []int32  // by rank
}

// NewStatic returns the cache of rows, each in the slot of its place, the first gpu of them in GPU
// memory. They are of a graph of so many nodes, and each stands there once.
func NewStatic(rows []int64, gpu, nodes int64) (*Static, error) {
	s := &Static{rows: rows, gpu: gpu, bits: make([]uint64, (nodes+63)/64),
		rank: make([]uint32, (nodes+63)/64), slot: make([]int32, len(rows))}
	for _, row := range rows {
		if row < 0 || row >= nodes || s.bits[row/64]>>(row%64)&1 == 1 {
			return nil, errs.New(errs.Failed,
				"superbatch: row %d stands twice in a static cache, or is none of %d", row, nodes)
		}
		s.bits[row/64] |= 1 << (row % 64)
	}
	n := uint32(0)
	for w, x := range s.bits {
		s.rank[w] = n
		n += uint32(bits.OnesCount64(x))
	}
	for i, row := range rows {
		s.slot[s.rankOf(row)] = int32(i)
	}
	return s, nil
}

func (s *Static) rankOf(row int64) uint32 {
	return s.rank[row/64] + uint32(bits.OnesCount64(s.bits[row/64]&(1<<(row%64)-1)))
}

// find returns the slot of a row of the graph, or Miss.
func (s *Static) find(row int64) int32 {
	if s.bits[row/64]>>(row%64)&1 == 0 {
		return Miss
	}
	return s.slot[s.rankOf(row)]
}

// lookUp finds the slots of rows, and counts the hits of both tiers and of the GPU's.
func (s *Static) lookUp(rows []int64, slots []int32) (all, gpu int64) {
	for i, row := range rows {
		slot := s.find(row)
		slots[i] = slot
		if slot != Miss {
			all++
		}
		if slot != Miss && int64(slot) < s.gpu {
			gpu++
		}
	}
	return all, gpu
}

// Inspect finds the places of a superbatch's accesses. Fill has the rows that the cache, which
// holds before (nil: nothing), lacks: all of them, whether or not this superbatch accesses them. No
// mini-batch changes anything. Stats.Distinct is not counted.
func (s *Static) Inspect(ctx context.Context, a Accesses, before *State, workers int) (*Changes,
	error) {
	n := a.Batches()
	x := &Changes{starts: make([]int64, n+1), sets: make([]set, n), played: n,
		more: make(chan struct{}), After: State{Rows: s.rows, Reuse: make([]int32, len(s.rows))}}
	for b := range n {
		x.starts[b+1] = x.starts[b] + int64(a.Rows(b))
	}
	x.slots = make([]int32, x.starts[n])
	x.Stats.Accesses = x.starts[n]
	x.Stats.Bytes = 4*x.Stats.Accesses + 4*int64(len(s.rows))
	for i, row := range s.rows {
		x.After.Reuse[i] = int32(i)
		if before == nil || before.Rows[i] != row {
			x.Fill = append(x.Fill, Move{At: int32(len(x.First)), Slot: int32(i)})
			x.First = append(x.First, row)
		}
	}
	x.Stats.Loaded = int64(len(x.First))
	var next, hits, onGPU atomic.Int64
	failed := make([]error, max(workers, 1))
	var wg sync.WaitGroup
	for w := range failed {
		wg.Go(func() {
			var buf []int64
			for b := int(next.Add(1) - 1); b < n; b = int(next.Add(1) - 1) {
				rows, err := a.Read(b, buf)
				if err == nil {
					err = ctx.Err()
				}
				if err == nil && len(rows) != a.Rows(b) {
					err = errs.New(errs.Failed,
						"superbatch: mini-batch %d has %d rows and was said to have %d", b,
						len(rows), a.Rows(b))
				}
				if err != nil {
					failed[w] = err
					return
				}
				buf = rows[:0]
				all, gpu := s.lookUp(rows, x.Slots(b))
				hits.Add(all)
				onGPU.Add(gpu)
			}
		})
	}
	wg.Wait()
	if i := slices.IndexFunc(failed, func(err error) bool { return err != nil }); i >= 0 {
		return nil, failed[i]
	}
	x.Stats.Hits, x.Stats.HitsGPU = hits.Load(), onGPU.Load()
	x.Stats.HitsCPU = x.Stats.Hits - x.Stats.HitsGPU
	return x, nil
}
