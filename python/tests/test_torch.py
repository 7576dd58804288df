"""Batches as tensors of PyTorch, as PyG's Data and as DGL's blocks, from a fake daemon."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fakeserver import HOPS, Peer, expected

import helios

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

has_pyg = importlib.util.find_spec("torch_geometric") is not None


def opened(server):
    return helios.open("somewhere", socket=server.path, timeout=20)


def test_tensors_share_memory(fake):
    from helios.torch import Loader, block_edges

    server = fake()
    with opened(server) as ds:
        it = iter(Loader(ds))
        batch = next(it)
        want = expected(0, 0)
        for name in ("x", "n_id", "y", "edge_index"):
            got = getattr(batch, name)
            assert isinstance(got, torch.Tensor)
            assert np.array_equal(got.numpy(), want[name])
        edges = block_edges(batch.blocks[1])
        assert edges[0].tolist() == want["src.1"].tolist()
        assert edges[1].tolist() == list(range(10))
        row = batch.x[3]
        batch.x[3] = 7  # a view sees it, so nothing was copied
        assert row.tolist() == [7, 7, 7, 7]
        loader = server.peers[0].loader
        del batch
        gc.collect()
        assert loader.released == []
        assert row.tolist() == [7, 7, 7, 7]
        del row, got
        gc.collect()
        server.wait(lambda: loader.released == [0])


def test_a_batch_moves_whole(fake):
    """To a device, with its blocks; it is equal to another one of the same numbers."""
    from helios.torch import Loader

    with opened(fake()) as ds:
        first, other = (next(iter(Loader(ds))) for _ in range(2))
        assert first == other
        text = repr(first)
        assert text.startswith("Batch(epoch=0, index=0, num_seeds=6")
        assert "x=[13, 4]" in text
        assert "Block(num_dst=6" in text
        moved = first.to("meta")
        assert {t.device.type for t in (moved.x, moved.y, moved.blocks[1].src)} == {"meta"}
        assert (moved.index, moved.num_sampled_edges) == (0, [6, 4])
        assert first.x.device.type == "cpu"
        assert first.cpu() == first
        other.x[2, 1] += 1
        assert first != other
        assert first != 3
        plain = next(iter(helios.NumpyLoader(ds)))
        assert plain == next(iter(helios.NumpyLoader(ds)))
        with pytest.raises(helios.UsageError, match=r"helios\.torch"):
            plain.to("cpu")
        if has_pyg:
            one = {"split": "train", "seed": 1, "batch_size": 6}
            data = next(iter(helios.NeighborLoader(ds, [1, 1], **one))).to("meta")
            assert data.blocks[0].src.device.type == "meta"


def test_autograd_keeps_the_slot(fake):
    """What a graph needs for its backward pass is not given back before."""
    from helios.torch import Loader

    server = fake()
    with opened(server) as ds:
        it = iter(Loader(ds, slots=3))
        w = torch.ones(4, 1, requires_grad=True)
        losses = [(batch.x @ w).sum() for batch in it]
        for loss in losses:
            loss.backward()
        total = sum(expected(0, i)["x"].sum(0, dtype=np.float64) for i in range(5))
        assert np.allclose(w.grad[:, 0].numpy(), total)


class Typed(Peer):
    """Sends rows of another type, and degrees."""

    def batch(self, loader, epoch, index, slot):
        message = super().batch(loader, epoch, index, slot)
        x = message["tensors"][0]
        assert x["name"] == "x"
        at = slot * loader.slot_bytes
        rows = HOPS[-1]
        if self.kind == "bfloat16":
            bits = torch.arange(rows * 4, dtype=torch.bfloat16).view(torch.int16).numpy()
            data = bits.tobytes()
        else:
            data = np.arange(rows * 4).astype(self.kind).tobytes()
        loader.map[at : at + len(data)] = data
        x["dtype"] = self.kind
        degrees = np.arange(rows, dtype="<u4").tobytes()
        loader.map[at + 3968 : at + 3968 + len(degrees)] = degrees
        described = {"name": "degrees", "dtype": "uint32", "shape": [rows], "offset": 3968}
        message["tensors"].append(described)
        return message


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8"])
def test_row_types(fake, kind):
    from helios.torch import Loader

    with opened(fake(type("P", (Typed,), {"kind": kind}))) as ds:
        batch = next(iter(Loader(ds)))
        assert batch.x.dtype == getattr(torch, kind)
        assert batch.x.double().flatten().tolist() == list(range(52))
        assert batch.degrees.tolist() == list(range(13))


@pytest.mark.skipif(not has_pyg, reason="PyG is not installed")
def test_pyg(fake):
    from torch_geometric.data import Data
    from torch_geometric.nn import SAGEConv
    from torch_geometric.utils import trim_to_layer

    with opened(fake()) as ds:
        loader = helios.loader.NeighborLoader(ds, [1, 1], split="train", batch_size=6, seed=1)
        for i, data in enumerate(loader):
            assert isinstance(data, Data)
            want = expected(0, i)
            assert data.num_nodes == 13
            assert data.batch_size == 6
            assert torch.equal(data.y[:6], torch.from_numpy(want["y"]))
            assert data.input_id.tolist() == list(range(6 * i, 6 * i + 6))
            assert (data.num_sampled_nodes, data.num_sampled_edges) == ([6, 4, 3], [6, 4])
            assert data.index == i
            data = data.to("cpu")  # noqa: PLW2901 - as training loops write it
            x, edges = data.x, data.edge_index
            for layer in range(2):
                x, edges, _ = trim_to_layer(
                    layer, data.num_sampled_nodes, data.num_sampled_edges, x, edges
                )
                x = SAGEConv(4, 4)(x, edges)
            assert x.shape == (10, 4)
            sizes = []
            h = data.x
            for edges, size in helios.adjs(data):
                h = SAGEConv(4, 4)((h, h[: size[1]]), edges)
                sizes.append(size)
            assert sizes == [(13, 10), (10, 6)]
            assert h.shape == (6, 4)


def test_without_pyg(fake, monkeypatch):
    """A plain object with the same attributes; of NumPy arrays where there is no PyTorch."""
    for missing, kind in (("torch_geometric.data", torch.Tensor), ("helios.torch", np.ndarray)):
        helios.loader._kinds.cache_clear()
        monkeypatch.setitem(sys.modules, missing, None)
        if missing == "helios.torch":
            monkeypatch.delattr(helios, "torch", raising=False)
        with opened(fake()) as ds:
            data = next(iter(helios.loader.NeighborLoader(ds, [1, 1], split="train")))
            assert type(data) is SimpleNamespace
            assert isinstance(data.x, kind)
            assert np.array_equal(np.asarray(data.edge_index), expected(0, 0)["edge_index"])
            edges, size = helios.adjs(data)[1]
            assert isinstance(edges, kind)
            assert size == (10, 6)
            assert edges[0].tolist() == expected(0, 0)["src.0"].tolist()
            assert edges[1].tolist() == list(range(6))
    helios.loader._kinds.cache_clear()


WITHOUT = """
import sys
sys.modules[{missing!r}] = None
import helios
try:
    import helios.{module}
