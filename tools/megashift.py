"""What mega-batches cost in accuracy, divided into its causes: what they lack, and what evaluation sees besides.

    make build
    python3 tools/megashift.py --heliosctl bin/heliosctl     # needs Python alone

Makes the graph that the mega-batches of one grouping of parts see together, as a dataset of its own ("seen"): each node with the
neighbours that are in its mega-batch, static nodes once in each. Two more graphs lack one half of that each. "edges" is without the
edges between nodes of two mega-batches of which neither is static; every list of a static node is whole. "lists" has all edges of
other nodes; only static nodes have, wherever a node of another mega-batch meets them, the list that they have there. Models are
trained in memory on each graph, and one of mode hier on the whole graph; each is evaluated on the whole graph and on "seen".
Where a model is behind on the whole graph alone, its training lacked nothing that it needs: it meets neighbours in evaluation that
it has not met in training. "edges" and "lists" tell which ones.
"""
import argparse, array, ast, json, os, random, statistics, struct, subprocess, sys, tempfile

def call(binary, *args, state):
    """Runs heliosctl and returns the last line of its JSON."""
    done = subprocess.run([os.path.abspath(binary), *map(str, args), "--json", "--quiet", "--state", state],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"heliosctl {' '.join(map(str, args))}: {done.stderr.strip()}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {}


CODES = {"<f4": "f", "<i4": "i", "<u4": "I", "<i8": "q", "<u8": "Q"}


def load(path):
    """An array of NumPy's format, and its shape."""
    with open(path, "rb") as f:
        if f.read(6) != b"\x93NUMPY":
            sys.exit(f"{path}: not an array of NumPy's format")
        major, _ = f.read(2)
        size, = struct.unpack("<H", f.read(2)) if major == 1 else struct.unpack("<I", f.read(4))
        head = ast.literal_eval(f.read(size).decode())
        if head["descr"] not in CODES or head["fortran_order"]:
            sys.exit(f"{path}: {head}; this tool reads {', '.join(CODES)} in C order")
        values = array.array(CODES[head["descr"]])
        values.frombytes(f.read())
    return values, head["shape"]


def save(path, values, shape):
    descr = next(d for d, c in CODES.items() if c == values.typecode)
    head = repr({"descr": descr, "fortran_order": False, "shape": tuple(shape)})
    head += " " * (-(10 + len(head) + 1) % 64) + "\n"
    with open(path, "wb") as f:
        f.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode())
        values.tofile(f)


