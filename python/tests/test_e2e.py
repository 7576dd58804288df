"""The real daemon: its batches are those of `heliosctl train`, and nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

import helios

NODES, DIM, CLASSES = 3000, 24, 5
WIDE = os.environ.get("HELIOS_WIDE") == "1"


class Site:
    """A folder with a dataset whose rows are on two file-backed SSDs, bound for this process."""

    def __init__(self, folder: Path, binary: str) -> None:
        self.folder, self.binary, self.dataset = folder, binary, folder / "g"

    def run(self, *args):
        return helios.run(*args, binary=self.binary)

    def load(self, size="32MiB"):
        proxies = f"{self.folder / 'a.img'},{self.folder / 'b.img'}"
        self.run("bind-ssds", f"--proxy={proxies}", f"--size={size}")
        self.run("load", str(self.dataset))

    def open(self, **more):
        return helios.open(self.dataset, binary=self.binary, **more)

    def train_rows(self, fanout, batch_size, epochs, **options):
        """Trains, and returns how many rows each epoch looked up."""
        result = helios.train(
            self.dataset,
            binary=self.binary,
            fanout=fanout,
            batch_size=batch_size,
            epochs=epochs,
            hidden=8,
            no_eval=True,
            quiet=True,
            **options,
        )
        keys = ("rows_gpu", "rows_cpu", "rows_ssd")
        return [sum(e.get(k, 0) for k in keys) for e in result["epochs"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory, binary):
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIOS_STATE", str(folder / "state"))
        s = Site(folder, binary)
        s.run("generate", f"--nodes={NODES}", f"--dim={DIM}", f"--classes={CLASSES}",
              f"--out={s.dataset}")  # fmt: skip
        s.load()
        yield s


@pytest.fixture(scope="module")
def arrays(site):
    """The dataset's own files."""
    names = ("features", "labels", "indptr", "indices", "train", "val", "test")
    return {n: np.load(site.dataset / f"{n}.npy") for n in names}


def test_dataset(site, arrays):
    with site.open() as ds:
        assert (ds.num_nodes, ds.num_features) == arrays["features"].shape
        assert ds.num_edges == len(arrays["indices"])
        assert ds.num_classes == CLASSES
        assert ds.splits == {k: len(arrays[k]) for k in ("train", "val", "test")}
        assert ds.row_dtype == "float32"


WAYS = {
    "helios": {},
    "inmem": {"mode": "inmem"},
    "cpu": {"mode": "cpu", "cpu_cache": "5%"},
    "mmap": {"mode": "mmap"},
    "gids": {"mode": "gids", "gpu_cache": "20%"},
    "labor": {"sampler": "labor"},
    "ladies": {"sampler": "ladies", "mode": "cpu"},
    "none": {"pipeline": "none"},
    "seed": {"seed": 5},
}


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_those_of_train(site, arrays, way):
    """As many rows as train looks up, in two epochs, and id for id those of memory alone.

    TestLoaderIsTraining compares ids with those of training. Here the rows, labels and edges
    belong to the ids.
    """
    options = dict(WAYS[way])
    fanout = "300,200" if way == "ladies" else "4,3"
    want = site.train_rows(fanout, 300, epochs=2, **options)
    neighbors = {
        v: set(arrays["indices"][arrays["indptr"][v] : arrays["indptr"][v + 1]].tolist())
        for v in range(NODES)
    }
    with site.open() as ds:
        counts = [int(n) for n in fanout.split(",")]
        loader = helios.NumpyLoader(ds, counts, batch_size=300, **options)
        draws = {k: v for k, v in options.items() if k in ("sampler", "seed")}
        memory = helios.NumpyLoader(
            ds, counts, batch_size=300, mode="inmem", pipeline="none", **draws
        )
        seeds = []
        for epoch in range(2):
            plain = [b.n_id.tolist() for b in memory]
            assert len(loader) == len(plain)
            assert sum(map(len, plain)) == want[epoch]
            for i, b in enumerate(loader):
                assert (b.epoch, b.index) == (epoch, i)
                assert b.n_id.tolist() == plain[i]
                assert np.array_equal(b.x, arrays["features"][b.n_id])
                assert np.array_equal(b.y, arrays["labels"][b.n_id[: b.num_seeds]])
                seeds += b.n_id[: b.num_seeds].tolist()
                check_edges(b, neighbors, way, counts)
        assert sorted(seeds) == sorted(arrays["train"].tolist() * 2)


