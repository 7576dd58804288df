"""A tour of the package, in cells (# %%) for an editor that runs them. Lines "# >" are its output.

python tour.py FOLDER: an empty folder for a graph and a file that plays an SSD.
"""

# %% Make a dataset of arrays: a ring of 600 nodes, whose features tell their place
import os
import sys

import numpy as np
import torch
from torch_geometric.nn import SAGEConv

import helios
import helios.pyg

folder = sys.argv[1]
os.environ["HELIOS_STATE"] = f"{folder}/state"  # the SSDs that are bound, for this tour alone
n = 600
at = np.arange(n)
x = np.stack([np.sin(2 * np.pi * at / n), np.cos(2 * np.pi * at / n)], axis=1).astype(np.float32)
edges = np.stack([at, (at + 1) % n])
splits = {"train": at[at % 2 == 0], "val": at[at % 4 == 1], "test": at[at % 4 == 3]}
helios.save(f"{folder}/ring", x, edges, at * 3 // n, splits, undirected=True)

# %% Put its rows on an SSD: here a file
helios.run("bind-ssds", f"--proxy={folder}/ssd.img", "--size=16MiB")
helios.run("load", f"{folder}/ring")

# %% Open it: a daemon starts
dataset = helios.open(f"{folder}/ring")
print(dataset, dataset.splits)
# > <helios.Dataset ring: 600 nodes, 1200 edges, 2 features> {'test': 150, 'train': 300, 'val': 150}

# %% A mini-batch: the seeds first, then their neighbours, in shared memory
train = {"split": "train", "shuffle": True, "batch_size": 100, "seed": 1}
loader = helios.NeighborLoader(dataset, [2, 2], **train)
batch = next(iter(loader))
print(len(loader), batch.batch_size, batch.num_sampled_nodes[0], len(batch.y) == len(batch.x))
print(bool((batch.x == torch.from_numpy(x)[batch.n_id]).all()))
# > 3 100 100 True
# > True

# %% Train; each iteration is an epoch
torch.manual_seed(1)
layers = torch.nn.ModuleList([SAGEConv(2, 16), SAGEConv(16, 3)])
optimizer = torch.optim.Adam(layers.parameters(), lr=0.05)


def forward(batch):
    h = layers[0](batch.x, batch.edge_index).relu()
    return layers[1](h, batch.edge_index)[: batch.batch_size]


for _ in range(20):
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(forward(batch), batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("loss below 0.2:", loss.item() < 0.2)
# > loss below 0.2: True

# %% Test
test = helios.NeighborLoader(dataset, [2, 2], batch_size=100, split="test")
right = sum(int((forward(b).argmax(1) == b.y[: b.batch_size]).sum()) for b in test)
print("accuracy above 0.9:", right / dataset.splits["test"] > 0.9)
# > accuracy above 0.9: True

# %% Stop in an epoch, and go on behind the batch that you had
first = iter(loader)
seen = [next(first).index]
state = loader.state_dict()
again = helios.NeighborLoader(dataset, [2, 2], **train)
again.load_state_dict(state)
print(seen, [b.index for b in again])
# > [0] [1, 2]

# %% Rows by number, for a loader of your own
features, graph = helios.pyg.stores(dataset)
print(features.get_tensor(None, "x", index=torch.tensor([150, 0])).round(decimals=3).abs().tolist())
# > [[1.0, 0.0], [0.0, 1.0]]

# %% Mistakes are exceptions, by cause
try:
    helios.NeighborLoader(dataset, [2, 2], sampler="all")
except helios.UsageError as e:
    print("sampler" in str(e), e.code)
# > True 2

# %% The same training by heliosctl itself, once the daemon gives the SSD back
dataset.close()
result = helios.train(
    f"{folder}/ring", fanout=[2, 2], hidden=16, batch_size=100, epochs=20, lr=0.05
)
print(len(result["epochs"]), result["epochs"][-1]["val_acc"] > 0.9)
# > 20 True
