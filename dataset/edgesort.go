package dataset

import (
	"bufio"
	"container/heap"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"path/filepath"

	"helios/dataset/npy"
	"helios/internal/hostmem"
)

// DefaultMemory is the memory that an import's external sort may use.
const DefaultMemory = 256 << 20

// edge points from src to dst: dst aggregates src.
type edge struct{ dst, src uint64 }

func (a edge) less(b edge) bool { return a.dst < b.dst || a.dst == b.dst && a.src < b.src }

const (
	edgeBytes = 16
	maxRuns   = 64 // runs merged at once
	minChunk  = 1 << 10
)

// edgeSorter orders any number of edges by (dst, src) in bounded memory: chunks are radix
// sorted and spilled as runs, and runs are merged, in several passes when there are many.
type edgeSorter struct {
	s       *staging
	chunk   []edge // both off Go's heap, so that the collector does not double them
	scratch []edge
	mem     []byte // behind both; pages that are not reached are never there
	max     int    // edges in a chunk
	memory  int64  // budget
	maxID   uint64
	runs    []run
	seq     int
	total   int64
}

// run is a sorted spill file. Ids are stored in 4 bytes each where they fit.
type run struct {
	path string
	n    int64
	wide bool
}

func newEdgeSorter(s *staging, memory int64) *edgeSorter {
	if memory <= 0 {
		memory = DefaultMemory
		if free, err := hostmem.AvailableBytes(); err == nil { // the order does not depend on it
			memory = min(memory, free/2)
		}
	}
	// Radix sort needs a second buffer of the same size.
	return &edgeSorter{s: s, memory: memory, max: max(int(memory/(2*edgeBytes)), minChunk)}
}

func (e *edgeSorter) add(src, dst int64) error {
	if len(e.chunk) == e.max {
		if err := e.spill(); err != nil {
			return err
		}
	}
	if e.mem == nil {
		mem, err := hostmem.Alloc(int64(e.max)*2*edgeBytes, "edge sort")
		if err != nil {
			return fmt.Errorf("memory for sorting edges: %w", err)
		}
		e.mem = mem
		both := hostmem.View[edge](mem)
		e.chunk, e.scratch = both[:0:e.max], both[e.max:2*e.max]
	}
	e.chunk = append(e.chunk, edge{uint64(dst), uint64(src)})
	e.maxID = max(e.maxID, uint64(src), uint64(dst))
	e.total++
	return nil
}

// sortChunk is a least-significant-digit radix sort over only the bits that ids have.
func (e *edgeSorter) sortChunk() {
	a, b := e.chunk, e.scratch[:len(e.chunk)]
	const digit = 11
	var count [1 << digit]int
	for key := range 2 { // src first, then dst
		for shift := 0; shift < bits.Len64(e.maxID); shift += digit {
			clear(count[:])
			for i := range a {
				v := a[i].src
				if key == 1 {
					v = a[i].dst
				}
				count[v>>shift&(1<<digit-1)]++
			}
			sum := 0
			for i, c := range count {
				count[i] = sum
				sum += c
			}
			for i := range a {
				v := a[i].src
				if key == 1 {
					v = a[i].dst
				}
				k := v >> shift & (1<<digit - 1)
				b[count[k]] = a[i]
				count[k]++
			}
			a, b = b, a
		}
	}
	if len(a) > 0 && &a[0] != &e.chunk[0] {
		copy(e.chunk, a)
	}
}

// free gives the memory back; the sorter is then only good for merging. It may be called again.
func (e *edgeSorter) free() error {
	mem := e.mem
	e.mem, e.chunk, e.scratch = nil, nil, nil
	if mem == nil {
		return nil
	}
	return hostmem.Free(mem)
}

func (e *edgeSorter) spill() error {
	e.sortChunk()
	w, err := e.newRun(e.maxID > math.MaxUint32)
	if err != nil {
		return err
	}
	for _, x := range e.chunk {
		if err := w.put(x); err != nil {
			return errors.Join(err, w.f.discard())
		}
	}
	e.chunk = e.chunk[:0]
	return e.endRun(w)
}

