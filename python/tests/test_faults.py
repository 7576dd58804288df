"""What goes wrong: hostile frames, a daemon that dies or is silent, forks, Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
from fakeserver import Peer, TypedPeer, expected, frame, typed

import helios

PACKAGE = Path(helios.__file__).resolve().parents[1]


def opened(server, timeout=20):
    return helios.open("somewhere", socket=server.path, timeout=timeout)


# Frames that are no frames, or no messages. None is an end of the connection.
FRAMES = {
    "length": struct.pack("<I", (16 << 20) + 1),
    "cut": struct.pack("<I", 100) + b"{",
    "no JSON": struct.pack("<I", 3) + b"{{{",
    "not UTF-8": struct.pack("<I", 2) + b"\xff\xfe",
    "a list": frame([1]),
    "no type": frame({"a": 1}),
    "type": frame({"type": 3}),
    "deep": struct.pack("<I", 200000) + b"[" * 200000,
    "unknown": frame({"type": "surprise", "id": 1}),
    "id": frame({"type": "batch", "id": "x"}),
    "negative id": frame({"type": "batch", "id": -1}),
    "uninvited": frame({"type": "opened", "handle": 3}),
    "huge number": struct.pack("<I", 5001 + 12) + b'{"type":"a" ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("name", FRAMES)
def test_hostile_frames(fake, name):
    class Hostile(Peer):
        def on_epoch(self, message):
            self.send_raw(FRAMES[name])
            if name == "cut":
                self.sock.shutdown(socket.SHUT_RDWR)

    with opened(fake(Hostile)) as ds:
        loader = helios.NumpyLoader(ds)
        kind = helios.DaemonDied if name == "cut" else helios.ProtocolError
        for _ in range(2):  # it connects again, and meets the same
            with pytest.raises(kind):
                list(loader)


def change_tensor(at, **new):
    def change(message):
        message["tensors"][at].update(new)

    return change


def change(**new):
    return lambda message: message.update(new)


def drop(name):
    def change(message):
        message["tensors"] = [t for t in message["tensors"] if t["name"] != name]

    return change


BATCHES = {
    "slot beyond": change(slot=4),
    "slot negative": change(slot=-1),
    "slot missing": change(slot=None),
    "slot true": change(slot=True),
    "no tensors": change(tensors=None),
    "tensors of text": change(tensors=["x"]),
    "offset beyond": change_tensor(0, offset=4096),
    "offset huge": change_tensor(0, offset=1 << 70),
    "offset negative": change_tensor(0, offset=-64),
    "offset odd": change_tensor(0, offset=4),
    "offset text": change_tensor(0, offset="0"),
    "offset of others": change_tensor(1, offset=0),
    "shape huge": change_tensor(0, shape=[1 << 40, 1 << 40]),
    "shape negative": change_tensor(0, shape=[-1, -1]),
    "shape text": change_tensor(0, shape="13"),
    "shape of many": change_tensor(0, shape=[1] * 9),
    "shape of others": change_tensor(0, shape=[12, 4]),
    "dtype unknown": change_tensor(0, dtype="object"),
    "dtype list": change_tensor(0, dtype=["f4"]),
    "dtype of ids": change_tensor(1, dtype="float32", shape=[13]),
    "name twice": change_tensor(1, name="x"),
    "name number": change_tensor(1, name=3),
    "no x": drop("x"),
    "no indptr": drop("indptr.1"),
    "no edges": drop("edge_index"),
    "seeds": change(num_seeds=7),
    "seeds text": change(num_seeds="6"),
    "hop_end falls": change(hop_end=[6, 5, 13]),
    "hop_end text": change(hop_end="6"),
    "hop_end empty": change(hop_end=[]),
    "hop_end huge": change(hop_end=[6, 10, 1 << 62]),
    "epoch": change(epoch=5),
    "indptr runs off": change_tensor(4, shape=[3]),
    "fewer edges": change_tensor(7, shape=[2, 9]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_hostile_batches(fake, name):
    class Hostile(Peer):
        def batch(self, *args):
            message = super().batch(*args)
            if len(self.server.peers) == 1:
                BATCHES[name](message)
            return message

    with opened(fake(Hostile)) as ds:
        loader = helios.NumpyLoader(ds)
        with pytest.raises(helios.ProtocolError):
            list(loader)
        assert len(list(loader)) == 5, "the loader does not recover"


def tensor(name, **new):
    def change(message):
        next(t for t in message["tensors"] if t["name"] == name).update(new)

    return change


TYPED_BATCHES = {
    "no type_end": change(type_end=None),
    "type_end of one type": change(type_end=[[6, 8]]),
    "type_end of three types": change(type_end=[[6, 8], [0, 3], [0, 0]]),
    "type_end of no hop": change(type_end=[[6], [0]]),
    "type_end of two hops": change(type_end=[[6, 8, 8], [0, 3, 3]]),
    "type_end falls": change(type_end=[[6, 5], [0, 3]]),
    "type_end of other seeds": change(type_end=[[5, 8], [1, 3]]),
    "type_end huge": change(type_end=[[6, 1 << 62], [0, 3]]),
    "type_end negative": change(type_end=[[6, 8], [0, -3]]),
    "type_end flat": change(type_end=[6, 8]),
    "type_end text": change(type_end=[["6", "8"], ["0", "3"]]),
    "no relation_edges": change(relation_edges=None),
    "relation_edges of none": change(relation_edges=[]),
    "relation_edges of two": change(relation_edges=[[4], [3]]),
    "relation_edges of others": change(relation_edges=[[3], [4], [0]]),
    "relation_edges huge": change(relation_edges=[[4], [1 << 62], [0]]),
    "relation_edges true": change(relation_edges=[[4], [3], [False]]),
    "relation_edges of two hops": change(relation_edges=[[4, 0], [3, 0], [0, 0]]),
    "more seeds": change(num_seeds=7),
    "no rows": drop("x.0"),
    "no rows of a type": drop("x.1"),
    "no nodes of a type": drop("n_id.1"),
    "no edges of a relation": drop("edge_index.2"),
    "no list": drop("indptr.0.2"),
    "no labels": drop("y"),
    "rows of other types": tensor("x.1", dtype="float16"),
    "rows of another width": tensor("x.1", shape=[2, 3]),
    "rows in others": tensor("x.1", offset=64),
    "nodes of float32": tensor("n_id.0", dtype="float32"),
    "labels of all": tensor("y", shape=[8]),
    "labels in others": tensor("y", offset=0),
    "fewer edges": tensor("edge_index.0", shape=[2, 3]),
    "a list that runs off": tensor("src.0.0", shape=[3]),
    "a list of fewer": tensor("indptr.0.0", shape=[6]),
}


@pytest.mark.parametrize("name", TYPED_BATCHES)
def test_hostile_batches_of_types(fake, name):
    class Hostile(TypedPeer):
        def batch(self, *args):
            message = super().batch(*args)
            if len(self.server.peers) == 1:
                TYPED_BATCHES[name](message)
            return message

    with opened(fake(Hostile)) as ds:
        loader = helios.NumpyLoader(ds, [1])
        with pytest.raises(helios.ProtocolError):
            list(loader)
        batches = list(loader)
    for i, b in enumerate(batches):  # it recovers
        want = typed(1, i)
        np.testing.assert_array_equal(b.x["paper"], want["x.0"])
        np.testing.assert_array_equal(b.n_id["author"], want["n_id.1"])
        cites = ("paper", "cites", "paper")
        np.testing.assert_array_equal(b.edge_index[cites], want["edge_index.0"])
        np.testing.assert_array_equal(b.blocks[0][cites].src, want["src.0.0"])
    assert len(batches) == 5


@pytest.mark.parametrize(
    ("peer", "name", "number"),
    [
        *((Peer, "n_id", number) for number in (-1, 1 << 62, 1000)),
        (Peer, "edge_index", 13),
        *((TypedPeer, name, -1) for name in ("n_id.1", "edge_index.1", "src.0.0", "indptr.0.0")),
        (TypedPeer, "n_id.0", 600),
        (TypedPeer, "n_id.1", 400),
        (TypedPeer, "edge_index.1", 3),
        (TypedPeer, "src.0.1", 3),
    ],
)
def test_hostile_numbers(fake, peer, name, number):
    """Numbers that would have a model read beyond its tensors."""

    class Hostile(peer):
        def tensors(self, epoch, index):
            tensors = super().tensors(epoch, index)
            if len(self.server.peers) == 1:
                tensors[name].reshape(-1)[1] = number
            return tensors

    with opened(fake(Hostile)) as ds:
        loader = helios.NumpyLoader(ds, [1] if peer is TypedPeer else [10, 10])
        with pytest.raises(helios.ProtocolError, match=r"n_id|edge_index|indptr"):
            list(loader)
        assert len(list(loader)) == 5


def test_a_slot_twice(fake):
    class Hostile(Peer):
        def batch(self, loader, epoch, index, slot):
            return super().batch(loader, epoch, index, 0)

    with opened(fake(Hostile)) as ds, pytest.raises(helios.ProtocolError, match="hold"):
        list(helios.NumpyLoader(ds))


@pytest.mark.parametrize(
    "ring",
    [
        {"slots": 0},
        {"slots": 1 << 40},
        {"slots": None},
        {"slot_bytes": 4097},
        {"slot_bytes": 1 << 62},
        {"slot_bytes": -1},
        {"id": "x"},
        {"id": None},
        {"batches": -1},
    ],
)
def test_hostile_rings(fake, ring):
    class Hostile(Peer):
        def send(self, message, fds=()):
            super().send({**message, **ring} if message["type"] == "loader" else message, fds)

    with opened(fake(Hostile)) as ds, pytest.raises(helios.ProtocolError):
        helios.NumpyLoader(ds)


def test_a_ring_without_memory(fake):
    class Hostile(Peer):
        def send(self, message, fds=()):
            super().send(message, () if message["type"] == "loader" else fds)

    with opened(fake(Hostile)) as ds, pytest.raises(helios.ProtocolError, match="0 descriptors"):
        helios.NumpyLoader(ds)


def test_descriptors_that_nobody_asked_for(fake):
    """They are closed, also where there are too many at once."""

    class Generous(Peer):
        def on_open(self, message):
            null = os.open(os.devnull, os.O_RDONLY)
            try:
                self.send({"type": "surprise"}, (null,) * self.many)
            finally:  # the client may close the connection before it has all
                os.close(null)

    for many in (1, 4, 12):
        server = fake(type("P", (Generous,), {"many": many}))
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(helios.ProtocolError):
            opened(server)
        # The server's own socket is closed a moment later, by its thread.
        server.wait(lambda n=before: len(os.listdir("/proc/self/fd")) <= n)


def test_a_strange_dataset(fake):
    class Strange(Peer):
        def send(self, message, fds=()):
            if message["type"] == "opened":
                message["dataset"] = self.strange
            super().send(message, fds)

    for strange in (None, {}, {"name": "x"}, [], {"nodes": []}):
        server = fake(type("P", (Strange,), {"strange": strange}))
        with pytest.raises(helios.ProtocolError):
            opened(server)


PAPER, AUTHOR = TypedPeer.SCHEMA["node_types"]
CITES = TypedPeer.SCHEMA["relations"][0]


@pytest.mark.parametrize(
    "strange",
    [
        {"node_types": None},
        {"node_types": []},
        {"node_types": [PAPER]},
        {"node_types": [PAPER, AUTHOR, AUTHOR]},
        {"node_types": [PAPER, {"name": "author"}]},
        {"node_types": [PAPER, {**AUTHOR, "nodes": -1}]},
        {"node_types": [PAPER, {**AUTHOR, "dim": float("inf")}]},
        {"node_types": [{**PAPER, "features": "../../etc/passwd"}, AUTHOR]},
        {"node_types": [{**PAPER, "features": "/etc/passwd"}, AUTHOR]},
        {"relations": None},
        {"relations": [CITES, CITES]},
        {"relations": [{**CITES, "edges": 1 << 63}]},
        {"relations": [{**CITES, "src": "venue"}]},
        {"relations": [{**CITES, "indices": None, "indptr": ".."}]},
        {"target_type": "venue"},
        {"target_type": 0},
        {"nodes": float("inf")},
    ],
)
def test_strange_types(fake, strange):
    class Strange(TypedPeer):
        SCHEMA = {**TypedPeer.SCHEMA, **strange}

    with pytest.raises(helios.ProtocolError, match="described the dataset"):
        opened(fake(Strange))


def test_a_daemon_that_dies(fake):
    """The next use connects again; the batches of before stay valid."""

    class Dying(Peer):
        def batch(self, loader, epoch, index, slot):
            if index == 2 and len(self.server.peers) == 1:
                self.sock.shutdown(socket.SHUT_RDWR)
            return super().batch(loader, epoch, index, slot)

    with opened(fake(Dying)) as ds:
        loader = helios.NumpyLoader(ds)
        kept = []
        with pytest.raises(helios.DaemonDied):
            kept.extend(iter(loader))
        loader.load_state_dict({**loader.state_dict(), "batch": 0})
        again = list(loader)
        assert [b.index for b in again] == [0, 1, 2, 3, 4]
        for b in kept + again:
            np.testing.assert_array_equal(b.x, expected(0, b.index)["x"])


def test_a_dataset_that_is_closed(fake):
    """The daemon is not said to have closed the connection."""
    server = fake()
    with opened(server) as ds:
        ds.session()[0]._path = Path(server.path)  # as of the user's own daemon
        it = iter(helios.NumpyLoader(ds))
        next(it)
    with pytest.raises(helios.DaemonDied, match="connection to the daemon is closed"):
        list(it)


def test_a_daemon_that_sends_us_away(fake, monkeypatch):
    """Its error is heard, though it is gone before we have said anything."""

    class Refuses(Peer):
        def serve(self):
            about = {"class": "refused", "code": 4, "message": "not your daemon"}
            self.send({"type": "error", **about})
            self.sock.close()
            self.server.gone = True

    server = fake(Refuses)
    server.gone = False
    send = helios._wire.Connection.send

    def late(self, *args):
        server.wait(lambda: server.gone)
        return send(self, *args)

    monkeypatch.setattr(helios._wire.Connection, "send", late)
    with pytest.raises(helios.RefusedError, match="not your daemon"):
        opened(server)


def test_a_silent_daemon(fake):
    class Silent(Peer):
        def on_epoch(self, message):
            pass

    with opened(fake(Silent), timeout=0.2) as ds:
        loader = helios.NumpyLoader(ds)
        with pytest.raises(helios.HeliosError, match=r"nothing for 0\.2 s"):
            next(iter(loader))


def test_threads(fake):
    """Two threads iterate over loaders of one dataset."""
    with opened(fake()) as ds:
        got: dict[int, list[int]] = {}

        def use(number):
            loader = helios.NumpyLoader(ds)
            got[number] = [b.index for _ in range(20) for b in loader]

        threads = [threading.Thread(target=use, args=(n,)) for n in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert got == {0: list(range(5)) * 20, 1: list(range(5)) * 20}


def in_child(work):
    """Runs work in a forked child; returns what it returned, or raises."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        status = 1
        try:
            os.write(write, repr(work()).encode())
            status = 0
        except BaseException as e:
            os.write(write, repr(e).encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        said = f.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, said
    return said


def test_a_forked_child_has_its_own_connection(fake):
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds)
        it = iter(loader)
        first = next(it)

        def work():
            x = first.x.copy()  # of before the fork
            assert np.array_equal(x, expected(0, 0)["x"])
            with pytest.raises(helios.DaemonDied, match="before a fork"):
                next(it)
            return [b.index for b in loader]

        for _ in range(20):
            assert in_child(work) == "[0, 1, 2, 3, 4]"
        # The parent's iteration is where it was, and its slots are its own.
        assert [b.index for b in it] == [1, 2, 3, 4]
        assert np.array_equal(first.x, expected(0, 0)["x"])
    assert len(server.peers) == 21


