// Modules. PTX is not compiled: its header is checked as the real compiler does, its .entry list says
// names and parameters, and the shim has the code of the same source file. Of a cubin, an ELF file of
// machine code, the architecture and the kernels' parameters are read; an executor has no use for one.
#include "fake.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <elf.h>

struct CUlib_st {
	CUmodule module; // without a context
};

namespace fake {
namespace {

// The newest PTX version of each CUDA version (PTX ISA, "Release Notes").
int newest_ptx(int driver) {
	static const int table[][2] = {{12090, 88}, {12080, 87}, {12070, 86}, {12050, 85}, {12040, 84}, {12030, 83}, {12020, 82}, {12010, 81},
	                               {12000, 80}, {11080, 78}, {11070, 77}, {11060, 76}, {11050, 75}, {11040, 74}, {11030, 73}, {11020, 72}, {11010, 71}};
	for (auto &t : table)
		if (driver >= t[0]) return t[1];
	return 70;
}

struct Text {
	std::string s;
	size_t at = 0;
	int line = 1;

	void skip() {
		while (at < s.size()) {
			if (isspace((unsigned char)s[at])) {
				line += s[at++] == '\n';
			} else if (s.compare(at, 2, "//") == 0) {
				while (at < s.size() && s[at] != '\n') at++;
			} else if (s.compare(at, 2, "/*") == 0) {
				for (; at < s.size() && s.compare(at, 2, "*/") != 0; at++) line += s[at] == '\n';
				at = std::min(at + 2, s.size());
			} else {
				return;
			}
		}
	}
	// A word, or one character of punctuation; "" at the end.
	std::string next() {
		skip();
		if (at >= s.size()) return "";
		auto word = [](char c) { return isalnum((unsigned char)c) || c == '_' || c == '.' || c == '$' || c == '%'; };
		size_t b = at++;
		if (word(s[b]))
			while (at < s.size() && word(s[at])) at++;
		return s.substr(b, at - b);
	}
};

struct Log {
	char *text = nullptr;
	size_t size = 0, used = 0;
	void **used_at = nullptr; // the option whose value is the buffer's size gives back what was filled
	void add(const std::string &line) {
		if (text == nullptr || size == 0) return;
		size_t n = std::min(line.size(), size - 1 - used);
		memcpy(text + used, line.data(), n);
		used += n;
		text[used] = 0;
	}
	void end() {
		if (used_at) *used_at = (void *)used;
	}
};

size_t bytes_of(const std::string &type) { // .u64, .b8, …
	size_t i = type.find_first_of("0123456789");
	return i == std::string::npos ? 0 : (size_t)atoi(type.c_str() + i) / 8;
}

struct Found {
	int isa = 0, target = 0, isa_line = 0;
	std::vector<CUfunction> functions;
	CUresult result = CUDA_SUCCESS;
};

// A kernel's parameters, of its section .nv.info.NAME: records of a format, an attribute and a size or
// value. EIATTR_KPARAM_INFO (0x17) has the parameter's number at byte 4, its offset at 6, and from bit 18
// of the word at 8 its size.
bool read_params(const char *at, size_t n, CUfunction f) {
	for (size_t i = 0; i + 4 <= n;) {
		u16 value;
		memcpy(&value, at + i + 2, 2);
		size_t more = at[i] == 4 ? value : 0; // EIFMT_SVAL; others hold a value
		if (i + 4 + more > n) return false;
		if (at[i] == 4 && at[i + 1] == 0x17) {
			u16 number, offset;
			u32 flags;
			if (more < 12) return false;
			memcpy(&number, at + i + 8, 2);
			memcpy(&offset, at + i + 10, 2);
			memcpy(&flags, at + i + 12, 4);
			if (number > 16) return false;
			if (f->params.size() <= number) f->params.resize(number + 1);
			f->params[number] = {offset, flags >> 18};
		}
		i += 4 + more;
	}
	return true;
}

CUresult parse_cubin(const char *image, Log &err, Found *out) {
	Elf64_Ehdr h;
	memcpy(&h, image, sizeof h);
	if (h.e_ident[EI_CLASS] != ELFCLASS64 || h.e_machine != EM_CUDA || h.e_shentsize != sizeof(Elf64_Shdr) || h.e_shnum == 0 || h.e_shstrndx >= h.e_shnum)
		return CUDA_ERROR_INVALID_IMAGE;
	// The architecture moved with ABI version 8, which came with sm_100.
	int arch = h.e_ident[EI_ABIVERSION] >= 8 ? h.e_flags >> 8 & 0xff : h.e_flags & 0xff, cc = g().knobs.cc;
	if (arch / 10 != cc / 10 || arch > cc) return CUDA_ERROR_NO_BINARY_FOR_GPU;
	out->target = arch;
	auto section = [&](int i) {
		Elf64_Shdr s;
		memcpy(&s, image + h.e_shoff + (size_t)i * sizeof s, sizeof s);
		return s;
	};
	const char *names = image + section(h.e_shstrndx).sh_offset;
	for (int i = 1; i < h.e_shnum; i++) {
		Elf64_Shdr s = section(i);
		std::string name = names + s.sh_name;
		const std::string head = ".nv.info.";
		if (name.compare(0, head.size(), head) != 0) continue;
		auto f = new CUfunc_st;
		out->functions.push_back(f);
		f->name = name.substr(head.size());
		f->kernel = shim::find(f->name.c_str());
		if (!read_params(image + s.sh_offset, s.sh_size, f)) return CUDA_ERROR_INVALID_IMAGE;
		if (f->kernel == nullptr || f->params.size() != 2 || f->params[0].second != f->kernel->param_size || f->params[1].second != sizeof(hx_launch)) {
			err.add("the shim has no kernel '" + f->name + "' with these parameters: cubin and fake are not of the same sources\n");
			return CUDA_ERROR_INVALID_IMAGE;
		}
	}
	return out->functions.empty() ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

CUresult parse(const char *image, bool executed, Log &err, Found *out) {
	auto say = [&](int line, const char *kind, const std::string &what) {
		char b[64];
		snprintf(b, sizeof b, "ptxas application ptx input, line %d; %s", line, kind);
		err.add(std::string(b) + what + "\n");
	};
	auto fatal = [&](CUresult r, const std::string &s) {
		err.add("ptxas fatal   : " + s + "\n");
		return r;
	};
	if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
	if ((unsigned char)image[0] < 9) return CUDA_ERROR_INVALID_IMAGE; // no text, nor anything that starts with a known magic number
	if (memcmp(image, "\x7f" "ELF", 4) == 0) return executed ? CUDA_ERROR_NO_BINARY_FOR_GPU : parse_cubin(image, err, out);
	Text t{image};
	const auto &k = g().knobs;
	std::string w = t.next();
	if (w != ".version") {
		say(t.line, "fatal   : ", "Missing .version directive at start of file 'application ptx input'");
		return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
	}
	w = t.next();
	int major = 0, minor = 0;
	if (sscanf(w.c_str(), "%d.%d", &major, &minor) != 2) {
		say(t.line, "error   : ", "Parsing error near '" + w + "': syntax error");
		return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
	}
	out->isa = major * 10 + minor;
	int newest = newest_ptx(k.driver);
	if (out->isa > newest) {
		char b[100];
		snprintf(b, sizeof b, "Unsupported .version %d.%d; current version is '%d.%d'", major, minor, newest / 10, newest % 10);
		say(t.line, "fatal   : ", b);
		return fatal(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "Ptx assembly aborted due to errors");
	}
	if ((w = t.next()) != ".target" || (w = t.next()).compare(0, 3, "sm_") != 0) {
		say(t.line, "error   : ", "Parsing error near '" + w + "': syntax error");
		return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
	}
	out->target = atoi(w.c_str() + 3);
	if (out->target > k.cc) return fatal(CUDA_ERROR_INVALID_PTX, "SM version specified by .target is higher than default SM version assumed");
	if (!k.jit.empty()) {
		say(t.line, "error   : ", k.jit);
		return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
	}
	int depth = 0;
	while (!(w = t.next()).empty()) {
		if (w == "{") depth++;
		if (w == "}" && --depth < 0) break;
		if (depth > 0 || w != ".entry") continue;
		auto f = new CUfunc_st;
		out->functions.push_back(f);
		f->name = t.next();
		w = t.next();
		size_t offset = 0, size = 0, al = 0;
		bool ok = w == "(", param = false;
		while (ok && !(w = t.next()).empty()) {
			if (w == ".param") {
				param = true;
				size = al = 0;
			} else if (w == ".align") {
				al = (size_t)atoi(t.next().c_str());
			} else if (w == ".ptr") { // .ptr .global .align n
				continue;
			} else if (w[0] == '.' && bytes_of(w) > 0) {
				size = bytes_of(w);
				if (al == 0) al = size;
			} else if (w == "[") {
				size *= (size_t)atoi(t.next().c_str());
				ok = t.next() == "]";
			} else if (w == "," || w == ")") {
				if (param) {
					if (size == 0 || al == 0) ok = false;
					if (!ok) break;
					offset = (offset + al - 1) / al * al;
					f->params.emplace_back(offset, size);
					offset += size;
				}
				param = false;
				if (w == ")") break;
			}
		}
		if (!ok || w != ")") {
			say(t.line, "error   : ", "Parsing error near '" + w + "': syntax error");
			return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
		}
		if (offset > 4352) { // PTX ISA, "Kernel Function Parameters": 4352 bytes; 32764 from 8.1 on sm_70
			say(t.line, "error   : ", "Formal parameter space overflowed in function '" + f->name + "'");
			return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
		}
		f->kernel = shim::find(f->name.c_str());
		if (f->kernel == nullptr && executed) {
			if (f->params.size() == 2 && f->params[1].second == sizeof(hx_launch)) continue;
			say(t.line, "error   : ", "'" + f->name + "' does not take a block and hx_launch");
			return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
		}
		if (f->kernel == nullptr) {
			say(t.line, "error   : ", "the shim has no kernel '" + f->name + "': PTX and fake are not of the same sources");
			return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
		}
		if (f->params.size() != 2 || f->params[0].second != f->kernel->param_size || f->params[1].second != sizeof(hx_launch)) {
			say(t.line, "error   : ", "parameters of '" + f->name + "' differ from the shim's: PTX and fake are not of the same sources");
			return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
		}
	}
	if (depth != 0) {
		say(t.line, "error   : ", "Parsing error near end of file: syntax error");
		return fatal(CUDA_ERROR_INVALID_PTX, "Ptx assembly aborted due to errors");
	}
	return CUDA_SUCCESS;
}

CUresult load(CUcontext ctx, const void *image, unsigned n, CUjit_option *options, void **values, CUmodule *out) {
	Log info, err;
	for (unsigned i = 0; i < n; i++) {
		if (options == nullptr || values == nullptr) return CUDA_ERROR_INVALID_VALUE;
		switch ((int)options[i]) {
		case CU_JIT_INFO_LOG_BUFFER: info.text = (char *)values[i]; break;
		case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
			info.size = (size_t)(unsigned)(u64)values[i];
			info.used_at = &values[i];
			break;
		case CU_JIT_ERROR_LOG_BUFFER: err.text = (char *)values[i]; break;
		case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
			err.size = (size_t)(unsigned)(u64)values[i];
			err.used_at = &values[i];
			break;
		case CU_JIT_WALL_TIME: {
			float zero = 0;
			memcpy(&values[i], &zero, sizeof zero);
			break;
		}
		}
	}
	if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
	Found f;
	bool executed;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		executed = has_executor();
	}
	CUresult r = parse((const char *)image, executed, err, &f);
	if (r == CUDA_SUCCESS) {
		char b[80];
		snprintf(b, sizeof b, "ptxas info    : %zu kernels for sm_%d on the CPU shim\n", f.functions.size(), g().knobs.cc);
		info.add(b);
	}
	info.end();
	err.end();
	if (r != CUDA_SUCCESS) {
		for (auto x : f.functions) delete x;
		return r;
	}
	std::lock_guard<std::mutex> lk(g().mu);
	static auto &texts = *new std::map<std::string, u64>;
	bool elf = memcmp(image, "\x7f" "ELF", 4) == 0;
	auto text = texts.emplace(elf ? "" : (const char *)image, texts.size() + 1).first;
	auto m = new CUmod_st{ctx, f.isa, f.target, f.functions, &text->first, text->second};
	for (auto x : m->functions) {
		x->module = m;
		g().live.insert(x);
	}
	g().live.insert(m);
	if (ctx) ctx->modules.insert(m);
	*out = m;
	return CUDA_SUCCESS;
}

CUresult good(CUmodule m) { // with mu held
	return m != nullptr && g().live.count(m) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void unload(CUmodule m) { // with mu held
	for (auto f : m->functions) g().live.erase(f);
	g().live.erase(m);
	if (m->ctx) m->ctx->modules.erase(m);
}

CUresult good(CUfunction f) { // with mu held; not a CUkernel
	return f != nullptr && g().live.count(f) && f->module->ctx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult find_function(CUmodule m, const char *name, CUfunction *out) { // with mu held
	for (auto f : m->functions)
		if (f->name == name) return *out = f, CUDA_SUCCESS;
	return CUDA_ERROR_NOT_FOUND;
}

} // namespace
} // namespace fake

using namespace fake;

HX_API cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int n, CUjit_option *options, void **values) {
	HX_ENTER(cuModuleLoadDataEx);
	CUcontext c;
	HX_TRY(current(&c));
	return load(c, image, n, options, values, out);
}

HX_API cuModuleLoadData(CUmodule *out, const void *image) {
	HX_ENTER(cuModuleLoadData);
	CUcontext c;
	HX_TRY(current(&c));
	return load(c, image, 0, nullptr, nullptr, out);
}

HX_API cuModuleUnload(CUmodule m) {
	HX_ENTER(cuModuleUnload);
	CUcontext c;
	HX_TRY(current(&c));
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(m));
	unload(m);
	return CUDA_SUCCESS;
}

