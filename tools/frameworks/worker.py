"""One measurement of PyG or DGL, in a process of its own: prints one JSON object. compare.py calls it.

The arrays are those of a heliosctl dataset directory (CSC: in-neighbours), memory-mapped and copied once.
"""
import argparse, json, os, time

p = argparse.ArgumentParser()
p.add_argument("--framework", required=True, choices=["pyg", "pyg-loader", "dgl", "graphbolt"])
p.add_argument("--task", required=True, choices=["epoch", "sample", "loss"])
p.add_argument("--data", required=True)
p.add_argument("--fanout", default="15,10,5")
p.add_argument("--batch", type=int, default=1024)
p.add_argument("--hidden", type=int, default=256)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--workers", type=int, default=0)
p.add_argument("--batches", type=int, default=40)
p.add_argument("--warm", type=int, default=3)
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--lr", type=float, default=0.003)
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--seed", type=int, default=1)
a = p.parse_args()
for v in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[v] = str(a.threads)
os.environ.setdefault("DGLBACKEND", "pytorch")

import numpy as np
import torch
import torch.nn.functional as F

torch.set_num_threads(a.threads)
torch.manual_seed(a.seed)
fanout = [int(x) for x in a.fanout.split(",")]
L = len(fanout)


def load(name):
    return np.load(os.path.join(a.data, name + ".npy"), mmap_mode="r")


indptr = torch.from_numpy(np.array(load("indptr")))
indices = torch.from_numpy(np.array(load("indices")).astype(np.int64))
feat = torch.from_numpy(np.array(load("features")))
labels = torch.from_numpy(np.array(load("labels")).astype(np.int64))
train = torch.from_numpy(np.array(load("train")))
N, dim, classes = feat.shape[0], feat.shape[1], int(labels.max()) + 1


def order(epoch):
    g = torch.Generator().manual_seed(a.seed * 1000 + epoch)
    return train[torch.randperm(len(train), generator=g)]


def init(model):
    """As heliosctl does: Glorot uniform weights, biases of 0 (SAGEConv's own default is another)."""
    for n, w in model.named_parameters():
        if w.dim() > 1:
            torch.nn.init.xavier_uniform_(w)
        else:
            torch.nn.init.zeros_(w)


# Each framework: batches(seeds) yields (blocks, input node ids, seed ids); edges(blocks); Model.forward(blocks, x).
if a.framework in ("pyg", "pyg-loader"):
    from torch_sparse import SparseTensor
    from torch_geometric.nn import SAGEConv

    adj_t = SparseTensor(rowptr=indptr, col=indices, sparse_sizes=(N, N), is_sorted=True, trust_data=True)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            dims = [dim] + [a.hidden] * (L - 1) + [classes]
            self.convs = torch.nn.ModuleList(SAGEConv(dims[i], dims[i + 1], aggr="mean") for i in range(L))

        def forward(self, blocks, x):
            for i, conv in enumerate(self.convs):
                adj, size = blocks[i]
                x = conv((x, x[:size]), adj) if size is not None else conv(x, adj)
                if i < L - 1:
                    x = F.dropout(F.relu(x), a.dropout, self.training)
            return x

if a.framework == "pyg":
    # The layered sampler: one bipartite block per layer, nothing is computed twice.
    from torch_geometric.loader import NeighborSampler

    def batches(seeds):
        for n, n_id, adjs in NeighborSampler(adj_t, node_idx=seeds, sizes=fanout, batch_size=a.batch,
                                             shuffle=False, num_workers=a.workers, return_e_id=False):
            yield [(adj.adj_t, adj.size[1]) for adj in (adjs if isinstance(adjs, list) else [adjs])], n_id, n_id[:n]

    def edges(blocks):
        return sum(b[0].nnz() for b in blocks)

elif a.framework == "pyg-loader":
    # The loader of PyG's tutorials: one subgraph of all hops, on which every layer is computed.
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    data = Data(adj_t=adj_t, num_nodes=N)

    def batches(seeds):
        for b in NeighborLoader(data, input_nodes=seeds, num_neighbors=fanout, batch_size=a.batch, shuffle=False,
                                num_workers=a.workers):
            yield [(b.adj_t, None)] * L, b.n_id, b.n_id[:b.batch_size]

    def edges(blocks):
        return blocks[0][0].nnz()

else:
    import dgl
    import dgl.nn as dglnn

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            dims = [dim] + [a.hidden] * (L - 1) + [classes]
            self.convs = torch.nn.ModuleList(dglnn.SAGEConv(dims[i], dims[i + 1], "mean") for i in range(L))

        def forward(self, blocks, x):
            for i, conv in enumerate(self.convs):
                x = conv(blocks[i], x)
                if i < L - 1:
                    x = F.dropout(F.relu(x), a.dropout, self.training)
            return x

    def edges(blocks):
        return sum(b.num_edges() for b in blocks)

    if a.framework == "dgl":
        g = dgl.graph(("csc", (indptr, indices, torch.tensor([], dtype=torch.int64))), num_nodes=N)
        sampler = dgl.dataloading.NeighborSampler(fanout[::-1])

        def batches(seeds):
            loader = dgl.dataloading.DataLoader(g, seeds, sampler, batch_size=a.batch, shuffle=False, drop_last=False,
                                                num_workers=a.workers)
            for n_id, out, blocks in loader:
                yield blocks, n_id, out
    else:
        import dgl.graphbolt as gb

        graph = gb.fused_csc_sampling_graph(indptr, indices)

        def batches(seeds):
            items = gb.ItemSet(seeds, names="seed_nodes")
            dp = gb.ItemSampler(items, batch_size=a.batch, shuffle=False)
            dp = dp.sample_neighbor(graph, [torch.LongTensor([f]) for f in fanout])
            for mb in gb.DataLoader(dp, num_workers=a.workers):
                yield mb.blocks, mb.input_nodes, mb.seed_nodes


def first(seeds, n):
    return seeds[: n * a.batch]


out = {"framework": a.framework, "task": a.task, "threads": a.threads, "workers": a.workers, "seed": a.seed}
if a.task == "sample":
    for b in batches(first(order(100), a.warm)):
        pass
    total = nodes = n = 0
    t = time.perf_counter()
    for blocks, n_id, _ in batches(first(order(0), a.batches)):
        total += edges(blocks)
        nodes += len(n_id)
        n += 1
    s = time.perf_counter() - t
    out.update(seconds=s, edges=total, batches=n, nodes=nodes, edges_per_second=total / s)
else:
    model = Model()
    init(model)
    opt = torch.optim.Adam(model.parameters(), lr=a.lr)

    def epoch(seeds):
        model.train()
        total = count = n = 0
        for blocks, n_id, seed_ids in batches(seeds):
            loss = F.cross_entropy(model(blocks, feat[n_id])[: len(seed_ids)], labels[seed_ids])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(seed_ids)
            count += len(seed_ids)
            n += 1
        return total / count, n

    if a.task == "epoch":
        epoch(first(order(100), a.warm))
        t = time.perf_counter()
        loss, n = epoch(first(order(0), a.batches))
        s = time.perf_counter() - t
        out.update(seconds=s, batches=n, loss=loss, seconds_per_batch=s / n)
    else:
        out["losses"] = [epoch(order(e))[0] for e in range(a.epochs)]
import resource
out["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(out))
