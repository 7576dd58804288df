package graph

import (
	"context"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
)

// PageRankOptions are ReversePageRank's. Zero values mean the defaults.
type PageRankOptions struct {
	Damping    float64 // share of a node's score that goes on to its in-neighbours; 0.85, below 1
	Iterations int     // 20, as GIDS takes
	// Teleport has the nodes where walks begin, each as often as it stands there: a run's training
	// nodes. Empty: at every node.
	Teleport []NodeID
	Workers  int // goroutines; as many as there are cores
	// Progress, where given, is called after each iteration, by the caller's goroutine.
	Progress func(done, total int)
}

// pageRankOne is the score of all nodes together. Sums of shares stay below 2^63 however they are
// rounded.
const pageRankOne = 1 << 62

// ReversePageRank scores nodes by how often sampling meets them: PageRank along the edges against
// their direction, since that is how sampling walks. A node gives its score to its in-neighbours in
// equal parts, an edge that stands twice counts twice:
//
//	score(u) = (1 − d)·t(u) + d·Σ score(v) / indegree(v)   over the edges u → v
//
// (in a typed graph over the edges of all relations), with t the teleport's distribution, which is
// also the start. A score ends at a node without in-neighbours, as sampling does. With training
// nodes to start from it is the weighted reverse PageRank of "Graph Neural Network Training with
// Data Tiering" (Min et al., KDD 2022), by which GIDS fills its constant CPU buffer; from every
// node it is what GIDS's page_rank_node_list_gen.py computes, with the same defaults.
//
// Scores sum up to at most 1. They are sums of 64-bit integers, so they are the same to the bit for
// any number of workers. It takes 16 bytes a node beside the result, and an addition for each edge
// and iteration.
func ReversePageRank(ctx context.Context, t *Topology, o PageRankOptions) ([]float32, error) {
	if err := o.complete(t); err != nil || t.NumNodes == 0 {
		return nil, err
	}
	mem, err := hostmem.Alloc(2*8*t.NumNodes, "reverse PageRank")
	if err != nil {
		return nil, err
	}
	defer func() { _ = hostmem.Free(mem) }()
	both := hostmem.View[uint64](mem)
	r := pageRank{
		ctx: ctx, t: t, workers: o.Workers,
		cur: both[:t.NumNodes], next: both[t.NumNodes:],
		damp: uint64(math.Ldexp(o.Damping, 63)) << 1,
	}
	// The walks that start at a node; in the end the memory holds its score.
	starts := make([]uint32, t.NumNodes)
	walks := uint64(t.NumNodes)
	start := func(int64) uint64 { return pageRankOne / walks }
	if len(o.Teleport) > 0 {
		walks = uint64(len(o.Teleport))
		for _, v := range o.Teleport {
			starts[v]++
		}
		start = func(v int64) uint64 { return pageRankOne / walks * uint64(starts[v]) }
	}
	r.nodes(func(lo, hi int64) {
		for v := lo; v < hi; v++ {
			r.cur[v] = start(v)
		}
	})
	for i := range o.Iterations {
		if err := r.iterate(start); err != nil {
			return nil, err
		}
		if o.Progress != nil {
			o.Progress(i+1, o.Iterations)
		}
	}
	r.nodes(func(lo, hi int64) {
		for v := lo; v < hi; v++ {
			starts[v] = math.Float32bits(float32(r.cur[v]) / pageRankOne)
		}
	})
	return unsafe.Slice((*float32)(unsafe.Pointer(&starts[0])), len(starts)), nil
}

// complete fills in defaults and checks.
func (o *PageRankOptions) complete(t *Topology) error {
	if o.Damping == 0 {
		o.Damping = 0.85
	}
	if o.Iterations == 0 {
		o.Iterations = 20
	}
	if o.Workers == 0 {
		o.Workers = hostcpu.Count()
	}
	if !(o.Damping > 0 && o.Damping < 1) || o.Iterations < 0 || o.Workers < 0 {
		return errs.New(errs.Usage,
			"reverse PageRank with damping %v and %d iterations: give a damping between 0 and 1 and at least one iteration",
			o.Damping, o.Iterations)
	}
	for _, v := range o.Teleport {
		if uint64(v) >= uint64(t.NumNodes) {
			return errs.New(errs.Usage, "reverse PageRank from node %d: nodes are 0 to %d", v,
				t.NumNodes-1)
		}
	}
	return nil
}

// iterate computes the next scores; start is a node's share of the start.
func (r *pageRank) iterate(start func(v int64) uint64) error {
	switch {
	case r.t.OnStorage():
		if err := r.giveStored(); err != nil {
			return err
		}
	case r.t.Schema != nil:
		r.giveRelations()
	case r.t.Wide():
		give(r, r.t.Indices64)
	default:
		give(r, r.t.Indices32)
	}
	keep := -r.damp // 1 - d
	r.nodes(func(lo, hi int64) {
		for v := lo; v < hi; v++ {
			got, _ := bits.Mul64(r.next[v], r.damp)
			own, _ := bits.Mul64(start(v), keep)
			r.cur[v], r.next[v] = got+own, 0
		}
	})
	if r.ctx.Err() != nil {
		return errs.New(errs.Interrupted, "reverse PageRank: %w", context.Cause(r.ctx))
	}
	return nil
}

type pageRank struct {
	ctx       context.Context
	t         *Topology
	workers   int
	cur, next []uint64 // scores in parts of pageRankOne
	damp      uint64   // in parts of 2^64
}

