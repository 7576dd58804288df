// Initialisation, knobs, devices, contexts (green ones too), error words and symbols by version.
#include "fake.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <time.h>

namespace fake {

Driver &g() {
	static Driver *d = new Driver;
	return *d;
}

i64 now_ns() {
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (i64)t.tv_sec * 1000000000 + t.tv_nsec;
}

void complain(const std::string &what) {
	if (g().violations.size() < 4000) g().violations += what + "\n";
}

Using::Using(CUcontext c, const char *call) : ctx(nullptr) {
	if (c->green == nullptr) return;
	unsigned long me = (unsigned long)pthread_self(), is = 0;
	if (!c->user.compare_exchange_strong(is, me)) {
		if (is == me) return; // within a call of this thread
		std::lock_guard<std::mutex> lk(g().mu);
		complain(std::string("two threads in one green context: ") + call + " and " + c->call.load());
		return;
	}
	ctx = c;
	c->call = call;
	if (u64 us = g().knobs.green_us) {
		timespec t{(time_t)(us / 1000000), (long)(us % 1000000 * 1000)};
		nanosleep(&t, nullptr);
	}
}

Using::~Using() {
	if (ctx != nullptr) ctx->user = 0;
}

namespace {

thread_local std::vector<CUcontext> stack;

CUresult default_failure(const std::string &name) {
	for (const char *w : {"Alloc", "Create", "Register", "LoadData", "Retain"})
		if (name.find(w) != std::string::npos) return CUDA_ERROR_OUT_OF_MEMORY;
	return CUDA_ERROR_UNKNOWN;
}

std::vector<std::string> split(const std::string &s, char by) {
	std::vector<std::string> out(1);
	for (char c : s) {
		if (c == by)
			out.emplace_back();
		else
			out.back() += c;
	}
	return out;
}

bool number(const std::string &s, u64 *v) {
	char *end;
	*v = strtoull(s.c_str(), &end, 0);
	return !s.empty() && *end == 0 && s[0] != '-';
}

Site &site(const std::string &name) { // with mu held
	Site *&s = g().sites[name];
	if (s == nullptr) {
		s = static_cast<Site *>(calloc(1, sizeof(Site)));
		s->name = strdup(name.c_str());
	}
	return *s;
}

void build_devices() { // with mu held; no context is alive
	auto &d = g();
	d.devices.clear();
	for (int i = 0; i < d.knobs.devices; i++) {
		auto dev = std::make_unique<Device>();
		dev->index = i;
		dev->sms = std::make_shared<SMs>(d.knobs.sms, d.knobs.blocks_per_sm, d.knobs.threads_per_sm);
		d.devices.push_back(std::move(dev));
	}
}

std::string set_knob(const std::string &key, const std::string &value) { // with mu held
	auto &d = g();
	auto &k = d.knobs;
	auto parts = split(value, ':');
	if (key == "name") {
		k.name = value;
		return "";
	}
	if (key == "jit") {
		k.jit = value;
		return "";
	}
	if (key == "cc") {
		auto n = split(value, '.');
		u64 major, minor;
		if (n.size() != 2 || !number(n[0], &major) || !number(n[1], &minor)) return "cc wants major.minor";
		k.cc = (int)(major * 10 + minor);
		return "";
	}
	if (key == "missing") {
		for (auto &s : split(value, '+')) k.missing.insert(s);
		return "";
	}
	if (key == "fail") { // name:call[:code[:how often]]; calls count from now
		u64 nth, code, times = 1;
		code = default_failure(parts[0]);
		if (parts.size() < 2 || !number(parts[1], &nth) || nth == 0 || (parts.size() > 2 && !number(parts[2], &code)) ||
		    (parts.size() > 3 && !number(parts[3], &times)))
			return "fail wants symbol:call[:code[:times]]";
		Site &s = site(parts[0]);
		s.fail_from = s.calls + nth;
		s.fail_to = s.fail_from + times;
		s.fail_with = (CUresult)code;
		return "";
	}
	if (key == "hang") { // symbol; none: all go on
		if (value.empty())
			for (auto &s : d.sites) s.second->hang = false;
		else
			site(value).hang = true;
		return "";
	}
	if (key == "crash") { // launch[:code]
		u64 nth, code = CUDA_ERROR_LAUNCH_FAILED;
		if (!number(parts[0], &nth) || nth == 0 || (parts.size() > 1 && !number(parts[1], &code))) return "crash wants launch[:code]";
		d.crash_at = d.launches + nth;
		d.crash_with = (CUresult)code;
		return "";
	}
	u64 v;
	if (!number(value, &v)) return key + " wants a number";
	if (key == "lose") {
		for (CUcontext c : d.contexts)
			if (!c->destroyed && c->root == c) c->error = (int)v;
		return "";
	}
	if (key == "sms" && (v == 0 || v > max_sms)) return "sms: 1 to 256";
	struct {
		const char *key;
		int *at;
	} ints[] = {{"devices", &k.devices},   {"sms", &k.sms},         {"driver", &k.driver},         {"blocks_per_sm", &k.blocks_per_sm},
	            {"threads_per_sm", &k.threads_per_sm}, {"green", &k.green},     {"sm_min", &k.sm_min},         {"sm_step", &k.sm_step},
	            {"vmm", &k.vmm},           {"graphs", &k.graphs},   {"iomem", &k.iomem},       {"dmabuf", &k.dmabuf},   {"hostreg", &k.hostreg}, {"confidential", &k.confidential},       {"free_waits", &k.free_waits},
	            {"init", &k.init},         {"jitter", &k.jitter},   {"compute_mode", &k.compute_mode}};
	for (auto &i : ints)
		if (key == i.key) {
			*i.at = (int)v;
			return "";
		}
	if (key == "mem") return k.mem = v, "";
	if (key == "used") return k.used = v, "";
	if (key == "granule") return (v < 4096 || (v & (v - 1))) ? "granule: a power of two, a page or more" : (k.granule = v, "");
	if (key == "launch_ns") return k.launch_ns = v, "";
	if (key == "green_us") return k.green_us = v, "";
	if (key == "hw_queues") return v > max_queues ? "hw_queues: 0 to " + std::to_string(max_queues) : (k.hw_queues = v, "");
	if (key == "queue") return k.queue = (u32)(v ? v : 1), "";
	if (key == "seed") return k.seed = v, "";
	if (key == "store_buffer") return k.store_buffer = (u32)v, "";
	return "no knob named " + key;
}

void abandon();

std::string command(const std::string &all) {
	auto &d = g();
	for (auto &word : split(all, ','))
		if (word == "reset") abandon();
	std::lock_guard<std::mutex> lk(d.mu);
	std::string out;
	for (auto &word : split(all, ',')) {
		if (word.empty()) continue;
		size_t eq = word.find('=');
		std::string key = word.substr(0, eq), value = eq == std::string::npos ? "" : word.substr(eq + 1);
		if (key == "reset") {
			d.knobs = Knobs();
			d.ready = false;
			d.crash_at = 0;
			d.error.clear();
			d.violations.clear();
			for (auto &s : d.sites) {
				s.second->calls = 0;
				s.second->fail_from = s.second->fail_to = s.second->failed = 0;
				s.second->hang = false;
			}
		} else if (key == "calls") {
			out += std::to_string((unsigned long long)site(value).calls.load()) + "\n";
		} else if (key == "failed") {
			out += std::to_string((unsigned long long)site(value).failed) + "\n";
		} else if (key == "sites") {
			for (auto &s : d.sites)
				if (u64 n = s.second->calls) out += s.first + " " + std::to_string((unsigned long long)n) + "\n";
		} else if (key == "loading") {
			out += d.loading;
		} else if (key == "connections") {
			out += d.connections;
		} else if (key == "error") {
			out += d.error;
		} else if (key == "violations") {
			out += d.violations;
		} else if (key == "live") {
			u64 ctx = 0, streams = 0, events = 0, modules = 0;
			for (CUcontext c : d.contexts) {
				if (c->destroyed) continue;
				ctx++;
				streams += c->streams.size();
				events += c->events.size();
				modules += c->modules.size();
			}
			char b[200];
			snprintf(b, sizeof b, "contexts=%llu streams=%llu events=%llu modules=%llu %s", ctx, streams, events, modules, live_memory().c_str());
			out += b;
		} else {
			std::string err = set_knob(key, value);
			if (!err.empty()) return "!" + err;
		}
	}
	bool used = false;
	for (CUcontext c : d.contexts) used |= !c->destroyed;
	if (d.ready && !used) build_devices();
	return out;
}

} // namespace

Site::Site(const char *name) : name(name) {
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	Site *&s = d.sites[name];
	if (s != nullptr) { // told to fail before its first call
		fail_from = s->fail_from;
		fail_to = s->fail_to;
		fail_with = s->fail_with;
		hang = s->hang;
	}
	s = this;
}

CUresult Site::enter(bool needs_init) {
	u64 n = ++calls;
	auto &d = g();
	std::unique_lock<std::mutex> lk(d.mu);
	for (i64 end = now_ns() + 60'000'000'000; hang && now_ns() < end;) { // as a driver that lost its GPU
		lk.unlock();
		timespec t{0, 200000};
		nanosleep(&t, nullptr);
		lk.lock();
	}
	if (needs_init && !d.ready) return CUDA_ERROR_NOT_INITIALIZED;
	if (n >= fail_from && n < fail_to) {
		failed++;
		return fail_with;
	}
	return CUDA_SUCCESS;
}

CUresult current(CUcontext *ctx) {
	if (stack.empty() || stack.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
	CUcontext c = stack.back();
	if (c->destroyed || c->root->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (int e = c->root->error) return (CUresult)e;
	*ctx = c;
	return CUDA_SUCCESS;
}

void poison(CUcontext ctx, CUresult error, const std::string &why) {
	int none = 0;
	ctx->root->error.compare_exchange_strong(none, error);
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	d.error = why;
}

namespace {

CUcontext new_context(Device &dev, unsigned flags) { // with mu held
	auto &d = g();
	CUcontext c = new CUctx_st;
	c->root = c;
	c->device = dev.index;
	c->flags = flags;
	c->id = ++d.ids;
	for (int i = 0; i < d.knobs.sms; i++) c->sms.set(i);
	c->null_stream = new_stream(c, 0, 0);
	d.contexts.insert(c);
	return c;
}

// Ends the context's work, then everything in it. Not with mu held.
CUresult destroy(CUcontext c) {
	auto &d = g();
	wait_idle(c, true);
	std::vector<CUcontext> greens;
	{
		std::lock_guard<std::mutex> lk(d.mu);
		if (c->destroyed.exchange(true)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
		for (CUcontext x : d.contexts)
			if (x->root == c && x != c && !x->destroyed.exchange(true)) greens.push_back(x);
	}
	for (CUcontext x : greens) end_streams(x);
	end_streams(c);
	std::lock_guard<std::mutex> lk(d.mu);
	greens.push_back(c);
	for (CUcontext x : greens) {
		for (auto e : x->events) d.live.erase(e);
		for (auto m : x->modules) {
			d.live.erase(m);
			for (auto f : m->functions) d.live.erase(f);
		}
		if (x->green) d.live.erase(x->green);
		x->events.clear();
		x->modules.clear();
		d.contexts.erase(x);
	}
	return drop_memory(c);
}

// Ends all contexts, whoever holds them: those of a test that failed must not trouble the next.
void abandon() {
	auto &d = g();
	std::vector<CUcontext> roots;
	{
		std::lock_guard<std::mutex> lk(d.mu);
		for (auto &dev : d.devices) dev->primary = nullptr;
		for (CUcontext c : d.contexts)
			if (c->root == c && !c->destroyed) roots.push_back(c);
	}
	for (CUcontext c : roots) destroy(c);
	std::lock_guard<std::mutex> lk(d.mu);
	drop_reserved();
}

// The context behind a handle that a caller gave.
CUresult good(CUcontext c) { // with mu held
	if (c == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
	if (g().contexts.count(c) == 0) return CUDA_ERROR_INVALID_CONTEXT;
	return c->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

CUresult device(int i, Device **out) { // with mu held
	if (i < 0 || i >= (int)g().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	*out = g().devices[i].get();
	return CUDA_SUCCESS;
}

void unstack(CUcontext c) {
	if (!stack.empty() && stack.back() == c) stack.pop_back();
}

} // namespace
} // namespace fake

using namespace fake;

extern "C" __attribute__((visibility("default"))) int hx_fake_control(const char *cmd, char *out, u64 size) {
	std::string r = command(cmd);
	bool bad = !r.empty() && r[0] == '!';
	if (bad) r.erase(0, 1);
	if (size > 0) {
		r.resize(std::min<size_t>(r.size(), size - 1));
		memcpy(out, r.c_str(), r.size() + 1);
	}
	return bad ? -1 : (int)r.size();
}

HX_API cuInit(unsigned int flags) {
	HX_ENTER_ANY(cuInit, false);
	if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
	auto &d = g();
	static bool once = false;
	std::unique_lock<std::mutex> lk(d.mu);
	if (!once) {
		once = true;
		if (const char *mode = getenv("CUDA_MODULE_LOADING")) d.loading = mode;
		if (const char *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS")) d.connections = queues;
		if (const char *env = getenv("HELIOS_FAKECUDA")) {
			lk.unlock();
			std::string r = command(env);
			if (!r.empty()) {
				fprintf(stderr, "HELIOS_FAKECUDA: %s\n", r.c_str() + (r[0] == '!'));
				return CUDA_ERROR_UNKNOWN;
			}
			lk.lock();
		}
	}
	if (d.knobs.init) return (CUresult)d.knobs.init;
	if (d.knobs.devices == 0) return CUDA_ERROR_NO_DEVICE;
	if (!d.ready) build_devices();
	d.ready = true;
	return CUDA_SUCCESS;
}

HX_API cuDriverGetVersion(int *version) {
	HX_ENTER_ANY(cuDriverGetVersion, false);
	if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*version = g().knobs.driver;
	return CUDA_SUCCESS;
}

static const struct {
	CUresult code;
	const char *name, *words;
} results[] = {
#define X(NAME, VALUE, WORDS) {NAME, #NAME, WORDS},
    HX_RESULTS(X)
#undef X
};

HX_API cuGetErrorName(CUresult error, const char **str) {
	if (str == nullptr) return CUDA_ERROR_INVALID_VALUE;
	for (auto &r : results)
		if (r.code == error) return *str = r.name, CUDA_SUCCESS;
	*str = nullptr;
	return CUDA_ERROR_INVALID_VALUE;
}

HX_API cuGetErrorString(CUresult error, const char **str) {
	if (str == nullptr) return CUDA_ERROR_INVALID_VALUE;
	for (auto &r : results)
		if (r.code == error) return *str = r.words, CUDA_SUCCESS;
	*str = nullptr;
	return CUDA_ERROR_INVALID_VALUE;
}

// Functions whose name alone is an older ABI, with the CUDA version that brought each.
static const struct {
	const char *name, *symbol;
	int since;
} versions[] = {
    {"cuCtxCreate", "cuCtxCreate_v4", 12050},
    {"cuCtxCreate", "cuCtxCreate_v3", 11040},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000},
    {"cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxReset_v2", 11000},
    {"cuDevicePrimaryCtxSetFlags", "cuDevicePrimaryCtxSetFlags_v2", 11000},
    {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040},
    {"cuEventElapsedTime", "cuEventElapsedTime_v2", 12080},
    {"cuEventElapsedTime", "cuEventElapsedTime", 2000},
    {"cuStreamWriteValue32", "cuStreamWriteValue32_v2", 11070},
    {"cuStreamWaitValue32", "cuStreamWaitValue32_v2", 11070},
    {"cuStreamWriteValue64", "cuStreamWriteValue64_v2", 11070},
    {"cuStreamWaitValue64", "cuStreamWaitValue64_v2", 11070},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
    {"cuLaunchKernelEx", "cuLaunchKernelEx", 11060},
    {"cuMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange", 11070},
    {"cuFuncGetParamInfo", "cuFuncGetParamInfo", 12040},
    {"cuFuncGetName", "cuFuncGetName", 12030},
    {"cuModuleGetFunctionCount", "cuModuleGetFunctionCount", 12040},
    {"cuModuleEnumerateFunctions", "cuModuleEnumerateFunctions", 12040},
    {"cuDeviceGetDevResource", "cuDeviceGetDevResource", 12040},
    {"cuCtxGetDevResource", "cuCtxGetDevResource", 12040},
    {"cuDevSmResourceSplitByCount", "cuDevSmResourceSplitByCount", 12040},
    {"cuDevResourceGenerateDesc", "cuDevResourceGenerateDesc", 12040},
    {"cuGreenCtxCreate", "cuGreenCtxCreate", 12040},
    {"cuGreenCtxDestroy", "cuGreenCtxDestroy", 12040},
    {"cuCtxFromGreenCtx", "cuCtxFromGreenCtx", 12040},
    {"cuGreenCtxGetDevResource", "cuGreenCtxGetDevResource", 12040},
    {"cuGreenCtxRecordEvent", "cuGreenCtxRecordEvent", 12040},
    {"cuGreenCtxWaitEvent", "cuGreenCtxWaitEvent", 12040},
    {"cuGreenCtxStreamCreate", "cuGreenCtxStreamCreate", 12050},
    {"cuStreamGetGreenCtx", "cuStreamGetGreenCtx", 12040},
};

HX_API cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
	HX_ENTER_ANY(cuGetProcAddress_v2, false);
	if (symbol == nullptr || pfn == nullptr || flags > 2) return CUDA_ERROR_INVALID_VALUE;
	auto &d = g();
	*pfn = nullptr;
	int dummy;
	int *st = status ? (int *)status : &dummy;
	static void *self = [] {
		Dl_info info;
		return dladdr((void *)&cuInit, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
	}();
	std::lock_guard<std::mutex> lk(d.mu);
	auto there = [&](const std::string &s) { return self == nullptr || d.knobs.missing.count(s) ? nullptr : dlsym(self, s.c_str()); };
	bool known = false, versioned = false;
	for (auto &v : versions) {
		if (strcmp(v.name, symbol) != 0) continue;
		versioned = true;
		void *f = there(v.symbol);
		if (f == nullptr) continue;
		if (v.since > d.knobs.driver) continue;
		known = true;
		if (v.since <= cudaVersion) {
			*pfn = f;
			break;
		}
	}
	if (*pfn == nullptr && cudaVersion >= 4000 && d.knobs.missing.count(symbol) == 0) {
		*pfn = there(std::string(symbol) + "_v2"); // all of these are older than CUDA 4
		if (*pfn == nullptr && !versioned) *pfn = there(symbol);
	}
	*st = *pfn ? CU_GET_PROC_ADDRESS_SUCCESS : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	// With a status the call succeeds whatever it found; without one it is an error.
	return *pfn || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Devices.

HX_API cuDeviceGetCount(int *count) {
	HX_ENTER(cuDeviceGetCount);
	if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*count = (int)g().devices.size();
	return CUDA_SUCCESS;
}

HX_API cuDeviceGet(CUdevice *dev, int ordinal) {
	HX_ENTER(cuDeviceGet);
	if (dev == nullptr) return CUDA_ERROR_INVALID_VALUE;
	if (ordinal < 0 || ordinal >= (int)g().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	*dev = ordinal;
	return CUDA_SUCCESS;
}

#define DEVICE(DEV)                                \
	std::unique_lock<std::mutex> lk(g().mu);        \
	Device *device_ = nullptr;                      \
	if (CUresult r_ = device(DEV, &device_); r_ != CUDA_SUCCESS) return r_

HX_API cuDeviceGetName(char *name, int len, CUdevice dev) {
	HX_ENTER(cuDeviceGetName);
	DEVICE(dev);
	if (name == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
	snprintf(name, len, "%s", g().knobs.name.c_str());
	return CUDA_SUCCESS;
}

static void uuid_of(CUuuid *u, int dev) {
	memset(u, 0, sizeof *u);
	memcpy(u->bytes, "helios-fake-gpu", 15);
	u->bytes[15] = (char)dev;
}

HX_API cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) {
	HX_ENTER(cuDeviceGetUuid);
	DEVICE(dev);
	if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
	uuid_of(uuid, dev);
	return CUDA_SUCCESS;
}

HX_API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev) {
	HX_ENTER(cuDeviceGetUuid_v2);
	DEVICE(dev);
	if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
	uuid_of(uuid, dev);
	return CUDA_SUCCESS;
}

HX_API cuDeviceGetPCIBusId(char *id, int len, CUdevice dev) {
	HX_ENTER(cuDeviceGetPCIBusId);
	DEVICE(dev);
	if (id == nullptr || len < 13) return CUDA_ERROR_INVALID_VALUE;
	snprintf(id, len, "0000:%02X:00.0", 0x41 + dev);
	return CUDA_SUCCESS;
}

HX_API cuDeviceGetByPCIBusId(CUdevice *dev, const char *id) {
	HX_ENTER(cuDeviceGetByPCIBusId);
	std::lock_guard<std::mutex> lk(g().mu);
	unsigned domain, bus, slot;
	if (dev == nullptr || id == nullptr || sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) return CUDA_ERROR_INVALID_VALUE;
	if (domain != 0 || slot != 0 || bus < 0x41 || bus - 0x41 >= g().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	*dev = (int)(bus - 0x41);
	return CUDA_SUCCESS;
}

HX_API cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
	HX_ENTER(cuDeviceTotalMem_v2);
	DEVICE(dev);
	if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*bytes = g().knobs.mem;
	return CUDA_SUCCESS;
}

HX_API cuDeviceGetAttribute(int *v, CUdevice_attribute attribute, CUdevice dev) {
	HX_ENTER(cuDeviceGetAttribute);
	DEVICE(dev);
	if (v == nullptr) return CUDA_ERROR_INVALID_VALUE;
	auto &k = g().knobs;
	int a = (int)attribute;
	if (a < 1 || a > 143) return CUDA_ERROR_INVALID_VALUE;
	switch (a) {
	case 1: case 2: case 3: *v = 1024; break;           // threads of a block, x, y
	case 4: *v = 64; break;                             // z
	case 5: *v = 0x7fffffff; break;                     // grid x
	case 6: case 7: *v = 65535; break;                  // grid y, z
	case 8: *v = 48 << 10; break;                       // shared memory of a block
	case 9: *v = 64 << 10; break;                       // constant memory
	case 10: *v = 32; break;                            // warp
	case 11: *v = 0x7fffffff; break;                    // pitch
	case 12: case 82: *v = 65536; break;                // registers of a block, of an SM
	case 13: *v = 1500000; break;                       // clock, kHz
	case 14: *v = 512; break;                           // texture alignment
	case 15: case 40: *v = 2; break;                    // copy engines
	case 16: *v = k.sms; break;
	case 19: case 31: case 41: case 78: case 91: case 79: case 80: case 90: *v = 1; break; // maps host memory, concurrent kernels, UVA, registered pointers as they are, priorities, caches, preemption
	case 20: *v = k.compute_mode; break;
	case 33: *v = 0x41 + dev; break;                    // PCI bus
	case 36: *v = 2600000; break;                       // memory clock
	case 37: *v = 5120; break;                          // bus width
	case 38: *v = 50 << 20; break;                      // L2
	case 39: *v = k.threads_per_sm; break;
	case 75: *v = k.cc / 10; break;
	case 76: *v = k.cc % 10; break;
	case 81: *v = 228 << 10; break;                     // shared memory of an SM
	case 95: case 103: case 115: case 122: case 123: *v = 1; break; // cooperative, fd handles, pools, 64-bit and NOR stream waits
	case 102: *v = k.vmm; break;
	case 110: *v = k.vmm && k.dmabuf; break;            // VMM with GPUDirect RDMA
	case 97: *v = 227 << 10; break;                     // shared memory, opt in
	case 99: *v = k.hostreg && k.confidential != 1; break;
	case 106: *v = k.blocks_per_sm; break;
	case 111: *v = 1024; break;                         // shared memory the driver keeps
	case 113: *v = 0; break;                            // read-only registration
	case 116: *v = k.dmabuf; break;                     // GPUDirect RDMA
	case 117: *v = 1; break;                            // flush writes: host
	case 118: *v = 100; break;                          // writes ordering: owner
	case 120: *v = k.cc >= 90; break;                   // clusters
	case 124: *v = k.dmabuf; break;
	case 134: *v = 0; break;                            // NUMA node
	default: *v = 0;
	}
	return CUDA_SUCCESS;
}

// Contexts.

HX_API cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice dev) {
	HX_ENTER(cuDevicePrimaryCtxRetain);
	DEVICE(dev);
	if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
	if (device_->primary == nullptr || device_->primary->destroyed) {
		device_->primary = new_context(*device_, device_->primary_flags);
		device_->primary->primary = true;
	}
	device_->primary->refs++;
	*out = device_->primary;
	return CUDA_SUCCESS;
}

static CUresult release_primary(int dev) {
	CUcontext c;
	{
		DEVICE(dev);
		c = device_->primary;
		if (c == nullptr || c->refs == 0) return CUDA_ERROR_INVALID_CONTEXT;
		if (--c->refs > 0) return CUDA_SUCCESS;
		device_->primary = nullptr;
	}
	return destroy(c);
}

HX_API cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
	HX_ENTER(cuDevicePrimaryCtxRelease_v2);
	return release_primary(dev);
}

HX_API cuDevicePrimaryCtxReset_v2(CUdevice dev) {
	HX_ENTER(cuDevicePrimaryCtxReset_v2);
	CUcontext c;
	{
		DEVICE(dev);
		c = device_->primary;
		device_->primary = nullptr;
	}
	return c == nullptr ? CUDA_SUCCESS : destroy(c);
}

HX_API cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
	HX_ENTER(cuDevicePrimaryCtxSetFlags_v2);
	DEVICE(dev);
	if (flags & ~0xffu) return CUDA_ERROR_INVALID_VALUE;
	device_->primary_flags = flags;
	if (device_->primary) device_->primary->flags = flags;
	return CUDA_SUCCESS;
}

HX_API cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
	HX_ENTER(cuDevicePrimaryCtxGetState);
	DEVICE(dev);
	if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*flags = device_->primary_flags;
	*active = device_->primary != nullptr;
	return CUDA_SUCCESS;
}

static CUresult create(CUcontext *out, unsigned flags, CUdevice dev) {
	DEVICE(dev);
	if (out == nullptr || (flags & ~0xffu)) return CUDA_ERROR_INVALID_VALUE;
	*out = new_context(*device_, flags);
	stack.push_back(*out);
	return CUDA_SUCCESS;
}

HX_API cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice dev) {
	HX_ENTER(cuCtxCreate_v2);
	return create(out, flags, dev);
}

HX_API cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *, int n, unsigned int flags, CUdevice dev) {
	HX_ENTER(cuCtxCreate_v3);
	return n != 0 ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, dev);
}

