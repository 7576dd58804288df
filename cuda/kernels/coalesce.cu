// Kernel "coalesce": turns the rows of one read set into runs, each of which one command reads.
//
// Shape: one block of whole warps for each SSD (blocks take SSDs in turn where there are fewer). n rows
// of a bucket: sorted by slot (row div SSDs) into Order, n indices of Rows; cut into Runs, which has one
// more entry than runs; Units, where the runs are; Remaining, the queues' shares of them.
//
//   keys   a slot for each row; all ones where the row cannot be read, which keeps it apart
//   sort   LSD radix, 8 bits a pass, Passes passes, from A to B and back. Each warp owns a contiguous
//          share: it counts its digits in shared memory, the block scans the counts in the order
//          (digit, warp), then each warp walks its share again and places 32 keys at a time: the
//          lanes of one digit find each other by ballots. So it is stable, and Order depends on nothing
//          but the rows.
//   runs   a row begins one where it is the first, where its LBAs lie in another window than those of the
//          row before or more than Reach behind them, and at and after a row that cannot be read. A run also
//          reads what lies between rows so close, which takes the SSD less than another command (gpuio.Speed). The
//          warps count the beginnings in their shares, then write them in order.
//
// Ownership: the block alone writes its bucket's part of every array. One launch at a time uses the keys
// and indices A and B (it runs on submit's stream, before submit); Order may be A or B of the indices,
// wherever the last pass ends.
//
// Memory order: plain stores and block barriers; what follows on the stream sees all.
//
// Must match: gpuio/coalesce.go; Order, Runs, Units and Remaining to the byte, for any block of whole warps.
//
// Bandwidth: 12 bytes of row and position read and 12 written per row for the keys; in each pass 8 read to
// count, 12 read and 12 written; 16 read and 4 per run written at the end. With three passes (16 M slots)
// 140 bytes per row. One block has some 50 GB/s, so 100 thousand rows take about 0.3 ms, while an SSD of
// 1 M reads/s reads them in 100. Not measured: no GPU was at hand.
#include "queue.h"

namespace {

constexpr u32 digitBits = 8, digits = 1 << digitBits;
constexpr u32 maxWarps = 32;   // of a block
constexpr u32 ahead = 4;       // keys that a lane loads before it places the first
constexpr u64 noKey = ~(u64)0; // of a row that cannot be read; slots are below 2^63

HX_DEVICE inline bool readable(u64 key) { return (i64)key >= 0; }

// The key of the row at an index of Rows. submit finds out again why a row is bad.
HX_DEVICE inline u64 key_of(const SetState *s, u32 ssd, i64 i) {
	io::Row r = io::row_of(*s, ssd, dev::ld(dev::at<i64>(s->Rows, i)), dev::ld(dev::at<u32>(s->Pos, i)));
	return r.bad != 0 ? noKey : r.slot;
}

// Makes offsets of the warps' counts, bins[warp][digit]: where in the bucket each warp puts its first
// key of a digit. A thread has each counts, next to each other in the order (digit, warp).
HX_DEVICE inline void scan_bins(u32 *bins, u32 *sums) {
	constexpr u32 each = digits / 32; // of all warps' counts, for each of their lanes
	u32 warps = dev::threads() / 32, first = dev::tid() * each, own = 0, total;
	for (u32 f = first; f < first + each; f++) own += dev::ld(&bins[f % warps * digits + f / warps]);
	u32 at = block_scan(sums, own, &total);
	for (u32 f = first; f < first + each; f++) {
		u32 *bin = &bins[f % warps * digits + f / warps];
		u32 n = dev::ld(bin);
		dev::st(bin, at);
		at += n;
	}
}

// One pass: keys and indices from..to of one pair of arrays go to the other by 8 bits of the key.
HX_DEVICE inline void pass(u32 *bins, u32 *sums, i64 from, Share mine, u32 shift, u64 keys, u64 idx, u64 keysTo, u64 idxTo) {
	u32 lane = dev::lane();
	u32 *bin = bins + dev::tid() / 32 * digits;
	for (u32 d = lane; d < digits; d += 32) dev::st(&bin[d], 0u);
	dev::syncwarp();
	for (i64 i = mine.lo + lane; i < mine.hi; i += 32) dev::add_shared(&bin[dev::ld(dev::at<u64>(keys, i)) >> shift & (digits - 1)], 1u);
	dev::syncthreads();
	scan_bins(bins, sums);
#ifndef HX_PLANT_COALESCE_BARRIER
	dev::syncthreads();
#endif
	for (i64 base = mine.lo; base < mine.hi; base += 32 * ahead) {
		u64 key[ahead];
		u32 index[ahead];
#pragma GCC unroll 4
		for (u32 k = 0; k < ahead; k++) {
			i64 i = base + k * 32 + lane;
			key[k] = i < mine.hi ? dev::ld(dev::at<u64>(keys, i)) : 0;
			index[k] = i < mine.hi ? dev::ld(dev::at<u32>(idx, i)) : 0;
		}
#pragma GCC unroll 4
		for (u32 k = 0; k < ahead; k++) {
			bool in = base + k * 32 + lane < mine.hi;
			u32 digit = (u32)(key[k] >> shift) & (digits - 1);
			u32 peers = warp_peers(dev::ballot(dev::full_mask, in), digit, digitBits);
			u32 to = dev::ld(&bin[digit]) + dev::popc(peers & lanes_below());
			dev::syncwarp(); // all have read the offset before it moves
			if (in && (peers & lanes_below()) == 0) dev::st(&bin[digit], to + dev::popc(peers));
			dev::syncwarp();
			if (!in) continue;
			dev::st(dev::at<u64>(keysTo, from + to), key[k]);
			dev::st(dev::at<u32>(idxTo, from + to), index[k]);
		}
	}
	dev::syncthreads();
}

// Where windows and gaps are, in slots.
struct Rule {
	u64 window; // slots of one
	u64 perLBA;
	u64 reach; // from a row to the next: slots, or LBAs where an LBA has several
};

// Does a run begin at the row with this key, behind the row with that one?
HX_DEVICE inline bool begins(const Rule &r, u64 key, u64 before) {
	if (!readable(key) || !readable(before)) return true;
	if (io::divide(key, r.window) != io::divide(before, r.window)) return true;
	return r.perLBA > 1 ? io::divide(key, r.perLBA) > io::divide(before, r.perLBA) + r.reach : key > before + r.reach;
}

HX_DEVICE inline bool head(const Rule &r, u64 keys, i64 from, i64 i) {
	return i == from || begins(r, dev::ld(dev::at<u64>(keys, i)), dev::ld(dev::at<u64>(keys, i - 1)));
}

} // namespace

