"""GraphSAGE of PyG by two workers of Ray Train: python ray_sage.py DATASET.

Each worker's loader has its rank, as a DistributedSampler would; all get as many batches.
"""

import sys
import tempfile

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GraphSAGE

import helios


def train(config: dict) -> None:
    context = ray.train.get_context()
    torch.manual_seed(1)
    with helios.open(config["dataset"]) as dataset:
        ranks = {"rank": context.get_world_rank(), "world_size": context.get_world_size()}
        loader = helios.NeighborLoader(
            dataset, [10, 10], split="train", batch_size=128, shuffle=True, seed=1, **ranks
        )
        model = GraphSAGE(dataset.num_features, 64, 2, dataset.num_classes)
        model = ray.train.torch.prepare_model(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(config["epochs"]):
            loader.set_epoch(epoch)
            right = seeds = 0
            for batch in loader:
                n = batch.batch_size
                out, y = model(batch.x.float(), batch.edge_index)[:n], batch.y[:n].flatten()
                optimizer.zero_grad()
                cross_entropy(out, y).backward()
                optimizer.step()
                right, seeds = right + int((out.argmax(1) == y).sum()), seeds + n
            metrics = {"train_acc": right / seeds, "batches": len(loader)}
            with tempfile.TemporaryDirectory() as folder:
                # Where to go on: load_state_dict takes the loader's state, of any rank.
                torch.save((model.state_dict(), loader.state_dict()), f"{folder}/state.pt")
                kept = Checkpoint.from_directory(folder) if ranks["rank"] == 0 else None
                ray.train.report(metrics, checkpoint=kept)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"dataset": sys.argv[1], "epochs": 5},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )
    metrics = trainer.fit().metrics
    ray.shutdown()
    print(f"train accuracy {metrics['train_acc']:.4f} in {metrics['batches']} batches a rank")