HX_API cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice dev) {
	HX_ENTER(cuCtxCreate_v4);
	return params != nullptr ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, dev);
}

HX_API cuCtxDestroy_v2(CUcontext c) {
	HX_ENTER(cuCtxDestroy_v2);
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(c));
		if (c->primary || c->green) return CUDA_ERROR_INVALID_CONTEXT;
	}
	CUresult r = destroy(c);
	unstack(c);
	return r;
}

HX_API cuCtxSetCurrent(CUcontext c) {
	HX_ENTER(cuCtxSetCurrent);
	if (c != nullptr) {
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(c));
	}
	if (!stack.empty()) stack.pop_back();
	if (c != nullptr) stack.push_back(c);
	return CUDA_SUCCESS;
}

HX_API cuCtxGetCurrent(CUcontext *c) {
	HX_ENTER(cuCtxGetCurrent);
	if (c == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*c = stack.empty() ? nullptr : stack.back();
	return CUDA_SUCCESS;
}

HX_API cuCtxPushCurrent_v2(CUcontext c) {
	HX_ENTER(cuCtxPushCurrent_v2);
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(c));
	stack.push_back(c);
	return CUDA_SUCCESS;
}

HX_API cuCtxPopCurrent_v2(CUcontext *c) {
	HX_ENTER(cuCtxPopCurrent_v2);
	if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
	if (c != nullptr) *c = stack.back();
	stack.pop_back();
	return CUDA_SUCCESS;
}

