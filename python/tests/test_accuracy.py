"""GraphSAGE of PyG trained with our loader, beside the same model trained in memory."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import helios

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
SAGEConv = pytest.importorskip("torch_geometric.nn", reason="PyG is not installed").SAGEConv
F = torch.nn.functional

DATA = Path(os.environ.get("HELIOS_TESTDATA") or "nowhere") / "citeseer"
WIDE = os.environ.get("HELIOS_WIDE") == "1"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pytorch"
# PyG's own NeighborLoader, where one of the packages is installed that it needs.
SAMPLES = any(importlib.util.find_spec(n) is not None for n in ("pyg_lib", "torch_sparse"))


class SAGE(torch.nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(features, hidden), SAGEConv(hidden, classes)])

    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index).relu()
        return self.convs[1](F.dropout(x, 0.5, self.training), edge_index)


@pytest.fixture(scope="module")
def bound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accuracy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIOS_STATE", str(folder / "state"))
        yield folder


def laid_out(folder, dataset, binary, size):
    helios.run("bind-ssds", f"--proxy={folder / (dataset.name + '.img')}", f"--size={size}",
               binary=binary)  # fmt: skip
    helios.run("load", dataset, binary=binary)


@pytest.fixture(scope="module")
def citeseer(bound, binary):
    if not DATA.is_dir():
        pytest.skip("HELIOS_TESTDATA names no folder with citeseer")
    out = bound / "citeseer"
    helios.run("import", "planetoid", f"--in={DATA}", f"--out={out}", "--normalize-features=row",
               binary=binary)  # fmt: skip
    laid_out(bound, out, binary, "128MiB")
    with helios.open(out, binary=binary) as ds:
        yield ds, in_memory(out)


def in_memory(folder):
    """The dataset as one Data of PyG."""
    from torch_geometric.data import Data

    indptr, indices = np.load(folder / "indptr.npy"), np.load(folder / "indices.npy")
    dst = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr.astype(np.int64)))
    data = Data(
        x=torch.from_numpy(np.load(folder / "features.npy")),
        y=torch.from_numpy(np.load(folder / "labels.npy").astype(np.int64)),
        edge_index=torch.from_numpy(np.stack([indices.astype(np.int64), dst])),
    )
    for split in ("train", "val", "test"):
        data[split] = torch.from_numpy(np.load(folder / f"{split}.npy").astype(np.int64))
    return data


def test_whole_neighbourhoods_give_the_whole_graphs_output(citeseer):
    """With all neighbours, a batch's seeds get what the layer gives on the whole graph."""
    ds, data = citeseer
    torch.manual_seed(0)
    model = SAGE(ds.num_features, 16, ds.num_classes).eval()
    with torch.no_grad():
        want = model(data.x, data.edge_index)
        seen = []
        for batch in helios.NeighborLoader(ds, [-1, -1], batch_size=200, split="test"):
            nodes = batch.n_id[: batch.batch_size]
            got = model(batch.x, batch.edge_index)[: batch.batch_size]
            assert torch.allclose(got, want[nodes], atol=1e-5)
            h = batch.x
            for layer, (edges, size) in enumerate(helios.adjs(batch)):
                h = model.convs[layer]((h, h[: size[1]]), edges)
                h = h.relu() if layer == 0 else h
            assert torch.allclose(h, want[nodes], atol=1e-5)
            seen += nodes.tolist()
    assert seen == data.test.tolist()