def test_a_child_does_not_keep_the_connection(fake):
    """Else the daemon would not notice the parent's death while the child lives."""
    server = fake()
    ds = opened(server)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # until the parent's end is closed
        os._exit(0)
    os.close(read)
    ds.close()
    server.wait(lambda: server.peers[0].sock.fileno() < 0)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_child_releases_nothing(fake):
    """A slot that the child drops is still the parent's."""
    server = fake()
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds)
        batch = [next(iter(loader))]

        def work():
            batch.clear()
            gc.collect()

        in_child(work)
        (peer,) = server.peers
        assert not [r for r in peer.requests if r["type"] == "release"]
        assert np.array_equal(batch[0].x, expected(0, 0)["x"])


INTERRUPTED = """
import sys, helios
ds = helios.open("x", socket=sys.argv[1], timeout=30)
loader = helios.NumpyLoader(ds)
try:
    for batch in loader:
        print("batch", batch.index, flush=True)
    print("no interrupt")
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(len(list(loader)), batch.index, float(batch.x[0, 0]))
"""


def test_interrupt(fake):
    """Ctrl-C while a batch is awaited; the next iteration works."""

    class Stuck(Peer):
        def batch(self, loader, epoch, index, slot):
            if epoch == 0:
                loader.pending, loader.under_way = [], None
            return super().batch(loader, epoch, index, slot)

    server = fake(Stuck)
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(server.path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        text=True,
    ) as p:
        assert p.stdout.readline() == "batch 0\n"
        p.send_signal(signal.SIGINT)
        rest = p.stdout.read()
        assert p.wait(30) == 0
    assert rest == "interrupted\n5 0 0.0\n"


