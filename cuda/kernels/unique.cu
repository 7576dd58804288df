// unique_count, unique_assign, unique_relabel: gives the hop's new nodes their frontier indices in
// order of first appearance. Reference: graph/kernels.go, to the bit, for any grid and any
// block of whole warps; all three get the same one, the first two must.
//
// In: Src[0 … E-1], the table slot of each edge's source, E = EdgeStart[NumDst]; the table (table.h)
// has for each slot the frontier index, or Frontier + the first edge that names the node. Out: Nodes
// from Frontier on (and Degrees), Totals[1], and Src as frontier indices.
//
//   unique_count    first appearances in the block's share of the edges, to Sums[block].
//   unique_assign   block by block, tile by tile (an edge per thread), ranks by ballot within the warp and
//                   a sum over warps in shared memory: appends the node and lowers its entry to
//                   its index. Index Frontier+rank is at most Frontier+e and other edges of the node compare
//                   with larger numbers, so nobody's test is disturbed, in whatever order blocks run.
//   unique_relabel  looks the indices up.
//
//   unique_types    in a typed graph, whose new nodes stand by type: where those of each type end, by
//                   bisection, a thread per type. Reads what unique_assign has left in New.
//   unique_local    numbers nodes of one type within it, a thread per node.
//
// Each edge, index and node is written by one thread; entries are relaxed atomics, read by later
// launches.
//
// Bytes per edge: 4 of Src and 32 (a random sector of the table) in each, 4 more in relabel; per new
// node 8 written, 32 of the table written, with degrees 16 over PCIe. With a table in L2 (up to 4 M
// nodes it is 32 MiB) L2 is the limit, else about 1.5 TB/s / 108 B = 14 G edges a second. Not
// measured: no GPU was at hand.
#include "abi_data.h"
#include "device.h"
#include "scan.h"
#include "table.h"

namespace {

HX_DEVICE inline Share edge_share(const SampleParams &p) {
	return block_share(dev::ld(dev::at<i64>(p.EdgeStart, p.NumDst)));
}

HX_DEVICE inline bool appears(const SampleParams &p, i64 e, u64 slot) {
	return table_pos(p, slot) == (u32)(p.Frontier + e);
}

} // namespace

HX_KERNEL(unique_count, SampleParams) {
	HX_SHARED(i64, sums, 32);
	if (dev::dropped(hx)) return;
	Share s = edge_share(p);
	i64 n = 0;
	for (i64 e = s.lo + dev::tid(); e < s.hi; e += dev::threads()) n += appears(p, e, dev::ld(dev::at<u32>(p.Src, e)));
	n = block_sum(sums, n);
	if (dev::tid() == 0) dev::st(dev::at<i64>(p.Sums, dev::bid()), n);
}

HX_KERNEL(unique_assign, SampleParams) {
	HX_SHARED(i64, sums, 32);
	HX_SHARED(u32, found, 32);
	if (dev::dropped(hx)) return;
	u32 threads = dev::threads(), tid = dev::tid(), w = tid / 32;
	i64 own = 0;
	for (u32 b = tid; b < dev::bid(); b += threads) own += dev::ld(dev::at<i64>(p.Sums, b));
	i64 at = p.Frontier + block_sum(sums, own);
	Share s = edge_share(p);
	for (i64 base = s.lo; base < s.hi; base += threads) {
		i64 e = base + tid;
		u64 slot = e < s.hi ? dev::ld(dev::at<u32>(p.Src, e)) : 0;
		bool isNew = e < s.hi && appears(p, e, slot);
		u32 warp = dev::ballot(dev::full_mask, isNew);
		dev::syncthreads(); // found of the last tile has been read
		if (dev::lane() == 0) dev::st(&found[w], dev::popc(warp));
		dev::syncthreads();
		i64 index = at + dev::popc(warp & lanes_below());
		for (u32 i = 0; i < threads / 32; i++) {
			u32 n = dev::ld(&found[i]);
			if (i < w) index += n;
			at += n;
		}
		if (!isNew) continue;
		if (index >= p.NodesLen) {
			dev::fail(hx, 6, (u64)index, (u64)p.NodesLen);
			continue;
		}
		u64 v = table_node(p, slot);
		dev::st(dev::at<u64>(p.Nodes, index), v);
		table_lower(p, slot, (u64)index);
		if (p.Degrees != 0) dev::st(dev::at<u32>(p.Degrees, index), (u32)neighbours(p, hx, (i64)v).degree);
	}
	if (dev::bid() == dev::blocks() - 1 && tid == 0) dev::st(dev::at<i64>(p.Totals, 1), at - p.Frontier);
}

HX_KERNEL(unique_relabel, SampleParams) {
	if (dev::dropped(hx)) return;
	Share s = edge_share(p);
	for (i64 e = s.lo + dev::tid(); e < s.hi; e += dev::threads()) {
		u32 *src = dev::at<u32>(p.Src, e);
		dev::st(src, table_pos(p, dev::ld(src)));
	}
}

HX_KERNEL(unique_types, TypeParams) {
	if (dev::dropped(hx)) return;
	i64 end = p.Frontier + dev::ld(dev::at<i64>(p.New));
	if (end > p.NodesLen) {
		if (dev::tid() == 0) dev::fail(hx, 6, (u64)end, (u64)p.NodesLen);
		return;
	}
	Share s = block_share(p.Types);
	for (i64 t = s.lo + dev::tid(); t < s.hi; t += dev::threads()) {
		i64 from = p.Frontier, to = end, first = dev::ld(dev::at<i64>(p.Firsts, t + 1));
		while (from < to) {
			i64 mid = (from + to) / 2;
			if (dev::ld(dev::at<i64>(p.Nodes, mid)) < first) {
				from = mid + 1;
			} else {
				to = mid;
			}
		}
		dev::st(dev::at<i64>(p.Ends, t), from);
	}
}

HX_KERNEL(unique_local, LocalParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.Count);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		dev::st(dev::at<i64>(p.Local, i), dev::ld(dev::at<i64>(p.Nodes, i)) - p.First);
	}
}
