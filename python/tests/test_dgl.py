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


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_divide_the_nodes(graph, monkeypatch, drop_last):
    """All get as many batches, and together each node; another one where a rank lacks one."""
    import torch.distributed as dist

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    parts = []
    for rank in range(4):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        loader = DataLoader(
            graph, torch.arange(90), NeighborSampler([2]), use_ddp=True, batch_size=10,
            shuffle=True, drop_last=drop_last, num_workers=2, worker_init_fn=print,
        )  # fmt: skip
        loader.set_epoch(1)
        parts.append([outputs.tolist() for _, outputs, _ in loader])
    assert [len(p) for p in parts] == [2 if drop_last else 3] * 4
    seen = [v for part in parts for batch in part for v in batch]
    assert (len(set(seen)), len(seen)) == ((80, 80) if drop_last else (90, 120))


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


CITES, WRITES, NEVER = ("p", "cites", "p"), ("a", "writes", "p"), ("p", "never", "a")


def heterograph():
    """Papers that cite, authors that write, and a relation without edges."""
    rng = np.random.default_rng(4)
    ends = {e: rng.integers(0, 60, (2, n)) for e, n in ((CITES, 300), (WRITES, 200), (NEVER, 0))}
    g = dgl.heterograph(
        {e: tuple(torch.from_numpy(x)) for e, x in ends.items()}, num_nodes_dict={"p": 60, "a": 60}
    )
    for i, t in enumerate(("p", "a")):
        g.nodes[t].data["feat"] = torch.arange(60.0)[:, None].repeat(1, 4) + 100 * i
    g.nodes["p"].data["label"] = torch.arange(60)[:, None] % 4
    g.nodes["p"].data["train_mask"] = torch.arange(60) < 40
    return g


@pytest.fixture(scope="module")
def typed(tmp_path_factory, binary):
    folder = tmp_path_factory.mktemp("typed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIOS_STATE", str(folder / "state"))
        g = heterograph()
        helios.save(folder / "g", g, binary=binary)
        with helios.open(folder / "g", binary=binary) as ds:
            yield ds, g


def test_heterographs_are_saved(typed):
    ds, g = typed
    assert sorted(ds.edge_types) == sorted(g.canonical_etypes)
    for t in g.ntypes:
        assert torch.equal(ds[t].x, g.nodes[t].data["feat"])
    assert torch.equal(ds["p"].y, g.nodes["p"].data["label"])
    assert torch.equal(ds["p"].train_mask, g.nodes["p"].data["train_mask"])
    for e in g.canonical_etypes:
        want = torch.stack(g.edges(etype=e))
        assert sorted(map(tuple, ds[e].edge_index.T.tolist())) == sorted(
            map(tuple, want.T.tolist())
        )


def test_typed_blocks_are_dgls(typed):
    """All neighbours: the nodes, edges and data that DGL's own loader gives."""
    ds, g = typed
    seeds = {"p": torch.tensor([5, 17, 3, 59, 41])}
    sampler = MultiLayerFullNeighborSampler(2)
    ours = DataLoader(ds, seeds, sampler, batch_size=2, edge_ids=True)
    theirs = dgl.dataloading.DataLoader(g, seeds, sampler, batch_size=2)
    for (inputs, outputs, blocks), (want_in, want_out, want) in zip(ours, theirs, strict=True):
        assert outputs["p"].tolist() == want_out["p"].tolist()
        assert outputs["a"].tolist() == []
        for t in g.ntypes:
            assert sorted(inputs[t].tolist()) == sorted(want_in[t].tolist())
            assert torch.equal(blocks[0].srcnodes[t].data["feat"], ds[t].x[inputs[t]])
        assert torch.equal(blocks[1].dstnodes["p"].data["label"], ds["p"].y[outputs["p"]])
        for block, other in zip(blocks, want, strict=True):
            assert block.canonical_etypes == other.canonical_etypes
            for e in g.canonical_etypes:
                both = []
                for b in (block, other):
                    src, dst = b.edges(etype=e)
                    src = b.srcnodes[e[0]].data[dgl.NID][src]
                    dst = b.dstnodes[e[2]].data[dgl.NID][dst]
                    both.append(sorted(zip(src.tolist(), dst.tolist(), strict=True)))
                assert both[0] == both[1]
                src, dst = block.edges(etype=e)
                numbers = block.edges[e].data[dgl.EID]
                ends = ds[e].edge_index[:, numbers]
                assert torch.equal(ends[0], block.srcnodes[e[0]].data[dgl.NID][src])
                assert torch.equal(ends[1], block.dstnodes[e[2]].data[dgl.NID][dst])


