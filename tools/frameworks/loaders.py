"""Our loader beside PyG's NeighborLoader, GraphBolt and DGL: seconds a batch, in turns, by where the features are.

    tools/frameworks/setup.sh /tmp/frameworks
    make build && /tmp/frameworks/bin/pip install ./python
    /tmp/frameworks/bin/python tools/frameworks/loaders.py --heliosctl bin/heliosctl

Each measurement is a process of its own: an epoch that is not counted, then --epochs that are. Task load takes each batch and
adds up its rows, so that none stays unread; train is a step of GraphSAGE: PyG's, or DGL's for its ways and ours with +dgl. CPU seconds and peak memory are those of the process
and of its daemon. NeighborLoader needs torch_sparse here (pyg-lib is not on PyPI). A way's name ends in -mmap where features
are mapped, with the kernel's read-ahead, and in -mmap-random where MADV_RANDOM turns that off. graphbolt-sieve-25 reads its
DiskBasedFeature, aligned to pages, behind a SIEVE cache of a quarter of the rows: it needs GraphBolt 2.4, which PyPI does not have.

Nothing bounds the page cache, unless --rows-memory SIZE does: then each process, with its daemon, gets a control group of its own
(memory controller, version 1 or 2; needs root) and, after the epoch that is not counted, no more than what it holds then beside rows,
SIZE for rows, and --slack for the rest. Ways with a share, as helios-25, hold their rows in a cache and read with O_DIRECT; others
get SIZE by the page cache of their mapped features, and one more epoch is not counted. Ways in memory have no bound. Page cache in
use at the end is told as "cached". Out of core, 2 GiB of rows and 512 MiB for them:

    python loaders.py --heliosctl bin/heliosctl --nodes 2097152 --dim 256 --rows-memory 512MiB \
        --ways inmem,helios-25,cpu-25,train-helios-25,train-cpu-25,dgl-mmap-random,graphbolt-mmap,graphbolt-mmap-random,pyg-mmap-random

The table of BENCHMARKS' GraphBolt, in 6 minutes once the dataset and the packs are in --work; ratios are formed within a round:

    python loaders.py --heliosctl bin/heliosctl --nodes 2097152 --dim 256 --batches 201 --tasks train --rows-memory 512MiB --work W \
        --ways train-helios-25,train-cpu-25,train-diskgnn-25,graphbolt-sieve-25,train-helios-10,train-diskgnn-10,graphbolt-sieve-10
"""
import argparse, json, mmap, os, resource, statistics, subprocess, sys, tempfile, time

from group import Group, drop, size

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--heliosctl", required=True)
p.add_argument("--nodes", type=int, default=500_000)
p.add_argument("--degree", type=float, default=15)
p.add_argument("--dim", type=int, default=128)
p.add_argument("--batches", type=int, default=25)
p.add_argument("--batch", type=int, default=1024)
p.add_argument("--hidden", type=int, default=128)
p.add_argument("--fanout", default="10,10")
p.add_argument("--epochs", type=int, default=1)
p.add_argument("--rounds", type=int, default=3)
p.add_argument("--tasks", default="load,train")
p.add_argument("--ways", default="inmem,helios-10,helios-25,cpu-10,cpu-25,train-inmem,train-helios-10,pyg,pyg-mmap,dgl,graphbolt,graphbolt-mmap")
p.add_argument("--rows-memory", help="what rows may take in memory, in a control group, as 512MiB")
p.add_argument("--slack", default="256MiB", help="what a bounded process may take beside rows and what it held")
p.add_argument("--group", help=argparse.SUPPRESS)
p.add_argument("--work", help="folder for the dataset; kept (default: a temporary one)")
p.add_argument("--json", help="write all results to this file")
p.add_argument("--one", help=argparse.SUPPRESS)
a = p.parse_args()
fanout = [int(n) for n in a.fanout.split(",")]
CLASSES = 16

for text in filter(None, (a.rows_memory, a.slack)):
    size(text)  # before anything is made


def options(way):
    """Mode and caches of one of our ways, as arguments of a loader."""
    mode, _, share = way.partition("-")
    if mode == "inmem":
        return {"mode": "inmem"}
    if mode in ("cpu", "ginex"):
        return {"mode": mode, "cpu_cache": f"{share}%"}
    return {"mode": mode, "gpu_cache": "0", "cpu_cache": f"{share}%"}


