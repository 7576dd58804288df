"""PyG's NeighborLoader by its meaning: what its own tests ask, by their intent.

docs/reference/upstream-tests.md names the test of each of PyG's. Beside them: what scripts rely on.
"""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest

import helios
from helios.loader import NeighborLoader

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torch_geometric", reason="PyG is not installed")

from torch_geometric.data import Data  # noqa: E402
from torch_geometric.nn import GraphConv  # noqa: E402

TYPES = ("directional", "bidirectional", "induced")


@pytest.fixture(scope="module")
def graph(made):
    """A hundred nodes and five hundred edges at random, some of them twice."""
    return made(np.random.default_rng(3).integers(0, 100, (2, 500)), 100)


def pairs(edge_index):
    return list(zip(*edge_index.tolist(), strict=True))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("per_worker", [None, True, False])
def test_homo_neighbor_loader_basic(graph, kind, per_worker):
    loader = NeighborLoader(
        graph,
        num_neighbors=[5] * 2,
        batch_size=20,
        subgraph_type=kind,
        filter_per_worker=per_worker,
    )
    assert str(loader) == "NeighborLoader()"
    assert len(loader) == 5
    one = loader([7])
    assert isinstance(one, Data)
    assert (one.n_id[0].item(), one.batch_size, one.input_id.tolist()) == (7, 1, [7])
    all_edges = graph.edge_index
    there = set(pairs(all_edges))
    for i, batch in enumerate(loader):
        assert isinstance(batch, Data)
        assert batch.n_id.size() == (batch.num_nodes,)
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
        assert torch.equal(batch.y, graph.y[batch.n_id])
        assert torch.equal(batch.train_mask, graph.train_mask[batch.n_id])
        assert not batch["test_mask"][batch.n_id != 99].any()
        seeds = torch.arange(20 * i, 20 * i + 20)
        assert torch.equal(batch.n_id[:20], seeds)
        assert torch.equal(batch.input_id, seeds)
        assert batch.edge_index.max() < batch.num_nodes
        ends = batch.n_id[batch.edge_index]
        assert batch.e_id.size() == (batch.num_edges,)
        if kind == "bidirectional":
            drawn = set(pairs(ends))
            assert drawn == {(b, a) for a, b in drawn}
            assert all((a, b) in there or (b, a) in there for a, b in drawn)
            continue
        assert torch.equal(all_edges[:, batch.e_id], ends)
        assert torch.equal(batch["e_id"], batch.e_id)
        assert batch.e_id.unique().numel() == batch.num_edges
        if kind == "induced":
            inside = set(batch.n_id.tolist())
            want = [(a, b) for a, b in pairs(all_edges) if a in inside and b in inside]
            assert sorted(pairs(ends)) == sorted(want)
    assert i == 4


@pytest.mark.parametrize("kind", TYPES)
def test_homo_neighbor_loader_on_a_graph(made, kind):
    """With all neighbours, a model with weights of edges gives the seeds what the graph gives."""
    rng = np.random.default_rng(5)
    one_way = np.unique(np.sort(rng.integers(0, 300, (2, 900)), axis=0), axis=1)
    one_way = one_way[:, one_way[0] != one_way[1]]
    ds = made(np.concatenate([one_way, one_way[::-1]], axis=1), 300)
    edges = ds.edge_index
    # Equal both ways, as the bidirectional graph needs them.
    low, high = edges.min(0).values, edges.max(0).values
    weight = ((low * 300 + high) % 17).float() / 17
    seeds = torch.arange(5, 8)
    loader = NeighborLoader(ds, [-1, -1], seeds, batch_size=3, subgraph_type=kind)
    assert len(loader) == 1
    batch = next(iter(loader))
    torch.manual_seed(1)
    first, second = GraphConv(4, 16), GraphConv(16, 3)

    def model(x, edge_index, w):
        return second(first(x, edge_index, w).relu(), edge_index, w)

    want = model(ds.x, edges, weight)[seeds]
    got = model(batch.x, batch.edge_index, weight[batch.e_id])[: batch.batch_size]
    assert torch.allclose(got, want, rtol=1e-4)


