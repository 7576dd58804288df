"""Typed graphs by PyG's meaning: its tests of HeteroData and NeighborLoader, by their intent.

Beside them: a dataset of a HeteroData is that HeteroData, and batches are those of `train`.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import helios

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torch_geometric", reason="PyG is not installed")

from torch_geometric.data import HeteroData  # noqa: E402
from torch_geometric.nn import GraphConv, HeteroConv, SAGEConv, to_hetero  # noqa: E402
from torch_geometric.sampler.base import NumNeighbors  # noqa: E402
from torch_geometric.utils import trim_to_layer  # noqa: E402

from helios.loader import NeighborLoader  # noqa: E402

NODES = {"paper": 100, "author": 200, "venue": 6}
CITES, READS = ("paper", "cites", "paper"), ("paper", "reads", "author")
WRITES, PRINTS = ("author", "writes", "paper"), ("venue", "prints", "paper")
NEVER = ("author", "never", "venue")
EDGES = {CITES: 500, READS: 1000, WRITES: 1000, PRINTS: 90, NEVER: 0}


def bibliography():
    """Row v of a type is [first + v, …]; papers have labels, but for one in seven."""
    rng, data, first = np.random.default_rng(3), HeteroData(), 0
    for name, n in NODES.items():
        data[name].x = torch.arange(first, first + n).float()[:, None].repeat(1, 4)
        first += n
    for e, n in EDGES.items():
        ends = [rng.integers(0, NODES[e[0]], n), rng.integers(0, NODES[e[2]], n)]
        data[e].edge_index = torch.from_numpy(np.stack(ends).astype(np.int64))
    v = torch.arange(100)
    data["paper"].y = torch.where(v % 7 == 6, -1, v % 3)
    for i, split in enumerate(("train", "val", "test")):
        data["paper"][f"{split}_mask"] = (v % 7 == i) | (v % 7 == 3 + i)
    return data


@pytest.fixture(scope="module")
def saved(tmp_path_factory, binary):
    """Saves and opens typed graphs."""
    opened = []
    with pytest.MonkeyPatch.context() as patch:

        def save(data, **more):
            folder = tmp_path_factory.mktemp("typed")
            patch.setenv("HELIOS_STATE", str(folder / "state"))
            helios.save(folder / "g", data, binary=binary, **more)
            helios.run("bind-ssds", f"--proxy={folder / 'a.img'}", "--size=16MiB", binary=binary)
            helios.run("load", str(folder / "g"), binary=binary)
            opened.append(helios.open(folder / "g", binary=binary))
            return opened[-1]

        yield save
        for ds in opened:
            ds.close()


@pytest.fixture(scope="module")
def graph(saved):
    return saved(bibliography(), unlabelled_ok=True)


def test_y_keeps_its_shape(saved):
    data = bibliography()
    data["paper"].y = data["paper"].y[:, None]
    ds = saved(data, unlabelled_ok=True)
    assert torch.equal(ds.to_data()["paper"].y, data["paper"].y)
    for batch in NeighborLoader(ds, [2, 2], "paper", batch_size=40):
        assert torch.equal(batch["paper"].y, data["paper"].y[batch["paper"].n_id])


def pairs(edge_index):
    return list(zip(*edge_index.tolist(), strict=True))


def ends(batch, e):
    """The edges of a batch as numbers of their nodes."""
    row, col = batch[e].edge_index
    return torch.stack([batch[e[0]].n_id[row], batch[e[2]].n_id[col]])


def test_a_dataset_is_what_was_saved(graph):
    want, got = bibliography(), graph.to_data()
    assert graph.metadata() == want.metadata() == got.metadata()
    assert (graph.node_types, graph.edge_types) == want.metadata()
    assert graph.num_node_features == dict.fromkeys(NODES, 4) == want.num_node_features
    assert graph["paper"].num_nodes == 100
    for t in NODES:
        assert torch.equal(got[t].x, want[t].x)
        assert torch.equal(graph[t].x, want[t].x)
    for name in ("y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(got["paper"][name], want["paper"][name])
        assert torch.equal(getattr(graph["paper"], name), want["paper"][name])
    for e in EDGES:
        assert sorted(pairs(got[e].edge_index)) == sorted(pairs(want[e].edge_index))
        assert graph[e].num_edges == want[e].num_edges
        assert torch.equal(graph[e].edge_index, got[e].edge_index)
    assert torch.equal(graph["venue", "paper"].edge_index, graph["prints"].edge_index)
    got.validate()


def check(graph, batch):
    """Whatever was drawn, a batch is a part of the graph with all that belongs to it."""
    assert isinstance(batch, HeteroData)
    assert batch.metadata() == graph.metadata()
    full = graph.to_data()
    for t in NODES:
        assert torch.equal(batch[t].x, full[t].x[batch[t].n_id])
        assert batch[t].n_id.unique().numel() == batch[t].num_nodes
        assert sum(batch[t].num_sampled_nodes) == batch[t].num_nodes
        assert batch[t].x.is_contiguous()
    assert torch.equal(batch["paper"].y, full["paper"].y[batch["paper"].n_id])
    assert torch.equal(batch["paper"].train_mask, full["paper"].train_mask[batch["paper"].n_id])
    for e in EDGES:
        assert batch[e].e_id.size() == (batch[e].num_edges,)
        assert batch[e].e_id.unique().numel() == batch[e].num_edges
        assert torch.equal(full[e].edge_index[:, batch[e].e_id], ends(batch, e))
        assert sum(batch[e].num_sampled_edges) == batch[e].num_edges


@pytest.mark.parametrize("kind", ["paper", "author"])
def test_hetero_neighbor_loader_basic(graph, kind):
    loader = NeighborLoader(graph, [10] * 2, input_nodes=kind, batch_size=20)
    assert str(loader) == "NeighborLoader()"
    assert len(loader) == NODES[kind] // 20
    one = loader([7])
    assert (one[kind].n_id[0], one[kind].batch_size, one[kind].input_id.tolist()) == (7, 1, [7])
    for i, batch in enumerate(loader):
        check(graph, batch)
        seeds = torch.arange(20 * i, 20 * i + 20)
        assert torch.equal(batch[kind].n_id[:20], seeds)
        assert torch.equal(batch[kind].input_id, seeds)
        assert batch[kind].batch_size == 20
        assert set(batch.x_dict) == set(NODES)
        assert set(batch.edge_index_dict) == set(batch.e_id_dict) == set(EDGES)
        assert batch[NEVER].edge_index.shape == (2, 0)
        for e in EDGES:
            drawn = torch.bincount(batch[e].edge_index[1], minlength=1)
            assert drawn.max() <= 10
        with pytest.raises(AttributeError, match="no attribute 'train_mask'"):
            assert batch["author"].train_mask is None
        assert not hasattr(batch["venue"], "val_mask")
    assert i + 1 == len(loader)


def test_hetero_neighbor_loader_on_a_graph(graph):
    """With all neighbours, PyG's to_hetero gives the seeds what the whole graph gives them."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = GraphConv(4, 16), GraphConv(16, 3)

        def forward(self, x, edge_index, edge_weight):
            x = self.conv1(x, edge_index, edge_weight).relu()
            return self.conv2(x, edge_index, edge_weight)

    torch.manual_seed(1)
    full = graph.to_data()
    model = to_hetero(Model(), graph.metadata())
    weight = {e: torch.rand(full[e].num_edges) for e in EDGES}
    seeds = torch.arange(5, 8)
    loader = NeighborLoader(graph, [-1, -1], ("paper", seeds), batch_size=3)
    assert len(loader) == 1
    batch = next(iter(loader))
    want = model(full.x_dict, full.edge_index_dict, weight)["paper"][seeds]
    of = {e: weight[e][batch[e].e_id] for e in EDGES}
    got = model(batch.x_dict, batch.edge_index_dict, of)["paper"][: batch["paper"].batch_size]
    assert torch.allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("neighbors", [[3, 2], [-1, -1]])