// nodes runs f over all nodes in chunks; a worker that meets hubs takes fewer of them.
func (r *pageRank) nodes(f func(lo, hi int64)) {
	const chunk = 1 << 13
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(int64(r.workers), (r.t.NumNodes+chunk-1)/chunk) {
		wg.Go(func() {
			for r.ctx.Err() == nil {
				lo := next.Add(chunk) - chunk
				if lo >= r.t.NumNodes {
					return
				}
				f(lo, min(lo+chunk, r.t.NumNodes))
			}
		})
	}
	wg.Wait()
}

// give adds every node's shares to its in-neighbours' next scores. Integer additions may come in
// any order.
func give[T uint32 | int64](r *pageRank, indices []T) {
	r.nodes(func(lo, hi int64) {
		for v := lo; v < hi; v++ {
			from, to := r.t.Indptr[v], r.t.Indptr[v+1]
			if from == to || r.cur[v] == 0 {
				continue
			}
			giveShare(r, r.next, indices[from:to], r.cur[v]/uint64(to-from))
		}
	})
}

func giveShare[T uint32 | int64](r *pageRank, next []uint64, ids []T, share uint64) {
	if r.workers == 1 {
		for _, u := range ids {
			next[u] += share
		}
		return
	}
	for _, u := range ids {
		atomic.AddUint64(&next[u], share)
	}
}

// giveRelations is give over the relations of a typed graph: a node's parts are equal over all.
func (r *pageRank) giveRelations() {
	s := r.t.Schema
	r.nodes(func(lo, hi int64) {
		for v := lo; v < hi; v++ {
			d, local := s.nodeOf(v)
			degree := r.t.inDegree(v)
			if degree == 0 || r.cur[v] == 0 {
				continue
			}
			share := r.cur[v] / uint64(degree)
			for i, x := range r.t.Relations {
				if s.Relations[i].Dst != d {
					continue
				}
				next, from, to := r.next[s.First(s.Relations[i].Src):], x.Indptr[local],
					x.Indptr[local+1]
				if x.Wide() {
					giveShare(r, next, x.Indices64[from:to], share)
				} else {
					giveShare(r, next, x.Indices32[from:to], share)
				}
			}
		}
	})
}

// giveStored is give over a topology that is read from storage.
func (r *pageRank) giveStored() error {
	s := r.t.Schema
	if s == nil {
		return r.giveScanned(r.t, 0, r.next)
	}
	for i, x := range r.t.Relations {
		rel := &s.Relations[i]
		if err := r.giveScanned(x, s.First(rel.Dst), r.next[s.First(rel.Src):]); err != nil {
			return err
		}
	}
	return nil
}

// giveScanned gives along the lists of t, whose node 0 is the graph's node base, front to back:
// pieces of the edges begin and end anywhere.
func (r *pageRank) giveScanned(t *Topology, base int64, next []uint64) error {
	return t.Scan(r.ctx, func(first int64, ids []uint32) error {
		r.split(int64(len(ids)), func(lo, hi int64) {
			// The first node whose list ends behind the edge.
			v, _ := slices.BinarySearch(t.Indptr, first+lo+1)
			for v--; lo < hi; v++ {
				end := min(t.Indptr[v+1]-first, hi)
				if end <= lo {
					continue
				}
				node := base + int64(v)
				if share := r.cur[node] / uint64(r.t.InDegree(node)); share > 0 {
					for _, u := range ids[lo:end] {
						atomic.AddUint64(&next[u], share)
					}
				}
				lo = end
			}
		})
		return nil
	})
}

// split runs f over parts of [0, n), one a worker where they are worth it.
func (r *pageRank) split(n int64, f func(lo, hi int64)) {
	parts := min(int64(r.workers), n>>12+1)
	var wg sync.WaitGroup
	for i := range parts {
		wg.Go(func() { f(n*i/parts, n*(i+1)/parts) })
	}
	wg.Wait()
}

// OutDegrees counts the edges that leave each node: in how many in-neighbour lists it stands.
// Counts stop a little below 2^32. It reads the lists once; workers 0 means as many goroutines as
// there are cores.
func OutDegrees(ctx context.Context, t *Topology, workers int) ([]uint32, error) {
	if workers <= 0 {
		workers = hostcpu.Count()
	}
	return outDegrees(ctx, t, make([]uint32, t.NumNodes), workers)
}

// outDegrees adds t's to those of its sources in out.
func outDegrees(ctx context.Context, t *Topology, out []uint32, workers int) ([]uint32, error) {
	for i, x := range t.Relations {
		if _, err := outDegrees(ctx, x, out[t.Schema.First(t.Schema.Relations[i].Src):],
			workers); err != nil {
			return nil, err
		}
	}
	if t.Schema != nil {
		return out, nil
	}
	r := pageRank{ctx: ctx, t: t, workers: workers}
	if t.OnStorage() {
		return out, t.Scan(ctx, func(_ int64, ids []uint32) error {
			r.split(int64(len(ids)), func(lo, hi int64) { countIDs(out, ids[lo:hi]) })
			return nil
		})
	}
	r.nodes(func(lo, hi int64) {
		from, to := t.Indptr[lo], t.Indptr[hi]
		if t.Wide() {
			countIDs(out, t.Indices64[from:to])
		} else {
			countIDs(out, t.Indices32[from:to])
		}
	})
	if ctx.Err() != nil {
		return nil, errs.New(errs.Interrupted, "out-degrees: %w", context.Cause(ctx))
	}
	return out, nil
}

func countIDs[T uint32 | int64](out []uint32, ids []T) {
	// Whoever adds at the same time adds less than what is left above.
	const full = math.MaxUint32 - 1<<16
	for _, u := range ids {
		if p := &out[u]; atomic.LoadUint32(p) < full {
			atomic.AddUint32(p, 1)
		}
	}
}
