"""PyG's own loaders over a dataset, by PyG's meaning: weights, times, links, and the stores.

They restate PyG's test_link_neighbor_loader, test_feature_store and test_graph_store, and those of
test_neighbor_loader that the daemon's sampler has no answer to (docs/reference/upstream-tests.md).
"""

from __future__ import annotations

import concurrent.futures
import copy
import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import helios

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torch_geometric", reason="PyG is not installed")

import torch_geometric  # noqa: E402
from torch_geometric.data import Data, EdgeAttr, HeteroData, TensorAttr  # noqa: E402
from torch_geometric.sampler import NegativeSampling  # noqa: E402

import helios.pyg  # noqa: E402
from helios import _rows  # noqa: E402
from helios._session import Session  # noqa: E402
from helios.pyg import LinkNeighborLoader, NeighborLoader  # noqa: E402

KINDS = ("directional", "bidirectional")
CITES, READS, WRITES = (
    ("paper", "to", "paper"),
    ("paper", "to", "author"),
    ("author", "to", "paper"),
)


def pairs(edge_index):
    return list(zip(*edge_index.tolist(), strict=True))


@pytest.fixture(scope="module")
def graph(made):
    return made(np.random.default_rng(3).integers(0, 100, (2, 500)), 100)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, binary):
    """Saves and opens typed graphs, by type of edges; row v of a type is [v, v]."""
    opened = []

    def save(nodes, edges):
        data = HeteroData()
        if len(nodes) == 1:
            nodes = {**nodes, "other": 1}  # else the dataset would have no types
        for t, n in nodes.items():
            data[t].x = torch.arange(n).float()[:, None].repeat(1, 2)
        for e, ends in edges.items():
            data[e].edge_index = torch.as_tensor(np.asarray(ends, np.int64))
        first = next(iter(nodes))
        data[first].y = torch.arange(nodes[first]) % 2
        folder = tmp_path_factory.mktemp("typed") / "g"
        helios.save(folder, data, binary=binary)
        with pytest.MonkeyPatch.context() as patch:  # no SSD is bound, which made has
            patch.setenv("HELIOS_STATE", str(folder.parent / "state"))
            opened.append(helios.open(folder, binary=binary))
        return opened[-1]

    yield save
    for ds in opened:
        ds.close()


def bibliography():
    rng = np.random.default_rng(8)
    edges = {CITES: (100, 100, 500), READS: (100, 200, 500), WRITES: (200, 100, 500)}
    return {"paper": 100, "author": 200}, {
        e: np.stack([rng.integers(0, a, n), rng.integers(0, b, n)])
        for e, (a, b, n) in edges.items()
    }


@pytest.fixture(scope="module")
def typed(saved):
    return saved(*bibliography())


# Of test_neighbor_loader: weights and times.


CHAIN = [[1, 3, 0, 4], [2, 2, 1, 3]]


def weights_of(edge_index):
    """As upstream: edges from 3 and 4 have weight 1, the others none."""
    return (edge_index[0] >= 3).float()


def test_weighted_homo_neighbor_loader(made):
    ds = made(CHAIN, 5)
    ds.edge_weight = weights_of(ds.edge_index)
    loader = NeighborLoader(ds, [1] * 2, torch.tensor([2]), batch_size=1, weight_attr="edge_weight")
    assert len(loader) == 1
    for _ in range(5):
        batch = next(iter(loader))
        assert batch.n_id.tolist() == [2, 3, 4]
        assert batch.n_id[batch.edge_index].tolist() == [[3, 4], [2, 3]]
        assert batch.edge_weight.tolist() == [1, 1]


def test_weighted_hetero_neighbor_loader(saved):
    ds = saved({"paper": 5}, {CITES: CHAIN})
    ds[CITES].edge_weight = weights_of(ds[CITES].edge_index)
    loader = NeighborLoader(
        ds, [1] * 2, ("paper", torch.tensor([2])), batch_size=1, weight_attr="edge_weight"
    )
    batch = next(iter(loader))
    assert batch["paper"].n_id.tolist() == [2, 3, 4]
    ends = batch["paper"].n_id[batch["paper", "paper"].edge_index]
    assert ends.tolist() == [[3, 4], [2, 3]]


