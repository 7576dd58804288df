"""A small daemon for tests (docs/reference/protocol.md), with batches of known content."""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DIM = 4
NODES = 1000
HOPS = (6, 10, 13)  # nodes after each hop, of a batch of 6 seeds


def expected(epoch: int, index: int, rows: int = HOPS[-1]) -> dict[str, np.ndarray]:
    """The tensors of a batch: every number tells epoch, batch and place."""
    tag = epoch * 1000 + index
    n0, n1, n2 = HOPS
    n_id = (tag * 16 + np.arange(rows)) % NODES
    first = np.arange(n0 + 1, dtype=np.int64)  # hop 0: each seed draws one
    second = np.concatenate([first, n0 + np.arange(1, n1 - n0 + 1)])
    tensors = {
        "x": (tag + np.arange(rows * DIM)).astype(np.float32).reshape(rows, DIM),
        "n_id": n_id.astype(np.int64),
        "y": np.arange(n0, dtype=np.int64) + tag,
        "indptr.0": first,
        "src.0": (n0 + np.arange(n0) % (n1 - n0)).astype(np.int64),
        "indptr.1": second,
        "src.1": (np.arange(n1) % rows).astype(np.int64),
    }
    hop0 = np.stack([tensors["src.0"], np.arange(n0)])
    hop1 = np.stack([tensors["src.1"][n0:], np.arange(n0, n1)])
    tensors["edge_index"] = np.concatenate([hop0, hop1], axis=1).astype(np.int64)
    return tensors


def frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


