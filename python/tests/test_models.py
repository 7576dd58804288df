"""Checkpoints as modules of PyG's and DGL's layers, and back."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

import helios

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

NODES, DIM, CLASSES = 400, 12, 5
WIDE = os.environ.get("HELIOS_WIDE") == "1"
KINDS = ("sage", "gcn", "gat", "gin")
EVERY = list(itertools.product(KINDS, ("none", "batch", "layer"), ("relu", "elu", "gelu"), (0, 1)))
# Without HELIOS_WIDE each kind with each norm, activation and residual at least once.
CASES = EVERY if WIDE else [EVERY[(n * 18 + step) % 72] for n in range(4) for step in (0, 9, 14)]


class Site:
    """A dataset on a software SSD: a graph with edges of nodes to themselves, also twice."""

    def __init__(self, folder: Path, binary: str) -> None:
        self.folder, self.binary, self.dataset = folder, binary, folder / "g"
        r = np.random.default_rng(3)
        labels = r.integers(0, CLASSES, NODES)
        self.x = r.normal(size=(NODES, DIM)).astype(np.float32)
        self.x[np.arange(NODES), labels] += 2
        edges = r.integers(0, NODES, (2, 6 * NODES))
        own = np.repeat(r.choice(NODES, NODES // 3, replace=False), r.integers(1, 3, NODES // 3))
        self.edges = np.concatenate([edges, [own, own]], axis=1)
        helios.save(self.dataset, self.x, self.edges, labels, binary=binary)
        helios.run("bind-ssds", f"--proxy={folder / 'a.img'}", "--size", "16MiB", binary=binary)
        helios.run("load", str(self.dataset), binary=binary)

    def train(self, name, layers=2, **options):
        out = self.folder / name
        helios.train(
            self.dataset,
            binary=self.binary,
            mode="inmem",
            fanout=[4] * layers,
            hidden=16,
            epochs=2,
            lr=0.01,
            batch_size=64,
            checkpoint=out,
            overwrite=True,
            **options,
        )
        return out

    def scores(self, checkpoint, layers=2, **options):
        """The program's own scores with all neighbours."""
        out = self.folder / "scores.npy"
        flags = [f"--{k}={v}" for k, v in options.items()]
        helios.run(
            *("predict", str(self.dataset), f"--checkpoint={checkpoint}", "--mode=inmem"),
            *(f"--fanout={','.join(['-1'] * layers)}", f"--scores={out}", "--overwrite", *flags),
            binary=self.binary,
        )
        return torch.from_numpy(np.load(out))

    def pyg(self, model):
        with torch.no_grad():
            return model(torch.from_numpy(self.x), torch.from_numpy(self.edges))

    def dgl(self, model):
        import dgl

        graph = dgl.graph((self.edges[0], self.edges[1]), num_nodes=NODES)
        with torch.no_grad():
            return model(graph, torch.from_numpy(self.x))


@pytest.fixture(scope="module")
def site(tmp_path_factory, binary):
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIOS_STATE", str(folder / "state"))
        yield Site(folder, binary)


def equal(got, want):
    assert got.shape == want.shape
    scale = max(1.0, float(want.abs().max()))
    assert float((got - want).abs().max()) <= 1e-5 * scale
    assert int((got.argmax(1) != want.argmax(1)).sum()) == 0


def check(site, library, name, layers=2, **options):
    pytest.importorskip({"pyg": "torch_geometric", "dgl": "dgl"}[library])
    run = site.train(name, layers, **options)
    load = {"pyg": helios.load_pyg, "dgl": helios.load_dgl}[library]
    scores = getattr(site, library)
    model = load(run)
    equal(scores(model), site.scores(run, layers))
    equal(scores(load(run, "last")), site.scores(run, layers, parameters="last"))
    return model


@pytest.mark.parametrize(
    ("library", "settings", "why"),
    [
        ("dgl", {"model": "rgat"}, "model rgat is of typed graphs; load_pyg makes it"),
        ("pyg", {"model": "rgcn", "bases": 3}, "load_pyg makes no model with bases"),
        ("pyg", {"model": "rgcn", "featureless": True}, "load_pyg makes no model with featureless"),
    ],
)
def test_refused_by_name(library, settings, why):
    pytest.importorskip({"pyg": "torch_geometric", "dgl": "dgl"}[library])
    from helios import models

    with pytest.raises(helios.CapabilityError, match=why):
        getattr(models, library)(settings, {})


@pytest.mark.parametrize("library", ["pyg", "dgl"])
def test_numbers_in_unit(site, tmp_path, monkeypatch, library):
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    other = copy.copy(site)
    other.folder, other.dataset = tmp_path, tmp_path / "numbers"
    numbers = np.stack([500 + 20 * site.x[:, 0], site.x[:, 1]], axis=1)
    helios.save(other.dataset, site.x, site.edges, numbers, target="regression", binary=site.binary)
    check(other, library, "run")


@pytest.mark.parametrize("library", ["pyg", "dgl"])
@pytest.mark.parametrize(("kind", "norm", "activation", "residual"), CASES)
def test_equal_predictions(site, library, kind, norm, activation, residual):
    check(
        site,
        library,
        "run",
        model=kind,
        norm=norm,
        activation=activation,
        residual=bool(residual),
    )