@pytest.mark.parametrize("replace", [False, True])
def test_draws_follow_the_weights(made, replace):
    """How often each of ten neighbours is drawn first is its part of the weights."""
    ds = made([list(range(1, 11)), [0] * 10], 11)
    ds.w = torch.arange(1, 11).float()
    loader = NeighborLoader(ds, [1], torch.zeros(4000).long(), batch_size=4000, replace=replace,
                            weight_attr="w", disjoint=True)  # fmt: skip
    batch = next(iter(loader))
    drawn = batch.n_id[batch.edge_index[0]]
    share = torch.bincount(drawn, minlength=11)[1:] / 4000
    assert torch.allclose(share, ds.w[drawn.unique() - 1] / 55, atol=0.04)
    with pytest.raises(helios.UsageError, match="weight_attr 'v' is no attribute of edges"):
        NeighborLoader(ds, [1], weight_attr="v")


BOTH_WAYS = [[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]]


def test_edge_level_temporal_homo_neighbor_loader(made):
    ds = made(BOTH_WAYS, 5)
    ds.edge_time = torch.arange(8)
    loader = NeighborLoader(ds, [-1, -1], input_time=torch.tensor([4] * 5), time_attr="edge_time")
    seen = 0
    for batch in loader:
        assert batch.edge_time.numel() == batch.num_edges
        assert (batch.edge_time <= 4).all()
        seen += batch.num_edges
    assert seen > 5
    with pytest.raises(helios.UsageError, match="give input_time"):
        next(iter(NeighborLoader(ds, [-1], time_attr="edge_time")))


def test_edge_level_temporal_hetero_neighbor_loader(saved):
    e = ("A", "to", "A")
    ds = saved({"A": 5}, {e: BOTH_WAYS})
    ds[e].edge_time = torch.arange(8)
    loader = NeighborLoader(
        ds, [-1, -1], "A", input_time=torch.tensor([4] * 5), time_attr="edge_time"
    )
    for batch in loader:
        assert batch[e].edge_time.numel() == batch[e].num_edges
        assert (batch[e].edge_time <= 4).all()


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_temporal_hetero_neighbor_loader(saved, strategy):
    """Nothing in a seed's subgraph is later than the seed; "last" takes the latest of those."""
    edges = np.random.default_rng(1).integers(0, 34, (2, 150))
    ds = saved({"v": 34}, {("v", "to", "v"): edges})
    ds["v"].time = torch.arange(34, 0, -1)
    loader = NeighborLoader(ds, [-1, -1], "v", time_attr="time", batch_size=1)
    assert all((batch["v"].time[0] >= batch["v"].time[1:]).all() for batch in loader)
    for batch in NeighborLoader(ds, [2], "v", time_attr="time", temporal_strategy=strategy):
        seed, drawn = batch["v"].n_id[0], batch["v"].time[batch["v", "v"].edge_index[0]]
        of = ds["v", "v"].edge_index
        early = ds["v"].time[of[0, of[1] == seed]]
        early = early[early <= batch["v"].time[0]].sort().values
        assert len(drawn) == min(2, len(early))
        if strategy == "last":
            assert torch.equal(drawn.sort().values, early[-2:])


def test_temporal_custom_neighbor_loader(saved):
    """The stores in the dataset's place give the same subgraphs."""
    edges = np.random.default_rng(1).integers(0, 34, (2, 150))
    ds = saved({"v": 34}, {("v", "to", "v"): edges})
    ds["v"].time = torch.arange(34, 0, -1)
    more = {"input_nodes": "v", "time_attr": "time", "batch_size": 128}
    one = NeighborLoader(ds, [-1, -1], **more)
    other = NeighborLoader(helios.pyg.stores(ds), [-1, -1], **more)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a["v"].time, b["v"].time)


def test_temporal_neighbor_loader_single_link(saved):
    same = np.arange(10).repeat(2).reshape(10, 2).T
    edges = dict.fromkeys(
        (("a", "to", "b"), ("b", "to", "a"), ("a", "to", "c"), ("c", "to", "a")), same
    )
    ds = saved({"a": 10, "b": 10, "c": 10}, edges)
    ds["b"].time, ds["c"].time = torch.arange(10), torch.arange(1, 11)
    loader = NeighborLoader(
        ds, [-1], "a", input_time=torch.arange(10), time_attr="time", batch_size=10
    )
    batch = next(iter(loader))
    assert [batch[t].num_nodes for t in "abc"] == [10, 10, 0]