HX_API cuCtxGetDevice(CUdevice *dev) {
	HX_ENTER(cuCtxGetDevice);
	CUcontext c;
	HX_TRY(current(&c));
	if (dev == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*dev = c->device;
	return CUDA_SUCCESS;
}

HX_API cuCtxGetFlags(unsigned int *flags) {
	HX_ENTER(cuCtxGetFlags);
	CUcontext c;
	HX_TRY(current(&c));
	if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*flags = c->flags;
	return CUDA_SUCCESS;
}

HX_API cuCtxGetId(CUcontext c, unsigned long long *id) {
	HX_ENTER(cuCtxGetId);
	if (c == nullptr) HX_TRY(current(&c));
	if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(c));
	*id = c->id;
	return CUDA_SUCCESS;
}

HX_API cuCtxGetApiVersion(CUcontext c, unsigned int *version) {
	HX_ENTER(cuCtxGetApiVersion);
	if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
	if (c == nullptr) HX_TRY(current(&c));
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(c));
	*version = 3020;
	return CUDA_SUCCESS;
}

HX_API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
	HX_ENTER(cuCtxGetStreamPriorityRange);
	CUcontext c;
	HX_TRY(current(&c));
	if (least) *least = 0;
	if (greatest) *greatest = -5;
	return CUDA_SUCCESS;
}