def check_edges(b, neighbors, way, counts):
    ids = b.n_id
    for hop, block in enumerate(b.blocks):
        assert len(block.indptr) == block.num_dst + 1
        dst = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
        assert block.src.max(initial=0) < block.num_src
        for s, d in zip(ids[block.src].tolist(), ids[dst].tolist(), strict=True):
            assert s in neighbors[d]
        if way != "ladies":
            drawn = np.diff(block.indptr)
            most = [min(counts[hop], len(neighbors[v])) for v in ids[: block.num_dst].tolist()]
            if way != "labor":
                assert drawn.tolist() == most
        assert (block.weights is not None) == (way == "ladies")
    # edge_index: each node once, at the hop after it appeared.
    first, at = 0, 0
    for block, edges in zip(b.blocks, b.num_sampled_edges, strict=True):
        begin = block.indptr[first]
        src = block.src[begin:]
        dst = np.repeat(np.arange(first, block.num_dst), np.diff(block.indptr[first:]))
        assert np.array_equal(b.edge_index[:, at : at + edges], np.stack([src, dst]))
        first, at = block.num_dst, at + edges
    assert at == b.edge_index.shape[1]


def test_other_splits(site, arrays):
    """Validation and test in their order, and nodes that the user names."""
    with site.open() as ds:
        for split in ("val", "test"):
            loader = helios.NumpyLoader(ds, [4, 3], batch_size=200, split=split)
            got = [b.n_id.tolist() for b in loader]
            assert sum(len(g) > 0 for g in got) == len(loader)
            seeds = [n for b in loader for n in b.n_id[: b.num_seeds].tolist()]
            assert seeds == arrays[split].tolist()
            memory = helios.NumpyLoader(ds, [4, 3], batch_size=200, split=split, mode="inmem")
            assert got == [b.n_id.tolist() for b in memory]
        nodes = [5, 2999, 0, 17]
        (b,) = helios.NumpyLoader(ds, [4, 3], input_nodes=nodes)
        assert b.n_id[:4].tolist() == nodes
        assert np.array_equal(b.y, arrays["labels"][nodes])
        assert np.array_equal(b.x, arrays["features"][b.n_id])


def test_ranks_share_an_epoch(site):
    with site.open() as ds:
        whole = [b.n_id.tolist() for b in helios.NumpyLoader(ds, [4, 3], batch_size=150)]
        parts: dict[int, list[int]] = {}
        for rank in range(3):
            loader = helios.NumpyLoader(ds, [4, 3], batch_size=150, rank=rank, world_size=3)
            got = {b.index: b.n_id.tolist() for b in loader}
            assert len(got) == len(loader)
            assert all(i % 3 == rank for i in got)
            parts |= got
        assert [parts[i] for i in range(len(parts))] == whole


def test_going_on_from_a_state(site):
    with site.open() as ds:
        loader = helios.NumpyLoader(ds, [4, 3], batch_size=150, seed=3)
        whole = [[b.n_id.tolist() for b in loader] for _ in range(2)]
        for rank, world in ((0, 1), (1, 2)):
            share = {"rank": rank, "world_size": world}
            ahead = helios.NumpyLoader(ds, [4, 3], batch_size=150, seed=3, **share)
            list(ahead)
            it = iter(ahead)
            next(it), next(it)
            other = helios.NumpyLoader(ds, [4, 3], batch_size=150, seed=3, **share)
            other.load_state_dict(ahead.state_dict())
            rest = [b.n_id.tolist() for b in other]
            assert rest == whole[1][rank::world][2:]


def test_kept_tensors(site, arrays):
    """More batches than slots, kept beyond loader, dataset and daemon."""
    ds = site.open()
    kept = list(helios.NumpyLoader(ds, [4, 3], batch_size=100))
    ds.close()
    gc.collect()
    assert len(kept) > 10
    for b in kept:
        assert np.array_equal(b.x, arrays["features"][b.n_id])


def test_breaking_off_again_and_again(site):
    with site.open() as ds:
        loader = helios.NumpyLoader(ds, [4, 3], batch_size=50)
        for epoch in range(12):
            for i, b in enumerate(loader):
                assert (b.epoch, b.index) == (epoch, i)
                if i == epoch % 4:
                    break


