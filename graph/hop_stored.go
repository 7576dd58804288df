package graph

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/simd"
)

// A hop over a topology on storage is the host device's hop (hop_host.go) in other steps: first all
// draws (which neighbour of each destination, no id is needed for it), then, chunk by chunk of the
// edges, where their ids are, the reads of the pages that hold those which no list in memory has,
// and the entry into the position table in the order of the edges. While a chunk's reads are on
// their way the chunk before it is entered and the one behind it is looked up.

// farParams is the parameter block of the kernels.
type farParams struct {
	hopParams
	Origin cuda.DevicePtr // int64[NumDst]: the list's first edge, or ^its place in Lists
	Deg    cuda.DevicePtr // uint32[NumDst]
	Tiles  cuda.DevicePtr // int64[tiles]: edges of the tile, then of all before it
	Lines  cuda.DevicePtr // cacheLine[CacheLines]
	Starts cuda.DevicePtr // uint32[CacheLists]
	Lists  cuda.DevicePtr // uint32[CacheIDs]
	Pos    cuda.DevicePtr // int64[Chunk]: edge that the id is of, -1 for one from Lists
	IDs    cuda.DevicePtr // uint32[Chunk + simd.SampleAhead]
	Keys   cuda.DevicePtr // uint64[Chunk]: page<<chunkBits | place in the chunk
	// int64[3×grid]: from where to where the block's keys are, and its edges without an id
	Counts    cuda.DevicePtr
	CacheLine int64
	CacheList int64
	CacheID   int64
	From, To  int64  // the chunk's edges of the block
	Offset    int64  // of the ids in the file
	Shift     uint64 // log2 of an id's bytes there
}

// chunkBits bounds a chunk: its places stand beside page numbers.
const chunkBits = 20

func init() {
	cuda.RegisterHost("host_far_rows", farRows)
	cuda.RegisterHost("host_far_draw", farDraw)
	cuda.RegisterHost("host_far_find", farFind)
	cuda.RegisterHost("host_far_enter", farEnter)
}

const farPurpose = "sampler reads"

func (p *farParams) tiles() int64 { return (p.NumDst + tileNodes - 1) / tileNodes }

// farRows looks the destinations' lists up and counts each tile's edges.
func farRows(b *cuda.Block, p *farParams) error {
	nodes, indptr := cuda.View[int64](p.Dst, p.NumDst), cuda.View[int64](p.Indptr, p.NumNodes+1)
	origin, deg := cuda.View[int64](p.Origin, p.NumDst), cuda.View[uint32](p.Deg, p.NumDst)
	sums := cuda.View[int64](p.Tiles, p.tiles())
	c := neighbourCache{lines: cuda.View[cacheLine](p.Lines, p.CacheLine),
		starts: cuda.View[uint32](p.Starts, p.CacheList)}
	level := b.SIMD()
	var first [tileNodes]int64
	var own [tileDraws]uint32
	var degs, local [tileNodes + simd.SampleGroup]uint32
	lo, hi := b.Range(p.tiles())
	for t := lo; t < hi; t++ {
		begin := t * tileNodes
		n := int(min(tileNodes, p.NumDst-begin))
		if i := level.SampleRows(nodes[begin:p.NumDst], n, indptr, p.NumEdges, 1, first[:], degs[:],
			local[:]); i < n {
			if _, _, err := neighbours(indptr, p.NumEdges, nodes[begin+int64(i)]); err != nil {
				return err
			}
			return fmt.Errorf("sample: node %d has 2^32 neighbours or more", nodes[begin+int64(i)])
		}
		sum := int64(0)
		for i, v := range nodes[begin : begin+int64(n)] {
			o := first[i]
			if place, ok := c.find(v); ok {
				o = ^place
			}
			origin[begin+int64(i)], deg[begin+int64(i)] = o, degs[i]
			if p.Into != 0 {
				k, err := p.own(v, int64(degs[i]), own[:])
				if err != nil {
					return err
				}
				sum += int64(k)
				continue
			}
			sum += p.edgesOf(int64(degs[i]))
		}
		sums[t] = sum
	}
	return nil
}

