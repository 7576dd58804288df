package dataset

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"helios/dataset/npy"
	"helios/graph"
	"helios/internal/hostmem"
)

// TopologyOnSSD opens the topology with its in-neighbour lists left in their file, from which
// sampling reads what it needs (graph.OpenOutOfCore). The offsets are read to memory, 8 bytes a
// node, or mapped from their file where they are as large as 40 % of the memory that can be had.
// The caller closes it, before the dataset. A dataset without edges has an empty topology, in
// memory. A graph of several types or relations is refused, as by Topology.
func (d *Dataset) TopologyOnSSD(ctx context.Context, o graph.OutOfCoreOptions) (*graph.Topology,
	error) {
	if err := d.oneRelation(); err != nil {
		return nil, err
	}
	if d.noEdges {
		return graph.Alloc(d.listsOf(0).dsts, 0, false)
	}
	t, f, err := d.listFile(0)
	if err != nil {
		return nil, err
	}
	far, err := graph.OpenOutOfCore(ctx, t, f, o)
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return far, nil
}

// RelationsOnSSD is TopologyOnSSD for a graph of several types or relations, of this schema.
func (d *Dataset) RelationsOnSSD(ctx context.Context, s *graph.Schema,
	o graph.OutOfCoreOptions) (all *graph.Topology, err error) {
	lists, files := make([]*graph.Topology, len(s.Relations)),
		make([]graph.IndexFile, len(s.Relations))
	defer func() {
		for _, t := range lists {
			if err != nil && t != nil {
				err = errors.Join(err, t.Close())
			}
		}
	}()
	for r := range lists {
		if d.noEdges {
			lists[r], err = graph.Alloc(d.listsOf(r).dsts, 0, false)
		} else {
			lists[r], files[r], err = d.listFile(r)
		}
		if err != nil {
			return nil, err
		}
		lists[r].Sources = d.listsOf(r).srcs
	}
	if d.noEdges {
		return graph.NewTyped(s, lists)
	}
	return graph.OpenTypedOutOfCore(ctx, s, lists, files, o)
}

// listFile returns the offsets of a relation's lists, and their file.
func (d *Dataset) listFile(relation int) (*graph.Topology, graph.IndexFile, error) {
	l := d.listsOf(relation)
	f := graph.IndexFile{Path: l.file}
	a, err := npy.Open(l.file)
	if err != nil {
		return nil, f, err
	}
	f.Offset, f.Wide = a.DataOffset(), a.Header.DType == npy.Int64
	t, err := d.offsets(l)
	if err != nil {
		return nil, f, err
	}
	if f.PageSums, err = d.pageSums(l.indices()); err != nil {
		return nil, f, errors.Join(err, t.Close())
	}
	return t, f, nil
}

// offsets is a topology of offsets alone, checked.
func (d *Dataset) offsets(l *lists) (*graph.Topology, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("dataset %s is closed", d.dir)
	}
	if hostmem.Scarce((l.dsts+1)*8, mapTopologyFrom) {
		t, m, err := d.mapOffsets(l)
		if err != nil {
			return nil, err
		}
		m.advise(unix.MADV_RANDOM)
		return t, nil
	}
	t, err := graph.Alloc(l.dsts, 0, false)
	if err != nil {
		return nil, fmt.Errorf("dataset %s: offsets of the topology: %w", d.dir, err)
	}
	t.NumEdges = l.edges
	err = d.readArray(l.indptr(), rawBytes(t.Indptr), nil)
	if err == nil {
		err = l.checkIndptr(t)
	}
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// TopologyBytes is the size of the ids as they stand in their files.
func (d *Dataset) TopologyBytes() (int64, error) {
	if d.noEdges {
		return 0, nil
	}
	total := int64(0)
	for i := range d.Meta.Graph().Relations {
		a, err := npy.Open(d.listsOf(i).file)
		if err != nil {
			return 0, err
		}
		total += a.Header.Bytes()
	}
	return total, nil
}
