package graph

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
	"helios/internal/philox"
)

// sampleParams is the parameter block of all kernels of this package; each uses its part.
type sampleParams struct {
	Indptr    cuda.DevicePtr // int64[nodes+1], CSC offsets
	Indices   cuda.DevicePtr // uint32[edges], or int64[edges] when Wide
	Nodes     cuda.DevicePtr // int64[], frontier
	Degrees   cuda.DevicePtr // uint32[], or 0
	EdgeStart cuda.DevicePtr // int64[NumDst+1], the block's offsets
	Src       cuda.DevicePtr // uint32[E]: table slots until unique_relabel, then frontier indices
	Vals      cuda.DevicePtr // uint64[slots]: Stamp<<32 | position
	// uint64[slots]: Stamp<<48 | node; 0 = direct table, the slot is the node
	Keys      cuda.DevicePtr
	Sums      cuda.DevicePtr // int64[grid]
	Totals    cuda.DevicePtr // int64[2]: edges, new nodes
	NumNodes  int64          // of the graph
	NumEdges  int64          // of the graph
	Slots     int64          // of the table
	SrcLen    int64          // room in Src
	NodesLen  int64          // room in Nodes and Degrees
	NumDst    int64
	Fanout    int64 // -1 = all
	Key       [2]uint32
	Epoch     uint32
	Hop       uint32
	Stamp     uint32
	HashShift uint32 // 64 - log2(slots)
	Wide      uint32
	_         uint32
	Dst       cuda.DevicePtr // int64[NumDst]: destinations, as Indptr counts them
	Before    cuda.DevicePtr // int64[1]: edges of the block before the launch's; 0: none
	// Nodes in the frontier when the hop began: positions below are frontier indices.
	Frontier int64
	Sources  int64 // nodes that ids can name, of which the first has number Base in the graph
	Base     int64
}

const (
	_ = uint(unsafe.Sizeof(sampleParams{}) - 208)
	_ = uint(208 - unsafe.Sizeof(sampleParams{}))
	_ = uint(unsafe.Offsetof(sampleParams{}.Key) - 136)
	_ = uint(136 - unsafe.Offsetof(sampleParams{}.Key))
)

func init() {
	cuda.RegisterHost("sample_begin", sampleBegin)
	cuda.RegisterHost("sample_count", sampleCount)
	cuda.RegisterHost("sample_fill", sampleFill)
	cuda.RegisterHost("unique_count", uniqueCount)
	cuda.RegisterHost("unique_assign", uniqueAssign)
	cuda.RegisterHost("unique_relabel", uniqueRelabel)
	cuda.RegisterHost("unique_types", uniqueTypes)
	cuda.RegisterHost("unique_local", uniqueLocal)
}

// The position table answers "where in the frontier is node v, or where did it first appear in this
// hop": its entries only ever fall (atomic minimum), so the answer does not depend on the order in
// which threads come. An entry is stamp<<32 | position. Positions below Frontier are final frontier
// indices; Frontier+e means "first seen at edge e of this hop". Stamps count down from batch to
// batch, so entries of earlier batches are larger than any new one and need no clearing.
type table struct {
	vals, keys []uint64
	stamp      uint64
	shift      uint32
}

func (p *sampleParams) table() table {
	t := table{stamp: uint64(p.Stamp), shift: p.HashShift, vals: cuda.View[uint64](p.Vals, p.Slots)}
	if p.Keys != 0 {
		t.keys = cuda.View[uint64](p.Keys, p.Slots)
	}
	return t
}

// enterTable takes the position table of q over.
func (p *sampleParams) enterTable(q sampleParams) {
	p.Keys, p.Vals, p.Slots, p.HashShift, p.Stamp = q.Keys, q.Vals, q.Slots, q.HashShift, q.Stamp
}

func (p *sampleParams) indptr() []int64 { return cuda.View[int64](p.Indptr, p.NumNodes+1) }
func (p *sampleParams) src() []uint32   { return cuda.View[uint32](p.Src, p.SrcLen) }

const keyMask = 1<<48 - 1

