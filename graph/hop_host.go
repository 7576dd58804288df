package graph

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/simd"
)

// The host device samples a hop in one launch, not in the five of a GPU (kernels.go), to the same
// bits.
//
// The destinations are cut into tiles. A tile is drawn (rows, draws, ids: no tile needs another)
// into a slot of a ring by whichever block comes first, and entered into the position table (ids to
// frontier indices, in the order of the edges) in the order of the tiles, by one block at a time.
// So entries are plain words, an id that was not seen before gets its final index at once, and each
// edge costs one access to the table, which nothing but its own block has in its cache. A block
// alone draws and enters in turn; of several, one mostly enters and the others draw. The result
// does not depend on who does what.
//
// Where the room for edges, the frontier or the table may end within a tile, the launch stops
// before it; the host makes room and continues there. In a steady state that does not happen.

// hopParams is the parameter block of the host's kernels.
type hopParams struct {
	Indptr    cuda.DevicePtr // as in sampleParams, down to NumDst
	Indices   cuda.DevicePtr
	Nodes     cuda.DevicePtr
	Dst       cuda.DevicePtr // int64[NumDst]: destinations, as Indptr counts them
	EdgeStart cuda.DevicePtr
	Src       cuda.DevicePtr
	Degrees   cuda.DevicePtr
	// uint32[nodes]: stamp | index, or, hashed, uint64[slots]: stamp | node | index
	Table   cuda.DevicePtr
	Ring    cuda.DevicePtr
	Control cuda.DevicePtr // hopControl, zeroed
	// int64[4]: destinations done, edges, frontier, edges of the tile that found no room
	Totals    cuda.DevicePtr
	NumNodes  int64 // with lists
	NumEdges  int64
	Sources   int64 // nodes that ids can name, of which the first has number Base in the graph
	Base      int64
	Graph     int64 // nodes of the graph
	Slots     int64
	SrcLen    int64
	NodesLen  int64
	NumDst    int64
	Tile      int64 // destinations of a tile, tileNodes to mostTile
	FirstDst  int64 // where to go on, with so many edges
	FirstEdge int64
	Frontier  int64 // nodes in the frontier, at first
	MaxNodes  int64 // that it can have at all
	together
	hopDraws
	Wide      uint32
	Hashed    uint32
	PosBits   uint32 // of an index in an entry
	IDBits    uint32 // of a node in an entry, hashed
	Stamp     uint32
	RingSlots uint32
}

// hopDraws draws edges.
type hopDraws struct {
	Fanout int64
	Key    [2]uint32
	Epoch  uint32
	Hop    uint32
	Labor  simd.LaborKeys // of host_labor_hop
}

// together draws over the lists of all relations into a type, of which a launch takes those in its
// own.
type together struct {
	Into cuda.DevicePtr // uint64[IntoLen]: Indptr of each relation; 0: the own list alone
	// Own is the place of the launch's relation in Into.
	IntoLen, Own int64
}

// own writes the places in its list of d neighbours that node v takes to out, which has room for
// Fanout.
func (p *hopParams) own(v, d int64, out []uint32) (n int, err error) {
	var first, all int64
	for i, offsets := range cuda.View[cuda.DevicePtr](p.Into, p.IntoLen) {
		indptr := cuda.View[int64](offsets, p.NumNodes+1)
		if int64(i) == p.Own {
			first = all
		}
		if all += indptr[v+1] - indptr[v]; indptr[v+1] < indptr[v] || all > math.MaxUint32 {
			return 0, fmt.Errorf("sample: node %d: %d to %d are no offsets of the topology", v,
				indptr[v], indptr[v+1])
		}
	}
	if all <= p.Fanout {
		for i := range d {
			out[i] = uint32(i)
		}
		return int(d), nil
	}
	var draws [tileDraws]uint32
	floyd(draws[:p.Fanout], uint64(all), p.Key, [4]uint32{uint32(v), uint32(uint64(v) >> 32),
		p.Epoch, p.Hop << 24})
	for _, c := range draws[:p.Fanout] {
		if place := int64(c) - first; place >= 0 && place < d {
			out[n] = uint32(place)
			n++
		}
	}
	return n, nil
}

// hopControl holds what the blocks of a launch share. A field that one block writes while others
// read another has a cache line of its own.
type hopControl struct {
	claim   atomic.Int64 // next tile to draw
	_       [56]byte
	entered atomic.Int64 // tiles entered
	_       [56]byte
	token   atomic.Int32 // 1: a block enters
	stop    atomic.Int32
	home    atomic.Int32 // block that enters
	_       int32
	edges   int64 // entered; the token's holder has them
	nodes   int64 // new ones
	_       [32]byte
	ready   [maxRing]struct { // by slot: the tile that lies there drawn, plus one
		atomic.Int64
		_ [56]byte
	}
}

