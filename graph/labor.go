package graph

import (
	"fmt"
	"unsafe"

	"helios/cuda"
	"helios/internal/philox"
	"helios/internal/simd"
)

// Layer-neighbour sampling: LABOR-0 (Balin and Çatalyürek, "Layer-Neighbor Sampling — Defusing
// Neighborhood Explosion in GNNs", NeurIPS 2023). Neighbour sampling draws for each destination by
// itself, so two destinations with the same neighbours bring different ones in. Here a hop gives
// each *source* t one variate r_t, uniform in [0, 1), which all destinations share:
//
//	take  destination s of in-degree d takes its neighbour t when r_t < fanout / d,
//	      and the one with the least r_t when that is none
//
// So a node that one destination takes, others take too, and the frontier has fewer nodes. For one
// destination by itself nothing changes: each neighbour is in with probability fanout / d.
//
// No weights are needed. The paper weighs an edge by 1 / (its probability) and divides by the sum
// of these weights (the Hájek estimator); the probabilities of one destination's edges are all the
// same, so that is the plain mean. It is unbiased, not only nearly so: given how many neighbours
// are taken, every set of that size is equally likely (the r_t are exchangeable), so its mean has
// the mean of all neighbours as its expectation. That needs at least one neighbour, hence the
// second part of the rule, which the paper does not have: without it a destination would aggregate
// nothing with probability (1 - fanout/d)^d. (Where a list names a node twice, both edges have its
// variate, and the mean is unbiased to first order only.)
//
// Variates are integers of 64 bits: a splitmix64 sequence per batch and hop, whose key is a Philox
// number, with the node as the place in it. Results do not depend on the device, its workers or the
// order of threads.
//
// In a typed graph a node has one variate for all relations, so that destinations of several take
// the same nodes; limits are by the in-degree in the relation.
//
// Batches that depend on each other (Balin et al., "Cooperative Minibatching in Graph Neural
// Networks", 2023) keep most variates from one batch to the next. With a dependency of κ, node t
// has in batch b the key number (b + phase(t)) div κ, where phase(t) is a hash of t below κ: each
// variate lives for κ batches, one in κ is new in each batch, and batches κ apart share none. Each
// epoch has variates of its own. A batch by itself has the same distribution as without.

// Labor samples by variates of the sources.
const Labor = "labor"

var laborMethod = &Method{
	Name: Labor, Summary: "in-neighbours by a random number of theirs, fewer rows; other results",
	Title:  "layer-neighbour (LABOR-0)",
	Fanout: "neighbours of each node, on average", MostFanout: 1 << 20, WholeLists: true,
	Dependent: true,
	// A destination may take all its neighbours.
	Bound: func(int64, int) int64 { return Unbounded },
	open:  openLabor,
}

// openLabor chooses the hopper: the CPU's own where a node fits its tables, else a GPU's.
func openLabor(c sampling) (hopper, error) {
	switch {
	case c.topo.Host.Schema != nil:
		return openTyped(c)
	case c.hostTables():
		return newHostLaborHopper(c)
	}
	return newLaborHopper(c)
}

// laborVariates makes the variates of a hop.
type laborVariates struct {
	Keys  [2]uint64 // of the nodes whose Turn + phase < Span, and of the others
	Phase uint64    // key of the phases
	Span  uint32    // κ
	Turn  uint32    // batch mod κ
}

// laborParams is the parameter block of labor_count and labor_fill. Sample is as for sample_count
// and sample_fill.
type laborParams struct {
	Sample sampleParams
	Limits cuda.DevicePtr // uint64[NumDst]: the largest variate that the destination takes
	Keys   [2]uint64      // these are laborVariates
	Phase  uint64
	Span   uint32
	Turn   uint32
}

func (v laborVariates) params(limits cuda.DevicePtr) laborParams {
	return laborParams{Limits: limits, Keys: v.Keys, Phase: v.Phase, Span: v.Span, Turn: v.Turn}
}

func (p *laborParams) variates() laborVariates {
	return laborVariates{Keys: p.Keys, Phase: p.Phase, Span: p.Span, Turn: p.Turn}
}

const (
	_ = uint(unsafe.Sizeof(laborParams{}) - 208 - 40)
	_ = uint(208 + 40 - unsafe.Sizeof(laborParams{}))
	_ = uint(unsafe.Offsetof(laborParams{}.Phase) - 232)
	_ = uint(232 - unsafe.Offsetof(laborParams{}.Phase))
)

func init() {
	cuda.RegisterHost("labor_count", laborCount)
	cuda.RegisterHost("labor_fill", laborFill)
}

const (
	takeAll = ^uint64(0) // a limit
	golden  = 0x9E3779B97F4A7C15
)

// variate is r_t of node t, in units of 2^-64.
func (p *laborVariates) variate(t uint64) uint64 {
	x := t * golden
	key := p.Keys[0]
	if p.Span > 1 {
		phase := philox.Bounded(philox.Mix(p.Phase+x), uint64(p.Span))
		if uint64(p.Turn)+phase >= uint64(p.Span) {
			key = p.Keys[1]
		}
	}
	return philox.Mix(key + x)
}

