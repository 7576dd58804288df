// The parameter blocks of the data kernels: those of cache and graph. Same names, same order, same
// bytes as in Go; the Go structs win, and abi_test.go compares them. Addresses are u64.
#pragma once

#include "types.h"

constexpr u32 maxSSDs = 256;
constexpr u32 bucketGPU = 0, bucketCPU = 1, bucketMiss = 2;
constexpr u32 maxBuckets = bucketMiss + maxSSDs;
constexpr u32 phaseCount = 1, phasePrefix = 2, phaseScatter = 4;
constexpr u32 tierSSD = 0, tierGPU = 1, tierCPU = 2;
constexpr u32 codeTier = 62;
constexpr u32 rowsPerLine = 224, lineBytes = 64;

// go: cache.line
struct Line {
	u32 Rank[2];
	u64 Code[7];
};
static_assert(sizeof(Line) == lineBytes, "cache.line");

// go: cache.lookupParams
struct LookupParams {
	u64 Nodes;
	u64 Lines;
	u64 Code;
	u64 Counts;
	u64 Totals;
	u64 GPUPos, GPUSlot;
	u64 CPUPos, CPUSlot;
	u64 MissPos;
	u64 MissRow;
	i64 Rows, First, Count;
	u32 Grid, SSDs;
	u32 Phases;
	u32 _;
};
static_assert(sizeof(LookupParams) == 128, "cache.lookupParams");
static_assert(__builtin_offsetof(LookupParams, MissRow) == 80, "cache.lookupParams");
static_assert(__builtin_offsetof(LookupParams, Phases) == 120, "cache.lookupParams");

// go: cache.gatherParams
struct GatherParams {
	u64 GPURows, CPURows;
	u64 GPUPos, GPUSlot;
	u64 CPUPos, CPUSlot;
	u64 Dst;
	i64 NGPU, NCPU;
	i64 GPUTotal, CPUTotal;
	i64 DstRows;
	i64 RowBytes, Stride;
	i64 GPUPerLine;
	i64 GPULine, GPUStride;
};
static_assert(sizeof(GatherParams) == 136, "cache.gatherParams");
static_assert(__builtin_offsetof(GatherParams, NGPU) == 56, "cache.gatherParams");

constexpr u32 rowFloat16 = 1, rowBFloat16 = 2, rowInt8 = 3;

// go: cache.convertParams
struct ConvertParams {
	u64 Src, Dst;
	u64 Nodes, Scales;
	i64 Rows, RowBytes, Dim;
	i64 Table;
	u32 Type;
	u32 _;
};
static_assert(sizeof(ConvertParams) == 72, "cache.convertParams");
static_assert(__builtin_offsetof(ConvertParams, Type) == 64, "cache.convertParams");

// go: cache.hotnessParams
struct HotnessParams {
	u64 Nodes, Counts;
	i64 N, Rows;
};
static_assert(sizeof(HotnessParams) == 32, "cache.hotnessParams");

constexpr u32 rankHist = 1, rankPick = 2, rankCount = 4, rankPrefix = 8, rankScatter = 16;
constexpr u32 rankBits = 8, rankBins = 1 << rankBits;

// go: cache.rankState
struct RankState {
	i64 Left[2];
	u32 Threshold[2];
};
static_assert(sizeof(RankState) == 24, "cache.rankState");

// go: cache.rankPart
struct RankPart {
	i64 Take[2];
	i64 Equal[2];
};
static_assert(sizeof(RankPart) == 32, "cache.rankPart");

// go: cache.rankParams
struct RankParams {
	u64 Counts;
	u64 Hist;
	u64 State;
	u64 Parts;
	u64 GPU, CPU;
	i64 Rows;
	i64 GPURows, CPURows;
	u32 Grid;
	u32 Phase;
	u32 Shift;
	u32 _;
};
static_assert(sizeof(RankParams) == 88, "cache.rankParams");

constexpr u32 setsCount = 1, setsPrefix = 2, setsNumber = 4, setsDeal = 16, setsWrite = 8;
constexpr u32 sortBits = 8, sortBins = 1 << sortBits;
constexpr u32 setStats = 5;
constexpr u32 hitAnswer = 1u << 31, noAnswer = 0xffffffffu;

// Policies of a set, and the places of its words.
// go: policy.Ways
constexpr u32 setWays = 32;
constexpr u32 setRandom = 1, setLRU = 2, setClock = 3, setSieve = 4, setS3FIFO = 5;
constexpr u32 setBatch = 0, setSeen = 1, setHeld = 2, setVisited = 3, setOften = 4, setMain = 5, setHand = 6;
constexpr u32 setOrder = 8, setTags = 16, setGhosts = 48;
constexpr u32 noTag = 0xffffffffu;

