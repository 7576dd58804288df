#pragma once

// Error codes, with the words of cuGetErrorString.
#define HX_RESULTS(X)                                                                        \
	X(CUDA_SUCCESS, 0, "no error")                                                            \
	X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                        \
	X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                           \
	X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                  \
	X(CUDA_ERROR_DEINITIALIZED, 4, "driver shutting down")                                    \
	X(CUDA_ERROR_STUB_LIBRARY, 34, "CUDA driver is a stub library")                           \
	X(CUDA_ERROR_DEVICE_UNAVAILABLE, 46, "CUDA-capable device(s) is/are busy or unavailable") \
	X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                        \
	X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                               \
	X(CUDA_ERROR_INVALID_IMAGE, 200, "device kernel image is invalid")                        \
	X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                              \
	X(CUDA_ERROR_NO_BINARY_FOR_GPU, 209, "no kernel image is available for execution on the device") \
	X(CUDA_ERROR_ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered")               \
	X(CUDA_ERROR_UNSUPPORTED_LIMIT, 215, "limit is not supported on this architecture")       \
	X(CUDA_ERROR_INVALID_PTX, 218, "a PTX JIT compilation failed")                            \
	X(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222, "the provided PTX was compiled with an unsupported toolchain.") \
	X(CUDA_ERROR_FILE_NOT_FOUND, 301, "file not found")                                       \
	X(CUDA_ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS") \
	X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                              \
	X(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") \
	X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                    \
	X(CUDA_ERROR_NOT_READY, 600, "device not ready")                                          \
	X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")            \
	X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch")     \
	X(CUDA_ERROR_LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated")              \
	X(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, 708, "cannot set while device is active in this process") \
	X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")                           \
	X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped") \
	X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region") \
	X(CUDA_ERROR_ILLEGAL_INSTRUCTION, 715, "an illegal instruction was encountered")          \
	X(CUDA_ERROR_MISALIGNED_ADDRESS, 716, "misaligned address")                               \
	X(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                            \
	X(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted")                               \
	X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                               \
	X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803, "system has unsupported display driver / cuda driver combination") \
	X(CUDA_ERROR_INVALID_RESOURCE_TYPE, 914, "invalid resource type")                         \
	X(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, 915, "invalid resource configuration")       \
	X(CUDA_ERROR_UNKNOWN, 999, "unknown error")