// farDraw writes the block's offsets, and to Src which of its neighbours each edge is.
func farDraw(b *cuda.Block, p *farParams) error {
	nodes := cuda.View[int64](p.Dst, p.NumDst)
	deg, before := cuda.View[uint32](p.Deg, p.NumDst), cuda.View[int64](p.Tiles, p.tiles())
	start, src := cuda.View[int64](p.EdgeStart, p.NumDst+1), cuda.View[uint32](p.Src, p.SrcLen)
	level, keys := b.SIMD(), simd.SampleKeys(p.Key)
	short := p.Fanout >= 1 && p.Fanout <= simd.SampleMaxDraws && p.Into == 0
	var own [tileDraws]uint32
	var v [simd.SampleGroup]int64
	var d [simd.SampleGroup]uint32
	var draws [simd.SampleMaxDraws * simd.SampleGroup]uint32
	lo, hi := b.Range(p.tiles())
	for t := lo; t < hi; t++ {
		e := before[t]
		end := min((t+1)*tileNodes, p.NumDst)
		for first := t * tileNodes; first < end; first += simd.SampleGroup {
			n := int(min(simd.SampleGroup, end-first))
			if short {
				copy(v[:n], nodes[first:])
				copy(d[:n], deg[first:])
				level.SampleDraw(&v, &d, int(p.Fanout), &keys, p.Epoch, p.Hop<<24, draws[:])
			}
			for lane := range n {
				i := first + int64(lane)
				start[i] = e
				k := p.edgesOf(int64(deg[i]))
				if p.Into != 0 {
					n, err := p.own(nodes[i], int64(deg[i]), own[:])
					if err != nil {
						return err
					}
					k = int64(n)
				}
				out := src[e : e+k]
				switch {
				case p.Into != 0:
					copy(out, own[:])
				case short:
					for j := range out {
						out[j] = draws[j*simd.SampleGroup+lane]
					}
				case k < int64(deg[i]):
					node := nodes[i]
					floyd(out, uint64(deg[i]), p.Key,
						[4]uint32{uint32(node), uint32(uint64(node) >> 32), p.Epoch, p.Hop << 24})
				default:
					for j := range out {
						out[j] = uint32(j)
					}
				}
				e += k
			}
		}
		if end == p.NumDst {
			start[end] = e
		}
	}
	return nil
}

// farFind takes the ids of edges From to To from the lists in memory, and notes where the others
// are.
func farFind(b *cuda.Block, p *farParams) error {
	n := p.To - p.From
	start, src := cuda.View[int64](p.EdgeStart, p.NumDst+1), cuda.View[uint32](p.Src, p.SrcLen)
	origin, lists := cuda.View[int64](p.Origin, p.NumDst), cuda.View[uint32](p.Lists, p.CacheID)
	pos, ids, keys := cuda.View[int64](p.Pos, n), cuda.View[uint32](p.IDs, n),
		cuda.View[uint64](p.Keys, n)
	lo, hi := b.Range(n)
	next, missing, base := lo, int64(0), uint32(p.Base)
	page := int64(-1) // of the edge before, unless a list in memory had that
	i := int64(sort.Search(int(p.NumDst), func(i int) bool { return start[i+1] > p.From+lo }))
	for e := lo; e < hi; i++ {
		end := min(start[i+1]-p.From, hi)
		o := origin[i]
		if o < 0 {
			list := lists[^o:]
			for ; e < end; e++ {
				ids[e], pos[e] = list[src[p.From+e]]+base, -1
			}
			page = -1
			continue
		}
		missing += end - e
		for ; e < end; e++ {
			x := o + int64(src[p.From+e])
			pos[e] = x
			// A list's draws often lie in one page: the key of the first edge serves all.
			if g := (p.Offset + x<<p.Shift) / filePage; g != page {
				page = g
				keys[next] = uint64(g)<<chunkBits | uint64(e)
				next++
			}
		}
	}
	counts := cuda.View[int64](p.Counts, 3*int64(b.Blocks))[3*b.Index:]
	counts[0], counts[1], counts[2] = lo, next, missing
	return nil
}