def train(make_loader, ds, data, seed, epochs):
    torch.manual_seed(seed)
    model = SAGE(ds.num_features, 32, ds.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    loader = make_loader(seed)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(1) == data.y
    return right[data.test].float().mean().item()


def whole_neighbourhood(data):
    """The training nodes first, and all that two layers see of the graph from them."""
    from torch_geometric.utils import k_hop_subgraph

    nodes, edges, _, _ = k_hop_subgraph(data.train, 2, data.edge_index)
    order = torch.cat([data.train, nodes[~torch.isin(nodes, data.train)]])
    place = torch.empty(data.num_nodes, dtype=torch.int64)
    place[order] = torch.arange(len(order))
    return SimpleNamespace(
        x=data.x[order],
        y=data.y[data.train],
        edge_index=place[edges],
        batch_size=len(data.train),
    )


def compared(ds, data, epochs, batch_size, **options):
    """Prints and returns the mean test accuracies over seeds: of our loader, and in memory."""
    seeds = range(5 if WIDE else 2)
    whole = [whole_neighbourhood(data)] * 4

    def ours(seed):
        return helios.NeighborLoader(
            ds,
            [10, 5],
            input_nodes=data.train,
            batch_size=batch_size,
            shuffle=True,
            seed=seed,
            **options,
        )

    def theirs(seed):
        if not SAMPLES:
            return whole
        from torch_geometric.loader import NeighborLoader

        more = {"input_nodes": data.train, "shuffle": True}
        return NeighborLoader(data, [10, 5], batch_size=batch_size, **more)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several wait for each other
    got = {f.__name__: [train(f, ds, data, s, epochs) for s in seeds] for f in (ours, theirs)}
    torch.set_num_threads(threads)
    mean = {k: float(np.mean(v)) for k, v in got.items()}
    by = "NeighborLoader" if SAMPLES else "whole neighbourhoods"
    print(f"{ds.name}, test accuracy: ours {mean['ours']:.4f}, {by} {mean['theirs']:.4f}; {got}")
    return mean["ours"], mean["theirs"]


def test_accuracy(citeseer):
    """Over seeds as good as in memory: PyG's own NeighborLoader, or whole neighbourhoods."""
    ours, theirs = compared(*citeseer, epochs=15, batch_size=32, mode="inmem")
    assert ours > 0.62
    assert abs(ours - theirs) < 0.03


@pytest.mark.skipif(not (WIDE and SAMPLES), reason="HELIOS_WIDE=1 and PyG's own sampler")
def test_accuracy_of_debians_packages(tmp_path, binary, monkeypatch):
    """Out of core: a tenth of the rows is cached."""
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    out = tmp_path / "debian"
    try:
        helios.run("import", "debian", f"--out={out}", binary=binary)
    except helios.HeliosError as e:
        pytest.skip(f"this machine has no index of packages: {e}")
    laid_out(tmp_path, out, binary, "256MiB")
    caches = {"gpu_cache": "5%", "cpu_cache": "5%"}
    with helios.open(out, binary=binary) as ds:
        ours, theirs = compared(ds, in_memory(out), epochs=3, batch_size=1024, **caches)
    assert ours > 0.6
    assert abs(ours - theirs) < 0.02


def test_stores(citeseer):
    """PyG's own loader on our stores: rows, labels, edges; edges' features refused by name."""
    from torch_geometric.loader import NeighborLoader, NodeLoader
    from torch_geometric.sampler import BaseSampler, SamplerOutput

    import helios.pyg

    ds, data = citeseer
    features, graph = helios.pyg.stores(ds)
    nodes = torch.tensor([7, 3, 7, 3000, 0])
    assert torch.equal(features.get_tensor(None, "x", index=nodes), data.x[nodes])
    assert torch.equal(features.get_tensor(None, "y", index=nodes), data.y[nodes])
    assert torch.equal(features.get_tensor(None, "x", index=slice(5, 9)), data.x[5:9])
    assert features.get_tensor(None, "x", index=nodes[:0]).shape == (0, ds.num_features)
    assert features.get_tensor_size(None, "x") == tuple(data.x.shape)
    for wrong in ((None, "edge_attr"), (("a", "to", "b"), "x"), (None, "z"), ("paper", "x")):
        with pytest.raises(helios.UsageError, match=wrong[1]):
            features.get_tensor(*wrong, index=nodes)
    with pytest.raises(helios.UsageError, match="0 to"):
        features.get_tensor(None, "x", index=nodes - 1)
    with pytest.raises(helios.UsageError, match=r"helios\.save"):
        features.put_tensor(data.x, None, "x", index=None)
    row, colptr = graph.get_edge_index(graph.get_all_edge_attrs()[0])
    dst = torch.arange(ds.num_nodes).repeat_interleave(colptr[1:] - colptr[:-1])
    assert torch.equal(torch.stack([row, dst]), data.edge_index)

    class Neighbours(BaseSampler):
        def sample_from_nodes(self, index, **_):
            keep = torch.isin(dst, index.node)
            more = row[keep][~torch.isin(row[keep], index.node)].unique()
            node = torch.cat([index.node, more])
            place = torch.full((ds.num_nodes,), -1)
            place[node] = torch.arange(len(node))
            edges = place[row[keep]], place[dst[keep]]
            out = SamplerOutput(node=node, row=edges[0], col=edges[1], edge=None, batch=None)
            out.metadata = (index.input_id, index.time)
            return out

        def sample_from_edges(self, index, **_):
            raise NotImplementedError

        @property
        def edge_permutation(self):
            return None

    loaders = [NodeLoader((features, graph), Neighbours(), input_nodes=data.train, batch_size=50)]
    if SAMPLES:
        more = {"input_nodes": data.train, "batch_size": 50}
        loaders.append(NeighborLoader((features, graph), [5, 5], **more))
    edges = set(zip(*data.edge_index.tolist(), strict=True))
    for loader in loaders:
        seeds = []
        for batch in loader:
            assert torch.equal(batch.x, data.x[batch.n_id])
            assert torch.equal(batch.y, data.y[batch.n_id])
            assert edges.issuperset(zip(*batch.n_id[batch.edge_index].tolist(), strict=True))
            seeds += batch.n_id[: batch.batch_size].tolist()
        assert seeds == data.train.tolist()


def parameters(file):
    """The float32 tensors of a safetensors file, by name."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    out = {}
    for name, t in json.loads(data[8:begin]).items():
        if t.get("dtype") == "F32":
            first, end = (begin + n for n in t["data_offsets"])
            out[name] = torch.frombuffer(bytearray(data[first:end]), dtype=torch.float32)
            out[name] = out[name].view(t["shape"])
    return out


def test_losses_are_those_of_train(tmp_path, binary, monkeypatch):
    """PyG's SAGE on our batches, from heliosctl's initial parameters: three epochs as its own."""
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    graph = tmp_path / "parity"
    helios.run("generate", "--nodes=4000", "--dim=32", "--classes=6", f"--out={graph}",
               binary=binary)  # fmt: skip
    laid_out(tmp_path, graph, binary, "32MiB")
    options = {"fanout": [6, 4], "batch_size": 200, "hidden": 16, "seed": 7, "quiet": True}
    # A step of no size leaves the initial parameters in the checkpoint.
    helios.train(
        graph, binary=binary, epochs=1, lr=1e-38, checkpoint=tmp_path / "initial", **options
    )
    initial = parameters(tmp_path / "initial" / "checkpoint.safetensors")
    want = [e["loss"] for e in helios.train(graph, binary=binary, epochs=3, **options)["epochs"]]
    with helios.open(graph, binary=binary) as ds:
        model = SAGE(ds.num_features, 16, ds.num_classes)
        with torch.no_grad():
            for i, conv in enumerate(model.convs):
                at = f"model.layer{i}."
                conv.lin_r.weight.copy_(initial[at + "self.weight"].T)
                conv.lin_l.weight.copy_(initial[at + "neigh.weight"].T)
                conv.lin_l.bias.copy_(initial[at + "bias"][0])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        loader = helios.NeighborLoader(
            ds, [6, 4], split="train", batch_size=200, shuffle=True, seed=7
        )
        got = []
        for _ in range(3):
            total = 0.0
            for batch in loader:
                h = batch.x
                for layer, (edges, size) in enumerate(helios.adjs(batch)):
                    h = model.convs[layer]((h, h[: size[1]]), edges)
                    h = h.relu() if layer == 0 else h
                loss = F.cross_entropy(h, batch.y[: batch.batch_size])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * batch.batch_size
            got.append(total / ds.splits["train"])
    print(
        f"losses: PyG {got}, heliosctl train {want}, apart {np.abs(np.subtract(got, want)).max()}"
    )
    assert want[2] < 0.9 * want[0]
    assert got == pytest.approx(want, abs=1e-4)


def test_the_tour(tmp_path, binary, monkeypatch, capsys):
    """Prints what its lines # > say."""
    monkeypatch.setenv("HELIOSCTL", binary)
    monkeypatch.setenv("HELIOS_STATE", "set by the tour")
    monkeypatch.setattr("sys.argv", ["tour.py", str(tmp_path)])
    lines = (EXAMPLES / "tour.py").read_text().splitlines()
    runpy.run_path(str(EXAMPLES / "tour.py"), run_name="__main__")
    want = [line.removeprefix("# > ") for line in lines if line.startswith("# > ")]
    assert capsys.readouterr().out.splitlines() == want


@pytest.fixture
def made_graph(tmp_path, binary, monkeypatch):
    out = tmp_path / "g"
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    helios.run("generate", "--nodes=2000", "--dim=16", "--classes=4", f"--out={out}", binary=binary)
    monkeypatch.setenv("HELIOSCTL", binary)
    return out


FRAMEWORKS = [
    ("lightning", "lightning_sage.py", r"test accuracy 0\.[6-9]"),
    (
        "torchdata.stateful_dataloader",
        "workers.py",
        "epoch 1: 19 batches; stopped after 3, then 16",
    ),
    ("ray.train", "ray_sage.py", r"train accuracy 0\.[6-9].* in 5 batches a rank"),
]


@pytest.mark.parametrize(("package", "name", "said"), FRAMEWORKS, ids=[f[0] for f in FRAMEWORKS])
def test_examples_of_frameworks(made_graph, package, name, said):
    """In a process of their own; without SSDs, since workers and ranks have daemons of theirs."""
    pytest.importorskip(package, reason=f"no {package}")
    more = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / name), str(made_graph)],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(said, done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("name", ["sage_pyg.py", "sage_torch.py", "neighbor_helios.py"])
def test_examples(tmp_path, made_graph, binary, monkeypatch, capsys, name):
    out = made_graph
    laid_out(tmp_path, out, binary, "32MiB")
    more = [] if name == "neighbor_helios.py" else ["--epochs", "4", "--batch-size", "256"]
    monkeypatch.setattr("sys.argv", [name, str(out), *more])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5
    last = float(said[-1].rsplit(" ", 1)[1])
    if more:
        assert last > 0.5, said
    else:
        assert last < 0.7 * float(said[0].rsplit(" ", 1)[1]), said


def test_demo(binary, monkeypatch, capsys):
    monkeypatch.setenv("HELIOSCTL", binary)
    monkeypatch.setattr("sys.argv", ["helios.demo", "--graph", "made", "--nodes", "5000"])
    runpy.run_module("helios.demo", run_name="__main__")
    said = capsys.readouterr().out
    assert "test accuracy" in said