def test_interrupt_of_a_request(fake):
    """Ctrl-C while another thread receives the answer: nobody gets it for a later request."""

    def stop(*_):
        raise KeyboardInterrupt

    with opened(fake()) as ds:
        session, _ = ds.session()
        was = signal.signal(signal.SIGALRM, stop)
        try:
            with session._receiving:  # as a thread that waits for batches has it
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(KeyboardInterrupt):
                    session.ask({"type": "hello", "protocol": 1, "client": "late"}, "welcome")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, was)
        assert not session.alive


def script(folder, text):
    path = folder / "heliosctl"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("code", "kind"),
    [(2, helios.UsageError), (3, helios.CapabilityError), (1, helios.DaemonDied)],
)
def test_a_daemon_that_cannot_start(tmp_path, monkeypatch, code, kind):
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    text = f"import sys; print('no such flag', file=sys.stderr); sys.exit({code})"
    with pytest.raises(kind, match="no such flag"):
        helios.open("x", binary=script(tmp_path, text))


def test_a_daemon_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(helios._daemon, "_GRACE_S", 0.2)
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with pytest.raises(helios.HeliosError, match="hangs"):
        helios.open("x", binary=script(tmp_path, text), timeout=0.5)


def test_a_place_that_is_held(tmp_path, monkeypatch):
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    with pytest.raises(helios.HeliosError, match="does not listen"):
        helios.open("x", binary=script(tmp_path, "raise SystemExit(4)"), timeout=0.5)


