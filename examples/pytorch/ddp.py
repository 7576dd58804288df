"""GraphSAGE, GAT, GATv2 or a jumping-knowledge network, by any number of processes.

    torchrun --nproc-per-node 2 --max-restarts 3 ddp.py DATASET

A step of the optimiser is of --step-batches mini-batches, whoever makes them: losses are the same
with each number of processes that divides it, to the rounding of sums. With --checkpoint FILE the
same command goes on behind the last step that was saved, with another number of processes too.
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GATConv, GATv2Conv, JumpingKnowledge, SAGEConv

import helios

CONVS = {
    "sage": SAGEConv,
    "gat": lambda a, b: GATConv(a, b, heads=2, concat=False),
    "gatv2": lambda a, b: GATv2Conv(a, b, heads=2, concat=False),
    "jk": SAGEConv,
}


class Model(torch.nn.Module):
    def __init__(self, kind: str, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        jk = kind == "jk"
        sizes = [features, hidden, hidden if jk else classes]
        self.convs = torch.nn.ModuleList(map(CONVS[kind], sizes, sizes[1:]))
        self.jump = JumpingKnowledge("cat") if jk else None
        self.out = torch.nn.Linear(2 * hidden, classes) if jk else torch.nn.Identity()

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        first = self.convs[0](x, edge_index).relu()
        second = self.convs[1](F.dropout(first, 0.2, self.training), edge_index)
        return self.out(second if self.jump is None else self.jump([first, second.relu()]))


def loss_of(model: torch.nn.Module, part: helios.Part, features: int, device: torch.device):
    """Returns the mean loss of a part's seeds, or 0 where it has no batch."""
    if part.batch is None:  # all processes take part in each sum of gradients
        nothing = torch.zeros(1, features, device=device), torch.zeros(2, 0, device=device).long()
        return 0 * model(*nothing).sum()
    batch = part.batch.to(device)
    torch.manual_seed(batch.index)  # the same dropout in whichever process
    out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
    return F.cross_entropy(out, batch.y[: batch.batch_size].flatten())


def sum_of(total: torch.Tensor) -> torch.Tensor:
    total = total.clone()
    dist.all_reduce(total)
    return total


p = argparse.ArgumentParser(description=__doc__)
p.add_argument("dataset")
p.add_argument("--socket", help="of a daemon that runs; else your own is joined or started")
p.add_argument("--model", choices=list(CONVS), default="sage")
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--batch-size", type=int, default=256)
p.add_argument("--step-batches", type=int, default=4)
p.add_argument("--checkpoint")
p.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
a = p.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
with helios.open(a.dataset, socket=a.socket) as dataset:
    loader = helios.NeighborLoader(
        dataset,
        [5, 5],
        split="train",
        shuffle=True,
        batch_size=a.batch_size,
        seed=1,
        rank=rank,
        world_size=world,
    )
    torch.manual_seed(1)
    model = Model(a.model, dataset.num_features, 32, dataset.num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    total = torch.zeros(1, device=device)  # losses of this process's seeds in the epoch
    steps = 0
    if a.checkpoint and Path(a.checkpoint).exists():
        state = torch.load(a.checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        if rank == 0:
            total += state["total"]
            print(f"going on at batch {loader.next_batch} of epoch {loader.epoch + 1}", flush=True)
    ddp = DistributedDataParallel(model)
    while loader.epoch < a.epochs:
        epoch = loader.epoch
        for part in helios.steps(loader, a.step_batches):
            with contextlib.nullcontext() if part.last else ddp.no_sync():
                loss = loss_of(ddp, part, dataset.num_features, device)
                (part.weight * loss).backward()
            if part.batch is not None:
                total += loss.detach() * part.batch.batch_size
            if not part.last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if a.checkpoint and steps % a.save_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"loader": loader.state_dict(), "total": sum_of(total)}
                if rank == 0:
                    torch.save(state, f"{a.checkpoint}.new")
                    Path(f"{a.checkpoint}.new").replace(a.checkpoint)
        # A name of its own: were Gloo's thread the last one that has the tensor, and Python at its
        # end, the process would abort (pytorch/pytorch#179291).
        loss_sum = sum_of(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss_sum.item() / loader.num_seeds:.6f}", flush=True)
        total.zero_()
dist.destroy_process_group()
