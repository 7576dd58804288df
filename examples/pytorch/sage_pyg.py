"""GraphSAGE of PyG on mini-batches of heliosctl: python sage_pyg.py DATASET.

DATASET is a folder whose rows `heliosctl load` has put on the bound SSDs.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv

import helios


class SAGE(torch.nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = SAGEConv(features, hidden)
        self.second = SAGEConv(hidden, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


p = argparse.ArgumentParser(description=__doc__)
p.add_argument("dataset")
p.add_argument("--socket", help="of a daemon that runs; else your own is joined or started")
p.add_argument("--epochs", type=int, default=5)
p.add_argument("--batch-size", type=int, default=1024)
a = p.parse_args()

torch.manual_seed(1)
with helios.open(a.dataset, socket=a.socket) as dataset:
    train = helios.NeighborLoader(
        dataset, [10, 10], dataset.train_mask, batch_size=a.batch_size, shuffle=True
    )
    test = helios.NeighborLoader(dataset, [10, 10], dataset.test_mask, batch_size=a.batch_size)
    model = SAGE(dataset.num_features, 64, dataset.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(a.epochs):
        model.train()
        total = 0.0
        for batch in train:
            out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * batch.batch_size
        print(f"epoch {epoch + 1}: loss {total / dataset.splits['train']:.4f}")
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test:
            out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
            right += int((out.argmax(1) == batch.y[: batch.batch_size].flatten()).sum())
    print(f"test accuracy {right / dataset.splits['test']:.4f}")