def test_a_model_of_dgl_over_typed_blocks(typed):
    """HeteroGraphConv over the blocks gives the seeds what it gives them over the graph."""
    from dgl.nn import HeteroGraphConv, SAGEConv

    ds, g = typed
    torch.manual_seed(3)
    layers = [
        HeteroGraphConv({e[1]: SAGEConv(n, 4, "mean") for e in g.canonical_etypes}) for n in (4, 4)
    ]
    x = {t: g.nodes[t].data["feat"] for t in g.ntypes}
    for layer in layers:
        x = {t: h.relu() for t, h in layer(g, x).items()}
    loader = DataLoader(
        ds, {"p": torch.arange(60)}, MultiLayerFullNeighborSampler(2), batch_size=20
    )
    for _, seeds, blocks in loader:
        h = blocks[0].srcdata["feat"]
        for layer, block in zip(layers, blocks, strict=True):
            h = {t: y.relu() for t, y in layer(block, h).items()}
        assert torch.allclose(h["p"], x["p"][seeds["p"]], rtol=1e-4, atol=1e-5)


def test_typed_fanouts(typed):
    ds, _ = typed
    by = {CITES: 2, WRITES: 1, NEVER: 3}
    loader = DataLoader(ds, {"p": [1, 2, 3]}, NeighborSampler([by, 2]), batch_size=3, seed=1)
    _, _, (outer, inner) = next(iter(loader))
    assert inner.in_degrees(etype=CITES).max() <= 2
    assert outer.in_degrees(etype=WRITES).max() <= 1
    assert outer.to("cpu").num_edges(NEVER) == 0
    with pytest.raises(helios.UsageError, match="fanouts lack edges"):
        DataLoader(ds, {"p": [1]}, NeighborSampler([{CITES: 2}]))
    with pytest.raises(helios.CapabilityError, match="several types"):
        DataLoader(ds, {"p": [1], "a": [1]}, NeighborSampler([2]))


def test_graphbolts_pipelines_take_the_feature_store(graph, typed):
    """Its own datapipes over its own graph: features and labels are those in memory."""
    gb = pytest.importorskip("dgl.graphbolt", reason="GraphBolt's library does not load here")
    from helios.graphbolt import FeatureStore

    store = FeatureStore(graph)
    g = gb.from_dglgraph(in_memory(graph), is_homogeneous=True)
    items = gb.ItemSet(torch.arange(40), names="seed_nodes")
    pipe = gb.ItemSampler(items, batch_size=16).sample_neighbor(g, [3, 2])
    pipe = pipe.fetch_feature(store, node_feature_keys=["feat", "label"])
    seen = []
    for batch in gb.DataLoader(pipe, num_workers=0):
        nodes = batch.node_ids()
        assert torch.equal(batch.node_features["feat"], graph.x[nodes])
        assert torch.equal(batch.node_features["label"], graph.y[nodes])
        seen += batch.seed_nodes.tolist()
    assert seen == list(range(40))
    assert store.size("node", None, "feat") == torch.Size([4])
    assert torch.equal(store.read("node", None, "label"), graph.y)
    assert len(store) == 2
    for key in (("edge", None, "feat"), ("node", "p", "feat"), ("node", None, "x")):
        with pytest.raises(helios.UsageError, match="there are"):
            store.read(*key, torch.tensor([1]))
    with pytest.raises(helios.UsageError, match="0 to 99"):
        store.read("node", None, "feat", torch.tensor([100]))
    with pytest.raises(helios.UsageError, match="give all 100 rows"):
        store.update("node", None, "feat", graph.x[:1], torch.tensor([0]))
    store.update("node", None, "feat", graph.x[:, :2] + 1)  # as layer-wise inference does
    assert store.size("node", None, "feat") == torch.Size([2])
    assert torch.equal(store.read("node", None, "feat", torch.tensor([5])), graph.x[5:6, :2] + 1)

    ds, of = typed
    store = FeatureStore(ds)
    assert store.keys() == [("node", "a", "feat"), ("node", "p", "feat"), ("node", "p", "label")]
    assert store.size("node", "p", "label") == torch.Size([1])
    for t in ("p", "a"):
        ids = torch.tensor([7, 0, 7, 59])
        assert torch.equal(store.read("node", t, "feat", ids), of.nodes[t].data["feat"][ids])