const maxRing = 64

func init() {
	cuda.RegisterHost("host_sample_begin", hostBegin)
	cuda.RegisterHost("host_sample_hop", hostHop)
	cuda.RegisterHost("host_sample_degrees", hostDegrees)
}

// A slot of the ring holds up to tileNodes destinations of up to tileDraws draws, or more of fewer
// draws, up to mostTile: what two blocks hand over costs each of them some transfers between their
// caches a tile. Destinations that get more than tileDraws draws are left to the block that enters,
// so that a hub needs no room.
const (
	tileNodes   = 128
	tileDraws   = 128
	mostTile    = 512
	chunk       = 1024
	slotFirst   = 0
	slotDeg     = slotFirst + mostTile*8
	slotLocal   = slotDeg + (mostTile+simd.SampleGroup)*4
	slotDraws   = slotLocal + (mostTile+simd.SampleGroup)*4
	drawWords   = 4 * simd.SampleMaxDraws * simd.SampleGroup // 16 KiB
	slotIDs     = slotDraws + drawWords*4
	slotBytes   = slotIDs + (tileNodes*tileDraws+tileDraws+simd.SampleAhead)*4
	ringPurpose = "sampler tiles"

	_ = uint(drawWords - chunk - simd.SampleAhead)
	_ = uint(tileDraws - simd.SampleMaxDraws)
)

type tile struct {
	first      []int64
	deg, local []uint32 // local: the destination's first id in ids
	draws, ids []uint32
}

// hopBlock is a block's view of the launch.
type hopBlock struct {
	*hopParams
	ctl     *hopControl
	level   simd.Level
	tiles   int64
	nodes   []int64
	dst     []int64
	indptr  []int64
	narrow  []uint32
	wide    []int64
	indices unsafe.Pointer
	start   []int64
	src     []uint32
	direct  []uint32
	hash    simd.SampleHash
	keys    [20]uint64
	draws   []uint32                // of some groups; the slot's go from block to block
	tail    [simd.SampleGroup]int64 // of a tile whose last group is not full

	// of host_labor_hop: what the tile takes, and where a list's first lines are
	labor      bool
	largest    simd.LaborLargest
	firstLines [laborLines * simd.SampleGroup]uint32
}

func (p *hopParams) block(b *cuda.Block) hopBlock {
	h := hopBlock{
		hopParams: p, level: b.SIMD(), tiles: (p.NumDst - p.FirstDst + p.Tile - 1) / p.Tile,
		nodes: cuda.View[int64](p.Nodes, p.NodesLen),
	}
	if p.Hashed != 0 {
		h.hash = simd.SampleHash{
			Table: cuda.View[uint64](p.Table, p.Slots),
			Shift: uint64(64 - bits.TrailingZeros64(uint64(p.Slots))), PosBits: uint64(p.PosBits),
			Stamp: uint64(p.Stamp) << (p.PosBits + p.IDBits), Mask: 1<<p.PosBits - 1,
			Low: 1<<(p.PosBits+p.IDBits) - 1,
		}
	} else {
		h.direct = cuda.View[uint32](p.Table, p.Slots)
	}
	return h
}

// hostBegin makes the table hold Nodes[0:NumDst].
func hostBegin(b *cuda.Block, p *hopParams) error {
	if b.Index > 0 {
		return nil
	}
	h := p.block(b)
	stamp, mask := p.Stamp<<p.PosBits, uint32(1)<<p.PosBits-1
	for i, v := range h.nodes[:p.NumDst] {
		switch {
		case uint64(v) >= uint64(p.Graph):
			return fmt.Errorf("sample: node %d: nodes are 0 to %d", v, p.Graph-1)
		case p.Hashed != 0:
			h.hash.Put(uint32(v), uint64(i))
		case h.direct[v]^stamp > mask:
			h.direct[v] = stamp | uint32(i)
		}
	}
	return nil
}

// hostDegrees looks up the in-degrees of Nodes[FirstDst:NumDst].
func hostDegrees(b *cuda.Block, p *hopParams) error {
	nodes, indptr := cuda.View[int64](p.Nodes, p.NumDst), cuda.View[int64](p.Indptr, p.NumNodes+1)
	deg := cuda.View[uint32](p.Degrees, p.NumDst)
	lo, hi := b.Range(p.NumDst - p.FirstDst)
	for i := p.FirstDst + lo; i < p.FirstDst+hi; i++ {
		_, d, err := neighbours(indptr, p.NumEdges, nodes[i])
		if err != nil {
			return err
		}
		deg[i] = uint32(d)
	}
	return nil
}

