"""GraphSAGE of PyG by a Trainer and a DataModule of Lightning: python lightning_sage.py DATASET.

A DataModule keeps what it needs to open the dataset, and opens it in setup: in each process of a
strategy that has several, whose ranks then share an epoch.
"""

import sys

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GraphSAGE

import helios


class Graph(lightning.LightningDataModule):
    def __init__(self, path: str, batch_size: int = 256) -> None:
        super().__init__()
        self.path, self.batch_size = path, batch_size

    def setup(self, stage: str | None = None) -> None:
        self.dataset = helios.open(self.path)

    def loader(self, split: str) -> helios.NeighborLoader:
        return helios.NeighborLoader(
            self.dataset,
            [10, 10],
            split=split,
            batch_size=self.batch_size,
            shuffle=split == "train",
            seed=1,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )

    def train_dataloader(self) -> helios.NeighborLoader:
        return self.loader("train")

    def val_dataloader(self) -> helios.NeighborLoader:
        return self.loader("val")

    def test_dataloader(self) -> helios.NeighborLoader:
        return self.loader("test")

    def teardown(self, stage: str | None = None) -> None:
        self.dataset.close()


class Model(lightning.LightningModule):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.net = GraphSAGE(features, 64, num_layers=2, out_channels=classes)

    def step(self, batch, name: str) -> torch.Tensor:
        n = batch.batch_size
        out, y = self.net(batch.x.float(), batch.edge_index)[:n], batch.y[:n].flatten()
        self.log(name, (out.argmax(1) == y).float().mean(), batch_size=n)
        return cross_entropy(out, y)

    def training_step(self, batch, _) -> torch.Tensor:
        return self.step(batch, "train_acc")

    def validation_step(self, batch, _) -> torch.Tensor:
        return self.step(batch, "val_acc")

    def test_step(self, batch, _) -> torch.Tensor:
        return self.step(batch, "test_acc")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    lightning.seed_everything(1)
    with helios.open(sys.argv[1]) as dataset:
        model = Model(dataset.num_features, dataset.num_classes)
    trainer = lightning.Trainer(
        max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    graph = Graph(sys.argv[1])
    trainer.fit(model, graph)
    (result,) = trainer.test(model, graph, verbose=False)
    print(f"test accuracy {result['test_acc']:.4f}")
