"""GraphSAGE on sampled neighbours, with the features on SSDs.

python neighbor_helios.py DATASET: a folder whose rows `heliosctl load` has put on the bound SSDs.
With all features in memory: neighbor_memory.py, which differs in three lines.
"""

import sys

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import helios
from helios.loader import NeighborLoader

data = helios.open(sys.argv[1])
loader = NeighborLoader(data, [10, 5], batch_size=256, input_nodes=data.train_mask, shuffle=True)

torch.manual_seed(1)
model = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=int(data.y.max()) + 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(5):
    total = 0.0
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}")
