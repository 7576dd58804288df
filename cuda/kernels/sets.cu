// sets_clear, sets_lines, sets_sort, sets_play, sets_lists, sets_merge, sets_announce, sets_window, sets_drop: the directory of a dynamic
// cache (cache/policy.Sets) in the GPU's memory. It finds, admits, evicts and pins lines without the CPU. Reference: cache/policy/sets.go and
// ways.go, and cache/dynamicsets.go for the lists: the same answers, lists and words of each set, to the bit, for any grid and any block of
// whole warps. cache/gpusets.go launches them.
//
// A set is Stride words at Words (the places are those of sets.go: masks by way, the order, tags, ghosts) and 32 words at Until. A line
// belongs to the set that its hash names. A set depends on the accesses to it and their order alone, so sets are played at the
// same time and the order within a set is all that a launch has to keep: that of the lines' first places in the part.
//
//   sets_lines     position → Line (noTag: in the CPU tier) and Place (the row's in its line, or the CPU tier's row). Table, filled
//                  with ones before, learns each line's least position: entries are Line << 32 | position and only fall (atomic minimum),
//                  so what is read later does not depend on who came first; where it stands in the table does. With a window, Number is
//                  the last batch to come that accesses the line, 0 for none: asked here for all lines at once, not by the warps that play.
//   sets_sort      a stable radix sort of the lines' first places by set, sortBits a pass: count, prefix and scatter as in lookup.cu. The
//                  first pass takes positions in order, writes Of (each position's first place) and drops repeats; the number of
//                  what is left goes to Stats[0].
//   sets_play      a warp takes a share of the sorted places, moved to where sets begin, and plays one set after the other: a lane is a way, a
//                  place of the order and a ghost. The lines of the part are found first, then the misses come in; under sieve and S3-FIFO a
//                  line that came in and left is told as a bypass. Answer at the first place: hit flag | slot, or noAnswer.
//   sets_lists     the ticket's lists in ascending order of position: count, prefix, number (lines to be read get theirs, in order of their
//                  first places, in Number) and write. Totals is where the CPU looks; Stats is zero again. The lines to be read are dealt
//                  out to SSDs as well, stably: counted beside number, prefix, and written beside write (Dealt, DealtPos: the line and its
//                  number).
//   sets_merge     a ticket's dealt lines to their places in a plan of several tickets: Moves says by SSD how far, First where its lines
//                  begin in the staging buffer.
//   sets_announce  rows of a batch to come: Window learns each line's last batch (atomic maximum), Until that of lines that are cached.
//   sets_window    the live entries of one window table to another.
//   sets_drop      empties slots whose filling failed, if they still have that line. Fills of one part never share a slot, but may share a
//                  set, so masks are cleared by atomics.
//
// A set's words belong to one warp of a launch of sets_play; all else is written by one thread of one launch and read by later ones, but
// for Table, Window and Until in sets_announce (relaxed atomics, any order gives the same) and Stats (sums).
//
// Memory by position: 8 (row) + 16 (Line, Place, Of, Answer) + 32 twice (Table) + 16 a pass, and 36 with a window (Window, Number); by line
// that is played one set of 192 bytes (320 with ghosts), and 128 of Until with a window, read and written. Dependent trips to memory: in
// sets_play two a set of up to 32 accesses (places and positions; lines and set) however many misses it has; cache/gpucost.go has those of
// all launches, counted in the PTX. Times are not measured: no GPU was at hand.
#include "abi_data.h"
#include "device.h"
#include "philox.h"
#include "scan.h"