HX_API cuModuleGetFunction(CUfunction *out, CUmodule m, const char *name) {
	HX_ENTER(cuModuleGetFunction);
	CUcontext c;
	HX_TRY(current(&c));
	if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(m));
	return find_function(m, name, out);
}

HX_API cuModuleGetFunctionCount(unsigned int *count, CUmodule m) {
	HX_ENTER(cuModuleGetFunctionCount);
	if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(m));
	*count = (unsigned)m->functions.size();
	return CUDA_SUCCESS;
}

HX_API cuModuleEnumerateFunctions(CUfunction *out, unsigned int n, CUmodule m) {
	HX_ENTER(cuModuleEnumerateFunctions);
	if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(m));
	for (unsigned i = 0; i < n && i < m->functions.size(); i++) out[i] = m->functions[i];
	return CUDA_SUCCESS;
}

HX_API cuModuleGetGlobal_v2(CUdeviceptr *, size_t *, CUmodule m, const char *name) {
	HX_ENTER(cuModuleGetGlobal_v2);
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(m));
	return name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_FOUND; // the kernels have no global variables
}

// A library is a module for every context; its kernels launch in the stream's.
HX_API cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *options, void **values, unsigned int n, CUlibraryOption *, void **,
                         unsigned int) {
	HX_ENTER(cuLibraryLoadData);
	if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
	CUmodule m;
	HX_TRY(load(nullptr, code, n, options, values, &m));
	*out = new CUlib_st{m};
	std::lock_guard<std::mutex> lk(g().mu);
	g().live.insert(*out);
	return CUDA_SUCCESS;
}

