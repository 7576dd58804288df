"""DGL's DataLoader by its meaning, beside DGL's own on the same graph."""

from __future__ import annotations

import importlib.util
import warnings

import numpy as np
import pytest
from fakeserver import expected

import helios

if not (importlib.util.find_spec("torch") and importlib.util.find_spec("dgl")):
    pytest.skip("DGL is not installed", allow_module_level=True)

import dgl
import torch
from dgl.dataloading import LaborSampler, MultiLayerFullNeighborSampler, NeighborSampler

from helios.dgl import DataLoader


@pytest.fixture(scope="module")
def graph(made):
    return made(np.random.default_rng(3).integers(0, 100, (2, 500)), 100)


def in_memory(graph):
    g = dgl.graph(tuple(graph.edge_index), num_nodes=len(graph))
    g.ndata["feat"], g.ndata["label"] = graph.x, graph.y
    return g


def test_blocks(fake):
    with helios.open("somewhere", socket=fake().path, timeout=20) as ds:
        more = {"shuffle": True, "seed": 1, "batch_size": 6}
        loader = DataLoader(ds, torch.arange(30), NeighborSampler([1, 1]), **more)
        for i, (inputs, outputs, blocks) in enumerate(loader):
            want = expected(0, i)
            assert inputs.tolist() == want["n_id"].tolist()
            assert outputs.tolist() == want["n_id"][:6].tolist()
            outer, inner = blocks
            assert (outer.num_src_nodes(), outer.num_dst_nodes()) == (13, 10)
            assert (inner.num_src_nodes(), inner.num_dst_nodes()) == (10, 6)
            assert np.array_equal(outer.srcdata["feat"].numpy(), want["x"])
            assert inner.dstdata["label"].tolist() == want["y"].tolist()
            assert outer.srcdata[dgl.NID].tolist() == want["n_id"].tolist()
            src, dst = outer.edges()
            assert src.tolist() == want["src.1"].tolist()
            assert dst.tolist() == list(range(10))


def test_whole_neighbourhoods_are_dgls(graph):
    """All neighbours in DGL's order of arguments: its own loader's nodes, edges, numbers, data."""
    g = in_memory(graph)
    seeds = torch.tensor([5, 17, 3, 80, 41, 2, 63])
    sampler = MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"])
    ours = DataLoader(graph, seeds, sampler, batch_size=3, edge_ids=True)
    theirs = dgl.dataloading.DataLoader(g, seeds, sampler, batch_size=3)
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a[1], b[1])
        assert sorted(a[0].tolist()) == sorted(b[0].tolist())
        for x, y in zip(a[2], b[2], strict=True):
            assert (x.num_src_nodes(), x.num_dst_nodes()) == (y.num_src_nodes(), y.num_dst_nodes())
            assert sorted(x.edata[dgl.EID].tolist()) == sorted(y.edata[dgl.EID].tolist())
            for block in (x, y):
                src, dst = block.edges()
                ends = torch.stack([block.srcdata[dgl.NID][src], block.dstdata[dgl.NID][dst]])
                assert torch.equal(ends, graph.edge_index[:, block.edata[dgl.EID]])
        assert torch.equal(a[2][0].srcdata["feat"], graph.x[a[0]])
        assert torch.equal(a[2][-1].dstdata["label"], graph.y[a[1]])


def test_fanouts_are_the_layers(graph):
    """The seeds' last, as DGL has them; and each epoch draws anew."""
    torch.manual_seed(2)
    loader = DataLoader(graph, torch.arange(100), NeighborSampler([1, 3]), batch_size=20)
    epochs = []
    for _ in range(2):
        got = list(loader)
        for _, _, (outer, inner) in got:
            assert outer.in_degrees().max() == 1
            assert inner.in_degrees().max() == 3
            assert dgl.EID not in outer.edata
        epochs.append([i.tolist() for i, _, _ in got])
    assert epochs[0] != epochs[1]


def test_drop_last_device_and_labor(graph):
    sampler = LaborSampler([2, 2])
    options = {"batch_size": 30, "drop_last": True, "device": "cpu", "shuffle": True}
    got = list(DataLoader(graph, graph.train_mask, sampler, **options))
    assert [len(outputs) for _, outputs, _ in got] == [30] * 3
    assert {b.device.type for _, _, blocks in got for b in blocks} == {"cpu"}


def test_what_lacks_is_named(graph):
    ids = torch.arange(9)
    for sampler, said in (
        (NeighborSampler([2], replace=True), "replace=True"),
        (NeighborSampler([2], prob="p"), "prob='p'"),
        (NeighborSampler([2], edge_dir="out"), "edge_dir"),
        (LaborSampler([2], layer_dependency=True), "layer_dependency"),
        (NeighborSampler([{"a": 1}]), "one type"),
        (dgl.dataloading.ShaDowKHopSampler([2]), "ShaDowKHopSampler"),
    ):
        with pytest.raises(helios.HeliosError, match=said):
            DataLoader(graph, ids, sampler)
    with pytest.raises(helios.UsageError, match="did you mean batch_size"):
        DataLoader(graph, ids, NeighborSampler([2]), batch_sise=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(graph, ids, NeighborSampler([2]), num_workers=0, use_uva=False)