// slot finds v's entry, and makes one when v has none in this stamp. Open addressing with
// linear probing; keys of other stamps count as empty. 16 bits of the stamp are kept with the
// key; the sampler clears the table before they repeat. It fails when all slots are taken, which
// the sampler's load bound of 3/4 excludes.
func (t *table) slot(v uint64) (uint64, error) {
	if t.keys == nil {
		return v, nil
	}
	want := (t.stamp&0xffff)<<48 | v
	mask := uint64(len(t.keys) - 1)
	s := (v * 0x9E3779B97F4A7C15) >> t.shift
	for range t.keys {
		for {
			k := atomic.LoadUint64(&t.keys[s])
			if k == want {
				return s, nil
			}
			if k>>48 == t.stamp&0xffff {
				break // somebody else's: next slot
			}
			if atomic.CompareAndSwapUint64(&t.keys[s], k, want) {
				return s, nil
			}
		}
		s = (s + 1) & mask
	}
	return 0, fmt.Errorf("sample: the position table of %d slots is full", len(t.keys))
}

// node is the inverse of slot.
func (t *table) node(s uint64) uint64 {
	if t.keys == nil {
		return s
	}
	return atomic.LoadUint64(&t.keys[s]) & keyMask
}

func (t *table) lower(s, pos uint64) {
	v := t.stamp<<32 | pos
	for {
		old := atomic.LoadUint64(&t.vals[s])
		if old <= v || atomic.CompareAndSwapUint64(&t.vals[s], old, v) {
			return
		}
	}
}

// pos is the position of a slot that has one in this stamp.
func (t *table) pos(s uint64) uint64 { return atomic.LoadUint64(&t.vals[s]) & 0xffffffff }

// neighbours returns the place and number of node v's in-neighbours. A bad node, or bad offsets,
// come from a topology that was not validated or has been overwritten.
func neighbours(indptr []int64, numEdges, v int64) (first, degree int64, err error) {
	numNodes := int64(len(indptr) - 1)
	if uint64(v) >= uint64(numNodes) {
		return 0, 0, fmt.Errorf("sample: node %d: nodes are 0 to %d", v, numNodes-1)
	}
	first, end := indptr[v], indptr[v+1]
	if first < 0 || end < first || end > numEdges {
		return 0, 0, fmt.Errorf("sample: node %d: %d to %d are no offsets of the topology", v,
			first, end)
	}
	return first, end - first, nil
}

// sampleBegin enters Nodes[0:NumDst] into the table and, when asked, looks up their degrees.
func sampleBegin(b *cuda.Block, p *sampleParams) error {
	nodes := cuda.View[int64](p.Nodes, p.NumDst)
	t := p.table()
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		v := uint64(nodes[i])
		if v >= uint64(p.NumNodes) {
			return fmt.Errorf("sample: node %d: nodes are 0 to %d", nodes[i], p.NumNodes-1)
		}
		s, err := t.slot(v)
		if err != nil {
			return err
		}
		t.lower(s, uint64(i))
	}
	if p.Degrees != 0 {
		indptr := p.indptr()
		deg := cuda.View[uint32](p.Degrees, p.NumDst)
		for i := lo; i < hi; i++ {
			_, d, err := neighbours(indptr, p.NumEdges, nodes[i])
			if err != nil {
				return err
			}
			deg[i] = uint32(d)
		}
	}
	return nil
}

// sampleCount writes how many edges each destination gets, as a running sum within the block's
// share, and the share's total to Sums.
func sampleCount(b *cuda.Block, p *sampleParams) error {
	nodes := cuda.View[int64](p.Dst, p.NumDst)
	start := cuda.View[int64](p.EdgeStart, p.NumDst+1)
	indptr := p.indptr()
	lo, hi := b.Range(p.NumDst)
	sum := int64(0)
	for i := lo; i < hi; i++ {
		_, d, err := neighbours(indptr, p.NumEdges, nodes[i])
		if err != nil {
			return err
		}
		if p.Fanout >= 0 && d > p.Fanout {
			d = p.Fanout
		}
		start[i] = sum
		sum += d
	}
	cuda.View[int64](p.Sums, int64(b.Blocks))[b.Index] = sum
	return nil
}

// before is the exclusive prefix sum of the grid's block totals at this block.
func before(b *cuda.Block, sums cuda.DevicePtr) int64 {
	s := int64(0)
	for _, c := range cuda.View[int64](sums, int64(b.Blocks))[:b.Index] {
		s += c
	}
	return s
}

