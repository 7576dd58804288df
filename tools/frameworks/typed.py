"""rsage of heliosctl beside PyG's NeighborLoader with HeteroConv and DGL's GraphBolt with HeteroGraphConv, on one typed graph.

    tools/frameworks/setup.sh /tmp/frameworks && make build
    /tmp/frameworks/bin/python tools/frameworks/typed.py --heliosctl bin/heliosctl

In turns, each in a process of its own: a first epoch, then one that counts. Printed: seconds a batch, median (least-most), and the
ratio of ours to it, formed within each round. NeighborLoader draws with torch_sparse (pyg-lib is not on PyPI).

Rows are in memory, unless --rows-memory SIZE bounds them: by our CPU tier, and for the others by a control group around mapped
files (group.py), with one more epoch that is not counted.
--ways typed,untyped is for the cost of types: an R-MAT graph by sage, and the same graph beside a type of one node by rsage, whose
draws and sums are the same.
"""
import argparse, json, mmap, os, statistics, subprocess, sys, tempfile, time

from group import Group, drop, size

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
p.add_argument("--rows-memory", help="what rows may take in memory, as 512MiB")
p.add_argument("--slack", default="256MiB", help="what a bounded process may take beside rows and what it held")
p.add_argument("--work", help="folder for the dataset; kept (default: a temporary one)")
p.add_argument("--group", help=argparse.SUPPRESS)
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
    def features(*path):
        if not a.group:
            return load(*path)
        array = np.load(os.path.join(a.work, "g", *path), mmap_mode="r")
        array._mmap.madvise(mmap.MADV_RANDOM)
        return torch.from_numpy(array)

    x = {t["name"]: features(t["dir"], "features.npy") for t in meta["node_types"]}
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
    for turn in range(3 if a.group else 2):
        if turn == 1 and a.group:
            group = Group(a.group)
            group.bound(group.held() + size(a.rows_memory) + size(a.slack))
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


def run(*argv, **how):
    r = subprocess.run(argv, env=dict(os.environ, HELIOS_STATE=os.path.join(a.work, "state")), capture_output=True, text=True, **how)
    if r.returncode:
        sys.exit(f"{' '.join(argv)}: exit code {r.returncode}\n{r.stdout[-2000:]}{r.stderr[-2000:]}")
    return [json.loads(line) for line in r.stdout.splitlines() if line.startswith("{")]


def one(way):
    if way in ("pyg", "graphbolt"):
        passed = [f"--{k}={getattr(a, k)}" for k in ("heliosctl", "dim", "batch", "hidden", "fanout", "work")]
        argv = [sys.executable, os.path.realpath(__file__), *passed, "--one", way]
        if not a.rows_memory:
            return run(*argv)[-1]
        for folder, _, files in os.walk(data):  # rows that the page cache has, others would pay for
            if "features.npy" in files:
                drop(os.path.join(folder, "features.npy"))
        group = Group.below_own()
        try:
            return run(*argv, "--group", group.path, "--rows-memory", a.rows_memory, "--slack", a.slack, preexec_fn=group.enter)[-1]
        finally:
            group.remove()
    of = {"typed": data, "untyped": flat}.get(way, data)
    rows = ["--mode", "helios", "--gpu-cache", "0", "--cpu-cache", a.rows_memory] if a.rows_memory else ["--mode", "inmem"]
    got = run(a.heliosctl, "train", of, *rows, "--model", "sage" if way == "untyped" else "rsage", "--fanout", a.fanout, "--batch-size",
              str(a.batch), "--hidden", str(a.hidden), "--lr", "0.003", "--epochs", "2", "--no-eval", "--json", "--quiet")
    last = [r for r in got if r["event"] == "epoch"][-1]
    return {"seconds_per_batch": last["seconds"] / a.batches, "loss": last["loss"], "batches": a.batches}


def generate(kind, nodes, out):
    """Makes a graph, of whose nodes with a class --batches mini-batches are trained on."""
    run(a.heliosctl, "generate", "--kind", kind, "--nodes", str(a.nodes), "--avg-degree", str(a.degree), "--dim", str(a.dim),
        "--train-fraction", f"{(a.batches * a.batch - 0.5) / nodes:.9f}", "--val-fraction", "0.01", "--seed", "7", "--out", out, "--json")


def with_types():
    """Makes typed data of the R-MAT graph: its nodes, and one more of another type."""
    import numpy as np

    generate("rmat", a.nodes, flat)
    folder = os.path.join(a.work, "metadata")
    os.mkdir(folder)
    arrays = {n: np.load(os.path.join(flat, n + ".npy")) for n in ("indptr", "indices", "features", "labels", "train", "val", "test")}
    ends = np.repeat(np.arange(a.nodes), np.diff(arrays["indptr"]))
    np.save(os.path.join(folder, "edges.npy"), np.stack([arrays["indices"].astype(np.int64), ends]))
    np.save(os.path.join(folder, "features.npy"), arrays["features"])
    np.save(os.path.join(folder, "other.npy"), arrays["features"][:1])
    np.save(os.path.join(folder, "own.npy"), np.zeros((2, 1), np.int64))
    sets = []
    for n, name in (("train", "train_set"), ("val", "validation_set"), ("test", "test_set")):
        np.save(os.path.join(folder, n + ".npy"), arrays[n])
        np.save(os.path.join(folder, n + "_labels.npy"), arrays["labels"][arrays[n]].astype(np.int64))
        sets.append(f"""  {name}:
  - {{type: node, data: [{{name: seeds, format: numpy, path: {n}.npy}}, {{name: labels, format: numpy, path: {n}_labels.npy}}]}}
""")
    with open(os.path.join(folder, "metadata.yaml"), "w") as f:
        f.write(f"""graph:
  nodes: [{{type: node, num: {a.nodes}}}, {{type: other, num: 1}}]
  edges:
  - {{type: "node:edge:node", format: numpy, path: edges.npy}}
  - {{type: "other:own:other", format: numpy, path: own.npy}}
feature_data:
- {{domain: node, type: node, name: feat, format: numpy, path: features.npy}}
- {{domain: node, type: other, name: feat, format: numpy, path: other.npy}}
tasks:
- name: class
  num_classes: {int(arrays["labels"].max()) + 1}
""" + "".join(sets))
    run(a.heliosctl, "import", "graphbolt", "--in", folder, "--out", data, "--json")


ways = a.ways.split(",")
flat = os.path.join(a.work, "flat")
if not os.path.exists(data):
    if "untyped" in ways:
        with_types()
    else:
        generate("typed", int(a.nodes * 0.55), data)
    if a.rows_memory:
        run(a.heliosctl, "bind-ssds", "--proxy", os.path.join(a.work, "ssd.img"), "--size",
            f"{a.nodes * a.dim * 4 * 5 // 4 // 2**20 + 64}MiB", "--json")
        run(a.heliosctl, "load", data, "--json")
rounds = []
for _ in range(a.rounds):
    rounds.append({way: one(way) for way in ways})
    print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
for way in ways:
    s = sorted(r[way]["seconds_per_batch"] for r in rounds)
    ratio = sorted(r[ways[0]]["seconds_per_batch"] / r[way]["seconds_per_batch"] for r in rounds)
    print(f"{way}: {statistics.median(s):.4f} s a batch ({s[0]:.4f}-{s[-1]:.4f}); {ways[0]} takes {statistics.median(ratio):.3f} of it")