@pytest.mark.parametrize(
    "how", [{}, {"replace": True}, {"disjoint": True}, {"subgraph_type": "induced"}]
)
def test_what_is_drawn_is_of_the_graph(graph, how):
    """Ends, rows, labels and masks; and torch's generator gives the same again."""
    graph.mark = torch.arange(100) * 2
    loader = NeighborLoader(graph, [3, 2], batch_size=20, shuffle=True, **how)
    seen = []
    torch.manual_seed(3)
    first = [b.n_id.tolist() for b in loader]
    torch.manual_seed(3)
    for i, batch in enumerate(loader):
        assert batch.n_id.tolist() == first[i]
        assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
        assert torch.equal(batch.y, graph.y[batch.n_id])
        assert torch.equal(batch.mark, batch.n_id * 2)
        assert torch.equal(batch.train_mask, graph.train_mask[batch.n_id])
        seen += batch.n_id[: batch.batch_size].tolist()
        if how.get("disjoint"):
            assert torch.equal(*batch.batch[batch.edge_index])
        elif not how:
            assert (torch.bincount(batch.edge_index[1]) <= 3).all()
            assert batch.num_nodes == sum(batch.num_sampled_nodes) == len(batch.n_id.unique())
    assert sorted(seen) == list(range(100))
    # The daemon's batches have what was set on the dataset, too.
    assert torch.equal(*(x for b in helios.NeighborLoader(graph, [2], batch_size=100)
                         for x in (b.mark, b.n_id * 2)))  # fmt: skip
    del graph.mark


def test_a_loader_without_features(graph):
    """As PyG's reddit.py has it: a copy of the graph whose features and labels are deleted."""
    less = helios.NeighborLoader(copy.copy(graph), [-1], batch_size=30)
    del less.data.x, less.data.y
    less.data.number = torch.arange(100)
    assert len(less.dataset) == len(graph[0].to("cpu", "x")) == 100
    seen = []
    for batch in less:
        assert "x" not in batch
        assert "y" not in batch
        assert torch.equal(batch.number, batch.n_id)
        assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
        seen += batch.n_id[: batch.batch_size].tolist()
    assert seen == list(range(100))
    with pytest.raises(AttributeError, match="x was deleted"):
        assert less.data.x is None
    assert next(iter(helios.NeighborLoader(graph, [-1]))).x.shape[1] == 4
    assert graph.get_idx_split()["valid"].tolist() == [98]
    with pytest.raises(helios.CapabilityError, match="device='cuda:1'"):
        graph.to("cuda:1", "x")


def test_all_neighbours_are_the_daemons(graph, typed):
    """The two samplers: the same nodes, and the same edges of them."""
    for ds, nodes in ((graph, None), (typed, "paper")):
        one, other = (
            of(ds, [-1, -1], nodes, batch_size=25) for of in (NeighborLoader, helios.NeighborLoader)
        )
        for a, b in zip(one, other, strict=True):
            for t in ds.node_types or [None]:
                x, y = (a, b) if t is None else (a[t], b[t])
                assert torch.equal(x.n_id.sort().values, y.n_id.sort().values)
                assert x.num_sampled_nodes == y.num_sampled_nodes
            for e in ds.edge_types or [None]:
                x, y = (a, b) if e is None else (a[e], b[e])
                assert torch.equal(x.e_id.sort().values, y.e_id.sort().values)