def test_errors(site):
    with pytest.raises(helios.UsageError):
        helios.open(site.folder / "nothing", binary=site.binary)
    with site.open() as ds:
        for wrong in ({"sampler": "no"}, {"no_such_option": 1}, {"mode": "no"}, {"policy": "no"}):
            with pytest.raises(helios.UsageError) as e:
                helios.NumpyLoader(ds, **wrong)
            assert next(iter(wrong)) in str(e.value)
        assert len(list(helios.NumpyLoader(ds))) > 0, "an error ends the session"


def test_a_killed_daemon(site):
    with site.open() as ds:
        loader = helios.NumpyLoader(ds, [4, 3], batch_size=50)
        it = iter(loader)
        b = next(it)
        want = b.x.copy()
        os.kill(ds.session()[0].daemon_pid, signal.SIGKILL)
        with pytest.raises(helios.DaemonDied, match=r"was killed.* begin the iteration again"):
            list(it)
        assert np.array_equal(b.x, want)
        assert len(list(loader)) == len(loader)


def test_a_shared_daemon(site, arrays):
    """Two clients of one daemon on a socket; one leaves in the middle."""
    path = site.folder / "daemon.sock"
    with subprocess.Popen(
        [site.binary, "serve", "--socket", str(path)], stderr=subprocess.DEVNULL
    ) as daemon:
        try:
            for _ in range(2000):
                if path.exists() or daemon.poll() is not None:
                    break
                threading.Event().wait(0.01)
            one = site.open(socket=path)
            with site.open(socket=path) as other:
                it = iter(helios.NumpyLoader(one, [4, 3], batch_size=100, mode="inmem"))
                next(it)
                got = list(helios.NumpyLoader(other, [4, 3], batch_size=100, mode="inmem"))
                one.close()
                again = list(helios.NumpyLoader(other, [4, 3], batch_size=100, mode="inmem"))
                for a, b in zip(got, again, strict=True):
                    assert np.array_equal(a.n_id, b.n_id)
                    assert np.array_equal(a.x, arrays["features"][a.n_id])
        finally:
            daemon.send_signal(signal.SIGINT)
            daemon.wait(30)
    assert daemon.returncode in (0, 130)


ONE = """
import hashlib, os, sys
import helios

def read(ds, **options):
    sums = hashlib.sha256()
    for b in helios.NumpyLoader(ds, [4, 3], batch_size=50, **options):
        sums.update(b.n_id.tobytes() + b.x.tobytes())
    print("read", ds.session()[0].daemon_pid, sums.hexdigest(), flush=True)

ds = helios.open(sys.argv[1], binary=sys.argv[2])
"""


def test_one_daemon(site):
    """Scripts with caches of their own, a session of Python and four workers share it."""
    run = [sys.executable, "-q", "-i", "-", str(site.dataset), site.binary]
    script = [sys.executable, "-c", ONE + "read(ds, cpu_cache=sys.argv[3])", *run[4:]]
    commands = [[*script, "0"], [*script, "30%"], run]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    read, write = os.pipe()
    children = []
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(subprocess.Popen(c, text=True, **pipes)) for c in commands]
        typed = ONE + "read(ds)\n"
        ds = stack.enter_context(site.open())
        loader = helios.NumpyLoader(ds, [4, 3], batch_size=50)
        for worker in range(4):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    part = loader._part(worker, 4)
                    seen = [b.index for b in part._own_batches()]
                    pid = part.dataset.session()[0].daemon_pid
                    os.write(write, f"{pid} {' '.join(map(str, seen))}\n".encode())
                finally:
                    os._exit(0)
        os.close(write)
        said = [p.communicate(typed if p is others[2] else None, timeout=60) for p in others]
        with os.fdopen(read) as f:
            parts = [line.split() for line in f]
        for child in children:
            os.waitpid(child, 0)
        pid = str(ds.session()[0].daemon_pid)
        answers = [line for out, _ in said for line in out.splitlines() if line.startswith("read")]
        assert len(answers) == 3, said
        assert {a.split()[1] for a in answers} | {p[0] for p in parts} == {pid}
        assert len(set(answers)) == 1, "the same bits whatever the caches"
        assert sorted(int(i) for p in parts for i in p[1:]) == list(range(len(loader)))