// go: cache.setsParams
struct SetsParams {
	u64 Words, Until;
	u64 Window, Table;
	u64 CPUIndex;
	u64 Nodes;
	u64 Line, Place, Of, Answer, Number;
	u64 KeysIn, ValsIn, KeysOut, ValsOut;
	u64 Counts, Stats, Totals;
	u64 GPUPos, GPURow;
	u64 CPUPos, CPURow;
	u64 MissPos, MissRow;
	u64 FillLine, FillSlot;
	u64 Lines;
	u64 SSDCounts, Dealt, DealtPos;
	u64 PlanRows, PlanPos, Moves;
	i64 Rows, First, Count;
	i64 Sets, Slots;
	i64 WindowSlots, TableSlots;
	u32 SSDs, PerLine;
	u32 Key[2];
	u32 Batch, Rule, Stride;
	u32 Grid, Phases, Shift;
	u32 SSDBits, _;
};
static_assert(sizeof(SetsParams) == 368, "cache.setsParams");
static_assert(__builtin_offsetof(SetsParams, Rows) == 264, "cache.setsParams");
static_assert(__builtin_offsetof(SetsParams, Phases) == 352, "cache.setsParams");

// go: graph.sampleParams
struct SampleParams {
	u64 Indptr;
	u64 Indices;
	u64 Nodes;
	u64 Degrees;
	u64 EdgeStart;
	u64 Src;
	u64 Vals;
	u64 Keys;
	u64 Sums;
	u64 Totals;
	i64 NumNodes;
	i64 NumEdges;
	i64 Slots;
	i64 SrcLen;
	i64 NodesLen;
	i64 NumDst;
	i64 Fanout;
	u32 Key[2];
	u32 Epoch;
	u32 Hop;
	u32 Stamp;
	u32 HashShift;
	u32 Wide;
	u32 _;
	u64 Dst;
	u64 Before;
	i64 Frontier;
	i64 Sources;
	i64 Base;
};
static_assert(sizeof(SampleParams) == 208, "graph.sampleParams");
static_assert(__builtin_offsetof(SampleParams, Key) == 136, "graph.sampleParams");

// go: graph.typeParams
struct TypeParams {
	u64 Nodes;
	u64 New;
	u64 Firsts;
	u64 Ends;
	i64 Frontier;
	i64 NodesLen;
	i64 Types;
};
static_assert(sizeof(TypeParams) == 56, "graph.typeParams");

// go: graph.localParams
struct LocalParams {
	u64 Nodes;
	u64 Local;
	i64 Count;
	i64 First;
};
static_assert(sizeof(LocalParams) == 32, "graph.localParams");

// go: graph.looplessParams
struct LooplessParams {
	u64 Nodes;
	u64 Table;
	u64 Degrees;
	i64 NumNodes;
	i64 Count;
};
static_assert(sizeof(LooplessParams) == 40, "graph.looplessParams");

// go: graph.laborParams
struct LaborParams {
	SampleParams Sample;
	u64 Limits;
	u64 Keys[2];
	u64 Phase;
	u32 Span;
	u32 Turn;
};
static_assert(sizeof(LaborParams) == 248, "graph.laborParams");
static_assert(__builtin_offsetof(LaborParams, Phase) == 232, "graph.laborParams");

constexpr u32 layerBits = 11, layerBins = 1 << layerBits;

// go: graph.layerState
struct LayerState {
	u64 Tau;
	i64 Left;
};
static_assert(sizeof(LayerState) == 16, "graph.layerState");

// go: graph.layerParams
struct LayerParams {
	SampleParams Sample;
	u64 Pos;
	u64 Mass;
	u64 Rank;
	u64 Hist;
	u64 State;
	u64 News;
	u64 OutStart;
	u64 OutSrc;
	u64 Weights;
	i64 Edges;
	i64 OutLen;
	i64 WeightLen;
	i64 Take;
	u32 Key[2];
	u32 Batch;
	u32 Bits;
	u32 Shift;
	u32 _;
};
static_assert(sizeof(LayerParams) == 336, "graph.layerParams");
static_assert(__builtin_offsetof(LayerParams, Pos) == 208, "graph.layerParams");
static_assert(__builtin_offsetof(LayerParams, Key) == 312, "graph.layerParams");
