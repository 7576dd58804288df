// lookup: where does the row of each requested position live? Reference: cache/kernels.go
// (lookupKernel), to the bit, for any grid and any block of whole warps.
//
// In: Nodes[First … First+Count-1], row numbers; Lines, the index: a 64-byte line answers for 224
// rows with the rank of its first row in either tier and two bits a row. Out, each in ascending
// order of position: GPU hits (GPUPos, GPUSlot), CPU hits (CPUPos, CPUSlot), misses (MissPos,
// MissRow) grouped by SSD = row mod SSDs; Totals, the sizes of the 2+SSDs buckets.
//
// Three passes, three launches (one, when the grid is one block):
//   count    A block takes a contiguous share of the positions, a warp a contiguous share of that,
//            32 at a time. Four lanes read a line together, 16 bytes each, so that a warp's load
//            touches 8 lines in whole sectors; four such loads are in flight. Population counts
//            and two shuffles make the slot. The answer goes to Code, counts to Counts[block].
//   prefix   One block turns counts into places: a warp per bucket runs along the blocks, then
//            the SSDs' buckets are put one behind the other.
//   scatter  A warp counts its share of Code by bucket; the counts of the warps before it and the
//            block's places say where its part of each bucket starts. Then it writes its share in order.
// Lanes with the same bucket find each other by ballots (warp_peers) and the lowest one updates the
// warp's counter for all, so there are no atomics, and order needs no sort.
//
// Writers: a warp has counters of its own in shared memory (place); joined by syncthreads.
// Everything else is written by one thread of one launch and read by later launches. Blocks of up
// to 256 threads use all their warps (8 KiB of counters); in larger ones the rest watches.
//
// Bytes per position: 8 (row) + 64 (line, random) + 3×8 (Code: one write, two reads) + 8 or 12
// (entry). The lines decide: at ~60 % of the memory's bandwidth for random 64-byte reads,
// 1.5 TB/s of HBM2e serves about 9 G positions a second, less where the index exceeds the
// reach of the TLB. Not measured: no GPU was at hand.
#include "abi_data.h"
#include "device.h"
#include "scan.h"