def bytes_read():
    """Bytes that this process had read from disks."""
    with open("/proc/self/io") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("read_bytes"))


def measure(way, task, data):
    import numpy as np
    import torch

    torch.manual_seed(1)
    path = {n: os.path.join(data, n + ".npy") for n in ("indptr", "indices", "features", "aligned", "labels", "train")}
    train = torch.from_numpy(np.load(path["train"]))
    framework, _, kept = way.partition("-")
    mapped, sieve = kept.startswith("mmap"), kept.startswith("sieve")

    def features():
        x = np.load(path["features"], mmap_mode="r" if mapped else None)
        if kept == "mmap-random":
            x._mmap.madvise(mmap.MADV_RANDOM)
        return torch.from_numpy(x)

    def topology():
        return torch.from_numpy(np.load(path["indptr"])), torch.from_numpy(np.load(path["indices"]).astype(np.int64))

    # Each way: begin() yields an epoch's (x, y, blocks for the model, number of seeds).
    closing, dgls = None, framework in ("dgl", "graphbolt")
    if framework == "pyg":
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader
        from torch_sparse import SparseTensor

        indptr, indices = topology()
        n = len(indptr) - 1
        adj = SparseTensor(rowptr=indptr, col=indices, sparse_sizes=(n, n), is_sorted=True, trust_data=True)
        whole = Data(x=features(), y=torch.from_numpy(np.load(path["labels"]).astype(np.int64)), adj_t=adj)
        loader = NeighborLoader(whole, fanout, input_nodes=train, batch_size=a.batch, shuffle=True)

        def begin():
            for b in loader:
                yield b.x, b.y[: b.batch_size], b.adj_t, b.batch_size
    elif framework in ("dgl", "graphbolt"):
        os.environ.setdefault("DGLBACKEND", "pytorch")
        import dgl

        indptr, indices = topology()
        x, labels = None if sieve else features(), torch.from_numpy(np.load(path["labels"]).astype(np.int64))
        if framework == "dgl":
            graph = dgl.graph(("csc", (indptr, indices, torch.tensor([], dtype=torch.int64))), num_nodes=len(indptr) - 1)
            sampler = dgl.dataloading.NeighborSampler(fanout[::-1])

            def begin():
                for n_id, out, blocks in dgl.dataloading.DataLoader(graph, train, sampler, batch_size=a.batch, shuffle=True):
                    yield x[n_id], labels[out], blocks, len(out)
        else:
            import dgl.graphbolt as gb

            graph = gb.fused_csc_sampling_graph(indptr, indices)
            if sieve:
                rows = int(os.path.getsize(path["aligned"]) * int(kept.removeprefix("sieve-")) / 100)
                feature = gb.cpu_cached_feature(gb.DiskBasedFeature(path["aligned"]), rows, policy="sieve")
            else:
                feature = gb.TorchBasedFeature(x)
            store = gb.BasicFeatureStore({("node", None, "feat"): feature})
            seeds = "seeds" if "seeds" in gb.MiniBatch.__annotations__ else "seed_nodes"  # a later GraphBolt; 2.1

            def begin():
                dp = gb.ItemSampler(gb.ItemSet(train, names=seeds), batch_size=a.batch, shuffle=True)
                dp = dp.sample_neighbor(graph, [torch.LongTensor([f]) for f in fanout])
                dp = dp.fetch_feature(store, node_feature_keys=["feat"])
                for b in gb.DataLoader(dp):
                    ids = getattr(b, seeds)
                    yield b.node_features["feat"], labels[ids], b.blocks, len(ids)
    else:
        import helios

        dataset = helios.open(data, binary=a.heliosctl)
        closing = dataset.close
        way, _, dgls = way.partition("+")
        if dgls:
            import dgl
            import helios.dgl

            sampler = dgl.dataloading.NeighborSampler(fanout[::-1])
            nodes = dataset.train_mask.nonzero()[:, 0]
            loader = helios.dgl.DataLoader(
                dataset, nodes, sampler, batch_size=a.batch, shuffle=True, seed=1, **options(way)
            )
        else:
            loader = helios.NeighborLoader(
                dataset, fanout, split="train", shuffle=True, seed=1, batch_size=a.batch, **options(way)
            )

        def begin():
            for b in loader:
                if dgls:
                    blocks = b[2]
                    yield blocks[0].srcdata["feat"], blocks[-1].dstdata["label"], blocks, len(b[1])
                else:
                    yield b.x, b.y[: b.batch_size], b.edge_index, b.batch_size

    step = None
    if task == "train":
        sizes = [a.dim] + [a.hidden] * (len(fanout) - 1) + [CLASSES]
        if dgls:
            from dgl.nn import SAGEConv

            layers = torch.nn.ModuleList(SAGEConv(i, o, "mean") for i, o in zip(sizes, sizes[1:]))
        else:
            from torch_geometric.nn import SAGEConv

            layers = torch.nn.ModuleList(SAGEConv(i, o) for i, o in zip(sizes, sizes[1:]))
        optimizer = torch.optim.Adam(layers.parameters(), lr=0.003)

        def step(x, y, blocks, seeds):
            for i, layer in enumerate(layers):
                x = layer(blocks[i], x) if dgls else layer(x, blocks)
                x = x.relu() if i + 1 < len(layers) else x
            loss = torch.nn.functional.cross_entropy(x[:seeds], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def epoch():
        n = 0
        for item in begin():
            if step:
                step(*item)
            else:
                float(item[0].sum())
            n += 1
        return n

    epoch()
    group, cached = Group(a.group) if a.group else None, 0
    if group:
        held = closing or sieve  # rows are in a cache already
        group.bound(group.held() + (0 if held else size(a.rows_memory)) + size(a.slack))
        if not held:
            epoch()
    read, began, n = bytes_read(), time.perf_counter(), 0
    for _ in range(a.epochs):
        n += epoch()
    took, read = time.perf_counter() - began, (bytes_read() - read) // a.epochs
    if group:
        cached = group.cached()
    daemon_peak = 0
    if closing:
        with open(f"/proc/{dataset.session()[0].daemon_pid}/status") as status:
            daemon_peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
        closing()
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds_per_batch": took / n, "batches": n, "cpu": own.ru_utime + own.ru_stime, "peak": own.ru_maxrss << 10,
            "daemon_cpu": children.ru_utime + children.ru_stime, "daemon_peak": daemon_peak, "cached": cached, "read": read}


