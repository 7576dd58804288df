// table_get, table_put: rows of a matrix from those of a table, by the nodes' numbers, and back (gnn/tables.go). Reference: gnn/tables.go,
// to the bit, for any grid and any block of whole warps.
//
//	table_get   Rows[i, 0:Cols] = Table[k, 0:Cols], k = Numbers[i] - First, or i where there are no numbers
//	table_put   Table[k, 0:Cols] = Rows[i, 0:Cols]; no k comes twice, so no two threads write one element
//
// Rows of both are strided. A thread takes four columns of a row. No shared memory, no barrier. Bytes: 8 an element, 8 a row. Rows of a
// table are from all over it: expect a gather's bandwidth. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "quads.h"

namespace {

HX_DEVICE inline void move_rows(const TableParams &p, bool put) {
	Quads q = quads_of(p.N, p.Cols, p.Table | p.Rows | (u64)p.TableStride * 4 | (u64)p.RowStride * 4);
	Share s = block_share(q.all);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		Spot at = spot_of(q, i);
		i64 k = p.Numbers ? dev::ld(dev::at<i64>(p.Numbers, at.row)) - p.First : (i64)at.row;
		i64 table = k * p.TableStride + at.col, row = at.row * p.RowStride + at.col;
		if (put)
			store_quad(at, p.Table, table, load_quad(at, p.Rows, row));
		else
			store_quad(at, p.Rows, row, load_quad(at, p.Table, table));
	}
}

} // namespace

HX_KERNEL(table_get, TableParams) {
	if (dev::dropped(hx)) return;
	move_rows(p, false);
}

HX_KERNEL(table_put, TableParams) {
	if (dev::dropped(hx)) return;
	move_rows(p, true);
}
