// labor_count, labor_fill: draws in-neighbours of the frontier by a variate of the neighbour
// (LABOR-0; graph/labor.go has the paper). Reference: graph/labor.go, to the bit (table slots aside), for any grid and
// any block of whole warps.
//
// In: as for sample_count and sample_fill (sample.cu), whose place the two take, and the keys of the variates. Out: as theirs,
// and Limits[0 … NumDst-1].
//
//   labor_count  edges per destination, as a running sum within the block's share, the share's total in Sums[block], and
//                the largest variate that each destination takes. A destination of in-degree d takes neighbours whose variate is
//                below Fanout / d in units of 2^-64; where no neighbour has such a one, those with the least.
//   labor_fill   adds the sums of the blocks before, and notes each edge's node in the table at position Frontier +
//                edge, in the order of the lists. Same grid as labor_count: the shares must be the same.
//
// Both take as many destinations at a time as the block has threads, and the whole block shares the lists of all of them, an
// edge per thread and step, which finds its destination by bisection in shared memory: a hub does not hold a warp up. Lists
// that are taken whole are not read for counting. Destinations that take none are rare (one in e^Fanout); a warp each looks for
// the least variate. labor_fill ranks what is taken by block sums, so edges stand in the order of the lists.
//
// Memory order: shared memory passes between the block's threads by syncthreads, from tile to tile by that of the last sum. Table entries are relaxed atomics; what
// they say is read by later launches.
//
// Bytes per in-edge of the frontier: 4 or 8 over PCIe for counting and again for filling, in whole lines; per edge taken the
// table's sector read and written (2×32, random) and 4 of Src; per destination 24 over PCIe, twice. At 25 GB/s of PCIe about
// 3 G in-edges a second. Not measured.
#include "abi_data.h"
#include "device.h"
#include "philox.h"
#include "scan.h"
#include "table.h"

namespace {

constexpr u64 takeAll = ~(u64)0;
constexpr u64 golden = 0x9E3779B97F4A7C15ull;

// The finaliser of splitmix64, internal/philox's Mix.
HX_DEVICE inline u64 mix(u64 x) {
	x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
	x = (x ^ x >> 27) * 0x94D049BB133111EBull;
	return x ^ x >> 31;
}

// The variate of node t in units of 2^-64.
HX_DEVICE inline u64 variate(const LaborParams &p, u64 t) {
	u64 x = t * golden, key = p.Keys[0];
	if (p.Span > 1 && p.Turn + philox_bounded(mix(p.Phase + x), p.Span) >= p.Span) key = p.Keys[1];
	return mix(key + x);
}

// The largest variate that a destination of so many neighbours takes; divisions by 32 bits at a time.
HX_DEVICE inline u64 limit_of(const LaborParams &p, i64 degree) {
	i64 fanout = p.Sample.Fanout;
	if (fanout < 0 || degree <= fanout) return takeAll;
	u64 d = (u64)degree, high = (u64)fanout << 32, low = high % d << 32;
	return (high / d << 32 | low / d) - 1;
}

// The least variate of a list, and how many edges have it; a whole warp.
HX_DEVICE inline u64 least_of(const LaborParams &p, u64 first, u64 length, u32 *count) {
	u64 least = takeAll;
	for (u64 e = dev::lane(); e < length; e += dev::warp_size) {
		u64 r = variate(p, neighbour_id(p.Sample, (i64)(first + e)));
		if (r < least) least = r;
	}
	for (u32 d = 16; d > 0; d /= 2) {
		u64 o = dev::shfl(dev::full_mask, least, dev::lane() ^ d);
		if (o < least) least = o;
	}
	u32 n = 0;
	for (u64 e = dev::lane(); e < length; e += dev::warp_size) n += variate(p, neighbour_id(p.Sample, (i64)(first + e))) == least;
	*count = warp_sum(n);
	return least;
}

} // namespace