except helios.CapabilityError as e:
    print("said:", e)
"""


@pytest.mark.parametrize(("module", "missing"), [("torch", "torch"), ("dgl", "dgl")])
def test_missing_packages_are_named(module, missing):
    code = WITHOUT.format(module=module, missing=missing)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"helios.{module} needs" in done.stdout


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_order_whatever_the_workers(fake, workers, method):
    """Of a rank's batches, with and without persistent workers, and from a state on."""
    from helios.torch import IterableDataset, Loader

    if method == "spawn" and workers != 2:
        pytest.skip("one case of spawn is enough, which begins a Python for each worker")
    server = fake(type("P", (Peer,), {"batches": 11}))
    with opened(server) as ds:
        loader = Loader(ds, rank=1, world_size=2)
        data = IterableDataset(loader)
        more = {"multiprocessing_context": method, "persistent_workers": True} if workers else {}
        dealt = torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers, **more)
        assert len(dealt) == 6
        for epoch in (0, 1, 4):
            data.set_epoch(epoch)
            got = list(dealt)
            assert [(b.epoch, b.index) for b in got] == [(epoch, i) for i in (1, 3, 5, 7, 9, 1)]
            for b in got:
                assert np.array_equal(b.x.numpy(), expected(epoch, b.index)["x"])
        assert len(server.peers) == 1 + workers
        if method == "spawn":
            return
        other = IterableDataset(Loader(ds, rank=1, world_size=2))
        other.load_state_dict({**loader.state_dict(), "epoch": 6, "batch": 4})
        more.pop("persistent_workers", None)
        rest = torch.utils.data.DataLoader(other, batch_size=None, num_workers=workers, **more)
        assert [(b.epoch, b.index) for b in rest] == [(6, 5), (6, 7), (6, 9), (6, 1)]


