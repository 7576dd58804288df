// A libcublas for the fake libcuda: the calls that Helios makes of it, computed on the CPU in the order of the stream.
//
// It is strict where the real library is not: a handle is used in the context that it was made in, with a workspace that was
// set after the stream (cublasSetStream puts the default one back, with which results may differ from run to run while
// several streams are at work), and all of the workspace is overwritten by a product, as it may be. The question
// "violations" returns breaches of these rules. Types and values are those of CUDA 12's cublas_api.h.
//
// Commands, separated by commas (hx_fake_control):
//
//	libcuda=PATH                          the fake libcuda to work with; else the libcuda.so.1 that the process has loaded
//	version=12.6.4 wrong=1                its version; products are wrong
//	fail=cublasGemmEx:3[:status[:times]]  the third call from now fails
//	reset                                 knobs and counts as in the beginning
//	calls=NAME violations handles         questions
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;

enum Status { success = 0, not_initialized = 1, alloc_failed = 3, invalid_value = 7, execution_failed = 13, not_supported = 15 };
enum { op_n = 0, op_t = 1, r_32f = 0, compute_32f = 68, compute_16bf = 75, compute_tf32 = 77 };

struct Cuda {
	int (*ctx_current)(CUcontext *);
	int (*stream_ctx)(CUstream, CUcontext *);
	int (*host_func)(CUstream, void (*)(void *), void *);
};

struct Handle {
	CUcontext ctx;
	CUstream stream = nullptr;
	char *work = nullptr;
	size_t work_bytes = 0;
	int math = 0;
};

struct Call {
	uint64_t count = 0, fail_from = 0, fail_to = 0;
	int status = 0;
};

struct State {
	std::mutex mu;
	std::string libcuda, violations;
	int version[3] = {12, 6, 4};
	bool wrong = false;
	std::map<std::string, Call> calls;
	std::set<Handle *> handles; // never freed: a stale one is an error and no crash
};

State &g() {
	static State &s = *new State;
	return s;
}

// enter counts a call and reports whether it shall fail.
Status enter(const char *name) {
	std::lock_guard<std::mutex> lk(g().mu);
	Call &c = g().calls[name];
	uint64_t n = ++c.count;
	return n >= c.fail_from && n < c.fail_to ? (Status)c.status : success;
}
#define ENTER(NAME) \
	if (Status s_ = enter(NAME); s_ != success) return s_

bool cuda(Cuda *out) {
	std::string path;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		path = g().libcuda;
	}
	// The loader finds what is loaded by its soname.
	void *lib = dlopen(path.empty() ? "libcuda.so.1" : path.c_str(), RTLD_NOW | RTLD_NOLOAD);
	if (lib == nullptr) return false;
	*(void **)&out->ctx_current = dlsym(lib, "cuCtxGetCurrent");
	*(void **)&out->stream_ctx = dlsym(lib, "cuStreamGetCtx");
	*(void **)&out->host_func = dlsym(lib, "cuLaunchHostFunc");
	dlclose(lib);
	return out->ctx_current && out->stream_ctx && out->host_func;
}

void complain(const std::string &what) { // with mu held
	if (g().violations.find(what) == std::string::npos) g().violations += (g().violations.empty() ? "" : "; ") + what;
}

// find is the handle, which must be used in its own context.
Status find(void *h, Cuda *c) {
	if (!cuda(c)) return not_initialized;
	CUcontext ctx = nullptr;
	if (c->ctx_current(&ctx) != 0 || ctx == nullptr) return not_initialized;
	std::lock_guard<std::mutex> lk(g().mu);
	if (g().handles.count((Handle *)h) == 0) return not_initialized;
	if (((Handle *)h)->ctx != ctx) {
		complain("a handle was used in another context than its own");
		return execution_failed;
	}
	return success;
}

struct Product {
	int transA, transB, m, n, k, lda, ldb, ldc, compute;
	float alpha, beta;
	const float *a, *b;
	float *c;
	char *work;
	size_t work_bytes;
	bool wrong;
};

