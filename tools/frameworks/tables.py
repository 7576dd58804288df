"""import tables of heliosctl beside pyarrow, pandas.factorize and scipy, on tables that this makes.

    python3 -m venv DIR && DIR/bin/pip install pyarrow==26.0.1 pandas==3.1.1 scipy==1.17.1 && make build
    DIR/bin/python tools/frameworks/tables.py --heliosctl bin/heliosctl --nodes 500000 --edges 2500000 --work WORK

In turns, each in a process of its own, on files as the one before has left them: `read` reads both tables and factorizes the ids;
`write` standardises the columns, too, and writes rows as float32, the in-neighbour lists and the names, as ours does. Ours checks,
besides, that ids are there once, seals its files with checksums and indexes the names. Printed: seconds, processor seconds and peak
MiB, median (least-most), and the ratio of ours to each, formed within each round.
"""
import argparse, os, shutil, statistics, subprocess, sys, time

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--heliosctl")
p.add_argument("--nodes", type=int, default=500_000)
p.add_argument("--edges", type=int, default=2_500_000)
p.add_argument("--columns", type=int, default=64)
p.add_argument("--rounds", type=int, default=3)
p.add_argument("--formats", default="parquet,csv")
p.add_argument("--ways", default="helios,read,write")
p.add_argument("--memory", default="256MiB", help="of heliosctl")
p.add_argument("--work", required=True, help="folder for the tables, which are kept")
p.add_argument("--one", help=argparse.SUPPRESS)
a = p.parse_args()


def path(name, form):
    return os.path.join(a.work, f"{name}.{form}")


def make():
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)

    def ids(n):  # of 12 bytes on average, in no order; equal nodes have equal ones
        spread = (n.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(27)
        return pc.binary_join_element_wise("u", pa.array(spread).cast(pa.string()), "")

    def write(name, batches):
        out = {}
        for batch in batches:
            for form in a.formats.split(","):
                if form not in out:
                    kind = {"parquet": pq.ParquetWriter, "csv": pyarrow.csv.CSVWriter}[form]
                    more = {"write_options": pyarrow.csv.WriteOptions(quoting_style="needed")} if form == "csv" else {}
                    out[form] = kind(path(name, form), batch.schema, **more)
                out[form].write_table(batch)
        for w in out.values():
            w.close()

    def cuts(n, step):
        return [(i, min(i + step, n)) for i in range(0, n, step)]

    names = ["id"] + [f"x{k}" for k in range(a.columns)]
    write("nodes", (pa.table([ids(np.arange(i, j))] + [np.round(rng.normal(k, 1, j - i), 6) for k in range(a.columns)], names)
                    for i, j in cuts(a.nodes, 1 << 19)))
    write("edges", (pa.table([ids(rng.integers(0, a.nodes, j - i)) for _ in range(2)], ["src", "dst"])
                    for i, j in cuts(a.edges, 1 << 20)))


def baseline(form, writes):
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq
    import scipy.sparse as sp

    read = {"csv": pyarrow.csv.read_csv, "parquet": pq.read_table}[form]
    nodes, edges = read(path("nodes", form)), read(path("edges", form))
    ids = pa.chunked_array(nodes["id"].chunks + edges["src"].chunks + edges["dst"].chunks)
    codes, unique = pd.factorize(pd.array(ids, dtype=pd.ArrowDtype(pa.string())))
    n, m = nodes.num_rows, edges.num_rows
    assert len(unique) == n, "ids are missing or twice"
    if not writes:
        return
    out = os.path.join(a.work, "baseline")
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    rows = np.lib.format.open_memmap(os.path.join(out, "features.npy"), "w+", np.float32, (n, a.columns))
    for k in range(a.columns):
        x = nodes[f"x{k}"].to_numpy()
        rows[:, k] = (x - x.mean()) / x.std()
    csc = sp.coo_array((np.ones(m, np.int8), (codes[n : n + m], codes[n + m :])), (n, n)).tocsc()
    np.save(os.path.join(out, "indptr.npy"), csc.indptr)
    np.save(os.path.join(out, "indices.npy"), csc.indices)
    pq.write_table(nodes.select(["id"]), os.path.join(out, "names.parquet"))
    for name in os.listdir(out):  # ours puts its files on the disk, too
        with open(os.path.join(out, name), "rb") as f:
            os.fsync(f.fileno())


def run(way, form):
    shutil.rmtree(os.path.join(a.work, "ours"), ignore_errors=True)
    if way == "helios":
        cmd = [a.heliosctl, "import", "tables", "--nodes", path("nodes", form), "--id", "id", "--edges", path("edges", form), "--src",
               "src", "--dst", "dst", "--memory", a.memory, "--out", os.path.join(a.work, "ours")]
    else:
        cmd = [sys.executable, *sys.argv, "--one", f"{way},{form}"]
    start = time.perf_counter()
    child = subprocess.Popen(cmd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    text = child.stderr.read()
    _, status, use = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{' '.join(cmd)}: {text.decode()}")
    return time.perf_counter() - start, use.ru_utime + use.ru_stime, use.ru_maxrss / 1024


def show(values, form="%.2f"):
    values = sorted(values)
    return f"{form % statistics.median(values)} ({form % values[0]}-{form % values[-1]})"


if a.one:
    way, form = a.one.split(",")
    make() if way == "make" else baseline(form, way == "write")
    sys.exit()
os.makedirs(a.work, exist_ok=True)
if not all(os.path.exists(path(t, f)) for t in ("nodes", "edges") for f in a.formats.split(",")):
    run("make", "all")  # in a process of its own: a child's peak counts what its parent had
if not a.rounds:
    sys.exit()
for form in a.formats.split(","):
    got = {way: [] for way in a.ways.split(",")}
    for _ in range(a.rounds):
        for way in got:
            got[way].append(run(way, form))
    size = sum(os.path.getsize(path(t, form)) for t in ("nodes", "edges")) / 2**20
    print(f"{form}: {a.nodes} nodes x {a.columns}, {a.edges} edges, {size:.0f} MiB, {a.rounds} rounds")
    for way, all in got.items():
        wall, cpu, peak = zip(*all)
        print(f"  {way:7} {show(wall)} s, processors {show(cpu)} s, peak {show(peak, '%.0f')} MiB")
        if way != "helios" and "helios" in got:
            ratios = [[h[k] / x[k] for h, x in zip(got["helios"], all)] for k in (0, 1)]
            print(f"          helios/{way}: time {show(ratios[0])}, processors {show(ratios[1])}")