def test_hetero_conv_and_trim_to_layer(graph, neighbors):
    """A model that trims what later layers do not need has the same outputs at the seeds."""
    torch.manual_seed(2)
    layers = [
        HeteroConv({e: SAGEConv((-1, -1), 8) for e in EDGES if e != NEVER}, aggr="sum")
        for _ in neighbors
    ]

    def model(batch, trims):
        x, edges = batch.x_dict, batch.edge_index_dict
        for i, layer in enumerate(layers):
            if trims:
                x, edges, _ = trim_to_layer(
                    i, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edges
                )
            made = layer(x, edges)
            x = {t: made.get(t, x[t][:, :1].expand(-1, 8)).relu() for t in x}
        return x["paper"][: batch["paper"].batch_size]

    for batch in NeighborLoader(graph, neighbors, "paper", batch_size=25):
        got, want = model(batch, True), model(batch, False)
        assert torch.allclose(got, want, rtol=1e-4)


def test_hetero_neighbor_loader_sampled_info(saved):
    """The same small tree in each relation, so that a hop adds what PyG's count says."""
    tree = torch.tensor([[2, 3, 4, 5, 7, 7, 10, 11, 12, 13], [0, 1, 2, 3, 2, 3, 7, 7, 7, 7]])
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.zeros(14, 2), torch.zeros(14, 2)
    data["paper"].y = torch.arange(14) % 2
    data["paper", "to", "paper"].edge_index = tree
    data["paper", "to", "author"].edge_index = tree
    data["author", "to", "paper"].edge_index = tree
    ds = saved(data)
    loader = NeighborLoader(ds, [1, 2, 4], ("paper", [0, 1]), batch_size=2, shuffle=False)
    batch = next(iter(loader))
    # From its two seeds the tree has 2, then 3, then 4 new nodes, and 2, 4 and 4 edges. Authors
    # come a hop later from papers, and papers from them are those that papers led to.
    assert batch["paper"].num_sampled_nodes == [2, 2, 3, 4]
    assert batch["author"].num_sampled_nodes == [0, 2, 3, 4]
    assert batch["paper", "paper"].num_sampled_edges == [2, 4, 4]
    assert batch["author", "paper"].num_sampled_edges == [2, 4, 4]
    assert batch["paper", "author"].num_sampled_edges == [0, 4, 4]