// rounded is a factor as the tensor cores take it: to the nearest of 10 bits of mantissa (ties away, cvt.rna.tf32) or of 7 (ties to
// even, cvt.rn.bf16).
float rounded(float x, int compute) {
	uint32_t u;
	memcpy(&u, &x, 4);
	if ((u & 0x7f800000) == 0x7f800000) return x;
	if (compute == compute_tf32) u = (u + 0x1000) & ~0x1fffu;
	if (compute == compute_16bf) u = (u + 0x7fff + (u >> 16 & 1)) & ~0xffffu;
	memcpy(&x, &u, 4);
	return x;
}

// Each element is one chain of fused multiply-adds over k, like those of our own kernels.
inline __attribute__((always_inline)) void run(const Product &p) {
	if (p.work != nullptr) memset(p.work, 0xb5, p.work_bytes < 65536 ? p.work_bytes : 65536);
	if (p.work != nullptr && p.work_bytes > 65536) memset(p.work + p.work_bytes - 4096, 0xb5, 4096);
	std::vector<float> column((size_t)p.m);
	for (long j = 0; j < p.n; j++) {
		for (long i = 0; i < p.m; i++) column[(size_t)i] = 0;
		for (long l = 0; l < p.k; l++) {
			float b = rounded(p.transB ? p.b[j + l * p.ldb] : p.b[l + j * p.ldb], p.compute);
			for (long i = 0; i < p.m; i++) {
				float a = rounded(p.transA ? p.a[l + i * p.lda] : p.a[i + l * p.lda], p.compute);
				column[(size_t)i] = __builtin_fmaf(a, b, column[(size_t)i]);
			}
		}
		for (long i = 0; i < p.m; i++) {
			float v = p.alpha * column[(size_t)i];
			if (p.beta != 0) v += p.beta * p.c[i + j * p.ldc];
			p.c[i + j * p.ldc] = p.wrong ? v + 1 : v;
		}
	}
}

#if defined(__x86_64__)
__attribute__((target("fma"))) void run_fma(const Product &p) { run(p); }
void run_plain(const Product &p) { run(p); }
void compute(void *arg) {
	std::unique_ptr<Product> p((Product *)arg);
	__builtin_cpu_supports("fma") ? run_fma(*p) : run_plain(*p);
}
#else
void compute(void *arg) {
	std::unique_ptr<Product> p((Product *)arg);
	run(*p);
}
#endif

std::string word(std::string &s, char end) {
	size_t at = s.find(end);
	std::string w = s.substr(0, at);
	s = at == std::string::npos ? "" : s.substr(at + 1);
	return w;
}

} // namespace

API int cublasGetProperty(int type, int *value) {
	ENTER("cublasGetProperty");
	if (type < 0 || type > 2 || value == nullptr) return invalid_value;
	*value = g().version[type];
	return success;
}

API int cublasCreate_v2(void **h) {
	ENTER("cublasCreate_v2");
	Cuda c;
	CUcontext ctx = nullptr;
	if (h == nullptr) return invalid_value;
	if (!cuda(&c) || c.ctx_current(&ctx) != 0 || ctx == nullptr) return not_initialized;
	auto n = new Handle{ctx};
	std::lock_guard<std::mutex> lk(g().mu);
	g().handles.insert(n);
	*h = n;
	return success;
}

API int cublasDestroy_v2(void *h) {
	ENTER("cublasDestroy_v2");
	Cuda c;
	if (Status s = find(h, &c); s != success) return s;
	std::lock_guard<std::mutex> lk(g().mu);
	g().handles.erase((Handle *)h);
	return success;
}

API int cublasSetStream_v2(void *h, CUstream s) {
	ENTER("cublasSetStream_v2");
	Cuda c;
	if (Status r = find(h, &c); r != success) return r;
	auto x = (Handle *)h;
	CUcontext ctx = nullptr;
	if (s != nullptr && c.stream_ctx(s, &ctx) != 0) return execution_failed;
	std::lock_guard<std::mutex> lk(g().mu);
	if (s != nullptr && ctx != x->ctx) complain("a stream of another context than the handle's");
	x->stream = s;
	x->work = nullptr;
	x->work_bytes = 0;
	return success;
}