if a.one:
    print(json.dumps(measure(*a.one.split(":"), a.work)))
    sys.exit()

work = a.work or tempfile.mkdtemp(prefix="heliosctl-loaders-")
os.makedirs(work, exist_ok=True)
env = dict(os.environ, HELIOS_STATE=os.path.join(work, "state"))
data = os.path.join(work, "g")


def run(*argv, **how):
    r = subprocess.run(argv, env=env, capture_output=True, text=True, **how)
    if r.returncode:
        sys.exit(f"{' '.join(argv)}: exit code {r.returncode}\n{r.stdout[-2000:]}{r.stderr[-2000:]}")
    return [json.loads(line) for line in r.stdout.splitlines() if line.startswith("{")]


def apart(way, task, *more, **how):
    """A way in a process of its own."""
    passed = [f"--{k}={getattr(a, k)}" for k in ("heliosctl", "dim", "batch", "hidden", "fanout", "epochs")]
    return run(sys.executable, os.path.realpath(__file__), *passed, *more, "--work", data, "--one", f"{way}:{task}", **how)[-1]


def in_group(way, task):
    """The same, in a control group. What the page cache has of the features, others pay for: it is dropped first."""
    drop(os.path.join(data, "features.npy"))
    group = Group.below_own()
    try:
        return apart(way, task, "--group", group.path, "--rows-memory", a.rows_memory, "--slack", a.slack, preexec_fn=group.enter)
    finally:
        group.remove()


def flags(way):
    """Those of heliosctl for a way of its own."""
    more = [f"--{k.replace('_', '-')}={v}" for k, v in options(way.removeprefix("train-")).items()]
    if way.startswith("train-diskgnn"):
        more.append("--packed=" + os.path.join(work, way))
    return [data, "--fanout", a.fanout, "--batch-size", str(a.batch), "--hidden", str(a.hidden), "--epochs", str(1 + a.epochs), "--json",
            "--quiet", *more]