def test_custom_neighbor_loader(graph):
    """The stores in the dataset's place give equal batches."""
    import helios.pyg

    options = {"input_nodes": torch.arange(100), "batch_size": 20, "num_neighbors": [-1] * 2}
    one = NeighborLoader(graph, **options)
    other = NeighborLoader(helios.pyg.stores(graph), **options)
    assert str(one) == str(other)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert len(a) == len(b)
        assert (a.num_nodes, a.num_edges, a.batch_size) == (b.num_nodes, b.num_edges, b.batch_size)
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)


def test_the_sample_is_that_of_a_walk(graph):
    """In place of PyG's two samplers compared: nodes and edges of a breadth-first walk."""
    edges = graph.edge_index
    batch = next(iter(NeighborLoader(graph, [-1, -1], torch.arange(10), batch_size=10)))
    nodes, frontier, drawn = list(range(10)), list(range(10)), []
    for hop in range(2):
        into = [e for v in frontier for e in (edges[1] == v).nonzero().flatten().tolist()]
        drawn += into
        frontier = []
        for e in into:
            if edges[0, e].item() not in nodes:
                nodes.append(edges[0, e].item())
                frontier.append(nodes[-1])
        assert batch.num_sampled_edges[hop] == len(into)
    assert batch.n_id.tolist() == nodes
    assert sorted(batch.e_id.tolist()) == sorted(drawn)
    place = {v: i for i, v in enumerate(nodes)}
    assert pairs(batch.edge_index) == [(place[a], place[b]) for a, b in pairs(edges[:, batch.e_id])]


def test_memmap_neighbor_loader(graph):
    """Rows are on SSDs; workers that PyG's loader would have are taken, and explained once."""
    assert isinstance(graph.files.array("features"), np.memmap)
    helios.loader._explained.clear()
    with pytest.warns(UserWarning, match="num_workers has no effect") as said:
        loader = NeighborLoader(graph, [5] * 2, batch_size=20, num_workers=2)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeighborLoader(graph, [5] * 2, num_workers=2, persistent_workers=False, pin_memory=False)
    batch = next(iter(loader))
    assert batch.num_nodes <= 100
    assert isinstance(batch.x, torch.Tensor)
    assert batch.x.size() == (batch.num_nodes, 4)


def test_homo_neighbor_loader_sampled_info(made):
    ds = made([[2, 3, 4, 5, 7, 7, 10, 11, 12, 13], [0, 1, 2, 3, 2, 3, 7, 7, 7, 7]], 14)
    batch = next(iter(NeighborLoader(ds, [1, 2, 4], batch_size=2, shuffle=False)))
    assert batch.num_sampled_nodes == [2, 2, 3, 4]
    assert batch.num_sampled_edges == [2, 4, 4]


def test_neighbor_loader_mapping(made):
    ds = made([[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5], [1, 2, 3, 4, 5, 8, 6, 7, 9, 10, 6, 11]], 12)
    seen = []
    for batch in NeighborLoader(ds, [1], batch_size=2, shuffle=True):
        assert torch.equal(batch.n_id[batch.edge_index], ds.edge_index[:, batch.e_id])
        seen += batch.n_id[: batch.batch_size].tolist()
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("shuffle", [False, True])
def test_neighbor_loader_input_id(graph, shuffle):
    """A mask's places are node numbers; of numbers, which may repeat, places in the list."""
    mask = graph.train_mask.clone()
    mask[0] = False
    numbers = torch.tensor([9, 4, 9, 70, 4, 9])
    for nodes, ids in ((mask, mask.nonzero().flatten()), (numbers, torch.arange(6))):
        loader = NeighborLoader(graph, [2, 2], nodes, batch_size=4, shuffle=shuffle)
        for _ in range(2):
            seen = []
            for batch in loader:
                seeds = batch.n_id[: batch.batch_size]
                assert torch.equal(batch.x[: batch.batch_size, 0].long(), seeds)
                if nodes is numbers:
                    assert torch.equal(numbers[batch.input_id], seeds)
                else:
                    assert torch.equal(batch.input_id, seeds)
                seen += batch.input_id.tolist()
            assert sorted(seen) == ids.tolist()
            assert shuffle or seen == ids.tolist()


# Beside those tests: scripts rely on these.


def ids(loader):
    return [b.n_id.tolist() for b in loader]


