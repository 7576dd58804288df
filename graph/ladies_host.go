package graph

import (
	"fmt"
	"math/bits"
	"unsafe"

	"helios/cuda"
)

// The host device numbers and weighs the candidates of a layer in one launch, not in the three of a
// GPU (sample_begin, sample_fill, layer_weigh), to the same bits. Each block has a part of the
// nodes, by their hashes, and a part of the table for them. It walks all edges and takes those of
// its own nodes: so a node's entry, mass and first edge are of one block, which meets them in the
// order of the edges, and nothing is atomic. Reading every list in every block is cheap beside the
// accesses to table and masses, each of which is a miss; those of a chunk of edges are in flight
// together.

// enterParams is the parameter block of host_layer_enter. Its Layer's Src takes the nodes of first
// edges, and has no table behind it: slots are nodes.
type enterParams struct {
	Layer layerParams
	Table cuda.DevicePtr // uint64[Parts×Slots]: node<<32 | candidate; all ones = empty
	Parts int64          // blocks
	Slots int64          // of a part
}

const (
	enterChunk = 256
	enterAhead = 16
	// enterSlots is the number of slots that make another part: parts of few nodes would differ in
	// size too much.
	enterSlots = 4096
)

func init() { cuda.RegisterHost("host_layer_enter", hostLayerEnter) }

// enterBlock is a block's view of the launch.
type enterBlock struct {
	layerView
	table   []uint64 // the block's part
	part    uint64
	parts   uint64
	numNode uint64
	count   int
	ids     [enterChunk]uint32
	edges   [enterChunk]uint32
	masses  [enterChunk]uint64
	slots   [enterChunk]uint32
	sink    uint64
}

// mix is a hash whose halves are good.
func mix(v uint64) uint64 {
	v *= 0x9E3779B97F4A7C15
	v ^= v >> 32
	return v * 0xD6E8FEB86659FD93
}

func hostLayerEnter(b *cuda.Block, p *enterParams) error {
	if int64(b.Index) >= p.Parts {
		return nil
	}
	s := &p.Layer.Sample
	h := &enterBlock{layerView: p.Layer.view(), part: uint64(b.Index), parts: uint64(p.Parts),
		numNode: uint64(s.NumNodes)}
	h.table = cuda.View[uint64](p.Table, p.Parts*p.Slots)[int64(b.Index)*p.Slots:][:p.Slots]
	for i := range h.table {
		h.table[i] = ^uint64(0)
	}
	nodes, indptr := cuda.View[int64](s.Nodes, h.n), s.indptr()
	for i, v := range nodes {
		if x := mix(uint64(v)); h.mine(x) {
			h.enter(uint32(v), uint32(x), uint32(i))
		}
	}
	if s.Wide != 0 {
		return enterLists(h, nodes, indptr, cuda.View[int64](s.Indices, s.NumEdges))
	}
	return enterLists(h, nodes, indptr, cuda.View[uint32](s.Indices, s.NumEdges))
}

// mine reports whether this block has the nodes of hash x.
func (h *enterBlock) mine(x uint64) bool { return x>>32*h.parts>>32 == h.part }

// enter finds the candidate of a node, which is at when it has none.
func (h *enterBlock) enter(v, hash, index uint32) uint32 {
	s := uint64(hash) * uint64(len(h.table)) >> 32
	for {
		switch t := h.table[s]; {
		case t == ^uint64(0):
			h.table[s] = uint64(v)<<32 | uint64(index)
			return index
		case uint32(t>>32) == v:
			return uint32(t)
		}
		if s++; s == uint64(len(h.table)) {
			s = 0
		}
	}
}