namespace {

constexpr u32 workers = 8; // warps of a block that work, in sets_sort and sets_lists

HX_DEVICE inline u64 mix(u64 x) {
	x ^= x >> 30;
	x *= 0xbf58476d1ce4e5b9ull;
	x ^= x >> 27;
	x *= 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

HX_DEVICE inline u32 set_of(const SetsParams &p, u32 line) { return (u32)dev::mulhi(mix(line), (u64)p.Sets); }

// The first slot of a set.
HX_DEVICE inline u64 set_base(const SetsParams &p, u64 set) {
	return p.Slots == p.Sets * (i64)setWays ? set * setWays : set * (u64)p.Slots / (u64)p.Sets;
}

HX_DEVICE inline u32 *words_of(const SetsParams &p, u64 set) { return dev::at<u32>(p.Words, (i64)(set * p.Stride)); }

struct Spot {
	u32 line, index;
};

HX_DEVICE inline Spot spot_of(const SetsParams &p, u64 row) {
	if (row >> 32 == 0) { // a 64-bit division is slow on a GPU
		u32 ssd = (u32)row % p.SSDs, slot = (u32)row / p.SSDs;
		return {slot / p.PerLine * p.SSDs + ssd, slot % p.PerLine};
	}
	u64 ssd = row % p.SSDs, slot = row / p.SSDs;
	return {(u32)(slot / p.PerLine * p.SSDs + ssd), (u32)(slot % p.PerLine)};
}

// Is a row in the CPU tier, by the line of the index (Line of abi_data.h)? slot is its row there.
HX_DEVICE inline bool in_cpu(const SetsParams &p, u64 row, u32 *slot) {
	if (p.CPUIndex == 0) return false;
	const Line *l = dev::at<Line>(p.CPUIndex, (i64)(row / rowsPerLine));
	u32 n = (u32)(row % rowsPerLine), word = n / 32, shift = n % 32 * 2;
	u64 code = dev::ld(&l->Code[word]);
	if ((code >> shift & 3) != tierCPU) return false;
	constexpr u64 high = 0xaaaaaaaaaaaaaaaaull;
	u32 before = dev::ld(&l->Rank[1]) + dev::popc(code & high & (((u64)1 << shift) - 1));
	for (u32 j = 0; j < word; j++) before += dev::popc(dev::ld(&l->Code[j]) & high);
	*slot = before;
	return true;
}

// Puts key << 32 | value into a table of a power of two of slots. The table is never full.
template <bool least> HX_DEVICE inline void note(u64 table, u64 slots, u64 empty, u32 key, u32 value) {
	u64 want = (u64)key << 32 | value, at = mix(key) & (slots - 1);
	for (u64 probes = 0; probes < slots; probes++, at = (at + 1) & (slots - 1)) {
		u64 *e = dev::at<u64>(table, (i64)at);
		u64 old = dev::cas_gpu<dev::relaxed>(e, empty, want); // a load before it would be one more trip
		if (old == empty) return;
		if (old >> 32 != key) continue;
		if constexpr (least) {
			dev::min_gpu<dev::relaxed>(e, want);
		} else {
			dev::max_gpu<dev::relaxed>(e, want);
		}
		return;
	}
}

// The value of a key; none where it is not there. Nobody writes the table.
HX_DEVICE inline u32 noted(u64 table, u64 slots, u64 empty, u32 key, u32 none) {
	u64 at = mix(key) & (slots - 1);
	for (u64 probes = 0; probes < slots; probes++, at = (at + 1) & (slots - 1)) {
		u64 e = dev::ld(dev::at<u64>(table, (i64)at));
		if (e == empty) break;
		if (e >> 32 == key) return (u32)e;
	}
	return none;
}

constexpr u64 noEntry = ~(u64)0; // of Table; Window's is 0

// A warp's part of its block's share; empty for a warp that only watches.
HX_DEVICE inline Share warp_share(i64 n, u32 *active) {
	u32 w = dev::tid() / 32;
	*active = dev::threads() / 32;
	if (*active > workers) *active = workers;
	Share block = block_share(n);
	return w < *active ? share_of(block, w, *active) : Share{block.hi, block.hi};
}

struct Entry {
	bool have;
	u32 set, pos;
};

// The entry at place i of a pass's input. The first pass takes the first places of lines.
HX_DEVICE inline Entry entry(const SetsParams &p, i64 i, bool have) {
	if (!have) return {false, 0, 0};
	if (p.Shift != 0) return {true, dev::ld(dev::at<u32>(p.KeysIn, i)), dev::ld(dev::at<u32>(p.ValsIn, i))};
	u32 line = dev::ld(dev::at<u32>(p.Line, i));
	if (line == noTag || dev::ld(dev::at<u32>(p.Of, i)) != (u32)i) return {false, 0, 0};
	return {true, set_of(p, line), (u32)i};
}

HX_DEVICE inline u32 digit(const SetsParams &p, u32 set) { return set >> p.Shift & (sortBins - 1); }

HX_DEVICE inline void find_firsts(const SetsParams &p, Share s) {
	for (i64 i = s.lo + dev::lane(); i < s.hi; i += 32) {
		u32 line = dev::ld(dev::at<u32>(p.Line, i));
		dev::st(dev::at<u32>(p.Of, i), line == noTag ? (u32)i : noted(p.Table, (u64)p.TableSlots, noEntry, line, (u32)i));
	}
	dev::syncwarp();
}

HX_DEVICE inline void count_digits(const SetsParams &p, Share s, u32 *own) {
	for (u32 b = dev::lane(); b < sortBins; b += 32) dev::st(&own[b], 0u);
	dev::syncwarp();
	for (i64 base = s.lo; base < s.hi; base += 32) {
		i64 i = base + dev::lane();
		Entry e = entry(p, i, i < s.hi);
		u32 d = digit(p, e.set), peers = warp_peers(dev::ballot(dev::full_mask, e.have), d, sortBits);
		if (e.have && (peers & lanes_below()) == 0) dev::st(&own[d], dev::ld(&own[d]) + dev::popc(peers));
		dev::syncwarp();
	}
}

constexpr u32 ahead = 8; // counts that a thread asks for before it needs the first

struct Counted {
	u32 c[ahead];
};

HX_DEVICE inline Counted counts_at(u64 counts, Share s, i64 g, u32 bin) {
	Counted v;
#pragma GCC unroll 8
	for (u32 k = 0; k < ahead; k++) v.c[k] = g + k < s.hi ? dev::ld(dev::at<u32>(counts, (g + k) * sortBins + bin)) : 0;
	return v;
}

// From counts by block and bin to places, by one block. A bin has as many threads as the block has for it, each with a part of the blocks.
// place, for workers * sortBins, then has where each bin begins. Returns the sum, in the first warp.
HX_DEVICE inline u32 bins_prefix(u64 counts, u32 grid, u32 *place) {
	u32 parts = dev::threads() / sortBins, all = 0;
	parts = parts < 1 ? 1 : parts > workers ? workers : parts;
	for (u32 i = dev::tid(); i < parts * sortBins; i += dev::threads()) {
		Share s = share_of({0, grid}, i / sortBins, parts);
		u32 sum = 0;
		for (i64 g = s.lo; g < s.hi; g += ahead) {
			Counted v = counts_at(counts, s, g, i % sortBins);
#pragma GCC unroll 8
			for (u32 k = 0; k < ahead; k++) sum += v.c[k];
		}
		dev::st(&place[i], sum);
	}
	dev::syncthreads();
	if (dev::tid() < 32) {
		for (u32 b = dev::lane(); b < sortBins; b += 32) {
			u32 c = 0;
			for (u32 i = 0; i < parts; i++) c += dev::ld(&place[i * sortBins + b]);
			u32 to = warp_scan(c), from = all + to - c;
			for (u32 i = 0; i < parts; i++) {
				c = dev::ld(&place[i * sortBins + b]);
				dev::st(&place[i * sortBins + b], from);
				from += c;
			}
			all += dev::shfl(dev::full_mask, to, 31);
		}
	}
	dev::syncthreads();
	for (u32 i = dev::tid(); i < parts * sortBins; i += dev::threads()) {
		Share s = share_of({0, grid}, i / sortBins, parts);
		u32 at = dev::ld(&place[i]);
		for (i64 g = s.lo; g < s.hi; g += ahead) {
			Counted v = counts_at(counts, s, g, i % sortBins);
#pragma GCC unroll 8
			for (u32 k = 0; k < ahead; k++) {
				if (g + k < s.hi) dev::st(dev::at<u32>(counts, (g + k) * sortBins + i % sortBins), at);
				at += v.c[k];
			}
		}
	}
	return all;
}

// A block's counts of its warps, by bin.
HX_DEVICE inline void put_counts(u64 counts, const u32 *place, u32 active) {
	for (u32 b = dev::tid(); b < sortBins; b += dev::threads()) {
		u32 sum = 0;
		for (u32 i = 0; i < active; i++) sum += dev::ld(&place[i * sortBins + b]);
		dev::st(dev::at<u32>(counts, (i64)dev::bid() * sortBins + b), sum);
	}
}

// Where the warps of a block begin in each bin, in the place of their counts.
HX_DEVICE inline void take_places(u64 counts, u32 *place, u32 active) {
	for (u32 b = dev::tid(); b < sortBins; b += dev::threads()) {
		u32 at = dev::ld(dev::at<u32>(counts, (i64)dev::bid() * sortBins + b));
		for (u32 i = 0; i < active; i++) {
			u32 c = dev::ld(&place[i * sortBins + b]);
			dev::st(&place[i * sortBins + b], at);
			at += c;
		}
	}
}

// Where this lane's entry goes: behind what its bin has got so far, in the order of the lanes. For whole warps; have: the lane has an entry.
HX_DEVICE inline u32 take_place(u32 *own, bool have, u32 bin, u32 bits) {
	u32 peers = warp_peers(dev::ballot(dev::full_mask, have), bin, bits), from = dev::ld(&own[bin]);
	dev::syncwarp(); // all have read before the lowest writes
	if (have && (peers & lanes_below()) == 0) dev::st(&own[bin], from + dev::popc(peers));
	dev::syncwarp();
	return from + dev::popc(peers & lanes_below());
}

HX_DEVICE inline void sort_scatter(const SetsParams &p, Share s, u32 *own) {
	for (i64 base = s.lo; base < s.hi; base += 32) {
		i64 i = base + dev::lane();
		Entry e = entry(p, i, i < s.hi);
		u32 at = take_place(own, e.have, digit(p, e.set), sortBits);
		if (e.have) {
			dev::st(dev::at<u32>(p.KeysOut, at), e.set);
			dev::st(dev::at<u32>(p.ValsOut, at), e.pos);
		}
	}
}

// The first place at or behind `at` where a set begins, n for none. For whole warps.
HX_DEVICE inline i64 set_begin(const SetsParams &p, i64 at, i64 n) {
	for (;; at += 32) {
		i64 i = at + dev::lane();
		bool begins = i == 0 || i >= n || dev::ld(dev::at<u32>(p.KeysIn, i)) != dev::ld(dev::at<u32>(p.KeysIn, i - 1));
		u32 found = dev::ballot(dev::full_mask, begins);
		if (found == 0) continue;
		at += dev::ctz(found);
		return at < n ? at : n;
	}
}

// A set in a warp's registers: masks are the same in all lanes; tag and until are those of way `lane`, way is the one at place `lane` of
// the order, ghost is ghost `lane`.
struct Ways {
	u32 seen, held, visited, often, main, hand;
	u32 tag, until, way, ghost;
	u32 ways, full, base;
};

HX_DEVICE inline bool keeps_batch(u32 rule) { return rule == setRandom || rule == setLRU || rule == setClock; }

// The places of the ways of a mask.
HX_DEVICE inline u32 places(const Ways &s, u32 mask) {
	return dev::ballot(dev::full_mask, dev::lane() < s.ways && (mask >> s.way & 1) != 0);
}

// Moves the way at a place to the newest end, and returns it.
HX_DEVICE inline u32 newest(Ways &s, u32 place) {
	u32 next = dev::shfl(dev::full_mask, s.way, (dev::lane() + 1) & 31), moved = dev::shfl(dev::full_mask, s.way, place);
	if (dev::lane() >= place && dev::lane() + 1 < s.ways) s.way = next;
	if (dev::lane() + 1 == s.ways) s.way = moved;
	return moved;
}

HX_DEVICE inline u32 warp_or(u32 v) {
	for (u32 d = 16; d > 0; d /= 2) v |= dev::shfl(dev::full_mask, v, dev::lane() ^ d);
	return v;
}

HX_DEVICE inline void hit(const SetsParams &p, Ways &s, u32 way) {
	u32 bit = 1u << way;
	if ((s.seen & bit) != 0) return;
	s.seen |= bit;
	if (p.Rule == setLRU) {
		newest(s, dev::ctz(places(s, bit)));
	} else if (p.Rule == setClock || p.Rule == setSieve) {
		s.visited |= bit;
	} else if (p.Rule == setS3FIFO && (s.visited & s.often & bit) == 0) { // a count up to 3
		s.often ^= s.visited & bit;
		s.visited ^= bit;
	}
}

// The ways whose lines must not leave.
HX_DEVICE inline u32 stay(const SetsParams &p, const Ways &s) {
	u32 batch = keeps_batch(p.Rule) ? s.seen : 0;
	if (p.Until == 0) return batch;
	u32 told = dev::ballot(dev::full_mask, dev::lane() < s.ways && s.until >= p.Batch);
	if (keeps_batch(p.Rule)) return batch | told;
	u32 now = dev::ballot(dev::full_mask, dev::lane() < s.ways && s.until == p.Batch);
	return told & ~(now & s.seen);
}

// The first bit of c from bit `hand` on, around; *passed is what lies before it. c has a bit.
HX_DEVICE inline u32 from_hand(u32 c, u32 hand, u32 full, u32 *passed) {
	u32 below = (1u << hand) - 1, ahead = c & ~below;
	u32 at = dev::ctz(ahead != 0 ? ahead : c), before = (1u << at) - 1;
	*passed = ahead != 0 ? before & ~below : (full & ~below) | before;
	return at;
}

HX_DEVICE inline u32 replace_clock(Ways &s, u32 may) {
	u32 c = may & ~s.visited, passed;
	if (c == 0) { // the hand goes round once
		s.visited = 0;
		c = may;
	}
	u32 way = from_hand(c, s.hand, s.full, &passed);
	s.visited &= ~passed;
	s.hand = way + 1 == s.ways ? 0 : way + 1;
	return way;
}

HX_DEVICE inline u32 replace_sieve(Ways &s, u32 may) {
	u32 c = places(s, may & ~s.visited), passed;
	if (c == 0) {
		s.visited = 0;
		c = places(s, may);
	}
	u32 place = from_hand(c, s.hand, s.full, &passed);
	s.visited &= ~warp_or(passed >> dev::lane() & 1 ? 1u << s.way : 0);
	s.hand = place + 1 == s.ways ? 0 : place; // the new line is looked at last
	return newest(s, place);
}

// Each turn takes one from a way's count or moves a way to the main queue, so it ends.
HX_DEVICE inline u32 replace_s3fifo(Ways &s, u32 may) {
	u32 target = s.ways / 10 > 1 ? s.ways / 10 : 1, ghosts = s.ways > target ? s.ways - target : 0;
	for (;;) {
		u32 small = may & ~s.main, large = may & s.main;
		bool first = small != 0 && (dev::popc(s.full & ~s.main) >= target || large == 0);
		u32 way = newest(s, dev::ctz(places(s, first ? small : large))), bit = 1u << way;
		if (first) {
			if ((s.often & bit) == 0) {
				u32 tag = dev::shfl(dev::full_mask, s.tag, way);
				if (ghosts > 0) {
					if (dev::lane() == s.hand) s.ghost = tag;
					s.hand = s.hand + 1 == ghosts ? 0 : s.hand + 1;
				}
				return way;
			}
			s.main |= bit;
			s.often &= ~bit;
			s.visited &= ~bit;
		} else {
			if (((s.often | s.visited) & bit) == 0) return way;
			s.often &= ~(bit & ~s.visited); // 2 becomes 1
			s.visited ^= bit;
		}
	}
}

HX_DEVICE inline u32 replace(const SetsParams &p, Ways &s, u32 line, u32 may) {
	if (p.Rule == setRandom) {
		PhiloxBlock b = philox(p.Key, line, 0, p.Batch, 0);
		u32 n = (u32)philox_bounded((u64)b.w[1] << 32 | b.w[0], dev::popc(may));
		return dev::ctz(dev::ballot(dev::full_mask, (may >> dev::lane() & 1) != 0 && dev::popc(may & lanes_below()) == n));
	}
	if (p.Rule == setLRU) return newest(s, dev::ctz(places(s, may)));
	if (p.Rule == setClock) return replace_clock(s, may);
	if (p.Rule == setSieve) return replace_sieve(s, may);
	return replace_s3fifo(s, may);
}

// Brings a line in that is not cached: its way, or setWays where all must stay.
HX_DEVICE inline u32 insert(const SetsParams &p, Ways &s, u32 line, u32 until, bool *evicts) {
	u32 free = s.full & ~s.held, way;
	*evicts = free == 0;
	if (free != 0) {
		way = dev::ctz(free);
		if (p.Rule == setLRU || p.Rule == setSieve || p.Rule == setS3FIFO) {
			u32 place = dev::ctz(places(s, 1u << way));
			newest(s, place);
			if (p.Rule == setSieve && place < s.hand) s.hand--;
		}
	} else {
		u32 may = s.full & ~stay(p, s);
		if (may == 0) return setWays;
		way = replace(p, s, line, may);
	}
	u32 bit = 1u << way;
	if (dev::lane() == way) {
		s.tag = line;
		s.until = until;
	}
	s.held |= bit;
	s.visited &= ~bit;
	s.seen |= bit;
	if (p.Rule == setS3FIFO) {
		s.often &= ~bit;
		s.main &= ~bit;
		u32 ghost = dev::ballot(dev::full_mask, s.ghost == line);
		if (ghost != 0) {
			if (dev::lane() == dev::ctz(ghost)) s.ghost = noTag;
			s.main |= bit;
		}
	}
	return way;
}

HX_DEVICE inline Ways load(const SetsParams &p, u32 set) {
	const u32 *w = words_of(p, set);
	u32 lane = dev::lane(), word = lane < setTags ? dev::ld(&w[lane]) : 0;
	Ways s;
	s.tag = dev::ld(&w[setTags + lane]);
	s.ghost = p.Rule == setS3FIFO ? dev::ld(&w[setGhosts + lane]) : noTag;
	s.until = p.Until != 0 ? dev::ld(dev::at<u32>(p.Until, (i64)set * setWays + lane)) : 0;
	u64 base = set_base(p, set);
	s.base = (u32)base;
	s.ways = (u32)(set_base(p, (u64)set + 1) - base);
	s.full = s.ways == 32 ? dev::full_mask : (1u << s.ways) - 1;
	bool now = dev::shfl(dev::full_mask, word, setBatch) == p.Batch;
	u32 seen = dev::shfl(dev::full_mask, word, setSeen);
	s.seen = now ? seen : 0;
	s.held = dev::shfl(dev::full_mask, word, setHeld);
	s.visited = dev::shfl(dev::full_mask, word, setVisited);
	s.often = dev::shfl(dev::full_mask, word, setOften);
	s.main = dev::shfl(dev::full_mask, word, setMain);
	s.hand = dev::shfl(dev::full_mask, word, setHand);
	s.way = dev::shfl(dev::full_mask, word, setOrder + lane / 4) >> lane % 4 * 8 & 0xff;
	return s;
}

HX_DEVICE inline void store(const SetsParams &p, u32 set, const Ways &s) {
	u32 *w = words_of(p, set), lane = dev::lane(), word = 0;
	for (u32 j = 0; j < 4; j++) word |= dev::shfl(dev::full_mask, s.way, (lane * 4 + j) & 31) << j * 8; // lanes 8 to 15 have the order
	if (lane == setBatch) word = p.Batch;
	if (lane == setSeen) word = s.seen;
	if (lane == setHeld) word = s.held;
	if (lane == setVisited) word = s.visited;
	if (lane == setOften) word = s.often;
	if (lane == setMain) word = s.main;
	if (lane == setHand) word = s.hand;
	if (lane == setHand + 1) word = 0;
	if (lane < setTags) dev::st(&w[lane], word);
	dev::st(&w[setTags + lane], s.tag);
	if (p.Rule == setS3FIFO) dev::st(&w[setGhosts + lane], s.ghost);
	if (p.Until != 0) dev::st(dev::at<u32>(p.Until, (i64)set * setWays + lane), s.until);
}

struct Tally {
	u32 hits, inserted, evicted, bypassed;
};

// An access of the warp's 32.
struct Access {
	bool have;
	u32 pos, line, until, answer;
};

HX_DEVICE inline u32 until_of(const SetsParams &p, u32 pos) { return p.Until != 0 ? dev::ld(dev::at<u32>(p.Number, pos)) : 0; }

HX_DEVICE inline Access access(const SetsParams &p, i64 i, i64 end, bool answered) {
	if (i >= end) return {false, 0, 0, 0, noAnswer};
	u32 pos = dev::ld(dev::at<u32>(p.ValsIn, i));
	return {true, pos, dev::ld(dev::at<u32>(p.Line, pos)), answered ? until_of(p, pos) : 0,
	        answered ? dev::ld(dev::at<u32>(p.Answer, pos)) : noAnswer};
}

HX_DEVICE inline void answer(const SetsParams &p, const Access &a) { dev::st(dev::at<u32>(p.Answer, a.pos), a.answer); }

// Plays a set's accesses, of which pos has the first 32: those stay in registers, so that nothing is waited for twice. Later ones
// have their answers in memory meanwhile.
HX_DEVICE inline void play(const SetsParams &p, u32 set, i64 begin, i64 end, u32 pos, Tally &t) {
	u32 lane = dev::lane();
	Access first = {begin + lane < end, pos, 0, 0, noAnswer};
	if (first.have) { // under way with the set
		first.line = dev::ld(dev::at<u32>(p.Line, pos));
		first.until = until_of(p, pos);
	}
	Ways s = load(p, set);
	for (i64 base = begin; base < end; base += 32) {
		Access a = base == begin ? first : access(p, base + lane, end, false);
		for (u32 k = 0; k < 32 && base + k < end; k++) {
			u32 found = dev::ballot(dev::full_mask, s.tag == dev::shfl(dev::full_mask, a.line, k));
			if (found == 0) continue;
			u32 way = dev::ctz(found);
			hit(p, s, way);
			if (lane == k) a.answer = hitAnswer | (s.base + way);
			t.hits++;
		}
		if (base == begin) {
			first = a;
		} else if (a.have) {
			answer(p, a);
		}
	}
	for (i64 base = begin; base < end; base += 32) {
		Access a = base == begin ? first : access(p, base + lane, end, true);
		bool miss = a.have && a.answer == noAnswer;
		for (u32 left = dev::ballot(dev::full_mask, miss); left != 0; left &= left - 1) {
			u32 k = dev::ctz(left);
			bool evicts;
			u32 way = insert(p, s, dev::shfl(dev::full_mask, a.line, k), dev::shfl(dev::full_mask, a.until, k), &evicts);
			if (way == setWays) {
				t.bypassed++;
				continue;
			}
			if (lane == k) a.answer = s.base + way;
			t.inserted++;
			t.evicted += evicts;
		}
		if (base == begin) {
			first = a;
		} else if (miss) {
			answer(p, a);
		}
	}
	if (!keeps_batch(p.Rule)) { // what came in may have left
		for (i64 base = begin; base < end; base += 32) {
			Access a = base == begin ? first : access(p, base + lane, end, true);
			bool came = a.have && (a.answer & hitAnswer) == 0;
			u32 tag = dev::shfl(dev::full_mask, s.tag, came ? a.answer - s.base : 0);
			bool gone = came && tag != a.line;
			u32 n = dev::popc(dev::ballot(dev::full_mask, gone));
			if (gone) a.answer = noAnswer;
			t.inserted -= n;
			t.evicted -= n;
			t.bypassed += n;
			if (base == begin) {
				first = a;
			} else if (gone) {
				answer(p, a);
			}
		}
	}
	if (first.have) answer(p, first);
	store(p, set, s);
}

// The SSD of a position's line.
HX_DEVICE inline u32 ssd_of(const SetsParams &p, i64 i) { return dev::ld(dev::at<u32>(p.Line, i)) % p.SSDs; }

constexpr u32 lists = 5; // GPU hits, CPU hits, rows of lines to be read, these lines, those of them that fill a slot

// The lists that a position is in, as bits.
HX_DEVICE inline u32 lists_of(const SetsParams &p, i64 i, bool have) {
	if (!have) return 0;
	if (dev::ld(dev::at<u32>(p.Line, i)) == noTag) return 2;
	u32 of = dev::ld(dev::at<u32>(p.Of, i)), answer = dev::ld(dev::at<u32>(p.Answer, of));
	if ((answer & hitAnswer) != 0 && answer != noAnswer) return 1;
	if (of != (u32)i) return 4;
	return answer == noAnswer ? 4 | 8 : 4 | 8 | 16;
}

// ssds, unless null, gets the lines to be read by SSD.
HX_DEVICE inline void count_lists(const SetsParams &p, Share s, u32 *own, u32 *ssds) {
	u32 n[lists] = {};
	if (ssds != nullptr) {
		for (u32 b = dev::lane(); b < sortBins; b += 32) dev::st(&ssds[b], 0u);
		dev::syncwarp();
	}
	for (i64 base = s.lo; base < s.hi; base += 32) {
		i64 i = base + dev::lane();
		u32 in = lists_of(p, i, i < s.hi);
		if (ssds != nullptr) {
			bool read = (in & 8) != 0;
			take_place(ssds, read, read ? ssd_of(p, i) : 0, p.SSDBits);
		}
#pragma GCC unroll 5
		for (u32 k = 0; k < lists; k++) n[k] += dev::popc(dev::ballot(dev::full_mask, (in >> k & 1) != 0));
	}
#pragma GCC unroll 5
	for (u32 k = 0; k < lists; k++) {
		if (dev::lane() == 0) dev::st(&own[k], n[k]);
	}
}

HX_DEVICE inline void lists_prefix(const SetsParams &p) {
	for (u32 k = dev::tid() / 32; k < lists; k += dev::threads() / 32) {
		u32 at = 0;
		for (u32 base = 0; base < p.Grid; base += 32) {
			u32 g = base + dev::lane();
			u32 *count = dev::at<u32>(p.Counts, (i64)g * lists + k);
			u32 c = g < p.Grid ? dev::ld(count) : 0, to = warp_scan(c);
			if (g < p.Grid) dev::st(count, at + to - c);
			at += dev::shfl(dev::full_mask, to, 31);
		}
		if (dev::lane() == 0) dev::st(dev::at<i64>(p.Totals, k), (i64)at);
	}
	for (u32 k = dev::tid(); k < setStats; k += dev::threads()) {
		u64 *sum = dev::at<u64>(p.Stats, k);
		dev::st(dev::at<i64>(p.Totals, lists + k), (i64)dev::ld(sum));
		dev::st(sum, (u64)0);
	}
}

// Numbers the lines to be read, and lists them and the slots that they fill.
HX_DEVICE inline void number_lines(const SetsParams &p, Share s, const u32 *from) {
	u32 line = dev::ld(&from[3]), fill = dev::ld(&from[4]);
	for (i64 base = s.lo; base < s.hi; base += 32) {
		i64 i = base + dev::lane();
		u32 in = lists_of(p, i, i < s.hi);
		u32 read = dev::ballot(dev::full_mask, (in & 8) != 0), fills = dev::ballot(dev::full_mask, (in & 16) != 0);
		u32 number = line + dev::popc(read & lanes_below()), at = fill + dev::popc(fills & lanes_below());
		if (in & 16) {
			dev::st(dev::at<u32>(p.FillLine, at), number);
			dev::st(dev::at<u32>(p.FillSlot, at), dev::ld(dev::at<u32>(p.Answer, i)));
		}
		if (in & 8) {
			dev::st(dev::at<i64>(p.Lines, number), (i64)dev::ld(dev::at<u32>(p.Line, i)));
			dev::st(dev::at<u32>(p.Number, i), number);
		}
		line += dev::popc(read);
		fill += dev::popc(fills);
	}
}

HX_DEVICE inline void emit_rows(const SetsParams &p, Share s, const u32 *from, u32 *ssds) {
	u32 next[3] = {dev::ld(&from[0]), dev::ld(&from[1]), dev::ld(&from[2])};
	for (i64 base = s.lo; base < s.hi; base += 32) {
		i64 i = base + dev::lane();
		u32 all = lists_of(p, i, i < s.hi), in = all & 7, pos = (u32)(p.First + i);
		u32 gpu = dev::ballot(dev::full_mask, in == 1), cpu = dev::ballot(dev::full_mask, in == 2),
		    miss = dev::ballot(dev::full_mask, in == 4);
		u32 row = 0;
		if (in != 0) row = dev::ld(dev::at<u32>(p.Place, i));
		if (in == 1) row += (dev::ld(dev::at<u32>(p.Answer, dev::ld(dev::at<u32>(p.Of, i)))) & ~hitAnswer) * p.PerLine;
		if (in == 4) row += dev::ld(dev::at<u32>(p.Number, dev::ld(dev::at<u32>(p.Of, i)))) * p.PerLine;
		u64 to = in == 1 ? p.GPUPos : in == 2 ? p.CPUPos : p.MissPos, rows = in == 1 ? p.GPURow : in == 2 ? p.CPURow : p.MissRow;
		u32 own = in == 1 ? gpu : in == 2 ? cpu : miss, at = next[in == 1 ? 0 : in == 2 ? 1 : 2] + dev::popc(own & lanes_below());
		if (in != 0) {
			dev::st(dev::at<u32>(to, at), pos);
			dev::st(dev::at<u32>(rows, at), row);
		}
		next[0] += dev::popc(gpu);
		next[1] += dev::popc(cpu);
		next[2] += dev::popc(miss);
		bool read = (all & 8) != 0;
		u32 dealt = take_place(ssds, read, read ? ssd_of(p, i) : 0, p.SSDBits);
		if (read) {
			dev::st(dev::at<i64>(p.Dealt, dealt), (i64)dev::ld(dev::at<u32>(p.Line, i)));
			dev::st(dev::at<u32>(p.DealtPos, dealt), dev::ld(dev::at<u32>(p.Number, i)));
		}
	}
}

} // namespace

HX_KERNEL(sets_clear, SetsParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.Sets * p.Stride);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		u32 word = (u32)((u64)i % p.Stride), v = word < setOrder ? 0 : noTag;
		if (word >= setOrder && word < setTags) v = (word - setOrder) * 0x04040404 + 0x03020100;
		dev::st(dev::at<u32>(p.Words, i), v);
	}
}

