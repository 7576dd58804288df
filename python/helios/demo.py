"""``python -m helios.demo``: a graph on a file that plays an SSD, and its training.

The nodes are Debian's packages, where this machine has their index, and else made up. A tenth of
the rows fits into the caches; all others are read. PyG's GraphSAGE learns the packages' sections;
without PyG the batches are counted. Everything lies in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helios

CACHES: dict[str, Any] = {"gpu_cache": "5%", "cpu_cache": "5%"}


def main() -> None:
    """Runs the demonstration."""
    p = argparse.ArgumentParser(prog="python -m helios.demo", description=__doc__)
    p.add_argument("--graph", choices=["auto", "debian", "made"], default="auto")
    p.add_argument("--nodes", type=int, default=20_000, help="of the graph that is made up")
    p.add_argument("--epochs", type=int, default=1)
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="helios-demo-") as folder:
        before = os.environ.get("HELIOS_STATE")
        os.environ["HELIOS_STATE"] = f"{folder}/state"
        try:
            _demo(Path(folder), a.graph, a.nodes, a.epochs)
        finally:
            if before is None:
                del os.environ["HELIOS_STATE"]
            else:
                os.environ["HELIOS_STATE"] = before


def _demo(folder: Path, kind: str, nodes: int, epochs: int) -> None:
    graph = folder / "graph"
    _make(graph, kind, nodes)
    size = (graph / "features.npy").stat().st_size * 2 + (32 << 20)
    helios.run("bind-ssds", f"--proxy={folder / 'ssd.img'}", f"--size={size >> 20}MiB")
    helios.run("load", graph)
    with helios.open(graph) as dataset:
        print(dataset)
        try:
            from torch_geometric.nn import SAGEConv
        except ImportError:
            print("PyG is not installed, so batches are counted: pip install torch torch_geometric")
            _count(dataset, epochs)
        else:
            _train(dataset, SAGEConv, epochs)


def _make(graph: Path, kind: str, nodes: int) -> None:
    if kind != "made":
        try:
            helios.run("import", "debian", f"--out={graph}")
        except helios.HeliosError:
            if kind == "debian":
                raise
        else:
            print("Debian's packages, their dependencies, and the words of their descriptions")
            return
    print(f"a graph of {nodes} nodes that is made up")
    helios.run("generate", f"--nodes={nodes}", "--dim=64", "--classes=8", f"--out={graph}")


def _count(dataset: helios.Dataset, epochs: int) -> None:
    loader = helios.NumpyLoader(dataset, [5, 5], batch_size=512, **CACHES)
    for epoch in range(epochs):
        began, rows = time.perf_counter(), 0
        for batch in loader:
            rows += len(batch.n_id)
        took = time.perf_counter() - began
        print(f"epoch {epoch + 1}: {len(loader)} batches, {rows} rows in {took:.2f} s")


def _train(dataset: helios.Dataset, conv: Callable[..., Any], epochs: int) -> None:
    import torch

    torch.manual_seed(1)
    sizes = [dataset.num_features, 128, dataset.num_classes]
    layers = torch.nn.ModuleList([conv(a, b) for a, b in zip(sizes, sizes[1:], strict=False)])

    def seeds(batch: Any) -> torch.Tensor:
        h = layers[0](batch.x, batch.edge_index).relu()
        h = torch.nn.functional.dropout(h, 0.5, layers.training)
        return layers[1](h, batch.edge_index)[: batch.batch_size]

    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    loader = helios.NeighborLoader(
        dataset, [5, 5], split="train", shuffle=True, seed=1, batch_size=512, **CACHES
    )
    for epoch in range(epochs):
        began, total = time.perf_counter(), 0.0
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(seeds(batch), batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        took = time.perf_counter() - began
        print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}, {took:.2f} s")
    right = 0
    layers.eval()
    with torch.no_grad():
        for batch in helios.NeighborLoader(dataset, [5, 5], batch_size=512, split="test", **CACHES):
            right += int((seeds(batch).argmax(1) == batch.y[: batch.batch_size]).sum())
    print(f"test accuracy {right / dataset.splits['test']:.4f}")


if __name__ == "__main__":
    main()
