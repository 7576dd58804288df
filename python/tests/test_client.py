"""The client against a fake daemon: content, slots, growth, resuming, ranks, several iterations."""

from __future__ import annotations

import gc
import itertools
import os
import pickle

import numpy as np
import pytest
from fakeserver import HOPS, Peer, expected

import helios


def opened(server, **more):
    return helios.open("somewhere", socket=server.path, timeout=20, **more)


def check(batch, epoch, index):
    want = expected(epoch, index)
    assert (batch.epoch, batch.index) == (epoch, index)
    for name in ("x", "n_id", "y", "edge_index"):
        np.testing.assert_array_equal(getattr(batch, name), want[name])
    for h, block in enumerate(batch.blocks):
        np.testing.assert_array_equal(block.indptr, want[f"indptr.{h}"])
        np.testing.assert_array_equal(block.src, want[f"src.{h}"])
        assert (block.num_dst, block.num_src) == (HOPS[h], HOPS[h + 1])


def memory(a):
    """What an array lies in: the slot, or nothing where it is a copy."""
    while isinstance(a, np.ndarray):
        a = a.base
    return None if a is None else a.obj


def test_dataset(fake):
    with opened(fake()) as ds:
        assert (ds.name, ds.num_nodes, ds.num_edges, ds.num_features) == ("fake", 1000, 5000, 4)
        assert (ds.num_classes, ds.row_dtype, ds.splits["val"]) == (3, "float32", 6)
        assert "fake" in repr(ds)
    with pytest.raises(helios.HeliosError, match="closed"):
        helios.NumpyLoader(ds)


def test_epochs_in_order(fake):
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, [1, 1], batch_size=6, seed=3, gpu_cache="5%", no_edges=True)
        assert len(loader) == 5
        for epoch in range(3):
            assert loader.epoch == epoch
            for i, batch in enumerate(loader):
                check(batch, epoch, i)
                assert batch.num_sampled_nodes == [6, 4, 3]
                assert batch.num_sampled_edges == [6, 4]
            assert i == 4
    (peer,) = server.peers
    request = next(r for r in peer.requests if r["type"] == "loader")
    options = {"fanout": "1,1", "batch-size": 6, "seed": 3, "gpu-cache": "5%", "no-edges": True}
    assert request["options"] == options
    assert (request["split"], request["shuffle"], request["rank"]) == ("train", True, 0)


def test_batches_that_are_kept_stay_valid(fake):
    """Beyond the slots there are, and beyond the loader, the dataset and the daemon."""
    server = fake()
    ds = opened(server)
    loader = helios.NumpyLoader(ds)
    kept = [b for _ in range(4) for b in loader]
    assert len(kept) == 20
    assert sum(memory(b.x) is not None for b in kept) == 3
    ds.close()
    server.close()
    del loader, ds
    gc.collect()
    for n, b in enumerate(kept):
        check(b, n // 5, n % 5)


def test_slots_come_back_with_the_last_view(fake):
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds)
        it = iter(loader)
        b = next(it)
        (peer,) = server.peers
        view = b.x[2:3, 1:]
        want = view.copy()
        del b
        gc.collect()
        assert peer.loader.released == []
        np.testing.assert_array_equal(view, want)
        del view
        gc.collect()
        server.wait(lambda: peer.loader.released == [0])
        rest = list(it)
        assert len(rest) == 4


def test_copies_when_slots_run_out(fake):
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, slots=2)
        kept = list(loader)
        assert len(kept) == 5
        (peer,) = server.peers
        # One batch is held in its slot; the other slot served all others.
        server.wait(lambda: len(peer.loader.released) == 4)
        for i, b in enumerate(kept):
            check(b, 0, i)
    for slots, copy in ((1, False), (4, True)):
        with opened(server) as ds:
            kept = list(helios.NumpyLoader(ds, slots=slots, copy=copy))
            released = server.peers[-1].loader.released
            server.wait(lambda: len(released) == 5)  # noqa: B023