HX_KERNEL(sets_lines, SetsParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.Count);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		u64 row = (u64)dev::ld(dev::at<i64>(p.Nodes, p.First + i));
		Spot at = {noTag, 0};
		if (row >= (u64)p.Rows) {
			dev::fail(hx, 1, row, (u64)(p.First + i), (u64)p.Rows - 1);
		} else if (!in_cpu(p, row, &at.index)) {
			at = spot_of(p, row);
			note<true>(p.Table, (u64)p.TableSlots, noEntry, at.line, (u32)i);
			if (p.Until != 0) {
				u32 until = noted(p.Window, (u64)p.WindowSlots, 0, at.line, 0);
				dev::st(dev::at<u32>(p.Number, i), until < p.Batch ? 0 : until);
			}
		}
		dev::st(dev::at<u32>(p.Line, i), at.line);
		dev::st(dev::at<u32>(p.Place, i), at.index);
	}
}

HX_KERNEL(sets_sort, SetsParams) {
	HX_SHARED(u32, place, workers * sortBins);
	if (dev::dropped(hx)) return;
	i64 n = p.Shift == 0 ? p.Count : (i64)dev::ld(dev::at<u64>(p.Stats, 0));
	u32 w = dev::tid() / 32, active;
	Share mine = warp_share(n, &active);
	u32 *own = place + (w < active ? w : 0) * sortBins;
	if (p.Phases & setsCount) {
		if (w < active) {
			if (p.Shift == 0) find_firsts(p, mine);
			count_digits(p, mine, own);
		}
		dev::syncthreads();
		put_counts(p.Counts, place, active);
		dev::syncthreads();
	}
	if (p.Phases & setsPrefix) {
		u32 sum = bins_prefix(p.Counts, p.Grid, place);
		if (dev::tid() == 0 && p.Shift == 0) dev::st(dev::at<u64>(p.Stats, 0), (u64)sum);
		dev::syncthreads();
	}
	if (p.Phases & setsWrite) {
		if (w < active) count_digits(p, mine, own);
		dev::syncthreads();
		take_places(p.Counts, place, active);
		dev::syncthreads();
		if (w < active) sort_scatter(p, mine, own);
	}
}

