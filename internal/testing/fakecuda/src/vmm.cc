// Virtual memory management: addresses, physical memory and mappings, each by itself. Strict: everything in
// whole granules, nothing mapped twice, no access before cuMemSetAccess. Memory is full of junk when it
// comes; a kernel that touches addresses without memory faults.
#include "fake.h"

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fake {

void drop_graphs(); // graph.cc
void copies_done(); // mem.cc

namespace {

constexpr unsigned char junk = 0xcb;
constexpr size_t graves_most = 512;

bool whole(u64 v) { return v != 0 && v % g().knobs.granule == 0; }

Reserved *find(u64 p) { // with mu held
	auto it = g().reserved.upper_bound(p);
	if (it == g().reserved.begin()) return nullptr;
	Reserved &r = std::prev(it)->second;
	return p < r.lo + r.size ? &r : nullptr;
}

void take_away(u64 p, u64 n) { mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0); }

void settle(u64 handle) { // with mu held
	auto it = g().physical.find(handle);
	if (it == g().physical.end() || !it->second.released || it->second.mapped) return;
	if (!it->second.imported && it->second.device < (int)g().devices.size()) g().devices[it->second.device]->bytes -= it->second.size;
	if (it->second.fd >= 0) close(it->second.fd);
	g().physical.erase(it);
}

// Files of exports that lie in the range; who holds a dma-buf keeps its memory.
void forget_exports(Reserved &r, u64 p, u64 n) {
	for (auto it = r.exported.begin(); it != r.exported.end();) {
		if (it->first < p + n && p < it->first + it->second.first) {
			close(it->second.second);
			it = r.exported.erase(it);
		} else {
			++it;
		}
	}
}

CUresult prop_ok(const CUmemAllocationProp *p) { // with mu held
	if (!g().knobs.vmm) return CUDA_ERROR_NOT_SUPPORTED;
	if (p == nullptr || (int)p->type != CU_MEM_ALLOCATION_TYPE_PINNED || (int)p->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
	if (p->location.id < 0 || p->location.id >= (int)g().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	if ((int)p->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE && (int)p->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
	if (p->win32HandleMetaData != nullptr || p->allocFlags.compressionType || p->allocFlags.usage || p->allocFlags.gpuDirectRDMACapable > 1) return CUDA_ERROR_INVALID_VALUE;
	for (unsigned char c : p->allocFlags.reserved)
		if (c) return CUDA_ERROR_INVALID_VALUE;
	if (p->allocFlags.gpuDirectRDMACapable && !g().knobs.dmabuf) return CUDA_ERROR_NOT_SUPPORTED;
	return CUDA_SUCCESS;
}

} // namespace

Backed backed(u64 p, u64 n) { // with mu held
	Reserved *r = find(p);
	if (r == nullptr) return Backed::elsewhere;
	u64 end = p + n;
	if (end < p || end > r->lo + r->size) return Backed::no;
	while (p < end) {
		auto it = r->parts.upper_bound(p);
		if (it == r->parts.begin()) return Backed::no;
		--it;
		if (p >= it->first + it->second.size || !it->second.access) return Backed::no;
		p = it->first + it->second.size;
	}
	return Backed::all;
}

bool touches_reserved(u64 p, u64 n) { // with mu held
	for (auto &x : g().reserved)
		if ((u64)x.second.map < p + n && p < (u64)x.second.map + x.second.map_size) return true;
	return false;
}

void drop_reserved() { // with mu held
	auto &d = g();
	for (auto &x : d.reserved) {
		forget_exports(x.second, x.second.lo, x.second.size);
		munmap(x.second.map, x.second.map_size);
	}
	d.reserved.clear();
	for (auto &x : d.physical)
		if (x.second.fd >= 0) close(x.second.fd);
	d.physical.clear();
	drop_graphs();
}

} // namespace fake

using namespace fake;

HX_API cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
	HX_ENTER(cuMemGetAllocationGranularity);
	std::lock_guard<std::mutex> lk(g().mu);
	if (out == nullptr || (unsigned)option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) return CUDA_ERROR_INVALID_VALUE;
	HX_TRY(prop_ok(prop));
	*out = g().knobs.granule;
	return CUDA_SUCCESS;
}

HX_API cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
	HX_ENTER(cuMemAddressReserve);
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	if (!d.knobs.vmm) return CUDA_ERROR_NOT_SUPPORTED;
	if (out == nullptr || flags != 0 || (alignment & (alignment - 1)) || at % 4096 != 0 || size % 4096 != 0 || size == 0) return CUDA_ERROR_INVALID_VALUE;
	alignment = std::max<size_t>(alignment, d.knobs.granule);
	if (size > 1ull << 47) return CUDA_ERROR_OUT_OF_MEMORY;
	Reserved r;
	r.map_size = size + alignment + 2 * 4096; // with room between it and others
	r.map = mmap(nullptr, r.map_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (r.map == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
	r.lo = ((u64)r.map + 4096 + alignment - 1) / alignment * alignment;
	r.size = size;
	*out = r.lo;
	d.reserved[r.lo] = r;
	return CUDA_SUCCESS;
}

HX_API cuMemAddressFree(CUdeviceptr p, size_t size) {
	HX_ENTER(cuMemAddressFree);
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	auto it = d.reserved.find(p);
	if (it == d.reserved.end() || it->second.size != size) return CUDA_ERROR_INVALID_VALUE;
	if (!it->second.parts.empty()) {
		complain("addresses were freed with memory mapped to them");
		return CUDA_ERROR_INVALID_VALUE;
	}
	d.graves.emplace_back(it->second.map, it->second.map_size);
	if (d.graves.size() > graves_most) {
		munmap(d.graves.front().first, d.graves.front().second);
		d.graves.pop_front();
	}
	d.reserved.erase(it);
	return CUDA_SUCCESS;
}

HX_API cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
	HX_ENTER(cuMemCreate);
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	HX_TRY(prop_ok(prop));
	if (out == nullptr || flags != 0 || !whole(size)) return CUDA_ERROR_INVALID_VALUE;
	Device &dev = *d.devices[prop->location.id];
	u64 used = dev.bytes + d.knobs.used;
	if (size > d.knobs.mem || size + used > d.knobs.mem) return CUDA_ERROR_OUT_OF_MEMORY;
	Physical p;
	p.size = size;
	p.device = prop->location.id;
	if ((int)prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
		p.fd = memfd_create("fake GPU memory", MFD_CLOEXEC);
		if (p.fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
		if (ftruncate(p.fd, (off_t)size) != 0) {
			close(p.fd);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	dev.bytes += size;
	*out = ++d.ids;
	d.physical[*out] = p;
	return CUDA_SUCCESS;
}

HX_API cuMemRelease(CUmemGenericAllocationHandle h) {
	HX_ENTER(cuMemRelease);
	std::lock_guard<std::mutex> lk(g().mu);
	auto it = g().physical.find(h);
	if (it == g().physical.end() || it->second.released) return CUDA_ERROR_INVALID_VALUE;
	it->second.released = true;
	settle(h);
	return CUDA_SUCCESS;
}

// The stand-in for NVIDIA's file is the memory file itself. Whoever holds it, or a mapping of it, holds the
// memory, also when this process is gone.
HX_API cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType type, unsigned long long flags) {
	HX_ENTER(cuMemExportToShareableHandle);
	std::lock_guard<std::mutex> lk(g().mu);
	auto it = g().physical.find(h);
	if (out == nullptr || flags != 0 || (int)type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
	if (it == g().physical.end() || it->second.released || it->second.fd < 0) return CUDA_ERROR_INVALID_VALUE; // not made for it
	int fd = fcntl(it->second.fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
	*(int *)out = fd;
	return CUDA_SUCCESS;
}

HX_API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, CUmemAllocationHandleType type) {
	HX_ENTER(cuMemImportFromShareableHandle);
	CUcontext c;
	HX_TRY(current(&c));
	auto &d = g();
	std::lock_guard<std::mutex> lk(d.mu);
	if (!d.knobs.vmm) return CUDA_ERROR_NOT_SUPPORTED;
	if (out == nullptr || (int)type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
	struct stat st;
	Physical p;
	p.fd = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0);
	if (p.fd < 0) return CUDA_ERROR_INVALID_VALUE;
	if (fstat(p.fd, &st) != 0 || !whole((u64)st.st_size)) {
		close(p.fd);
		return CUDA_ERROR_INVALID_VALUE;
	}
	p.size = (u64)st.st_size;
	p.device = c->device;
	p.imported = true;
	*out = ++d.ids;
	d.physical[*out] = p;
	return CUDA_SUCCESS;
}

HX_API cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags) {
	HX_ENTER(cuMemMap);
	std::lock_guard<std::mutex> lk(g().mu);
	if (flags != 0 || offset != 0 || !whole(size) || p % g().knobs.granule != 0) return CUDA_ERROR_INVALID_VALUE;
	auto it = g().physical.find(h);
	if (it == g().physical.end() || it->second.released || size > it->second.size) return CUDA_ERROR_INVALID_VALUE;
	if (it->second.mapped) return CUDA_ERROR_NOT_SUPPORTED; // the fake has memory in one place only
	Reserved *r = find(p);
	if (r == nullptr || p + size > r->lo + r->size) return CUDA_ERROR_INVALID_VALUE;
	for (auto &x : r->parts)
		if (x.first < p + size && p < x.first + x.second.size) return CUDA_ERROR_INVALID_VALUE; // mapped already
	int fd = it->second.fd, flags_of = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
	if (mmap((void *)p, size, PROT_READ | PROT_WRITE, flags_of | MAP_FIXED, fd, 0) == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
	if (!it->second.imported) memset((void *)p, junk, std::min<u64>(size, 2 << 20));
	mprotect((void *)p, size, PROT_NONE);
	it->second.mapped = true;
	Mapped m;
	m.size = size;
	m.handle = h;
	r->parts[p] = m;
	return CUDA_SUCCESS;
}

// Does not wait for kernels: one that uses the memory faults. Copies are let end, for they are this process's
// own code.
HX_API cuMemUnmap(CUdeviceptr p, size_t size) {
	HX_ENTER(cuMemUnmap);
	copies_done();
	std::lock_guard<std::mutex> lk(g().mu);
	Reserved *r = find(p);
	if (r == nullptr || size == 0 || p + size > r->lo + r->size) return CUDA_ERROR_INVALID_VALUE;
	auto it = r->parts.find(p);
	u64 at = p;
	for (auto i = it; i != r->parts.end() && i->first == at && at < p + size; ++i) at += i->second.size;
	if (at != p + size) return CUDA_ERROR_INVALID_VALUE; // a part of a mapping, or none
	forget_exports(*r, p, size);
	take_away(p, size);
	while (it != r->parts.end() && it->first < p + size) {
		u64 h = it->second.handle;
		it = r->parts.erase(it);
		if (auto ph = g().physical.find(h); ph != g().physical.end()) ph->second.mapped = false;
		settle(h);
	}
	return CUDA_SUCCESS;
}

HX_API cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc *desc, size_t count) {
	HX_ENTER(cuMemSetAccess);
	std::lock_guard<std::mutex> lk(g().mu);
	if (desc == nullptr || count != 1 || !whole(size) || p % g().knobs.granule != 0) return CUDA_ERROR_INVALID_VALUE;
	if ((int)desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc->location.id < 0 || desc->location.id >= (int)g().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	int f = (int)desc->flags;
	if (f != CU_MEM_ACCESS_FLAGS_PROT_NONE && f != CU_MEM_ACCESS_FLAGS_PROT_READ && f != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_INVALID_VALUE;
	Reserved *r = find(p);
	if (r == nullptr) return CUDA_ERROR_INVALID_VALUE;
	auto it = r->parts.find(p);
	u64 at = p;
	for (auto i = it; i != r->parts.end() && i->first == at && at < p + size; ++i) at += i->second.size;
	if (at != p + size) return CUDA_ERROR_INVALID_VALUE; // "must be a fully mapped address range"
	if (f == CU_MEM_ACCESS_FLAGS_PROT_READ) return CUDA_ERROR_NOT_SUPPORTED;
	mprotect((void *)p, size, f ? PROT_READ | PROT_WRITE : PROT_NONE);
	for (; it != r->parts.end() && it->first < p + size; ++it) it->second.access = f != 0;
	return CUDA_SUCCESS;
}
