package graph

import (
	"errors"
	"math"
	"math/bits"
	"unsafe"

	"helios/internal/hostmem"
)

// The cache of in-neighbour lists: those with the most walks to expect for a byte of memory. A walk
// comes to a node along one of its out-edges, and its list takes as much memory as it has in-edges,
// so the score is out-degree / in-degree (Ginex, PVLDB 15(11), 2022). Ginex finds a list by a table
// with an address for every node, 8 bytes each; here a bit marks a node whose list is there, and a
// rank gives its place: 64 bytes for 384 nodes, and 4 for each list.

// lineNodes is the number of nodes in a line of the table.
const lineNodes = 384

// cacheLine is about the lists of lineNodes nodes.
type cacheLine struct {
	base int64  // in lists, of the line's first
	rank uint32 // lists before this line
	_    uint32
	bits [lineNodes / 64]uint64 // whose list is there
}

const (
	_ = uint(unsafe.Sizeof(cacheLine{}) - 64)
	_ = uint(64 - unsafe.Sizeof(cacheLine{}))
)

// neighbourCache is the table and the packed lists, outside Go's heap. Without lines it is empty.
// Without lists it knows which it is to hold and has none of them.
type neighbourCache struct {
	mem    [3][]byte
	lines  []cacheLine
	starts []uint32 // of each list, from the base of its line
	lists  []uint32

	chosen, ids int64 // lists, and the ids in them
	borrowed    bool  // the memory of starts and lists is somebody else's
}

const (
	cachePurpose      = "neighbour cache"
	cacheTablePurpose = "neighbour cache table"
)

// LeastNeighborCache is the memory of a neighbour cache before it holds a list: a bit for each
// node, and ranks.
func LeastNeighborCache(nodes int64) int64 { return (nodes + lineNodes - 1) / lineNodes * 64 }

// MostNeighborCache returns the bytes of a neighbour cache of all lists.
func MostNeighborCache(nodes,
	edges int64) int64 {
	return LeastNeighborCache(nodes) + 4*(nodes+edges)
}

// metadata is the memory for finding lists, bytes adds the lists themselves, and held is the memory
// in use now.
func (c *neighbourCache) metadata() int64 { return int64(len(c.lines))*64 + c.chosen*4 }
func (c *neighbourCache) bytes() int64    { return c.metadata() + c.ids*4 }
func (c *neighbourCache) held() int64 {
	n := int64(len(c.mem[0]))
	if !c.borrowed {
		n += int64(len(c.mem[1]) + len(c.mem[2]))
	}
	return n
}

// listBytes is the memory of the chosen lists and of their starts.
func (c *neighbourCache) listBytes() int64 { return 4 * (c.chosen + c.ids) }

// find returns the place of v's list in lists.
func (c *neighbourCache) find(v int64) (first int64, ok bool) {
	if len(c.starts) == 0 {
		return 0, false
	}
	l := &c.lines[uint64(v)/lineNodes]
	r := uint64(v) % lineNodes
	w, b := r/64, r%64
	if l.bits[w]>>b&1 == 0 {
		return 0, false
	}
	n := int(l.rank) + bits.OnesCount64(l.bits[w]&(1<<b-1))
	for _, x := range l.bits[:w] {
		n += bits.OnesCount64(x)
	}
	return l.base + int64(c.starts[n]), true
}

// score of a list, as bits that keep the order.
func score(out uint32, in int64) uint32 {
	return math.Float32bits(float32(float64(out) / float64(in)))
}

// choose marks the lists with the highest scores for which there is room, and of equal ones those
// of the first nodes, and makes the tables. The lists are still to be filled.
func (c *neighbourCache) choose(t *Topology, out []uint32, budget int64) error {
	room := budget - LeastNeighborCache(t.NumNodes)
	cost := func(v int64) int64 { return 4 * (1 + t.InDegree(v)) }
	// The threshold's upper half, then its lower one: the bytes of all lists by score.
	above := func(n int, bin func(s uint32) (int, bool), room int64) (last int, left int64) {
		sums := make([]int64, n)
		for v := range t.NumNodes {
			if d := t.InDegree(v); d > 0 {
				if b, ok := bin(score(out[v], d)); ok {
					sums[b] += cost(v)
				}
			}
		}
		for last = n - 1; last >= 0 && sums[last] <= room; last-- {
			room -= sums[last]
		}
		return last, room
	}
	hi, room := above(1<<16, func(s uint32) (int, bool) { return int(s >> 16), true }, room)
	limit := int64(-1) // lists of higher scores are taken
	if hi >= 0 {
		var lo int
		lo, room = above(1<<16,
			func(s uint32) (int, bool) { return int(s & 0xffff), int(s>>16) == hi }, room)
		limit = int64(hi)<<16 | int64(max(lo, 0))
	}
	mem, err := hostmem.Alloc(LeastNeighborCache(t.NumNodes), cacheTablePurpose)
	if err != nil {
		return err
	}
	c.mem[0], c.lines = mem, hostmem.View[cacheLine](mem)
	var lists, ids int64
	for i := range c.lines {
		l := &c.lines[i]
		l.base, l.rank = ids, uint32(lists)
		for v := int64(i) * lineNodes; v < min(int64(i+1)*lineNodes, t.NumNodes); v++ {
			d := t.InDegree(v)
			if d == 0 || ids-l.base > math.MaxUint32 {
				continue
			}
			s := int64(score(out[v], d))
			if s < limit || s == limit && cost(v) > room {
				continue
			}
			if s == limit {
				room -= cost(v)
			}
			r := v % lineNodes
			l.bits[r/64] |= 1 << (r % 64)
			lists, ids = lists+1, ids+d
		}
	}
	c.chosen, c.ids = lists, ids
	return c.reserve(t, nil)
}

// reserve makes room for the lists that were chosen, in mem where it is not nil. They are still to
// be filled.
func (c *neighbourCache) reserve(t *Topology, mem []byte) (err error) {
	if c.borrowed = mem != nil; c.borrowed {
		c.mem[1], c.mem[2] = mem[:4*c.chosen], mem[4*c.chosen:c.listBytes()]
	} else if c.mem[1], err = hostmem.Alloc(4*c.chosen, cacheTablePurpose); err != nil {
		return errors.Join(err, c.release())
	} else if c.mem[2], err = hostmem.Alloc(4*c.ids, cachePurpose); err != nil {
		return errors.Join(err, c.release())
	}
	c.starts, c.lists = hostmem.View[uint32](c.mem[1]), hostmem.View[uint32](c.mem[2])
	n := 0
	for i := range c.lines {
		l := &c.lines[i]
		pos := uint32(0)
		for w, x := range l.bits {
			for ; x != 0; x &= x - 1 {
				c.starts[n] = pos
				n++
				pos += uint32(t.InDegree(int64(i)*lineNodes + int64(w)*64 +
					int64(bits.TrailingZeros64(x))))
			}
		}
	}
	return nil
}

// release frees the lists, or gives borrowed memory back. Which lists they are is still known.
func (c *neighbourCache) release() (err error) {
	if !c.borrowed {
		err = errors.Join(hostmem.Free(c.mem[1]), hostmem.Free(c.mem[2]))
	}
	c.borrowed = false
	c.mem[1], c.mem[2], c.starts, c.lists = nil, nil, nil, nil
	return err
}

func (c *neighbourCache) close() error {
	err := errors.Join(c.release(), hostmem.Free(c.mem[0]))
	*c = neighbourCache{}
	return err
}
