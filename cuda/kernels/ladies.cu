// layer_weigh, layer_rank, layer_hist, layer_pick, layer_count, layer_assign, layer_relabel: layer-wise importance sampling
// (LADIES; graph/ladies.go has the papers). Reference: graph/ladies.go, to the bit (table slots aside), for any grid and any block
// of whole warps.
//
// In: what sample_begin, sample_count and sample_fill leave with Fanout -1: the E in-edges of the hop's NumDst destinations
// as table slots (Sample.Src), where each destination's begin (Sample.EdgeStart), and in the table (table.h) for each node
// its candidate number: the destination that it is, or NumDst + the first edge that names it. So candidates have
// the same numbers whichever thread comes first, and arrays by candidate are compared as they are.
//
//   layer_weigh    each edge: its candidate to Pos; adds 2^Bits / in-degree² (an integer, at least 1) of its destination to the
//                  candidate's Mass. Sums of integers, so relaxed atomics in any order.
//   layer_rank     each candidate: the bits of its exponential variable -ln(u) / Mass, u by Philox of (node, hop, epoch, batch);
//                  all ones for numbers that no node has.
//   layer_hist     a digit of 11 bits at Shift, counted among the variables that agree with Tau in the bits above: in
//                  shared memory, then added to Hist by atomics.
//   layer_pick     one block: the digit of the (Take+1)-th smallest variable; Hist is zero again. After six pairs of the two,
//                  Tau is that variable, or all ones where there are no more than Take.
//   layer_count    each block's share of the edges: those whose source is a destination or has a variable below Tau (Sums), and
//                  those of them that name their node first (News). The others are struck out of Pos.
//   layer_assign   the same shares: the block's edges in order to OutSrc (candidates), where each destination's begin to
//                  OutStart, new nodes to the frontier with weights 1 / (1 - exp(-Mass Tau)), and each one's index in the place of its
//                  first edge's slot in Sample.Src. A tile of an edge per thread at a time, ranks by block sums.
//   layer_relabel  candidates to frontier indices.
//
// Each destination, edge, candidate and new node is written by one thread, Mass and Hist by relaxed atomics; what another
// thread reads, later launches read.
//
// Bytes per edge of the E: weigh 4 + 32 (a sector of the table) + 4 + 32 read and written of Mass, rank 16, hist 6 × 8, count
// 8 + 32 (a sector of Rank where it is no destination), assign 8: about 200, 7 G edges a second at 1.5 TB/s, beside
// sample_fill, which reads the edges over PCIe. Not measured: no GPU was at hand.
#include "abi_data.h"
#include "device.h"
#include "fp.h"
#include "philox.h"
#include "scan.h"
#include "table.h"

namespace {

constexpr u64 noRank = ~(u64)0;
constexpr u32 noPos = ~(u32)0;

HX_DEVICE inline i64 edge_start(const LayerParams &p, i64 i) { return dev::ld(dev::at<i64>(p.Sample.EdgeStart, i)); }

// The first destination from lo to hi (the answer when there is none before) whose edges begin at e or later.
HX_DEVICE inline i64 first_from(const LayerParams &p, i64 lo, i64 hi, i64 e) {
	while (lo < hi) {
		i64 mid = (i64)(((u64)lo + (u64)hi) / 2);
		if (edge_start(p, mid) < e) {
			lo = mid + 1;
		} else {
			hi = mid;
		}
	}
	return lo;
}

HX_DEVICE inline u32 slot_of(const LayerParams &p, i64 e) { return dev::ld(dev::at<u32>(p.Sample.Src, e)); }

HX_DEVICE inline u64 tau_of(const LayerParams &p) { return dev::ld(&dev::at<LayerState>(p.State)->Tau); }

HX_DEVICE inline float weight_of(u64 mass, u64 tau) {
	if (tau == noRank) return 1;
	double x = fp::mul((double)mass, fp::of_bits(tau));
	double q = fp::sub(x, fp::mul(fp::mul(x, x), 0.5)); // of small ones two terms are enough, and 1 - exp would cancel
	if (x > 1.0 / (1 << 20)) q = fp::sub(1.0, fp::exp_down(-x));
	return (float)fp::div(1.0, q);
}

} // namespace

HX_KERNEL(layer_weigh, LayerParams) {
	if (dev::dropped(hx)) return;
	const SampleParams &g = p.Sample;
	Share s = block_share(p.Edges);
	if (s.lo >= s.hi) return;
	i64 lo = first_from(p, 0, g.NumDst, s.lo + 1) - 1, hi = first_from(p, lo, g.NumDst, s.hi); // destinations of the share
	for (i64 e = s.lo + dev::tid(); e < s.hi; e += dev::threads()) {
		i64 i = first_from(p, lo, hi, e + 1) - 1;
		u64 degree = (u64)(edge_start(p, i + 1) - edge_start(p, i));
		u64 mass = ((u64)1 << p.Bits) / degree / degree;
		u32 pos = table_pos(g, slot_of(p, e));
		dev::st(dev::at<u32>(p.Pos, e), pos);
		dev::add_gpu<dev::relaxed>(dev::at<u64>(p.Mass, pos), mass > 1 ? mass : (u64)1);
	}
}

