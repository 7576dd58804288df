// relation_lists: the lists of one relation of a typed block (gnn/rgat.go), with places among the relation's rows (its destinations,
// then its sources) in the place of rows of the frontier, offsets from 0, and the destinations' scores for themselves, which no softmax
// keeps. Sources of a type are a few runs of the frontier, whose begins come in the parameters. Reference: gnn/rgat.go, to the bit, for
// any grid. A thread for each element; no shared memory, no barrier. Bytes: 8 for each edge, 16 for each list, 4 for each score. Not
// measured: no GPU was at hand.
#include "abi_agg.h"
#include "scan.h"
#include "device.h"

namespace {

constexpr float selfScore = -1e30f;

}

HX_KERNEL(relation_lists, RelationParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumDst + 1);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads())
		dev::st(dev::at<i64>(p.OutIndptr, i), dev::ld(dev::at<i64>(p.Indptr, i)) - p.FirstEdge);
	s = block_share(p.Edges);
	for (i64 e = s.lo + dev::tid(); e < s.hi; e += dev::threads()) {
		i64 row = dev::ld(dev::at<u32>(p.Src, p.FirstEdge + e));
		i64 shift = p.Place[0] - p.Row[0];
#pragma GCC unroll 16
		for (i64 k = 1; k < mostRuns; k++)
			if (k < p.Runs && p.Row[k] <= row) shift = p.Place[k] - p.Row[k];
		dev::st(dev::at<u32>(p.OutSrc, e), (u32)(row + shift));
	}
	s = block_share(p.Selves);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) dev::st(dev::at<float>(p.Scores, i), selfScore);
}
