"""rsage of heliosctl beside PyG's NeighborLoader with HeteroConv and DGL's GraphBolt with HeteroGraphConv, on one typed graph in memory.

    tools/frameworks/setup.sh /tmp/frameworks && make build
    /tmp/frameworks/bin/python tools/frameworks/typed.py --heliosctl bin/heliosctl

In turns, each in a process of its own: a first epoch, then one that counts. Printed: seconds a batch, median (least-most), and the
ratio of ours to it, formed within each round. NeighborLoader draws with torch_sparse (pyg-lib is not on PyPI).
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, time

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--heliosctl", required=True)
p.add_argument("--nodes", type=int, default=400_000)
p.add_argument("--degree", type=float, default=15)
p.add_argument("--dim", type=int, default=128)
p.add_argument("--batches", type=int, default=15)
p.add_argument("--batch", type=int, default=1024)
p.add_argument("--hidden", type=int, default=128)
p.add_argument("--fanout", default="10,10")
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--ways", default="helios,pyg,graphbolt")
p.add_argument("--work", help="folder for the dataset; kept (default: a temporary one)")
p.add_argument("--one", help=argparse.SUPPRESS)
a = p.parse_args()
fanout = [int(n) for n in a.fanout.split(",")]


def measure(way):
    import numpy as np
    import torch
    import torch.nn.functional as F
    import yaml

    torch.manual_seed(1)
    meta = yaml.safe_load(open(os.path.join(a.work, "g", "dataset.yaml")))

    def load(*path):
        array = np.load(os.path.join(a.work, "g", *path))
        return torch.from_numpy(array.astype(np.int64) if array.dtype == np.uint32 else array)

    types = [t["name"] for t in meta["node_types"]]
    x = {t["name"]: load(t["dir"], "features.npy") for t in meta["node_types"]}
    relations = [(r["src"], r["name"], r["dst"]) for r in meta["relations"]]
    lists = [(load(r["dir"], "indptr.npy"), load(r["dir"], "indices.npy")) for r in meta["relations"]]
    task = meta["tasks"][0]
    folder = os.path.join("tasks", "000") if "dir" not in task else task["dir"]
    labels, train = load(folder, "labels.npy").long(), load(folder, "train.npy")
    seeds, classes = task["type"], task["classes"]
    sizes = [a.dim] + [a.hidden] * (len(fanout) - 1) + [classes]

    if way == "pyg":
        from torch_geometric.data import HeteroData
        from torch_geometric.loader import NeighborLoader
        from torch_geometric.nn import HeteroConv, SAGEConv
        from torch_sparse import SparseTensor

        data = HeteroData()
        for t in types:
            data[t].x = x[t]
        for (s, r, d), (indptr, indices) in zip(relations, lists):
            shape = (len(indptr) - 1, len(x[s]))
            data[s, r, d].adj_t = SparseTensor(rowptr=indptr, col=indices, sparse_sizes=shape, is_sorted=True, trust_data=True)
        data[seeds].y = labels
        loader = NeighborLoader(data, fanout, input_nodes=(seeds, train), batch_size=a.batch, shuffle=True)
        layers = torch.nn.ModuleList(HeteroConv({r: SAGEConv((i, i), o) for r in relations}) for i, o in zip(sizes, sizes[1:]))

        def batches():
            for b in loader:
                h = b.x_dict
                for i, layer in enumerate(layers):
                    h = layer(h, b.adj_t_dict)
                    h = {t: v.relu() for t, v in h.items()} if i + 1 < len(layers) else h
                yield h[seeds][: b[seeds].batch_size], b[seeds].y[: b[seeds].batch_size]
    else:
        os.environ.setdefault("DGLBACKEND", "pytorch")
        import dgl.graphbolt as gb
        from dgl.nn import HeteroGraphConv, SAGEConv

        first = dict(zip(types, np.cumsum([0] + [len(x[t]) for t in types[:-1]]).tolist()))
        total = sum(len(v) for v in x.values())
        # One list a node, its relations behind each other.
        src, dst, kind = [], [], []
        for k, ((s, _, d), (indptr, indices)) in enumerate(zip(relations, lists)):
            src.append(indices + first[s])
            dst.append(torch.repeat_interleave(torch.arange(len(indptr) - 1) + first[d], indptr.diff()))
            kind.append(torch.full((len(indices),), k, dtype=torch.uint8))
        src, dst, kind = torch.cat(src), torch.cat(dst), torch.cat(kind)
        order = torch.argsort(dst, stable=True)
        indptr = torch.zeros(total + 1, dtype=torch.int64)
        indptr[1:] = torch.bincount(dst, minlength=total).cumsum(0)
        offsets = torch.tensor([first[t] for t in types] + [total])
        graph = gb.fused_csc_sampling_graph(indptr, src[order], node_type_offset=offsets, type_per_edge=kind[order],
                                            node_type_to_id={t: i for i, t in enumerate(types)},
                                            edge_type_to_id={":".join(r): i for i, r in enumerate(relations)})
        store = gb.BasicFeatureStore({("node", t, "feat"): gb.TorchBasedFeature(x[t]) for t in types})
        layers = torch.nn.ModuleList(
            HeteroGraphConv({r: SAGEConv(i, o, "mean") for _, r, _ in relations}, aggregate="sum") for i, o in zip(sizes, sizes[1:]))

        def batches():
            dp = gb.ItemSampler(gb.ItemSetDict({seeds: gb.ItemSet(train, names="seed_nodes")}), batch_size=a.batch, shuffle=True)
            dp = dp.sample_neighbor(graph, [torch.LongTensor([f] * len(relations)) for f in fanout])
            dp = dp.fetch_feature(store, node_feature_keys={t: ["feat"] for t in types})
            for b in gb.DataLoader(dp):
                h = {t: b.node_features[t, "feat"] for t in types}
                for i, (layer, block) in enumerate(zip(layers, b.blocks)):
                    h = layer(block, (h, {t: v[: block.num_dst_nodes(t)] for t, v in h.items()}))
                    h = {t: v.relu() for t, v in h.items()} if i + 1 < len(layers) else h
                yield h[seeds], labels[b.seed_nodes[seeds]]

    optimizer = torch.optim.Adam(layers.parameters(), lr=0.003)
    for turn in range(2):
        began, n = time.perf_counter(), 0
        for out, y in batches():
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            n += 1
        took = time.perf_counter() - began
    return {"seconds_per_batch": took / n, "loss": loss.item(), "batches": n}


if a.one:
    print(json.dumps(measure(a.one)))
    sys.exit()

a.work = a.work or tempfile.mkdtemp(prefix="heliosctl-typed-")
data = os.path.join(a.work, "g")


def run(*argv):
    r = subprocess.run(argv, env=dict(os.environ, HELIOS_STATE=os.path.join(a.work, "state")), capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{' '.join(argv)}: exit code {r.returncode}\n{r.stdout[-2000:]}{r.stderr[-2000:]}")
    return [json.loads(line) for line in r.stdout.splitlines() if line.startswith("{")]


def one(way):
    if way != "helios":
        passed = [f"--{k}={getattr(a, k)}" for k in ("heliosctl", "dim", "batch", "hidden", "fanout", "work")]
        return run(sys.executable, os.path.realpath(__file__), *passed, "--one", way)[-1]
    got = run(a.heliosctl, "train", data, "--mode", "inmem", "--model", "rsage", "--fanout", a.fanout, "--batch-size", str(a.batch),
              "--hidden", str(a.hidden), "--lr", "0.003", "--epochs", "2", "--no-eval", "--json", "--quiet")
    last = [r for r in got if r["event"] == "epoch"][-1]
    return {"seconds_per_batch": last["seconds"] / a.batches, "loss": last["loss"], "batches": a.batches}


if not os.path.exists(data):
    papers = int(a.nodes * 0.55)
    run(a.heliosctl, "generate", "--kind", "typed", "--nodes", str(a.nodes), "--avg-degree", str(a.degree), "--dim", str(a.dim),
        "--train-fraction", f"{(a.batches * a.batch + 0.5) / papers:.9f}", "--val-fraction", "0.01", "--seed", "7", "--out", data, "--json")
ways = a.ways.split(",")
rounds = []
for _ in range(a.rounds):
    rounds.append({way: one(way) for way in ways})
    print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
for way in ways:
    s = sorted(r[way]["seconds_per_batch"] for r in rounds)
    ratio = sorted(r[ways[0]]["seconds_per_batch"] / r[way]["seconds_per_batch"] for r in rounds)
    print(f"{way}: {statistics.median(s):.4f} s a batch ({s[0]:.4f}-{s[-1]:.4f}); {ways[0]} takes {statistics.median(ratio):.3f} of it")