HX_KERNEL(layer_rank, LayerParams) {
	if (dev::dropped(hx)) return;
	const SampleParams &g = p.Sample;
	Share s = block_share(g.NumDst + p.Edges);
	for (i64 c = s.lo + dev::tid(); c < s.hi; c += dev::threads()) {
		u64 mass = dev::ld(dev::at<u64>(p.Mass, c)), rank = noRank;
		if (mass != 0) {
			u64 v = c < g.NumDst ? (u64)dev::ld(dev::at<i64>(g.Nodes, c)) : table_node(g, slot_of(p, c - g.NumDst));
			PhiloxBlock w = philox(p.Key, (u32)v, (u32)(v >> 32) | g.Hop << 16, g.Epoch, p.Batch);
			u64 r = ((u64)w.w[1] << 32 | w.w[0]) >> 12;
			double u = fp::mul(fp::add((double)(i64)r, 0.5), 1.0 / ((u64)1 << 52));
			rank = fp::bits(fp::div(-fp::log_up(u), (double)mass));
		}
		dev::st(dev::at<u64>(p.Rank, c), rank);
	}
}

HX_KERNEL(layer_hist, LayerParams) {
	HX_SHARED(u32, bins, layerBins);
	if (dev::dropped(hx)) return;
	bool first = p.Shift + layerBits >= 64;
	const LayerState *state = dev::at<LayerState>(p.State);
	if (!first && dev::ld(&state->Left) < 0) return;
	for (u32 b = dev::tid(); b < layerBins; b += dev::threads()) dev::st(&bins[b], 0u);
	dev::syncthreads();
	u32 done = first ? 0 : p.Shift + layerBits;
	u64 want = first ? 0 : dev::ld(&state->Tau) >> done;
	Share s = block_share(p.Sample.NumDst + p.Edges);
	for (i64 c = s.lo + dev::tid(); c - dev::lane() < s.hi; c += dev::threads()) {
		u64 r = c < s.hi ? dev::ld(dev::at<u64>(p.Rank, c)) : noRank;
		bool in = r != noRank && (first || r >> done == want);
		u32 all = dev::ballot(dev::full_mask, in);
		if (all == 0) continue;
		// The first digit, of exponents, is the same for most: one lane adds for all that have its own.
		u32 digit = (u32)(r >> p.Shift) & (layerBins - 1), leader = dev::ctz(all);
		u32 common = dev::shfl(dev::full_mask, digit, leader);
		u32 same = dev::ballot(dev::full_mask, in && digit == common);
		if (dev::lane() == leader) {
			dev::add_shared(&bins[digit], dev::popc(same));
		} else if (in && digit != common) {
			dev::add_shared(&bins[digit], 1u);
		}
	}
	dev::syncthreads();
	for (u32 b = dev::tid(); b < layerBins; b += dev::threads()) {
		u32 n = dev::ld(&bins[b]);
		if (n != 0) dev::add_gpu<dev::relaxed>(dev::at<u32>(p.Hist, b), n);
	}
}

HX_KERNEL(layer_pick, LayerParams) {
	HX_SHARED(i64, sums, 32);
	if (dev::dropped(hx) || dev::bid() != 0) return;
	LayerState *state = dev::at<LayerState>(p.State);
	bool first = p.Shift + layerBits >= 64;
	u64 tau = first ? 0 : dev::ld(&state->Tau);
	i64 left = first ? p.Take : dev::ld(&state->Left), before = 0;
	if (left < 0) return; // the same in all threads
	dev::syncthreads();   // all have read the state before it changes
	for (u32 base = 0; base < layerBins; base += dev::threads()) {
		u32 d = base + dev::tid();
		i64 n = d < layerBins ? (i64)dev::ld(dev::at<u32>(p.Hist, d)) : 0, total;
		i64 below = before + block_scan(sums, n, &total);
		if (below <= left && left < below + n) {
			dev::st(&state->Tau, tau | (u64)d << p.Shift);
			dev::st(&state->Left, left - below);
		}
		if (d < layerBins) dev::st(dev::at<u32>(p.Hist, d), 0u);
		before += total;
	}
	if (before <= left && dev::tid() == 0) { // there are no more than are taken
		dev::st(&state->Tau, noRank);
		dev::st(&state->Left, (i64)-1);
	}
}