def test_custom_neighbor_loader(graph):
    """PyG's stores in the dataset's place give equal batches."""
    import helios.pyg

    more = {"input_nodes": ("paper", range(100)), "batch_size": 20, "num_neighbors": [-1] * 2}
    one = NeighborLoader(graph, **more)
    other = NeighborLoader(helios.pyg.stores(graph), **more)
    assert (str(one), len(one)) == (str(other), len(other))
    for a, b in zip(one, other, strict=True):
        assert len(a) == len(b)
        for t in NODES:
            assert torch.equal(a[t].x, b[t].x)
        for e in EDGES:
            assert torch.equal(a[e].edge_index, b[e].edge_index)


def test_the_stores_answer_by_type(graph):
    import helios.pyg

    features, edges = helios.pyg.stores(graph)
    full = graph.to_data()
    names = {(a.group_name, a.attr_name) for a in features.get_all_tensor_attrs()}
    assert names == {("paper", "x"), ("paper", "y"), ("author", "x"), ("venue", "x")}
    for t, n in NODES.items():
        at = torch.tensor([3, 1, 3])
        assert torch.equal(features.get_tensor(t, "x", index=at), full[t].x[at])
        assert features.get_tensor_size(t, "x", index=None) == (n, 4)
    assert torch.equal(features.get_tensor("paper", "y", index=None), full["paper"].y)
    assert [a.edge_type for a in edges.get_all_edge_attrs()] == list(EDGES)
    for attr in edges.get_all_edge_attrs():
        row, colptr = edges.get_edge_index(attr)
        col = torch.arange(len(colptr) - 1).repeat_interleave(colptr.diff())
        assert torch.equal(torch.stack([row, col]), full[attr.edge_type].edge_index)
    for wrong in ("venues", None):
        with pytest.raises((KeyError, helios.UsageError)):
            features.get_tensor(wrong, "x", index=torch.tensor([0]))