HX_THREADS(coalesce, CoalesceParams, 32 * maxWarps)
HX_KERNEL(coalesce, CoalesceParams) {
	HX_SHARED(u32, bins, maxWarps * digits);
	HX_SHARED(u32, sums, maxWarps);
	HX_SHARED(u32, found, maxWarps);
	if (dev::dropped(hx)) return;
	const SetState *s = dev::at<SetState>(p.Sets, p.Set);
	const Layout &l = s->Layout;
	u32 tid = dev::tid(), threads = dev::threads(), lane = dev::lane(), w = tid / 32;
	if (p.Passes > 64 / digitBits) {
		if (tid == 0) dev::fail(hx, 1, p.Passes);
		return;
	}
	if (p.Window == 0 || p.Window % (u32)l.LBAsPerRow != 0) {
		if (tid == 0) dev::fail(hx, 2, p.Window, (u64)l.LBAsPerRow);
		return;
	}
	Rule rule{(u64)(p.Window / (u32)l.LBAsPerRow) * (u64)l.RowsPerLBA, (u64)l.RowsPerLBA, p.Reach / (u32)l.LBAsPerRow};
	for (u32 ssd = dev::bid(); ssd < (u32)l.SSDs; ssd += dev::blocks()) {
		i64 from = dev::ld(dev::at<i64>(s->Offsets, ssd)), to = dev::ld(dev::at<i64>(s->Offsets, ssd + 1));
		Share mine = share_of({from, to}, w, threads / 32);
		for (i64 i = mine.lo + lane; i < mine.hi; i += 32) {
			dev::st(dev::at<u64>(p.KeysA, i), key_of(s, ssd, i));
			dev::st(dev::at<u32>(p.IdxA, i), (u32)i);
		}
		dev::syncthreads();
		u64 keys = p.KeysA, idx = p.IdxA;
		for (u32 n = 0; n < p.Passes; n++) {
			bool odd = n % 2 != 0;
			u64 keysTo = odd ? p.KeysA : p.KeysB, idxTo = odd ? p.IdxA : p.IdxB;
			pass(bins, sums, from, mine, n * digitBits, keys, idx, keysTo, idxTo);
			keys = keysTo;
			idx = idxTo;
		}

		u32 heads = 0;
		for (i64 base = mine.lo; base < mine.hi; base += 32) {
			i64 i = base + lane;
			heads += dev::popc(dev::ballot(dev::full_mask, i < mine.hi && head(rule, keys, from, i)));
		}
		if (lane == 0) dev::st(&found[w], heads);
		dev::syncthreads();
		u32 runs = 0;
		i64 at = from + ssd; // where Runs of this SSD begin
		for (u32 i = 0; i < threads / 32; i++) {
			u32 n = dev::ld(&found[i]);
			if (i < w) at += n;
			runs += n;
		}
		for (i64 base = mine.lo; base < mine.hi; base += 32) {
			i64 i = base + lane;
			bool begin = i < mine.hi && head(rule, keys, from, i);
			u32 all = dev::ballot(dev::full_mask, begin);
			if (begin) dev::st(dev::at<u32>(s->Runs, at + dev::popc(all & lanes_below())), (u32)i);
			at += dev::popc(all);
			if (i < mine.hi && idx != s->Order) dev::st(dev::at<u32>(s->Order, i), dev::ld(dev::at<u32>(idx, i)));
		}
		if (tid == 0) {
			i64 first = from + ssd;
			dev::st(dev::at<u32>(s->Runs, first + runs), (u32)to);
			dev::st(dev::at<i64>(s->Units, 2 * (i64)ssd), first);
			dev::st(dev::at<i64>(s->Units, 2 * (i64)ssd + 1), first + runs);
		}
		for (u32 i = tid; i < p.QueuesPerSSD; i += threads) {
			i64 lo, hi;
			io::share(runs, i, p.QueuesPerSSD, s->Rotate, &lo, &hi);
			dev::st(dev::at<u32>(s->Remaining, (i64)ssd * p.QueuesPerSSD + i), (u32)(hi - lo));
		}
		dev::syncthreads(); // found is used again
	}
}