def in_process(way):
    """heliosctl train itself: its epochs but the first, with its own model."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    group = Group.below_own() if a.rows_memory and way != "train-inmem" else None
    epochs = []
    try:
        with subprocess.Popen([a.heliosctl, "train", *flags(way), "--no-eval"], env=env, text=True, stdout=subprocess.PIPE,
                              preexec_fn=group.enter if group else None) as p:
            for e in map(json.loads, p.stdout):
                if e["event"] == "epoch":
                    epochs.append(e)
                    if group and len(epochs) == 1:
                        group.bound(group.held() + size(a.slack))
        if p.returncode:
            sys.exit(f"heliosctl train, {way}: exit code {p.returncode}")
    finally:
        if group:
            group.remove()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    total = {k: sum(e[k] for e in epochs[1:]) for k in ("seconds", "batches", "bytes_ssd")}
    return {"seconds_per_batch": total["seconds"] / total["batches"], "cpu": cpu, "peak": 0, "daemon_cpu": 0, "daemon_peak": 0,
            "cached": 0, "read": total["bytes_ssd"] // a.epochs}


if not os.path.exists(data):
    share = (a.batches * a.batch + 0.5) / a.nodes
    run(a.heliosctl, "generate", "--kind", "rmat", "--nodes", str(a.nodes), "--avg-degree", str(a.degree), "--dim", str(a.dim),
        "--classes", str(CLASSES), "--train-fraction", f"{share:.9f}", "--val-fraction", "0.01", "--seed", "7", "--out", data, "--json")
    room = f"{a.nodes * a.dim * 4 * 5 // 4 // 2**20 + 64}MiB"
    run(a.heliosctl, "bind-ssds", "--proxy", os.path.join(work, "ssd.img"), "--size", room, "--json")
    run(a.heliosctl, "load", data, "--json")
for way in a.ways.split(","):
    if "-sieve-" in way and not os.path.exists(aligned := os.path.join(data, "aligned.npy")):
        import dgl.graphbolt as gb
        import numpy as np

        gb.numpy_save_aligned(aligned, np.load(os.path.join(data, "features.npy"), mmap_mode="r"))
    if way.startswith("train-diskgnn"):
        run(a.heliosctl, "prepare", *flags(way))
results = []
for task in a.tasks.split(","):
    for turn in range(a.rounds):
        for way in a.ways.split(","):
            if way.startswith("train-"):
                if task == "load":
                    continue
                got = in_process(way)
            else:
                got = in_group(way, task) if a.rows_memory and "-" in way else apart(way, task)
            results.append({"way": way, "task": task, "round": turn, **got})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(f"| {task} | seconds a batch | of GraphBolt's | read an epoch | CPU s, and the daemon's | peak, and the daemon's | page cache |\n"
          "|---|---|---|---|---|---|---|")
    for way in a.ways.split(","):
        of = [r for r in results if r["way"] == way and r["task"] == task]
        if of:
            s = sorted(r["seconds_per_batch"] for r in of)
            m = {k: statistics.median(r[k] for r in of) for k in ("cpu", "daemon_cpu", "peak", "daemon_peak", "cached", "read")}
            rival = "graphbolt-sieve-" + way.rpartition("-")[2]
            beside = {r["round"]: r["seconds_per_batch"] for r in results if r["way"] == rival and r["task"] == task}
            ratios = sorted(r["seconds_per_batch"] / beside[r["round"]] for r in of if r["round"] in beside)
            of_it = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})" if ratios else ""
            print(f"| {way} | {statistics.median(s):.4f} ({s[0]:.4f}-{s[-1]:.4f}) | {of_it} | {m['read'] / 2**20:.0f} MiB | "
                  f"{m['cpu']:.1f}, {m['daemon_cpu']:.1f} | "
                  f"{m['peak'] / 2**20:.0f}, {m['daemon_peak'] / 2**20:.0f} MiB | {m['cached'] / 2**20:.0f} MiB |")
if a.json:
    with open(a.json, "w") as f:
        json.dump(results, f, indent=1)
