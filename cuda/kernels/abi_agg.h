// The parameter blocks of the kernels of a training step other than products: aggregation, transpose, column
// sums, loss, Adam, dropout of the input. Same names, same order, same bytes as in Go (gnn/kernels.go, loss*.go,
// inputdrop.go, rgat.go, agg_cuda.go); the Go structs win, and abi_test.go compares them. Addresses are u64.
#pragma once

#include "abi_gemm.h"
#include "types.h"

// go: gnn.aggParams
struct AggParams {
	u64 Indptr;
	u64 Src;
	u64 Degrees;
	u64 X;
	u64 Out;
	u64 Grad;
	u64 Self;
	u64 Weights;
	u64 TEnd;
	u64 TDst;
	u64 SrcWeights;
	u64 DstWeights;
	u64 SelfWeights;
	u64 Eps;
	i64 NumDst;
	i64 NumSrc;
	i64 Edges;
	i64 Dim;
	float Scale;
	u32 Open;
};
static_assert(sizeof(AggParams) == 152, "gnn.aggParams");
static_assert(__builtin_offsetof(AggParams, NumDst) == 112, "gnn.aggParams");
static_assert(__builtin_offsetof(AggParams, Scale) == 144, "gnn.aggParams");

// go: gnn.gatParams
struct GatParams {
	u64 Indptr, Src;
	u64 SrcWeights, SelfWeights;
	u64 Z;
	u64 AttSrc, AttDst;
	u64 ScoreSrc, ScoreDst;
	u64 Max, Inverse;
	u64 Alpha, AlphaSelf;
	u64 Out;
	u64 Grad;
	u64 Dot, DotSelf;
	u64 DSrc, DDst;
	u64 EdgePtr, EdgeDst;
	u64 TEnd, TEdge;
	u64 Scale;
	i64 NumDst, NumSrc;
	i64 Edges, Dim, Heads;
	i64 Rows;
	Dropout Drop;
};
static_assert(sizeof(GatParams) == 272, "gnn.gatParams");
static_assert(__builtin_offsetof(GatParams, NumDst) == 192, "gnn.gatParams");
static_assert(__builtin_offsetof(GatParams, Drop) == 240, "gnn.gatParams");

// go: gnn.mostRuns
constexpr i64 mostRuns = 16;

// go: gnn.relationParams
struct RelationParams {
	u64 Indptr, Src;
	u64 OutIndptr, OutSrc;
	u64 Scores;
	i64 NumDst;
	i64 FirstEdge, Edges;
	i64 Selves;
	i64 Runs;
	i64 Row[mostRuns], Place[mostRuns];
};
static_assert(sizeof(RelationParams) == 336, "gnn.relationParams");
static_assert(__builtin_offsetof(RelationParams, NumDst) == 40, "gnn.relationParams");
static_assert(__builtin_offsetof(RelationParams, Row) == 80, "gnn.relationParams");

constexpr u32 radixBits = 9, radixBins = 1 << radixBits;

// go: gnn.transposeParams
struct TransposeParams {
	AggParams Agg;
	u64 KeysIn, ValsIn;
	u64 KeysOut, ValsOut;
	u64 Hist;
	u64 Totals;
	u32 Shift, Bits;
	u32 Grid;
	u32 GCN;
};
static_assert(sizeof(TransposeParams) == 216, "gnn.transposeParams");
static_assert(__builtin_offsetof(TransposeParams, KeysIn) == 152, "gnn.transposeParams");

constexpr i64 sumLeaf = 64, lossLeaf = 64;

// go: gnn.sumParams
struct SumParams {
	u64 X, Out;
	i64 Rows, Cols;
};
static_assert(sizeof(SumParams) == 32, "gnn.sumParams");

// go: gnn.outcome
struct Outcome {
	double Loss;
	i64 Correct;
	i64 Counted;
	double Mass;
};
static_assert(sizeof(Outcome) == 32, "gnn.outcome");

