// Package graph holds the topology of a graph in compressed sparse column form and samples
// mini-batches from it on the compute device.
//
// Sampling is a pure function of (seed, epoch, batch, hop, node), and the frontier is numbered in
// the order in which nodes first appear, so that a mini-batch does not depend on the device, on the
// number of its workers or on what else is in flight.
package graph

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
)

// NodeID numbers the nodes of a graph from 0.
type NodeID = int64

// Topology is a directed graph in compressed sparse column (CSC) form: the in-neighbours of node v,
// from which v receives messages, are indices[Indptr[v]:Indptr[v+1]]. Indptr has NumNodes+1
// entries. Exactly one of Indices32 and Indices64 is used, with NumEdges entries; 32-bit ids halve
// the memory and serve graphs of up to 2^32 nodes. Repeated edges are allowed and count as often as
// they stand.
//
// The slices of a topology that is attached to a device must not live on Go's heap (Alloc, or a
// file mapping).
type Topology struct {
	NumNodes, NumEdges int64
	Indptr             []int64
	Indices32          []uint32
	Indices64          []int64
	// Sources is the number of nodes that ids can name, of a relation; 0: NumNodes.
	Sources int64
	// Of a typed graph (NewTyped), which has no lists but those of its relations.
	Schema    *Schema
	Relations []*Topology

	mem []byte   // backing memory of Alloc
	far *storage // of a topology on storage (OpenOutOfCore), which has no indices
}

const pageBytes = 4096

// Alloc makes a topology of zeros whose slices live outside Go's heap, to be filled by the
// caller. Close gives the memory back.
func Alloc(nodes, edges int64, wide bool) (*Topology, error) {
	if nodes < 0 || edges < 0 || nodes > math.MaxInt64/32 || edges > math.MaxInt64/32 {
		return nil, errs.New(errs.Usage,
			"topology of %d nodes and %d edges: counts are out of range", nodes, edges)
	}
	width := int64(4)
	if wide {
		width = 8
	}
	// Ids start on a page of their own: a GPU maps whole pages, for each registration its own.
	offsets := ((nodes+1)*8 + pageBytes - 1) &^ (pageBytes - 1)
	mem, err := hostmem.Alloc(offsets+edges*width, "topology")
	if err != nil {
		return nil, fmt.Errorf("topology of %d nodes and %d edges: %w", nodes, edges, err)
	}
	t := &Topology{NumNodes: nodes, NumEdges: edges, mem: mem}
	t.Indptr = hostmem.View[int64](mem[: (nodes+1)*8 : (nodes+1)*8])
	ids := mem[offsets:]
	switch {
	case wide && edges > 0:
		t.Indices64 = hostmem.View[int64](ids)
	case wide:
		t.Indices64 = []int64{}
	case edges > 0:
		t.Indices32 = hostmem.View[uint32](ids)
	}
	return t, nil
}

// Close frees the memory of a topology made by Alloc, FromEdges or OpenOutOfCore; the slices must
// not be used any more. It does nothing for others.
func (t *Topology) Close() error {
	err := t.closeRelations()
	if t.far != nil {
		err, t.far = errors.Join(err, t.far.close()), nil
	}
	mem := t.mem
	if mem == nil {
		return err
	}
	t.mem, t.Indptr, t.Indices32, t.Indices64 = nil, nil, nil, nil
	return errors.Join(err, hostmem.Free(mem))
}

// Wide reports whether ids are stored in 64 bits.
func (t *Topology) Wide() bool { return t.Indices64 != nil }

// InDegree is the number of in-neighbours of v.
func (t *Topology) InDegree(v NodeID) int64 {
	if t.Schema != nil {
		return t.inDegree(v)
	}
	return t.Indptr[v+1] - t.Indptr[v]
}

// Neighbor is the i-th in-neighbour of v in CSC order.
func (t *Topology) Neighbor(v NodeID, i int64) NodeID {
	e := t.Indptr[v] + i
	if t.Indices64 != nil {
		return t.Indices64[e]
	}
	return NodeID(t.Indices32[e])
}

// Bytes is the memory that offsets and ids take, and of a topology on storage what it holds to read
// them.
func (t *Topology) Bytes() int64 {
	far := int64(0)
	if t.far != nil {
		far = t.far.bytes()
	}
	for _, r := range t.Relations {
		far += r.Bytes()
	}
	return far + int64(len(t.Indptr))*8 + int64(len(t.Indices32))*4 + int64(len(t.Indices64))*8
}

// Validate checks that the lengths agree, that the offsets start at 0, never fall and end at
// NumEdges, and that every id is a node. Its error (class Usage: the input is wrong) names the
// first bad position. It reads everything once, on all cores.
func (t *Topology) Validate() error {
	if t.Schema != nil {
		return t.validateRelations()
	}
	if err := t.ValidateOffsets(); err != nil {
		return err
	}
	return t.validateIDs()
}

func (t *Topology) invalid(format string, a ...any) error {
	return errs.New(errs.Usage, "topology: "+format+"; import or generate the dataset again", a...)
}

