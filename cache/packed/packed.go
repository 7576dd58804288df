// Package packed lays out on disk what mini-batches that were sampled beforehand need, so that
// training reads few long extents and looks nothing up: the four-level store of DiskGNN (Liu et
// al., 2024, sections 4 and 5).
//
// The levels are the rows of the most accesses, which stay in memory (the GPU tier, then the CPU
// tier); for each segment of mini-batches a disk cache of the rows that several of them need, in
// an order that keeps together what is needed together; and for each mini-batch a packed chunk of
// the rows that it alone needs. Disk caches and chunks are whole pages of rows.
package packed

import (
	"context"

	"helios/cache/superbatch"
)

// Accesses returns the frontiers of mini-batches, each as often as asked.
type Accesses = superbatch.Accesses

// Shape is the layout of rows in pages: RowsPerPage rows without gaps from a page's start, none
// across two pages. A page is a whole number of 4 KiB and of LBAs.
type Shape struct {
	RowBytes    int64 `json:"row_bytes"`
	PageBytes   int64 `json:"page_bytes"`
	RowsPerPage int64 `json:"rows_per_page"`
}

// Run is a number of pages that lie behind each other.
type Run struct {
	Page, Pages int64
}

// Batch has the places of a mini-batch's rows. Position i of its frontier is in exactly one of
// HotPos and Pos.
type Batch struct {
	// HotPos are the positions of rows that stay in memory, ascending, HotRank their places in
	// Plan.Hot.
	HotPos, HotRank []uint32
	// Runs are the reads: ascending, without overlaps; first of the segment's disk cache, then the
	// mini-batch's chunk, which is the last run where ChunkPages is not 0.
	Runs       []Run
	ReadPages  int64 // of Runs
	ChunkPages int64
	// Pos are the positions of the other rows, ascending. Slot counts rows over the pages of Runs,
	// put behind each other: row Slot mod RowsPerPage of page Slot div RowsPerPage.
	Pos, Slot []uint32

	buf []byte // of Plan.Batch
}

// Pages keeps disk caches and chunks: pages 0 to the plan's last, written in any order. Data are
// whole pages.
type Pages interface {
	WriteAt(ctx context.Context, page int64, data []byte) error
	ReadAt(ctx context.Context, page int64, data []byte) error
	// Sync makes all writes durable.
	Sync(ctx context.Context) error
}

// Source gives feature rows in their order, as they are stored.
type Source interface {
	ReadRows(ctx context.Context, first, n int64, dst []byte) error
}