# test_link_neighbor_loader.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [None, 1.0])
def test_homo_link_neighbor_loader_basic(made, kind, ratio):
    rng = np.random.default_rng(2)
    ds = made(rng.integers(0, 50, (2, 200)), 100)
    ds.edge_attr = torch.arange(200)
    links = torch.cat([ds.edge_index, torch.from_numpy(rng.integers(50, 100, (2, 200)))], 1)
    label = torch.cat([torch.ones(200), torch.zeros(200)])
    loader = LinkNeighborLoader(
        ds,
        [-1] * 2,
        links,
        label if ratio is None else None,
        batch_size=20,
        subgraph_type=kind,
        neg_sampling_ratio=ratio,
        shuffle=True,
        filter_per_worker=ratio is None,
    )
    assert str(loader) == "LinkNeighborLoader()"
    assert len(loader) == 20
    one = loader([0])
    assert isinstance(one, Data)
    assert set(links[:, 0].tolist()) <= set(one.n_id.tolist())
    every, there = set(pairs(links)), set(pairs(ds.edge_index))
    for batch in loader:
        assert (batch.n_id.numel(), batch.e_id.numel()) == (batch.num_nodes, batch.num_edges)
        assert batch.input_id.numel() == 20
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
        assert torch.equal(batch.edge_attr, batch.e_id)
        ends = pairs(batch.n_id[batch.edge_label_index])
        assert len(ends) == (20 if ratio is None else 40)
        wanted = [e for e, y in zip(ends, batch.edge_label, strict=True) if y]
        if ratio is None:
            inside = set(pairs(batch.n_id[batch.edge_index]))
            assert set(wanted) <= inside & there
            assert not inside & (set(ends) - set(wanted))
        else:
            assert batch.edge_label.tolist() == [1] * 20 + [0] * 20
            assert set(wanted) <= every


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [None, 1.0])
def test_hetero_link_neighbor_loader_basic(typed, kind, ratio):
    loader = LinkNeighborLoader(
        typed, [-1] * 2, ("paper", "author"), batch_size=20, subgraph_type=kind,
        neg_sampling_ratio=ratio, shuffle=True,
    )  # fmt: skip
    assert (str(loader), len(loader)) == ("LinkNeighborLoader()", 25)
    for batch in loader:
        assert isinstance(batch, HeteroData)
        of = batch["paper", "author"]
        if ratio is None:
            assert set(pairs(of.edge_label_index)) <= set(pairs(of.edge_index))
        else:
            assert of.edge_label.tolist() == [1] * 20 + [0] * 20
        assert torch.equal(batch["author"].x[:, 0].long(), batch["author"].n_id)


@pytest.mark.parametrize("kind", KINDS)
def test_hetero_link_neighbor_loader_loop(typed, kind):
    loader = LinkNeighborLoader(typed, [-1] * 2, CITES, batch_size=50, subgraph_type=kind)
    links = []
    for batch in loader:
        of = batch["paper", "paper"]
        assert set(pairs(of.edge_label_index)) <= set(pairs(of.edge_index))
        links += pairs(batch["paper"].n_id[of.edge_label_index])
    assert links == pairs(typed[CITES].edge_index)


@pytest.mark.parametrize("label", [None, torch.ones(500).long()])
def test_link_neighbor_loader_edge_label(graph, label):
    loader = LinkNeighborLoader(
        graph, [-1] * 2, edge_label=label, batch_size=50, neg_sampling_ratio=1
    )
    for batch in loader:
        assert batch.edge_label.dtype == (torch.float if label is None else torch.long)
        assert batch.edge_label.tolist() == [1] * 50 + [0] * 50


def test_temporal_homo_link_neighbor_loader(made):
    ds = made(np.random.default_rng(6).integers(0, 10, (2, 60)), 10)
    ds.time = torch.arange(10)
    loader = LinkNeighborLoader(
        ds, [-1], edge_label=torch.ones(60), edge_label_time=ds.edge_index.max(0).values,
        time_attr="time", batch_size=1, shuffle=True,
    )  # fmt: skip
    for batch in loader:
        assert batch.edge_label_index.shape == (2, 1)
        assert (batch.time <= batch.edge_label_time).all()


def test_temporal_hetero_link_neighbor_loader(saved):
    ds = saved(*bibliography())
    ds["paper"].time, ds["author"].time = torch.arange(100) - 200, torch.arange(200)
    with pytest.raises(ValueError, match="edge_label_time"):
        LinkNeighborLoader(ds, [-1] * 2, READS, time_attr="time", batch_size=32)
    src, dst = ds[READS].edge_index
    when = torch.maximum(ds["paper"].time[src], ds["author"].time[dst])
    loader = LinkNeighborLoader(ds, [-1] * 2, READS, None, when, time_attr="time", batch_size=32,
                                neg_sampling_ratio=0.5)  # fmt: skip
    for batch in loader:
        latest = batch["author"].time.max()
        assert latest <= batch["paper", "author"].edge_label_time.max()
        assert "edge_label" in batch["paper", "author"]


