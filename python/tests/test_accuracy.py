"""GraphSAGE of PyG trained with our loader, beside the same model trained in memory."""

from __future__ import annotations

import importlib.util
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import helios

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
SAGEConv = pytest.importorskip("torch_geometric.nn", reason="PyG is not installed").SAGEConv
F = torch.nn.functional

DATA = Path(os.environ.get("HELIOS_TESTDATA") or "nowhere") / "citeseer"
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


def test_accuracy(citeseer):
    """Over seeds as good as in memory: PyG's own NeighborLoader, or whole neighbourhoods."""
    ds, data = citeseer
    seeds = range(5 if os.environ.get("HELIOS_WIDE") == "1" else 2)
    whole = [whole_neighbourhood(data)] * 4

    def ours(seed):
        return helios.NeighborLoader(ds, [10, 5], batch_size=32, seed=seed, mode="inmem")

    def theirs(seed):
        if not SAMPLES:
            return whole
        from torch_geometric.loader import NeighborLoader

        return NeighborLoader(data, [10, 5], batch_size=32, input_nodes=data.train, shuffle=True)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several wait for each other
    got = {f.__name__: [train(f, ds, data, s, 15) for s in seeds] for f in (ours, theirs)}
    torch.set_num_threads(threads)
    mean = {k: float(np.mean(v)) for k, v in got.items()}
    by = "NeighborLoader" if SAMPLES else "whole neighbourhoods"
    print(f"CiteSeer, test accuracy: ours {mean['ours']:.4f}, {by} {mean['theirs']:.4f}; {got}")
    assert mean["ours"] > 0.62, got
    assert abs(mean["ours"] - mean["theirs"]) < 0.03, got


@pytest.mark.parametrize("name", ["sage_pyg.py", "sage_torch.py"])
def test_examples(tmp_path, binary, monkeypatch, capsys, name):
    out = tmp_path / "g"
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    helios.run("generate", "--nodes=2000", "--dim=16", "--classes=4", f"--out={out}", binary=binary)
    laid_out(tmp_path, out, binary, "32MiB")
    monkeypatch.setenv("HELIOSCTL", binary)
    monkeypatch.setattr("sys.argv", [name, str(out), "--epochs", "4", "--batch-size", "256"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5
    assert float(said[-1].rsplit(" ", 1)[1]) > 0.5, said


def test_demo(binary, monkeypatch, capsys):
    monkeypatch.setenv("HELIOSCTL", binary)
    monkeypatch.setattr("sys.argv", ["helios.demo"])
    runpy.run_module("helios.demo", run_name="__main__")
    said = capsys.readouterr().out
    assert "test accuracy" in said