def test_another_daemon(site, tmp_path, monkeypatch, caplog):
    """One of another build, or started under other variables, does not serve us unasked."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with site.open() as ds:
        pid = ds.session()[0].daemon_pid
        other = str(tmp_path / "heliosctl")
        Path(other).write_text(
            f'#!/bin/sh\n[ "$1" = version ] && exec echo heliosctl v0\nexec {site.binary} "$@"\n'
        )
        Path(other).chmod(0o755)
        for _ in range(2):
            with helios.open(site.dataset, binary=other) as two:
                assert two.session()[0].daemon_pid != pid
        assert [other in r.getMessage() for r in caplog.records] == [True]
        for hidden in ("MIG-7", "MIG-8"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
            with site.open() as two, site.open() as three:
                apart = two.session()[0].daemon_pid
                assert apart == three.session()[0].daemon_pid != pid
            assert f"CUDA_VISIBLE_DEVICES unset, and here it is {hidden!r}" in caplog.text


def test_one_daemon_for_ranks_that_see_a_gpu_each(site, tmp_path, monkeypatch):
    """It sees all. One that was started to see some serves those that see the same."""
    pids, loaders = set(), []
    with contextlib.ExitStack() as stack:
        for rank, visible in enumerate(("1", "GPU-77", "")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            ds = stack.enter_context(site.open())
            loader = helios.NumpyLoader(ds, [4, 3], batch_size=50, rank=rank, world_size=3)
            loaders.append(loader)
            pids.add(ds.session()[0].daemon_pid)
            environment = ds.session()[0].welcome["environment"]
        assert len(pids) == 1
        assert "CUDA_VISIBLE_DEVICES" not in environment
        seen = [b.index for loader in loaders for b in loader]
        assert set(seen) == set(range(len(helios.NumpyLoader(ds, [4, 3], batch_size=50))))
    command = [site.binary, "serve", "--json"]
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as daemon:
        try:
            daemon.stdout.readline()  # it listens
            for visible, joined in (("1", True), ("2", False)):
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
                with site.open() as ds:
                    assert (ds.session()[0].daemon_pid == daemon.pid) == joined
        finally:
            daemon.send_signal(signal.SIGINT)


@pytest.mark.parametrize("runtime", [False, True])
def test_a_daemon_of_a_terminal_is_joined(site, tmp_path, monkeypatch, runtime):
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))  # rows are the folder's
    if runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    command = [site.binary, "serve", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as daemon:
        try:
            daemon.stdout.readline()  # it listens
            with site.open() as ds:
                assert ds.session()[0].daemon_pid == daemon.pid
        finally:
            daemon.send_signal(signal.SIGINT)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_socket_of_another_user(site, tmp_path, monkeypatch):
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path))
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(helios._daemon.user_socket(str(tmp_path))))
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                theirs.listen()
                os.write(write, b"x")
                signal.pause()
            finally:
                os._exit(1)
        try:
            os.read(read, 1)
            with pytest.raises(helios.RefusedError, match="of user 65534"):
                site.open()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            os.close(write)


def test_files_are_found_from_here(site, tmp_path, monkeypatch):
    """The daemon runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HELIOS_STATE", os.path.relpath(os.environ["HELIOS_STATE"]))
    Path("order.txt").write_text("\n".join(map(str, range(NODES))))
    with site.open() as ds:
        for hotness in ("order.txt", "degree", Path("order.txt")):
            loader = helios.NumpyLoader(ds, [4, 3], cpu_cache="5%", hotness=hotness)
            assert len(list(loader)) == len(loader)
        with pytest.raises(helios.UsageError, match=str(tmp_path / "nothing")):
            helios.NumpyLoader(ds, [4, 3], cpu_cache="5%", hotness="nothing")