HX_KERNEL(sets_play, SetsParams) {
	if (dev::dropped(hx)) return;
	i64 n = (i64)dev::ld(dev::at<u64>(p.Stats, 0));
	Share s = share_of({0, n}, dev::warp(), dev::warps());
	if (s.lo == s.hi) return;
	Tally t = {};
	i64 end = set_begin(p, s.hi, n);
	for (i64 at = set_begin(p, s.lo, n); at < end;) {
		i64 i = at + dev::lane();
		bool have = i < n;
		u32 key = have ? dev::ld(dev::at<u32>(p.KeysIn, i)) : 0, pos = have ? dev::ld(dev::at<u32>(p.ValsIn, i)) : 0;
		u32 set = dev::shfl(dev::full_mask, key, 0), other = dev::ballot(dev::full_mask, !have || key != set);
		i64 next = other != 0 ? at + dev::ctz(other) : set_begin(p, at + 32, n);
		play(p, set, at, next, pos, t);
		at = next;
	}
	if (dev::lane() != 0) return;
	u32 sums[setStats] = {0, t.hits, t.inserted, t.evicted, t.bypassed};
	for (u32 k = 1; k < setStats; k++) {
		if (sums[k] != 0) dev::add_gpu<dev::relaxed>(dev::at<u64>(p.Stats, k), (u64)sums[k]);
	}
}