// host is the same for vectors (internal/simd).
func (p laborVariates) host() simd.LaborKeys {
	k := simd.LaborKeys{Keys: p.Keys, Phase: p.Phase}
	if p.Span > 1 {
		k.From = simd.LaborFrom(p.Span, p.Turn)
	}
	return k
}

// laborLimit is the largest variate that a destination of d neighbours takes: fanout / d in units
// of 2^-64, rounded down, less one. Divisions by 32 bits at a time, as a GPU can.
func laborLimit(fanout, d int64) uint64 {
	if fanout < 0 || d <= fanout {
		return takeAll
	}
	high := uint64(fanout) << 32
	low := high % uint64(d) << 32
	return high/uint64(d)<<32 + low/uint64(d) - 1
}

// takes counts the neighbours that a destination takes, and returns its limit: where no variate is
// below that of its degree, the least one.
func takes[T uint32 | int64](v *laborVariates, fanout int64, row []T) (limit uint64, n int64) {
	limit = laborLimit(fanout, int64(len(row)))
	if limit == takeAll {
		return limit, int64(len(row))
	}
	least := uint64(takeAll)
	for _, t := range row {
		r := v.variate(uint64(t))
		if r <= limit {
			n++
		}
		least = min(least, r)
	}
	if n > 0 {
		return limit, n
	}
	for _, t := range row {
		if v.variate(uint64(t)) == least {
			n++
		}
	}
	return least, n
}

// laborCount is sample_count: how many edges each destination gets, as a running sum within the
// block's share, and the share's total to Sums; and the destinations' limits.
func laborCount(b *cuda.Block, p *laborParams) error {
	s := &p.Sample
	if s.Wide != 0 {
		return laborCounts(b, p, cuda.View[int64](s.Indices, s.NumEdges))
	}
	return laborCounts(b, p, cuda.View[uint32](s.Indices, s.NumEdges))
}

func laborCounts[T uint32 | int64](b *cuda.Block, p *laborParams, indices []T) error {
	s := &p.Sample
	nodes, indptr := cuda.View[int64](s.Dst, s.NumDst), s.indptr()
	start := cuda.View[int64](s.EdgeStart, s.NumDst+1)
	limits := cuda.View[uint64](p.Limits, s.NumDst)
	lo, hi := b.Range(s.NumDst)
	v, sum := p.variates(), int64(0)
	for i := lo; i < hi; i++ {
		first, d, err := neighbours(indptr, s.NumEdges, nodes[i])
		if err != nil {
			return err
		}
		var n int64
		limits[i], n = takes(&v, s.Fanout, indices[first:first+d])
		start[i] = sum
		sum += n
	}
	cuda.View[int64](s.Sums, int64(b.Blocks))[b.Index] = sum
	return nil
}

// laborFill is sample_fill: it turns the neighbours that are taken, in the order of the lists, into
// table slots and notes first appearances. The grid must be that of labor_count.
func laborFill(b *cuda.Block, p *laborParams) error {
	s := &p.Sample
	if s.Wide != 0 {
		return laborFills(b, p, cuda.View[int64](s.Indices, s.NumEdges))
	}
	return laborFills(b, p, cuda.View[uint32](s.Indices, s.NumEdges))
}

func laborFills[T uint32 | int64](b *cuda.Block, p *laborParams, indices []T) error {
	s := &p.Sample
	nodes, indptr := cuda.View[int64](s.Dst, s.NumDst), s.indptr()
	start := cuda.View[int64](s.EdgeStart, s.NumDst+1)
	limits := cuda.View[uint64](p.Limits, s.NumDst)
	src, t, v := s.src(), s.table(), p.variates()
	e := before(b, s.Sums)
	if s.Before != 0 {
		e += cuda.View[int64](s.Before, 1)[0]
	}
	end := e + cuda.View[int64](s.Sums, int64(b.Blocks))[b.Index]
	if end > s.SrcLen {
		return fmt.Errorf("sample: %d edges, room for %d", end, s.SrcLen)
	}
	lo, hi := b.Range(s.NumDst)
	for i := lo; i < hi; i++ {
		first, d, err := neighbours(indptr, s.NumEdges, nodes[i])
		if err != nil {
			return err
		}
		start[i] = e
		limit := limits[i]
		for j, id := range indices[first : first+d] {
			if limit != takeAll && v.variate(uint64(id)) > limit {
				continue
			}
			if uint64(id) >= uint64(s.Sources) {
				return fmt.Errorf("sample: id %d of edge %d: nodes are 0 to %d", int64(id),
					first+int64(j), s.Sources-1)
			}
			if e >= end {
				return fmt.Errorf("sample: the topology changes while it is sampled")
			}
			slot, err := t.slot(uint64(id) + uint64(s.Base))
			if err != nil {
				return err
			}
			src[e] = uint32(slot)
			t.lower(slot, uint64(s.Frontier+e))
			e++
		}
	}
	if b.Index == b.Blocks-1 {
		start[s.NumDst] = e
		cuda.View[int64](s.Totals, 2)[0] = e
	}
	return nil
}