def test_save(site, tmp_path):
    rng = np.random.default_rng(1)
    x = rng.random((50, 6), np.float32)
    edges = rng.integers(0, 50, (2, 200))
    y = rng.integers(0, 3, 50)
    splits = {"train": np.arange(30), "val": np.arange(30, 40), "test": np.arange(40, 50)}
    out = tmp_path / "mine"
    helios.save(out, x, edges, y, splits, binary=site.binary)
    assert np.array_equal(np.load(out / "features.npy"), x)
    assert np.array_equal(np.load(out / "labels.npy"), y)
    assert sorted(np.load(out / "train.npy").tolist()) == list(range(30))
    indptr, indices = np.load(out / "indptr.npy"), np.load(out / "indices.npy")
    dst = np.repeat(np.arange(50), np.diff(indptr))
    assert sorted(zip(indices.tolist(), dst.tolist(), strict=True)) == sorted(
        zip(*edges.tolist(), strict=True)
    )
    with pytest.raises(helios.HeliosError):
        helios.save(out, x, edges, y, splits, binary=site.binary)
    with pytest.raises(helios.UsageError, match="no split or mask for val and test"):
        helios.save(tmp_path / "t", x, edges, y, {"train": splits["train"]}, binary=site.binary)
    with pytest.raises(helios.UsageError, match=r"^labels.npy: label 0.5 of node 0 is not a class"):
        helios.save(tmp_path / "t", x, edges, y + 0.5 - y[0], splits, binary=site.binary)
    some = {"train": splits["train"], "val": splits["val"], "test": np.zeros(50, bool)}
    helios.save(tmp_path / "t", x, edges, y, some, binary=site.binary)
    prices = rng.random((50, 2), np.float32)
    prices[3, 1] = np.nan
    helios.save(tmp_path / "p", x, edges, prices, splits, target="regression", binary=site.binary)
    saved = np.load(tmp_path / "p/tasks/000/labels.npy")
    assert np.array_equal(saved, prices, equal_nan=True)


def test_labels_and_numbers(site, tmp_path, monkeypatch):
    """y of several labels a node and of numbers: of the dataset, seeds, all nodes, and stores."""
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))  # no SSD: the folder has the rows
    rng = np.random.default_rng(1)
    x, edges = rng.random((50, 6), np.float32), rng.integers(0, 50, (2, 200))
    labels = rng.integers(0, 2, (50, 3)).astype(np.uint8)
    labels[4, 1] = 255
    prices = rng.random((50, 2), np.float32)
    prices[3, 1] = np.nan
    splits = {"train": np.arange(30), "val": np.arange(30, 40), "test": np.arange(40, 50)}
    for target, y in (("multi-label", labels), ("regression", prices)):
        want = np.where(y == 255, np.nan, y).astype(np.float32)
        out = tmp_path / target
        helios.save(out, x, edges, y, splits, target=target, binary=site.binary)
        with helios.open(out, binary=site.binary) as ds:
            assert np.asarray(ds.y).dtype == np.float32
            assert np.array_equal(np.asarray(ds.y), want, equal_nan=True)
            assert np.array_equal(np.asarray(ds.x), x)
            assert np.flatnonzero(ds.train_mask).tolist() == list(range(30))
            ends = zip(*np.asarray(ds.edge_index).tolist(), strict=True)
            assert sorted(ends) == sorted(zip(*edges.tolist(), strict=True))
            for all_labels in (False, True):
                for b in helios.NumpyLoader(ds, [3, 2], batch_size=8, all_labels=all_labels):
                    nodes = b.n_id if all_labels else b.n_id[: b.num_seeds]
                    assert np.array_equal(b.y, want[nodes], equal_nan=True)
            with contextlib.suppress(helios.CapabilityError):  # no PyTorch, or no PyG
                from helios.pyg import stores

                features, _ = stores(ds)
                assert features.get_tensor_size(None, "y") == want.shape
                for name, all_rows in (("x", x), ("y", want)):
                    rows = features.get_tensor(None, name, index=slice(2, 5)).numpy()
                    assert np.array_equal(rows, all_rows[2:5], equal_nan=True)


