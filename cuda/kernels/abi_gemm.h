// The parameter blocks of the products of matrices: those of gnn/gemm.go and gnn/gemm_cuda.go. Same names, same order,
// same bytes as in Go; the Go structs win, and abi_test.go compares them. Addresses are u64.
#pragma once

#include "types.h"

constexpr u32 gemmReLU = 1, gemmDropout = 2;

// go: gnn.dropout
struct Dropout {
	u32 Key[2];
	u32 Epoch, Batch, Layer;
	float P, Scale;
	u32 _;
};
static_assert(sizeof(Dropout) == 32, "gnn.dropout");

// go: gnn.gemmParams
struct GemmParams {
	u64 A, B, A2, B2, C, Bias;
	i64 M, N, K, K2;
	i64 LDA, LDB, LDA2, LDB2, LDC;
	i64 MB, NB;
	Dropout Drop;
	u32 Flags;
	u32 _;
};
static_assert(sizeof(GemmParams) == 176, "gnn.gemmParams");
static_assert(__builtin_offsetof(GemmParams, Drop) == 136, "gnn.gemmParams");

// go: gnn.gemmSplitParams
struct GemmSplitParams {
	GemmParams P;
	u64 Parts;
	i64 Chunk;
	i64 LDP;
};
static_assert(sizeof(GemmSplitParams) == 200, "gnn.gemmSplitParams");
