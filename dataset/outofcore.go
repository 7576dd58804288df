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
	l := d.listsOf(0)
	if d.noEdges {
		return graph.Alloc(l.dsts, 0, false)
	}
	a, err := npy.Open(l.file)
	if err != nil {
		return nil, err
	}
	t, err := d.offsets(l)
	if err != nil {
		return nil, err
	}
	f := graph.IndexFile{Path: l.file, Offset: a.DataOffset(), Wide: a.Header.DType == npy.Int64}
	if f.PageSums, err = d.pageSums(l.indices()); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	far, err := graph.OpenOutOfCore(ctx, t, f, o)
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return far, nil
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