type runWriter struct {
	run
	f *outFile
}

func (e *edgeSorter) newRun(wide bool) (*runWriter, error) {
	e.seq++
	f, err := e.s.create(fmt.Sprintf("sort-%d.tmp", e.seq))
	if err != nil {
		return nil, err
	}
	return &runWriter{run{path: filepath.Join(e.s.dir, filepath.Base(f.path)), wide: wide}, f}, nil
}

func (w *runWriter) put(x edge) error {
	var b [edgeBytes]byte
	n := edgeBytes
	if w.wide {
		binary.LittleEndian.PutUint64(b[:], x.dst)
		binary.LittleEndian.PutUint64(b[8:], x.src)
	} else {
		binary.LittleEndian.PutUint32(b[:], uint32(x.dst))
		binary.LittleEndian.PutUint32(b[4:], uint32(x.src))
		n = edgeBytes / 2
	}
	w.n++
	_, err := w.f.Write(b[:n])
	return err
}

func (e *edgeSorter) endRun(w *runWriter) error {
	if err := w.f.bw.Flush(); err != nil {
		return errors.Join(err, w.f.discard())
	}
	if err := w.f.discard(); err != nil { // a spill file need not survive a crash: no fsync
		return err
	}
	e.runs = append(e.runs, w.run)
	return nil
}

// each calls fn with every edge in order, duplicates included, and removes the spill files.
func (e *edgeSorter) each(ctx context.Context, fn func(edge) error) error {
	if len(e.runs) == 0 {
		e.sortChunk()
		for i, x := range e.chunk {
			if i&0xffff == 0 && ctx.Err() != nil {
				return ctx.Err()
			}
			if err := fn(x); err != nil {
				return err
			}
		}
		return e.free()
	}
	if len(e.chunk) > 0 {
		if err := e.spill(); err != nil {
			return err
		}
	}
	if err := e.free(); err != nil { // readers of runs take its place
		return err
	}
	for len(e.runs) > maxRuns {
		group := e.runs[:maxRuns]
		e.runs = append([]run(nil), e.runs[maxRuns:]...)
		wide := false
		for _, r := range group {
			wide = wide || r.wide
		}
		w, err := e.newRun(wide)
		if err != nil {
			return err
		}
		if err := e.merge(ctx, group, w.put); err != nil {
			return errors.Join(err, w.f.discard())
		}
		if err := e.endRun(w); err != nil {
			return err
		}
	}
	return e.merge(ctx, e.runs, fn)
}

type runReader struct {
	run
	head edge
	left int64
	f    *os.File
	br   *bufio.Reader
}

func (r *runReader) next() error {
	var b [edgeBytes]byte
	n := edgeBytes
	if !r.wide {
		n /= 2
	}
	if _, err := io.ReadFull(r.br, b[:n]); err != nil {
		return fmt.Errorf("read back %s: %w", r.path, err)
	}
	if r.wide {
		r.head = edge{binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[8:])}
	} else {
		r.head = edge{uint64(binary.LittleEndian.Uint32(b[:])), uint64(binary.LittleEndian.Uint32(b[4:]))}
	}
	r.left--
	return nil
}

type runHeap []*runReader

