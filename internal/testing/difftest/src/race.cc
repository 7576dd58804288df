// Runs the data kernels and those of training steps on random batches under ThreadSanitizer: race
// SEED ROUNDS. The package around it compares their results; here no two threads may meet on a plain
// access without a barrier between them, with blocks on OS threads of their own.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "abi_agg.h"
#include "abi_data.h"
#include "shim.h"

namespace {

std::mt19937_64 rng;
hx_fault fault;
u64 launches;

u64 below(u64 n) { return rng() % n; }

template <typename T> u64 address(std::vector<T> &v) { return v.empty() ? 0 : (u64)(uintptr_t)v.data(); }

void launch(const char *name, u32 blocks, const void *params) {
	const shim::Kernel *k = shim::find(name);
	if (k == nullptr) {
		std::fprintf(stderr, "no kernel %s\n", name);
		std::exit(1);
	}
	hx_launch hx = {(u64)(uintptr_t)&fault, ++launches};
	shim::Options o;
	o.seed = rng();
	o.jitter = below(2) != 0;
	u32 threads = 32 * (u32)(1 + below(8));
	shim::Result r = shim::run_grid(k, blocks, threads, params, hx, o);
	if (!r.ok || fault.Seq != 0) {
		std::fprintf(stderr, "%s: %s, fault %u (%llu, %llu, %llu)\n", name, r.error.c_str(), fault.Code, fault.A, fault.B, fault.C);
		std::exit(1);
	}
}

struct alignas(64) Row {
	u8 bytes[64];
};

// Layer-wise sampling from the frontier of a hop that has been sampled, with a table of its own.
void layers(SampleParams s) {
	i64 n = s.NumDst, edges = 0;
	const i64 *nodes = dev::at<i64>(s.Nodes), *indptr = dev::at<i64>(s.Indptr);
	for (i64 i = 0; i < n; i++) edges += indptr[nodes[i] + 1] - indptr[nodes[i]];
	std::vector<u64> vals((u64)s.Slots, ~0ull), keys(s.Keys ? (u64)s.Slots : 0, ~0ull);
	std::vector<u32> slots(edges + 1), pos(edges + 1), out(edges + 1), hist(layerBins), degrees(n + edges);
	std::vector<i64> start(n + 1), sums(64), news(64), totals(2), outStart(n + 1), frontier(nodes, nodes + n);
	std::vector<u64> mass(n + edges), rank(n + edges);
	std::vector<float> weights(n + edges);
	frontier.resize(n + edges);
	LayerState state = {};
	s.Nodes = s.Dst = address(frontier);
	s.Degrees = address(degrees);
	s.EdgeStart = address(start);
	s.Src = address(slots);
	s.Vals = address(vals);
	s.Keys = address(keys);
	s.Sums = address(sums);
	s.Totals = address(totals);
	s.SrcLen = edges;
	s.NodesLen = n + edges;
	s.Fanout = -1;
	u32 grid = (u32)(1 + below(5));
	for (const char *k : {"sample_begin", "sample_count", "sample_fill"}) launch(k, grid, &s);
	LayerParams p = {};
	p.Sample = s;
	p.Pos = address(pos);
	p.Mass = address(mass);
	p.Rank = address(rank);
	p.Hist = address(hist);
	p.State = (u64)(uintptr_t)&state;
	p.News = address(news);
	p.OutStart = address(outStart);
	p.OutSrc = address(out);
	p.Weights = address(weights);
	p.Edges = edges;
	p.OutLen = edges;
	p.WeightLen = n + edges;
	p.Take = (i64)below((u64)(n + edges));
	p.Bits = 40;
	launch("layer_weigh", grid, &p);
	launch("layer_rank", grid, &p);
	for (i32 shift = 55; shift >= 0; shift -= (i32)layerBits) {
		p.Shift = (u32)shift;
		launch("layer_hist", grid, &p);
		launch("layer_pick", 1, &p);
	}
	for (const char *k : {"layer_count", "layer_assign", "layer_relabel"}) launch(k, grid, &p);
	if (totals[1] > p.Take || totals[0] != outStart[n]) {
		std::fprintf(stderr, "layers: %lld new nodes of %lld, %lld edges, %lld\n", totals[1], p.Take, totals[0], outStart[n]);
		std::exit(1);
	}
}

// Layer-neighbour sampling from the same frontier, with a table of its own.
void labor(SampleParams s) {
	i64 n = s.NumDst, edges = 0;
	const i64 *nodes = dev::at<i64>(s.Nodes), *indptr = dev::at<i64>(s.Indptr);
	for (i64 i = 0; i < n; i++) edges += indptr[nodes[i] + 1] - indptr[nodes[i]];
	std::vector<u64> vals((u64)s.Slots, ~0ull), keys(s.Keys ? (u64)s.Slots : 0, ~0ull), limits(n);
	std::vector<u32> src(edges + 1), degrees(n + edges);
	std::vector<i64> start(n + 1), sums(64), totals(2), frontier(nodes, nodes + n);
	frontier.resize(n + edges);
	s.Nodes = s.Dst = address(frontier);
	s.Degrees = address(degrees);
	s.EdgeStart = address(start);
	s.Src = address(src);
	s.Vals = address(vals);
	s.Keys = address(keys);
	s.Sums = address(sums);
	s.Totals = address(totals);
	s.SrcLen = edges;
	s.NodesLen = n + edges;
	LaborParams p = {};
	p.Keys[0] = rng();
	p.Keys[1] = rng();
	p.Phase = rng();
	p.Span = (u32)(1 + below(4));
	p.Turn = (u32)below(p.Span);
	p.Limits = address(limits);
	p.Sample = s;
	u32 grid = (u32)(1 + below(5));
	launch("sample_begin", grid, &s);
	for (const char *k : {"labor_count", "labor_fill"}) launch(k, grid, &p);
	for (const char *k : {"unique_count", "unique_assign", "unique_relabel"}) launch(k, grid, &s);
	for (i64 i = 0; i < n; i++) {
		i64 degree = indptr[nodes[i] + 1] - indptr[nodes[i]], got = start[i + 1] - start[i];
		if (got > degree || (got == 0 && degree > 0)) {
			std::fprintf(stderr, "labor: %lld of %lld neighbours\n", got, degree);
			std::exit(1);
		}
	}
}

void round() {
	i64 nodes = (i64)(1 + below(800));
	bool wide = below(2), hashed = below(2);
	std::vector<i64> indptr(nodes + 1), indices64;
	std::vector<u32> indices32;
	for (i64 v = 0; v < nodes; v++) {
		for (u64 d = below(30); d > 0; d--) {
			u64 id = below((u64)nodes);
			if (wide) {
				indices64.push_back((i64)id);
			} else {
				indices32.push_back((u32)id);
			}
		}
		indptr[v + 1] = (i64)(indices64.size() + indices32.size());
	}
	i64 edges = indptr[nodes], seeds = (i64)(1 + below(200)), fanout = below(3) ? (i64)(1 + below(30)) : -1;
	i64 room = seeds * 30 + 1;
	std::vector<i64> frontier(seeds + room), start(seeds + 1), sums(64), totals(2);
	std::vector<u32> src(room), degrees(seeds + room);
	for (i64 i = 0; i < seeds; i++) frontier[i] = (i64)below((u64)nodes);
	u64 slots = hashed ? 16384 : (u64)nodes;
	std::vector<u64> vals(slots, ~0ull), keys(hashed ? slots : 0, ~0ull);
	SampleParams s = {};
	s.Indptr = address(indptr);
	s.Indices = wide ? address(indices64) : address(indices32);
	s.Nodes = s.Dst = address(frontier);
	s.Degrees = address(degrees);
	s.EdgeStart = address(start);
	s.Src = address(src);
	s.Vals = address(vals);
	s.Keys = address(keys);
	s.Sums = address(sums);
	s.Totals = address(totals);
	s.NumNodes = nodes;
	s.NumEdges = edges;
	s.Slots = (i64)slots;
	s.SrcLen = room;
	s.NodesLen = seeds + room;
	s.NumDst = s.Frontier = seeds;
	s.Sources = nodes;
	s.Fanout = fanout;
	s.Key[0] = (u32)rng();
	s.Key[1] = (u32)rng();
	s.Stamp = 0xfffffffe;
	s.HashShift = 64 - 14;
	s.Wide = wide;
	u32 grid = (u32)(1 + below(5));
	for (const char *k : {"sample_begin", "sample_count", "sample_fill", "unique_count", "unique_assign", "unique_relabel"}) launch(k, grid, &s);
	i64 count = seeds + totals[1];
	std::vector<u32> table((u64)nodes, 3), loopless((u64)count);
	LooplessParams own = {s.Nodes, address(table), address(loopless), nodes, count};
	launch("sample_loopless", grid, &own);
	std::vector<i64> firsts = {0, nodes / 3, nodes / 2, nodes}, ends(3), local((u64)count);
	TypeParams types = {s.Nodes, address(totals) + 8, address(firsts), address(ends), seeds, seeds + room, 3};
	launch("unique_types", grid, &types);
	LocalParams inType = {s.Nodes, address(local), count, nodes / 3};
	launch("unique_local", grid, &inType);
	if (below(2)) layers(s);
	if (below(2)) labor(s);

	// Every row is in a random tier; ranks are counts of the lines before.
	std::vector<Line> lines((nodes + rowsPerLine - 1) / rowsPerLine);
	u32 in[2] = {0, 0};
	for (i64 r = 0; r < nodes; r++) {
		Line &l = lines[r / rowsPerLine];
		u32 n = r % rowsPerLine;
		if (n == 0) std::memcpy(l.Rank, in, sizeof in);
		u64 tier = below(3);
		l.Code[n / 32] |= tier << n % 32 * 2;
		if (tier != tierSSD) in[tier - 1]++;
	}
	std::vector<u32x4> aligned(lines.size() * 4); // 16-byte loads
	std::memcpy(static_cast<void *>(aligned.data()), lines.data(), lines.size() * sizeof(Line));
	u32 ssds = (u32)(1 + below(12));
	std::vector<u64> code(count);
	std::vector<u32> counts((u64)grid * (bucketMiss + ssds)), pos[3], slot[2];
	std::vector<i64> total(bucketMiss + ssds), miss(count);
	for (auto &v : pos) v.resize(count);
	for (auto &v : slot) v.resize(count);
	LookupParams l = {};
	l.Nodes = address(frontier);
	l.Lines = address(aligned);
	l.Code = address(code);
	l.Counts = address(counts);
	l.Totals = address(total);
	l.GPUPos = address(pos[0]);
	l.GPUSlot = address(slot[0]);
	l.CPUPos = address(pos[1]);
	l.CPUSlot = address(slot[1]);
	l.MissPos = address(pos[2]);
	l.MissRow = address(miss);
	l.Rows = nodes;
	l.Count = count;
	l.Grid = grid;
	l.SSDs = ssds;
	for (u32 phase : {phaseCount, phasePrefix, phaseScatter}) {
		if (grid == 1 && phase != phaseCount) break;
		l.Phases = grid == 1 ? phaseCount | phasePrefix | phaseScatter : phase;
		launch("lookup", phase == phasePrefix ? 1 : grid, &l);
	}

	i64 bytes = (i64)(1 + below(64)), stride = bytes + (i64)below(8);
	std::vector<Row> gpu(in[0]), cpu(in[1]);
	std::vector<u8> dst((u64)(count * stride + 64));
	i64 perLine = (i64)(1 + below(4)); // of a tier whose lines, and maybe rows, have gaps
	GatherParams g = {address(gpu), address(cpu), address(pos[0]), address(slot[0]), address(pos[1]), address(slot[1]),
	                  address(dst), total[bucketGPU], total[bucketCPU], in[0], in[1], count, bytes, stride,
	                  perLine, perLine * (i64)sizeof(Row), bytes + (i64)below(sizeof(Row) - (u64)bytes + 1)};
	launch("gather", grid, &g);

	std::vector<u32> hot(nodes);
	HotnessParams h = {address(frontier), address(hot), count, nodes};
	launch("hotness", grid, &h);
	i64 wantGPU = (i64)below((u64)nodes + 1), wantCPU = (i64)below((u64)(nodes - wantGPU) + 1);
	std::vector<u64> hist(2 * rankBins);
	std::vector<RankPart> parts(grid);
	std::vector<i64> lists(wantGPU + wantCPU + 1);
	RankState state = {{wantGPU, wantGPU + wantCPU}, {0, 0}};
	RankParams r = {};
	r.Counts = address(hot);
	r.Hist = address(hist);
	r.State = (u64)(uintptr_t)&state;
	r.Parts = address(parts);
	r.GPU = address(lists);
	r.CPU = address(lists) + (u64)wantGPU * 8;
	r.Rows = nodes;
	r.GPURows = wantGPU;
	r.CPURows = wantCPU;
	r.Grid = grid;
	for (i32 shift = 24; shift >= 0; shift -= 8) {
		r.Shift = (u32)shift;
		r.Phase = rankHist;
		launch("hotness_rank", grid, &r);
		r.Phase = rankPick;
		launch("hotness_rank", 1, &r);
	}
	for (u32 phase : {rankCount, rankPrefix, rankScatter}) {
		r.Phase = phase;
		launch("hotness_rank", phase == rankPrefix ? 1 : grid, &r);
	}
}

// A directory in sets: announcements, parts and failures, as cache/gpusets.go launches them.
void sets() {
	i64 rows = (i64)(1 + below(2000)), slots = (i64)(1 + below(200)), most = 400;
	SetsParams p = {};
	p.Rule = setRandom + (u32)below(5);
	p.Stride = p.Rule == setS3FIFO ? setGhosts + setWays : setGhosts;
	p.Slots = slots;
	p.Sets = (slots + setWays - 1) / setWays;
	p.Rows = rows;
	p.SSDs = 1 + (u32)below(3);
	p.PerLine = 1 + (u32)below(4);
	p.Key[0] = (u32)rng();
	u32 grid = (u32)(1 + below(5));
	std::vector<u32> words((u64)(p.Sets * p.Stride)), until((u64)(p.Sets * setWays)), at[9], list[8], counts((u64)grid * sortBins), deal((u64)grid * sortBins);
	std::vector<u64> window(4096), other(4096), table(1024), stats(setStats);
	std::vector<i64> totals(5 + setStats + sortBins), lines(most), nodes(most), dealt(most), plan(most), moves(3);
	std::vector<u32> dealt_pos(most), plan_pos(most);
	for (auto &a : at) a.resize(most);
	for (auto &l : list) l.resize(most);
	p.Words = address(words);
	p.Counts = address(counts);
	p.Stats = address(stats);
	p.Totals = address(totals);
	p.Nodes = address(nodes);
	p.Line = address(at[0]);
	p.Place = address(at[1]);
	p.Of = address(at[2]);
	p.Answer = address(at[3]);
	p.Number = address(at[4]);
	u64 *lists[] = {&p.GPUPos, &p.GPURow, &p.CPUPos, &p.CPURow, &p.MissPos, &p.MissRow, &p.FillLine, &p.FillSlot};
	for (u32 i = 0; i < 8; i++) *lists[i] = address(list[i]);
	p.Lines = address(lines);
	p.SSDCounts = address(deal);
	p.Dealt = address(dealt);
	p.DealtPos = address(dealt_pos);
	p.PlanRows = address(plan);
	p.PlanPos = address(plan_pos);
	p.Moves = address(moves);
	p.SSDBits = p.SSDs > 2 ? 2 : p.SSDs - 1;
	p.Grid = grid;
	p.Table = address(table);
	p.TableSlots = 1024;
	launch("sets_clear", grid, &p);
	bool pins = below(2);
	if (pins) {
		p.Until = address(until);
		p.Window = address(window);
		p.WindowSlots = 4096;
	}
	for (u32 batch = 1; batch < 5; batch++) {
		p.Count = (i64)(1 + below(most));
		for (i64 i = 0; i < p.Count; i++) nodes[i] = (i64)below((u64)rows);
		if (pins) {
			p.Batch = batch + (u32)below(2);
			launch("sets_announce", grid, &p);
			if (batch == 2) { // the table moves
				SetsParams moved = p;
				moved.Table = p.Window;
				moved.TableSlots = p.WindowSlots;
				moved.Window = address(other);
				moved.Batch = batch;
				launch("sets_window", grid, &moved);
				p.Window = moved.Window;
			}
		}
		p.Batch = batch;
		std::fill(table.begin(), table.end(), ~0ull);
		launch("sets_lines", grid, &p);
		for (u32 pass = 0; pass < 2; pass++) {
			p.Shift = pass * sortBits;
			p.KeysOut = address(at[5 + pass]);
			p.ValsOut = address(at[7 + pass]);
			for (u32 phase : {setsCount, setsPrefix, setsWrite}) {
				if (grid == 1 && phase != setsCount) break;
				p.Phases = grid == 1 ? setsCount | setsPrefix | setsWrite : phase;
				launch("sets_sort", phase == setsPrefix ? 1 : grid, &p);
			}
			p.KeysIn = p.KeysOut;
			p.ValsIn = p.ValsOut;
		}
		launch("sets_play", grid, &p);
		for (u32 phase : {setsCount, setsPrefix, setsNumber, setsDeal, setsWrite}) {
			if (grid == 1 && phase != setsCount) break;
			p.Phases = grid == 1 ? setsCount | setsPrefix | setsNumber | setsDeal | setsWrite : phase;
			launch("sets_lists", phase == setsPrefix || phase == setsDeal ? 1 : grid, &p);
		}
		if (totals[0] + totals[2] != p.Count || totals[4] != totals[7]) {
			std::fprintf(stderr, "sets: %lld and %lld rows of %lld, %lld fills, %lld lines came in\n", totals[0], totals[2], p.Count, totals[4], totals[7]);
			std::exit(1);
		}
		SetsParams merge = p;
		merge.Count = totals[3];
		launch("sets_merge", grid, &merge);
		for (i64 i = 0; i < merge.Count; i++) {
			if (plan[i] != dealt[i] || lines[dealt_pos[i]] != plan[i] || (i > 0 && plan[i - 1] % p.SSDs > plan[i] % p.SSDs)) {
				std::fprintf(stderr, "sets: line %lld is at %lld of the plan\n", dealt[i], i);
				std::exit(1);
			}
		}
		if (below(2) && totals[4] > 0) {
			p.Count = totals[4];
			launch("sets_drop", grid, &p);
		}
	}
}

// The kernels of a training step, products aside, on a random block.
void step() {
	i64 dst = (i64)(1 + below(150)), sources = dst + (i64)below(300), dim = (i64)(4 + 4 * below(40));
	std::vector<i64> indptr(dst + 1);
	std::vector<u32> src;
	for (i64 i = 0; i < dst; i++) {
		for (u64 d = below(20); d > 0; d--) src.push_back(below(3) ? (u32)below((u64)sources) : 0);
		indptr[i + 1] = (i64)src.size();
	}
	i64 edges = indptr[dst];
	std::vector<u32> degrees(sources, 7), ends(sources), lists(edges), keys[2], values(edges), totals(radixBins);
	for (auto &k : keys) k.resize(edges);
	auto quads = [](i64 n) { return std::vector<u32x4>((u64)(n + 3) / 4); }; // 16-byte loads
	auto x = quads(sources * dim), out = quads(sources * dim), grad = quads(dst * dim), self = quads(dst * dim);
	std::vector<float> weights(sources);
	TransposeParams t = {};
	AggParams &a = t.Agg;
	a.Indptr = address(indptr);
	a.Src = address(src);
	a.Degrees = address(degrees);
	a.X = address(x);
	a.Out = address(out);
	a.Grad = address(grad);
	a.Self = address(self);
	a.Weights = address(weights);
	a.TEnd = address(ends);
	a.TDst = address(lists);
	a.NumDst = dst;
	a.NumSrc = sources;
	a.Edges = edges;
	a.Dim = dim;
	a.Scale = 1;
	u32 grid = (u32)(1 + below(5));
	launch("sage_mean", grid, &a);
	launch("gcn_weights", grid, &a);
	launch("gcn_agg", grid, &a);
	launch("gin_sum", grid, &a);
	std::vector<float> loops(dst), others(dst);
	AggParams own = a;
	own.SelfWeights = address(loops);
	own.DstWeights = address(others);
	launch("self_weights", grid, &own);
	std::vector<float> shares(sources, 0.5f), parts(dst);
	if (below(2)) { // a block with weights
		a.SrcWeights = address(shares);
		a.DstWeights = address(parts);
		launch("agg_weights", grid, &a);
		launch("sage_weighted", grid, &a);
		launch("gcn_weights", grid, &a);
		launch("gcn_agg", grid, &a);
	}
	u32 bits = 0;
	while (sources >> bits != 0) bits++;
	t.Bits = 1 + (u32)below(radixBits);
	t.Grid = (u32)(1 + below(12)); // also more shares than blocks
	t.KeysIn = a.Src;
	std::vector<u32> hist((u64)t.Grid << t.Bits);
	t.Hist = address(hist);
	t.Totals = address(totals);
	u32 passes = (bits + t.Bits - 1) / t.Bits;
	for (u32 i = 0; i < passes; i++) {
		t.Shift = i * t.Bits;
		t.KeysOut = address(keys[i % 2]);
		t.ValsOut = (passes - i) % 2 == 1 ? a.TDst : address(values);
		launch("transpose_count", grid, &t);
		launch("transpose_scan", grid, &t);
		launch("transpose_scatter", grid, &t);
		t.KeysIn = t.KeysOut;
		t.ValsIn = t.ValsOut;
	}
	t.GCN = (u32)below(2);
	launch("transpose_ends", grid, &t);
	const char *backward[] = {"sage_mean_bwd", "gcn_agg_bwd", "gin_sum_bwd"};
	launch(backward[below(3)], grid, &a);
	launch("row_dot", grid, &a);
	launch("relu_bwd", grid, &a);

	auto sums = quads((dst / sumLeaf + 1) * dim);
	SumParams sum = {a.Grad, address(sums), dst, dim};
	launch("col_sum_part", grid, &sum);
	launch("col_sum", grid, &sum);

	std::vector<i32> labels(dst), pred(dst);
	for (auto &y : labels) y = (i32)below((u64)dim + 1) - 1;
	std::vector<double> loss(dst);
	std::vector<Outcome> outcome(1);
	XentParams l = {a.Grad, address(labels), a.Self, address(loss), address(pred), address(outcome), 0, dst, dim, 0};
	if (below(2)) l.Weights = a.X, l.Smoothing = 0.1;
	for (const char *k : {"xent_count", "softmax_xent", "xent_sum"}) launch(k, grid, &l);
	DenseParams d = {a.Grad, a.Out, a.Self, address(loss), address(pred), address(outcome), 0, dst, dim, 0};
	for (const char *k : {"dense_count", "loss_bce", "dense_sum"}) launch(k, grid, &d);

	AdamParams adam = {};
	adam.P = a.X;
	adam.G = a.Out;
	auto m = quads(sources * dim), v = quads(sources * dim);
	adam.M = address(m);
	adam.V = address(v);
	adam.N = sources * dim;
	std::vector<double> parts(sources * dim / squareUnit + 1), square(1);
	std::vector<float> factor(1);
	ClipParams clip = {a.Out, address(parts), address(factor), address(square), sources * dim, 1, 0};
	launch("square_sum", grid, &clip);
	launch("clip_factor", grid, &clip);
	adam.Factor = address(factor);
	launch("adam", grid, &adam);
	BiasActParams act = {a.X, 0, sources, dim, dim, {}, gemmReLU | gemmDropout, 0};
	launch("bias_act", grid, &act);
}

} // namespace

int main(int argc, char **argv) {
	if (argc != 3) {
		std::fprintf(stderr, "usage: race SEED ROUNDS\n");
		return 2;
	}
	rng.seed(std::strtoull(argv[1], nullptr, 10));
	u64 rounds = std::strtoull(argv[2], nullptr, 10);
	for (u64 i = 0; i < rounds; i++) {
		round();
		sets();
		step();
	}
	std::printf("%llu rounds, %llu launches\n", rounds, launches);
	return 0;
}
