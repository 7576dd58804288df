"""GraphSAGE in plain PyTorch on mini-batches of heliosctl: python sage_torch.py DATASET.

DATASET is a folder whose rows `heliosctl load` has put on the bound SSDs.
"""

import argparse

import torch
import torch.nn.functional as F

import helios.torch


class Layer(torch.nn.Module):
    """A node's own features and the mean of its sampled neighbours', each through a matrix."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.own = torch.nn.Linear(features, out)
        self.neighbours = torch.nn.Linear(features, out, bias=False)

    def forward(self, x: torch.Tensor, block: helios.Block) -> torch.Tensor:
        sums = torch.segment_reduce(x[block.src], "mean", offsets=block.indptr, initial=0)
        return self.own(x[: block.num_dst]) + self.neighbours(sums)


class SAGE(torch.nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(map(Layer, sizes, sizes[1:]))

    def forward(self, batch: helios.Batch) -> torch.Tensor:
        x = batch.x.float()
        # The outermost hop first: each layer leaves the nodes that the next one needs.
        for i, (layer, block) in enumerate(zip(self.layers, reversed(batch.blocks), strict=True)):
            x = layer(x.relu() if i else x, block)
        return x


p = argparse.ArgumentParser(description=__doc__)
p.add_argument("dataset")
p.add_argument("--socket", help="of a daemon that runs; else your own is joined or started")
p.add_argument("--epochs", type=int, default=5)
p.add_argument("--batch-size", type=int, default=1024)
a = p.parse_args()

torch.manual_seed(1)
with helios.open(a.dataset, socket=a.socket) as dataset:
    train = helios.torch.Loader(dataset, [10, 10], batch_size=a.batch_size)
    test = helios.torch.Loader(dataset, [10, 10], batch_size=a.batch_size, split="test")
    model = SAGE([dataset.num_features, 64, dataset.num_classes])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(a.epochs):
        total = 0.0
        for batch in train:
            loss = F.cross_entropy(model(batch), batch.y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * batch.num_seeds
        print(f"epoch {epoch + 1}: loss {total / dataset.splits['train']:.4f}")
    right = 0
    with torch.no_grad():
        for batch in test:
            right += int((model(batch).argmax(1) == batch.y.flatten()).sum())
    print(f"test accuracy {right / dataset.splits['test']:.4f}")