HX_API cuLibraryUnload(CUlibrary l) {
	HX_ENTER(cuLibraryUnload);
	std::lock_guard<std::mutex> lk(g().mu);
	if (l == nullptr || g().live.erase(l) == 0) return CUDA_ERROR_INVALID_HANDLE;
	unload(l->module);
	return CUDA_SUCCESS;
}

HX_API cuLibraryGetKernel(CUkernel *out, CUlibrary l, const char *name) {
	HX_ENTER(cuLibraryGetKernel);
	if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	if (l == nullptr || g().live.count(l) == 0) return CUDA_ERROR_INVALID_HANDLE;
	CUfunction f;
	HX_TRY(find_function(l->module, name, &f));
	*out = (CUkernel)f;
	return CUDA_SUCCESS;
}

HX_API cuFuncGetAttribute(int *v, CUfunction_attribute attribute, CUfunction f) {
	HX_ENTER(cuFuncGetAttribute);
	if (v == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(f));
	switch ((int)attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *v = 1024; break;
	case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *v = 0; break;
	case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: *v = 0; break;
	case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *v = 0; break;
	case CU_FUNC_ATTRIBUTE_NUM_REGS: *v = 32; break;
	case CU_FUNC_ATTRIBUTE_PTX_VERSION: *v = f->module->target; break;
	case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *v = f->module->text->empty() ? f->module->target : g().knobs.cc; break;
	case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: *v = 0; break;
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *v = f->max_dynamic_smem; break;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *v = -1; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

HX_API cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int v) {
	HX_ENTER(cuFuncSetAttribute);
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(f));
	if ((int)attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return v >= -1 && v <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	if ((int)attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || v < 0 || v > 227 << 10) return CUDA_ERROR_INVALID_VALUE;
	f->max_dynamic_smem = v;
	return CUDA_SUCCESS;
}

HX_API cuFuncGetParamInfo(CUfunction f, size_t i, size_t *offset, size_t *size) {
	HX_ENTER(cuFuncGetParamInfo);
	if (offset == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(f));
	if (i >= f->params.size()) return CUDA_ERROR_INVALID_VALUE;
	*offset = f->params[i].first;
	if (size) *size = f->params[i].second;
	return CUDA_SUCCESS;
}

HX_API cuFuncGetName(const char **name, CUfunction f) {
	HX_ENTER(cuFuncGetName);
	if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(f));
	*name = f->name.c_str();
	return CUDA_SUCCESS;
}

HX_API cuFuncGetModule(CUmodule *m, CUfunction f) {
	HX_ENTER(cuFuncGetModule);
	if (m == nullptr) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(f));
	*m = f->module;
	return CUDA_SUCCESS;
}

static CUresult occupancy(int *blocks, CUfunction f, int threads, size_t smem) {
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(f));
	if (blocks == nullptr || threads <= 0 || threads > 1024 || smem > (size_t)f->max_dynamic_smem) return CUDA_ERROR_INVALID_VALUE;
	*blocks = (int)g().devices[f->module->ctx->device]->sms->per_sm((u32)threads);
	return CUDA_SUCCESS;
}

HX_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads, size_t smem) {
	HX_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
	return occupancy(blocks, f, threads, smem);
}

HX_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f, int threads, size_t smem, unsigned int flags) {
	HX_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags);
	return flags > 1 ? CUDA_ERROR_INVALID_VALUE : occupancy(blocks, f, threads, smem);
}