// hostHop samples a hop.
func hostHop(b *cuda.Block, p *hopParams) error { return sampleTiles(b, p, false) }

// sampleTiles is a block's part of a hop. One that fails, or panics because a mapped file has
// become shorter, stops the others, which would wait for its tile.
func sampleTiles(b *cuda.Block, p *hopParams, labor bool) error {
	h := p.block(b)
	h.labor = labor
	h.ctl = &cuda.View[hopControl](p.Control, 1)[0]
	done := false
	defer func() {
		if !done {
			h.ctl.stop.Store(1)
		}
	}()
	err := h.work(b)
	done = err == nil
	return err
}

// work draws and enters tiles until all are entered, there is no room for one, or nothing is left
// for this block.
func (h *hopBlock) work(b *cuda.Block) error {
	p := h.hopParams
	h.dst, h.indptr = cuda.View[int64](p.Dst, p.NumDst), cuda.View[int64](p.Indptr, p.NumNodes+1)
	h.start, h.src = cuda.View[int64](p.EdgeStart, p.NumDst+1), cuda.View[uint32](p.Src, p.SrcLen)
	if p.Wide != 0 {
		h.wide = cuda.View[int64](p.Indices, p.NumEdges)
		h.indices = unsafe.Pointer(unsafe.SliceData(h.wide))
	} else {
		h.narrow = cuda.View[uint32](p.Indices, p.NumEdges)
		h.indices = unsafe.Pointer(unsafe.SliceData(h.narrow))
	}
	draw := h.draw
	if h.labor {
		draw = h.drawLabor
		h.findLines()
	} else {
		h.keys = simd.SampleKeys(p.Key)
	}
	c, ring, me := h.ctl, int64(p.RingSlots), int32(b.Index)
	mem := cuda.View[byte](p.Ring, ring*slotBytes+int64(b.Blocks)*drawWords*4)
	h.draws = unsafe.Slice((*uint32)(unsafe.Pointer(
		&mem[ring*slotBytes+int64(b.Index)*drawWords*4])), drawWords)
	tileOf := func(t int64) tile { return tileIn(mem[t%ring*slotBytes:][:slotBytes]) }
	isReady := func(t int64) bool { return c.ready[t%ring].Load() == t+1 }
	for looks := 0; c.stop.Load() == 0; looks++ {
		t, next := c.entered.Load(), c.claim.Load()
		if t == h.tiles {
			return nil
		}
		mayDraw := next < h.tiles && next < t+ring
		// The table stays in the cache of one block. Another one takes over where that one does not
		// come, as when its thread does not run.
		if isReady(t) && (c.home.Load() == me || !mayDraw && looks > looksHome) &&
			c.token.CompareAndSwap(0, 1) {
			c.home.Store(me)
			for t = c.entered.Load(); t < h.tiles && isReady(t); t++ {
				if room, err := h.enter(t, tileOf(t)); err != nil || !room {
					c.stop.Store(1)
					return err
				}
				c.entered.Store(t + 1)
			}
			c.token.Store(0)
			looks = 0
			continue
		}
		if mayDraw {
			if c.claim.CompareAndSwap(next, next+1) {
				s := tileOf(next)
				if err := draw(next, s); err != nil {
					return err
				}
				if b.Blocks > 1 && c.home.Load() != me {
					h.warm(next, s)
				}
				c.ready[next%ring].Store(next + 1)
			}
			looks = 0
			continue
		}
		if next == h.tiles && (!isReady(t) || c.token.Load() == 1) && c.entered.Load() == t {
			// Whoever draws the tiles that are left, or enters, looks again when done.
			return nil
		}
		h.wait(b, looks)
	}
	return nil
}

// tileIn is the tile in a slot of the ring.
func tileIn(slot []byte) tile {
	m := unsafe.Pointer(&slot[0])
	words := func(off, n int) []uint32 { return unsafe.Slice((*uint32)(unsafe.Add(m, off)), n) }
	return tile{
		first: unsafe.Slice((*int64)(m), mostTile),
		deg:   words(slotDeg, mostTile+simd.SampleGroup),
		local: words(slotLocal, mostTile+simd.SampleGroup),
		draws: words(slotDraws, drawWords), ids: words(slotIDs, (slotBytes-slotIDs)/4),
	}
}

// warmBytes is the size from which on a table of entries by node is warmed. Smaller ones stay in
// the caches of the block that enters; hash tables were slower for it.
const warmBytes = 8 << 20

// warm brings the entries of tile t from memory into a cache, for the block that enters: to wait
// for them is most of its work where the table is large, and no other block can do that work.
func (h *hopBlock) warm(t int64, s tile) {
	if h.Hashed != 0 || h.Slots*4 <= warmBytes {
		return
	}
	n := min(h.Tile, h.NumDst-h.FirstDst-t*h.Tile)
	simd.SampleWarm(h.level, s.ids[:s.local[n]], h.direct)
}