HX_KERNEL(sets_lists, SetsParams) {
	HX_SHARED(u32, place, workers * lists);
	HX_SHARED(u32, dealt, workers * sortBins);
	if (dev::dropped(hx)) return;
	u32 w = dev::tid() / 32, active;
	Share mine = warp_share(p.Count, &active);
	u32 *own = place + (w < active ? w : 0) * lists, *ssds = dealt + (w < active ? w : 0) * sortBins;
	if (p.Phases & setsCount) {
		if (w < active) count_lists(p, mine, own, nullptr);
		dev::syncthreads();
		for (u32 k = dev::tid(); k < lists; k += dev::threads()) {
			u32 sum = 0;
			for (u32 i = 0; i < active; i++) sum += dev::ld(&place[i * lists + k]);
			dev::st(dev::at<u32>(p.Counts, (i64)dev::bid() * lists + k), sum);
		}
		dev::syncthreads();
	}
	if (p.Phases & setsPrefix) {
		lists_prefix(p);
		dev::syncthreads();
	}
	if (p.Phases & (setsNumber | setsWrite)) {
		if (w < active) count_lists(p, mine, own, ssds);
		dev::syncthreads();
		for (u32 k = dev::tid(); k < lists; k += dev::threads()) {
			u32 at = dev::ld(dev::at<u32>(p.Counts, (i64)dev::bid() * lists + k));
			for (u32 i = 0; i < active; i++) {
				u32 c = dev::ld(&place[i * lists + k]);
				dev::st(&place[i * lists + k], at);
				at += c;
			}
		}
		dev::syncthreads();
	}
	if (p.Phases & setsNumber) {
		if (w < active) number_lines(p, mine, own);
		put_counts(p.SSDCounts, dealt, active);
		dev::syncthreads();
	}
	if (p.Phases & setsDeal) {
		// The counts of this block's warps are needed again where it is the only one.
		HX_SHARED(u32, bins, workers * sortBins);
		bins_prefix(p.SSDCounts, p.Grid, bins);
		for (u32 b = dev::tid(); b < p.SSDs; b += dev::threads()) {
			dev::st(dev::at<i64>(p.Totals, lists + setStats + b), (i64)dev::ld(&bins[b]));
		}
		dev::syncthreads();
	}
	if (p.Phases & setsWrite) {
		take_places(p.SSDCounts, dealt, active);
		dev::syncthreads();
		if (w < active) emit_rows(p, mine, own, ssds);
	}
}

