"""``python -m helios.demo``: a graph from nothing, on a file that plays an SSD, and its training.

Everything lies in a temporary folder. With PyTorch it trains GraphSAGE; without, it counts batches.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import helios


def main() -> None:
    """Runs the demonstration."""
    p = argparse.ArgumentParser(prog="python -m helios.demo", description=__doc__)
    p.add_argument("--nodes", type=int, default=20_000)
    p.add_argument("--epochs", type=int, default=3)
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="helios-demo-") as folder:
        before = os.environ.get("HELIOS_STATE")
        os.environ["HELIOS_STATE"] = f"{folder}/state"
        try:
            _demo(Path(folder), a.nodes, a.epochs)
        finally:
            if before is None:
                del os.environ["HELIOS_STATE"]
            else:
                os.environ["HELIOS_STATE"] = before


def _demo(folder: Path, nodes: int, epochs: int) -> None:
    graph = folder / "graph"
    print(f"a graph of {nodes} nodes, its features on a file that plays an SSD")
    helios.run("generate", f"--nodes={nodes}", "--dim=64", "--classes=8", f"--out={graph}")
    size = 32 + nodes * 1024 // (1 << 20)
    helios.run("bind-ssds", f"--proxy={folder / 'ssd.img'}", f"--size={size}MiB")
    helios.run("load", graph)
    with helios.open(graph) as dataset:
        print(dataset)
        try:
            _train(dataset, epochs)
        except helios.CapabilityError as e:
            print(e)
            _count(dataset, epochs)


def _count(dataset: helios.Dataset, epochs: int) -> None:
    loader = helios.NumpyLoader(dataset, [10, 10], batch_size=512)
    for epoch in range(epochs):
        began, rows = time.perf_counter(), 0
        for batch in loader:
            rows += len(batch.n_id)
        took = time.perf_counter() - began
        print(f"epoch {epoch + 1}: {len(loader)} batches, {rows} rows in {took:.2f} s")


def _train(dataset: helios.Dataset, epochs: int) -> None:
    import helios.torch  # before PyTorch: it says what lacks

    import torch  # isort: skip

    torch.manual_seed(1)
    sizes = [dataset.num_features, 64, dataset.num_classes]
    own = [torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
    mean = [torch.nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False)]

    def forward(batch: helios.Batch) -> torch.Tensor:
        x = batch.x.float()
        for i, block in enumerate(reversed(batch.blocks)):
            m = torch.segment_reduce(x[block.src], "mean", offsets=block.indptr, initial=0)
            x = own[i](x[: block.num_dst]) + mean[i](m)
            x = x.relu() if i + 1 < len(own) else x
        return x

    optimizer = torch.optim.Adam([w for m in own + mean for w in m.parameters()], lr=0.01)
    loader = helios.torch.Loader(dataset, [10, 10], batch_size=512)
    for epoch in range(epochs):
        began, total = time.perf_counter(), 0.0
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(forward(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        took = time.perf_counter() - began
        print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}, {took:.2f} s")
    right = 0
    with torch.no_grad():
        for batch in helios.torch.Loader(dataset, [10, 10], batch_size=512, split="test"):
            right += int((forward(batch).argmax(1) == batch.y).sum())
    print(f"test accuracy {right / dataset.splits['test']:.4f}")


if __name__ == "__main__":
    main()