// farEnter assigns frontier indices to the ids of edges From to To. There is room.
func farEnter(b *cuda.Block, p *farParams) error {
	if b.Index > 0 {
		return nil
	}
	h := p.block(b)
	h.src = cuda.View[uint32](p.Src, p.SrcLen)
	n := p.To - p.From
	next := h.number(cuda.View[uint32](p.IDs, n+simd.SampleAhead), int(n), p.Frontier, p.From)
	cuda.View[int64](p.Totals, 4)[2] = next
	return nil
}

// farSet is the memory of a chunk.
type farSet struct{ pos, ids, keys, counts cuda.Buffer }

// storedHopper samples neighbours of a topology on storage, on the host device.
type storedHopper struct {
	hostHopper
	kRows, kDraw, kFind, kEnter cuda.Kernel
	origin, deg, tiles          cuda.Buffer
	sets                        [2]farSet
	sorted                      []uint64
}

func newStoredHopper(c sampling) (*storedHopper, error) {
	h, err := newHostHopper(c)
	if err != nil {
		return nil, err
	}
	s := &storedHopper{hostHopper: *h}
	err = s.findKernels(
		kernelName{&s.kRows, "host_far_rows"}, kernelName{&s.kDraw, "host_far_draw"},
		kernelName{&s.kFind, "host_far_find"}, kernelName{&s.kEnter, "host_far_enter"})
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *storedHopper) close() error {
	err := errors.Join(s.hostHopper.close(), free(&s.origin, &s.deg, &s.tiles))
	for i := range s.sets {
		x := &s.sets[i]
		err = errors.Join(err, free(&x.pos, &x.ids, &x.keys, &x.counts))
	}
	return err
}

// room makes *b hold so many bytes, whatever was in it.
func (s *storedHopper) room(b *cuda.Buffer, bytes int64) error {
	if *b != nil && (*b).Size() >= bytes {
		return nil
	}
	if err := free(b); err != nil {
		return err
	}
	var err error
	*b, err = s.dev.Alloc(cuda.MemDevice, (bytes+bytes/4+4095)&^4095, farPurpose)
	return err
}

// storedHop is a hop under way, or a relation's part of one. Chunk c is in set c mod 2 of the
// hopper.
type storedHop struct {
	*storedHopper
	*hostLists
	lists                 *DeviceTopology
	store                 *storage
	stream                cuda.Stream
	mb                    *MiniBatch
	b                     *Block
	edges                 int64 // of the block, with those of all chunks
	frontier              int64
	chunk, chunks, blocks int64 // edges of a chunk; chunks; blocks that find ids
}

// hop is hostHop over a topology on storage.
func (s *storedHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	n, fanout := mb.HopEnd[hop], int64(s.cfg.Fanouts[hop])
	mb.Blocks = mb.Blocks[:hop+1]
	b := &mb.Blocks[hop]
	if err := s.blockRoom(stream, mb, b, n, fanout); err != nil {
		return err
	}
	edges, frontier, err := s.drawStored(ctx, stream, mb, b, &hostLists{n: n, frontier: n,
		drawn: hopDraws{Fanout: fanout, Key: mb.key, Hop: uint32(hop)}})
	if err != nil {
		return err
	}
	return s.finish(ctx, stream, mb, hop, edges, frontier)
}

// drawStored is drawLists over lists on storage.
func (s *storedHopper) drawStored(ctx context.Context, stream cuda.Stream, mb *MiniBatch, b *Block,
	l *hostLists) (edges, frontier int64, err error) {
	h := storedHop{storedHopper: s, hostLists: l, lists: s.topo, stream: stream, mb: mb, b: b,
		edges: l.edges, frontier: l.frontier, blocks: int64(max(s.workers, 1))}
	if l.relation != nil {
		h.lists = l.relation.topo
	}
	h.store = h.lists.Host.far
	h.chunk = int64(h.store.opt.Chunk)
	if err = h.draw(ctx); err == nil {
		err = h.enterChunks(ctx)
	}
	return h.edges, h.frontier, err
}