def test_each_epoch_draws_anew(graph):
    """In the given order, too; by torch's generator, or by a seed."""
    nodes = torch.arange(40)
    loader = NeighborLoader(graph, [2, 2], nodes, batch_size=10)
    torch.manual_seed(4)
    first, second = ids(loader), ids(loader)
    assert first != second
    assert [b[:10] for b in first] == [b[:10] for b in second] == nodes.view(4, 10).tolist()
    torch.manual_seed(4)
    assert ids(loader) == first
    assert ids(NeighborLoader(graph, [2, 2], nodes, batch_size=10)) == second
    mine = torch.Generator().manual_seed(9)
    got = ids(NeighborLoader(graph, [2, 2], nodes, batch_size=10, generator=mine))
    mine.manual_seed(9)
    assert got == ids(NeighborLoader(graph, [2, 2], nodes, batch_size=10, generator=mine))
    one, other = (NeighborLoader(graph, [2, 2], nodes, batch_size=10, seed=5) for _ in range(2))
    for _ in range(2):
        torch.rand(3)
        got = ids(one)
        assert got == ids(other)
        assert got not in (first, second)


def test_defaults_are_pygs(graph):
    loader = NeighborLoader(graph, [2])
    assert len(loader) == 100
    assert [b.n_id[0].item() for b in loader] == list(range(100))
    assert loader.data is graph


def test_a_split_is_its_mask(graph):
    """In heliosctl's order, so the batches are those of train."""
    options = {"batch_size": 16, "shuffle": True, "seed": 7}
    by_split = ids(NeighborLoader(graph, [3, 2], split="train", **options))
    assert by_split == ids(NeighborLoader(graph, [3, 2], graph.train_mask, **options))
    plain = helios.NumpyLoader(graph, [3, 2], batch_size=16, seed=7)
    assert by_split == [b.n_id.tolist() for b in plain]


def test_drop_last_and_transform(graph):
    def marked(batch):
        batch.mark = 1
        return batch

    more = {"batch_size": 30, "drop_last": True, "transform": marked}
    loader = NeighborLoader(graph, [2], **more)
    assert len(loader) == 3
    for _ in range(2):
        assert [(b.batch_size, b.mark) for b in loader] == [(30, 1)] * 3


def test_iterations_side_by_side(graph):
    loader = NeighborLoader(graph, [2, 2], batch_size=25)
    for a, b in zip(loader, loader, strict=True):
        assert torch.equal(a.n_id[:25], b.n_id[:25])
        assert torch.equal(b.x[:, 0].long(), b.n_id)


def test_resume_in_an_epoch_of_torchs_generator(graph):
    loader = NeighborLoader(graph, [2, 2], batch_size=20, shuffle=True)
    it = iter(loader)
    next(it)
    other = NeighborLoader(graph, [2, 2], batch_size=20, shuffle=True)
    other.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert ids(other) == ids(it)


def test_workers_of_torch(graph):
    """A loader without a seed, dealt to workers: one epoch for all of them."""
    from helios.torch import IterableDataset

    data = IterableDataset(NeighborLoader(graph, [2], batch_size=10))
    got = [b.n_id[:10].tolist() for b in torch.utils.data.DataLoader(data, batch_size=None)]
    assert got == torch.arange(100).view(10, 10).tolist()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replace": True}, "replace=True: .*draws without"),
        ({"disjoint": True}, "disjoint"),
        ({"time_attr": "time"}, "time_attr"),
        ({"weight_attr": "w"}, "weight_attr.*uniformly"),
        ({"batch_sampler": [[1]]}, "batch_sampler"),
        ({"sampler": object()}, "DistributedSampler"),
        ({"neighbor_sampler": object()}, "neighbor_sampler"),
        ({"subgraph_type": "other"}, "directional, bidirectional or induced"),
        ({"temporal_strategy": "first"}, "temporal_strategy"),
        ({"persistant_workers": True}, "did you mean persistent_workers"),
        ({"gpu_cash": "5%"}, "did you mean gpu_cache"),
        ({"shufle": True}, "did you mean shuffle"),
        ({"xyzzy": 1}, "xyzzy"),
        ({"num_neighbors": {("a", "b", "c"): [1]}}, "one type"),
    ],
)
def test_what_lacks_is_refused_when_it_is_asked_for(graph, arguments, said):
    with pytest.raises(helios.HeliosError, match=said):
        NeighborLoader(graph, **{"num_neighbors": [2], **arguments})