@pytest.mark.parametrize("link", [False, True])
def test_a_file_in_the_sockets_place(tmp_path, monkeypatch, link):
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path))
    place = helios._daemon.user_socket(str(tmp_path))
    place.symlink_to("nothing") if link else place.touch()
    with pytest.raises(helios.RefusedError, match="is no socket; remove it"):
        helios.open("x", binary=script(tmp_path, "raise SystemExit(4)"))


@pytest.mark.parametrize(
    ("version", "ours", "joined"),
    [("v1", "v1", True), ("v1", "v2", False), ("v1-dirty", "v1-dirty", False)],
)
def test_builds_of_a_version(tmp_path, version, ours, joined):
    """Those of one commit are equal, whatever file they are in."""
    binary = str(script(tmp_path, f"print('heliosctl {ours} (go)')"))
    welcome = {"version": version, "pid": 1, "environment": {"program": "1-2-3"}}
    mine = helios._daemon.environment(binary)
    welcome["environment"] = {**mine, **welcome["environment"]}
    assert (helios._daemon.difference(welcome, mine, binary) is None) == joined


def test_a_state_folder_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HELIOS_STATE", "/proc/nothing/here")
    with pytest.raises(helios.UsageError, match="name another folder with HELIOS_STATE"):
        helios.open("x", binary=script(tmp_path, ""))


def test_no_binary(tmp_path, monkeypatch):
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("HELIOSCTL", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(helios.CapabilityError, match="make build"):
        helios.open("x")
    with pytest.raises(helios.UsageError, match="no program"):
        helios.open("x", binary=tmp_path / "nothing")
    monkeypatch.setenv("HELIOSCTL", str(tmp_path))
    with pytest.raises(helios.UsageError, match="no program"):
        helios.open("x")
    bad = tmp_path / "bad"
    bad.write_bytes(b"\x7fELF no program")
    bad.chmod(0o755)
    with pytest.raises(helios.UsageError, match="cannot be started"):
        helios.open("x", binary=bad)
