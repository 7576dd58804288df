"""heliosctl beside PyG and DGL on the same arrays, in turn in one run: epochs in memory, sampling, losses.

    tools/frameworks/setup.sh /tmp/frameworks
    make build bin/lab/bench
    /tmp/frameworks/bin/python tools/frameworks/compare.py --heliosctl bin/heliosctl

For each framework the best of its ways is taken, found by a short run of each (loader processes or none, PyG's
layered NeighborSampler or its NeighborLoader). One thread: everything is pinned to one CPU. A ratio is formed within
a round (A's time over B's of the same round); printed are median (least-most).
"""
import argparse, json, os, shutil, statistics, subprocess, sys, tempfile

here = os.path.dirname(os.path.realpath(__file__))
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--heliosctl", required=True)
p.add_argument("--what", default="sample,epoch,loss")
p.add_argument("--frameworks", default="pyg,dgl")
p.add_argument("--threads", default="1,2")
p.add_argument("--rounds", type=int, default=3)
p.add_argument("--nodes", type=int, default=1_000_000)
p.add_argument("--degree", type=float, default=15)
p.add_argument("--dim", type=int, default=128)
p.add_argument("--classes", type=int, default=47)
p.add_argument("--fanout", default="15,10,5")
p.add_argument("--batch", type=int, default=1024)
p.add_argument("--hidden", type=int, default=256)
p.add_argument("--batches", type=int, default=20, help="of an epoch: the training split has as many")
p.add_argument("--loss-seeds", type=int, default=5)
p.add_argument("--loss-nodes", type=int, default=100_000)
p.add_argument("--work", help="folder for the datasets; kept (default: a temporary one)")
p.add_argument("--ways", help="skip the search for each framework's best way: pyg=pyg:2,dgl=dgl:0 (worker.py's name : loader processes)")
p.add_argument("--json", help="write all results to this file")
a = p.parse_args()
heliosctl = os.path.realpath(a.heliosctl)
work = a.work or tempfile.mkdtemp(prefix="heliosctl-frameworks-")
os.makedirs(work, exist_ok=True)
env = dict(os.environ, HELIOS_STATE=os.path.join(work, "state"))
results = []
given = {f: (w.split(":")[0], int(w.split(":")[1])) for f, w in (x.split("=") for x in (a.ways or "").split(",") if x)}