HX_API cuCtxGetLimit(size_t *value, CUlimit limit) {
	HX_ENTER(cuCtxGetLimit);
	CUcontext c;
	HX_TRY(current(&c));
	if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
	if ((int)limit < 0 || (int)limit > 6) return CUDA_ERROR_UNSUPPORTED_LIMIT;
	static const size_t defaults[] = {1024, 1 << 20, 8 << 20, 2, 2048, 64, 0};
	std::lock_guard<std::mutex> lk(g().mu);
	auto it = c->root->limits.find((int)limit);
	*value = it != c->root->limits.end() ? it->second : defaults[(int)limit];
	return CUDA_SUCCESS;
}

HX_API cuCtxSetLimit(CUlimit limit, size_t value) {
	HX_ENTER(cuCtxSetLimit);
	CUcontext c;
	HX_TRY(current(&c));
	if ((int)limit < 0 || (int)limit > 6) return CUDA_ERROR_UNSUPPORTED_LIMIT;
	std::lock_guard<std::mutex> lk(g().mu);
	c->root->limits[(int)limit] = value;
	return CUDA_SUCCESS;
}

HX_API cuCtxSynchronize(void) {
	HX_ENTER(cuCtxSynchronize);
	CUcontext c;
	HX_TRY(current(&c));
	return wait_idle(c->root, false);
}