@pytest.mark.parametrize(
    ("target", "shape", "text"),
    [
        ("class", (50,), ""),
        ("class", (50, 1), "label_dims: 2"),
        ("regression", (50,), "label_dims: 1"),
        ("regression", (50, 1), ""),
        ("regression", (50, 2), ""),
        ("multi-label", (50,), "label_dims: 1"),
        ("multi-label", (50, 3), ""),
    ],
)
def test_y_has_the_shape_that_was_saved(site, tmp_path, monkeypatch, target, shape, text):
    """[N] stays [N] and [N, 1] stays [N, 1]: a loss of both would broadcast without a word."""
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    rng = np.random.default_rng(1)
    x, edges = rng.random((50, 6), np.float32), rng.integers(0, 50, (2, 200))
    y = rng.random(shape, np.float32) if target == "regression" else rng.integers(0, 2, shape)
    helios.save(tmp_path / "g", x, edges, y, target=target, binary=site.binary)
    described = (tmp_path / "g/dataset.yaml").read_text()
    assert text in described if text else "label_dims" not in described
    with helios.open(tmp_path / "g", binary=site.binary) as ds:
        for again in (ds, pickle.loads(pickle.dumps(ds))):
            np.testing.assert_array_equal(np.asarray(again.y), y, strict=False)
            assert again.y.shape == shape
        for all_labels in (False, True):
            for b in helios.NumpyLoader(ds, [3, 2], batch_size=8, all_labels=all_labels):
                nodes = b.n_id if all_labels else b.n_id[: b.num_seeds]
                assert b.y.shape == y[nodes].shape
                assert np.array_equal(b.y, y[nodes])
        for b in helios.NeighborLoader(ds, [3, 2], batch_size=8):
            assert b.y.shape == y[np.asarray(b.n_id)].shape
    result = helios.train(tmp_path / "g", epochs=1, fanout=[2], seed=1, binary=site.binary)
    flat = y if y.ndim == 2 and y.shape[1] > 1 else y.reshape(-1, 1)
    flat = flat.reshape(-1) if target == "class" else flat
    helios.save(tmp_path / "h", x, edges, flat, target=target, binary=site.binary)
    other = helios.train(tmp_path / "h", epochs=1, fanout=[2], seed=1, binary=site.binary)
    assert result["params_sha256"] == other["params_sha256"]  # training does not see it


def check_types(ds, batch):
    """Whatever was drawn, rows and edges of every type are those of the folder."""
    for t in ds.node_types:
        assert np.array_equal(batch.x[t], np.asarray(ds[t].x)[batch.n_id[t]])
    assert np.array_equal(
        batch.y, np.asarray(ds["paper"].y)[batch.n_id["paper"][: batch.num_seeds]]
    )
    for e in ds.edge_types:
        src, dst = batch.edge_index[e]
        numbers = ds[e].files.edge_numbers(batch.n_id[e[0]][src], batch.n_id[e[2]][dst])
        assert numbers.min(initial=0) >= 0
        assert len(np.unique(numbers)) == sum(batch.num_sampled_edges[e])
    assert len(batch.n_id["author"]) > 0


def test_types_and_a_killed_daemon(site, tmp_path, monkeypatch):
    """Batches of before are as they were, and the next ones are those that were to come."""
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    site.run("generate", "--kind=typed", "--nodes=2000", f"--out={tmp_path / 't'}")
    for ssds in ((), (f"--proxy={tmp_path / 'a.img'}", "--size=16MiB")):
        if ssds:
            site.run("bind-ssds", *ssds)
            site.run("load", str(tmp_path / "t"))
        with helios.open(tmp_path / "t", binary=site.binary) as ds:
            loader = helios.NumpyLoader(ds, [4, 3], batch_size=50)
            whole = [b.n_id for b in loader]
            assert len(whole) == len(loader) > 4
            loader.set_epoch(0)
            it = iter(loader)
            kept = [next(it), next(it)]
            os.kill(ds.session()[0].daemon_pid, signal.SIGKILL)
            with pytest.raises(helios.DaemonDied, match="was killed"):
                list(it)
            loader.load_state_dict({**loader.state_dict(), "batch": 2})
            for i, batch in enumerate([*kept, *loader]):
                check_types(ds, batch)
                for t in ds.node_types:
                    assert np.array_equal(batch.n_id[t], whole[i][t])
            assert i == len(whole) - 1