HX_KERNEL(labor_count, LaborParams) {
	HX_SHARED(i64, sums, 32);
	HX_SHARED(u64, first, 1024); // of the tile's destinations: their row in Indices
	HX_SHARED(u64, start, 1025); // and where its part begins in the edges that are looked at
	HX_SHARED(u64, limit, 1024);
	HX_SHARED(u32, taken, 1024);
	if (dev::dropped(hx)) return;
	const SampleParams &g = p.Sample;
	u32 threads = dev::threads(), tid = dev::tid();
	Share s = block_share(g.NumDst);
	i64 sum = 0;
	for (i64 tile = s.lo; tile < s.hi; tile += threads) {
		u32 n = s.hi - tile < threads ? (u32)(s.hi - tile) : threads;
		i64 own = 0, edges;
		if (tid < n) {
			Neighbours row = neighbours(g, hx, dev::ld(dev::at<i64>(g.Dst, tile + tid)));
			u64 l = limit_of(p, row.degree);
			dev::st(&first[tid], (u64)row.first);
			dev::st(&limit[tid], l);
			dev::st(&taken[tid], l == takeAll ? (u32)row.degree : 0u);
			if (l != takeAll) own = row.degree;
		}
		i64 at = block_scan(sums, own, &edges);
		if (tid < n) dev::st(&start[tid], (u64)at);
		if (tid == 0) dev::st(&start[n], (u64)edges);
		dev::syncthreads();
		for (u64 e = tid; e < (u64)edges; e += threads) {
			u32 i = list_of(start, n, e);
			u64 r = variate(p, neighbour_id(g, (i64)(dev::ld(&first[i]) + (e - dev::ld(&start[i])))));
			if (r <= dev::ld(&limit[i])) dev::add_shared(&taken[i], 1u);
		}
		dev::syncthreads();
		for (u32 i = tid / dev::warp_size; i < n; i += threads / dev::warp_size) { // the same in all lanes
			u64 length = dev::ld(&start[i + 1]) - dev::ld(&start[i]);
			if (length == 0 || dev::ld(&taken[i]) != 0) continue;
			u32 count;
			u64 least = least_of(p, dev::ld(&first[i]), length, &count);
			dev::syncwarp(dev::full_mask); // all lanes have read taken
			if (dev::lane() == 0) {
				dev::st(&limit[i], least);
				dev::st(&taken[i], count);
			}
		}
		dev::syncthreads();
		i64 mine = tid < n ? (i64)dev::ld(&taken[tid]) : 0, total;
		i64 to = sum + block_scan(sums, mine, &total);
		if (tid < n) {
			dev::st(dev::at<i64>(g.EdgeStart, tile + tid), to);
			dev::st(dev::at<u64>(p.Limits, tile + tid), dev::ld(&limit[tid]));
		}
		sum += total;
	}
	if (tid == 0) dev::st(dev::at<i64>(g.Sums, dev::bid()), sum);
}

HX_KERNEL(labor_fill, LaborParams) {
	HX_SHARED(i64, sums, 32);
	HX_SHARED(u64, first, 1024); // as in labor_count, of whole lists
	HX_SHARED(u64, start, 1025);
	HX_SHARED(u64, limit, 1024);
	if (dev::dropped(hx)) return;
	const SampleParams &g = p.Sample;
	u32 threads = dev::threads(), tid = dev::tid();
	i64 base, end;
	if (!block_edges(g, hx, sums, &base, &end)) return;
	Share s = block_share(g.NumDst);
	i64 to = base;
	for (i64 tile = s.lo; tile < s.hi; tile += threads) {
		u32 n = s.hi - tile < threads ? (u32)(s.hi - tile) : threads;
		i64 degree = 0, edges;
		if (tid < n) {
			Neighbours row = neighbours(g, hx, dev::ld(dev::at<i64>(g.Dst, tile + tid)));
			degree = row.degree;
			i64 *e = dev::at<i64>(g.EdgeStart, tile + tid);
			// The share's first offset may be another launch's end by now.
			dev::st(e, base + (tile + tid == s.lo ? 0 : dev::ld(e)));
			dev::st(&first[tid], (u64)row.first);
			dev::st(&limit[tid], dev::ld(dev::at<u64>(p.Limits, tile + tid)));
		}
		i64 at = block_scan(sums, degree, &edges);
		if (tid < n) dev::st(&start[tid], (u64)at);
		if (tid == 0) dev::st(&start[n], (u64)edges);
		dev::syncthreads();
		for (u64 step = 0; step < (u64)edges; step += threads) {
			u64 e = step + tid, id = 0;
			i64 row = 0, all;
			bool in = false;
			if (e < (u64)edges) {
				u32 i = list_of(start, n, e);
				row = (i64)(dev::ld(&first[i]) + (e - dev::ld(&start[i])));
				id = neighbour_id(g, row);
				u64 l = dev::ld(&limit[i]);
				in = l == takeAll || variate(p, id) <= l;
			}
			i64 out = to + block_scan(sums, (i64)in, &all);
			to += all;
			if (!in) continue;
			if (id >= (u64)g.Sources) {
				dev::fail(hx, 5, id, (u64)row, (u64)(g.Sources - 1));
				continue;
			}
			if (out >= end) { // the lists are others than those that were counted
				dev::fail(hx, 4, (u64)(out + 1), (u64)end);
				continue;
			}
			u64 slot = table_slot(g, id + (u64)g.Base);
			if (slot == noSlot) {
				dev::fail(hx, 3, (u64)g.Slots);
				continue;
			}
			dev::st(dev::at<u32>(g.Src, out), (u32)slot);
			table_lower(g, slot, (u64)(g.Frontier + out));
		}
	}
}