def test_pygs_defaults_are_taken(graph):
    """All of its arguments and torch's, at what they are without being given, say nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeighborLoader(
            graph, [2], None, None, False, "directional", False, "uniform", None, None, None, None,
            False, None, None, True, batch_size=1, shuffle=False, sampler=None, batch_sampler=None,
            num_workers=0, collate_fn=None, pin_memory=False, drop_last=False, timeout=0,
            worker_init_fn=None, multiprocessing_context=None, generator=None,
            prefetch_factor=None, persistent_workers=False, pin_memory_device="",
        )  # fmt: skip


def test_a_data_object_is_sent_to_save():
    with pytest.raises(helios.UsageError, match=r"helios\.save"):
        NeighborLoader(Data(), [2])


def test_the_dataset_as_data(graph):
    data = graph.to_data()
    assert len(graph) == data.num_nodes == 100
    assert (data.num_edges, data.num_features) == (graph.num_edges, graph.num_node_features)
    assert torch.equal(graph.x[3:5, 0], torch.tensor([3.0, 4.0]))
    assert torch.equal(data.y, torch.arange(100) % 3)
    assert (data.train_mask.sum(), data.val_mask.sum(), data.test_mask.sum()) == (98, 1, 1)
    data.validate()


@pytest.mark.parametrize(("target", "shape"), [("class", (100, 1)), ("regression", (100,))])
def test_y_keeps_its_shape(tmp_path, monkeypatch, binary, target, shape):
    """As saved: in Data, batches, PyG's own loaders of nodes and links, and its stores."""
    from helios.pyg import LinkNeighborLoader, stores
    from helios.pyg import NeighborLoader as Own

    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    y = (torch.arange(100) % 3).reshape(shape)
    y = y if target == "class" else y + 0.5
    edges = torch.from_numpy(np.random.default_rng(3).integers(0, 100, (2, 500)))
    data = Data(x=torch.randn(100, 4), edge_index=edges, y=y)
    helios.save(tmp_path / "g", data, target=target, binary=binary)
    with helios.open(tmp_path / "g", binary=binary) as ds:
        assert torch.equal(ds.to_data().y, y)
        features, _ = stores(ds)
        assert features.get_tensor_size(None, "y") == shape
        assert torch.equal(features.get_tensor(None, "y", index=torch.tensor([5, 2])), y[[5, 2]])
        for kind in (NeighborLoader, Own, LinkNeighborLoader):
            batch = next(iter(kind(ds, [3, 2], batch_size=50)))
            assert torch.equal(batch.y, y[batch.n_id])
        assert torch.equal(NeighborLoader(ds, [2], batch_size=5)(torch.arange(3)).y[:3], y[:3])


def test_batches_are_pickled(graph):
    """A batch goes from a process to another, as from workers of torch's DataLoader."""
    for batch in NeighborLoader(graph, [3, 2], batch_size=50, seed=1):
        other = pickle.loads(pickle.dumps(batch))
        assert type(other) is type(batch)
        assert torch.equal(other.x, batch.x)
        assert torch.equal(other.e_id, batch.e_id)
        assert torch.equal(other.train_mask, batch.train_mask)


@pytest.mark.parametrize("size", [7, 100, 1000])
def test_layer_wise_inference(graph, size):
    """PyG's models compute all nodes a layer at a time, as over the whole graph."""
    from torch_geometric.nn import GraphSAGE

    from helios.pyg import InferenceLoader

    torch.manual_seed(5)
    model = GraphSAGE(4, 8, num_layers=2, out_channels=3, norm="batch_norm").eval()
    loader = InferenceLoader(graph, batch_size=size)
    assert len(loader) == -(-100 // size)
    got = model.inference(loader)
    with torch.no_grad():
        want = model(graph.x, graph.edge_index)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    h = graph.x
    for conv in model.convs:  # a loop of one's own
        h = torch.cat([conv(h[b.n_id], b.edge_index)[: b.batch_size] for b in loader])
    assert h.shape == (100, 3)
    with pytest.raises(helios.UsageError, match="above 0"):
        InferenceLoader(graph, batch_size=0)