class Peer:
    """One client's connection, and the daemon's state for it. Subclasses misbehave."""

    batches = 5  # of an epoch
    slot_bytes = 4096
    grow_at: int | None = None  # index of the batch before which the ring grows

    def __init__(self, sock: socket.socket, server: FakeServer) -> None:
        self.sock = sock
        self.server = server
        self.requests: list[dict[str, Any]] = []
        self.nodes: np.ndarray | None = None
        self.loaders: dict[int, Loader] = {}

    @property
    def loader(self) -> Loader:
        """The first one."""
        return self.loaders[1]

    # frames

    def read(self) -> dict[str, Any] | None:
        fds: list[int] = []
        head = self._exactly(4, fds)
        if head is None:
            return None
        message = json.loads(self._exactly(struct.unpack("<I", head)[0], None))
        if fds:
            with os.fdopen(fds[0], "rb") as f:
                f.seek(0)
                self.nodes = np.frombuffer(f.read(), "<i8")
        return message

    def _exactly(self, n: int, fds: list[int] | None) -> bytes | None:
        data = b""
        while len(data) < n:
            if fds is not None:
                got, control, _, _ = self.sock.recvmsg(n - len(data), 64)
                for _level, _kind, payload in control:
                    ints = array.array("i")
                    ints.frombytes(payload)
                    fds.extend(ints)
            else:
                got = self.sock.recv(n - len(data))
            if not got:
                return None
            data += got
        return data

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        self.send_raw(frame(message), fds)

    def send_raw(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.sock.sendmsg([data], control)
        self.sock.sendall(data[sent:])

    # the protocol

    def serve(self) -> None:
        while (message := self.read()) is not None:
            self.requests.append(message)
            getattr(self, "on_" + message["type"])(message)

    def on_hello(self, message: dict[str, Any]) -> None:
        self.send({"type": "welcome", "protocol": 3, "version": "fake", "pid": os.getpid()})

    def on_open(self, message: dict[str, Any]) -> None:
        if message["dataset"].endswith("missing"):
            self.send(
                {"type": "error", "class": "usage", "code": 2, "message": "no dataset is there"}
            )
            return
        splits = {"train": self.batches * HOPS[0], "val": 6, "test": 6}
        dataset = {"name": "fake", "uuid": "u-1", "nodes": NODES, "edges": 5000, "dim": DIM}
        dataset |= {"classes": 3, "row_dtype": "float32", "splits": splits}
        self.send({"type": "opened", "dataset": dataset, "handle": 1})

    def on_loader(self, message: dict[str, Any]) -> None:
        number = len(self.loaders) + 1
        self.loaders[number] = Loader(self, number, message)

    def on_epoch(self, message: dict[str, Any]) -> None:
        self.loaders[message["id"]].epoch(message)

    def on_release(self, message: dict[str, Any]) -> None:
        self.loaders[message["id"]].release(message["slot"])

    def on_stop(self, message: dict[str, Any]) -> None:
        self.loaders[message["id"]].stop()

    def on_close(self, message: dict[str, Any]) -> None:
        self.loaders[message["id"]].pending = []
        self.send({"type": "closed", "id": message["id"]})

    def tensors(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        return expected(epoch, index)

    def batch(self, loader: Loader, epoch: int, index: int, slot: int) -> dict[str, Any]:
        """Puts a batch into its slot and returns its message."""
        at, described = 0, []
        tensors = self.tensors(epoch, index)
        if loader.all_labels:
            tensors["y"] = np.arange(HOPS[-1], dtype=np.int64) + epoch * 1000 + index
        for name, a in tensors.items():
            begin = slot * loader.slot_bytes + at
            loader.map[begin : begin + a.nbytes] = a.tobytes()
            shape = list(a.shape)
            described.append({"name": name, "dtype": str(a.dtype), "shape": shape, "offset": at})
            at += -(-a.nbytes // 64) * 64
        assert at <= loader.slot_bytes
        message = {"type": "batch", "id": loader.id, "epoch": epoch, "index": index, "slot": slot}
        return {**message, "num_seeds": HOPS[0], "hop_end": list(HOPS), "tensors": described}


class TypedPeer(Peer):
    """The daemon of a typed graph: papers that cite papers, and authors that write them.

    A batch has 6 papers as seeds, and one hop.
    """

    SCHEMA: dict[str, Any] = {  # noqa: RUF012 - nobody writes to it
        "node_types": [
            {"name": "paper", "nodes": 600, "dim": 4, "features": "paper.npy"},
            {"name": "author", "nodes": 400, "dim": 2},
        ],
        "relations": [
            {"src": s, "name": n, "dst": d, "edges": 9, "indptr": "p.npy", "indices": "i.npy"}
            for s, n, d in (
                ("paper", "cites", "paper"),
                ("author", "writes", "paper"),
                ("paper", "reads", "author"),
            )
        ],
        "target_type": "paper",
    }

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if message["type"] == "opened":
            message["dataset"] |= self.SCHEMA
        super().send(message, fds)

    def tensors(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        return typed(epoch, index)

    def batch(self, loader: Loader, epoch: int, index: int, slot: int) -> dict[str, Any]:
        message = super().batch(loader, epoch, index, slot)
        del message["hop_end"]
        return {**message, "type_end": [[6, 8], [0, 3]], "relation_edges": [[4], [3], [0]]}


def typed(epoch: int, index: int) -> dict[str, np.ndarray]:
    """The tensors of a batch of TypedPeer."""
    tag = epoch * 1000 + index
    cited, wrote = np.array([6, 7, 0, 1]), np.array([0, 1, 2])
    none = np.empty(0, np.int64)
    return {
        "x.0": (tag + np.arange(32)).astype(np.float32).reshape(8, 4),
        "x.1": (tag + np.arange(6)).astype(np.float32).reshape(3, 2),
        "n_id.0": (tag + np.arange(8)) % 600,
        "n_id.1": (tag + np.arange(3)) % 400,
        "y": np.arange(6) + tag,
        "edge_index.0": np.stack([cited, np.arange(4)]),
        "edge_index.1": np.stack([wrote, np.arange(3)]),
        "edge_index.2": np.empty((2, 0), np.int64),
        "indptr.0.0": np.array([0, 1, 2, 3, 4, 4, 4]),
        "src.0.0": cited,
        "indptr.0.1": np.array([0, 1, 2, 3, 3, 3, 3]),
        "src.0.1": wrote,
        "indptr.0.2": np.array([0]),
        "src.0.2": none,
    }


class Loader:
    """A loader of a peer: its ring, and the epoch under way."""

    def __init__(self, peer: Peer, number: int, request: dict[str, Any]) -> None:
        self.peer, self.id = peer, number
        self.credits, self.slot_bytes = request["slots"], peer.slot_bytes
        # As the daemon, which makes the next batches in slots of the CPU's memory.
        self.slots = self.credits + (0 if "device" in request else 3)
        self.mine = list(range(request["rank"], peer.batches, request["world"]))
        self.pending: list[int] = []
        self.under_way: int | None = None
        self.released: list[int] = []
        self.free = set(range(self.slots))
        self.all_labels = request["all_labels"]
        answer = {"type": "loader", "id": number, "batches": len(self.mine), "slots": self.slots}
        answer["total"] = peer.batches
        self._send_ring({**answer, "credits": self.credits, "slot_bytes": self.slot_bytes})

    def _send_ring(self, message: dict[str, Any]) -> None:
        fd = os.memfd_create("ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.slots * self.slot_bytes)
        self.map = mmap.mmap(fd, self.slots * self.slot_bytes)
        try:
            self.peer.send(message, (fd,))
        finally:  # the client may be gone
            os.close(fd)

    def epoch(self, message: dict[str, Any]) -> None:
        self.under_way = message["epoch"]
        self.pending = self.mine[message["first"] :]
        self.pump()

    def release(self, slot: int) -> None:
        assert slot not in self.free, f"slot {slot} was released twice"
        self.free.add(slot)
        self.released.append(slot)
        self.pump()

    def stop(self) -> None:
        self.pending, self.under_way = [], None
        self.peer.send({"type": "stopped", "id": self.id})

    def pump(self) -> None:
        while self.pending and self.slots - len(self.free) < self.credits:
            index = self.pending.pop(0)
            if index == self.peer.grow_at:
                self.slot_bytes *= 2
                about = {"type": "ring", "id": self.id, "slot_bytes": self.slot_bytes}
                self._send_ring({**about, "slots": self.slots})
            slot = min(self.free)
            self.free.remove(slot)
            self.peer.send(self.peer.batch(self, self.under_way, index, slot))
        if not self.pending and self.under_way is not None:
            self.peer.send({"type": "epoch_end", "id": self.id, "epoch": self.under_way})
            self.under_way = None


class FakeServer:
    """Listens on a socket, and serves each client in a thread."""

    def __init__(self, path: Path, peer: type[Peer] = Peer) -> None:
        self.path = path
        self.peers: list[Peer] = []
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self._peer = peer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = self._peer(sock, self)
            self.peers.append(peer)
            t = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self.threads.append(t)
            t.start()

    def _serve(self, peer: Peer) -> None:
        try:
            peer.serve()
        except (ConnectionError, BrokenPipeError):
            pass
        except BaseException as e:
            self.errors.append(e)
        finally:
            peer.sock.close()

    def wait(self, done: Callable[[], bool], seconds: float = 20.0) -> None:
        """Waits until done() holds; fails when it does not in time."""
        pause = threading.Event()
        for _ in range(int(seconds / 0.005)):
            if done():
                return
            pause.wait(0.005)
        raise AssertionError("it did not happen in time")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(10)
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
        for t in self.threads:
            t.join(10)
        if self.errors:
            raise self.errors[0]