@pytest.mark.parametrize("library", ["pyg", "dgl"])
@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (3, {"model": "gat", "heads": 4, "heads_out": 2, "residual": True}),
        (2, {"model": "gat", "self_loops": "always"}),
        (2, {"model": "gcn", "self_loops": "always"}),
        (2, {"model": "gin", "learn_eps": True}),
        (1, {"model": "sage"}),
        (2, {"model": "sage", "activation": "leaky", "residual_linear": True}),
        (2, {"model": "gat", "residual_linear": True, "norm": "layer"}),
        (2, {"model": "sage", "dropout": 0.4, "feature_dropout": 0.2}),
        (2, {"model": "sage", "head": "linear", "residual": True, "norm": "batch"}),
        (2, {"model": "gat", "head": "mlp", "heads": 4, "norm": "layer", "dropout": 0.1}),
        (2, {"model": "gcn", "head": "mlp"}),
    ],
)
def test_own_options(site, library, layers, options):
    check(site, library, "own", layers, **options)


@pytest.mark.parametrize("library", ["pyg", "dgl"])
@pytest.mark.parametrize("kind", KINDS)
def test_trained_further_comes_back(site, library, kind, tmp_path):
    model = check(site, library, "back", model=kind, norm="batch", residual=True, dropout=0.1)
    scores = getattr(site, library)
    before = scores(model)
    labels = torch.from_numpy(np.load(site.dataset / "labels.npy")).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.enable_grad():
            out = (
                model(torch.from_numpy(site.x), torch.from_numpy(site.edges))
                if library == "pyg"
                else model(_graph(site), torch.from_numpy(site.x))
            )
            torch.nn.functional.cross_entropy(out, labels).backward()
        optimizer.step()
    model.eval()
    after = scores(model)
    assert float((after - before).abs().max()) > 1e-3
    helios.save_checkpoint(model, tmp_path / "c")
    equal(after, site.scores(tmp_path / "c"))
    test = np.load(site.dataset / "test.npy")
    result = helios.run(
        *("eval", str(site.dataset), f"--checkpoint={tmp_path / 'c'}", "--mode=inmem"),
        "--fanout=-1,-1",
        binary=site.binary,
    )[-1]
    want = (after.argmax(1) == labels)[test].float().mean()
    assert result["accuracy"] == pytest.approx(float(want))


def _graph(site):
    import dgl

    return dgl.graph((site.edges[0], site.edges[1]), num_nodes=NODES)


def test_parameters_by_name(site, tmp_path):
    pytest.importorskip("torch_geometric")
    run = site.train("names", model="gat")
    model = helios.load_pyg(run)
    named = model.parameters_by_name()
    assert named["layer0.att_src"].shape == (8, 2)
    named["layer1.bias"] += 1
    with pytest.raises(helios.UsageError, match="like"):
        helios.save_checkpoint(named, tmp_path / "c.safetensors")
    helios.save_checkpoint(named, tmp_path / "c.safetensors", like=run)
    equal(site.scores(tmp_path / "c.safetensors"), site.scores(run) + 1)
    resumed = tmp_path / "c"
    helios.save_checkpoint(named, resumed, like=run)  # training goes on from it
    result = helios.train(
        site.dataset,
        binary=site.binary,
        mode="inmem",
        model="gat",
        fanout=[4, 4],
        hidden=16,
        lr=0.01,
        batch_size=64,
        epochs=1,
        checkpoint=resumed,
        resume=True,
    )
    assert result["resumed_at"] == "epoch 1 batch 0"
    del named["layer1.bias"]
    with pytest.raises(helios.UsageError, match=r"layer1\.bias"):
        model.load_parameters(named)


def test_refusals(site, tmp_path):
    with pytest.raises(helios.UsageError, match="does not exist"):
        helios.load_pyg(tmp_path / "nothing")
    (tmp_path / "x.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(helios.DeviceError, match="damaged"):
        helios.load_pyg(tmp_path / "x.safetensors")
    run = site.train("best", model="sage")
    with pytest.raises(helios.UsageError, match="alone"):
        helios.load_pyg(run / "best.safetensors", "last")


@pytest.mark.parametrize("kind", KINDS)
def test_onnx(site, kind, tmp_path):
    pytest.importorskip("torch_geometric")
    reference = pytest.importorskip("onnx.reference", reason="onnx is not installed")
    from helios.models import export_onnx

    model = helios.load_pyg(site.train("onnx", model=kind, norm="layer"))
    few = torch.arange(20).view(2, 10)
    if kind == "gat":
        with pytest.raises(helios.CapabilityError, match="attention"):
            export_onnx(model, tmp_path / "m.onnx", torch.from_numpy(site.x)[:30], few)
        return
    export_onnx(model, tmp_path / "m.onnx", torch.from_numpy(site.x)[:30], few)
    session = reference.ReferenceEvaluator(str(tmp_path / "m.onnx"))
    (got,) = session.run(None, {"x": site.x, "edge_index": site.edges})
    equal(torch.from_numpy(np.asarray(got)), site.pyg(model))