HX_KERNEL(sets_merge, SetsParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.Count);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		i64 line = dev::ld(dev::at<i64>(p.Dealt, i)), to = i + dev::ld(dev::at<i64>(p.Moves, (u32)line % p.SSDs));
		dev::st(dev::at<i64>(p.PlanRows, to), line);
		dev::st(dev::at<u32>(p.PlanPos, to), dev::ld(dev::at<u32>(p.DealtPos, i)) + (u32)p.First);
	}
}

HX_KERNEL(sets_announce, SetsParams) {
	if (dev::dropped(hx)) return;
	u32 active = dev::threads() / 32, lane = dev::lane();
	Share s = share_of(block_share(p.Count), dev::tid() / 32, active);
	for (i64 base = s.lo; base < s.hi; base += 32) {
		i64 i = base + lane;
		u64 row = i < s.hi ? (u64)dev::ld(dev::at<i64>(p.Nodes, i)) : 0;
		u32 slot, line = noTag;
		if (i < s.hi && row >= (u64)p.Rows) {
			dev::fail(hx, 1, row, (u64)i, (u64)p.Rows - 1);
		} else if (i < s.hi && !in_cpu(p, row, &slot)) {
			line = spot_of(p, row).line;
			note<false>(p.Window, (u64)p.WindowSlots, 0, line, p.Batch);
		}
		u32 set = line == noTag ? 0 : set_of(p, line);
		for (u32 k = 0; k < 32; k++) {
			u32 l = dev::shfl(dev::full_mask, line, k), in = dev::shfl(dev::full_mask, set, k);
			if (l == noTag || dev::ld(&words_of(p, in)[setTags + lane]) != l) continue;
			dev::st_relaxed_gpu(dev::at<u32>(p.Until, (i64)in * setWays + lane), p.Batch); // a repeat writes the same
		}
	}
}