// A block without work looks again so often before it enters in another's place, so often, some
// microseconds, before it lets other goroutines run, and so often before it lets other threads run
// as well.
const (
	looksHome    = 100
	looksAlone   = 500
	looksYielded = looksAlone + 30
)

// wait is for a tile that another block draws or enters, which takes microseconds. To yield at once
// would cost more than that: two blocks that do contend for Go's queue of goroutines, change
// threads and leave their caches behind. But where threads share a processor, the tile may be
// another one's that has not run for milliseconds, so it gets the processor.
func (h *hopBlock) wait(b *cuda.Block, looks int) {
	switch {
	case looks < looksAlone:
	case looks < looksYielded:
		b.Yield()
	default:
		b.Yield()
		_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
}

// draw fills a slot with the draws of tile t.
func (h *hopBlock) draw(t int64, s tile) error {
	lo := h.FirstDst + t*h.Tile
	n := int(min(h.Tile, h.NumDst-lo))
	if h.Into != 0 {
		return h.drawTogether(h.dst[lo:lo+int64(n)], s)
	}
	if h.Fanout < 1 || h.Fanout > simd.SampleMaxDraws {
		return h.drawLong(h.dst[lo:lo+int64(n)], s)
	}
	k := int(h.Fanout)
	if i := h.level.SampleRows(h.dst[lo:], n, h.indptr, h.NumEdges, uint32(k), s.first,
		s.deg, s.local); i < n {
		return h.badRow(h.dst[lo+int64(i)])
	}
	// The rows that a group reads are on their way while the next groups are drawn.
	const ahead = 3
	stride := (k + 1) &^ 1 * simd.SampleGroup
	for g := 0; g < n+ahead*simd.SampleGroup; g += simd.SampleGroup {
		if g < n {
			m := min(simd.SampleGroup, n-g)
			v := (*[simd.SampleGroup]int64)(unsafe.Pointer(&h.dst[lo+int64(g)]))
			if m < simd.SampleGroup {
				v = &h.tail
				copy(v[:], h.dst[lo+int64(g):][:m])
			}
			draws := h.draws[g/simd.SampleGroup%(ahead+1)*stride:]
			h.level.SampleDraw(v, (*[simd.SampleGroup]uint32)(s.deg[g:]), k, &h.keys, h.Epoch,
				h.Hop<<24, draws)
			h.level.SamplePrefetch(s.first[g:], m, k, draws, h.indices, h.wide != nil)
		}
		o := g - ahead*simd.SampleGroup
		if o < 0 || o >= n {
			continue
		}
		m, draws, ids := min(simd.SampleGroup, n-o), h.draws[o/simd.SampleGroup%(ahead+1)*stride:],
			s.ids[s.local[o]:]
		var bad int
		if h.wide != nil {
			bad = h.level.SampleGather64(s.first[o:], s.deg[o:], m, k, draws, h.wide,
				h.Sources, ids)
		} else {
			bad = h.level.SampleGather32(s.first[o:], s.deg[o:], m, k, draws, h.narrow,
				h.Sources, ids)
		}
		if bad > 0 {
			return h.badID(s, draws, o, m, k)
		}
	}
	h.numberSources(s.ids[:s.local[n]])
	return nil
}

// numberSources replaces ids of sources by the nodes' numbers in the graph.
func (h *hopBlock) numberSources(ids []uint32) {
	if h.Base == 0 {
		return
	}
	base := uint32(h.Base)
	for i := range ids {
		ids[i] += base
	}
}

// badRow describes the bad row of node v that SampleRows found.
func (h *hopBlock) badRow(v int64) error {
	if _, _, err := neighbours(h.indptr, h.NumEdges, v); err != nil {
		return err
	}
	return fmt.Errorf("sample: node %d has 2^32 neighbours or more", v)
}

// badID finds the edge whose id is no node.
func (h *hopBlock) badID(s tile, draws []uint32, g, m, k int) error {
	for lane := range m {
		for i := range k {
			if _, err := h.id(s.first[g+lane] + int64(draws[i*simd.SampleGroup+lane])); err != nil {
				return err
			}
		}
	}
	return fmt.Errorf("sample: the topology changes while it is sampled")
}

// id is the in-neighbour of edge e of the lists, by its number in the graph.
func (h *hopBlock) id(e int64) (uint32, error) {
	var id uint64
	if h.wide != nil {
		id = uint64(h.wide[e])
	} else {
		id = uint64(h.narrow[e])
	}
	if id >= uint64(h.Sources) {
		return 0, fmt.Errorf("sample: id %d of edge %d: nodes are 0 to %d", int64(id), e,
			h.Sources-1)
	}
	return uint32(id + uint64(h.Base)), nil
}

// edgesOf returns how many of d neighbours are taken.
func (p *hopParams) edgesOf(d int64) int64 {
	if p.Fanout >= 0 && d > p.Fanout {
		return p.Fanout
	}
	return d
}

// drawn returns how many edges destination i of a slot gets.
func (h *hopBlock) drawn(s tile, i int) int64 {
	if h.labor {
		return int64(s.deg[i])
	}
	return h.edgesOf(int64(s.deg[i]))
}

// drawLong is draw for all neighbours, or for more draws than are compared with each other.
func (h *hopBlock) drawLong(nodes []int64, s tile) error {
	sum := uint32(0)
	for i, v := range nodes {
		first, d, err := neighbours(h.indptr, h.NumEdges, v)
		if err != nil {
			return err
		}
		if d > math.MaxUint32 {
			return fmt.Errorf("sample: node %d has 2^32 neighbours or more", v)
		}
		s.first[i], s.deg[i], s.local[i] = first, uint32(d), sum
		k := h.edgesOf(d)
		if k > tileDraws {
			continue
		}
		out := s.ids[sum : sum+uint32(k)]
		if k < d {
			floyd(out, uint64(d), h.Key, [4]uint32{uint32(v), uint32(uint64(v) >> 32), h.Epoch,
				h.Hop << 24})
		}
		for j := range out {
			pos := first + int64(j)
			if k < d {
				pos = first + int64(out[j])
			}
			if out[j], err = h.id(pos); err != nil {
				return err
			}
		}
		sum += uint32(k)
	}
	s.local[len(nodes)] = sum
	return nil
}

// drawTogether is draw over all relations.
func (h *hopBlock) drawTogether(nodes []int64, s tile) error {
	sum := uint32(0)
	for i, v := range nodes {
		first, d, err := neighbours(h.indptr, h.NumEdges, v)
		if err != nil {
			return err
		}
		n, err := h.own(v, d, s.ids[sum:])
		if err != nil {
			return err
		}
		s.local[i] = sum
		for j := range s.ids[sum : sum+uint32(n)] {
			id := &s.ids[sum+uint32(j)]
			if *id, err = h.id(first + int64(*id)); err != nil {
				return err
			}
		}
		sum += uint32(n)
	}
	s.local[len(nodes)] = sum
	return nil
}

// enter assigns frontier indices to the ids of tile t. It returns false, and changes nothing, when
// there may be no room for them all.
func (h *hopBlock) enter(t int64, s tile) (bool, error) {
	lo := h.FirstDst + t*h.Tile
	n := int(min(h.Tile, h.NumDst-lo))
	e, next := h.FirstEdge+h.ctl.edges, h.Frontier+h.ctl.nodes
	edges := int64(s.local[n])
	long := h.labor || h.Fanout < 1 || h.Fanout > tileDraws
	if long {
		for i := range n {
			if k := h.drawn(s, i); k > tileDraws {
				edges += k
			}
		}
	}
	totals := cuda.View[int64](h.Totals, 4)
	bound := min(next+edges, h.MaxNodes)
	if e+edges > h.SrcLen || bound >= h.NodesLen || (h.Hashed != 0 && bound > loaded(h.Slots)) {
		totals[0], totals[1], totals[2], totals[3] = lo, e, next, edges
		return false, nil
	}
	start := h.start[lo : lo+int64(n)]
	done := uint32(0) // of the tile's ids
	flush := func(to uint32) {
		next = h.number(s.ids[done:], int(to-done), next, e)
		e += int64(to - done)
		done = to
	}
	for i := range start {
		start[i] = e + int64(s.local[i]-done)
		if !long {
			continue
		}
		if k := h.drawn(s, i); k > tileDraws {
			flush(s.local[i])
			enterLong := h.enterLong
			if h.labor {
				enterLong = h.enterLabor
			}
			var err error
			if next, err = enterLong(h.dst[lo+int64(i)], s, i, k, next, e); err != nil {
				return false, err
			}
			e += k
		}
	}
	flush(s.local[n])
	h.ctl.edges, h.ctl.nodes = e-h.FirstEdge, next-h.Frontier
	if t == h.tiles-1 {
		h.start[h.NumDst] = e
		totals[0], totals[1], totals[2], totals[3] = h.NumDst, e, next, 0
	}
	return true, nil
}

// number enters n ids as edges from e on, and returns the new size of the frontier.
func (h *hopBlock) number(ids []uint32, n int, next, e int64) int64 {
	if h.Hashed != 0 {
		return int64(h.level.SampleEnterHash(ids, n, &h.hash, h.nodes, int(next), h.src[e:]))
	}
	return int64(h.level.SampleEnter(ids, n, h.direct, h.Stamp<<h.PosBits, 1<<h.PosBits-1, h.nodes,
		int(next), h.src[e:]))
}

// enterLong draws and enters the k edges of destination i of a slot, v, chunk by chunk.
func (h *hopBlock) enterLong(v int64, s tile, i int, k, next, e int64) (int64, error) {
	d := int64(s.deg[i])
	out := h.src[e : e+k]
	if k < d {
		floyd(out, uint64(d), h.Key, [4]uint32{uint32(v), uint32(uint64(v) >> 32), h.Epoch,
			h.Hop << 24})
	}
	for c := int64(0); c < k; c += chunk {
		n := min(chunk, k-c)
		for j := range n {
			pos := s.first[i] + c + j
			if k < d {
				pos = s.first[i] + int64(out[c+j])
			}
			var err error
			if s.draws[j], err = h.id(pos); err != nil {
				return 0, err
			}
		}
		next = h.number(s.draws, int(n), next, e+c)
	}
	return next, nil
}

// loaded returns how many entries a hash table of so many slots takes.
func loaded(slots int64) int64 { return slots / 2 }

// hostRing returns how many slots the ring of a device with so many workers has.
func hostRing(workers int) int64 { return int64(min(4*max(workers, 1), maxRing)) }

// hostHopper samples neighbours on the host device.
type hostHopper struct {
	sampling
	positions
	workers       int
	posBits       uint32 // of an index in an entry of the table
	ring, control cuda.Buffer
	indices       cuda.DevicePtr // ids of the in-neighbour lists

	kBegin, kHop, kDegrees cuda.Kernel
}

func newHostHopper(c sampling) (*hostHopper, error) {
	s := &hostHopper{sampling: c, workers: c.dev.Info().SMs}
	s.host = true
	if c.topo.indices != nil {
		s.indices = c.topo.indices.Ptr()
	}
	err := s.findKernels(
		kernelName{&s.kBegin, "host_sample_begin"}, kernelName{&s.kHop, "host_sample_hop"},
		kernelName{&s.kDegrees, "host_sample_degrees"})
	if err != nil {
		return nil, err
	}
	if err := s.open(&s.sampling); err != nil {
		return nil, err
	}
	if s.ring, err = c.dev.Alloc(cuda.MemDevice,
		hostRing(s.workers)*slotBytes+int64(s.workers)*drawWords*4, ringPurpose); err == nil {
		s.control, err = c.dev.Alloc(cuda.MemDevice, int64(unsafe.Sizeof(hopControl{})),
			ringPurpose)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("sampler: %w", err), s.close())
	}
	return s, nil
}

