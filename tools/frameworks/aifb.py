"""A featureless R-GCN of AIFB by heliosctl and by PyG's FastRGCNConv, from the same relations and splits: test accuracy over seeds.

    /tmp/frameworks/bin/python tools/frameworks/aifb.py --heliosctl bin/heliosctl --data ../shared/data/aifb

Both: 2 layers, 16 wide, 30 bases, all neighbours, 50 epochs of all 140 training nodes, Adam 0.01, weight decay 0.0005, the
parameters of the last epoch. Each of the 36 test nodes is 2.8 points.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--heliosctl", required=True)
p.add_argument("--data", required=True, help="folder with triples.tsv and labels.tsv")
p.add_argument("--seeds", type=int, default=10)
p.add_argument("--epochs", type=int, default=50)
p.add_argument("--ways", default="helios,pyg")
a = p.parse_args()
work = tempfile.mkdtemp(prefix="heliosctl-aifb-")
graph = os.path.join(work, "g")


def run(*argv):
    r = subprocess.run(argv, env=dict(os.environ, HELIOS_STATE=os.path.join(work, "state")), capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{' '.join(argv)}: exit code {r.returncode}\n{r.stdout[-2000:]}{r.stderr[-2000:]}")
    return json.loads(r.stdout.splitlines()[-1])


def helios(seed):
    return run(a.heliosctl, "train", graph, "--mode", "inmem", "--model", "rgcn", "--featureless", "--bases", "30", "--hidden", "16",
               "--fanout=-1,-1", "--batch-size", "140", "--epochs", str(a.epochs), "--lr", "0.01", "--weight-decay", "5e-4", "--dropout",
               "0", "--seed", str(seed), "--json", "--quiet")["test_acc"]


def pyg(seed):
    import numpy as np
    import torch
    import yaml
    from torch_geometric.nn import FastRGCNConv

    meta = yaml.safe_load(open(os.path.join(graph, "dataset.yaml")))

    def load(*path):
        return torch.from_numpy(np.load(os.path.join(graph, *path)).astype(np.int64))

    src, dst, kind = [], [], []
    for k, r in enumerate(meta["relations"]):
        indptr = load(r["dir"], "indptr.npy")
        src.append(load(r["dir"], "indices.npy"))
        dst.append(torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff()))
        kind.append(torch.full_like(src[-1], k))
    edges, kind, nodes = torch.stack([torch.cat(src), torch.cat(dst)]), torch.cat(kind), meta["node_types"][0]["nodes"]
    task = meta["tasks"][0]
    labels, train, test = (load(task["dir"], n + ".npy") for n in ("labels", "train", "test"))
    torch.manual_seed(seed)
    first = FastRGCNConv(nodes, 16, len(meta["relations"]), num_bases=30)
    last = FastRGCNConv(16, task["classes"], len(meta["relations"]), num_bases=30)
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=0.01, weight_decay=0.0005)
    for _ in range(a.epochs):
        optimizer.zero_grad()
        out = last(first(None, edges, kind).relu(), edges, kind)
        torch.nn.functional.cross_entropy(out[train], labels[train]).backward()
        optimizer.step()
    with torch.no_grad():
        out = last(first(None, edges, kind).relu(), edges, kind)
    return (out[test].argmax(1) == labels[test]).double().mean().item()


run(a.heliosctl, "import", "triples", "--in", a.data, "--out", graph, "--json", "--quiet")
for way in a.ways.split(","):
    got = []
    for seed in range(1, a.seeds + 1):
        got.append(100 * globals()[way](seed))
        print(way, seed, f"{got[-1]:.2f}", file=sys.stderr, flush=True)
    print(f"{way}: {statistics.mean(got):.2f} ± {statistics.stdev(got):.2f} of {len(got)} seeds")