class Mega:
    """The mega-batches of one grouping of a dataset's parts."""

    def __init__(self, whole, partition, parts, count, static):
        """Of so many parts, in that file, in so many mega-batches; static is the share of static nodes in per cent."""
        self.whole, self.count = whole, count
        self.indptr, self.sources = load(f"{whole}/indptr.npy")[0], load(f"{whole}/indices.npy")[0]
        self.nodes = nodes = len(self.indptr) - 1
        with open(partition, "rb") as f:
            part = array.array("I", f.read()[-4 * nodes:])  # the file ends in them: docs/reference/partitions.md
        order = list(range(parts))
        random.Random(1).shuffle(order)
        self.of = [order[q] * count // parts for q in part]
        degree = [0] * nodes
        for u in self.sources:
            degree[u] += 1
        by_degree = sorted(range(nodes), key=lambda v: (-degree[v], v))
        self.statics = sorted(by_degree[:int(nodes * static / 100)])

    def neighbours(self, v):
        return self.sources[self.indptr[v]:self.indptr[v + 1]]

    def graph(self, name):
        """The edges of a graph, and the original node of each of its nodes."""
        of, static = self.of, set(self.statics)
        original, copy = list(range(self.nodes)), {}
        if name != "edges":
            for v in self.statics:
                for m in range(self.count):
                    if m != of[v]:
                        copy[v, m] = len(original)
                        original.append(v)
        src, dst = array.array("q"), array.array("q")
        for v in range(self.nodes):
            for u in self.neighbours(v):
                at = u  # in the mega-batch of v
                if of[u] != of[v]:
                    at = copy.get((u, of[v]), u)
                    if name == "seen" and at == u or name == "edges" and u not in static and v not in static:
                        continue
                src.append(at)
                dst.append(v)
        for (v, m), number in copy.items():
            for u in self.neighbours(v):
                at = u if of[u] == m else copy.get((u, m))
                if at is not None:
                    src.append(at)
                    dst.append(number)
        return src, dst, original

    def write(self, name, out):
        src, dst, original = self.graph(name)
        os.makedirs(out)
        save(f"{out}/edge_index.npy", src + dst, (2, len(src)))
        for array_name in "features", "labels":
            values, shape = load(f"{self.whole}/{array_name}.npy")
            size = len(values) // self.nodes
            rows = array.array(values.typecode)
            for v in original:
                rows.extend(values[v * size:(v + 1) * size])
            save(f"{out}/{array_name}.npy", rows, (len(original), *shape[1:]))
        for split in "train", "val", "test":
            save(f"{out}/{split}.npy", *load(f"{self.whole}/{split}.npy"))

    def describe(self):
        of, static, kept, here, there = self.of, set(self.statics), 0, [0, 0], [0, 0]
        for v in range(self.nodes):
            for u in self.neighbours(v):
                kept += of[u] == of[v] or u in static
                if v in static:
                    here[0] += 1
                    here[1] += u in static
                    for m in range(self.count):
                        if m != of[v] and (of[u] == m or u in static):
                            there[0] += 1
                            there[1] += u in static
        share = lambda x: x[1] / max(x[0], 1)
        per = lambda n: n / max(len(self.statics), 1)
        return (f"{kept / len(self.sources):.1%} of the in-edges are in the mega-batch of their node; a static node has "
                f"{per(here[0]):.1f} neighbours, {share(here):.0%} of them static, and {per(there[0]) / max(self.count - 1, 1):.1f}, "
                f"{share(there):.0%} of them static, in mega-batches without its part")


def run(a, work):
    def heliosctl(*args, state):
        return call(a.heliosctl, *args, state=state)

    graphs = {"whole": os.path.abspath(a.dataset) if a.dataset else f"{work}/whole"}
    states = {g: f"{work}/state-{g}" for g in ["whole", *dict.fromkeys(["seen", *a.graphs.split(",")])]}
    if not a.dataset:
        heliosctl("generate", *a.generate.split(), "--out", graphs["whole"], state=states["whole"])
    partition = f"{work}/parts"
    heliosctl("partition", graphs["whole"], "--parts", a.parts, "--method", a.method, "--out", partition, state=states["whole"])
    mega = Mega(graphs["whole"], partition, a.parts, a.mega, a.static)
    print(mega.describe(), flush=True)
    for g in states:
        if g != "whole":
            graphs[g] = f"{work}/{g}"
            mega.write(g, f"{work}/arrays-{g}")
            heliosctl("import", "npy", "--in", f"{work}/arrays-{g}", "--out", graphs[g], state=states[g])
        size = 2 * sum(os.path.getsize(f"{graphs[g]}/{n}") for n in ("features.npy", "indices.npy")) + (64 << 20)
        heliosctl("bind-ssds", "--proxy", f"{work}/{g}.img", "--buffered", "--size", size >> 20 << 20, state=states[g])
        heliosctl("load", graphs[g], state=states[g])
    hier = ["--mode", "hier", "--partition", partition, "--megabatch", a.parts // a.mega, "--static-nodes", f"{a.static}%",
            "--passes", 1, "--cpu-cache", "8GiB"]
    ways = {"inmem": ("whole", ["--mode", "inmem"]), "hier": ("whole", hier)}
    ways |= {f"inmem on {g}": (g, ["--mode", "inmem"]) for g in a.graphs.split(",")}
    got = {(w, g): [] for w in ways for g in ("whole", "seen")}
    for seed in a.seeds.split(","):
        for w, (on, flags) in ways.items():
            model = f"{work}/run-{seed}-{w.replace(' ', '-')}"
            heliosctl("train", graphs[on], "--seed", seed, *a.flags.split(), *flags, "--checkpoint", model, state=states[on])
            for g in "whole", "seen":
                r = heliosctl("eval", graphs[g], "--checkpoint", model, "--mode", "inmem", "--other-dataset", state=states[g])
                got[w, g].append(100 * r["accuracy"])
            print(f"seed {seed}, {w}: whole {got[w, 'whole'][-1]:.2f}, seen {got[w, 'seen'][-1]:.2f}", flush=True)
    print("trained            evaluated on   test accuracy   from inmem")
    for (w, g), v in got.items():
        apart = [x - y for x, y in zip(v, got["inmem", g])]
        spread = statistics.stdev if len(v) > 1 else lambda _: 0.0
        print(f"{w:22} {g:6} {statistics.mean(v):7.2f} ± {spread(v):.2f} {statistics.mean(apart):+8.2f} "
              f"± {spread(apart) / len(v) ** 0.5:.2f}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--heliosctl", required=True)
    p.add_argument("--dataset", help="folder of a dataset (default: generated, with planted communities)")
    p.add_argument("--generate", default="--kind communities --nodes 50000 --dim 64 --avg-degree 20 --train-fraction 0.2",
                   help="flags of heliosctl generate, without a dataset (default: %(default)s)")
    p.add_argument("--parts", type=int, default=64)
    p.add_argument("--method", default="metis", help="of heliosctl partition (default: %(default)s)")
    p.add_argument("--mega", type=int, default=4, help="mega-batches that share the parts")
    p.add_argument("--static", type=float, default=2, help="per cent of the nodes that are static")
    p.add_argument("--seeds", default="1,2,3,4,5")
    p.add_argument("--graphs", default="seen,edges,lists", help="graphs to train on beside the whole one (default: %(default)s)")
    p.add_argument("--flags", default="--fanout 10,10 --batch-size 256 --hidden 64 --lr 0.01 --epochs 12")
    p.add_argument("--work", help="folder for all of it; kept (default: a temporary one)")
    a = p.parse_args()
    if bad := set(a.graphs.split(",")) - {"seen", "edges", "lists"}:
        sys.exit(f"--graphs: no graph {min(bad)!r}; there are seen, edges and lists")
    if a.work:
        os.makedirs(a.work, exist_ok=True)
        run(a, os.path.abspath(a.work))
        return
    with tempfile.TemporaryDirectory() as tmp:
        run(a, tmp)


if __name__ == "__main__":
    main()