namespace {

constexpr u32 workers = 8; // warps of a block that work
constexpr u64 lowBits = 0x5555555555555555;

// Which bits of word j of a line stand for rows before bit shift of word `word`.
HX_DEVICE inline u64 before(i32 j, i32 word, u32 shift) {
	if (j < word) return ~(u64)0;
	return j == word ? ((u64)1 << shift) - 1 : 0;
}

// Tier << codeTier | slot for each lane's row; only lanes in good count.
HX_DEVICE inline u64 find(u64 lines, u64 row, u32 good) {
	u32 lane = dev::lane(), piece = lane % 4;
	u64 key = row / rowsPerLine << 8 | row % rowsPerLine;
	u32x4 part[4];
	u32 n[4];
#pragma GCC unroll 4
	for (u32 k = 0; k < 4; k++) {
		u32 whose = k * 8 + lane / 4;
		u64 other = dev::shfl(dev::full_mask, key, whose);
		n[k] = other & 0xff;
		part[k] = {0, 0, 0, 0};
		if (good >> whose & 1) part[k] = dev::ld16(dev::at<u8>(lines, (i64)(other >> 8) * lineBytes + piece * 16)); // litmus: lookup-line
	}
	u64 mine = 0;
#pragma GCC unroll 4
	for (u32 k = 0; k < 4; k++) {
		// Piece 0 is the ranks and word 0; piece q is words 2q-1 and 2q.
		u64 a = (u64)part[k].y << 32 | part[k].x, b = (u64)part[k].w << 32 | part[k].z;
		i32 word = (i32)(n[k] / 32);
		u32 shift = n[k] % 32 * 2;
		u64 own = word & 1 ? a : b;
		u32 tier = dev::shfl(dev::full_mask, (u32)(own >> shift) & 3, lane / 4 * 4 + (u32)(word + 1) / 2);
		u32 side = tier == tierCPU;
		u32 slot = dev::popc(b >> side & lowBits & before((i32)(2 * piece), word, shift));
		if (piece == 0) {
			slot += side ? part[k].y : part[k].x;
		} else {
			slot += dev::popc(a >> side & lowBits & before((i32)(2 * piece) - 1, word, shift));
		}
		slot += dev::shfl(dev::full_mask, slot, lane ^ 1);
		slot += dev::shfl(dev::full_mask, slot, lane ^ 2);
		u64 answer = tier == tierSSD ? 0 : (u64)tier << codeTier | slot;
		answer = dev::shfl(dev::full_mask, answer, lane % 8 * 4);
		if (lane / 8 == k) mine = answer;
	}
	return mine;
}

HX_DEVICE inline u32 bucket_of(u64 code) {
	u32 tier = (u32)(code >> codeTier);
	return tier == tierSSD ? bucketMiss + (u32)code : tier - 1;
}

HX_DEVICE inline void clear(u32 *own, u32 n) {
	for (u32 b = dev::lane(); b < n; b += 32) dev::st(&own[b], 0u);
	dev::syncwarp();
}

// Adds each lane of active to its bucket's counter.
HX_DEVICE inline void tally(u32 *own, u32 active, u32 bucket, u32 bits) {
	u32 peers = warp_peers(active, bucket, bits);
	if (peers != 0 && dev::lane() == dev::ctz(peers) && active >> dev::lane() & 1) {
		dev::st(&own[bucket], dev::ld(&own[bucket]) + dev::popc(peers));
	}
	dev::syncwarp();
}

HX_DEVICE inline void find_rows(const LookupParams &p, const hx_launch &hx, Share s, u32 *own, u32 bits) {
	u64 rows = (u64)p.Rows;
	for (i64 i = s.lo + dev::lane(); i - dev::lane() < s.hi; i += 32) {
		bool have = i < s.hi;
		u64 row = have ? (u64)dev::ld(dev::at<i64>(p.Nodes, p.First + i)) : 0;
		bool good = have && row < rows;
		if (have && !good) dev::fail(hx, 1, row, (u64)(p.First + i), rows - 1);
		u64 code = find(p.Lines, good ? row : 0, dev::ballot(dev::full_mask, good));
		if (code >> codeTier == tierSSD) {
			if (!good) row = 0;
			code = row >> 32 == 0 ? (u32)row % p.SSDs : row % p.SSDs;
		}
		tally(own, dev::ballot(dev::full_mask, have), bucket_of(code), bits);
		if (have) dev::st(dev::at<u64>(p.Code, i), code);
	}
}

HX_DEVICE inline void prefix(const LookupParams &p, u32 *total, u32 *start, u32 n) {
	u32 w = dev::tid() / 32, warps = dev::threads() / 32;
	for (u32 b = w; b < n; b += warps) {
		u32 sum = 0;
		for (u32 g = dev::lane(); g < p.Grid; g += 32) sum += dev::ld(dev::at<u32>(p.Counts, (i64)g * n + b));
		sum = dev::reduce_add(dev::full_mask, sum);
		if (dev::lane() == 0) {
			dev::st(&total[b], sum);
			dev::st(dev::at<i64>(p.Totals, b), (i64)sum);
		}
	}
	dev::syncthreads();
	if (w == 0) { // the misses of all SSDs share one array
		u32 at = 0;
		for (u32 base = bucketMiss; base < n; base += 32) {
			u32 b = base + dev::lane(), c = b < n ? dev::ld(&total[b]) : 0;
			u32 to = warp_scan(c);
			if (b < n) dev::st(&start[b], at + to - c);
			at += dev::shfl(dev::full_mask, to, 31);
		}
	}
	dev::syncthreads();
	for (u32 b = w; b < n; b += warps) {
		u32 at = b < bucketMiss ? 0 : dev::ld(&start[b]);
		for (u32 base = 0; base < p.Grid; base += 32) {
			u32 g = base + dev::lane();
			u32 *count = dev::at<u32>(p.Counts, (i64)g * n + b);
			u32 c = g < p.Grid ? dev::ld(count) : 0;
			u32 to = warp_scan(c);
			if (g < p.Grid) dev::st(count, at + to - c);
			at += dev::shfl(dev::full_mask, to, 31);
		}
	}
}

HX_DEVICE inline void count_codes(const LookupParams &p, Share s, u32 *own, u32 bits) {
	for (i64 i = s.lo + dev::lane(); i - dev::lane() < s.hi; i += 32) {
		bool have = i < s.hi;
		u64 code = have ? dev::ld(dev::at<u64>(p.Code, i)) : 0;
		tally(own, dev::ballot(dev::full_mask, have), bucket_of(code), bits);
	}
}

HX_DEVICE inline void write_entries(const LookupParams &p, Share s, u32 *own, u32 bits) {
	for (i64 i = s.lo + dev::lane(); i - dev::lane() < s.hi; i += 32) {
		bool have = i < s.hi;
		u64 code = have ? dev::ld(dev::at<u64>(p.Code, i)) : 0;
		u32 bucket = bucket_of(code), pos = (u32)(p.First + i), slot = (u32)code;
		u32 peers = warp_peers(dev::ballot(dev::full_mask, have), bucket, bits);
		u32 base = dev::ld(&own[bucket]);
		dev::syncwarp(); // all have read before the lowest writes
		if (have && (peers & lanes_below()) == 0) dev::st(&own[bucket], base + dev::popc(peers));
		dev::syncwarp();
		if (!have) continue; // the last step: no collective follows
		u32 at = base + dev::popc(peers & lanes_below());
		if (bucket >= bucketMiss) {
			dev::st(dev::at<u32>(p.MissPos, at), pos);
			dev::st(dev::at<i64>(p.MissRow, at), dev::ld(dev::at<i64>(p.Nodes, p.First + i)));
		} else {
			dev::st(dev::at<u32>(bucket == bucketGPU ? p.GPUPos : p.CPUPos, at), pos);
			dev::st(dev::at<u32>(bucket == bucketGPU ? p.GPUSlot : p.CPUSlot, at), slot);
		}
	}
}

} // namespace

