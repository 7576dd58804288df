// hotness and hotness_rank: how often presampling met each row, and the hottest rows.
// Reference: cache/kernels.go, to the bit, for any grid and any block of whole warps.
//
// hotness      Counts[Nodes[i]]++ for N nodes. One thread per node, relaxed atomics: sums commute.
//              Lanes are not combined first: presampling counts frontiers, whose nodes are all
//              different, so the ballots would find nothing to combine. 8 + 2×32 bytes (two
//              sectors, random) per node where Counts is in HBM; L2's atomic units set the limit.
//
// hotness_rank The GPURows hottest rows, in ascending order, to GPU, and the next CPURows to CPU. Of equally
//              hot rows the lowest come first: cache.Place's rule. It works for two selections at
//              once, the GPURows (0) and the GPURows+CPURows (1) largest counts; the CPU tier is the
//              second without the first. Radix select, 8 bits of the count at a time from the top,
//              then a compaction that keeps order:
//                hist     each block: a histogram in shared memory of the digit at Shift among the
//                         rows whose higher digits are Threshold's; added to Hist by atomics
//                pick     one block: the digit that holds the Left-th largest goes to Threshold, Left
//                         falls by those above; Hist is zero again. hist and pick for Shift 24, 16, 8, 0
//                count    each block: rows above and at both thresholds, to Parts[block]
//                prefix   one block: rows at the threshold before each block (which of them are
//                         still taken follows), then the places of each block in both lists
//                scatter  each block: a warp takes a contiguous share, counts it as `count` does, adds up the
//                         warps before it, and writes its rows in order by ballots
//              Most counts of a real graph are equal (0), so in hist one lane adds for all that have
//              the same digit as the first; the others add for themselves.
//              Bytes per row: 4 for each of 4 hist, 1 count and 2 (the second from L2) scatter reads,
//              and 8 per row taken: 5.6 G rows take ~0.1 s at 1.5 TB/s. The lists may be pinned
//              CPU memory: they are only written, in order. Not measured: no GPU was at hand.
#include "abi_data.h"
#include "device.h"
#include "scan.h"

namespace {

HX_DEVICE inline void hist(const RankParams &p, Share s, u32 *bins) {
	for (u32 b = dev::tid(); b < 2 * rankBins; b += dev::threads()) dev::st(&bins[b], 0u);
	dev::syncthreads();
	const RankState *state = dev::at<RankState>(p.State);
	u32 done = p.Shift + rankBits; // bits above are Threshold's already
	u64 want[2] = {(u64)dev::ld(&state->Threshold[0]) >> done, (u64)dev::ld(&state->Threshold[1]) >> done};
	for (i64 i = s.lo + dev::tid(); i - dev::lane() < s.hi; i += dev::threads()) {
		u64 v = i < s.hi ? dev::ld(dev::at<u32>(p.Counts, i)) : 0;
		u32 digit = (u32)(v >> p.Shift) % rankBins;
#pragma GCC unroll 2
		for (u32 k = 0; k < 2; k++) {
			bool in = i < s.hi && v >> done == want[k];
			u32 all = dev::ballot(dev::full_mask, in);
			if (all == 0) continue;
			u32 first = dev::ctz(all);
			u32 common = dev::shfl(dev::full_mask, digit, first);
			u32 same = dev::ballot(dev::full_mask, in && digit == common);
			u32 *bin = &bins[k * rankBins + digit];
			if (dev::lane() == first) {
				dev::add_shared(bin, dev::popc(same));
			} else if (in && digit != common) {
				dev::add_shared(bin, 1u);
			}
		}
	}
	dev::syncthreads();
	for (u32 b = dev::tid(); b < 2 * rankBins; b += dev::threads()) {
		u64 c = dev::ld(&bins[b]);
		if (c != 0) dev::add_gpu<dev::relaxed>(dev::at<u64>(p.Hist, b), c);
	}
}

// A warp per selection, eight bins to a lane, the largest digits to lane 0.
HX_DEVICE inline void pick(const RankParams &p) {
	constexpr u32 each = rankBins / 32;
	RankState *state = dev::at<RankState>(p.State);
	for (u32 k = dev::tid() / 32; k < 2; k += dev::threads() / 32) {
		i64 left = dev::ld(&state->Left[k]);
		u32 top = rankBins - 1 - dev::lane() * each;
		i64 own = 0;
		for (u32 i = 0; i < each; i++) own += dev::ld(dev::at<i64>(p.Hist, k * rankBins + top - i));
		i64 to = warp_scan(own);
		u32 reached = dev::ballot(dev::full_mask, to >= left);
		// Where the rows run out, which Left's bound excludes, the last digit is taken.
		u32 who = reached == 0 ? 31 : dev::ctz(reached);
		dev::syncwarp(); // Left and Threshold are read before they change
		if (dev::lane() == who) {
			left -= to - own;
			u32 digit = top;
			for (u32 i = 0;; i++) {
				i64 c = dev::ld(dev::at<i64>(p.Hist, k * rankBins + digit));
				if (c >= left || i == each - 1) break;
				left -= c;
				digit--;
			}
			dev::st(&state->Left[k], left);
			dev::st(&state->Threshold[k], dev::ld(&state->Threshold[k]) | digit << p.Shift);
		}
	}
	dev::syncthreads();
	for (u32 b = dev::tid(); b < 2 * rankBins; b += dev::threads()) dev::st(dev::at<u64>(p.Hist, b), (u64)0);
}

struct Tally {
	i64 above[2], equal[2];
};

HX_DEVICE inline void add_row(Tally &t, const u32 threshold[2], u32 v) {
#pragma GCC unroll 2
	for (u32 k = 0; k < 2; k++) {
		t.above[k] += v > threshold[k];
		t.equal[k] += v == threshold[k];
	}
}

HX_DEVICE inline i64 clamp(i64 v, i64 lo, i64 hi) { return v < lo ? lo : v > hi ? hi : v; }

} // namespace

