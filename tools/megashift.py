"""What mega-batches cost in accuracy, divided into its two causes: what they lack, and what evaluation sees besides.

    make build
    python3 tools/megashift.py --heliosctl bin/heliosctl     # needs numpy

Makes the graph that the mega-batches of one grouping of parts see together, as a dataset of its own: each node with the
neighbours that are in its mega-batch, static nodes once in each. Then three models are trained (inmem on the whole graph, hier
on it, inmem on that graph) and each is evaluated on both graphs. Where a model of hier is behind on the whole graph alone, the
mega-batches lack nothing that it needs: it meets neighbours in evaluation that it has not met in training.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile

import numpy as np

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--heliosctl", required=True)
p.add_argument("--dataset", help="folder of a dataset (default: generated, with planted communities)")
p.add_argument("--parts", type=int, default=64)
p.add_argument("--mega", type=int, default=4, help="mega-batches that share the parts")
p.add_argument("--static", type=float, default=2, help="per cent of the nodes that are static")
p.add_argument("--seeds", default="1,2,3,4,5")
p.add_argument("--flags", default="--fanout 10,10 --batch-size 256 --hidden 64 --lr 0.01 --epochs 12")
p.add_argument("--work", help="folder for all of it; kept (default: a temporary one)")
a = p.parse_args()


def call(*args, state):
    """Runs heliosctl and returns the last line of its JSON."""
    done = subprocess.run([os.path.abspath(a.heliosctl), *map(str, args), "--json", "--quiet", "--state", state],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"heliosctl {' '.join(map(str, args))}: {done.stderr.strip()}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {}


def seen(whole, partition, out):
    """Writes the graph that mega-batches see as arrays for import npy, and returns the share of edges that is in it."""
    indptr, sources = np.load(f"{whole}/indptr.npy"), np.load(f"{whole}/indices.npy").astype(np.int64)
    nodes = len(indptr) - 1
    with open(partition, "rb") as f:
        part = np.frombuffer(f.read()[-4 * nodes:], dtype="<u4")  # the file ends in them: docs/PARTITIONS.md
    mega = np.empty(a.parts, int)
    mega[np.random.default_rng(1).permutation(a.parts)] = np.arange(a.parts) * a.mega // a.parts
    of = mega[part]
    targets = np.repeat(np.arange(nodes), np.diff(indptr))
    statics = np.argsort(-np.bincount(sources, minlength=nodes), kind="stable")[:int(nodes * a.static / 100)]
    number = np.full((a.mega, nodes), -1, np.int64)  # of a node in each mega-batch
    original, edges, kept = [np.arange(nodes)], [], 0
    for m in range(a.mega):
        own, extra = np.nonzero(of == m)[0], statics[of[statics] != m]
        number[m, own] = own
        number[m, extra] = sum(map(len, original)) + np.arange(len(extra))
        original.append(extra)
        there = (number[m, targets] >= 0) & (number[m, sources] >= 0)
        edges.append(np.stack([number[m, sources[there]], number[m, targets[there]]]))
        kept += int((of[targets[there]] == m).sum())
    original = np.concatenate(original)
    os.makedirs(out)
    np.save(f"{out}/edge_index.npy", np.concatenate(edges, 1))
    for name in "features", "labels":
        np.save(f"{out}/{name}.npy", np.load(f"{whole}/{name}.npy")[original])
    for name in "train", "val", "test":
        np.save(f"{out}/{name}.npy", np.load(f"{whole}/{name}.npy"))
    return kept / len(sources)


def main(work):
    states = {g: f"{work}/state-{g}" for g in ("whole", "seen")}
    graphs = {"whole": a.dataset or f"{work}/whole", "seen": f"{work}/seen"}
    if not a.dataset:
        call("generate", "--kind", "communities", "--nodes", 50000, "--dim", 64, "--avg-degree", 20,
             "--train-fraction", 0.2, "--out", graphs["whole"], state=states["whole"])
    partition = f"{work}/parts"
    call("partition", graphs["whole"], "--parts", a.parts, "--method", "metis", "--out", partition, state=states["whole"])
    share = seen(graphs["whole"], partition, f"{work}/arrays")
    print(f"{share:.1%} of the in-edges are in the mega-batch of their node", flush=True)
    call("import", "npy", "--in", f"{work}/arrays", "--out", graphs["seen"], state=states["seen"])
    for g in graphs:
        size = 2 * sum(os.path.getsize(f"{graphs[g]}/{n}") for n in ("features.npy", "indices.npy")) + (64 << 20)
        call("bind-ssds", "--proxy", f"{work}/{g}.img", "--buffered", "--size", size >> 20 << 20, state=states[g])
        call("load", graphs[g], state=states[g])
    hier = ["--mode", "hier", "--partition", partition, "--megabatch", a.parts // a.mega, "--static-nodes", f"{a.static}%",
            "--passes", 1, "--cpu-cache", "8GiB"]
    ways = {"inmem": ("whole", ["--mode", "inmem"]), "hier": ("whole", hier), "inmem on what is seen": ("seen", ["--mode", "inmem"])}
    got = {(w, g): [] for w in ways for g in graphs}
    for seed in a.seeds.split(","):
        for w, (on, flags) in ways.items():
            run = f"{work}/run-{seed}-{w.replace(' ', '-')}"
            call("train", graphs[on], "--seed", seed, *a.flags.split(), *flags, "--checkpoint", run, state=states[on])
            for g in graphs:
                r = call("eval", graphs[g], "--checkpoint", run, "--mode", "inmem", "--other-dataset", state=states[g])
                got[w, g].append(100 * r["accuracy"])
            print(f"seed {seed}, {w}: whole {got[w, 'whole'][-1]:.2f}, seen {got[w, 'seen'][-1]:.2f}", flush=True)
    print("trained            evaluated on   test accuracy   from inmem")
    for (w, g), v in got.items():
        apart = [x - y for x, y in zip(v, got["inmem", g])]
        spread = statistics.stdev if len(v) > 1 else lambda _: 0.0
        print(f"{w:22} {g:6} {statistics.mean(v):7.2f} ± {spread(v):.2f} {statistics.mean(apart):+8.2f} "
              f"± {spread(apart) / len(v) ** 0.5:.2f}")


if a.work:
    os.makedirs(a.work, exist_ok=True)
    main(os.path.abspath(a.work))
else:
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
