package graph

import (
	"context"
	"errors"
	"unsafe"

	"helios/cuda"
	"helios/internal/simd"
)

// On the host device layer-neighbour sampling is neighbour sampling with another way to draw a tile
// (hop_host.go): each list is read once, 16 variates side by side, and what is taken is entered as
// ever. To the bits of labor_count and labor_fill.

func init() {
	cuda.RegisterHost("host_labor_hop", hostLaborHop)
}

// hostLaborHop is hostHop with draws by variates.
func hostLaborHop(b *cuda.Block, p *hopParams) error { return sampleTiles(b, p, true) }

// limits are those of a slot's destinations, in the place of draws.
func (s tile) limits() []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(&s.draws[0])), tileNodes)
}

// scratch is the rest of that place.
func (s tile) scratch() []uint32 { return s.draws[2*tileNodes:][:chunk+simd.SampleAhead] }

const _ = uint(drawWords - 2*tileNodes - chunk - simd.SampleAhead)

// drawLabor fills a slot with the neighbours that the destinations of tile t take; deg counts them.
// Where it is more than tileDraws, only the limit is kept.
func (h *hopBlock) drawLabor(t int64, s tile) error {
	lo := h.FirstDst + t*h.Tile
	n := int(min(h.Tile, h.NumDst-lo))
	if i := h.level.SampleRows(h.dst[lo:], n, h.indptr, h.NumEdges, 1, s.first, s.deg,
		s.local); i < n {
		return h.badRow(h.dst[lo+int64(i)])
	}
	// The lists' first lines are on their way while those before are read.
	lines := h.firstLines[:]
	h.level.SamplePrefetch(s.first, min(n, simd.SampleGroup), laborLines, lines, h.indices,
		h.wide != nil)
	limits, sum := s.limits(), uint32(0)
	h.largest = simd.LaborLargest{}
	for i := range n {
		if next := i + simd.SampleGroup; i%simd.SampleGroup == 0 && next < n {
			h.level.SamplePrefetch(s.first[next:], min(n-next, simd.SampleGroup), laborLines, lines,
				h.indices, h.wide != nil)
		}
		first, d := s.first[i], int64(s.deg[i])
		s.local[i] = sum
		limits[i] = laborLimit(h.Fanout, d)
		var k int64
		if limits[i] == takeAll {
			if k = d; k <= tileDraws {
				h.copyIDs(first, first+d, s.ids[sum:])
			}
		} else {
			k, limits[i] = h.takeLabor(first, d, limits[i], s.ids[sum:], s.scratch())
		}
		s.deg[i] = uint32(k)
		if k <= tileDraws {
			sum += uint32(k)
		}
	}
	s.local[n] = sum
	if !h.largest.In(h.Sources, h.wide != nil) {
		return h.badTaken(h.dst[lo:lo+int64(n)], limits)
	}
	h.numberSources(s.ids[:s.local[n]])
	return nil
}

// findLines notes where the first lines of a list begin.
func (h *hopBlock) findLines() {
	perLine := 64 / 4
	if h.wide != nil {
		perLine = 64 / 8
	}
	for i := range h.firstLines {
		h.firstLines[i] = uint32(i / simd.SampleGroup * perLine)
	}
}

// laborLines is the number of a list's first lines that are prefetched.
const laborLines = 4

// takeLabor writes what a destination of d > fanout neighbours takes to ids, up to tileDraws, and
// returns how much it is, and its limit: where no variate is below that of its degree, the least
// one.
func (h *hopBlock) takeLabor(first, d int64, limit uint64, ids, scratch []uint32) (int64, uint64) {
	if k := h.takeUpTo(first, d, limit, ids, scratch); k > 0 {
		return k, limit
	}
	if h.wide != nil {
		limit = h.level.LaborLeast64(h.wide[first:first+d], &h.Labor, limit, scratch)
	} else {
		limit = h.level.LaborLeast32(h.narrow[first:first+d], &h.Labor, limit, scratch)
	}
	return h.takeUpTo(first, d, limit, ids, scratch), limit
}

// takeUpTo writes the neighbours whose variates are at most limit to ids, up to tileDraws, and
// counts them all.
func (h *hopBlock) takeUpTo(first, d int64, limit uint64, ids, scratch []uint32) int64 {
	pos, k := h.take(first, first+d, limit, ids[:tileDraws+simd.LaborRoom])
	for pos < d {
		done, n := h.take(first+pos, first+d, limit, scratch)
		pos, k = pos+done, k+n
	}
	return k
}

