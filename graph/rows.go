package graph

import (
	"context"
	"slices"

	"helios/cuda"
)

// Types without rows come last, so the nodes that a hop finds begin with those that have rows. A
// mini-batch of a graph with such types has a list of rows beside its frontier. Tiers and SSDs see
// that list alone.

// rowTypes returns how many types have rows.
func (s *Schema) rowTypes() (n int) {
	for n < len(s.Types) && s.Types[n].Dim > 0 {
		n++
	}
	return n
}

// Rows returns the number of nodes that have rows.
func (s *Schema) Rows() int64 { return s.First(s.rowTypes()) }

// RowNumbers is int64[RowCount(last hop)]: the rows of the frontier's nodes, in its order.
func (mb *MiniBatch) RowNumbers() cuda.Buffer {
	if mb.rowEnd == nil {
		return mb.Nodes
	}
	return mb.rows
}

// RowCount returns how many nodes of the frontier after hop h have rows; hop 0 has the seeds.
func (mb *MiniBatch) RowCount(h int) int64 {
	if mb.rowEnd == nil {
		return mb.HopEnd[h]
	}
	return mb.rowEnd[h]
}

// SetRows has mb, which is a copy of another mini-batch, count rows as that one does; rows are its
// RowNumbers.
func (mb *MiniBatch) SetRows(of *MiniBatch, rows cuda.Buffer) {
	mb.rows, mb.rowEnd = rows, of.rowEnd
}

// takeRows lists the rows of the nodes that hop h-1 found, or of the seeds.
func (s *Sampler) takeRows(ctx context.Context, stream cuda.Stream, mb *MiniBatch, h int) error {
	schema := s.topo.Host.Schema
	if schema == nil || schema.rowTypes() == len(schema.Types) {
		return nil
	}
	had := int64(0)
	if h > 0 {
		had = mb.rowEnd[h-1]
	}
	lo, hi := mb.rowRange(schema, h)
	n := hi - lo
	mb.rowEnd = append(mb.rowEnd[:h], had+n)
	if err := mb.grow(stream, &mb.rows, cuda.MemDevice, max(had+n, 1)*8, had*8,
		"rows of a frontier"); err != nil || n == 0 {
		return err
	}
	if err := stream.Copy(mb.rows.Ptr()+cuda.DevicePtr(8*had),
		mb.Nodes.Ptr()+cuda.DevicePtr(8*lo), 8*n); err != nil {
		return err
	}
	return stream.Synchronize(ctx)
}

// rowRange returns the part of TypeEnd[h]'s nodes that have rows.
func (mb *MiniBatch) rowRange(s *Schema, h int) (lo, hi int64) {
	lo, hi = mb.TypeRange(h, 0)
	switch types := s.rowTypes(); types {
	case 0:
		return lo, lo
	case 1:
		return lo, hi
	default:
		_, hi = mb.TypeRange(h, types-1)
		return lo, hi
	}
}

// restoreRows lists the rows of a restored frontier, nodes, which have to be those given.
func (s *Sampler) restoreRows(ctx context.Context, stream cuda.Stream, mb *MiniBatch, nodes,
	rows []int64) (same bool, err error) {
	for h := range mb.HopEnd {
		lo, hi := mb.rowRange(s.topo.Host.Schema, h)
		if hi-lo > int64(len(rows)) || !slices.Equal(nodes[lo:hi], rows[:hi-lo]) {
			return false, nil
		}
		rows = rows[hi-lo:]
		if err := s.takeRows(ctx, stream, mb, h); err != nil {
			return false, err
		}
	}
	return len(rows) == 0, nil
}
