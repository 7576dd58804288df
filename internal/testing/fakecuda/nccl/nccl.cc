// A libnccl for the fake libcuda: the calls that Helios makes of it. A group's sums are computed on the CPU when it ends, after all
// streams in it have come to their end, from the last rank to the first, so not in the order of our own tree.
//
// It is strict where the real library hangs: a group that lacks a rank of a communicator, or that has one twice, is an error, and
// so are ranks that do not agree. Types and values are those of NCCL 2's nccl.h.
//
// Commands, separated by commas (hx_fake_control):
//
//	libcuda=PATH                          the fake libcuda to work with; else the libcuda.so.1 that the process has loaded
//	version=22304                         its version
//	fail=ncclAllReduce:3[:result[:times]] the third call from now fails
//	reset                                 knobs and counts as in the beginning
//	calls=NAME comms                      questions
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

enum Result { success = 0, unhandled_cuda = 1, system_error = 2, internal_error = 3, invalid_argument = 4, invalid_usage = 5 };
enum { float32 = 7, sum = 0 };

struct Comm {
	std::shared_ptr<int> group; // one of all ranks that were made together
	int rank, ranks;
};

struct Op {
	const float *send;
	float *recv;
	uint64_t count;
	Comm *comm;
	void *stream;
};

struct Call {
	uint64_t count = 0, fail_from = 0, fail_to = 0;
	int result = 0;
};

struct State {
	std::mutex mu;
	std::string libcuda;
	int version = 22304;
	std::map<std::string, Call> calls;
	std::set<Comm *> comms;
};

State &g() {
	static State &s = *new State;
	return s;
}

thread_local int depth = 0;
thread_local std::vector<Op> ops;

int enter(const char *name) {
	std::lock_guard<std::mutex> lk(g().mu);
	Call &c = g().calls[name];
	uint64_t n = ++c.count;
	return n >= c.fail_from && n < c.fail_to ? c.result : (int)success;
}
#define ENTER(NAME) \
	if (int r_ = enter(NAME); r_ != success) return r_

int synchronize(void *stream) {
	std::string path;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		path = g().libcuda;
	}
	void *lib = dlopen(path.empty() ? "libcuda.so.1" : path.c_str(), RTLD_NOW | RTLD_NOLOAD);
	if (lib == nullptr) return -1;
	auto wait = (int (*)(void *))dlsym(lib, "cuStreamSynchronize");
	dlclose(lib);
	return wait ? wait(stream) : -1;
}

int run(const std::vector<Op> &list) {
	if (list.empty()) return success;
	std::vector<const Op *> by_rank(list[0].comm->ranks);
	for (const Op &o : list) {
		if (o.comm->group != list[0].comm->group || o.count != list[0].count || by_rank[o.comm->rank] != nullptr) return invalid_usage;
		by_rank[o.comm->rank] = &o;
	}
	for (const Op *o : by_rank)
		if (o == nullptr) return invalid_usage;
	for (const Op &o : list)
		if (synchronize(o.stream) != 0) return unhandled_cuda;
	std::vector<float> all(list[0].count);
	for (size_t r = by_rank.size(); r-- > 0;)
		for (size_t i = 0; i < all.size(); i++) all[i] += by_rank[r]->send[i];
	for (const Op &o : list) memcpy(o.recv, all.data(), all.size() * sizeof(float));
	return success;
}

std::string word(std::string &rest, char end) {
	size_t at = rest.find(end);
	std::string w = rest.substr(0, at);
	rest = at == std::string::npos ? "" : rest.substr(at + 1);
	return w;
}

} // namespace

API int ncclGetVersion(int *version) {
	ENTER("ncclGetVersion");
	std::lock_guard<std::mutex> lk(g().mu);
	*version = g().version;
	return success;
}

API const char *ncclGetErrorString(int result) {
	switch (result) {
	case success: return "no error";
	case unhandled_cuda: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
	case system_error: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
	case invalid_usage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
	}
	return "unknown result code";
}

API int ncclCommInitAll(void **comms, int n, const int *devices) {
	ENTER("ncclCommInitAll");
	std::set<int> seen;
	for (int i = 0; i < n; i++)
		if (!seen.insert(devices[i]).second) return invalid_usage; // a GPU twice
	auto group = std::make_shared<int>(n);
	std::lock_guard<std::mutex> lk(g().mu);
	for (int i = 0; i < n; i++) {
		auto *c = new Comm{group, i, n};
		g().comms.insert(c);
		comms[i] = c;
	}
	return success;
}

API int ncclCommDestroy(void *comm) {
	ENTER("ncclCommDestroy");
	std::lock_guard<std::mutex> lk(g().mu);
	if (g().comms.erase((Comm *)comm) == 0) return invalid_argument;
	delete (Comm *)comm;
	return success;
}

API int ncclCommAbort(void *comm) {
	ENTER("ncclCommAbort");
	std::lock_guard<std::mutex> lk(g().mu);
	if (g().comms.erase((Comm *)comm) == 0) return invalid_argument;
	delete (Comm *)comm;
	return success;
}

API int ncclGroupStart() {
	ENTER("ncclGroupStart");
	depth++;
	return success;
}

API int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream) {
	ENTER("ncclAllReduce");
	{
		std::lock_guard<std::mutex> lk(g().mu);
		if (g().comms.count((Comm *)comm) == 0 || type != float32 || op != sum) return invalid_argument;
	}
	ops.push_back({(const float *)send, (float *)recv, count, (Comm *)comm, stream});
	if (depth > 0) return success;
	std::vector<Op> list;
	list.swap(ops);
	return run(list);
}

API int ncclGroupEnd() {
	std::vector<Op> list;
	if (depth == 0) return invalid_usage;
	if (--depth == 0) list.swap(ops);
	ENTER("ncclGroupEnd");
	return run(list);
}

API int hx_fake_control(const char *command, char *out, size_t size) {
	std::string rest = command, answer;
	std::lock_guard<std::mutex> lk(g().mu);
	while (!rest.empty()) {
		std::string value = word(rest, ','), key = word(value, '=');
		if (key == "reset") {
			g().calls.clear();
			g().libcuda.clear();
			g().version = 22304;
		} else if (key == "libcuda") {
			g().libcuda = value;
		} else if (key == "version") {
			g().version = atoi(value.c_str());
		} else if (key == "fail") {
			Call &c = g().calls[word(value, ':')];
			uint64_t at = strtoull(word(value, ':').c_str(), nullptr, 10);
			std::string result = word(value, ':'), times = word(value, ':');
			c.fail_from = c.count + (at ? at : 1);
			c.result = result.empty() ? (int)system_error : atoi(result.c_str());
			c.fail_to = c.fail_from + (times.empty() ? 1 : strtoull(times.c_str(), nullptr, 10));
		} else if (key == "calls") {
			answer = std::to_string(g().calls[value].count);
		} else if (key == "comms") {
			answer = std::to_string(g().comms.size());
		} else {
			snprintf(out, size, "unknown command %s", key.c_str());
			return -1;
		}
	}
	snprintf(out, size, "%s", answer.c_str());
	return 0;
}