// enterLists walks the edges. Blocks that are not the first leave the offsets alone.
func enterLists[T uint32 | int64](h *enterBlock, nodes, indptr []int64, indices []T) error {
	var first, degree [enterAhead]int64
	e := int64(0)
	for lo := 0; lo < len(nodes); lo += enterAhead {
		n := min(enterAhead, len(nodes)-lo)
		for k, v := range nodes[lo : lo+n] {
			var err error
			if first[k], degree[k], err = neighbours(indptr, int64(len(indices)), v); err != nil {
				return err
			}
		}
		for k := range n { // the lists' beginnings are on their way together
			if degree[k] > 0 {
				h.sink += uint64(indices[first[k]])
			}
		}
		for k := range n {
			if h.part == 0 {
				h.start[lo+k] = e
			}
			if degree[k] == 0 {
				continue
			}
			if e+degree[k] > h.Edges {
				return fmt.Errorf("sample: %d edges, room for %d", e+degree[k], h.Edges)
			}
			mass := edgeMass(degree[k], h.Bits)
			for j, id := range indices[first[k] : first[k]+degree[k]] {
				if uint64(id) >= h.numNode {
					return fmt.Errorf("sample: id %d of edge %d: nodes are 0 to %d", int64(id),
						first[k]+int64(j), h.numNode-1)
				}
				x := mix(uint64(id))
				if !h.mine(x) {
					continue
				}
				c := h.count
				h.ids[c], h.slots[c], h.edges[c], h.masses[c] = uint32(id), uint32(x),
					uint32(e+int64(j)), mass
				if h.count++; h.count == enterChunk {
					h.flush()
				}
			}
			e += degree[k]
		}
	}
	h.flush()
	if h.part == 0 {
		h.start[h.n] = e
	}
	if e != h.Edges {
		return fmt.Errorf("sample: the topology changes while it is sampled")
	}
	return nil
}

// flush enters the edges of the chunk.
func (h *enterBlock) flush() {
	n, size, touched := h.count, uint64(len(h.table)), uint64(0)
	for _, x := range h.slots[:n] { // the entries are on their way together
		touched += h.table[uint64(x)*size>>32]
	}
	h.sink += touched
	for k, v := range h.ids[:n] {
		c := uint32(h.n) + h.edges[k]
		first := h.enter(v, h.slots[k], c)
		if first == c {
			h.src[h.edges[k]] = v
		}
		h.slots[k] = first
	}
	for k, c := range h.slots[:n] {
		h.pos[h.edges[k]] = c
		h.mass[c] += h.masses[k]
	}
	h.count = 0
}

// enterTable is the slots of a table for so many nodes.
func enterTable(distinct int64) int64 {
	slots := int64(enterSlots)
	for slots < 2*distinct {
		slots *= 2
	}
	return slots
}

// enterOnHost launches host_layer_enter for distinct nodes at most, at a load of up to 1/2.
func (s *layerHopper) enterOnHost(stream cuda.Stream, q *layerParams, distinct int64) error {
	l := &s.layers
	slots := enterTable(distinct)
	if l.table == nil || l.table.Size() < slots*8 {
		if err := free(&l.table); err != nil {
			return err
		}
		var err error
		if l.table, err = s.dev.Alloc(cuda.MemDevice, slots*8, layerPurpose); err != nil {
			return err
		}
	}
	parts := max(min(int64(s.dev.Info().SMs), slots/enterSlots), 1)
	q.Sample.Keys, q.Sample.Slots = 0, 0 // a slot is a node
	p := enterParams{Layer: *q, Table: l.table.Ptr(), Parts: parts, Slots: slots / parts}
	return cuda.Launch(stream, l.kEnter, cuda.LaunchConfig{Blocks: int(parts), Threads: 32}, p)
}

// hostLayers reports whether the host's kernels sample layers: nodes must fit half a word.
func (s *layerHopper) hostLayers() bool {
	return s.dev.Info().Backend == "host" &&
		bits.Len64(uint64(max(s.topo.Host.NumNodes, 1)-1)) <= 32
}

const (
	_ = uint(unsafe.Sizeof(enterParams{}) - 336 - 24)
	_ = uint(336 + 24 - unsafe.Sizeof(enterParams{}))
)