func (h runHeap) Len() int           { return len(h) }
func (h runHeap) Less(i, j int) bool { return h[i].head.less(h[j].head) }
func (h runHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *runHeap) Push(x any)        { *h = append(*h, x.(*runReader)) }
func (h *runHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

func (e *edgeSorter) merge(ctx context.Context, runs []run, fn func(edge) error) (err error) {
	var h runHeap
	var open []*runReader
	defer func() {
		for _, r := range open {
			err = errors.Join(err, r.f.Close(), os.Remove(r.path))
		}
	}()
	buf := int(min(max(e.memory/int64(len(runs)), 4096), 1<<20))
	for _, r := range runs {
		f, err := os.Open(r.path)
		if err != nil {
			return err
		}
		rr := &runReader{run: r, left: r.n, f: f, br: bufio.NewReaderSize(f, buf)}
		open = append(open, rr)
		if err := rr.next(); err != nil { // runs are never empty
			return err
		}
		h = append(h, rr)
	}
	heap.Init(&h)
	for n := 0; len(h) > 0; n++ {
		if n&0xffff == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		r := h[0]
		if err := fn(r.head); err != nil {
			return err
		}
		if r.left == 0 {
			heap.Pop(&h)
			continue
		}
		if err := r.next(); err != nil {
			return err
		}
		heap.Fix(&h, 0)
	}
	return nil
}

// cscWriter writes indptr.npy and indices.npy from edges that come in (dst, src) order.
type cscWriter struct {
	indptr, indices *arrayOut
	nodes           int64
	wide            bool
	next            int64 // nodes whose start is written
	edges           int64
	idx             []byte
}

// wideFrom is the number of nodes from which ids need 64 bits; a variable for tests.
var wideFrom int64 = 1 << 32

func (s *staging) csc(nodes int64) (*cscWriter, error) {
	w := &cscWriter{nodes: nodes, wide: nodes > wideFrom}
	dt := npy.Uint32
	if w.wide {
		dt = npy.Int64
	}
	var err error
	if w.indptr, err = s.array("indptr", npy.Int64, 0); err != nil {
		return nil, err
	}
	if w.indices, err = s.array("indices", dt, 0); err != nil {
		return nil, errors.Join(err, w.indptr.discard())
	}
	return w, nil
}

func (w *cscWriter) put(x edge) error {
	if err := w.startUpTo(int64(x.dst)); err != nil {
		return err
	}
	if w.wide {
		w.idx = binary.LittleEndian.AppendUint64(w.idx, x.src)
	} else {
		w.idx = binary.LittleEndian.AppendUint32(w.idx, uint32(x.src))
	}
	w.edges++
	if len(w.idx) >= 64<<10 {
		return w.flush()
	}
	return nil
}

func (w *cscWriter) flush() error {
	_, err := w.indices.Write(w.idx)
	w.idx = w.idx[:0]
	return err
}

// startUpTo writes the offsets of all nodes up to v.
func (w *cscWriter) startUpTo(v int64) error {
	var b [8]byte
	for ; w.next <= v; w.next++ {
		binary.LittleEndian.PutUint64(b[:], uint64(w.edges))
		if _, err := w.indptr.Write(b[:]); err != nil {
			return err
		}
	}
	return nil
}

func (w *cscWriter) close() error {
	err := w.startUpTo(w.nodes)
	if err == nil {
		err = w.flush()
	}
	if err != nil {
		return errors.Join(err, w.discard())
	}
	return errors.Join(w.indptr.close(), w.indices.close())
}

func (w *cscWriter) discard() error { return errors.Join(w.indptr.discard(), w.indices.discard()) }

// edgeRules say what becomes of the edges of an import.
type edgeRules struct {
	dedup, noSelf bool
}

type edgeCounts struct{ stored, duplicates, self int64 }

// writeCSC drains the sorter into the topology files.
func (s *staging) writeCSC(ctx context.Context, e *edgeSorter, nodes int64, rules edgeRules, p Progress) (edgeCounts, error) {
	var c edgeCounts
	w, err := s.csc(nodes)
	if err != nil {
		return c, err
	}
	var last edge
	var seen int64
	err = e.each(ctx, func(x edge) error {
		if seen&0xfffff == 0 {
			p.report("topology", seen, e.total)
		}
		seen++
		switch {
		case rules.noSelf && x.src == x.dst:
			c.self++
			return nil
		case rules.dedup && c.stored > 0 && x == last:
			c.duplicates++
			return nil
		}
		last = x
		c.stored++
		return w.put(x)
	})
	if err != nil {
		return c, errors.Join(err, w.discard())
	}
	p.report("topology", seen, e.total)
	return c, w.close()
}
