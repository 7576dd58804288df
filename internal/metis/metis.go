// Package metis opens the METIS library at run time, without cgo, and partitions graphs with it.
// It knows METIS 5 in both widths of idx_t: Debian's libmetis5 has 32 bits.
package metis

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"helios/internal/dl"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// names are looked for in the loader's places. METIS 4 has other calls, so no plain .so is taken
// before the one with the number.
var names = []string{"libmetis.so.5", "libmetis.so"}

// From metis.h of 5.1.0. The options that are set here have the same places in 5.2.
const (
	nOptions      = 40
	optionSeed    = 8
	optionUFactor = 16

	statusOK     = 1
	statusInput  = -2
	statusMemory = -3
)

// Library is an open METIS.
type Library struct {
	Path string // as it was asked for
	Wide bool   // idx_t has 64 bits, else 32

	setDefaults     func(options unsafe.Pointer) int32
	kway, recursive call
}

// call is one of METIS's ways to partition a graph.
type call func(nvtxs, ncon, xadj, adjncy, vwgt, vsize, adjwgt, nparts, tpwgts, ubvec, options,
	edgecut, part unsafe.Pointer) int32

// Open opens the library at path, or for "" one with a usual name. Where there is none the error
// has class Capability.
func Open(path string) (*Library, error) {
	if !dl.Have {
		return nil, errs.New(errs.Capability,
			"METIS: this build of heliosctl opens no libraries (-tags nocuda, or a platform without it); use a build without the tag, or another partitioner")
	}
	tried := []string{path}
	if path == "" {
		tried = names
	}
	var l *Library
	err := dl.First(tried, dl.Open, func(h uintptr, name string) (err error) {
		l, err = bind(h, name)
		return err
	})
	if err == nil {
		return l, nil
	}
	if path == "" {
		return nil, errs.New(errs.Capability,
			"METIS: no %s in the loader's places; install it (Debian: libmetis5), or use another partitioner (%w)",
			strings.Join(names, ", "), err)
	}
	return nil, errs.New(errs.Capability, "METIS: %w; name another library or partitioner",
		err)
}

func bind(h uintptr, name string) (*Library, error) {
	l := &Library{Path: name}
	err := dl.Bind(h, map[string]any{"METIS_SetDefaultOptions": &l.setDefaults,
		"METIS_PartGraphKway": &l.kway, "METIS_PartGraphRecursive": &l.recursive})
	if err != nil {
		return nil, fmt.Errorf("%s %w: it is no METIS 5", name, err)
	}
	if l.Wide, err = l.width(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return l, nil
}

// width tells the width of idx_t by how much of the options METIS sets: all of them to -1.
func (l *Library) width() (wide bool, err error) {
	// More than any version could write.
	mem, err := hostmem.Alloc(hostmem.PageBytes, "METIS options")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, hostmem.Free(mem)) }()
	if status := l.setDefaults(unsafe.Pointer(&mem[0])); status != statusOK {
		return false, fmt.Errorf("METIS_SetDefaultOptions returned %d", status)
	}
	set := 0
	for set < len(mem) && mem[set] == 0xff {
		set++
	}
	switch set {
	case nOptions * 4:
		return false, nil
	case nOptions * 8:
		return true, nil
	}
	return false, fmt.Errorf(
		"it sets %d bytes of options, METIS 5 sets %d or %d; install Debian's libmetis5", set,
		nOptions*4, nOptions*8)
}

// IDBytes is the width of METIS's numbers.
func (l *Library) IDBytes() int64 {
	if l.Wide {
		return 8
	}
	return 4
}

// Fits reports whether METIS can count so many nodes and entries of neighbour lists. Its error has
// class Capability.
func (l *Library) Fits(nodes, entries int64) error {
	if l.Wide || nodes < math.MaxInt32 && entries <= math.MaxInt32 {
		return nil
	}
	return errs.New(errs.Capability,
		"METIS: %s has 32-bit numbers (idx_t), which count up to %d; the graph has %d nodes and %d neighbours once its edges go both ways; use a METIS of 64-bit numbers or another partitioner",
		l.Path, math.MaxInt32, nodes, entries)
}

// Number is the type of METIS's numbers, as Library.Wide says.
type Number interface{ ~int32 | ~int64 }

// Graph is an undirected graph in METIS's form, in memory outside Go's heap: the neighbours of node
// v are Adj[Start[v]:Start[v+1]], without v and each once, and each edge stands in both lists.
// Start has an entry more than there are nodes.
type Graph[T Number] struct{ Start, Adj []T }

// Options of a partition.
type Options struct {
	Parts int
	Seed  uint64 // METIS takes the lower 31 bits
	// Imbalance is the bound that METIS aims at, largest part / mean, in thousandths above 1. It
	// may miss it.
	Imbalance int
}

