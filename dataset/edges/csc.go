package edges

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"helios/dataset/npy"
	"helios/internal/work"
)

// CSCWriter writes indptr.npy and indices.npy from edges that come in (dst, src) order.
type CSCWriter struct {
	indptr, indices Array
	nodes           int64
	wide            bool
	next            int64 // nodes whose start is written
	Edges           int64 // written so far
	idx, ptr        []byte
}

// wideFrom is the number of nodes from which ids need 64 bits; a variable for tests.
var wideFrom int64 = 1 << 32

// NewCSC writes the topology of so many nodes, whose in-neighbours are of so many sources.
func NewCSC(s Store, nodes, sources int64) (*CSCWriter, error) {
	return cscFrom(s, nodes, sources, nil)
}

// CSCMark is a CSCWriter on the disk.
type CSCMark struct {
	Indptr  ArrayMark `json:"indptr"`
	Indices ArrayMark `json:"indices"`
	Next    int64     `json:"next"`
	Edges   int64     `json:"edges"`
}

// cscFrom goes on at a mark, or begins where that is nil.
func cscFrom(s Store, nodes, sources int64, mark *CSCMark) (*CSCWriter, error) {
	w := &CSCWriter{nodes: nodes, wide: max(nodes, sources) > wideFrom}
	dt := npy.Uint32
	if w.wide {
		dt = npy.Int64
	}
	var ptr, idx *ArrayMark
	if mark != nil {
		ptr, idx, w.next, w.Edges = &mark.Indptr, &mark.Indices, mark.Next, mark.Edges
	}
	var err error
	if w.indptr, err = s.Array("indptr", npy.Int64, ptr); err != nil {
		return nil, err
	}
	if w.indices, err = s.Array("indices", dt, idx); err != nil {
		return nil, errors.Join(err, w.indptr.Discard())
	}
	return w, nil
}

// Put writes one edge, which is not below those before it.
func (w *CSCWriter) Put(x Edge) error {
	if err := w.startUpTo(int64(x.Dst), w.Edges); err != nil {
		return err
	}
	if w.wide {
		w.idx = binary.LittleEndian.AppendUint64(w.idx, x.Src)
	} else {
		w.idx = binary.LittleEndian.AppendUint32(w.idx, uint32(x.Src))
	}
	w.Edges++
	if len(w.idx) >= 64<<10 {
		return w.flush()
	}
	return nil
}

// putMerged writes a range.
func (w *CSCWriter) putMerged(m *merged, wideKeys bool) error {
	switch {
	case m.heavy:
		for range m.times {
			if err := w.Put(m.lo); err != nil {
				return err
			}
		}
		return nil
	case wideKeys:
		for _, x := range pairs(m.keys) {
			if err := w.Put(x); err != nil {
				return err
			}
		}
		return nil
	case w.wide:
		for _, k := range m.keys {
			if err := w.Put(edgeOf(k)); err != nil {
				return err
			}
		}
		return nil
	}
	if err := w.flush(); err != nil {
		return err
	}
	for _, start := range m.starts {
		if err := w.startUpTo(int64(m.keys[start]>>32), w.Edges+int64(start)); err != nil {
			return err
		}
	}
	w.Edges += int64(len(m.keys))
	_, err := w.indices.Write(m.idx)
	return err
}

func (w *CSCWriter) flush() error {
	_, err := w.indices.Write(w.idx)
	w.idx = w.idx[:0]
	return err
}

