// gemm_*_bf16: products of float32 matrices with factors rounded to bfloat16. gemm_tensor.h has all of it; parts of a split
// product are added by gemm_sum of gemm.cu.
// arch: sm_80
#include "gemm_tensor.h"

HX_RESIDENT(gemm_nn_bf16, GemmParams, 256, 2)
HX_KERNEL(gemm_nn_bf16, GemmParams) { product<BF16, 128, 128, false, false>(p, hx); }
HX_RESIDENT(gemm_nt_bf16, GemmParams, 256, 2)
HX_KERNEL(gemm_nt_bf16, GemmParams) { product<BF16, 128, 128, false, true>(p, hx); }
HX_RESIDENT(gemm_tn_bf16, GemmParams, 256, 2)
HX_KERNEL(gemm_tn_bf16, GemmParams) { product<BF16, 128, 128, true, false>(p, hx); }
HX_RESIDENT(gemm_tn_split_bf16, GemmSplitParams, 256, 2)
HX_KERNEL(gemm_tn_split_bf16, GemmSplitParams) { split<BF16, 128, 128>(p, hx); }

HX_RESIDENT(gemm_nn_bf16_128x64, GemmParams, 256, 2)
HX_KERNEL(gemm_nn_bf16_128x64, GemmParams) { product<BF16, 128, 64, false, false>(p, hx); }
HX_RESIDENT(gemm_nt_bf16_128x64, GemmParams, 256, 2)
HX_KERNEL(gemm_nt_bf16_128x64, GemmParams) { product<BF16, 128, 64, false, true>(p, hx); }
HX_RESIDENT(gemm_tn_bf16_128x64, GemmParams, 256, 2)
HX_KERNEL(gemm_tn_bf16_128x64, GemmParams) { product<BF16, 128, 64, true, false>(p, hx); }
HX_RESIDENT(gemm_tn_split_bf16_128x64, GemmSplitParams, 256, 2)
HX_KERNEL(gemm_tn_split_bf16_128x64, GemmSplitParams) { split<BF16, 128, 64>(p, hx); }