def test_custom_hetero_link_neighbor_loader(typed):
    """The stores in the dataset's place give as much."""
    more = {"edge_label_index": CITES, "batch_size": 20}
    one = LinkNeighborLoader(typed, [-1] * 2, **more)
    other = LinkNeighborLoader(helios.pyg.stores(typed), [-1] * 2, **more)
    assert (str(one), len(one)) == (str(other), len(other))
    for a, b in zip(one, other, strict=True):
        for t in typed.node_types:
            assert torch.equal(a[t].x, b[t].x)
        for e in typed.edge_types:
            assert torch.equal(a[e].edge_index, b[e].edge_index)


def test_link_neighbor_loader_no_edges(graph, typed):
    links = torch.from_numpy(np.random.default_rng(7).integers(0, 100, (2, 100)))
    for batch in LinkNeighborLoader(graph, [], links, batch_size=20):
        assert batch.input_id.numel() == batch.edge_label_index.size(1) == 20
        assert batch.num_nodes == batch.edge_label_index.unique().numel()
    for batch in LinkNeighborLoader(typed, [], (("paper", "paper"), links), batch_size=20):
        of = batch["paper", "paper"]
        assert of.input_id.numel() == of.edge_label_index.size(1) == 20
        assert batch["paper"].num_nodes == of.edge_label_index.unique().numel()