// sampleFill draws the neighbours, turns ids into table slots and notes first appearances.
// The grid must be that of sampleCount.
//
// Reference: Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 30(9), 1987):
// for j = d-k … d-1 draw t in [0, j]; take t, or j when t is taken already. Every
// k-subset is equally likely. Draw number i of a node is half i&1 of Philox block i>>1 under
// counter (node, epoch, hop<<24|block), so it depends on nothing else.
func sampleFill(b *cuda.Block, p *sampleParams) error {
	nodes := cuda.View[int64](p.Dst, p.NumDst)
	start := cuda.View[int64](p.EdgeStart, p.NumDst+1)
	indptr := p.indptr()
	src := p.src()
	t := p.table()
	var ids32 []uint32
	var ids64 []int64
	if p.Wide != 0 {
		ids64 = cuda.View[int64](p.Indices, p.NumEdges)
	} else {
		ids32 = cuda.View[uint32](p.Indices, p.NumEdges)
	}
	base := before(b, p.Sums)
	if p.Before != 0 {
		base += cuda.View[int64](p.Before, 1)[0]
	}
	if end := base + cuda.View[int64](p.Sums, int64(b.Blocks))[b.Index]; end > p.SrcLen {
		return fmt.Errorf("sample: %d edges, room for %d", end, p.SrcLen)
	}
	enter := func(id uint64, edge int64, out *uint32, pos uint64) error {
		if id >= uint64(p.Sources) {
			return fmt.Errorf("sample: id %d of edge %d: nodes are 0 to %d", int64(id), edge,
				p.Sources-1)
		}
		s, err := t.slot(id + uint64(p.Base))
		if err != nil {
			return err
		}
		*out = uint32(s)
		t.lower(s, pos)
		return nil
	}
	lo, hi := b.Range(p.NumDst)
	e := base
	for i := lo; i < hi; i++ {
		v := nodes[i]
		first, d, err := neighbours(indptr, p.NumEdges, v)
		if err != nil {
			return err
		}
		k := d
		if p.Fanout >= 0 && k > p.Fanout {
			k = p.Fanout
		}
		start[i] = e
		out := src[e : e+k]
		if k < d {
			floyd(out, uint64(d), p.Key, [4]uint32{uint32(v), uint32(uint64(v) >> 32), p.Epoch,
				p.Hop << 24})
		} else {
			for j := range out {
				out[j] = uint32(j)
			}
		}
		pos := uint64(p.Frontier + e)
		if ids64 != nil {
			row := ids64[first : first+d]
			for j, o := range out {
				if err := enter(uint64(row[o]), first+int64(o), &out[j],
					pos+uint64(j)); err != nil {
					return err
				}
			}
		} else {
			row := ids32[first : first+d]
			for j, o := range out {
				if err := enter(uint64(row[o]), first+int64(o), &out[j],
					pos+uint64(j)); err != nil {
					return err
				}
			}
		}
		e += k
	}
	if b.Index == b.Blocks-1 {
		start[p.NumDst] = e
		cuda.View[int64](p.Totals, 2)[0] = e
	}
	return nil
}

// floyd fills out with a uniform subset of 0 … d-1, len(out) < d < 2^32, in draw order.
func floyd(out []uint32, d uint64, key [2]uint32, ctr [4]uint32) {
	k := len(out)
	// For long samples a 2048-bit filter in front of the search for duplicates: only what
	// hits it is searched for.
	var filter [32]uint64
	filtered := k > 24
	hop := ctr[3]
	var w [4]uint32
	for i := range out {
		if i&1 == 0 {
			ctr[3] = hop | uint32(i>>1)
			w = philox.Block(key, ctr)
		}
		h := (i & 1) * 2
		j := d - uint64(k) + uint64(i)
		c := uint32(philox.Bounded(uint64(w[h+1])<<32|uint64(w[h]), j+1))
		if filtered {
			f := (c * 0x9E3779B1) >> 21
			if filter[f>>6]>>(f&63)&1 != 0 && contains(out[:i], c) {
				c = uint32(j)
				f = (c * 0x9E3779B1) >> 21
			}
			filter[f>>6] |= 1 << (f & 63)
		} else if contains(out[:i], c) {
			c = uint32(j)
		}
		out[i] = c
	}
}

func contains(s []uint32, c uint32) bool {
	for _, x := range s {
		if x == c {
			return true
		}
	}
	return false
}

// edges is the block's share of the hop's edges, whose number only the device knows.
func (p *sampleParams) edges(b *cuda.Block) (lo, hi int64) {
	return b.Range(cuda.View[int64](p.EdgeStart, p.NumDst+1)[p.NumDst])
}