def test_save_takes_what_others_have(site, tmp_path):
    """Fortran's order, SciPy, pandas, bfloat16 and PyG's Data make the folder that NumPy makes."""
    rng = np.random.default_rng(1)
    x = rng.integers(-99, 99, (70000, 3)).astype(np.float32)
    ends = np.unique(rng.integers(0, 70000, (2, 200)), axis=1)
    y = rng.integers(0, 3, 70000)
    splits = {"train": np.arange(30), "val": np.arange(30, 40), "test": np.arange(40, 50)}
    masks = {f"{k}_mask": np.isin(np.arange(70000), v) for k, v in splits.items()}
    ways = {"numpy": (x, ends, y, splits), "fortran": (np.asfortranarray(x), ends.T, y, splits)}
    with contextlib.suppress(ImportError):
        import scipy.sparse

        ones = np.ones(ends.shape[1])
        adjacency = scipy.sparse.coo_matrix((ones, tuple(ends)), (70000, 70000)).tocsc()
        ways["scipy"] = (scipy.sparse.csc_matrix(x), adjacency, y, splits)
    with contextlib.suppress(ImportError):
        import pandas

        frame = pandas.DataFrame(x)
        ways["pandas"] = (frame, pandas.DataFrame(ends.T), pandas.Series(y), splits)
    with contextlib.suppress(ImportError):
        import torch

        half = torch.from_numpy(x).bfloat16()
        ways["bfloat16"] = (half, torch.from_numpy(ends), torch.from_numpy(y)[:, None], splits)
    with contextlib.suppress(ImportError):
        import torch
        from torch_geometric.data import Data

        data = {"x": x, "edge_index": ends, "y": y, **masks}
        ways["data"] = (Data(**{k: torch.from_numpy(v) for k, v in data.items()}),)
    print(sorted(ways))
    for way, arrays in ways.items():
        helios.save(tmp_path / way, *arrays, binary=site.binary)
        for name in ("features", "labels", "indptr", "indices", "train", "val", "test"):
            files = [np.load(tmp_path / w / f"{name}.npy") for w in ("numpy", way)]
            assert np.array_equal(*files), (way, name)
    two = ways.get("data", (x,)) * 2
    for wrong, said in (((x, ends), "labels"), (two, "alone|labels")):
        with pytest.raises(helios.UsageError, match=said):
            helios.save(tmp_path / "no", *wrong, binary=site.binary)


def test_verbs(site):
    got = helios.train(site.dataset, mode="inmem", epochs=2, hidden=8, quiet=True,
                       binary=site.binary)  # fmt: skip
    assert len(got["epochs"]) == 2
    assert got["mode"] == "inmem"
    got = helios.compare(site.dataset, modes="inmem,cpu", repeats=1, hidden=8, quiet=True,
                         binary=site.binary)  # fmt: skip
    assert [v["name"] for v in got["variants"]] == ["inmem", "cpu"]
    assert len(got["runs"]) == 2
    with pytest.raises(helios.UsageError, match="fanout"):
        helios.train(site.dataset, fanout="x", binary=site.binary)


def resident():
    with Path("/proc/self/status").open() as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))


@pytest.mark.skipif(not WIDE, reason="HELIOS_WIDE=1 runs the long tests")
def test_nothing_leaks(site):
    """10,000 batches: as much memory and as many descriptors as after the first."""
    with site.open() as ds:
        loader = helios.NumpyLoader(ds, [4, 3], batch_size=50, mode="inmem")
        done = 0
        while done < 1000:
            done += sum(1 for _ in loader)
        gc.collect()
        before, descriptors = resident(), len(os.listdir("/proc/self/fd"))
        while done < 11000:
            done += sum(1 for _ in loader)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert resident() - before < 8 << 10, "KiB of growth"