// go: gnn.xentParams
struct XentParams {
	u64 Logits;
	u64 Labels;
	u64 Grad;
	u64 Loss;
	u64 Pred;
	u64 Outcome;
	u64 Weights;
	i64 Rows;
	i64 Classes;
	double Smoothing;
};
static_assert(sizeof(XentParams) == 80, "gnn.xentParams");
static_assert(__builtin_offsetof(XentParams, Smoothing) == 72, "gnn.xentParams");

// go: gnn.denseParams
struct DenseParams {
	u64 Outputs;
	u64 Targets;
	u64 Grad;
	u64 Loss;
	u64 Right;
	u64 Outcome;
	u64 Weights;
	i64 Rows;
	i64 Cols;
	double Smoothing;
};
static_assert(sizeof(DenseParams) == 80, "gnn.denseParams");
static_assert(__builtin_offsetof(DenseParams, Smoothing) == 72, "gnn.denseParams");

// go: simd.AdamStep
struct AdamConstants {
	float B1, C1, B2, C2;
	float StepSize, RootC2;
	float Eps, L2, Decay;
};
static_assert(sizeof(AdamConstants) == 36, "simd.AdamStep");

// go: gnn.adamParams
struct AdamParams {
	u64 P, G, M, V;
	u64 Factor;
	i64 N;
	AdamConstants AdamStep;
	u32 _;
};
static_assert(sizeof(AdamParams) == 88, "gnn.adamParams");
static_assert(__builtin_offsetof(AdamParams, AdamStep) == 48, "gnn.adamParams");

constexpr i64 squareUnit = 2048;

// go: gnn.clipParams
struct ClipParams {
	u64 G;
	u64 Parts;
	u64 Factor;
	u64 Sum;
	i64 N;
	float Limit;
	u32 _;
};
static_assert(sizeof(ClipParams) == 48, "gnn.clipParams");
static_assert(__builtin_offsetof(ClipParams, Limit) == 40, "gnn.clipParams");

// go: gnn.shardParams
struct ShardParams {
	u64 Out, X, Y;
	i64 N;
	float Weight;
	u32 _;
};
static_assert(sizeof(ShardParams) == 40, "gnn.shardParams");
static_assert(__builtin_offsetof(ShardParams, Weight) == 32, "gnn.shardParams");

// go: gnn.dropInputParams
struct DropInputParams {
	u64 X;
	i64 Rows, Cols;
	Dropout Drop;
};
static_assert(sizeof(DropInputParams) == 56, "gnn.dropInputParams");

// go: gnn.biasActParams
struct BiasActParams {
	u64 C, Bias;
	i64 Rows, Cols, LDC;
	Dropout Drop;
	u32 Flags;
	u32 _;
};
static_assert(sizeof(BiasActParams) == 80, "gnn.biasActParams");
static_assert(__builtin_offsetof(BiasActParams, Drop) == 40, "gnn.biasActParams");

// go: gnn.tableParams
struct TableParams {
	u64 Table, Rows;
	u64 Numbers;
	i64 N, Cols;
	i64 TableStride, RowStride;
	i64 First;
};
static_assert(sizeof(TableParams) == 64, "gnn.tableParams");

// go: gnn.actParams
struct ActParams {
	u64 X, Grad, Out;
	i64 Rows, Cols;
	Dropout Drop;
};
static_assert(sizeof(ActParams) == 72, "gnn.actParams");
static_assert(__builtin_offsetof(ActParams, Drop) == 40, "gnn.actParams");

// go: gnn.normParams
struct NormParams {
	u64 X, Out, Grad;
	u64 Gamma, Beta;
	u64 Sum, Squares, Spread;
	u64 DGamma, DBeta;
	i64 Rows, Cols;
	float Share, Eps, Momentum;
	u32 _;
};
static_assert(sizeof(NormParams) == 112, "gnn.normParams");
static_assert(__builtin_offsetof(NormParams, Share) == 96, "gnn.normParams");
