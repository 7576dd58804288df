package edges

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"helios/dataset/npy"
	"helios/internal/work"
)

// CSCWriter writes indptr.npy and indices.npy from edges that come in (dst, src) order.
type CSCWriter struct {
	indptr, indices Array
	nodes           int64
	next            int64 // nodes whose start is written
	Edges           int64 // written so far
	idx, ptr        []byte
}

// NewCSC writes the topology of so many nodes, at most 2^32.
func NewCSC(s Store, nodes int64) (*CSCWriter, error) {
	w := &CSCWriter{nodes: nodes}
	var err error
	if w.indptr, err = s.Array("indptr", npy.Int64); err != nil {
		return nil, err
	}
	if w.indices, err = s.Array("indices", npy.Uint32); err != nil {
		return nil, errors.Join(err, w.indptr.Discard())
	}
	return w, nil
}

// Put writes one edge, which is not below those before it.
func (w *CSCWriter) Put(x Edge) error {
	if err := w.startUpTo(int64(x.Dst), w.Edges); err != nil {
		return err
	}
	w.idx = binary.LittleEndian.AppendUint32(w.idx, uint32(x.Src))
	w.Edges++
	if len(w.idx) >= 64<<10 {
		return w.flush()
	}
	return nil
}

// putMerged writes a range.
func (w *CSCWriter) putMerged(m *merged) error {
	if m.heavy {
		for range m.times {
			if err := w.Put(m.lo); err != nil {
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

// startUpTo writes the offsets of all nodes up to v, whose edges begin at an edge number.
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
func (e *Sorter) WriteCSC(ctx context.Context, nodes int64, p work.Progress) (c Counts, err error) {
	held, err := e.finish(false)
	if err != nil {
		return c, err
	}
	if nodes == 0 {
		nodes = e.maxID + 1
	}
	if e.maxID >= nodes {
		return c, fmt.Errorf("edges of %d nodes with the id %d: the reader should have refused it",
			nodes, e.maxID)
	}
	m, sources, closeAll, err := e.mergeAll(ctx, held, nodes, p)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	total := int64(0)
	for _, k := range sources {
		total += k.allKeys()
	}
	w, err := NewCSC(e.s, nodes)
	if err != nil {
		return c, err
	}
	p.Report("topology", 0, total)
	read := int64(0)
	c = e.done
	if m != nil {
		err = m.each(ctx, m.ranges(), true, func(r *merged) error {
			read, c.Repeated = read+r.read, c.Repeated+r.again
			p.Report("topology", read, total)
			return errors.Join(w.putMerged(r), ctx.Err())
		})
	}
	if err != nil {
		return c, errors.Join(err, w.Discard())
	}
	c.Stored, c.Nodes = w.Edges, nodes
	if e.rules.AddSelf {
		c.Added = nodes
	}
	if e.rules.None {
		c = Counts{Taken: c.Taken, Nodes: nodes, Stored: w.Edges}
	} else {
		c.Duplicates = c.Taken + c.Opposite + c.Added - c.Self - c.Stored
	}
	return c, errors.Join(w.Close(), e.removeRuns(e.runs))
}

// mergeAll returns the merger of the chunks in memory, or of the runs on disk; nil where there are
// no edges.
func (e *Sorter) mergeAll(ctx context.Context, held []*chunk, nodes int64, p work.Progress) (m *merger, sources []keySource, closeAll func() error, err error) {
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
		if m = e.newMerger(sources, true); m == nil { // only where the budget is tiny
			e.done, e.partial = Counts{}, held
			if _, err := e.finish(true); err != nil {
				return nil, nil, nil, err
			}
		}
	}
	if len(e.runs) == 0 {
		return m, sources, closeAll, nil
	}
	if err := e.fewer(ctx, p); err != nil {
		return nil, nil, nil, err
	}
	if sources, closeAll, err = e.openRuns(e.runs); err != nil {
		return nil, nil, nil, err
	}
	if e.rules.AddSelf {
		sources = append(sources, e.selfLoops(nodes))
	}
	return e.newMerger(sources, false), sources, closeAll, nil
}