// uniqueCount counts the first appearances in the block's share of the edges.
func uniqueCount(b *cuda.Block, p *sampleParams) error {
	t := p.table()
	lo, hi := p.edges(b)
	src := p.src()
	n := int64(0)
	for e := lo; e < hi; e++ {
		if t.pos(uint64(src[e])) == uint64(p.Frontier+e) {
			n++
		}
	}
	cuda.View[int64](p.Sums, int64(b.Blocks))[b.Index] = n
	return nil
}

// uniqueAssign appends the nodes that appear first in the block's share to the frontier, in the
// order of the edges, and lowers their table entries to their frontier index. (Index Frontier+rank
// is at most Frontier+e, and later edges of the same node compare with larger numbers, so the test
// of other blocks is not disturbed.) The grid must be that of uniqueCount.
func uniqueAssign(b *cuda.Block, p *sampleParams) error {
	t := p.table()
	lo, hi := p.edges(b)
	src := p.src()
	nodes := cuda.View[int64](p.Nodes, p.NodesLen)
	next := p.Frontier + before(b, p.Sums)
	first := next
	for e := lo; e < hi; e++ {
		s := uint64(src[e])
		if t.pos(s) == uint64(p.Frontier+e) {
			if next >= p.NodesLen {
				return fmt.Errorf("sample: frontier index %d: room for %d", next, p.NodesLen)
			}
			nodes[next] = int64(t.node(s))
			t.lower(s, uint64(next))
			next++
		}
	}
	if p.Degrees != 0 {
		indptr := p.indptr()
		deg := cuda.View[uint32](p.Degrees, p.NodesLen)
		for i := first; i < next; i++ {
			_, d, err := neighbours(indptr, p.NumEdges, nodes[i])
			if err != nil {
				return err
			}
			deg[i] = uint32(d)
		}
	}
	if b.Index == b.Blocks-1 {
		cuda.View[int64](p.Totals, 2)[1] = next - p.Frontier
	}
	return nil
}

// uniqueRelabel replaces slots by frontier indices.
func uniqueRelabel(b *cuda.Block, p *sampleParams) error {
	t := p.table()
	lo, hi := p.edges(b)
	src := p.src()
	for e := lo; e < hi; e++ {
		src[e] = uint32(t.pos(uint64(src[e])))
	}
	return nil
}

// typeParams is the parameter block of unique_types.
type typeParams struct {
	Nodes    cuda.DevicePtr // int64[], frontier
	New      cuda.DevicePtr // int64[1]: nodes of it behind the first Frontier, by type
	Firsts   cuda.DevicePtr // int64[Types+1]: number of each type's first node
	Ends     cuda.DevicePtr // int64[Types]
	Frontier int64
	NodesLen int64
	Types    int64
}

const (
	_ = uint(unsafe.Sizeof(typeParams{}) - 56)
	_ = uint(56 - unsafe.Sizeof(typeParams{}))
)

// uniqueTypes finds where in the frontier the new nodes of each type end.
func uniqueTypes(b *cuda.Block, p *typeParams) error {
	end := p.Frontier + cuda.View[int64](p.New, 1)[0]
	if end > p.NodesLen {
		return fmt.Errorf("sample: frontier index %d: room for %d", end, p.NodesLen)
	}
	nodes := cuda.View[int64](p.Nodes, end)
	firsts, ends := cuda.View[int64](p.Firsts, p.Types+1), cuda.View[int64](p.Ends, p.Types)
	lo, hi := b.Range(p.Types)
	for t := lo; t < hi; t++ {
		from, to := p.Frontier, end
		for from < to {
			mid := (from + to) / 2
			if nodes[mid] < firsts[t+1] {
				from = mid + 1
			} else {
				to = mid
			}
		}
		ends[t] = from
	}
	return nil
}

// localParams is the parameter block of unique_local.
type localParams struct {
	Nodes cuda.DevicePtr // int64[Count]
	Local cuda.DevicePtr // int64[Count]
	Count int64
	First int64 // number of the type's first node
}

const (
	_ = uint(unsafe.Sizeof(localParams{}) - 32)
	_ = uint(32 - unsafe.Sizeof(localParams{}))
)

// uniqueLocal numbers nodes of one type within it.
func uniqueLocal(b *cuda.Block, p *localParams) error {
	nodes, local := cuda.View[int64](p.Nodes, p.Count), cuda.View[int64](p.Local, p.Count)
	lo, hi := b.Range(p.Count)
	for i := lo; i < hi; i++ {
		local[i] = nodes[i] - p.First
	}
	return nil
}