// ValidateOffsets is Validate without a look at the ids, for who has looked at them.
func (t *Topology) ValidateOffsets() error {
	bad := t.invalid
	if t.NumNodes < 0 || t.NumEdges < 0 {
		return bad("%d nodes and %d edges: counts must not be negative", t.NumNodes, t.NumEdges)
	}
	if int64(len(t.Indptr)) != t.NumNodes+1 {
		return bad("indptr has %d entries, %d nodes need %d", len(t.Indptr), t.NumNodes,
			t.NumNodes+1)
	}
	if t.Indices32 != nil && t.Indices64 != nil {
		return bad("both 32-bit and 64-bit indices are set")
	}
	if n := int64(len(t.Indices32) + len(t.Indices64)); n != t.NumEdges {
		return bad("indices has %d entries, expected %d edges", n, t.NumEdges)
	}
	if t.Indices64 == nil && t.sources() > 1<<32 {
		return bad("%d nodes do not fit in 32-bit indices", t.sources())
	}
	if t.Indptr[0] != 0 {
		return bad("indptr[0] is %d, must be 0", t.Indptr[0])
	}
	if end := t.Indptr[t.NumNodes]; end != t.NumEdges {
		return bad("indptr[%d] is %d, must be the number of edges %d", t.NumNodes, end, t.NumEdges)
	}
	if i := firstBad(t.NumNodes, func(lo, hi int64) int64 {
		for i := lo; i < hi; i++ {
			// Below 2^32 because in-degrees travel as uint32.
			if d := t.Indptr[i+1] - t.Indptr[i]; d < 0 || d > math.MaxUint32 {
				return i
			}
		}
		return -1
	}); i >= 0 {
		return bad(
			"indptr[%d] is %d after indptr[%d] = %d: offsets must not fall, nor rise by 2^32",
			i+1, t.Indptr[i+1], i, t.Indptr[i])
	}
	return nil
}

func (t *Topology) validateIDs() error {
	e := firstBad(t.NumEdges, func(lo, hi int64) int64 {
		if t.Indices64 != nil {
			for i, v := range t.Indices64[lo:hi] {
				if uint64(v) >= uint64(t.sources()) {
					return lo + int64(i)
				}
			}
			return -1
		}
		for i, v := range t.Indices32[lo:hi] {
			if int64(v) >= t.sources() {
				return lo + int64(i)
			}
		}
		return -1
	})
	if e >= 0 {
		id := int64(0)
		if t.Indices64 != nil {
			id = t.Indices64[e]
		} else {
			id = int64(t.Indices32[e])
		}
		v, _ := slices.BinarySearch(t.Indptr, e+1)
		return t.invalid("indices[%d] (an in-neighbour of node %d) is %d, nodes are 0 to %d", e,
			v-1, id, t.sources()-1)
	}
	return nil
}

// firstBad runs check over [0, n) in chunks on all cores; check returns the first bad position
// of its chunk or -1. The smallest one wins.
func firstBad(n int64, check func(lo, hi int64) int64) int64 {
	workers := int64(min(hostcpu.Count(), int(n>>16)+1))
	found := make([]int64, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { found[w] = check(n*w/workers, n*(w+1)/workers) })
	}
	wg.Wait()
	for _, f := range found {
		if f >= 0 {
			return f
		}
	}
	return -1
}

// FromEdges builds the CSC form of the edges src[i] → dst[i]; the in-neighbours of a node keep
// the order of the list. It is for graphs that fit in memory twice; wide asks for 64-bit ids.
// The result is outside Go's heap: Close it.
func FromEdges(nodes int64, src, dst []NodeID, wide bool) (*Topology, error) {
	if len(src) != len(dst) {
		return nil, errs.New(errs.Usage,
			"edge list: %d sources, %d destinations; give both ends of every edge", len(src),
			len(dst))
	}
	for i := range src {
		if uint64(src[i]) >= uint64(nodes) || uint64(dst[i]) >= uint64(nodes) {
			return nil, errs.New(errs.Usage,
				"edge %d is %d → %d, nodes are 0 to %d; correct the list or the number of nodes", i,
				src[i], dst[i], nodes-1)
		}
	}
	t, err := Alloc(nodes, int64(len(src)), wide)
	if err != nil {
		return nil, err
	}
	for _, v := range dst {
		t.Indptr[v+1]++
	}
	for v := range nodes {
		t.Indptr[v+1] += t.Indptr[v]
	}
	next := slices.Clone(t.Indptr[:nodes])
	for i, v := range dst {
		if wide {
			t.Indices64[next[v]] = src[i]
		} else {
			t.Indices32[next[v]] = uint32(src[i])
		}
		next[v]++
	}
	return t, nil
}

// bytesOf is the memory of a slice of numbers.
func bytesOf[T int64 | uint32](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), len(s)*int(unsafe.Sizeof(s[0])))
}

func (t *Topology) String() string {
	bits := 32
	if t.Wide() {
		bits = 64
	}
	return fmt.Sprintf("%d nodes, %d edges, %d-bit ids", t.NumNodes, t.NumEdges, bits)
}