HX_KERNEL(layer_count, LayerParams) {
	HX_SHARED(i64, sums, 32);
	if (dev::dropped(hx)) return;
	u64 tau = tau_of(p);
	Share s = block_share(p.Edges);
	i64 kept = 0, news = 0;
	for (i64 e = s.lo + dev::tid(); e < s.hi; e += dev::threads()) {
		u32 *at = dev::at<u32>(p.Pos, e), pos = dev::ld(at);
		if ((i64)pos >= p.Sample.NumDst && dev::ld(dev::at<u64>(p.Rank, pos)) >= tau) {
			dev::st(at, noPos);
			continue;
		}
		kept++;
		news += (i64)pos == p.Sample.NumDst + e;
	}
	kept = block_sum(sums, kept);
	news = block_sum(sums, news);
	if (dev::tid() == 0) {
		dev::st(dev::at<i64>(p.Sample.Sums, dev::bid()), kept);
		dev::st(dev::at<i64>(p.News, dev::bid()), news);
	}
}

HX_KERNEL(layer_assign, LayerParams) {
	HX_SHARED(i64, sums, 32);
	if (dev::dropped(hx)) return;
	const SampleParams &g = p.Sample;
	u32 threads = dev::threads(), tid = dev::tid();
	u64 tau = tau_of(p);
	Share s = block_share(g.NumDst);
	for (i64 i = s.lo + tid; i < s.hi; i += threads) dev::st(dev::at<float>(p.Weights, i), 1.0f);

	i64 kept = 0, news = 0;
	for (u32 b = tid; b < dev::bid(); b += threads) {
		kept += dev::ld(dev::at<i64>(g.Sums, b));
		news += dev::ld(dev::at<i64>(p.News, b));
	}
	i64 to = block_sum(sums, kept), at = g.NumDst + block_sum(sums, news);
	s = block_share(p.Edges);
	i64 lo = first_from(p, 0, g.NumDst, s.lo), hi = first_from(p, lo, g.NumDst, s.hi); // destinations that begin in the share
	for (i64 base = s.lo; base < s.hi; base += threads) {
		i64 e = base + tid;
		u32 pos = e < s.hi ? dev::ld(dev::at<u32>(p.Pos, e)) : noPos;
		bool in = pos != noPos, isNew = in && (i64)pos == g.NumDst + e;
		i64 allIn, allNew;
		i64 out = to + block_scan(sums, (i64)in, &allIn), index = at + block_scan(sums, (i64)isNew, &allNew);
		to += allIn;
		at += allNew;
		if (e >= s.hi) continue;
		// Destinations whose edges begin here: the last of them has some, those before it have none.
		for (i64 i = first_from(p, lo, hi, e); i < hi && edge_start(p, i) == e; i++) dev::st(dev::at<i64>(p.OutStart, i), out);
		if (!in) continue;
		if (out >= p.OutLen) {
			dev::fail(hx, 4, (u64)(out + 1), (u64)p.OutLen);
			continue;
		}
		dev::st(dev::at<u32>(p.OutSrc, out), pos);
		if (!isNew) continue;
		if (index >= g.NodesLen || index >= p.WeightLen) {
			dev::fail(hx, 6, (u64)index, (u64)(g.NodesLen < p.WeightLen ? g.NodesLen : p.WeightLen));
			continue;
		}
		u64 v = table_node(g, slot_of(p, e));
		dev::st(dev::at<u64>(g.Nodes, index), v);
		dev::st(dev::at<float>(p.Weights, index), weight_of(dev::ld(dev::at<u64>(p.Mass, pos)), tau));
		dev::st(dev::at<u32>(g.Src, e), (u32)index);
		if (g.Degrees != 0) dev::st(dev::at<u32>(g.Degrees, index), (u32)neighbours(g, hx, (i64)v).degree);
	}
	if (dev::bid() == dev::blocks() - 1) { // destinations without edges at the end, and the end
		for (i64 i = first_from(p, hi, g.NumDst, p.Edges) + tid; i <= g.NumDst; i += threads) dev::st(dev::at<i64>(p.OutStart, i), to);
		if (tid == 0) {
			dev::st(dev::at<i64>(g.Totals), to);
			dev::st(dev::at<i64>(g.Totals, 1), at - g.NumDst);
		}
	}
}

HX_KERNEL(layer_relabel, LayerParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(dev::ld(dev::at<i64>(p.OutStart, p.Sample.NumDst)));
	for (i64 e = s.lo + dev::tid(); e < s.hi; e += dev::threads()) {
		u32 *out = dev::at<u32>(p.OutSrc, e);
		i64 first = (i64)dev::ld(out) - p.Sample.NumDst;
		if (first >= 0) dev::st(out, slot_of(p, first));
	}
}