def run(argv, threads=0):
    if threads == 1:
        argv = ["taskset", "-c", "0"] + argv
    r = subprocess.run(argv, env=env, capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{' '.join(argv)}: exit code {r.returncode}\n{r.stdout[-2000:]}{r.stderr[-2000:]}")
    return [json.loads(l) for l in r.stdout.splitlines() if l.startswith("{")]


def helios(*argv, threads=0):
    return run([heliosctl, *argv], threads)


def dataset(name, nodes, batches, classes):
    path = os.path.join(work, name)
    if not os.path.exists(path):
        share = (batches * a.batch + 0.5) / nodes
        helios("generate", "--nodes", str(nodes), "--avg-degree", str(a.degree), "--dim", str(a.dim), "--classes", str(classes),
               "--train-fraction", f"{share:.9f}", "--val-fraction", "0.01", "--seed", "7", "--out", path, "--json")
    return path


def load(path, nodes):
    helios("unbind-ssds", "--json") if os.path.exists(env["HELIOS_STATE"]) else None
    helios("bind-ssds", "--proxy-ram", "1", "--size", f"{nodes * a.dim * 4 * 5 // 4 // 2**20 + 64}MiB", "--json")
    helios("load", path, "--json")


def worker(framework, task, data, threads, workers, *more):
    return run([sys.executable, os.path.join(here, "worker.py"), "--framework", framework, "--task", task, "--data", data,
                "--fanout", a.fanout, "--batch", str(a.batch), "--hidden", str(a.hidden), "--threads", str(threads),
                "--workers", str(workers), *more], threads)[-1]


def train(data, threads, seed, epochs, *more):
    return helios("train", data, "--mode", "inmem", "--model", "sage", "--fanout", a.fanout, "--batch-size", str(a.batch),
                  "--hidden", str(a.hidden), "--lr", "0.003", "--epochs", str(epochs), "--no-eval", "--workers", str(threads), "--seed", str(seed),
                  "--json", "--quiet", *more, threads=threads)


def spread(v):
    return f"{statistics.median(v):.3g} ({min(v):.3g}-{max(v):.3g})"


def ways(framework, threads):
    """The framework's ways of loading: (worker's name, loader processes)."""
    names = {"pyg": ["pyg", "pyg-loader"], "dgl": ["dgl"]}[framework]
    return [(n, w) for n in names for w in ([0] if threads == 1 else [0, 1, 2])]


def measure(task, data, threads):
    """Alternates heliosctl and each framework's best way; value is seconds a batch, or seconds for 1e6 edges."""
    def value(r):
        return r["seconds"] / r["batches"] if task == "epoch" else 1e6 * r["seconds"] / r["edges"]

    def ours():
        if task == "epoch":
            e = [x for x in train(data, threads, 1, 2) if x.get("event") == "epoch"][-1]
            return e["seconds"] / e["seeds"] * a.batch  # the last mini-batch is smaller
        rows = run([os.path.join(os.path.dirname(heliosctl), "lab", "bench"), "sample", "-dataset", data, "-fanout", a.fanout,
                    "-batch-size", str(a.batch), "-workers", str(threads), "-batches", str(a.batches)], threads)
        return 1e6 / rows[-1]["edges_per_second"]["median"]

    best = {}
    for f in a.frameworks.split(","):
        if f in given:
            best[f] = given[f]
            continue
        tried = {w: value(worker(w[0], task, data, threads, w[1], "--batches", "6", "--warm", "2")) for w in ways(f, threads)}
        best[f] = min(tried, key=tried.get)
        print(f"  {f}: " + ", ".join(f"{n} with {w} loader processes {v:.3g}" for (n, w), v in tried.items()), flush=True)
    got = {k: [] for k in ["heliosctl", *best]}
    for _ in range(a.rounds):
        got["heliosctl"].append(ours())
        for f, (name, w) in best.items():
            got[f].append(value(worker(name, task, data, threads, w, "--batches", str(a.batches))))
    for f, (name, w) in best.items():
        print(f"  {f}: {name} with {w} loader processes" + (" (as told)" if f in given else " (the fastest)"), flush=True)
    unit = "s a batch" if task == "epoch" else "s for 1e6 edges"
    for k, v in got.items():
        ratio = ""
        if k != "heliosctl":
            ratio = f"; heliosctl takes {spread([h / x for h, x in zip(got['heliosctl'], v)])} of it, is {spread([x / h for h, x in zip(got['heliosctl'], v)])} times as fast"
        print(f"  {k:10} {spread(v)} {unit}{ratio}", flush=True)
    results.append({"task": task, "threads": threads, "seconds": got, "ways": best})


def losses():
    data = dataset("loss", a.loss_nodes, 20, a.classes)
    load(data, a.loss_nodes)
    seeds = range(1, a.loss_seeds + 1)
    curves = {"heliosctl": [[e["loss"] for e in train(data, 2, s, 3) if e.get("event") == "epoch"] for s in seeds]}
    for f in a.frameworks.split(","):
        curves[f] = [worker(f, "loss", data, 2, 0, "--seed", str(s), "--epochs", "3")["losses"] for s in seeds]
    ok = True
    for epoch in range(3):
        cells = {k: [c[epoch] for c in v] for k, v in curves.items()}
        h = cells["heliosctl"]
        line = []
        for k, v in cells.items():
            line.append(f"{k} {statistics.mean(v):.4f} ± {statistics.stdev(v):.4f}")
            # Difference of two means of n seeds against its standard error (Welch); 3 of them is one in 400.
            se = ((statistics.variance(h) + statistics.variance(v)) / len(v)) ** 0.5
            if k != "heliosctl":
                d = statistics.mean(h) - statistics.mean(v)
                inside = min(v) <= statistics.mean(h) <= max(v) or min(h) <= statistics.mean(v) <= max(h)
                ok = ok and (inside or abs(d) < 3 * se)
                line[-1] += f" (difference {d:+.4f}, {abs(d) / se:.1f} standard errors)"
        print(f"  epoch {epoch + 1}: " + "; ".join(line), flush=True)
    print("  the curves agree within the spread of seeds" if ok else "  the curves DIFFER by more than the spread of seeds")
    results.append({"task": "loss", "curves": curves, "agree": ok})
    return ok


try:
    ok = True
    tasks = a.what.split(",")
    if "sample" in tasks or "epoch" in tasks:
        data = dataset("graph", a.nodes, a.batches, a.classes)
        load(data, a.nodes)
        for task in tasks:
            for t in (a.threads.split(",") if task != "loss" else []):
                print(f"{task}, {t} thread(s): {a.nodes} nodes × {a.dim}, fanout {a.fanout}, batch {a.batch}, hidden {a.hidden}, {a.batches} batches, {a.rounds} rounds", flush=True)
                measure(task, data, int(t))
    if "loss" in tasks:
        print(f"losses: {a.loss_nodes} nodes, {a.loss_seeds} seeds, 3 epochs; mean ± standard deviation over seeds", flush=True)
        ok = losses()
    if a.json:
        with open(a.json, "w") as f:
            json.dump(results, f, indent=1)
finally:
    subprocess.run([heliosctl, "unbind-ssds", "--quiet"], env=env, capture_output=True)
    if not a.work:
        shutil.rmtree(work, ignore_errors=True)
sys.exit(0 if ok else 1)