def test_the_sample_is_that_of_a_walk(graph):
    """In place of PyG's two samplers compared: nodes and edges of a breadth-first walk."""
    full = graph.to_data()
    loader = NeighborLoader(graph, [-1, -1], ("author", torch.arange(10)), batch_size=10)
    batch = next(iter(loader))
    nodes = {t: list(range(10)) if t == "author" else [] for t in NODES}
    begin = dict.fromkeys(NODES, 0)
    drawn = {e: [] for e in EDGES}
    for hop in range(2):
        end = {t: len(nodes[t]) for t in NODES}
        for e in sorted(EDGES, key=lambda e: list(NODES).index(e[0])):
            row, col = full[e].edge_index
            before = len(drawn[e])
            for v in nodes[e[2]][begin[e[2]] : end[e[2]]]:
                into = (col == v).nonzero().flatten().tolist()
                drawn[e] += into
                for u in row[into].tolist():
                    if u not in nodes[e[0]]:
                        nodes[e[0]].append(u)
            assert batch[e].num_sampled_edges[hop] == len(drawn[e]) - before
        begin = end
    for t in NODES:
        assert batch[t].n_id.tolist() == nodes[t]
    for e in EDGES:
        assert batch[e].e_id.tolist() == drawn[e]


@pytest.mark.parametrize("shuffle", [False, True])
def test_neighbor_loader_input_id(graph, shuffle):
    mask = graph["paper"].train_mask
    numbers = torch.tensor([9, 4, 9, 70, 4, 9])
    for nodes, want in ((mask, mask.nonzero().flatten()), (numbers, torch.arange(6))):
        loader = NeighborLoader(graph, [2, 2], ("paper", nodes), batch_size=4, shuffle=shuffle)
        for _ in range(2):
            seen = []
            for batch in loader:
                seeds = batch["paper"].n_id[: batch["paper"].batch_size]
                assert torch.equal(batch["paper"].x[: len(seeds), 0].long(), seeds)
                at = batch["paper"].input_id
                assert torch.equal(at if nodes is mask else numbers[at], seeds)
                seen += at.tolist()
            assert sorted(seen) == want.tolist()
            assert shuffle or seen == want.tolist()


def test_neighbors_by_type(graph):
    by = {CITES: [3, 0], WRITES: [2, 2], READS: [-1, -1], PRINTS: [0, 1], NEVER: [1, 1]}
    text = {"__".join(e): n for e, n in by.items()}
    one, other, third = (
        NeighborLoader(graph, n, ("paper", [1, 2, 3]), batch_size=3, seed=4)
        for n in (by, text, NumNeighbors(by))
    )
    batch, same = next(iter(one)), next(iter(other))
    check(graph, batch)
    assert torch.equal(next(iter(third))["paper"].n_id, batch["paper"].n_id)
    assert one.num_neighbors == by
    for e, (first, second) in by.items():
        assert torch.equal(batch[e].edge_index, same[e].edge_index)
        begin = batch[e].num_sampled_edges[0]
        for hop, fanout in ((slice(0, begin), first), (slice(begin, None), second)):
            drawn = torch.bincount(batch[e].edge_index[1, hop], minlength=1)
            assert fanout < 0 or drawn.max() <= fanout
    for wrong, said in (
        ({CITES: [1]}, "lacks edges of type"),
        ({**by, CITES: [1]}, "other numbers of hops"),
        ({**by, ("a", "b", "c"): [1, 1]}, "no edges of type"),
        ([], "empty"),
    ):
        with pytest.raises(helios.UsageError, match=said):
            NeighborLoader(graph, wrong, "paper")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"input_nodes": None}, "name a type"),
        ({"input_nodes": "papers"}, "no nodes of type 'papers'; there are paper, author, venue"),
        ({"input_nodes": ("paper", [100])}, "nodes are 0 to 99"),
        ({"input_nodes": ("author", torch.ones(100, dtype=torch.bool))}, "not 200"),
        ({"input_nodes": ("venue", [])}, "empty"),
        ({"subgraph_type": "induced"}, "subgraph_type induced of a typed graph"),
        ({"directed": False}, "subgraph_type induced"),
        ({"sampler": "ladies"}, "ladies does not draw from typed graphs: a layer"),
        ({"split": "train"}, "not both"),
        ({"time_attr": "time"}, "time_attr"),
        ({"weight_attr": "w"}, "weight_attr"),
    ],
)
def test_what_lacks_is_refused(graph, arguments, said):
    with pytest.raises(helios.HeliosError, match=said):
        NeighborLoader(graph, **{"num_neighbors": [2], "input_nodes": "paper", **arguments})