// take writes the neighbours of edges lo to hi-1 of the graph whose variates are at most limit to
// ids, as far as there is room. It returns how many it has looked at, and how many they are.
func (h *hopBlock) take(lo, hi int64, limit uint64, ids []uint32) (done, n int64) {
	var d, k int
	if h.wide != nil {
		d, k = h.level.LaborTake64(h.wide[lo:hi], &h.Labor, limit, &h.largest, ids)
	} else {
		d, k = h.level.LaborTake32(h.narrow[lo:hi], &h.Labor, limit, &h.largest, ids)
	}
	return int64(d), int64(k)
}

// copyIDs copies the neighbours of edges lo to hi-1 of the graph.
func (h *hopBlock) copyIDs(lo, hi int64, ids []uint32) {
	if h.wide == nil {
		for i, id := range h.narrow[lo:hi] {
			ids[i] = id
			h.largest[0] = max(h.largest[0], id)
		}
		return
	}
	for i, id := range h.wide[lo:hi] {
		ids[i] = uint32(id)
		h.largest[0] = max(h.largest[0], uint32(id))
		h.largest[1] = max(h.largest[1], uint32(uint64(id)>>32))
	}
}

// badTaken finds the edge that one of the nodes takes and whose id is no node.
func (h *hopBlock) badTaken(nodes []int64, limits []uint64) error {
	for i, v := range nodes {
		first, d, err := neighbours(h.indptr, h.NumEdges, v)
		if err != nil {
			return err
		}
		for e := first; e < first+d; e++ {
			var id uint64
			if h.wide != nil {
				id = uint64(h.wide[e])
			} else {
				id = uint64(h.narrow[e])
			}
			if limits[i] != takeAll && h.Labor.Variate(id) > limits[i] {
				continue
			}
			if _, err := h.id(e); err != nil {
				return err
			}
		}
	}
	return errors.New("sample: the topology changes while it is sampled")
}

// enterLabor draws and enters the k edges of destination i of a slot, v, chunk by chunk.
func (h *hopBlock) enterLabor(v int64, s tile, i int, k, next, e int64) (int64, error) {
	first, d, err := neighbours(h.indptr, h.NumEdges, v)
	if err != nil {
		return 0, err
	}
	limit, ids := s.limits()[i], s.scratch()
	h.largest = simd.LaborLargest{}
	for pos, left := int64(0), k; pos < d; {
		var done, n int64
		if limit == takeAll {
			done = min(chunk, d-pos)
			n = done
			h.copyIDs(first+pos, first+pos+n, ids)
		} else {
			done, n = h.take(first+pos, first+d, limit, ids[:chunk])
		}
		if !h.largest.In(h.Sources, h.wide != nil) {
			return 0, h.badTaken([]int64{v}, []uint64{limit})
		}
		if pos, left = pos+done, left-n; left < 0 || pos == d && left > 0 {
			return 0, errors.New("sample: the topology changes while it is sampled")
		}
		h.numberSources(ids[:n])
		next = h.number(ids, int(n), next, e)
		e += n
	}
	return next, nil
}

// hostLaborHopper samples by variates of the sources on the host device.
type hostLaborHopper struct {
	hostHopper
	laborLists
}

func newHostLaborHopper(c sampling) (*hostLaborHopper, error) {
	h, err := newHostHopper(c)
	if err != nil {
		return nil, err
	}
	s := &hostLaborHopper{hostHopper: *h}
	err = s.findKernels(kernelName{&s.kHop, "host_labor_hop"})
	if err == nil {
		s.laborLists, err = newLaborLists(c, c.topo.Host, 0)
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	if s.lists != nil {
		s.indices = s.lists.ptr()
	}
	return s, nil
}

func (s *hostLaborHopper) close() error {
	return errors.Join(s.hostHopper.close(), s.closeLists())
}

func (s *hostLaborHopper) forget() {
	s.hostHopper.forget()
	s.listed = nil
}

func (s *hostLaborHopper) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	seeds []int64) error {
	s.listed = nil
	return s.hostHopper.begin(ctx, stream, mb, seeds)
}

func (s *hostLaborHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	hop int) error {
	if s.lists != nil {
		if err := s.stage(ctx, mb, view[int64](mb.Nodes, mb.HopEnd[hop])); err != nil {
			return err
		}
	}
	return s.sample(ctx, stream, mb, hop, tileDraws, s.variates(mb, hop).host())
}