func (h *storedHop) params() farParams {
	p := farParams{
		hopParams: h.storedHopper.params(h.mb, h.n), Origin: h.origin.Ptr(), Deg: h.deg.Ptr(),
		Tiles:  h.tiles.Ptr(),
		Offset: h.store.file.Offset, Shift: uint64(h.store.shift),
	}
	if h.relation != nil {
		h.relation.enter(&p.hopParams)
		p.Dst, p.together = h.dst, h.together
	}
	if lists, b := &h.store.cache, &h.lists.cache; lists.lists != nil {
		p.Lines, p.Starts, p.Lists = b[0].Ptr(), b[1].Ptr(), b[2].Ptr()
		p.CacheLine, p.CacheList, p.CacheID = int64(len(lists.lines)), int64(len(lists.starts)),
			int64(len(lists.lists))
	}
	p.EdgeStart, p.Frontier = h.b.Indptr.Ptr()+cuda.DevicePtr(h.first*8), h.frontier
	p.hopDraws, p.Epoch = h.drawn, uint32(h.mb.Epoch)
	if h.b.Src != nil {
		p.Src, p.SrcLen = h.b.Src.Ptr(), h.b.Src.Size()/4
	}
	return p
}

// draw counts the hop's edges and draws each one's neighbour.
func (h *storedHop) draw(ctx context.Context) error {
	tiles := (h.n + tileNodes - 1) / tileNodes
	if err := errors.Join(h.room(&h.origin, h.n*8), h.room(&h.deg, h.n*4),
		h.room(&h.tiles, tiles*8)); err != nil {
		return err
	}
	p := h.params()
	if err := h.launchFar(h.stream, h.kRows, &p, tiles); err != nil {
		return err
	}
	if err := h.stream.Synchronize(ctx); err != nil {
		return err
	}
	for t, sums := 0, view[int64](h.tiles, tiles); t < len(sums); t++ {
		h.edges, sums[t] = h.edges+sums[t], h.edges
	}
	if h.n+h.edges > math.MaxUint32 {
		return tooManyEdges(h.n, h.edges)
	}
	h.chunks = (h.edges - h.hostLists.edges + h.chunk - 1) / h.chunk
	if err := h.mb.grow(h.stream, &h.b.Src, cuda.MemDevice, max(h.edges, 1)*4, h.hostLists.edges*4,
		"block sources"); err != nil {
		return err
	}
	p = h.params()
	return h.launchFar(h.stream, h.kDraw, &p, tiles)
}

// enterChunks enters all edges' ids. While a chunk's reads are on their way the chunk before it is
// entered and the one behind it is looked up.
func (h *storedHop) enterChunks(ctx context.Context) error {
	if h.chunks > 0 {
		if err := h.find(0); err != nil {
			return err
		}
	}
	totals := view[int64](h.mb.totals, 4)
	for c := range h.chunks + 1 {
		if err := h.stream.Synchronize(ctx); err != nil {
			return err
		}
		if c > 1 {
			h.frontier = totals[2]
		}
		if c > 0 {
			if err := h.enter(c - 1); err != nil {
				return err
			}
		}
		if c+1 < h.chunks {
			if err := h.find(c + 1); err != nil {
				return err
			}
		}
		if c < h.chunks {
			from, to := h.bounds(c)
			if err := h.fetch(ctx, &h.sets[c%2], to-from); err != nil {
				return err
			}
		}
	}
	if err := h.stream.Synchronize(ctx); err != nil {
		return err
	}
	if h.chunks > 0 {
		h.frontier = totals[2]
	}
	return nil
}

// bounds are the edges of a chunk.
func (h *storedHop) bounds(c int64) (from, to int64) {
	return h.hostLists.edges + c*h.chunk, min(h.hostLists.edges+(c+1)*h.chunk, h.edges)
}

// find enqueues the look for a chunk's ids in the lists in memory.
func (h *storedHop) find(c int64) error {
	x := &h.sets[c%2]
	p := h.params()
	p.From, p.To = h.bounds(c)
	k := min(h.chunk, h.edges-h.hostLists.edges)
	if err := errors.Join(h.room(&x.pos, k*8), h.room(&x.ids, (k+simd.SampleAhead)*4),
		h.room(&x.keys, k*8), h.room(&x.counts, h.blocks*24)); err != nil {
		return err
	}
	p.Pos, p.IDs, p.Keys, p.Counts = x.pos.Ptr(), x.ids.Ptr(), x.keys.Ptr(), x.counts.Ptr()
	return h.launchFar(h.stream, h.kFind, &p, h.blocks)
}