@pytest.mark.parametrize(("disjoint", "temporal"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("amount", [1, 2])
@pytest.mark.parametrize("types", [False, True])
def test_link_neighbor_loader_triplet(graph, typed, disjoint, temporal, amount, types):
    links = torch.from_numpy(np.random.default_rng(9).integers(0, 100, (2, 100)))
    ds, stores = (typed, [typed["paper"], typed["author"]]) if types else (graph, [graph])
    for store in stores if temporal else ():
        store.time = torch.arange(store.num_nodes)
    loader = LinkNeighborLoader(
        ds,
        [-1] * 2,
        (("paper", "paper"), links) if types else links,
        edge_label_time=links.max(0).values + 50 if temporal else None,
        time_attr="time" if temporal else None,
        batch_size=20,
        disjoint=disjoint,
        neg_sampling=NegativeSampling("triplet", amount),
        shuffle=True,
    )
    assert len(loader) == 5
    for batch in loader:
        nodes, edges = (batch["paper"], batch["paper", "paper"]) if types else (batch, batch)
        ids = nodes.x[:, 0].long()
        assert torch.equal(ids[nodes.src_index], links[0, edges.input_id])
        assert torch.equal(ids[nodes.dst_pos_index], links[1, edges.input_id])
        assert nodes.dst_neg_index.shape == ((20,) if amount == 1 else (20, amount))
        assert 0 <= nodes.dst_neg_index.min() <= nodes.dst_neg_index.max() < nodes.num_nodes
        if disjoint:  # the seeds are first, and belong together by their place
            assert nodes.src_index.tolist() == list(range(20))
            assert nodes.dst_pos_index.tolist() == list(range(20, 40))
            assert sorted(nodes.dst_neg_index.flatten().tolist()) == list(
                range(40, 40 + 20 * amount)
            )
            seeds = nodes.batch[: 40 + 20 * amount].view(-1, 20)
            assert torch.equal(seeds, torch.arange(20).expand_as(seeds))
        if temporal:
            assert (nodes.time <= nodes.seed_time[nodes.batch]).all()
    for store in stores if temporal else ():
        del store.time


def test_link_neighbor_loader_mapping(made):
    ds = made([[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5], [1, 2, 3, 4, 5, 8, 6, 7, 9, 10, 6, 11]], 12)
    for batch in LinkNeighborLoader(ds, [1], ds.edge_index, batch_size=2, shuffle=True):
        assert torch.equal(batch.n_id[batch.edge_index], ds.edge_index[:, batch.e_id])


def test_workers_of_torch_draw_for_themselves(graph):
    """Each worker asks for rows by a daemon of its own; what they draw differs."""
    loader = NeighborLoader(graph, [2, 2], torch.tensor([5] * 8), batch_size=4, num_workers=2)
    one, other = loader
    assert one.n_id.tolist() != other.n_id.tolist()
    assert torch.equal(other.x[:, 0].long(), other.n_id)


# test_feature_store and test_graph_store: a dataset is read, and does not change.


def test_feature_store(graph, typed):
    for ds, group in ((graph, None), (typed, "author")):
        store, x = helios.pyg.FeatureStore(ds), (ds if group is None else ds[group]).x[:]
        index = torch.tensor([0, 2])
        attr = TensorAttr(group, "x", index)
        assert torch.equal(store.get_tensor(attr), x[index])
        assert torch.equal(store.get_tensor(group, "x", index=slice(3, 5)), x[3:5])
        assert torch.equal(store[group, "x", None], x)
        assert torch.equal(store[group, "x", :], x)
        view = store.view(TensorAttr(group))
        assert torch.equal(view.x[:], x)
        assert view.x == store.view(TensorAttr(group, "x"))
        assert str(view).startswith("AttrView(store=<helios.pyg.FeatureStore of ")
        if group is not None:
            assert store[group] == view
            assert torch.equal(store.view().author.x[:], x)
        with pytest.raises(helios.UsageError, match="does not change"):
            store.put_tensor(x, TensorAttr(group, "x", None))
        with pytest.raises(helios.UsageError, match="does not change"):
            del store[group, "x", index]
        with pytest.raises((helios.UsageError, KeyError)):
            store.get_tensor(group, "feat", index=index)


def asked(monkeypatch):
    """Returns a list to which requests to daemons are added."""
    ask, kinds = Session.ask, []

    def noted(self, message, *more):
        kinds.append(message["type"])
        return ask(self, message, *more)

    monkeypatch.setattr(Session, "ask", noted)
    return kinds


def test_a_feature_store_keeps_its_job(graph, monkeypatch):
    """Reads of any size come from one job, which grows, and ends with the store."""
    monkeypatch.setattr(_rows, "_MIN_ROWS", 16)
    monkeypatch.setattr(_rows, "_BATCH_BYTES", 32 * 4 * 4)
    kinds, store = asked(monkeypatch), helios.pyg.FeatureStore(graph)
    rng, got = np.random.default_rng(5), []
    for n in (9, 16, 3, 27, 100, 1, 90, 32, 0, 12):  # up to 4 batches
        index = torch.from_numpy(rng.permutation(100)[:n])
        got.append((index, store.get_tensor(TensorAttr(None, "x", index))))
    assert kinds.count("loader") == 2  # of 16 rows, and of 32
    for index, x in got:  # whatever was read since
        assert torch.equal(x, graph.x[index])
    (job,) = store._rows._idle[None]
    end = job._finalizer
    assert end.alive
    del store, job
    assert not end.alive


def test_a_feature_store_gives_the_ssds_back(tmp_path, monkeypatch, binary):
    """A second after a read anybody may write to them; then they are the store's again."""
    folder = tmp_path / "g"
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    helios.run("generate", "--nodes=300", "--dim=8", f"--out={folder}", binary=binary)
    helios.run("bind-ssds", f"--proxy={tmp_path / 'a.img'}", "--size=16MiB", binary=binary)
    helios.run("load", str(folder), binary=binary)
    with helios.open(folder, binary=binary) as ds:
        store, attr = helios.pyg.FeatureStore(ds), TensorAttr(None, "x", torch.tensor([7, 7, 1]))
        kinds, before = asked(monkeypatch), store.get_tensor(attr)
        until = time.monotonic() + 60
        while True:
            try:
                helios.run("load", str(folder), binary=binary)
                break
            except helios.RefusedError as e:
                assert "reads it" in str(e)
                assert time.monotonic() < until
        assert torch.equal(store.get_tensor(attr), before)
        assert kinds.count("loader") == 1


def test_a_feature_store_in_threads_and_forks(graph, monkeypatch):
    monkeypatch.setenv("HELIOS_STATE", str(Path(graph.path).parent / "state"))  # of its daemon
    kinds, store = asked(monkeypatch), helios.pyg.FeatureStore(graph)

    def read(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            index = torch.from_numpy(rng.integers(0, 100, 30))
            assert torch.equal(store.get_tensor(TensorAttr(None, "x", index)), graph.x[index])

    read(0)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert len(store._rows._idle[None]) == 1
    children = []
    for seed in range(2):
        if (pid := os.fork()) == 0:
            try:
                before = len(kinds)
                read(seed)
                os._exit(0 if kinds[before:].count("loader") == 1 else 3)
            finally:
                os._exit(1)
        children.append(pid)
    read(1)
    assert [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in children] == [0, 0]


def test_a_feature_store_in_a_fork_with_another_state(graph, tmp_path, monkeypatch):
    """A child's daemon may have no SSDs: it reads the dataset's folder, in another way."""
    store, attr = helios.pyg.FeatureStore(graph), TensorAttr(None, "x", torch.tensor([7, 7, 1]))
    before = store.get_tensor(attr)
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path))
    if (pid := os.fork()) == 0:
        try:
            os._exit(0 if torch.equal(store.get_tensor(attr), before) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_feature_store_after_its_daemon(graph):
    """A daemon that is killed is said once; then there is another."""
    store, attr = helios.pyg.FeatureStore(graph), TensorAttr(None, "x", torch.tensor([7, 7, 1]))
    before = store.get_tensor(attr)
    os.kill(graph.session()[0].daemon_pid, signal.SIGKILL)
    with pytest.raises(helios.DaemonDied, match="was killed"):
        store.get_tensor(attr)
    assert torch.equal(store.get_tensor(attr), before)


def test_graph_store(graph, typed):
    """Every layout that PyG asks for, of the one that is there."""
    for ds in (graph, typed):
        store = helios.pyg.GraphStore(ds)
        attrs = store.get_all_edge_attrs()
        assert [a.edge_type for a in attrs] == (ds.edge_types or [None])
        rows, cols, _ = store.coo()
        for a in attrs:
            e = a.edge_type
            want = (ds if e is None else ds[e]).edge_index
            ends = torch.stack([rows, cols] if e is None else [rows[e], cols[e]])
            assert torch.equal(ends, want)
            row, colptr = store[EdgeAttr(e, "csc", True, a.size)]
            assert torch.equal(row, want[0])
            assert torch.equal(colptr.diff(), torch.bincount(want[1], minlength=a.size[1]))
            with pytest.raises(KeyError):
                store[EdgeAttr(e, "csr", False, a.size)]
            with pytest.raises(helios.UsageError, match="does not change"):
                store[EdgeAttr(e, "coo", False, a.size)] = tuple(want)
        if ds is typed:
            rowptr, col, _ = store.csr([CITES])
            want = ds[CITES].edge_index
            assert torch.equal(rowptr[CITES].diff(), torch.bincount(want[0], minlength=100))
            assert col[CITES].numel() == 500
            with pytest.raises(helios.UsageError, match="no edges of type"):
                store.get_edge_index(("a", "b", "c"), "csc")


def whole_neighbourhoods(colptr, row, seeds, counts, replace, directed):
    """Stands for torch_sparse's neighbor_sample, where counts take all neighbours."""
    assert set(counts) == {-1} and directed
    ids, edges, first = seeds.tolist(), [], 0
    for _ in counts:
        hop, first = range(first, len(ids)), len(ids)
        for at in hop:
            for e in range(colptr[ids[at]], colptr[ids[at] + 1]):
                if row[e] not in ids:
                    ids.append(int(row[e]))
                edges.append((ids.index(row[e]), at, e))
    return torch.tensor(ids), *torch.tensor(edges).T


def test_pygs_own_class_over_the_stores(graph, monkeypatch):
    """Its loader and its sampler read our stores, and find what the daemon does."""
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", False)
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", True)
    compiled = SimpleNamespace(neighbor_sample=whole_neighbourhoods)
    monkeypatch.setattr(torch.ops, "torch_sparse", compiled)
    how = {"input_nodes": torch.arange(99, -1, -1), "batch_size": 30}
    theirs = torch_geometric.loader.NeighborLoader(helios.pyg.stores(graph), [-1, -1], **how)
    count = 0
    for one, other in zip(theirs, helios.NeighborLoader(graph, [-1, -1], **how), strict=True):
        assert torch.equal(one.n_id[:30], other.n_id[:30])
        assert sorted(one.n_id.tolist()) == sorted(other.n_id.tolist())
        edges = [sorted(pairs(b.n_id[b.edge_index])) for b in (one, other)]
        assert edges[0] == edges[1]
        assert torch.equal(one.x, graph.x[one.n_id])
        assert torch.equal(one.y, graph.y[one.n_id])
        count += 1
    assert count == 4


def test_no_compiled_package_is_asked_for(graph):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(LinkNeighborLoader(graph, [2], neg_sampling_ratio=1.0, batch_size=50)))
