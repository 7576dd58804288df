// Graphs of kernel nodes. Strict: handles, contexts and edges are checked, parameters are copied when they are
// given, and nodes that do not depend on each other run in another order than they were added in.
#include "fake.h"

#include <algorithm>
#include <cstring>

struct CUgraphNode_st {
	CUgraph graph;
	CUfunction func;
	fake::Dim dim;
	unsigned smem;
	std::vector<u64> params;
	hx_launch hx;
	std::vector<CUgraphNode> after;
};

struct CUgraph_st {
	std::vector<CUgraphNode> nodes;
};

struct CUgraphExec_st {
	CUgraph graph;                   // whose nodes name its own; only compared
	std::vector<CUgraphNode> names;  // in the order of the nodes
	std::vector<CUgraphNode_st> own; // as they were when it was made, or as they were set since
	std::vector<size_t> order;
	CUcontext ctx;
	std::mutex running; // "only one instance of hGraphExec may be executing at a time"
};

namespace fake {
namespace {

// The live handles, by kind; guarded by g().mu.
struct Handles {
	std::unordered_set<const void *> graphs, nodes, execs;
};
Handles &all() {
	static Handles *h = new Handles;
	return *h;
}
void count() { // for "live"
	g().graphs = all().graphs.size();
	g().execs = all().execs.size();
}

CUresult fill(CUgraphNode_st *n, const CUDA_KERNEL_NODE_PARAMS_v2 *p, CUcontext c) { // with mu held
	if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
	CUfunction f = p->func ? p->func : (CUfunction)p->kern;
	n->dim = {p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ};
	n->smem = p->sharedMemBytes;
	HX_TRY(check_grid(f, n->dim, n->smem));
	if (f->module->ctx != nullptr && f->module->ctx->root != c->root) return CUDA_ERROR_INVALID_HANDLE;
	if (p->kernelParams == nullptr || p->extra != nullptr || p->kernelParams[0] == nullptr || p->kernelParams[1] == nullptr) return CUDA_ERROR_INVALID_VALUE;
	n->func = f;
	n->params.assign((f->params[0].second + 7) / 8, 0);
	memcpy(n->params.data(), p->kernelParams[0], f->params[0].second);
	memcpy(&n->hx, p->kernelParams[1], sizeof(hx_launch));
	return CUDA_SUCCESS;
}

CUresult good(CUgraph h) { return h != nullptr && all().graphs.count(h) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult good(CUgraphExec x) { return x != nullptr && all().execs.count(x) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

CUresult ready(CUcontext *c) {
	HX_TRY(current(c));
	std::lock_guard<std::mutex> lk(g().mu);
	return g().knobs.graphs ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

} // namespace

void drop_graphs() { // with mu held
	all() = Handles();
	count();
}

} // namespace fake

using namespace fake;

HX_API cuGraphCreate(CUgraph *out, unsigned int flags) {
	HX_ENTER(cuGraphCreate);
	CUcontext c;
	HX_TRY(ready(&c));
	if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	*out = new CUgraph_st;
	all().graphs.insert(*out);
	count();
	return CUDA_SUCCESS;
}

HX_API cuGraphDestroy(CUgraph h) {
	HX_ENTER(cuGraphDestroy);
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(h));
	for (auto n : h->nodes) all().nodes.erase(n);
	all().graphs.erase(h);
	count();
	return CUDA_SUCCESS;
}

HX_API cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph h, const CUgraphNode *after, size_t n, const CUDA_KERNEL_NODE_PARAMS_v2 *params) {
	HX_ENTER(cuGraphAddKernelNode_v2);
	CUcontext c;
	HX_TRY(ready(&c));
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(h));
	if (out == nullptr || (n > 0 && after == nullptr)) return CUDA_ERROR_INVALID_VALUE;
	auto node = std::make_unique<CUgraphNode_st>();
	node->graph = h;
	for (size_t i = 0; i < n; i++) {
		if (after[i] == nullptr || all().nodes.count(after[i]) == 0 || after[i]->graph != h) return CUDA_ERROR_INVALID_VALUE;
		if (std::find(node->after.begin(), node->after.end(), after[i]) != node->after.end()) return CUDA_ERROR_INVALID_VALUE; // "no duplicate entries"
		node->after.push_back(after[i]);
	}
	HX_TRY(fill(node.get(), params, c));
	*out = node.release();
	all().nodes.insert(*out);
	h->nodes.push_back(*out);
	return CUDA_SUCCESS;
}

