"""heliosctl beside PyG on two imbalanced sets: AUC and F1 of the epoch that AUC, and accuracy, choose by validation.

    tools/frameworks/setup.sh /tmp/frameworks && make build
    /tmp/frameworks/bin/python tools/frameworks/imbalanced.py --heliosctl bin/heliosctl

Both train from the same arrays: scikit-learn's make_classification, edges from the ten nearest by features, splits of
40, 20 and 40 %. GraphSAGE, 2 layers, all neighbours, a step of the whole split an epoch, Adam, one thread. Printed are
means over the seeds ± deviation; by how much choosing by AUC gains over choosing by accuracy, ± standard error; and
heliosctl's figures less PyG's, ± standard error. It takes about five minutes; --epochs 200 --seeds 3 takes one.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.metrics import f1_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.neighbors import kneighbors_graph
from torch_geometric.nn import SAGEConv

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--heliosctl", required=True)
p.add_argument("--positives", default="0.1,0.04", help="shares of class 1, a set each")
p.add_argument("--nodes", type=int, default=3000)
p.add_argument("--separation", type=float, default=1.0, help="distance of the clusters")
p.add_argument("--seeds", type=int, default=10)
p.add_argument("--epochs", type=int, default=400)
p.add_argument("--lr", type=float, default=0.01)
p.add_argument("--hidden", type=int, default=32)
a = p.parse_args()
if a.seeds < 2:
    p.error("--seeds: a deviation needs two")
METRICS = ("roc-auc", "accuracy")


def arrays(folder, positives):
    """A set with such a share of class 1."""
    x, y = make_classification(a.nodes, 32, n_informative=8, n_clusters_per_class=4, weights=[1 - positives],
                               flip_y=0.01, class_sep=a.separation, random_state=1)
    near = kneighbors_graph(x, 10).tocoo()
    edges = np.stack([near.col, near.row]).astype(np.int64)  # a node's neighbours are its nearest
    train, rest = train_test_split(np.arange(a.nodes), train_size=0.4, stratify=y, random_state=1)
    val, test = train_test_split(rest, train_size=1 / 3, stratify=y[rest], random_state=1)
    made = dict(features=x.astype(np.float32), labels=y.astype(np.int64), edge_index=edges, train=np.sort(train),
                val=np.sort(val), test=np.sort(test))
    os.makedirs(folder)
    for name, v in made.items():
        np.save(f"{folder}/{name}.npy", v)
    return made


def helios(work, *argv):
    r = subprocess.run([os.path.realpath(a.heliosctl), *argv, "--json", "--quiet"], capture_output=True, text=True,
                       env=dict(os.environ, HELIOS_STATE=f"{work}/state"))
    if r.returncode:
        sys.exit(f"heliosctl {' '.join(argv)}: {r.stderr}")
    return [json.loads(line) for line in r.stdout.splitlines()]


def ours(work, graph):
    """By seed and metric, AUC and F1 of the test in the best epoch, and this epoch."""
    runs = [{} for _ in range(a.seeds)]
    for metric in METRICS:
        got = helios(work, "train", graph, "--mode", "inmem", "--model", "sage", "--fanout=-1,-1", "--workers=1",
                     f"--batch-size={a.nodes}", f"--hidden={a.hidden}", f"--epochs={a.epochs}", f"--lr={a.lr}",
                     f"--metric={metric}", f"--seeds=1..{a.seeds}")
        for e in got:
            if e["event"] == "seed":
                test = e["test_metrics"]
                runs[e["seed"] - 1][metric] = test["roc_auc"], test["f1_macro"], e["best_epoch"]
    return runs


class SAGE(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(dim, a.hidden), SAGEConv(a.hidden, 2)])

    def forward(self, x, edges):
        return self.convs[1](self.convs[0](x, edges).relu(), edges)


def theirs(d, seed):
    torch.manual_seed(seed)
    x, y, edges, train = (torch.from_numpy(d[k]) for k in ("features", "labels", "edge_index", "train"))
    model, best = SAGE(x.shape[1]), {}
    adam = torch.optim.Adam(model.parameters(), lr=a.lr)
    for epoch in range(1, a.epochs + 1):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(model(x, edges)[train], y[train]).backward()
        adam.step()
        with torch.no_grad():
            prob = model(x, edges).softmax(1).numpy()
        val, test = d["val"], d["test"]
        for metric, v in (("roc-auc", roc_auc_score(d["labels"][val], prob[val, 1])),
                          ("accuracy", np.mean(prob[val].argmax(1) == d["labels"][val]))):
            if metric not in best or v > best[metric][0]:
                best[metric] = (v, roc_auc_score(d["labels"][test], prob[test, 1]),
                                f1_score(d["labels"][test], prob[test].argmax(1), average="macro"), epoch)
    return {m: b[1:] for m, b in best.items()}


def error(values):
    return f"{statistics.mean(values):+.4f} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"


torch.set_num_threads(1)
for positives in map(float, a.positives.split(",")):
    with tempfile.TemporaryDirectory(prefix="heliosctl-imbalanced-") as work:
        d = arrays(f"{work}/raw", positives)
        helios(work, "import", "npy", "--in", f"{work}/raw", "--out", f"{work}/g")
        runs = {"heliosctl": ours(work, f"{work}/g"), "PyG": [theirs(d, s) for s in range(1, a.seeds + 1)]}
        print(f"{100 * d['labels'].mean():.1f} % positives")
        for name, all_seeds in runs.items():
            for m in METRICS:
                auc, f1, epoch = zip(*(r[m] for r in all_seeds))
                print(f"  {name}, chosen by {m}: test AUC {statistics.mean(auc):.4f} ± {statistics.stdev(auc):.4f}, "
                      f"f1-macro {statistics.mean(f1):.3f} ± {statistics.stdev(f1):.3f}, "
                      f"epoch {statistics.mean(epoch):.0f}")
            for i, what in enumerate(("AUC", "f1-macro")):
                print(f"  {name}, gain of choosing by AUC: {what} "
                      f"{error([r['roc-auc'][i] - r['accuracy'][i] for r in all_seeds])}", flush=True)
        for m in METRICS:
            print(f"  heliosctl less PyG, chosen by {m}:", ", ".join(
                f"{what} {error([o[m][i] - t[m][i] for o, t in zip(runs['heliosctl'], runs['PyG'])])}"
                for i, what in enumerate(("AUC", "f1-macro"))), flush=True)