// enter enqueues the entry of a chunk's ids into the frontier.
func (h *storedHop) enter(c int64) error {
	from, to := h.bounds(c)
	if err := h.frontierRoom(h.stream, h.mb, h.frontier, to-from); err != nil {
		return err
	}
	p := h.params()
	p.From, p.To = from, to
	p.IDs = h.sets[c%2].ids.Ptr()
	return h.launchFar(h.stream, h.kEnter, &p, 1)
}

// launchFar runs a kernel on so many blocks, no more than there are workers.
func (s *storedHopper) launchFar(stream cuda.Stream, k cuda.Kernel, p *farParams,
	blocks int64) error {
	return cuda.Launch(stream, k,
		cuda.LaunchConfig{Blocks: int(max(min(blocks, int64(s.workers)), 1)), Threads: 32}, *p)
}

// fetch reads the ids of a chunk of n edges that are in no list in memory.
func (h *storedHop) fetch(ctx context.Context, x *farSet, n int64) error {
	pos, ids, keys := view[int64](x.pos, n), view[uint32](x.ids, n), view[uint64](x.keys, n)
	counts := view[int64](x.counts, 3*h.blocks)
	h.sorted = h.sorted[:0]
	missing, base := int64(0), uint32(0)
	for g := range h.blocks {
		h.sorted = append(h.sorted, keys[counts[3*g]:counts[3*g+1]]...)
		missing += counts[3*g+2]
	}
	slices.Sort(h.sorted)
	if h.relation != nil {
		base = uint32(h.relation.base)
	}
	st := h.store
	st.reader.mu.Lock()
	defer st.reader.mu.Unlock()
	begin, pages := time.Now(), st.reader.pagesRead
	err := st.fetch(ctx, h.sorted, pos, ids, base)
	st.count(n, n-missing, st.reader.pagesRead-pages)
	if len(h.sorted) > 0 {
		st.stats.Wait += time.Since(begin)
	}
	return err
}

// count adds to the statistics.
func (s *storage) count(edges, cached, pages int64) {
	r := s.reader
	s.stats.Edges += edges
	s.stats.CachedEdges += cached
	s.stats.Pages += pages
	s.stats.Reads, s.stats.Bytes, s.stats.Retries = r.reads, r.bytes, r.retries
}

// fetch reads the pages of sorted keys, and writes the ids of the edges behind each key, counted
// from base.
func (s *storage) fetch(ctx context.Context, keys []uint64, pos []int64, ids []uint32,
	base uint32) error {
	const mask = 1<<chunkBits - 1
	read := 0
	next := func(u *pageRun) bool {
		if read == len(keys) {
			return false
		}
		*u = pageRun{page: int64(keys[read] >> chunkBits), pages: 1, lo: read}
		for read++; read < len(keys); read++ {
			if d := int64(keys[read]>>chunkBits) - u.page; d == int64(u.pages) && d < unitPages {
				u.pages++
			} else if d >= int64(u.pages) {
				break
			}
		}
		u.hi = read
		return true
	}
	limit := uint64(s.t.sources())
	return s.reader.read(ctx, next, func(u *pageRun, data []byte) error {
		first := unsafe.Pointer(&data[0])
		off := s.file.Offset - u.page*filePage
		for _, k := range keys[u.lo:u.hi] {
			page := int64(k >> chunkBits)
			for e := int(k & mask); e < len(pos) && pos[e] >= 0; e++ {
				if s.page(pos[e]) != page {
					break
				}
				p := unsafe.Add(first, off+pos[e]<<s.shift)
				var id uint64
				if s.file.Wide {
					id = *(*uint64)(p)
				} else {
					id = uint64(*(*uint32)(p))
				}
				if id >= limit { // the checksum agreed: by chance
					return s.reader.failed(s.file.Offset+pos[e]<<s.shift, 1<<s.shift,
						ErrTopologyChanged)
				}
				ids[e] = uint32(id) + base
			}
		}
		return nil
	})
}