HX_API cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph h, unsigned long long flags) {
	HX_ENTER(cuGraphInstantiateWithFlags);
	CUcontext c;
	HX_TRY(ready(&c));
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(h));
	if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
	auto x = new CUgraphExec_st;
	x->graph = h;
	x->ctx = c;
	x->names = h->nodes;
	for (auto n : h->nodes) x->own.push_back(*n);
	// Of the nodes that may run, always the one that was added last.
	std::vector<bool> done(x->own.size());
	while (x->order.size() < x->own.size()) {
		for (size_t i = x->own.size(); i-- > 0;) {
			bool may = !done[i];
			for (auto a : x->own[i].after) may = may && done[(size_t)(std::find(x->names.begin(), x->names.end(), a) - x->names.begin())];
			if (!may) continue;
			done[i] = true;
			x->order.push_back(i);
			break;
		}
	}
	all().execs.insert(x);
	count();
	*out = x;
	return CUDA_SUCCESS;
}

HX_API cuGraphExecKernelNodeSetParams_v2(CUgraphExec x, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 *params) {
	HX_ENTER(cuGraphExecKernelNodeSetParams_v2);
	CUcontext c;
	HX_TRY(ready(&c));
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(x));
	if (node == nullptr || all().nodes.count(node) == 0 || node->graph != x->graph) return CUDA_ERROR_INVALID_VALUE;
	auto it = std::find(x->names.begin(), x->names.end(), node);
	if (it == x->names.end()) return CUDA_ERROR_INVALID_VALUE;
	CUgraphNode_st &own = x->own[(size_t)(it - x->names.begin())];
	CUgraphNode_st next = own;
	HX_TRY(fill(&next, params, c));
	if (next.func->module->ctx != own.func->module->ctx) return CUDA_ERROR_INVALID_VALUE; // "the owning context of the function cannot change"
	own = std::move(next);
	return CUDA_SUCCESS;
}

HX_API cuGraphLaunch(CUgraphExec x, CUstream h) {
	HX_ENTER(cuGraphLaunch);
	CUcontext c;
	HX_TRY(ready(&c));
	CUstream s;
	HX_TRY(find_stream(h, &s));
	std::vector<CUgraphNode_st> nodes;
	std::vector<size_t> order;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(x));
		if (s->ctx->root != x->ctx->root) return CUDA_ERROR_INVALID_HANDLE;
		nodes = x->own;
		order = x->order;
	}
	std::vector<std::shared_ptr<Launch>> launches;
	for (size_t i : order) {
		CUgraphNode_st &n = nodes[i];
		void *params[2] = {n.params.data(), &n.hx};
		std::shared_ptr<Launch> l;
		HX_TRY(prepare(n.func, n.dim, n.smem, s, params, nullptr, &l));
		launches.push_back(l);
	}
	CUcontext root = s->ctx->root;
	return submit(s, [launches, root, x] {
		std::lock_guard<std::mutex> one(x->running); // objects are never freed
		for (auto &l : launches)
			if (root->error == 0) run(*l);
	});
}

HX_API cuGraphExecDestroy(CUgraphExec x) {
	HX_ENTER(cuGraphExecDestroy);
	std::lock_guard<std::mutex> lk(g().mu);
	HX_TRY(good(x));
	all().execs.erase(x);
	count();
	return CUDA_SUCCESS;
}