func (s *hostHopper) close() error {
	return errors.Join(s.positions.close(), free(&s.ring, &s.control))
}

func (s *hostHopper) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	seeds []int64) error {
	if err := s.stageSeeds(stream, mb, seeds); err != nil {
		return err
	}
	n := int64(len(seeds))
	if err := s.own(stream, mb, n); err != nil {
		return err
	}
	if err := s.degrees(stream, mb, 0, n); err != nil {
		return err
	}
	return stream.Synchronize(ctx)
}

func (s *hostHopper) params(mb *MiniBatch, n int64) hopParams {
	t := s.topo.Host
	p := hopParams{
		Indices: s.indices, Nodes: mb.Nodes.Ptr(), Dst: mb.Nodes.Ptr(),
		Table: s.vals.Ptr(), Ring: s.ring.Ptr(),
		Control: s.control.Ptr(), Totals: mb.totals.Ptr(),
		NumNodes: t.NumNodes, NumEdges: t.NumEdges, Sources: t.NumNodes, Graph: t.NumNodes,
		Slots: s.slots, NodesLen: mb.Nodes.Size() / 8,
		NumDst: n, Frontier: n, Tile: tileNodes,
		MaxNodes: t.NumNodes + int64(mb.NumSeeds),
		hopDraws: hopDraws{Key: mb.key, Epoch: uint32(mb.Epoch)},
		PosBits:  s.posBits, IDBits: s.idBits(), Stamp: s.stamp,
		RingSlots: uint32(hostRing(s.workers)),
	}
	if s.topo.indptr != nil {
		p.Indptr = s.topo.indptr.Ptr()
	}
	if t.Wide() {
		p.Wide = 1
	}
	if !s.direct {
		p.Hashed = 1
	}
	return p
}