def test_a_batch_can_be_written_to(fake):
    with opened(fake()) as ds:
        for i, batch in enumerate(helios.NumpyLoader(ds)):
            check(batch, 0, i)
            batch.x[:] = -1
            batch.n_id[:] = -1


def test_growth(fake):
    class Growing(Peer):
        grow_at = 2

    server = fake(Growing)
    with opened(server) as ds:
        kept = list(helios.NumpyLoader(ds, slots=8))
        for i, b in enumerate(kept):
            check(b, 0, i)
        assert {len(memory(b.x)) for b in kept} == {4096, 8192}


def test_breaking_off(fake):
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds)
        for batch in loader:
            check(batch, 0, 0)
            break
        assert loader.state_dict()["batch"] == 1
        for i, batch in enumerate(loader):
            check(batch, 1, i)
        it = iter(loader)
        check(next(it), 2, 0)
        for i, batch in enumerate(loader):
            check(batch, 3, i)
        check(next(it), 2, 1)  # it has a loader of the daemon's to itself
    (peer,) = server.peers
    assert [r["type"] for r in peer.requests].count("stop") == 1
    assert [r["type"] for r in peer.requests].count("loader") == 2


def test_iterations_side_by_side(fake):
    """Each is an epoch of its own; a loader of the daemon's goes with its iteration."""
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds)
        for epoch in (0, 2):
            pairs = list(zip(loader, loader, strict=True))
            assert len(pairs) == 5
            for i, (one, other) in enumerate(pairs):
                check(one, epoch, i)
                check(other, epoch + 1, i)
        assert loader.epoch == 4
        a, b = iter(loader), iter(loader)
        next(a), next(b)
        del a
        gc.collect()
        c = iter(loader)  # takes the place of a
        check(next(c), 6, 0)
        check(next(b), 5, 1)
    (peer,) = server.peers
    kinds = [r["type"] for r in peer.requests]
    assert (kinds.count("loader"), kinds.count("close")) == (4, 2)


def test_state(fake):
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, seed=9)
        list(loader)
        it = iter(loader)
        next(it), next(it)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        assert (state["epoch"], state["batch"]) == (1, 2)
        assert loader.state_dict() == state
    with opened(server) as ds:
        other = helios.NumpyLoader(ds, seed=9)
        other.load_state_dict(state)
        assert other.state_dict() == state
        for i, batch in enumerate(other):
            check(batch, 1, i + 2)
        assert other.state_dict()["epoch"] == 2
        for i, batch in enumerate(other):
            check(batch, 2, i)
        with pytest.raises(helios.UsageError, match="seed"):
            helios.NumpyLoader(ds, seed=8).load_state_dict(state)
        with pytest.raises(helios.UsageError, match="batch"):
            other.load_state_dict({**state, "batch": -1})
        other.set_epoch(40)
        check(next(iter(other)), 40, 0)


def test_ranks(fake):
    server = fake()
    seen = []
    for rank in range(2):
        with opened(server) as ds:
            loader = helios.NumpyLoader(ds, rank=rank, world_size=2)
            assert len(loader) == 3
            seen.append([b.index for b in loader])
            assert loader.epoch == 1
            ds.splits["train"] = 4 * HOPS[0] + 1
            full = helios.NumpyLoader(ds, batch_size=6, rank=rank, world_size=2, drop_last=True)
            assert len(full) == 2
            for epoch in range(2):
                assert [(b.epoch, b.index) for b in full] == [(epoch, rank), (epoch, rank + 2)]
    assert seen == [[0, 2, 4], [1, 3, 1]]  # the second has its first once more
    with opened(server) as ds:
        with pytest.raises(helios.UsageError, match="6 ranks"):
            helios.NumpyLoader(ds, rank=1, world_size=6)
        ds.splits["train"] = 9
        with pytest.raises(helios.UsageError, match="drop_last"):
            helios.NumpyLoader(ds, batch_size=10, drop_last=True)


