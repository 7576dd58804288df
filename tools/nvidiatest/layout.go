package main

import (
	"context"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// constants of cuda/driver/api.go with their names in cuda.h.
var constants = map[string]string{
	"success": "CUDA_SUCCESS", "errInvalidValue": "CUDA_ERROR_INVALID_VALUE",
	"errOutOfMemory": "CUDA_ERROR_OUT_OF_MEMORY", "errNotInitialized": "CUDA_ERROR_NOT_INITIALIZED",
	"errDeinitialized":     "CUDA_ERROR_DEINITIALIZED",
	"errDeviceUnavailable": "CUDA_ERROR_DEVICE_UNAVAILABLE", "errNoDevice": "CUDA_ERROR_NO_DEVICE",
	"errInvalidDevice":  "CUDA_ERROR_INVALID_DEVICE",
	"errECC":            "CUDA_ERROR_ECC_UNCORRECTABLE",
	"errNVLink":         "CUDA_ERROR_NVLINK_UNCORRECTABLE",
	"errJITNotFound":    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
	"errUnsupportedPTX": "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
	"errJITDisabled":    "CUDA_ERROR_JIT_COMPILATION_DISABLED", "errContained": "CUDA_ERROR_CONTAINED",
	"errNotFound": "CUDA_ERROR_NOT_FOUND",
	"errNotReady": "CUDA_ERROR_NOT_READY", "errNotSupported": "CUDA_ERROR_NOT_SUPPORTED", "errIllegalAddress": "CUDA_ERROR_ILLEGAL_ADDRESS",
	"errLaunchTimeout":    "CUDA_ERROR_LAUNCH_TIMEOUT",
	"errContextDestroyed": "CUDA_ERROR_CONTEXT_IS_DESTROYED", "errAssert": "CUDA_ERROR_ASSERT",
	"errHardwareStack":      "CUDA_ERROR_HARDWARE_STACK_ERROR",
	"errIllegalInstruction": "CUDA_ERROR_ILLEGAL_INSTRUCTION",
	"errMisaligned":         "CUDA_ERROR_MISALIGNED_ADDRESS",
	"errAddressSpace":       "CUDA_ERROR_INVALID_ADDRESS_SPACE", "errInvalidPC": "CUDA_ERROR_INVALID_PC",
	"errLaunchFailed": "CUDA_ERROR_LAUNCH_FAILED", "errTensorMemory": "CUDA_ERROR_TENSOR_MEMORY_LEAK",
	"errSystemNotReady": "CUDA_ERROR_SYSTEM_NOT_READY",
	"errDriverMismatch": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
	"errMPSTerminated":  "CUDA_ERROR_MPS_CLIENT_TERMINATED", "errUnknown": "CUDA_ERROR_UNKNOWN",

	"attrClockRate":         "CU_DEVICE_ATTRIBUTE_CLOCK_RATE",
	"attrMultiprocessors":   "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
	"attrCanMapHost":        "CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY",
	"attrComputeMode":       "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE",
	"attrUnifiedAddressing": "CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING",
	"attrMajor":             "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
	"attrMinor":             "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
	"attrHostPointer":       "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
	"attrHostRegister":      "CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED",
	"attrHandleFD":          "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
	"attrVMM":               "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
	"attrVMMDirectRDMA":     "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
	"attrDirectRDMA":        "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED",
	"attrRDMAOrdering":      "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING",
	"attrDMABuf":            "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED",
	"funcMaxThreads":        "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK",

	"registerPortable":  "CU_MEMHOSTREGISTER_PORTABLE",
	"registerDeviceMap": "CU_MEMHOSTREGISTER_DEVICEMAP",
	"registerIOMemory":  "CU_MEMHOSTREGISTER_IOMEMORY", "streamNonBlocking": "CU_STREAM_NON_BLOCKING",
	"eventDisableTiming": "CU_EVENT_DISABLE_TIMING",
	"handleDMABuf":       "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD",
	"handleFD":           "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
	"greenDefault":       "CU_GREEN_CTX_DEFAULT_STREAM", "resourceSM": "CU_DEV_RESOURCE_TYPE_SM",
	"memPinned":        "CU_MEM_ALLOCATION_TYPE_PINNED",
	"locationDevice":   "CU_MEM_LOCATION_TYPE_DEVICE",
	"accessReadWrite":  "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
	"granularityLeast": "CU_MEM_ALLOC_GRANULARITY_MINIMUM", "jitInfoLog": "CU_JIT_INFO_LOG_BUFFER",
	"jitInfoLogBytes": "CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES", "jitErrorLog": "CU_JIT_ERROR_LOG_BUFFER",
	"jitErrorLogBytes": "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES",
}

// layouts are the structs of cuda/driver/api.go with their names in cuda.h, and their fields, whose
// offsets api.go asserts.
var layouts = map[string]string{
	"devResource": "CUdevResource", "devResource.SMs": "sm.smCount",
	"memLocation": "CUmemLocation", "memProp": "CUmemAllocationProp",
	"memProp.Location": "location", "memProp.Win32": "win32HandleMetaData",
	"memProp.RDMA": "allocFlags.gpuDirectRDMACapable", "memProp.Usage": "allocFlags.usage",
	"memAccess": "CUmemAccessDesc", "memAccess.Flags": "flags",
	"nodeParams": "CUDA_KERNEL_NODE_PARAMS_v2", "nodeParams.GridX": "gridDimX",
	"nodeParams.BlockX": "blockDimX", "nodeParams.SharedBytes": "sharedMemBytes",
	"nodeParams.Params": "kernelParams", "nodeParams.Extra": "extra", "nodeParams.Kern": "kern",
	"nodeParams.Ctx": "ctx",
}

// handles are the sizes of what api.go has in place of cuda.h's types.
var handles = map[string]int{"CUresult": 4, "CUdevice": 4, "CUcontext": 8, "CUmodule": 8,
	"CUlibrary": 8, "CUfunction": 8, "CUkernel": 8, "CUstream": 8, "CUevent": 8, "CUgreenCtx": 8,
	"CUdevResourceDesc": 8, "CUdeviceptr": 8, "CUmemGenericAllocationHandle": 8, "CUgraph": 8,
	"CUgraphNode": 8, "CUgraphExec": 8}

var assertion = regexp.MustCompile(
	`unsafe\.(Sizeof|Offsetof)\((\w+)\{\}(?:\.(\w+))?\) \^ (\d+)\)`)

// assertions writes a C program that compiles where cuda.h has the constants and layouts of
// cuda/driver/api.go.
func assertions(api string) (program string, n int, err error) {
	var b strings.Builder
	b.WriteString("#include <cuda.h>\n#include <stddef.h>\n")
	say := func(expression string, value any, why string) {
		fmt.Fprintf(&b, "_Static_assert((long long)(%s) == %v, %q);\n", expression, value, why)
		n++
	}
	file, err := parser.ParseFile(token.NewFileSet(), "api.go", api, 0)
	if err != nil {
		return "", 0, err
	}
	for _, d := range file.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v := s.(*ast.ValueSpec)
			for i, name := range v.Names {
				if name.Name == "_" {
					continue
				}
				if i >= len(v.Values) {
					return "", 0, fmt.Errorf("constant %s has no value of its own", name.Name)
				}
				lit, ok := v.Values[i].(*ast.BasicLit)
				c := constants[name.Name]
				if !ok || c == "" {
					return "", 0, fmt.Errorf(
						"constant %s of cuda/driver/api.go has no name of cuda.h; add it to constants (tools/nvidiatest/layout.go)",
						name.Name)
				}
				value := constant.MakeFromLiteral(lit.Value, lit.Kind, 0)
				say(c, value.ExactString(), name.Name+" of cuda/driver/api.go")
			}
		}
	}
	for _, m := range assertion.FindAllStringSubmatch(api, -1) {
		c := layouts[m[2]]
		expression := "sizeof(" + c + ")"
		what := m[2]
		if m[1] == "Offsetof" {
			what += "." + m[3]
			expression = fmt.Sprintf("offsetof(%s, %s)", c, layouts[what])
		}
		if c == "" || layouts[what] == "" {
			return "", 0, fmt.Errorf(
				"%s of cuda/driver/api.go has no name of cuda.h; add it to layouts (tools/nvidiatest/layout.go)",
				what)
		}
		say(expression, m[4], what+" of cuda/driver/api.go")
	}
	for _, name := range keys(handles) {
		say("sizeof("+name+")", handles[name], "size of "+name)
	}
	return b.String(), n, nil
}