// idBits returns how many bits an entry of a hash table has for the node.
func (s *hostHopper) idBits() uint32 {
	return uint32(bits.Len64(uint64(max(s.topo.Host.NumNodes, 2) - 1)))
}

func (s *hostHopper) launch(stream cuda.Stream, k cuda.Kernel, p *hopParams, blocks int64) error {
	return cuda.Launch(stream, k,
		cuda.LaunchConfig{Blocks: int(max(min(blocks, int64(s.workers)), 1)), Threads: 32}, *p)
}

// own makes the table hold the first n frontier nodes of mb under a new stamp.
func (s *hostHopper) own(stream cuda.Stream, mb *MiniBatch, n int64) error {
	s.owner = nil
	if !s.direct && loaded(s.slots) < n {
		if err := s.growHash(n); err != nil {
			return err
		}
	}
	width, nodes := uint32(32), s.topo.Host.NumNodes
	if !s.direct {
		width, nodes = 64-s.idBits(), loaded(s.slots)
	}
	pos := uint32(bits.Len64(uint64(nodes + int64(mb.NumSeeds))))
	if pos >= width {
		return errs.New(errs.Usage,
			"a batch of %d seeds with %d nodes is too large: lower the batch size or the fanouts",
			mb.NumSeeds, n)
	}
	if pos > s.posBits || s.stamp+1 >= 1<<(min(width-s.posBits, 31)) {
		if err := stream.Fill(s.vals.Ptr(), 0, s.vals.Size()); err != nil {
			return err
		}
		s.stamp, s.posBits = 0, max(pos, s.posBits)
	}
	s.stamp++ // 0 is an empty entry's
	p := s.params(mb, n)
	if err := s.launch(stream, s.kBegin, &p, 1); err != nil {
		return err
	}
	s.owner = mb
	return nil
}