def test_a_state_of_another_number_of_ranks(fake):
    """Together they go on with the next batch of the epoch, whoever had it before."""
    server = fake(type("P", (Peer,), {"batches": 11}))
    with opened(server) as ds:

        def loader(rank, world):
            return helios.NumpyLoader(ds, rank=rank, world_size=world)

        for before, given, after in itertools.product((1, 2, 4), (0, 1, 2), (1, 2, 3, 4)):
            states = []
            for rank in range(before):
                one = loader(rank, before)
                one.load_state_dict({**one.state_dict(), "epoch": 0, "batch": 1})
                it = iter(one)
                for _ in range(given):
                    next(it)
                states.append(one.state_dict())
                del it
            assert all(s == states[0] for s in states)
            seen = []
            for rank in range(after):
                other = loader(rank, after)
                other.load_state_dict(states[0])
                seen.append([b.index for b in other])
            left = 10 - given * before
            assert {len(s) for s in seen} == {-(-left // after)}
            assert sorted({i for s in seen for i in s}) == list(range(11 - left, 11)) or (
                sum(map(len, seen)) > left  # which repeats batches from before
            )
        done = loader(0, 2)
        it = iter(done)
        for _ in range(6):
            next(it)
        rest = loader(0, 1)
        rest.load_state_dict(done.state_dict())  # 12 of 11: rank 1 had no sixth
        assert list(rest) == []
        assert [b.epoch for b in rest][:1] == [1]


def test_steps(fake):
    """Parts of a step weigh what their seeds do, whatever the ranks; and go on from a state."""

    with opened(fake(type("P", (Peer,), {"batches": 11}))) as ds:
        ds.splits["train"] = 10 * HOPS[0] + 2
        for world in (1, 2, 4):
            weights: dict[tuple[int, int], float] = {}
            for rank in range(world):
                loader = helios.NumpyLoader(ds, batch_size=6, rank=rank, world_size=world)
                step = 0
                for part in helios.steps(loader, 4):
                    if part.batch is not None:
                        weights[step, part.batch.index] = part.weight / world
                    else:
                        assert part.weight == 0
                    step += part.last
                assert step == 3
                assert loader.epoch == 1
            assert sorted(weights) == [(i // 4, i) for i in range(11)]
            assert weights[0, 0] == pytest.approx(1 / 4)
            assert weights[2, 8] == pytest.approx(6 / 14)
            assert weights[2, 10] == pytest.approx(2 / 14)
        loader = helios.NumpyLoader(ds, batch_size=6, world_size=2)
        loader.load_state_dict({**loader.state_dict(), "batch": 8})
        assert [p.batch and p.batch.index for p in helios.steps(loader, 4)] == [8, 10]
        loader.load_state_dict({**loader.state_dict(), "batch": 6})
        with pytest.raises(helios.UsageError, match="middle of a step"):
            list(helios.steps(loader, 4))
        with pytest.raises(helios.UsageError, match="multiple"):
            helios.steps(loader, 3)


def test_input_nodes(fake):
    server = fake()
    with opened(server) as ds:
        first = helios.NumpyLoader(ds, input_nodes=np.array([5, 3, 8], np.int32))
        (peer,) = server.peers
        assert peer.nodes.tolist() == [5, 3, 8]
        request = next(r for r in peer.requests if r["type"] == "loader")
        assert (request["split"], request["shuffle"]) == (None, False)
        mask = np.zeros(1000, bool)
        mask[[4, 7]] = True
        second = helios.NumpyLoader(ds, input_nodes=mask)
        assert peer.nodes.tolist() == [4, 7]
        assert len(first) == len(second) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"input_nodes": [1000]}, "0 to 999"),
        ({"input_nodes": [-1]}, "0 to 999"),
        ({"input_nodes": []}, "empty"),
        ({"input_nodes": [0.5]}, "float64"),
        ({"input_nodes": [[1]]}, "2 dimensions"),
        ({"input_nodes": np.zeros(9, bool)}, "9 nodes"),
        ({"input_nodes": np.zeros(1000, bool)}, "no node"),
        ({"input_nodes": [1], "split": "val"}, "not both"),
        ({"rank": 2, "world_size": 2}, "rank 2"),
        ({"num_neighbors": []}, "num_neighbors"),
        ({"fanout": "5"}, "num_neighbors"),
        ({"policy": object()}, "policy"),
    ],
)
def test_wrong_arguments(fake, arguments, said):
    with opened(fake()) as ds, pytest.raises(helios.UsageError, match=said):
        helios.NumpyLoader(ds, **arguments)