// startUpTo writes the offsets of all nodes up to v, whose edges begin at edge number at.
func (w *CSCWriter) startUpTo(v, begin int64) error {
	for ; w.next <= v; w.next++ {
		w.ptr = binary.LittleEndian.AppendUint64(w.ptr, uint64(begin))
		if len(w.ptr) >= 64<<10 {
			if err := w.flushPtr(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *CSCWriter) flushPtr() error {
	_, err := w.indptr.Write(w.ptr)
	w.ptr = w.ptr[:0]
	return err
}

// mark puts all that was written on the disk.
func (w *CSCWriter) mark() (m CSCMark, err error) {
	if err := errors.Join(w.flush(), w.flushPtr()); err != nil {
		return m, err
	}
	m.Next, m.Edges = w.next, w.Edges
	if m.Indptr, err = w.indptr.Mark(); err == nil {
		m.Indices, err = w.indices.Mark()
	}
	return m, err
}

// Close completes both arrays.
func (w *CSCWriter) Close() error {
	err := w.startUpTo(w.nodes, w.Edges)
	if err == nil {
		err = errors.Join(w.flushPtr(), w.flush())
	}
	if err != nil {
		return errors.Join(err, w.Discard())
	}
	return errors.Join(w.indptr.Close(), w.indices.Close())
}

// Discard closes both without caring for their content.
func (w *CSCWriter) Discard() error { return errors.Join(w.indptr.Discard(), w.indices.Discard()) }

// WriteCSC merges what the sorter has into the topology files. nodes 0 takes the largest id, plus
// 1.
func (e *Sorter) WriteCSC(ctx context.Context, nodes int64, p work.Progress) (Counts, error) {
	return e.WriteRelation(ctx, nodes, nodes, p)
}

// WriteRelation is WriteCSC of edges whose sources are numbers of their own, below sources.
func (e *Sorter) WriteRelation(ctx context.Context, nodes, sources int64,
	p work.Progress) (c Counts, err error) {
	held, err := e.finish(false)
	if err != nil {
		return c, err
	}
	if nodes == 0 {
		nodes = e.maxID + 1
		sources = nodes
	}
	if e.maxID >= max(nodes, sources) {
		return c, fmt.Errorf("edges of %d nodes with the id %d: the reader should have refused it",
			max(nodes, sources), e.maxID)
	}
	wide := e.wide.Load() || e.rules.AddSelf && nodes > math.MaxUint32
	m, runs, closeAll, err := e.mergeAll(ctx, held, nodes, wide, p)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	total := int64(0)
	for _, k := range runs {
		total += k.keys()
	}
	out := topologyWriter{p: p, log: e.log, wide: wide, spilled: len(e.runs) > 0, total: total}
	var mark *CSCMark
	from := Edge{}
	if e.log != nil {
		if j := e.log.Merged(); j != nil {
			mark, from, out.done, out.again = &j.CSC, j.from(), j.Done, j.Again
		}
	}
	w, err := cscFrom(e.s, nodes, sources, mark)
	if err != nil {
		return c, err
	}
	out.w, out.timer = w, NewMarkTimer()
	p.Report("topology", out.done, total)
	if m != nil {
		err = m.each(ctx, m.ranges(from), true,
			func(r *merged) error { return out.put(ctx, r) })
	}
	if err != nil {
		return c, errors.Join(err, w.Discard())
	}
	c = e.done
	c.Stored, c.Nodes, c.Repeated = w.Edges, nodes, out.again
	if e.rules.AddSelf {
		c.Added = nodes
	}
	c.Duplicates = c.Taken + c.Opposite + c.Added - c.Self - c.Stored
	if err := w.Close(); err != nil {
		return c, err
	}
	if e.log != nil {
		if err := e.log.Done(c); err != nil {
			return c, err
		}
	}
	return c, e.removeRuns(e.runs)
}

// mergeAll returns the merger of the chunks in memory, or of the runs on disk; nil where there are
// no edges.
func (e *Sorter) mergeAll(ctx context.Context, held []*chunk, nodes int64, wide bool,
	p work.Progress) (m *merger, sources []keySource, closeAll func() error, err error) {
	closeAll = func() error { return nil }
	for _, c := range held {
		if c.n > 0 {
			sources = append(sources, &memRun{c, max(packKeys, c.n/4096)})
		}
	}
	if e.rules.AddSelf {
		sources = append(sources, e.selfLoops(nodes))
	}
	if len(sources) > 0 && len(e.runs) == 0 {
		if m = e.newMerger(sources, wide, true); m == nil { // only where the budget is tiny
			e.done, e.partial = Counts{}, held
			if _, err := e.finish(true); err != nil {
				return nil, nil, nil, err
			}
		}
	}
	if len(e.runs) == 0 {
		return m, sources, closeAll, nil
	}
	if err := e.fewer(ctx, wide, p); err != nil {
		return nil, nil, nil, err
	}
	if sources, closeAll, err = e.openRuns(e.runs); err != nil {
		return nil, nil, nil, err
	}
	if e.rules.AddSelf {
		sources = append(sources, e.selfLoops(nodes))
	}
	return e.newMerger(sources, wide, false), sources, closeAll, nil
}

// topologyWriter writes merged ranges, and notes in the journal how far it is.
type topologyWriter struct {
	w       *CSCWriter
	p       work.Progress
	log     Log
	timer   *MarkTimer
	wide    bool
	spilled bool // the edges are on the disk too, so that a merge can be resumed

	done, total, again int64 // keys that were merged, all of them, and repeated ones that stay
}

func (t *topologyWriter) put(ctx context.Context, r *merged) error {
	if err := t.w.putMerged(r, t.wide); err != nil {
		return err
	}
	t.done += r.read
	t.again += r.again
	t.p.Report("topology", t.done, t.total)
	if t.log != nil && t.spilled && t.timer.Due() {
		return t.timer.Mark(func() error {
			csc, err := t.w.mark()
			if err != nil {
				return err
			}
			return t.log.MergedTo(Merged{r.hi.Dst, r.hi.Src, t.done, t.again, t.total, csc})
		})
	}
	return ctx.Err()
}