// growHash makes room for n distinct nodes.
func (s *hostHopper) growHash(n int64) error {
	slots := int64(1) << 14
	for loaded(slots) < n {
		slots *= 2
	}
	if slots > 1<<31 {
		return errs.New(errs.Usage,
			"a mini-batch of %d nodes and edges is too large: lower the batch size or the fanouts",
			n)
	}
	s.slots, s.posBits = slots, 0
	return s.alloc(s.dev)
}

func (s *hostHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	return s.sample(ctx, stream, mb, hop, tileDrawsOf(s.cfg.Fanouts[hop]), simd.LaborKeys{})
}

// tileDrawsOf returns for how many draws a destination of a fanout has room in a tile.
func tileDrawsOf(fanout int) int64 {
	if fanout < 1 || fanout > simd.SampleMaxDraws {
		return tileDraws
	}
	return int64(fanout)
}

// sample draws a hop, up to so many draws for a destination in a tile.
func (s *hostHopper) sample(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int,
	draws int64, labor simd.LaborKeys) error {
	n := mb.HopEnd[hop]
	fanout := int64(s.cfg.Fanouts[hop])
	mb.Blocks = mb.Blocks[:hop+1] // keeps the buffers of the last batch
	b := &mb.Blocks[hop]
	if err := s.blockRoom(stream, mb, b, n, fanout); err != nil {
		return err
	}
	edges, frontier, err := s.drawLists(ctx, stream, mb, b, &hostLists{n: n, frontier: n,
		draws: draws, drawn: hopDraws{Fanout: fanout, Key: mb.key, Hop: uint32(hop), Labor: labor}})
	if err != nil {
		return err
	}
	return s.finish(ctx, stream, mb, hop, edges, frontier)
}

// blockRoom makes room for so many lists and a first guess at their edges, and has the table hold
// the frontier.
func (s *hostHopper) blockRoom(stream cuda.Stream, mb *MiniBatch, b *Block, lists,
	fanout int64) error {
	if err := mb.grow(stream, &b.Indptr, cuda.MemDevice, (lists+1)*8, 0,
		"block offsets"); err != nil {
		return err
	}
	// The kernel reports missing room; this is for the first batches.
	if err := mb.grow(stream, &b.Src, cuda.MemDevice, 4*min(lists*max(fanout, 16), 1<<16), 0,
		"block sources"); err != nil {
		return err
	}
	if s.owner != mb {
		return s.own(stream, mb, mb.HopEnd[len(mb.HopEnd)-1])
	}
	return nil
}

// hostLists are the lists of a launch, its destinations, and their place in the block.
type hostLists struct {
	n        int64 // destinations
	first    int64 // lists of the block before them, with so many edges
	edges    int64
	frontier int64          // nodes in the frontier before
	draws    int64          // for a destination in a tile
	drawn    hopDraws       // the epoch aside
	relation *drawnRelation // nil: those of the whole graph, for the frontier
	dst      cuda.DevicePtr // of a relation: the destinations
	kernel   cuda.Kernel    // nil: the hopper's
	indices  cuda.DevicePtr // 0: the relation's, or the hopper's
	together together
}