// Partition fills part, a number for each node and outside Go's heap, by METIS_PartGraphKway or
// METIS_PartGraphRecursive, whichever cuts fewer edges, with the library's own defaults otherwise:
// edge cut, one cut, 10 iterations of refinement. METIS can't be stopped: where ctx ends first,
// Partition returns, done is called once METIS has ended, and g and part are METIS's until then.
// Otherwise done is called before Partition returns.
func Partition[T Number](ctx context.Context, l *Library, g Graph[T], o Options, part []T,
	done func()) error {
	ended := make(chan error, 1)
	go func() {
		err := partition(ctx, l, g, o, part)
		done()
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func partition[T Number](ctx context.Context, l *Library, g Graph[T], o Options, part []T) error {
	cut, err := by(l, l.kway, g, o, part)
	// Bisecting beyond a few nodes a part leaves parts empty, and METIS says so on stdout.
	if err != nil || ctx.Err() != nil || len(part)/leastBisected < o.Parts {
		return err
	}
	mem, err := hostmem.Alloc(int64(len(part))*l.IDBytes(), "parts by METIS")
	if err != nil {
		return err
	}
	other := hostmem.View[T](mem)[:len(part)]
	// An error of the second way leaves the parts of the first.
	if less, err := by(l, l.recursive, g, o, other); err == nil && less < cut {
		bound := len(part)*(1000+o.Imbalance)/(1000*o.Parts) + 1
		if larger := largest(other, o.Parts); larger <= max(bound, largest(part, o.Parts)) {
			copy(part, other)
		}
	}
	return hostmem.Free(mem)
}

// leastBisected is the least mean size of parts by bisection.
const leastBisected = 8

// largest counts the nodes of the largest part. A number that is no part makes it all of them.
func largest[T Number](part []T, parts int) int {
	sizes := make([]int, parts)
	for _, p := range part {
		if p < 0 || int64(p) >= int64(parts) {
			return len(part)
		}
		sizes[p]++
	}
	return slices.Max(sizes)
}

// by partitions a graph in one way, and returns how many edges are cut.
func by[T Number](l *Library, way call, g Graph[T], o Options, part []T) (cuts T, err error) {
	var x T
	if int64(unsafe.Sizeof(x)) != l.IDBytes() {
		return 0, fmt.Errorf("METIS: numbers of %d bytes for a library of %d", unsafe.Sizeof(x),
			l.IDBytes())
	}
	if len(g.Start) != len(part)+1 || len(part) == 0 {
		return 0, fmt.Errorf("METIS: %d offsets for %d nodes", len(g.Start), len(part))
	}
	mem, err := hostmem.Alloc((nOptions+4)*8, "METIS options")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, hostmem.Free(mem)) }()
	v := hostmem.View[T](mem)
	options, nodes, weights, parts, cut := v[:nOptions], &v[nOptions], &v[nOptions+1],
		&v[nOptions+2], &v[nOptions+3]
	if status := l.setDefaults(unsafe.Pointer(&options[0])); status != statusOK {
		return 0, fmt.Errorf("METIS_SetDefaultOptions returned %d", status)
	}
	options[optionSeed] = T(o.Seed & math.MaxInt32)
	options[optionUFactor] = T(o.Imbalance)
	*nodes, *weights, *parts = T(len(part)), 1, T(o.Parts)
	adj := g.Adj
	if len(adj) == 0 {
		adj = options // no list has an entry that METIS could read
	}
	keep, err := keepSignals()
	if err != nil {
		return 0, err
	}
	// Signal handlers that METIS sets jump back into its own thread.
	runtime.LockOSThread()
	status := way(unsafe.Pointer(nodes), unsafe.Pointer(weights), unsafe.Pointer(&g.Start[0]),
		unsafe.Pointer(&adj[0]), nil, nil, nil, unsafe.Pointer(parts), nil, nil,
		unsafe.Pointer(&options[0]), unsafe.Pointer(cut), unsafe.Pointer(&part[0]))
	runtime.UnlockOSThread()
	if err := keep.restore(); err != nil {
		return 0, err
	}
	switch status {
	case statusOK:
		return *cut, nil
	case statusMemory:
		return 0, errs.New(errs.Capability,
			"METIS: out of memory for %d nodes with %d neighbours; free memory or use another partitioner",
			len(part), len(g.Adj))
	case statusInput:
		return 0, fmt.Errorf("METIS: refuses %d nodes with %d neighbours in %d parts", len(part),
			len(g.Adj), o.Parts)
	}
	return 0, fmt.Errorf("METIS returned %d", status)
}
