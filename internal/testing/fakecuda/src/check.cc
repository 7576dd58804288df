// Compares cuda_abi.h and results.h with NVIDIA's cuda.h of CUDA 12.9; compiled by a test where that
// header is (HELIOS_CUDA_TOOLS), and linked into nothing.
#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "results.h"

namespace mine {
#undef CU_MEMHOSTALLOC_PORTABLE
#undef CU_MEMHOSTALLOC_DEVICEMAP
#undef CU_MEMHOSTALLOC_WRITECOMBINED
#undef CU_MEMHOSTREGISTER_PORTABLE
#undef CU_MEMHOSTREGISTER_DEVICEMAP
#undef CU_MEMHOSTREGISTER_IOMEMORY
#undef CU_MEMHOSTREGISTER_READ_ONLY
#undef CU_LAUNCH_PARAM_END
#undef CU_LAUNCH_PARAM_BUFFER_POINTER
#undef CU_LAUNCH_PARAM_BUFFER_SIZE
#undef CU_STREAM_LEGACY
#undef CU_STREAM_PER_THREAD
#include "cuda_abi.h"
} // namespace mine

#define SAME(NAME) static_assert((int)mine::NAME == (int)::NAME, #NAME)
SAME(CU_DEV_RESOURCE_TYPE_SM);
SAME(CU_GREEN_CTX_DEFAULT_STREAM);
SAME(CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING);
SAME(CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE);
SAME(CU_STREAM_NON_BLOCKING);
SAME(CU_EVENT_DISABLE_TIMING);
SAME(CU_EVENT_INTERPROCESS);
SAME(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
SAME(CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE);
SAME(CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(CU_MEM_LOCATION_TYPE_DEVICE);
SAME(CU_MEM_HANDLE_TYPE_NONE);
SAME(CU_MEM_ACCESS_FLAGS_PROT_NONE);
SAME(CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(CU_JIT_WALL_TIME);
SAME(CU_JIT_INFO_LOG_BUFFER);
SAME(CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES);
SAME(CU_JIT_ERROR_LOG_BUFFER);
SAME(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
SAME(CU_LAUNCH_ATTRIBUTE_IGNORE);
SAME(CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(CU_LAUNCH_ATTRIBUTE_PRIORITY);
SAME(CU_STREAM_WAIT_VALUE_GEQ);
SAME(CU_STREAM_WAIT_VALUE_EQ);
SAME(CU_STREAM_WAIT_VALUE_AND);
SAME(CU_STREAM_WAIT_VALUE_NOR);
SAME(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
SAME(CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES);
SAME(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
SAME(CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME(CU_FUNC_ATTRIBUTE_PTX_VERSION);
SAME(CU_FUNC_ATTRIBUTE_BINARY_VERSION);
SAME(CU_FUNC_ATTRIBUTE_CACHE_MODE_CA);
SAME(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
SAME(CU_POINTER_ATTRIBUTE_CONTEXT);
SAME(CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
SAME(CU_POINTER_ATTRIBUTE_HOST_POINTER);
SAME(CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
SAME(CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME(CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME(CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME(CU_POINTER_ATTRIBUTE_MAPPED);
SAME(CU_LIMIT_STACK_SIZE);
SAME(CU_LIMIT_PRINTF_FIFO_SIZE);
SAME(CU_LIMIT_MALLOC_HEAP_SIZE);
SAME(CU_MEMORYTYPE_HOST);
SAME(CU_MEMORYTYPE_DEVICE);
SAME(CU_GET_PROC_ADDRESS_SUCCESS);
SAME(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
SAME(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);

#define X(NAME, VALUE, WORDS) static_assert((int)::NAME == VALUE, #NAME);
HX_RESULTS(X)

#define FITS(T) static_assert(sizeof(mine::T) == sizeof(::T) && alignof(mine::T) == alignof(::T), #T)
FITS(CUdevice);
FITS(CUdeviceptr);
FITS(CUuuid);
FITS(CUdevResource);
FITS(CUlaunchAttribute);
FITS(CUlaunchConfig);
FITS(CUdevice_attribute);
static_assert(offsetof(mine::CUdevResource, sm) == offsetof(::CUdevResource, sm), "sm");
static_assert(offsetof(mine::CUlaunchAttribute, value) == offsetof(::CUlaunchAttribute, value), "value");
static_assert(offsetof(mine::CUlaunchConfig, hStream) == offsetof(::CUlaunchConfig, hStream), "hStream");
static_assert(offsetof(mine::CUlaunchConfig, attrs) == offsetof(::CUlaunchConfig, attrs), "attrs");
FITS(CUmemGenericAllocationHandle);
FITS(CUmemLocation);
FITS(CUmemAllocationProp);
FITS(CUmemAccessDesc);
FITS(CUDA_KERNEL_NODE_PARAMS_v2);
static_assert(offsetof(mine::CUmemAllocationProp, location) == offsetof(::CUmemAllocationProp, location), "location");
static_assert(offsetof(mine::CUmemAllocationProp, win32HandleMetaData) == offsetof(::CUmemAllocationProp, win32HandleMetaData), "win32HandleMetaData");
static_assert(offsetof(mine::CUmemAllocationProp, allocFlags.gpuDirectRDMACapable) == offsetof(::CUmemAllocationProp, allocFlags.gpuDirectRDMACapable), "gpuDirectRDMACapable");
static_assert(offsetof(mine::CUmemAllocationProp, allocFlags.usage) == offsetof(::CUmemAllocationProp, allocFlags.usage), "usage");
static_assert(offsetof(mine::CUmemAccessDesc, flags) == offsetof(::CUmemAccessDesc, flags), "flags");
static_assert(offsetof(mine::CUDA_KERNEL_NODE_PARAMS_v2, gridDimX) == offsetof(::CUDA_KERNEL_NODE_PARAMS_v2, gridDimX), "gridDimX");
static_assert(offsetof(mine::CUDA_KERNEL_NODE_PARAMS_v2, blockDimX) == offsetof(::CUDA_KERNEL_NODE_PARAMS_v2, blockDimX), "blockDimX");
static_assert(offsetof(mine::CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes) == offsetof(::CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes), "sharedMemBytes");
static_assert(offsetof(mine::CUDA_KERNEL_NODE_PARAMS_v2, kernelParams) == offsetof(::CUDA_KERNEL_NODE_PARAMS_v2, kernelParams), "kernelParams");
static_assert(offsetof(mine::CUDA_KERNEL_NODE_PARAMS_v2, kern) == offsetof(::CUDA_KERNEL_NODE_PARAMS_v2, kern), "kern");
static_assert(offsetof(mine::CUDA_KERNEL_NODE_PARAMS_v2, ctx) == offsetof(::CUDA_KERNEL_NODE_PARAMS_v2, ctx), "ctx");
// Attributes that core.cc answers by number.
static_assert((int)CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED == 102 && (int)CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED == 110, "VMM");