// drawLists draws all tiles of lists, and continues after each stop for room. It returns the edges
// of the block and the nodes of the frontier so far.
func (s *hostHopper) drawLists(ctx context.Context, stream cuda.Stream, mb *MiniBatch, b *Block,
	l *hostLists) (edges, frontier int64, err error) {
	totals := unsafe.Slice((*int64)(unsafe.Pointer(&mb.totals.Bytes()[0])), 4)
	done, n := int64(0), l.n
	edges, frontier = l.edges, l.frontier
	kernel := l.kernel
	if kernel == nil {
		kernel = s.kHop
	}
	for {
		p := s.params(mb, n)
		if l.relation != nil {
			l.relation.enter(&p)
			p.Dst, p.together = l.dst, l.together
		}
		if l.indices != 0 {
			p.Indices = l.indices
		}
		p.EdgeStart, p.Src, p.SrcLen = b.Indptr.Ptr()+cuda.DevicePtr(l.first*8), b.Src.Ptr(),
			b.Src.Size()/4
		p.FirstDst, p.FirstEdge, p.Frontier = done, edges, frontier
		p.hopDraws, p.Epoch, p.Tile = l.drawn, uint32(mb.Epoch), s.tile(n-done, l.draws)
		if err := stream.Fill(s.control.Ptr(), 0, s.control.Size()); err != nil {
			return 0, 0, err
		}
		if err := s.launch(stream, kernel, &p, (n-done+p.Tile-1)/p.Tile); err != nil {
			return 0, 0, err
		}
		if err := stream.Synchronize(ctx); err != nil {
			return 0, 0, err
		}
		done, edges, frontier = totals[0], totals[1], totals[2]
		if done == n {
			return edges, frontier, nil
		}
		more := totals[3]
		if n+edges+more > math.MaxUint32 {
			return 0, 0, tooManyEdges(n, edges+more)
		}
		if need := (edges + more) * 4; need > b.Src.Size() {
			if err := mb.grow(stream, &b.Src, cuda.MemDevice, max(need, 2*b.Src.Size()), edges*4,
				"block sources"); err != nil {
				return 0, 0, err
			}
		}
		if err := s.frontierRoom(stream, mb, frontier, more); err != nil {
			return 0, 0, err
		}
	}
}

// tile returns how many of n destinations make a tile where each gets up to so many draws: enough
// tiles that all blocks have some to draw and enter.
func (s *hostHopper) tile(n, draws int64) int64 {
	const group = simd.SampleGroup
	room := min(tileNodes*tileDraws/draws, mostTile)
	return max(min(n/(8*int64(s.workers)), room), tileNodes) / group * group
}

// frontierRoom makes room in the frontier and the table for so many more edges. Nothing is under
// way on the stream.
func (s *hostHopper) frontierRoom(stream cuda.Stream, mb *MiniBatch, frontier, edges int64) error {
	nodes := s.topo.Host.NumNodes + int64(mb.NumSeeds)
	bound := min(frontier+edges, nodes)
	if need := (bound + 1) * 8; need > mb.Nodes.Size() {
		if err := mb.grow(stream, &mb.Nodes, cuda.MemDevice, min(max(need, 2*mb.Nodes.Size()),
			max(need, (nodes+1)*8)), frontier*8, "frontier"); err != nil {
			return err
		}
	}
	if !s.direct && bound > loaded(s.slots) {
		if err := s.growHash(bound); err != nil {
			return err
		}
		return s.own(stream, mb, frontier)
	}
	return nil
}

// finish notes a hop's sizes, and fills in the new nodes' degrees where the model needs them.
func (s *hostHopper) finish(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int, edges,
	frontier int64) error {
	b, n := &mb.Blocks[hop], mb.HopEnd[hop]
	b.NumDst, b.NumEdges, b.NumSrc = n, edges, frontier
	mb.HopEnd = append(mb.HopEnd, frontier)
	if !s.cfg.Degrees {
		return nil
	}
	if err := s.degrees(stream, mb, n, frontier); err != nil {
		return err
	}
	return stream.Synchronize(ctx)
}

// degrees fills mb.Degrees for frontier nodes lo to hi-1.
func (s *hostHopper) degrees(stream cuda.Stream, mb *MiniBatch, lo, hi int64) error {
	if !s.cfg.Degrees || hi == lo {
		return nil
	}
	if err := mb.grow(stream, &mb.Degrees, cuda.MemDevice, hi*4, lo*4,
		"frontier degrees"); err != nil {
		return err
	}
	p := s.params(mb, hi)
	p.FirstDst, p.Degrees = lo, mb.Degrees.Ptr()
	return s.launch(stream, s.kDegrees, &p, (hi-lo+tileNodes-1)/tileNodes)
}
