// Memory. Device memory is real memory of this process at its real address, but less comfortable than
// it could be, as a GPU's is: full of junk, aligned to 512 bytes and no more, between guard pages;
// addresses of freed memory stay unused for a while. Kernels that leave their buffer fault.
#include "fake.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

namespace fake {

namespace {

constexpr u64 page = 4096, align = 512;
constexpr unsigned char junk = 0xcb, canary = 0xfd;
constexpr u64 junk_most = 4 << 20; // larger buffers get it at both ends only, so as not to touch all pages
constexpr size_t graves_most = 512;

u64 up(u64 v, u64 to) { return (v + to - 1) / to * to; }

void fill(u64 at, u64 size) {
	if (size <= junk_most) {
		memset((void *)at, junk, size);
		return;
	}
	memset((void *)at, junk, junk_most / 2);
	memset((void *)(at + size - junk_most / 2), junk, junk_most / 2);
}

// The allocation that holds p.
Alloc *find_alloc(u64 p) { // with mu held
	auto &m = g().mem;
	auto it = m.upper_bound(p);
	if (it == m.begin()) return nullptr;
	--it;
	Alloc &a = it->second;
	return p < a.addr + a.size ? &a : nullptr;
}

bool mapped(u64 p, u64 n) {
	std::vector<unsigned char> v(up(n + p % page, page) / page);
	return mincore((void *)(p / page * page), n + p % page, v.data()) == 0;
}

bool in_grave(u64 p, u64 n) { // with mu held
	for (auto &x : g().graves)
		if (p < (u64)x.first + x.second && (u64)x.first < p + n) return true;
	return false;
}

CUresult map_device(u64 size, Alloc *a) {
	u64 span = up(size, align) + align; // room to miss the alignment of a page
	u64 pages = up(span, page);
	a->map_size = pages + 2 * page;
	a->map = mmap(nullptr, a->map_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (a->map == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
	a->lo = (u64)a->map + page;
	a->hi = a->lo + pages;
	if (mprotect((void *)a->lo, pages, PROT_READ | PROT_WRITE) != 0) {
		munmap(a->map, a->map_size);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	a->size = size;
	a->addr = a->hi - up(size, align);
	if (a->addr % page == 0) a->addr -= align;
	fill(a->addr, size);
	memset((void *)(a->addr + size), canary, a->hi - a->addr - size);
	memset((void *)a->lo, canary, a->addr - a->lo);
	return CUDA_SUCCESS;
}

// A view of the whole allocation's slack: kernels that wrote there missed their buffer.
void check_slack(const Alloc &a) { // with mu held
	auto bad = [](u64 lo, u64 hi) {
		for (u64 p = lo; p < hi; p++)
			if (*(unsigned char *)p != canary) return true;
		return false;
	};
	if (bad(a.lo, a.addr)) complain("a write before a buffer of " + std::to_string((unsigned long long)a.size) + " bytes");
	if (bad(a.addr + a.size, a.hi)) complain("a write past the end of a buffer of " + std::to_string((unsigned long long)a.size) + " bytes");
}

void bury(Alloc &a) { // with mu held
	check_slack(a);
	for (auto &x : a.exported) close(x.second.second);
	mmap(a.map, a.map_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	auto &graves = g().graves;
	graves.emplace_back(a.map, a.map_size);
	if (graves.size() > graves_most) {
		munmap(graves.front().first, graves.front().second);
		graves.pop_front();
	}
}

void forget(std::map<u64, Alloc>::iterator it) { // with mu held
	Alloc &a = it->second;
	if (a.type == MemType::device) {
		g().devices[a.ctx->device]->bytes -= up(a.size, align);
		bury(a);
	} else if (a.type == MemType::host) {
		munmap(a.map, a.map_size);
	}
	g().mem.erase(it);
}

// Is [p, p+n) memory that a copy may use? Device memory must hold all of it; what the driver does not
// know is pageable memory of the host and must at least be there.
CUresult check_range(u64 p, u64 n, bool *pageable) { // with mu held
	*pageable = false;
	if (Backed b = backed(p, n); b != Backed::elsewhere) return b == Backed::all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	if (Alloc *a = find_alloc(p)) {
		if (n <= a->addr + a->size - p) return CUDA_SUCCESS;
		if (a->type == MemType::device) return CUDA_ERROR_INVALID_VALUE;
		// The rest of a registered page range may go on as pageable memory.
	}
	if (p == 0 || p + n < p || in_grave(p, n) || touches_reserved(p, n)) return CUDA_ERROR_INVALID_VALUE;
	// Nor is the space around device memory the host's.
	auto it = g().mem.lower_bound(p);
	if (it != g().mem.begin()) --it;
	for (; it != g().mem.end() && it->first < p + n + 2 * page; ++it) {
		const Alloc &a = it->second;
		if (a.type == MemType::device && (u64)a.map < p + n && p < (u64)a.map + a.map_size) return CUDA_ERROR_INVALID_VALUE;
	}
	if (!mapped(p, n)) return CUDA_ERROR_INVALID_VALUE;
	*pageable = true;
	return CUDA_SUCCESS;
}

// Copies and fills that are enqueued. They are this process's own code, which a fault would end.
std::atomic<int> copies{0};
struct Copying {
	Copying() { copies++; }
	~Copying() { copies--; }
};

CUresult copy(u64 dst, u64 src, u64 n, CUstream h, bool wait) {
	CUcontext c;
	HX_TRY(current(&c));
	CUstream s;
	HX_TRY(find_stream(h, &s));
	Using use(s->ctx, "cuMemcpyAsync");
	if (n == 0) return CUDA_SUCCESS;
	bool dst_pageable, src_pageable;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(check_range(dst, n, &dst_pageable));
		HX_TRY(check_range(src, n, &src_pageable));
	}
	if (src_pageable && !dst_pageable && n <= (64 << 10)) { // staged: the caller may reuse its memory at once
		auto stage = std::make_shared<std::vector<char>>((char *)src, (char *)src + n);
		HX_TRY(submit(s, [=, live = std::make_shared<Copying>()] { memcpy((void *)dst, stage->data(), n); }));
		return wait ? wait_stream(s) : CUDA_SUCCESS;
	}
	HX_TRY(submit(s, [=, live = std::make_shared<Copying>()] { memmove((void *)dst, (void *)src, n); }));
	return wait || src_pageable || dst_pageable ? wait_stream(s) : CUDA_SUCCESS;
}

template <typename T> CUresult set(u64 dst, T v, u64 n, CUstream h, bool wait) {
	CUcontext c;
	HX_TRY(current(&c));
	CUstream s;
	HX_TRY(find_stream(h, &s));
	Using use(s->ctx, "cuMemsetD8Async");
	if (dst % sizeof(T) != 0 || n > ~0ull / sizeof(T)) return CUDA_ERROR_INVALID_VALUE;
	if (n == 0) return CUDA_SUCCESS;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		bool pageable;
		HX_TRY(check_range(dst, n * sizeof(T), &pageable));
		if (pageable) return CUDA_ERROR_INVALID_VALUE;
	}
	HX_TRY(submit(s, [=, live = std::make_shared<Copying>()] { std::fill_n((T *)dst, n, v); }));
	return wait ? wait_stream(s) : CUDA_SUCCESS;
}

CUresult free_at(u64 p, MemType type) {
	CUcontext c;
	HX_TRY(current(&c));
	CUcontext owner;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		auto it = g().mem.find(p);
		if (it == g().mem.end() || it->second.type != type) return CUDA_ERROR_INVALID_VALUE;
		owner = it->second.ctx;
		if (int e = owner->error) return (CUresult)e;
	}
	// A buffer in use would be freed under its kernel: the real driver waits for the context here.
	if (g().knobs.free_waits) HX_TRY(wait_idle(owner, false));
	std::lock_guard<std::mutex> lk(g().mu);
	auto it = g().mem.find(p);
	if (it == g().mem.end() || it->second.type != type) return CUDA_ERROR_INVALID_VALUE;
	forget(it);
	return CUDA_SUCCESS;
}

// Memory is pinned by the page: neighbours in one page are in each other's way.
bool overlaps(u64 p, u64 n) { // with mu held
	u64 lo = p / page * page, hi = up(p + n, page);
	for (auto it = g().mem.begin(); it != g().mem.end() && it->first < hi; ++it)
		if (up(it->second.addr + it->second.size, page) > lo) return true;
	return false;
}

} // namespace

// Waits until no copy is enqueued, but not for ever: one may stand behind a kernel that waits for the caller.
void copies_done() {
	for (i64 end = now_ns() + 2'000'000'000; copies > 0 && now_ns() < end;) {
		timespec t{0, 50000};
		nanosleep(&t, nullptr);
	}
}

CUresult drop_memory(CUcontext root) { // with mu held
	auto &m = g().mem;
	for (auto it = m.begin(); it != m.end();) {
		auto next = std::next(it);
		if (it->second.ctx == root) forget(it);
		it = next;
	}
	return CUDA_SUCCESS;
}

std::string live_memory() { // with mu held
	u64 n[3] = {}, bytes[3] = {};
	for (auto &x : g().mem) {
		n[(int)x.second.type]++;
		bytes[(int)x.second.type] += x.second.size;
	}
	auto one = [&](const char *name, int i) {
		return std::string(name) + "=" + std::to_string((unsigned long long)n[i]) + " " + name + "_bytes=" + std::to_string((unsigned long long)bytes[i]);
	};
	auto num = [](u64 v) { return std::to_string((unsigned long long)v); };
	return one("device", 0) + " " + one("host", 1) + " " + one("registered", 2) + " reserved=" + num(g().reserved.size()) + " physical=" + num(g().physical.size()) +
	       " graphs=" + num(g().graphs + g().execs);
}

} // namespace fake

using namespace fake;

HX_API cuMemGetInfo_v2(size_t *free, size_t *total) {
	HX_ENTER(cuMemGetInfo_v2);
	CUcontext c;
	HX_TRY(current(&c));
	if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	u64 used = d.devices[c->device]->bytes + d.knobs.used;
	*total = d.knobs.mem;
	*free = used < d.knobs.mem ? d.knobs.mem - used : 0;
	return CUDA_SUCCESS;
}

HX_API cuMemAlloc_v2(CUdeviceptr *out, size_t size) {
	HX_ENTER(cuMemAlloc_v2);
	CUcontext c;
	HX_TRY(current(&c));
	if (out == nullptr || size == 0) return CUDA_ERROR_INVALID_VALUE;
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	Device &dev = *d.devices[c->device];
	u64 used = dev.bytes + d.knobs.used;
	if (size > d.knobs.mem || up(size, align) + used > d.knobs.mem) return CUDA_ERROR_OUT_OF_MEMORY;
	Alloc a;
	HX_TRY(map_device(size, &a));
	a.type = MemType::device;
	a.ctx = c->root;
	a.id = ++d.ids;
	dev.bytes += up(size, align);
	*out = a.addr;
	d.mem[a.addr] = std::move(a);
	return CUDA_SUCCESS;
}

HX_API cuMemFree_v2(CUdeviceptr p) {
	HX_ENTER(cuMemFree_v2);
	if (p == 0) return CUDA_SUCCESS;
	return free_at(p, MemType::device);
}

static CUresult host_alloc(void **out, size_t size, unsigned flags) {
	CUcontext c;
	HX_TRY(current(&c));
	if (out == nullptr || size == 0 || (flags & ~7u)) return CUDA_ERROR_INVALID_VALUE;
	Alloc a;
	a.map_size = up(size, page);
	a.map = mmap(nullptr, a.map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (a.map == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
	a.addr = (u64)a.map;
	a.size = size;
	fill(a.addr, size);
	a.type = MemType::host;
	a.flags = flags | CU_MEMHOSTALLOC_DEVICEMAP; // always so where addresses are unified
	a.ctx = c->root;
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	a.id = ++d.ids;
	*out = a.map;
	d.mem[a.addr] = a;
	return CUDA_SUCCESS;
}

HX_API cuMemHostAlloc(void **out, size_t size, unsigned int flags) {
	HX_ENTER(cuMemHostAlloc);
	return host_alloc(out, size, flags);
}

HX_API cuMemAllocHost_v2(void **out, size_t size) {
	HX_ENTER(cuMemAllocHost_v2);
	return host_alloc(out, size, 0);
}

HX_API cuMemFreeHost(void *p) {
	HX_ENTER(cuMemFreeHost);
	return free_at((u64)p, MemType::host);
}

HX_API cuMemHostRegister_v2(void *p, size_t size, unsigned int flags) {
	HX_ENTER(cuMemHostRegister_v2);
	CUcontext c;
	HX_TRY(current(&c));
	auto &d = g();
	if (p == nullptr || size == 0 || (u64)p + size < (u64)p || (flags & ~15u)) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(d.mu);
	if (!d.knobs.hostreg || d.knobs.confidential || (flags & CU_MEMHOSTREGISTER_READ_ONLY)) return CUDA_ERROR_NOT_SUPPORTED;
	if ((flags & CU_MEMHOSTREGISTER_IOMEMORY) && !d.knobs.iomem) return CUDA_ERROR_NOT_PERMITTED;
	if (overlaps((u64)p, size)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	if (touches_reserved((u64)p, size)) return CUDA_ERROR_INVALID_VALUE;
	if (!mapped((u64)p, size)) return CUDA_ERROR_INVALID_VALUE;
	Alloc a;
	a.addr = (u64)p;
	a.size = size;
	a.type = MemType::registered;
	a.flags = flags | CU_MEMHOSTREGISTER_DEVICEMAP;
	a.ctx = c->root;
	a.id = ++d.ids;
	d.mem[a.addr] = a;
	return CUDA_SUCCESS;
}

HX_API cuMemHostUnregister(void *p) {
	HX_ENTER(cuMemHostUnregister);
	CUcontext c;
	HX_TRY(current(&c));
	CUcontext owner;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		auto it = g().mem.find((u64)p);
		if (it == g().mem.end() || it->second.type != MemType::registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
		owner = it->second.ctx;
	}
	if (g().knobs.free_waits) HX_TRY(wait_idle(owner, false));
	std::lock_guard<std::mutex> lk(g().mu);
	auto it = g().mem.find((u64)p);
	if (it == g().mem.end() || it->second.type != MemType::registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	forget(it);
	return CUDA_SUCCESS;
}

HX_API cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *p, unsigned int flags) {
	HX_ENTER(cuMemHostGetDevicePointer_v2);
	CUcontext c;
	HX_TRY(current(&c));
	if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	Alloc *a = find_alloc((u64)p);
	if (a == nullptr || a->type == MemType::device) return CUDA_ERROR_INVALID_VALUE;
	*out = (u64)p;
	return CUDA_SUCCESS;
}

HX_API cuMemHostGetFlags(unsigned int *flags, void *p) {
	HX_ENTER(cuMemHostGetFlags);
	CUcontext c;
	HX_TRY(current(&c));
	if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	Alloc *a = find_alloc((u64)p);
	if (a == nullptr || a->type == MemType::device) return CUDA_ERROR_INVALID_VALUE;
	*flags = a->flags;
	return CUDA_SUCCESS;
}

HX_API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
	HX_ENTER(cuMemGetAddressRange_v2);
	CUcontext c;
	HX_TRY(current(&c));
	std::lock_guard<std::mutex> lk(g().mu);
	Alloc *a = find_alloc(p);
	if (a == nullptr || a->type == MemType::registered) return CUDA_ERROR_NOT_FOUND;
	if (base) *base = a->addr;
	if (size) *size = a->size;
	return CUDA_SUCCESS;
}

// The stand-in for a dma-buf is a memory file that takes the place of the exported pages: both
// sides then see one memory, from the file's offset 0.
HX_API cuMemGetHandleForAddressRange(void *handle, CUdeviceptr p, size_t size, CUmemRangeHandleType type, unsigned long long flags) {
	HX_ENTER(cuMemGetHandleForAddressRange);
	CUcontext c;
	HX_TRY(current(&c));
	auto &d = g();
	if (handle == nullptr || size == 0 || (flags & ~1ull)) return CUDA_ERROR_INVALID_VALUE;
	if ((int)type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD) return CUDA_ERROR_INVALID_VALUE;
	if (p % page != 0 || size % page != 0) return CUDA_ERROR_INVALID_VALUE; // "must be aligned to the host page size"
	std::lock_guard<std::mutex> lk(d.mu);
	if (!d.knobs.dmabuf) return CUDA_ERROR_NOT_SUPPORTED;
	std::map<u64, std::pair<u64, int>> *exported = nullptr;
	if (Backed b = backed(p, size); b == Backed::no) {
		return CUDA_ERROR_INVALID_VALUE; // "it must be fully mapped via cuMemMap"
	} else if (b == Backed::all) {
		exported = &std::prev(d.reserved.upper_bound(p))->second.exported;
	} else {
		Alloc *a = find_alloc(p);
		// The range may end in the allocation's last page, which belongs to it alone here.
		if (a == nullptr || a->type != MemType::device || p + size > a->hi || p < a->addr) return CUDA_ERROR_INVALID_VALUE;
		exported = &a->exported;
	}
	auto known = exported->find(p);
	int fd;
	if (known != exported->end() && known->second.first == size) {
		fd = known->second.second;
	} else {
		for (auto &x : *exported)
			if (x.first < p + size && p < x.first + x.second.first) return CUDA_ERROR_NOT_SUPPORTED; // a part of two files
		fd = memfd_create("fake dma-buf", MFD_CLOEXEC);
		if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
		if (ftruncate(fd, (off_t)size) != 0 || pwrite(fd, (void *)p, size, 0) != (ssize_t)size ||
		    mmap((void *)p, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
			close(fd);
			return CUDA_ERROR_OPERATING_SYSTEM;
		}
		(*exported)[p] = {size, fd};
	}
	int mine = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (mine < 0) return CUDA_ERROR_OPERATING_SYSTEM;
	*(int *)handle = mine;
	return CUDA_SUCCESS;
}

HX_API cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr p) {
	HX_ENTER(cuPointerGetAttribute);
	if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	Alloc *a = find_alloc(p);
	if (a == nullptr) return CUDA_ERROR_INVALID_VALUE;
	switch ((int)attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = a->ctx; break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = a->type == MemType::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = p; break;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (a->type == MemType::device) return CUDA_ERROR_INVALID_VALUE;
		*(void **)data = (void *)p;
		break;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)data = 0; break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = a->id; break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = 0; break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = a->ctx->device; break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = a->addr; break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = a->size; break;
	case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned char *)data = 1; break;
	default: return CUDA_ERROR_NOT_SUPPORTED;
	}
	return CUDA_SUCCESS;
}

HX_API cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr p) {
	HX_ENTER(cuPointerSetAttribute);
	std::lock_guard<std::mutex> lk(g().mu);
	Alloc *a = find_alloc(p);
	if (value == nullptr || a == nullptr || a->type != MemType::device || (int)attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

// Copies. The kind follows from the addresses; the older names only say it again.
#define HX_COPY(NAME, DST, SRC)                          \
	HX_API NAME(DST dst, SRC src, size_t n) {             \
		HX_ENTER(NAME);                                    \
		return copy((u64)dst, (u64)src, n, nullptr, true); \
	}
#define HX_COPY_ASYNC(NAME, DST, SRC)                    \
	HX_API NAME(DST dst, SRC src, size_t n, CUstream s) { \
		HX_ENTER(NAME);                                    \
		return copy((u64)dst, (u64)src, n, s, false);      \
	}
HX_COPY(cuMemcpy, CUdeviceptr, CUdeviceptr)
HX_COPY(cuMemcpyHtoD_v2, CUdeviceptr, const void *)
HX_COPY(cuMemcpyDtoH_v2, void *, CUdeviceptr)
HX_COPY(cuMemcpyDtoD_v2, CUdeviceptr, CUdeviceptr)
HX_COPY_ASYNC(cuMemcpyAsync, CUdeviceptr, CUdeviceptr)
HX_COPY_ASYNC(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *)
HX_COPY_ASYNC(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr)
HX_COPY_ASYNC(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr)

#define HX_SET(BITS, T)                                                 \
	HX_API cuMemsetD##BITS##_v2(CUdeviceptr dst, T v, size_t n) {        \
		HX_ENTER(cuMemsetD##BITS##_v2);                                   \
		return set<T>(dst, v, n, nullptr, true);                          \
	}                                                                    \
	HX_API cuMemsetD##BITS##Async(CUdeviceptr dst, T v, size_t n, CUstream s) { \
		HX_ENTER(cuMemsetD##BITS##Async);                                 \
		return set<T>(dst, v, n, s, false);                               \
	}
HX_SET(8, unsigned char)
HX_SET(16, unsigned short)
HX_SET(32, unsigned int)