def test_arrays_of_all_nodes_are_a_types(graph):
    for name in ("x", "y", "edge_index", "train_mask"):
        assert not hasattr(graph, name)
    with pytest.raises(AttributeError, match=r"dataset\['paper'\]\.x"):
        assert graph.x is None
    assert not hasattr(graph["author"], "y")
    with pytest.raises(helios.UsageError, match=r"no edges of type 'cites nothing'"):
        assert graph["cites nothing"] is None


def same(a, b):
    return all(torch.equal(a[t].n_id, b[t].n_id) for t in NODES) and all(
        torch.equal(a[e].edge_index, b[e].edge_index) for e in EDGES
    )


def test_a_split_is_that_of_train(graph, binary, monkeypatch):
    """In every mode as many rows as train looks up, and the same mini-batches."""
    monkeypatch.setenv("HELIOS_STATE", str(Path(graph.path).parent / "state"))
    options = {"batch_size": 16, "seed": 7}
    by = {e: [3, 2] for e in EDGES} | {CITES: [4, 0]}
    trained = helios.train(
        graph.path, binary=binary, model="rsage", fanout="1,1", epochs=2, hidden=8, no_eval=True,
        quiet=True, relation_fanout=helios._hetero.relation_fanouts(by), **options,
    )  # fmt: skip
    want = [
        sum(e.get(k, 0) for k in ("rows_gpu", "rows_cpu", "rows_ssd")) for e in trained["epochs"]
    ]
    first = None
    for mode in ("cpu", "inmem", "mmap", "helios", "gids"):
        loader = NeighborLoader(graph, by, split="train", shuffle=True, mode=mode, **options)
        plain = helios.NumpyLoader(graph, by, mode=mode, **options)
        epochs = [list(loader) for _ in want]
        assert [sum(b.num_nodes for b in e) for e in epochs] == want
        for e in epochs:
            for a, b in zip(e, plain, strict=True):
                for t in NODES:
                    assert a[t].n_id.tolist() == b.n_id[t].tolist()
        first = first or epochs
        assert all(
            same(a, b)
            for x, y in zip(first, epochs, strict=True)
            for a, b in zip(x, y, strict=True)
        )


def test_ranks_and_workers_share_an_epoch(graph):
    """As one loader, batch by batch; workers of torch's DataLoader get batches by pickle."""
    from helios.torch import IterableDataset

    more = {"split": "train", "batch_size": 8, "shuffle": True, "seed": 3}
    whole = list(NeighborLoader(graph, [2, 2], **more))
    ranks = [NeighborLoader(graph, [2, 2], rank=r, world_size=2, **more) for r in range(2)]
    for a, b in zip(*ranks, strict=True):
        assert same(a, whole[a.index])
        assert same(b, whole[b.index])
    data = IterableDataset(NeighborLoader(graph, [2, 2], **more))
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    assert all(same(a, b) for a, b in zip(loader, whole, strict=True))
    other = pickle.loads(pickle.dumps(whole[0]))
    assert same(other, whole[0])
    assert torch.equal(other[CITES].e_id, whole[0][CITES].e_id)
    assert torch.equal(other["paper"].train_mask, whole[0]["paper"].train_mask)


