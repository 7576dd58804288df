package partition

import (
	"context"
	"errors"
	"math"
	"sync"

	"helios/graph"
	"helios/internal/hostmem"
	"helios/internal/work"
)

// none is the label of a node that has none.
const none = math.MaxUint32

// walker goes over the nodes in their order, reads the edges front to back once a walk, and gives
// each node a label by its neighbours' labels: in a walk over clusters the cluster, in one over
// parts the part. A node sees what all others have at that moment, as if one thread did it all:
// threads only look labels up beforehand.
//
// The lists hold in-neighbours. Of its out-neighbours a node knows a vote: each casts its label for
// its in-neighbours as it gets it, and a node keeps the label that has the majority and by how much
// (Boyer and Moore), 8 bytes, from one of its turns to the next. That is less than a list of them
// would tell, and takes no second copy of the edges.
type walker struct {
	t       *graph.Topology
	threads int
	report  work.Progress
	passes  int // so far

	label []uint32 // by node
	votes []uint64 // by node: the label, and by how much << 32
	count []uint32 // by label: neighbours of the node at hand
	met   []uint32 // labels with a count

	limit int      // ids at a time
	ids   []uint32 // read and not dealt with
	seen  []uint32 // their labels
	from  int64    // the first one's edge
	next  int64    // the first node that has no label of this walk
	// long tells that the first list is longer than limit and has been dealt with in part. Its node
	// has no vote: it is an out-neighbour of so many nodes that it says little about any.
	long bool
	mem  [][]byte
}

// idsAtATime bounds the lists that are looked at together: 8 MiB with their labels.
const idsAtATime = 1 << 20

// newWalker makes a walker for labels below the number of nodes.
func newWalker(t *graph.Topology, o *Options, label []uint32) (*walker, error) {
	w := &walker{t: t, threads: o.Threads, report: o.Progress, label: label, limit: idsAtATime}
	for _, a := range []struct {
		to    any
		bytes int64
	}{{&w.votes, 8 * t.NumNodes}, {&w.count, 4 * t.NumNodes}, {&w.ids, 4 * idsAtATime},
		{&w.seen, 4 * idsAtATime}} {
		mem, err := hostmem.Alloc(a.bytes, "labels and votes of a partition")
		if err != nil {
			return nil, errors.Join(err, w.close())
		}
		w.mem = append(w.mem, mem)
		switch to := a.to.(type) {
		case *[]uint64:
			*to = hostmem.View[uint64](mem)
		case *[]uint32:
			*to = hostmem.View[uint32](mem)
		}
	}
	return w, nil
}

func (w *walker) close() error {
	var all []error
	for _, m := range w.mem {
		all = append(all, hostmem.Free(m))
	}
	w.mem = nil
	return errors.Join(all...)
}

// walk gives each node the label that place returns. It finds the neighbours' labels in w.met and
// w.count, and the node's own of before in w.label.
func (w *walker) walk(ctx context.Context, stage string, place func(v int64) uint32) error {
	w.ids, w.from, w.next, w.long = w.ids[:0], 0, 0, false
	err := w.t.Scan(ctx, func(first int64, ids []uint32) error {
		for len(ids) > 0 {
			n := min(len(ids), w.limit-len(w.ids))
			w.ids = append(w.ids, ids[:n]...)
			ids = ids[n:]
			if len(w.ids) == w.limit {
				w.deal(place)
				w.report.Report(stage, w.from, w.t.NumEdges)
			}
		}
		return nil
	})
	if err == nil {
		w.deal(place)
		w.passes++
	}
	return err
}

// deal deals with the whole lists among the ids, and with a part of one that is longer than all
// that there may be.
func (w *walker) deal(place func(v int64) uint32) {
	end := w.from + int64(len(w.ids))
	lo, hi := w.next, w.next
	for hi < w.t.NumNodes && w.t.Indptr[hi+1] <= end {
		hi++
	}
	w.look()
	from := 0
	for v := lo; v < hi; v++ {
		to := int(w.t.Indptr[v+1] - w.from)
		w.add(v, lo, from, to)
		w.addVote(v)
		w.label[v] = place(v)
		for _, l := range w.met {
			w.count[l] = 0
		}
		w.met, from = w.met[:0], to
	}
	w.vote(lo, hi)
	if lo < hi {
		w.long = false
	}
	if lo == hi && len(w.ids) == w.limit {
		w.add(lo, lo, 0, len(w.ids))
		from, w.long = len(w.ids), true
	}
	w.from += int64(from)
	w.ids, w.next = append(w.ids[:0], w.ids[from:]...), hi
}

// look finds the labels of all ids, on all threads: these are the jumps through memory.
func (w *walker) look() {
	n := len(w.ids)
	var wg sync.WaitGroup
	for i := range w.threads {
		wg.Go(func() {
			for k := n * i / w.threads; k < n*(i+1)/w.threads; k++ {
				w.seen[k] = w.label[w.ids[k]]
			}
		})
	}
	wg.Wait()
}

// add counts labels of in-neighbours of v, ids[from:to]. Those of nodes from lo on may have changed
// since look; what of a long list came before did not, as v itself has changed nothing yet.
func (w *walker) add(v, lo int64, from, to int) {
	for i, id := range w.ids[from:to] {
		u, l := int64(id), w.seen[from+i]
		if u == v {
			continue
		}
		if uint64(u-lo) < uint64(v-lo) {
			l = w.label[u]
		}
		w.weigh(l, 1)
	}
}

func (w *walker) weigh(label, by uint32) {
	if label == none || by == 0 {
		return
	}
	if w.count[label] == 0 {
		w.met = append(w.met, label)
	}
	w.count[label] += by
}

// addVote counts what v's out-neighbours have voted since its last turn.
func (w *walker) addVote(v int64) {
	x := w.votes[v]
	w.votes[v] = 0
	w.weigh(uint32(x), uint32(x>>32))
}

// forget drops all votes: the labels become others.
func (w *walker) forget() { clear(w.votes) }

// vote casts the labels of nodes lo to hi for their in-neighbours. Each thread has in-neighbours of
// its own, so that a node's votes come in the same order whatever the threads.
func (w *walker) vote(lo, hi int64) {
	n, threads := w.t.NumNodes, int64(w.threads)
	var wg sync.WaitGroup
	for i := range threads {
		first, end := n*i/threads, n*(i+1)/threads
		wg.Go(func() {
			from := int64(0)
			for v := lo; v < hi; v++ {
				to := w.t.Indptr[v+1] - w.from
				list, l := w.ids[from:to], uint64(w.label[v])
				from = to
				if w.long && v == lo {
					continue
				}
				for _, id := range list {
					u := int64(id)
					if u < first || u >= end || u == v {
						continue
					}
					switch x := w.votes[u]; {
					case x>>32 == 0:
						w.votes[u] = l | 1<<32
					case x&math.MaxUint32 == l:
						w.votes[u] = x + 1<<32
					default:
						w.votes[u] = x - 1<<32
					}
				}
			}
		})
	}
	wg.Wait()
}