HX_KERNEL(sets_window, SetsParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.TableSlots);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		u64 e = dev::ld(dev::at<u64>(p.Table, i));
		if (e != 0 && (u32)e >= p.Batch) note<false>(p.Window, (u64)p.WindowSlots, 0, (u32)(e >> 32), (u32)e);
	}
}

HX_KERNEL(sets_drop, SetsParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.Count);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		u64 slot = dev::ld(dev::at<u32>(p.FillSlot, i));
		u32 line = (u32)dev::ld(dev::at<i64>(p.Lines, dev::ld(dev::at<u32>(p.FillLine, i))));
		u64 set = ((slot + 1) * (u64)p.Sets - 1) / (u64)p.Slots;
		u32 way = (u32)(slot - set_base(p, set)), *w = words_of(p, set);
		if (dev::ld(&w[setTags + way]) != line) continue; // a later ticket's line has the slot
		constexpr u32 masks[] = {setSeen, setHeld, setVisited, setOften, setMain};
		for (u32 m : masks) dev::and_gpu<dev::relaxed>(&w[m], ~(1u << way));
		dev::st(&w[setTags + way], noTag);
		if (p.Until != 0) dev::st(dev::at<u32>(p.Until, (i64)(set * setWays + way)), 0u);
	}
}
