"""Test accuracy of modes hier and marius beside sampling from the whole graph in memory, with settings that validation chose.

    make build
    python3 tools/hieraccuracy.py --heliosctl bin/heliosctl                  # a generated graph, some 10 minutes on 2 cores
    python3 tools/hieraccuracy.py --heliosctl bin/heliosctl --dataset D …    # a folder of heliosctl import

Two steps with seeds of their own. Choose: hier trains with each number of parts and each share of static nodes; the best mean
accuracy of validation wins. Test: the chosen setting and what lacks one thing of it (static nodes, partitions that cut few edges,
single passes) train with other seeds; the accuracy is that of the test nodes at the epoch that is best in validation, and the
difference that from mode inmem of the same seed. All trainings have the same number of trained seeds, and all evaluations are on
the whole graph. Prints a table.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--heliosctl", required=True)
p.add_argument("--dataset", help="folder of a dataset (default: generated, with planted communities)")
p.add_argument("--generate", default="--kind communities --nodes 20000 --classes 8 --dim 32 --avg-degree 20 --train-fraction 0.2 --hubs 0.01 "
               "--hub-peers 1",
               help="flags of heliosctl generate, without a dataset (default: %(default)s)")
p.add_argument("--parts", default="64", help="numbers of parts to choose from (default: %(default)s)")
p.add_argument("--static", default="1,2,4", help="per cent of the nodes that are static, to choose from (default: %(default)s)")
p.add_argument("--mega", type=int, default=4, help="mega-batches of an epoch: one of so many parts of the graph is in memory (default: 4)")
p.add_argument("--choose-seeds", default="11,12,13")
p.add_argument("--test-seeds", default="21,22,23,24,25")
p.add_argument("--epochs", type=int, default=12)
p.add_argument("--flags", default="--fanout 10,10 --batch-size 128 --hidden 32 --lr 0.01")
p.add_argument("--cpu-cache", default="1GiB")
p.add_argument("--only", help="ways to test, by their names in the table, after commas (default: all)")
p.add_argument("--curves", action="store_true", help="print the mean accuracy of validation after each epoch")
p.add_argument("--report", help="web page to write: accuracy and loss by epoch of all tests, a line for each way, with a band")
p.add_argument("--work", help="folder for all of it; kept (default: a temporary one)")
a = p.parse_args()


class Failed(Exception):
    pass


def call(*args, state):
    """Runs heliosctl in the folder of its state, so that labels of the report are short, and returns the last line of its JSON."""
    done = subprocess.run([os.path.abspath(a.heliosctl), *map(str, args), "--json", "--quiet", "--state", state],
                          cwd=os.path.dirname(state), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed(f"heliosctl {' '.join(map(str, args))}: {done.stderr.strip()}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {}


class Bench:
    def __init__(self, work):
        self.work, self.state, self.results = work, f"{work}/state", []
        self.dataset = os.path.abspath(a.dataset) if a.dataset else f"{work}/graph"
        if not a.dataset:
            call("generate", *a.generate.split(), "--out", self.dataset, state=self.state)
        size = 2 * sum(os.path.getsize(f"{self.dataset}/{n}") for n in ("features.npy", "indices.npy")) + (64 << 20)
        call("bind-ssds", "--proxy", f"{work}/ssd.img", "--buffered", "--size", size >> 20 << 20, state=self.state)
        call("load", self.dataset, state=self.state)
        self.partitions = {}

    def partition(self, parts, method):
        """The file of a partition, and the share of the edges that it cuts."""
        key = f"{method}-{parts}"
        if key not in self.partitions:
            r = call("partition", self.dataset, "--parts", parts, "--method", method, "--out", key, state=self.state)
            self.partitions[key] = key, r["cut_share"]
        return self.partitions[key]

    def train(self, seed, *flags, passes=1):
        results = f"results-{len(self.results)}.jsonl"
        self.results.append(results)
        return call("train", self.dataset, "--seed", seed, *a.flags.split(), "--epochs", a.epochs // passes, *flags,
                    "--results", results, "--overwrite", state=self.state)

    def hier(self, seed, parts, static, method="metis", passes=1, mode="hier", order=None):
        if order == "sequential":  # its first parts have the training nodes, so it makes them itself
            how = ["--parts", parts]
        else:
            how = ["--partition", self.partition(parts, method)[0]]
        flags = ["--mode", mode, *how, "--megabatch", parts // a.mega, "--cpu-cache", a.cpu_cache,
                 "--parted", f"parted-{mode}-{order}-{method}-{parts}-{static}"]
        if mode == "hier":
            flags += ["--static-nodes", f"{static:g}%", "--passes", passes]
        if order:
            flags += ["--part-order", order]
        return self.train(seed, *flags, passes=passes)


def best(r):
    return 100 * max(e["val_acc"] for e in r["epochs"])


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main(work):
    b = Bench(work)
    grid, choose = [], a.choose_seeds.split(",")
    for parts in map(int, a.parts.split(",")):
        for static in map(float, a.static.split(",")):
            val = [best(b.hier(s, parts, static)) for s in choose]
            grid.append((statistics.mean(val), -parts, -static))
            print(f"choose: {parts} parts ({b.partition(parts, 'metis')[1]:.1%} of the edges cut), {static:g} % static: "
                  f"validation {statistics.mean(val):.2f} ± {spread(val):.2f}", flush=True)
    _, parts, static = max(grid)
    parts, static = -parts, -static
    print(f"chosen by validation, seeds {a.choose_seeds}: {parts} parts, {static:g} % static", flush=True)
    ways = {
        "inmem": lambda s: b.train(s, "--mode", "inmem"),
        "hier": lambda s: b.hier(s, parts, static),
        "no static nodes": lambda s: b.hier(s, parts, 0),
        "random parts": lambda s: b.hier(s, parts, static, "random"),
        "random parts without static nodes": lambda s: b.hier(s, parts, 0, "random"),
        "2 passes": lambda s: b.hier(s, parts, static, passes=2),
        "4 passes": lambda s: b.hier(s, parts, static, passes=4),
        "marius dispersed": lambda s: b.hier(s, parts, 0, "random", mode="marius", order="dispersed"),
        "marius sequential": lambda s: b.hier(s, parts, 0, "random", mode="marius", order="sequential"),
    }
    if a.only:
        only = [w.strip() for w in a.only.split(",")]
        if lacks := [w for w in only if w not in ways]:
            sys.exit(f"--only: no way {lacks[0]!r}; there are: {', '.join(ways)}")
        ways = {w: f for w, f in ways.items() if w == "inmem" or w in only}
    test, curves, b.results = {}, {}, []
    for w, f in ways.items():
        try:
            runs = [f(s) for s in a.test_seeds.split(",")]
        except Failed as e:
            if w != "marius sequential":
                raise
            b.results.pop()  # where the parts with the training nodes are more than a mega-batch has, there is no such order
            print(f"test: {w:33} not possible: {str(e).splitlines()[-1]}", flush=True)
            continue
        test[w] = [100 * r["test_acc"] for r in runs]
        curves[w] = [statistics.mean(100 * r["epochs"][i]["val_acc"] for r in runs) for i in range(len(runs[0]["epochs"]))]
        apart = [x - y for x, y in zip(test[w], test["inmem"])]
        print(f"test: {w:33} {statistics.mean(test[w]):6.2f} ± {spread(test[w]):.2f}   from inmem {statistics.mean(apart):+6.2f} "
              f"± {spread(apart) / len(apart) ** 0.5:.2f}", flush=True)
    if a.curves:
        for w, curve in curves.items():
            print(f"curve: {w:33} {' '.join(f'{v:.1f}' for v in curve)}")
    if a.report:
        call("report", *b.results, "--out", os.path.abspath(a.report), "--overwrite", state=b.state)


try:
    if a.work:
        os.makedirs(a.work, exist_ok=True)
        main(os.path.abspath(a.work))
    else:
        with tempfile.TemporaryDirectory() as tmp:
            main(tmp)
except Failed as e:
    sys.exit(str(e))