API int cublasSetWorkspace_v2(void *h, void *p, size_t n) {
	ENTER("cublasSetWorkspace_v2");
	Cuda c;
	if (Status r = find(h, &c); r != success) return r;
	if ((uintptr_t)p % 256 != 0) return invalid_value;
	auto x = (Handle *)h;
	x->work = (char *)p;
	x->work_bytes = n;
	return success;
}

API int cublasSetMathMode(void *h, int mode) {
	ENTER("cublasSetMathMode");
	Cuda c;
	if (Status r = find(h, &c); r != success) return r;
	((Handle *)h)->math = mode;
	return success;
}

API int cublasGemmEx(void *h, int transA, int transB, int m, int n, int k, const void *alpha, const void *a, int typeA, int lda, const void *b,
                     int typeB, int ldb, const void *beta, void *c, int typeC, int ldc, int type, int algo) {
	ENTER("cublasGemmEx");
	Cuda d;
	if (Status r = find(h, &d); r != success) return r;
	auto x = (Handle *)h;
	if (transA < op_n || transA > op_t || transB < op_n || transB > op_t || m < 0 || n < 0 || k < 0 || alpha == nullptr || beta == nullptr) return invalid_value;
	if (lda < (transA ? k : m) || ldb < (transB ? n : k) || ldc < m) return invalid_value;
	if (typeA != r_32f || typeB != r_32f || typeC != r_32f || algo != -1) return not_supported;
	if (type != compute_32f && type != compute_tf32 && type != compute_16bf) return not_supported;
	auto p = std::make_unique<Product>(Product{transA, transB, m, n, k, lda, ldb, ldc, type, *(const float *)alpha, *(const float *)beta,
	                                           (const float *)a, (const float *)b, (float *)c, x->work, x->work_bytes, g().wrong});
	{
		std::lock_guard<std::mutex> lk(g().mu);
		if (x->work == nullptr) complain("a product in the default workspace");
		if (x->stream == nullptr) complain("a product on the default stream");
		if (x->math != 0) complain("a math mode beside the compute type");
	}
	if (d.host_func(x->stream, compute, p.get()) != 0) return execution_failed;
	p.release(); // the stream's; leaked when a lost context drops it
	return success;
}

API int hx_fake_control(const char *command, char *out, size_t size) {
	std::string rest = command, answer;
	std::lock_guard<std::mutex> lk(g().mu);
	while (!rest.empty()) {
		std::string value = word(rest, ','), key = word(value, '=');
		if (key == "reset") {
			g().calls.clear();
			g().violations.clear();
			g().libcuda.clear();
			g().wrong = false;
			g().version[0] = 12, g().version[1] = 6, g().version[2] = 4;
		} else if (key == "libcuda") {
			g().libcuda = value;
		} else if (key == "wrong") {
			g().wrong = value == "1";
		} else if (key == "version") {
			for (int &v : g().version) v = atoi(word(value, '.').c_str());
		} else if (key == "fail") {
			Call &c = g().calls[word(value, ':')];
			uint64_t at = strtoull(word(value, ':').c_str(), nullptr, 10);
			std::string status = word(value, ':'), times = word(value, ':');
			c.fail_from = c.count + (at ? at : 1);
			c.status = status.empty() ? (int)execution_failed : atoi(status.c_str());
			c.fail_to = c.fail_from + (times.empty() ? 1 : strtoull(times.c_str(), nullptr, 10));
		} else if (key == "calls") {
			answer = std::to_string(g().calls[value].count);
		} else if (key == "violations") {
			answer = g().violations;
		} else if (key == "handles") {
			answer = std::to_string(g().handles.size());
		} else {
			snprintf(out, size, "unknown command %s", key.c_str());
			return -1;
		}
	}
	snprintf(out, size, "%s", answer.c_str());
	return 0;
}