@contextlib.contextmanager
def serving(site, name):
    """A daemon on a socket, which ends in order."""
    path = site.folder / name  # or a whole path
    command = [site.binary, "serve", "--socket", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as daemon:
        try:
            daemon.stdout.readline()  # it listens
            yield path, daemon
        finally:
            daemon.send_signal(signal.SIGINT)
            daemon.wait(30)


def test_two_datasets(site, arrays, tmp_path):
    """Two clients of one daemon, each with a dataset and an SSD of its own, in turns."""
    other, image = tmp_path / "other", tmp_path / "o.img"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIOS_STATE", str(tmp_path / "state"))
        site.run("generate", "--nodes=1500", "--dim=8", "--seed=5", f"--out={other}")
        site.run("bind-ssds", f"--proxy={image}", "--size=16MiB")
        site.run("load", str(other))
    x = np.load(other / "features.npy")
    with (
        serving(site, "two.sock") as (path, _),
        site.open(socket=path) as one,
        helios.open(other, socket=path, ssd_file=image) as two,
    ):
        a = helios.NumpyLoader(one, [4, 3], batch_size=100)
        b = helios.NumpyLoader(two, [4, 3], batch_size=50)
        seen = 0
        for p, q in zip(a, b, strict=False):
            assert np.array_equal(p.x, arrays["features"][p.n_id])
            assert np.array_equal(q.x, x[q.n_id])
            seen += 1
        assert seen == min(len(a), len(b))


def test_ranks_read_once(site):
    """Ranks of one daemon read together what one loader reads."""
    options = {"batch_size": 100, "mode": "bam", "gpu_cache": "30%"}

    def epoch(loader, into):
        into.append(sum(len(b.n_id) for b in loader))

    with serving(site, "ranks.sock") as (path, _), site.open(socket=path) as ds:
        whole = helios.NumpyLoader(ds, [4, 3], **options)
        rows = sum(len(b.n_id) for b in whole)
        alone = whole.bytes_ssd
        whole.close()
        each = []
        for rank in range(2):
            one = helios.NumpyLoader(ds, [4, 3], rank=rank, world_size=2, **options)
            list(one)
            each.append(one.bytes_ssd)
            one.close()
        clients = [site.open(socket=path) for _ in range(2)]
        loaders = [
            helios.NumpyLoader(c, [4, 3], rank=r, world_size=2, **options)
            for r, c in enumerate(clients)
        ]
        seen: list[int] = []
        threads = [threading.Thread(target=epoch, args=(loader, seen)) for loader in loaders]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        together = max(loader.bytes_ssd for loader in loaders)
        for c in clients:
            c.close()
    print(f"one loader {alone} bytes, two ranks of a job {together}, each alone {each}")
    assert sum(seen) == rows
    assert 0 < together < 1.05 * alone
    assert together <= sum(each)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(site):
    """By the socket's mode, and by the daemon where that lets everybody in."""
    with tempfile.TemporaryDirectory() as folder, serving(site, f"{folder}/s") as (path, _):
        Path(folder).chmod(0o755)
        for mode, kind, said in (
            (0o600, helios.UsageError, "Permission denied"),
            (0o666, helios.RefusedError, "user"),
        ):
            if mode != 0o600:
                path.chmod(mode)
            assert path.stat().st_mode & 0o777 == mode
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                    helios.open(site.dataset, socket=path)
                except Exception as e:
                    os.write(write, f"{type(e).__name__} {e}".encode())
                finally:
                    os._exit(0)
            os.close(write)
            with os.fdopen(read, "rb") as f:
                answer = f.read().decode()
            os.waitpid(child, 0)
            assert answer.startswith(kind.__name__), answer
            assert said in answer


def test_random_kills(site, arrays):
    """100 kills, of clients and of their daemon: the next ones find all as it was."""
    rng = random.Random(1)
    code = (
        "import helios, sys\n"
        "ds = helios.open(sys.argv[1], binary=sys.argv[2])\n"
        "l = helios.NumpyLoader(ds, [4, 3], batch_size=50)\n"
        "print(ds.session()[0].daemon_pid, flush=True)\n"
        "while True:\n"
        "    for b in l: pass\n"
    )
    killed = {"client": 0, "daemon": 0}
    for _ in range(100 if WIDE else 4):
        command = [sys.executable, "-c", code, str(site.dataset), site.binary]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as c:
            pid = int(c.stdout.readline())
            threading.Event().wait(rng.random() / 10)
            if rng.random() < 0.3:
                os.kill(pid, signal.SIGKILL)
                assert f"(process {pid}) was killed" in c.communicate(timeout=60)[1].decode()
                killed["daemon"] += 1
            else:
                c.kill()
                c.communicate()
                killed["client"] += 1
        with site.open() as ds:
            for b in helios.NumpyLoader(ds, [4, 3], batch_size=300):
                assert np.array_equal(b.x, arrays["features"][b.n_id])
            now = ds.session()[0].daemon_pid
            fds = len(os.listdir(f"/proc/{now}/fd"))
            assert fds < 40, "descriptors of clients that are gone"
    print(killed)
    assert min(killed.values()) > (5 if WIDE else 0)
