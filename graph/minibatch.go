package graph

import (
	"math/bits"

	"helios/cuda"
)

// Block is the bipartite graph of one hop. Its destinations are the first NumDst nodes of the
// frontier, its sources the first NumSrc (so every destination is also a source). The sampled
// in-neighbours of destination i are Src[Indptr[i]:Indptr[i+1]].
//
// In a typed graph a destination has a list for each relation into its type: see Lists.
type Block struct {
	NumDst, NumSrc, NumEdges int64
	Indptr                   cuda.Buffer // int64[NumLists()+1]
	Src                      cuda.Buffer // uint32[NumEdges], index into the frontier
	// Weights is float32[NumSrc], each above 0, or nil: destination i aggregates
	// sum(Weights[j]·x_j) / sum(Weights[j]) over its sampled in-neighbours j (layer-wise sampling),
	// in place of their mean.
	Weights cuda.Buffer
	// Of a typed graph, for each relation: where its lists stand among those of Indptr, one for
	// each destination of its type in the order of the frontier.
	Lists []ListRange
}

// ListRange is a run of lists of a block, and of their edges.
type ListRange struct{ First, N, FirstEdge, Edges int64 }

// NumLists returns the number of a block's lists: those of its destinations, or in a typed graph
// those of all relations.
func (b *Block) NumLists() (n int64) {
	if b.Lists == nil {
		return b.NumDst
	}
	for _, l := range b.Lists {
		n += l.N
	}
	return n
}

// MiniBatch holds the result of sampling a batch of seed nodes. Its buffers grow as needed and are
// used again by the next batch; only the first so many elements are valid. A buffer that is
// outgrown is kept until the next Begin, so that kernels of other streams that were launched
// between two hops stay correct.
type MiniBatch struct {
	Epoch, Index int
	NumSeeds     int
	// int64[HopEnd[last]], the frontier in order of first appearance, seeds first
	Nodes   cuda.Buffer
	HopEnd  []int64     // frontier size after hop h; HopEnd[0] = NumSeeds
	Blocks  []Block     // Blocks[h] made by hop h
	Degrees cuda.Buffer // uint32[HopEnd[last]] in-degree of each frontier node, when asked for
	// Of a typed graph: the nodes of type t among the seeds (h = 0) or among those that hop h-1
	// found end at TypeEnd[h][t] of the frontier, and begin where those of the type before end.
	// Nodes are numbers of the graph.
	TypeEnd [][]int64

	rows   cuda.Buffer // of a typed graph where not all types have rows: see RowNumbers
	rowEnd []int64     // after each hop; nil: all types have rows

	members  []members // of a typed graph, by type, while it is sampled
	key      [2]uint32 // of the batch's draws
	nextKey  [2]uint32 // of the draws that are new to it (SamplerConfig.Dependency)
	turn     uint32    // the batch's place among those that key serves
	distinct bool      // no seed stands twice
	seen     []int64   // scratch of that question

	dev     cuda.Device
	stage   cuda.Buffer // pinned int64[NumSeeds], the seeds on their way to the device
	sums    cuda.Buffer // pinned int64[blocks]: per-block totals between the phases of a scan
	totals  cuda.Buffer // pinned: sampleParams.Totals or hopParams.Totals of the hop
	retired []cuda.Buffer

	inner *MiniBatch // of the host device that samples in a GPU's place
}

// Close frees the buffers. No kernel may be using them.
func (mb *MiniBatch) Close() error {
	bufs := append(mb.retired, mb.Nodes, mb.rows, mb.Degrees, mb.stage, mb.sums, mb.totals)
	for _, b := range mb.Blocks[:cap(mb.Blocks)] {
		bufs = append(bufs, b.Indptr, b.Src, b.Weights)
	}
	for _, m := range mb.members {
		bufs = append(bufs, m.ids)
	}
	var err error
	if mb.inner != nil {
		err = mb.inner.Close()
	}
	for _, b := range bufs {
		if b != nil {
			if e := b.Free(); err == nil {
				err = e
			}
		}
	}
	*mb = MiniBatch{dev: mb.dev}
	return err
}

// grow makes *b hold at least need bytes. The first keep bytes are copied on stream; the old
// buffer is retired, not freed. Growth is geometric, so a steady state allocates nothing.
func (mb *MiniBatch) grow(stream cuda.Stream, b *cuda.Buffer, kind cuda.MemKind, need, keep int64,
	purpose string) error {
	if *b != nil && (*b).Size() >= need {
		return nil
	}
	size := max(need, 4096)
	if *b != nil {
		size += size / 4
	}
	size = (size + 4095) &^ 4095
	nb, err := mb.dev.Alloc(kind, size, purpose)
	if err != nil {
		return err
	}
	if *b != nil {
		mb.retired = append(mb.retired, *b)
		if keep > 0 {
			if err := stream.Copy(nb.Ptr(), (*b).Ptr(), keep); err != nil {
				mb.retired = mb.retired[:len(mb.retired)-1]
				_ = nb.Free()
				return err
			}
		}
	}
	*b = nb
	return nil
}

func (mb *MiniBatch) freeRetired() error {
	var err error
	for i, b := range mb.retired {
		if e := b.Free(); err == nil {
			err = e
		}
		mb.retired[i] = nil
	}
	mb.retired = mb.retired[:0]
	return err
}

// allDifferent looks the seeds up in a small hash set, about 10 ns each.
func (mb *MiniBatch) allDifferent(seeds []int64) bool {
	slots := 1 << bits.Len(uint(2*len(seeds)))
	if cap(mb.seen) < slots {
		mb.seen = make([]int64, slots)
	}
	set := mb.seen[:slots]
	clear(set)
	shift := 64 - bits.TrailingZeros(uint(slots))
	for _, v := range seeds {
		slot := int(uint64(v) * 0x9E3779B97F4A7C15 >> shift)
		for ; set[slot] != 0; slot = (slot + 1) & (slots - 1) {
			if set[slot] == v+1 {
				return false
			}
		}
		set[slot] = v + 1 // 0 is an empty slot
	}
	return true
}