// layout compiles the assertions against the headers of CUDA 12 and 13.
func (r *run) layout(ctx context.Context) error {
	api, err := os.ReadFile(filepath.Join(r.root, "cuda/driver/api.go"))
	if err != nil {
		return err
	}
	program, n, err := assertions(string(api))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "nvidiatest-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "layout.c")
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		return err
	}
	t := r.table("layout", "header", "constants, sizes and offsets", "equal")
	for _, include := range []string{r.cuda12, r.cuda13} {
		text, err := os.ReadFile(filepath.Join(include, "cuda.h"))
		if err != nil {
			return err
		}
		m := regexp.MustCompile(`#define CUDA_VERSION (\d+)`).FindSubmatch(text)
		if m == nil {
			return fmt.Errorf("%s/cuda.h names no version", include)
		}
		_, err = command(ctx, dir, []string{"LC_ALL=C"}, "cc", "-std=c11", "-fsyntax-only",
			"-fmax-errors=0", "-I"+include, file)
		wrong := 0
		if err != nil {
			if wrong = strings.Count(err.Error(), "static assertion failed"); wrong == 0 {
				return err
			}
		}
		r.checks("layout", n-wrong, wrong, "cuda.h %s: %v", m[1], err)
		t.row("cuda.h "+string(m[1]), n, n-wrong)
	}
	return nil
}