def test_resume_in_an_epoch(graph):
    loader = NeighborLoader(graph, [2, 2], "author", batch_size=20, shuffle=True)
    it = iter(loader)
    next(it)
    other = NeighborLoader(graph, [2, 2], "author", batch_size=20, shuffle=True)
    other.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert all(same(a, b) for a, b in zip(other, it, strict=True))
    papers = NeighborLoader(graph, [2, 2], ("paper", range(200 // 2)), batch_size=20, shuffle=True)
    with pytest.raises(helios.UsageError, match=r"node_type|nodes"):
        papers.load_state_dict(loader.state_dict())


def test_batches_without_pyg(graph):
    """Tensors by type, with the lists of each hop, which move whole."""
    from helios.torch import Loader

    batch = next(iter(Loader(graph, [3, 2], batch_size=8)))
    assert batch.input_type == batch.target_type == "paper"
    assert len(batch.y) == batch.num_seeds == 8
    assert torch.equal(batch.y, graph["paper"].y[batch.n_id["paper"][:8]])
    for h, hop in enumerate(batch.blocks):
        assert set(hop) == set(EDGES)
        for e, block in hop.items():
            assert block.num_dst == batch.node_end[e[2]][h]
            assert block.num_src == batch.node_end[e[0]][h + 1]
            dst = torch.arange(block.num_dst).repeat_interleave(block.indptr.diff())
            there = set(pairs(graph[e].edge_index))
            src, dst = batch.n_id[e[0]][block.src], batch.n_id[e[2]][dst]
            assert there.issuperset(pairs(torch.stack([src, dst])))
    moved = batch.to("meta")
    assert {a.device.type for a in (moved.x["venue"], moved.blocks[1][CITES].src)} == {"meta"}
    assert batch.cpu() == batch != moved.num_seeds
    assert "x={'paper': '[" in repr(batch)
    authors = next(iter(Loader(graph, [3], input_nodes=("author", [5]))))
    assert (authors.input_type, authors.y.tolist(), authors.n_id["author"][0]) == ("author", [], 5)


def test_x_is_a_view_of_the_ring(graph):
    """A slot is ours while the rows of one type live."""
    loader = NeighborLoader(graph, [2], ("paper", range(40)), batch_size=10, slots=3)
    it = iter(loader)
    x = next(it)["author"].x
    before = x.clone()
    assert len(loader._remote.held) == 1
    list(it)
    assert torch.equal(x, before)
    assert len(loader._remote.held) == 1


def test_save_without_masks_and_with_several_labels(saved):
    data = bibliography()
    for split in ("train", "val", "test"):
        del data["paper"][f"{split}_mask"]
    ds = saved(data, unlabelled_ok=True)
    assert sum(ds.splits.values()) > 50
    assert torch.equal(ds["paper"].y, data["paper"].y)
    data["author"].y = torch.arange(200) % 2
    with pytest.raises(helios.UsageError, match=r"2 types have y \(paper, author\); name one"):
        saved(data)
    ds = saved(data, labels="author")
    assert ds.num_classes == 2
    assert torch.equal(ds["author"].y, data["author"].y)
    loader = NeighborLoader(ds, [2], split="train", batch_size=8)
    batch = next(iter(loader))
    assert batch["author"].train_mask[: batch["author"].batch_size].all()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: d["paper"].pop("y"), "no type has y"),
        (lambda d: d["a:b"].update({"x": torch.zeros(3, 4)}), "'a:b' has a colon"),
        (lambda d: setattr(d[CITES], "edge_index", torch.tensor([[0], [100]])), "100"),
        (lambda d: setattr(d[WRITES], "edge_index", torch.tensor([[-1], [0]])), "-1"),
        (lambda d: setattr(d["venue"], "x", torch.zeros(6, 90)), "give option pad|give pad"),
        (lambda d: setattr(d["paper"], "y", torch.zeros(99).long()), "99"),
    ],
)
def test_what_cannot_be_saved_is_named(saved, spoil, said):
    data = bibliography()
    spoil(data)
    with pytest.raises(helios.HeliosError, match=said):
        saved(data, unlabelled_ok=True)