def test_torchdata(fake):
    """StatefulDataLoader keeps and restores the place, with workers too."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="no torchdata")
    from helios.torch import IterableDataset, Loader

    with opened(fake(type("P", (Peer,), {"batches": 11}))) as ds:

        def loader(workers):
            data = IterableDataset(Loader(ds))
            more = {"multiprocessing_context": "fork"} if workers else {}
            return stateful.StatefulDataLoader(data, batch_size=None, num_workers=workers, **more)

        for workers in (0, 2):
            first = loader(workers)
            it = iter(first)
            assert [next(it).index for _ in range(4)] == [0, 1, 2, 3]
            state = first.state_dict()
            del it
            second = loader(workers)
            second.load_state_dict(state)
            assert [b.index for b in second] == list(range(4, 11))


def test_tqdm(fake, capsys):
    tqdm = pytest.importorskip("tqdm", reason="no tqdm")
    with opened(fake()) as ds:
        assert len(list(tqdm.tqdm(helios.torch.Loader(ds)))) == 5
    assert "5/5" in capsys.readouterr().err


def test_lightning(fake, tmp_path):
    """A Trainer takes the loader as it is, and goes on in the middle of an epoch."""
    lightning = pytest.importorskip("lightning", reason="no Lightning")
    from helios.torch import Loader

    seen = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def training_step(self, batch, _):
            seen.append((batch.epoch, batch.index))
            y = batch.y % 3
            return torch.nn.functional.cross_entropy(self.layer(batch.x[: batch.num_seeds]), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def trainer(**more):
        return lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **more,
        )

    saver = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path, filename="c", every_n_train_steps=8, save_top_k=-1
    )
    with opened(fake()) as ds:
        trainer(max_steps=9, callbacks=[saver]).fit(Model(), Loader(ds))
        assert seen == [(0, i) for i in range(5)] + [(1, i) for i in range(4)]
        seen.clear()
        more = {"max_epochs": 2, "enable_checkpointing": False}
        trainer(**more).fit(Model(), Loader(ds), ckpt_path=tmp_path / "c.ckpt", weights_only=False)
        assert seen == [(1, 3), (1, 4)]


def test_files_of_torch_are_imported(tmp_path, binary):
    """Tensors come in as PyTorch itself reads them; objects and other values are refused."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 6, generator=g), torch.randint(0, 3, (60,), generator=g)
    edges = torch.randint(0, 60, (2, 200), generator=g)
    base = {"x": x, "y": y, "edge_index": edges}
    big = torch.randn(65, 20, generator=g)
    good = {
        "x": [
            x.half(),
            x.bfloat16(),
            x.double(),
            x.t().contiguous().t(),
            big[5:, 3:13:2],
            big.t()[:6].t()[:60],
            big[:1].expand(60, 20),
            torch.nn.Parameter(x),
        ],
        "y": [y.int(), y.to(torch.uint8), torch.stack([y, y + 1], 1)[:, 0]],
        "edge_index": [
            edges.int(),
            edges.t().contiguous().t(),
            torch.cat([edges, edges], 1)[:, :200],
        ],
    }
    path, n = str(tmp_path / "g.pt"), 0
    for key, values in good.items():
        for value in values:
            torch.save({**base, key: value}, path, pickle_protocol=2 + n % 3)
            n += 1
            out = tmp_path / str(n)
            helios.run("import", "npy", "--in", path, "--out", str(out), binary=binary)
            want = torch.load(path, weights_only=False)  # its own reader lacks protocol 4
            got = np.load(out / "features.npy").astype(np.float32)
            assert np.array_equal(got, want["x"].detach().float().numpy()), (key, n)
            assert np.array_equal(np.load(out / "labels.npy"), want["y"].numpy())
            ptr, src = np.load(out / "indptr.npy"), np.load(out / "indices.npy")
            pairs = zip(src.tolist(), np.repeat(np.arange(60), np.diff(ptr)).tolist(), strict=True)
            assert sorted(pairs) == sorted(zip(*want["edge_index"].tolist(), strict=True))
    bad = (x.to_sparse(), torch.complex(x, x), torch._neg_view(x), x.numpy(), torch.nn.Linear(2, 3))
    for value in bad:
        torch.save({**base, "x": value}, path)
        with pytest.raises(helios.UsageError):
            helios.run("import", "npy", "--in", path, "--out", str(tmp_path / "bad"), binary=binary)
        assert not (tmp_path / "bad").exists()