def test_errors_have_classes(fake):
    server = fake()
    with pytest.raises(helios.UsageError, match="no dataset is there") as e:
        helios.open("missing", socket=server.path)
    assert (e.value.code, isinstance(e.value, ValueError)) == (2, True)

    class Refusing(Peer):
        code = 3

        def on_loader(self, message):
            self.send({"type": "error", "code": self.code, "message": "no such thing"})

    kinds = {3: helios.CapabilityError, 4: helios.RefusedError, 5: helios.DeviceError}
    kinds |= {1: helios.HeliosError, 130: helios.Interrupted, 99: helios.HeliosError}
    for code, kind in kinds.items():
        with opened(fake(type("P", (Refusing,), {"code": code}))) as ds:
            with pytest.raises(helios.HeliosError, match="no such thing") as e:
                helios.NumpyLoader(ds)
            assert type(e.value) is kind


def test_an_error_in_an_epoch(fake):
    class Failing(Peer):
        def on_epoch(self, message):
            if message["epoch"] == 0:
                self.send({"type": "error", "id": 1, "code": 5, "message": "bad"})
            else:
                super().on_epoch(message)

    with opened(fake(Failing)) as ds:
        loader = helios.NumpyLoader(ds)
        it = iter(loader)  # which keeps no loader of the daemon's behind its error
        with pytest.raises(helios.DeviceError, match="bad"):
            list(it)
        assert len(list(loader)) == 5
        assert len(loader.dataset.session()[0]._boxes) == 1


def test_nobody_listens(tmp_path):
    with pytest.raises(helios.UsageError, match="heliosctl serve"):
        helios.open("x", socket=tmp_path / "nothing")


def test_two_loaders_on_one_connection(fake):
    """Frames of one that arrive while the other waits are kept for it."""

    with opened(fake()) as ds:
        a, b = helios.NumpyLoader(ds), helios.NumpyLoader(ds)
        for epoch in range(2):
            for i, (one, other) in enumerate(zip(a, b, strict=True)):
                check(one, epoch, i)
                check(other, epoch, i)
        ia, ib = iter(a), iter(b)
        check(next(ia), 2, 0)
        check(next(ib), 2, 0)
        del ia
        a.close()
        for i, batch in enumerate(ib, 1):
            check(batch, 2, i)


def test_a_loader_that_is_gone_is_closed(fake):
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds)
        batch = next(iter(loader))
        del loader
        gc.collect()
        (peer,) = server.peers
        server.wait(lambda: any(r["type"] == "close" for r in peer.requests))
        check(batch, 0, 0)
        released = len(peer.loader.released)
        del batch
        gc.collect()
        assert len(list(helios.NumpyLoader(ds, split="val"))) == 5
        assert len(peer.loader.released) == released, "a slot of a closed loader is released"


def test_pickled(fake):
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, seed=4)
        next(iter(loader))
        again = pickle.loads(pickle.dumps(loader))
        assert [b.index for b in again] == [1, 2, 3, 4]
        assert len(server.peers) == 2
        again.dataset.close()


def test_no_descriptor_is_left(fake):
    server = fake()

    def use():
        with opened(server) as ds:
            list(helios.NumpyLoader(ds, input_nodes=[1, 2]))
        gc.collect()
        server.peers.clear()

    use()
    server.wait(lambda: all(not t.is_alive() for t in server.threads))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        use()
    server.wait(lambda: len(os.listdir("/proc/self/fd")) <= before)
