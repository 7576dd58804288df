package partition

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"

	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/metis"
	"helios/internal/units"
)

// METIS is the multilevel partitioner of Karypis and Kumar, k-way or by recursive bisection,
// for graphs that fit into memory several times.
const METIS = "metis"

var metisMethod = method{name: METIS,
	summary: "METIS through its library, for graphs that fit into memory several times",
	run:     runMETIS}

// oneMETIS is held while METIS works: the signal handlers that it sets are the process's.
var oneMETIS sync.Mutex

func runMETIS(ctx context.Context, t *graph.Topology, o *Options, of []uint32, info *Info) error {
	lib, err := metis.Open(o.Library)
	if err != nil {
		return err
	}
	if err := lib.Fits(t.NumNodes, 0); err != nil {
		return err
	}
	need := metisNeeds(t.NumNodes, t.NumEdges, lib.IDBytes())
	if free, err := hostmem.AvailableBytes(); err == nil && need > free {
		return errs.New(errs.Capability,
			"METIS: a graph of %d nodes and %d edges takes it about %s of memory, %s are free; take %v %s, which needs none for edges",
			t.NumNodes, t.NumEdges, units.FormatBytes(need), units.FormatBytes(free),
			errs.Key("method"), Stream)
	}
	info.Method, info.Library = METIS, lib.Path
	info.EdgePasses += 2
	if lib.Wide {
		return callMETIS[int64](ctx, lib, t, o, of)
	}
	return callMETIS[int32](ctx, lib, t, o, of)
}

// metisNeeds is about the memory of callMETIS: the undirected graph, and METIS's own weights,
// coarser graphs and queues: the most that was measured with METIS 5.1 (5 to 15 times the
// undirected edges).
func metisNeeds(nodes, edges, idBytes int64) int64 {
	return 2*edges*idBytes*16 + nodes*(8+idBytes*21)
}

func callMETIS[T metis.Number](ctx context.Context, lib *metis.Library, t *graph.Topology,
	o *Options, of []uint32) error {
	u, err := undirected[T](ctx, lib, t)
	if err != nil {
		return err
	}
	mem, err := hostmem.Alloc(t.NumNodes*lib.IDBytes(), "parts by METIS")
	if err != nil {
		return errors.Join(err, u.free())
	}
	part := hostmem.View[T](mem)
	if o.Parts == 1 || len(u.adj) == 0 { // METIS 5.1 divides by zero
		inRanges(of, o.Parts)
		return errors.Join(u.free(), hostmem.Free(mem))
	}
	// METIS takes 1 as the least.
	imbalance := max(1, int(math.Round((o.Balance-1)*1000)))
	o.Progress.Report("METIS", 0, 0)
	// The graph and the parts are METIS's until it has ended, also where nobody waits any more.
	oneMETIS.Lock()
	ended := make(chan error, 1)
	err = metis.Partition(ctx, lib, metis.Graph[T]{Start: u.start, Adj: u.adj},
		metis.Options{Parts: o.Parts, Seed: o.Seed, Imbalance: imbalance}, part, func() {
			oneMETIS.Unlock()
			ended <- u.free()
		})
	if ctx.Err() != nil && err != nil {
		go func() {
			<-ended
			_ = hostmem.Free(mem)
		}()
		return errs.New(errs.Interrupted, "METIS: %w", err)
	}
	if err = errors.Join(err, <-ended); err == nil {
		for v, p := range part {
			if p < 0 || int64(p) >= int64(o.Parts) { // a library is not to be believed
				err = errs.New(errs.Failed, "METIS gave node %d part %d of %d; use %v %s", v,
					int64(p), o.Parts, errs.Key("method"), Stream)
				break
			}
			of[v] = uint32(p)
		}
	}
	return errors.Join(err, hostmem.Free(mem))
}

// undirectedGraph is a graph for METIS.
type undirectedGraph[T metis.Number] struct {
	start, adj []T
	mem        [2][]byte
}

func (u *undirectedGraph[T]) free() error {
	return errors.Join(hostmem.Free(u.mem[0]), hostmem.Free(u.mem[1]))
}

// undirected puts each edge into the lists of both its ends, once, without those from a node to
// itself. It reads the edges twice.
func undirected[T metis.Number](ctx context.Context, lib *metis.Library, t *graph.Topology,
) (u *undirectedGraph[T], err error) {
	n := t.NumNodes
	mem, err := hostmem.Alloc((n+1)*8, "offsets of an undirected graph")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, hostmem.Free(mem)) }()
	next := hostmem.View[int64](mem) // of the next entry of v in at[v+1], in the end its end
	each := func(f func(u, v int64)) error {
		v := int64(0)
		return t.Scan(ctx, func(first int64, ids []uint32) error {
			for i, id := range ids {
				for t.Indptr[v+1] <= first+int64(i) {
					v++
				}
				if int64(id) != v {
					f(int64(id), v)
				}
			}
			return nil
		})
	}
	if err := each(func(a, b int64) {
		next[a]++
		next[b]++
	}); err != nil {
		return nil, err
	}
	entries := int64(0)
	for v := range n + 1 {
		next[v], entries = entries, entries+next[v]
	}
	u = &undirectedGraph[T]{}
	if u.mem[0], err = hostmem.Alloc((n+1)*lib.IDBytes(), "undirected graph"); err != nil {
		return nil, err
	}
	if u.mem[1], err = hostmem.Alloc(entries*lib.IDBytes(), "undirected graph"); err != nil {
		return nil, errors.Join(err, hostmem.Free(u.mem[0]))
	}
	u.start, u.adj = hostmem.View[T](u.mem[0]), hostmem.View[T](u.mem[1])
	if err := each(func(a, b int64) {
		u.adj[next[a]], u.adj[next[b]] = T(b), T(a)
		next[a]++
		next[b]++
	}); err != nil {
		return nil, errors.Join(err, u.free())
	}
	from, to := int64(0), int64(0)
	for v := range n {
		list := u.adj[from:next[v]]
		from = next[v]
		slices.Sort(list)
		list = slices.Compact(list)
		u.start[v] = T(to)
		to += int64(copy(u.adj[to:], list))
	}
	if err := lib.Fits(n, to); err != nil {
		return nil, errors.Join(err, u.free())
	}
	u.start[n] = T(to)
	u.adj = u.adj[:to]
	return u, nil
}