HX_KERNEL(hotness, HotnessParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.N);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		u64 row = dev::ld(dev::at<u64>(p.Nodes, i));
		if (row >= (u64)p.Rows) {
			dev::fail(hx, 1, row, (u64)i, (u64)(p.Rows - 1));
			continue;
		}
		dev::add_gpu<dev::relaxed>(dev::at<u32>(p.Counts, (i64)row), 1u);
	}
}

HX_KERNEL(hotness_rank, RankParams) {
	HX_SHARED(u32, bins, 2 * rankBins);
	HX_SHARED(i64, sums, 32);
	HX_SHARED(i64, warps, 32 * 4);
	if (dev::dropped(hx)) return;
	const RankState *state = dev::at<RankState>(p.State);
	RankPart *parts = dev::at<RankPart>(p.Parts);
	u32 w = dev::tid() / 32, n = dev::threads() / 32, lane = dev::lane();

	if (p.Phase == rankHist) {
		hist(p, block_share(p.Rows), bins);
		return;
	}
	if (p.Phase == rankPick) {
		pick(p);
		return;
	}
	const u32 threshold[2] = {dev::ld(&state->Threshold[0]), dev::ld(&state->Threshold[1])};
	const i64 left[2] = {dev::ld(&state->Left[0]), dev::ld(&state->Left[1])};

	if (p.Phase == rankCount) {
		Share s = block_share(p.Rows);
		Tally t = {};
		for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) add_row(t, threshold, dev::ld(dev::at<u32>(p.Counts, i)));
#pragma GCC unroll 2
		for (u32 k = 0; k < 2; k++) {
			i64 above = block_sum(sums, t.above[k]), equal = block_sum(sums, t.equal[k]);
			if (dev::tid() == 0) {
				dev::st(&parts[dev::bid()].Take[k], above);
				dev::st(&parts[dev::bid()].Equal[k], equal);
			}
		}
		return;
	}

	if (p.Phase == rankPrefix) {
		i64 at[2] = {0, 0}, equal[2] = {0, 0};
		for (u32 base = 0; base < p.Grid; base += dev::threads()) {
			u32 g = base + dev::tid();
			bool in = g < p.Grid;
			i64 take[2], before[2];
#pragma GCC unroll 2
			for (u32 k = 0; k < 2; k++) {
				i64 own = in ? dev::ld(&parts[g].Equal[k]) : 0, total;
				before[k] = equal[k] + block_scan(sums, own, &total);
				equal[k] += total;
				take[k] = (in ? dev::ld(&parts[g].Take[k]) : 0) + clamp(left[k] - before[k], 0, own);
			}
			take[1] -= take[0];
#pragma GCC unroll 2
			for (u32 k = 0; k < 2; k++) {
				i64 total, to = at[k] + block_scan(sums, take[k], &total);
				at[k] += total;
				if (in) {
					dev::st(&parts[g].Take[k], to);
					dev::st(&parts[g].Equal[k], before[k]);
				}
			}
		}
		return;
	}

	// rankScatter
	Share mine = share_of(block_share(p.Rows), w, n);
	Tally t = {};
	for (i64 i = mine.lo + lane; i < mine.hi; i += 32) add_row(t, threshold, dev::ld(dev::at<u32>(p.Counts, i)));
#pragma GCC unroll 2
	for (u32 k = 0; k < 2; k++) {
		i64 above = warp_sum(t.above[k]), equal = warp_sum(t.equal[k]);
		if (lane == 0) {
			dev::st(&warps[w * 4 + k], above);
			dev::st(&warps[w * 4 + 2 + k], equal);
		}
	}
	dev::syncthreads();
	i64 at[2], equal[2];
#pragma GCC unroll 2
	for (u32 k = 0; k < 2; k++) {
		at[k] = dev::ld(&parts[dev::bid()].Take[k]);
		equal[k] = dev::ld(&parts[dev::bid()].Equal[k]);
	}
	for (u32 i = 0; i < w; i++) {
		i64 take[2];
#pragma GCC unroll 2
		for (u32 k = 0; k < 2; k++) {
			i64 e = dev::ld(&warps[i * 4 + 2 + k]);
			take[k] = dev::ld(&warps[i * 4 + k]) + clamp(left[k] - equal[k], 0, e);
			equal[k] += e;
		}
		at[0] += take[0];
		at[1] += take[1] - take[0];
	}
	for (i64 i = mine.lo + lane; i - lane < mine.hi; i += 32) {
		bool in = i < mine.hi;
		u32 v = in ? dev::ld(dev::at<u32>(p.Counts, i)) : 0;
		bool takes[2];
#pragma GCC unroll 2
		for (u32 k = 0; k < 2; k++) {
			u32 at_threshold = dev::ballot(dev::full_mask, in && v == threshold[k]);
			i64 rank = equal[k] + dev::popc(at_threshold & lanes_below());
			takes[k] = in && (v > threshold[k] || (v == threshold[k] && rank < left[k]));
			equal[k] += dev::popc(at_threshold);
		}
		u32 gpu = dev::ballot(dev::full_mask, takes[0]), cpu = dev::ballot(dev::full_mask, takes[1] && !takes[0]);
		if (gpu >> lane & 1) dev::st(dev::at<i64>(p.GPU, at[0] + dev::popc(gpu & lanes_below())), i);
		if (cpu >> lane & 1) dev::st(dev::at<i64>(p.CPU, at[1] + dev::popc(cpu & lanes_below())), i);
		at[0] += dev::popc(gpu);
		at[1] += dev::popc(cpu);
	}
}