HX_KERNEL(lookup, LookupParams) {
	HX_SHARED(u32, place, workers * maxBuckets);
	if (dev::dropped(hx)) return;
	u32 n = bucketMiss + p.SSDs, bits = 1;
	while (1u << bits < n) bits++;
	u32 w = dev::tid() / 32, active = dev::threads() / 32;
	if (active > workers) active = workers;
	Share block = block_share(p.Count);
	Share mine = w < active ? share_of(block, w, active) : Share{block.hi, block.hi};
	u32 *own = place + (w < active ? w : 0) * maxBuckets;

	if (p.Phases & phaseCount) {
		if (w < active) {
			clear(own, n);
			find_rows(p, hx, mine, own, bits);
		}
		dev::syncthreads();
		for (u32 b = dev::tid(); b < n; b += dev::threads()) {
			u32 sum = 0;
			for (u32 i = 0; i < active; i++) sum += dev::ld(&place[i * maxBuckets + b]);
			dev::st(dev::at<u32>(p.Counts, (i64)dev::bid() * n + b), sum);
		}
		dev::syncthreads();
	}
	if (p.Phases & phasePrefix) {
		prefix(p, place, place + maxBuckets, n);
		dev::syncthreads();
	}
	if (p.Phases & phaseScatter) {
		if (w < active) {
			clear(own, n);
			count_codes(p, mine, own, bits);
		}
		dev::syncthreads();
		for (u32 b = dev::tid(); b < n; b += dev::threads()) {
			u32 at = dev::ld(dev::at<u32>(p.Counts, (i64)dev::bid() * n + b));
			for (u32 i = 0; i < active; i++) {
				u32 c = dev::ld(&place[i * maxBuckets + b]);
				dev::st(&place[i * maxBuckets + b], at);
				at += c;
			}
		}
		dev::syncthreads();
		if (w < active) write_entries(p, mine, own, bits);
	}
}