// Green contexts. A resource carries its SMs, its device and the split that it came from in the
// padding that belongs to the driver.

namespace {

struct Inside {
	u64 magic, split;
	int device;
	unsigned char mask[max_sms / 8];
};
static_assert(sizeof(Inside) <= 92 - 4, "fits the padding");
constexpr u64 inside_magic = 0x68656c696f73534dull;

void put(CUdevResource *r, const Mask &m, int dev, u64 split) {
	memset(r, 0, sizeof *r);
	if (m.none()) return; // CU_DEV_RESOURCE_TYPE_INVALID
	Inside in{inside_magic, split, dev, {}};
	for (u32 i = 0; i < max_sms; i++)
		if (m[i]) in.mask[i / 8] |= (unsigned char)(1 << i % 8);
	r->type = (CUdevResourceType)CU_DEV_RESOURCE_TYPE_SM;
	memcpy(r->_internal_padding + 4, &in, sizeof in);
	r->sm.smCount = (unsigned)m.count();
}

CUresult get(const CUdevResource *r, Mask *m, Inside *in) {
	if ((int)r->type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
	memcpy(in, r->_internal_padding + 4, sizeof *in);
	if (in->magic != inside_magic) return CUDA_ERROR_INVALID_VALUE;
	m->reset();
	for (u32 i = 0; i < max_sms; i++)
		if (in->mask[i / 8] >> i % 8 & 1) m->set(i);
	return CUDA_SUCCESS;
}

CUresult green_there() { return g().knobs.green ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED; }

CUresult good(CUgreenCtx x) { // with mu held
	if (x == nullptr || g().live.count(x) == 0) return CUDA_ERROR_INVALID_CONTEXT;
	return x->ctx->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

} // namespace

HX_API cuDeviceGetDevResource(CUdevice dev, CUdevResource *r, CUdevResourceType type) {
	HX_ENTER(cuDeviceGetDevResource);
	DEVICE(dev);
	HX_TRY(green_there());
	if (r == nullptr) return CUDA_ERROR_INVALID_VALUE;
	if ((int)type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
	Mask m;
	for (int i = 0; i < g().knobs.sms; i++) m.set(i);
	put(r, m, dev, 0);
	return CUDA_SUCCESS;
}

HX_API cuCtxGetDevResource(CUcontext c, CUdevResource *r, CUdevResourceType type) {
	HX_ENTER(cuCtxGetDevResource);
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(green_there());
	HX_TRY(good(c));
	if (r == nullptr) return CUDA_ERROR_INVALID_VALUE;
	if ((int)type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
	put(r, c->sms, c->device, 0);
	return CUDA_SUCCESS;
}

HX_API cuGreenCtxGetDevResource(CUgreenCtx x, CUdevResource *r, CUdevResourceType type) {
	HX_ENTER(cuGreenCtxGetDevResource);
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(x));
	if (r == nullptr) return CUDA_ERROR_INVALID_VALUE;
	if ((int)type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
	put(r, x->ctx->sms, x->ctx->device, 0);
	return CUDA_SUCCESS;
}

HX_API cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input, CUdevResource *remaining,
                                   unsigned int flags, unsigned int min_count) {
	HX_ENTER(cuDevSmResourceSplitByCount);
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(green_there());
	if (groups == nullptr || input == nullptr || (flags & ~3u)) return CUDA_ERROR_INVALID_VALUE;
	Mask all;
	Inside in;
	HX_TRY(get(input, &all, &in));
	if (in.split != 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION; // of a split: only a green context's can be split again
	auto &k = g().knobs;
	// The table in cuda.h, section "green contexts"; ignoring co-scheduling goes down to pairs.
	u32 least = k.cc >= 90 ? 8 : k.cc >= 80 ? 4 : k.cc >= 70 ? 2 : 1;
	u32 step = k.cc >= 90 ? 8 : k.cc >= 70 ? 2 : 1;
	if (flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) least = step = std::min<u32>(step, 2);
	if (k.sm_min) least = k.sm_min;
	if (k.sm_step) step = k.sm_step;
	u32 total = (u32)all.count();
	if (min_count > total) return CUDA_ERROR_INVALID_VALUE;
	u32 each = std::max(least, (min_count + step - 1) / step * step);
	if (each > total) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
	u32 n = total / each;
	if (result != nullptr) n = std::min(n, *groups);
	*groups = n;
	u64 split = ++g().ids;
	u32 sm = 0;
	Mask rest = all;
	for (u32 i = 0; i < n && result != nullptr; i++) {
		Mask m;
		while (m.count() < each) {
			if (all[sm]) {
				m.set(sm);
				rest.reset(sm);
			}
			sm++;
		}
		put(&result[i], m, in.device, split);
	}
	if (remaining != nullptr && result != nullptr) put(remaining, rest, in.device, split);
	return CUDA_SUCCESS;
}

HX_API cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int n) {
	HX_ENTER(cuDevResourceGenerateDesc);
	std::lock_guard<std::mutex> lk(g().mu);
	if (out == nullptr || resources == nullptr || n == 0) return CUDA_ERROR_INVALID_VALUE;
	Mask all;
	Inside first{};
	for (unsigned i = 0; i < n; i++) {
		Mask m;
		Inside in;
		HX_TRY(get(&resources[i], &m, &in));
		if (i == 0) first = in;
		if (in.device != first.device || in.split != first.split || (all & m).any()) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
		all |= m;
	}
	*out = new CUdevResourceDesc_st{first.device, all};
	g().live.insert(*out);
	return CUDA_SUCCESS;
}

HX_API cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev, unsigned int flags) {
	HX_ENTER(cuGreenCtxCreate);
	DEVICE(dev);
	HX_TRY(green_there());
	if (out == nullptr || desc == nullptr || flags != CU_GREEN_CTX_DEFAULT_STREAM) return CUDA_ERROR_INVALID_VALUE;
	if (g().live.count(desc) == 0) return CUDA_ERROR_INVALID_VALUE;
	if (desc->device != dev) return CUDA_ERROR_INVALID_DEVICE;
	if (device_->primary == nullptr) {
		device_->primary = new_context(*device_, device_->primary_flags);
		device_->primary->primary = true;
	}
	if (int e = device_->primary->error) return (CUresult)e;
	device_->primary->refs++;
	CUcontext c = new CUctx_st;
	c->root = device_->primary;
	c->device = dev;
	c->id = ++g().ids;
	c->sms = desc->sms;
	c->green = new CUgreenCtx_st{c};
	c->null_stream = new_stream(c, 0, 0);
	g().contexts.insert(c);
	g().live.insert(c->green);
	*out = c->green;
	return CUDA_SUCCESS;
}

HX_API cuGreenCtxDestroy(CUgreenCtx x) {
	HX_ENTER(cuGreenCtxDestroy);
	CUcontext c;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(x));
		c = x->ctx;
		c->destroyed = true;
		g().live.erase(x);
	}
	Using use(c, "cuGreenCtxDestroy");
	end_streams(c);
	{
		std::lock_guard<std::mutex> lk(g().mu);
		for (auto e : c->events) g().live.erase(e);
		for (auto m : c->modules) g().live.erase(m);
		g().contexts.erase(c);
	}
	unstack(c);
	return release_primary(c->device);
}

HX_API cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx x) {
	HX_ENTER(cuCtxFromGreenCtx);
	std::lock_guard<std::mutex> lk(g().mu);
	if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
	HX_TRY(good(x));
	*out = x->ctx;
	return CUDA_SUCCESS;
}

HX_API cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx x, unsigned int flags, int priority) {
	HX_ENTER(cuGreenCtxStreamCreate);
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(x));
	}
	Using use(x->ctx, "cuGreenCtxStreamCreate");
	std::lock_guard<std::mutex> lk(g().mu);
	if (out == nullptr || flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
	if (int e = x->ctx->root->error) return (CUresult)e;
	*out = new_stream(x->ctx, flags, priority);
	return CUDA_SUCCESS;
}

HX_API cuStreamGetGreenCtx(CUstream h, CUgreenCtx *out) {
	HX_ENTER(cuStreamGetGreenCtx);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*out = s->ctx->green;
	return CUDA_SUCCESS;
}