def test_rows_of_several_widths(saved):
    data = bibliography()
    data["venue"].x = torch.arange(6).float()[:, None].repeat(1, 7)
    ds = saved(data, unlabelled_ok=True, pad=True)
    assert ds.num_node_features == {"paper": 4, "author": 4, "venue": 7}
    batch = next(iter(NeighborLoader(ds, [-1, -1], "paper", batch_size=50)))
    for t, width in ds.num_node_features.items():
        assert batch[t].x.shape[1] == width
        assert torch.equal(batch[t].x, data[t].x[batch[t].n_id])


def test_types_without_rows(tmp_path, binary, monkeypatch):
    """The whole graph is as PyG has such types; batches are refused by name."""
    import helios.pyg

    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    out = tmp_path / "g"
    more = ("--kind=typed", "--nodes=1000", "--classes=4", "--without-rows=1", f"--out={out}")
    helios.run("generate", *more, binary=binary)
    with helios.open(out, binary=binary) as ds:
        data = ds.to_data()
        assert ds.num_node_features == data.num_node_features
        assert (data["venue"].num_nodes, hasattr(ds["venue"], "x")) == (len(ds["venue"]), False)
        features, _ = helios.pyg.stores(ds)
        named = {a.group_name for a in features.get_all_tensor_attrs()}
        assert named == {"paper", "author", "institution"}
        with pytest.raises(helios.CapabilityError, match="type venue have no features"):
            NeighborLoader(ds, [2], "paper")


@pytest.mark.parametrize(("kind", "off"), [("float16", 0), ("bfloat16", 1.0), ("int8", 1.5)])
def test_rows_of_every_type(tmp_path, binary, monkeypatch, kind, off):
    """As the SSDs have them, cut to each type's width; int8 comes as float32."""
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    data = bibliography()
    data["venue"].x = torch.arange(6).float()[:, None].repeat(1, 7)
    helios.save(tmp_path / "g", data, binary=binary, unlabelled_ok=True, pad=True)
    helios.run("bind-ssds", f"--proxy={tmp_path / 'a.img'}", "--size=16MiB", binary=binary)
    helios.run("load", str(tmp_path / "g"), f"--row-dtype={kind}", binary=binary)
    with helios.open(tmp_path / "g", binary=binary) as ds:
        for batch in NeighborLoader(ds, [-1, -1], "paper", batch_size=30):
            for t in NODES:
                x, want = batch[t].x, data[t].x[batch[t].n_id]
                assert str(x.dtype) == ("torch.float32" if kind == "int8" else f"torch.{kind}")
                assert (x.float() - want).abs().max() <= off


@pytest.mark.parametrize(
    "options",
    [
        {"model": "rsage", "residual_linear": True, "norm": "batch"},
        {"model": "rsage", "root": "none", "head": "mlp", "norm": "layer", "share_types": True},
        {"model": "rgcn", "residual": True, "head": "linear"},
        {"model": "rgat", "heads": 4, "head": "linear", "activation": "leaky"},
        {"model": "rgat", "heads": 2, "dropout": 0.1},
        {"model": "rsage", "embed": "4"},
    ],
)
def test_checkpoints_are_layers(graph, saved, binary, tmp_path, options):
    if "embed" in options:
        data = bibliography()
        del data["venue"].x
        data["venue"].num_nodes = NODES["venue"]
        graph = saved(data, unlabelled_ok=True)
    run, out = tmp_path / "run", tmp_path / "scores.npy"
    common = {"mode": "inmem", "binary": binary}
    more = {"hidden": 8, "epochs": 2, "lr": 0.05, "batch_size": 16}
    helios.train(graph.path, checkpoint=run, fanout=[4, 4], **common, **more, **options)
    helios.run(
        *("predict", str(graph.path), f"--checkpoint={run}", f"--scores={out}"),
        *("--mode=inmem", "--fanout=-1,-1"),
        binary=binary,
    )
    model, full = helios.load_pyg(run), graph.to_data()
    with torch.no_grad():
        x = {t: v for t, v in full.x_dict.items() if "embed" not in options or t != "venue"}
        got = model(x, full.edge_index_dict)["paper"]
    want = torch.from_numpy(np.load(out))
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))
