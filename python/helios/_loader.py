"""Loaders: epochs of mini-batches that the daemon samples and reads."""

from __future__ import annotations

import copy
import difflib
import fcntl
import functools
import inspect
import logging
import os
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from . import _batch, _cuda, _daemon, _hetero
from ._batch import Batch
from ._cuda import GpuRing, PinnedRing
from ._dataset import Dataset
from ._errors import CapabilityError, DeviceError, HeliosError, ProtocolError, UsageError
from ._hetero import EdgeType, relation_fanouts
from ._ring import Ring, is_count
from ._session import Session
from ._settings import FILES, Settings
from ._wire import close_all

if TYPE_CHECKING:
    from typing_extensions import Unpack

Item = TypeVar("Item")

# Options that have a parameter of their own.
_NAMED = {"fanout": "num_neighbors", "batch-size": "batch_size", "seed": "seed"}

_MOST_EPOCHS = 1 << 20  # of the daemon's

#: where batches lie: in the CPU's memory, on a GPU, or there where that goes
DEVICES = ("cpu", "cuda", "cuda:N", "auto")

_log = logging.getLogger("helios")


class _Remote:
    """A loader on the daemon's side, in one session: its ring, and the slots that we hold."""

    def __init__(
        self, session: Session, message: Mapping[str, Any], fds: list[int], pinned: int | None
    ) -> None:
        """Maps the ring, which is pinned for a GPU where that is given."""
        self.session = session
        self._pinned = pinned
        number, batches, total, credits = (
            message.get(k) for k in ("id", "batches", "total", "credits")
        )
        if not (
            is_count(number) and is_count(batches) and is_count(total) and is_count(credits)
        ) or not (credits and batches <= total):
            raise ProtocolError(f"the daemon made a loader with {message!r}")
        self.id = number
        self.batches = batches
        self.total = total  # batches of all ranks
        self.nodes: np.ndarray[Any, Any] | None = None  # that it has, in place of a split
        self.parse: Callable[[dict[str, Any], Any], Batch]
        # The iteration that has the epoch under way, and its number.
        self._user: weakref.ref[Any] | None = None
        self.turn = 0
        self.held: set[int] = set()
        # Slots of held whose tensors have gone, though kernels may still read them. Garbage
        # collection appends here, at any moment.
        self._dead: deque[int] = deque()
        self.bytes_ssd: int | None = None
        self.ring = self._map(message, fds)
        # How many slots may be ours; the daemon makes the next batches in the others.
        self.slots = min(credits, self.ring.slots)
        self.lost = False  # we lack the ring that the daemon uses
        self.running = False  # an epoch is under way
        self.stopping = False  # it is to stop; what comes until "stopped" is given back

    def _map(self, message: Mapping[str, Any], fds: list[int]) -> Ring | GpuRing | PinnedRing:
        slots, slot_bytes, device, file_bytes = (
            message.get(k) for k in ("slots", "slot_bytes", "device", "file_bytes")
        )
        try:
            if not (is_count(slots) and is_count(slot_bytes)) or len(fds) != 1:
                raise ProtocolError(
                    f"the daemon made a ring of {slots!r} slots of {slot_bytes!r} bytes with "
                    f"{len(fds)} descriptors"
                )
            if device is None and self._pinned is not None:
                return PinnedRing(fds[0], slots, slot_bytes, self._pinned)
            if device is None:
                return Ring(fds[0], slots, slot_bytes)
            if not isinstance(device, str) or not is_count(file_bytes):
                raise ProtocolError(
                    f"the daemon made a ring of {file_bytes!r} bytes on device {device!r}"
                )
            return GpuRing(fds[0], slots, slot_bytes, device, file_bytes)
        finally:
            close_all(fds)

    def busy(self) -> bool:
        """Whether an iteration that is not done may go on with the epoch under way."""
        user = None if self._user is None else self._user()
        return self.running and user is not None and not user.done

    def start(
        self, epoch: int, first: int, user: _Iteration[Any], nodes: np.ndarray[Any, Any] | None
    ) -> None:
        """Begins an epoch of an iteration and of nodes, after the end of the one before."""
        self._user, self.turn = weakref.ref(user), user.turn
        self._settle()
        self.abandon()
        while self.stopping:
            message, fds = self.session.next_of(self.id)
            if message["type"] == "ring":
                self._grow(message, fds)
                continue
            close_all(fds)
            if message["type"] == "batch":
                self._release(self._slot(message))
            self.stopping = message["type"] != "stopped"
        fds = [] if nodes is None or nodes is self.nodes else [_in_memory(nodes)]
        try:
            self.session.send({"type": "epoch", "id": self.id, "epoch": epoch, "first": first}, fds)
        finally:
            close_all(fds)
        self.nodes = nodes
        self.running = True

    def abandon(self) -> None:
        """Stops the epoch under way without waiting; safe to call from garbage collection."""
        if self.running:
            self.running = False
            self.stopping = True
            self.session.note({"type": "stop", "id": self.id})

    def next(self, copy: bool) -> Batch | None:
        """Returns the next batch of the epoch; None at its end."""
        if len(self.held) > self.slots // 2:  # seldom, for the GPU runs dry meanwhile
            self._settle()
        while True:
            try:
                message, fds = self.session.next_of(self.id)
            except BaseException:
                self.running = False
                raise
            if message["type"] == "ring":
                self._grow(message, fds)
                continue
            close_all(fds)
            if message["type"] == "epoch_end":
                self.running = False
                read = message.get("bytes_ssd")
                self.bytes_ssd = read if is_count(read) else None
                return None
            if message["type"] == "batch":
                return self._take(message, copy)

    def _grow(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """Takes the place of the ring; batches that lie in the former one keep it alive."""
        try:
            ring = self._map(message, fds)
        except BaseException:
            self.lost = True  # batches to come lie where we cannot see them
            self.session.forget(self.id)
            raise
        if ring.slots != self.ring.slots:
            raise ProtocolError(f"the daemon made {ring.slots} slots of {self.ring.slots}")
        if ring.kind != self.ring.kind:
            raise ProtocolError("the daemon moved a ring to another device")
        self.ring = ring

    def _slot(self, message: Mapping[str, Any]) -> int:
        slot = message.get("slot")
        if not is_count(slot) or slot >= self.ring.slots or slot in self.held:
            raise ProtocolError(
                f"the daemon sent a batch in slot {slot!r} of {self.ring.slots}, of which we hold "
                f"{sorted(self.held)}"
            )
        return slot

    def _take(self, message: dict[str, Any], copy: bool) -> Batch:
        slot = self._slot(message)
        # One slot stays free, so that the daemon can go on whatever the user keeps.
        if len(self.held) + 1 >= self.slots:
            self._settle()
        copy = copy or len(self.held) + 1 >= self.slots
        try:
            arrays, owner = self.ring.take(message.get("tensors"), slot, copy)
        except CapabilityError:  # no memory for a copy, which was not begun
            self._release(slot)
            raise
        if owner is None:
            self._release(slot)
            return self.parse(message, arrays)
        batch = self.parse(message, arrays)
        self.held.add(slot)
        weakref.finalize(owner, self._give_back, slot, self.ring.on_gpu).atexit = False
        return batch

    def _give_back(self, slot: int, on_gpu: bool) -> None:
        """Notes that the last tensor in a slot has gone; called by garbage collection."""
        if on_gpu:
            self._dead.append(slot)
            return
        self.held.discard(slot)
        self._release(slot)

    def _settle(self) -> None:
        """Gives slots on the GPU back, once the kernels that may read them have ended."""
        dead = list(self._dead)
        if not dead:
            return
        if not isinstance(self.ring, Ring):
            self.ring.gpu.synchronize()
        for slot in dead:
            self._dead.popleft()
            self.held.discard(slot)
            self._release(slot)

    def _release(self, slot: int) -> None:
        self.session.release(self.id, slot)


class Loader(Generic[Item]):
    """Mini-batches of a dataset. An iteration is an epoch; each epoch has an order of its own.

    Equal seeds and options give the batches that ``heliosctl train`` trains on, id for id.
    """

    _asks: ClassVar[Mapping[str, Any]] = {}  # of the daemon, beside what arguments say

    def __init__(
        self,
        dataset: Dataset,
        num_neighbors: Any = (10, 10),
        batch_size: int = 1024,
        split: str | None = None,
        input_nodes: Any = None,
        shuffle: bool | None = None,
        seed: int | None = 1,
        rank: int = 0,
        world_size: int = 1,
        *,
        drop_last: bool = False,
        generator: Any = None,
        anew: bool | None = None,
        all_labels: bool = False,
        positions: bool = False,
        blocks: bool = True,
        slots: int = 4,
        copy: bool = False,
        device: Any = "cpu",
        daemon_device: str | None = None,
        **options: Unpack[Settings],
    ) -> None:
        """Makes the loader, on the daemon's side too.

        Args:
            dataset: of :func:`helios.open`.
            num_neighbors: neighbours that each hop draws, the seeds' first; -1 takes all. Of a
                typed graph those of each type of edges, or a dict by it.
            batch_size: seeds of a batch; the last one of an epoch may have fewer.
            split: ``"train"`` (the default), ``"val"`` or ``"test"``.
            input_nodes: in place of a split, the seeds: their numbers, or a mask over all nodes.
                Of a typed graph ``("paper", numbers)``, or ``"paper"`` for all of a type.
            shuffle: deal the seeds anew in each epoch; by default of split train only.
            seed: of the order and of all draws; epochs are numbered from 0. With None the generator
                says what an epoch draws; ranks then take 0.
            generator: of torch; by default torch's own, or NumPy's where there is no PyTorch.
            rank, world_size: this process gets the batches i with i % world_size == rank. All ranks
                get as many: at the end those that lack one repeat their first.
            drop_last: leave out what would make the batches of ranks unequal: a last batch of fewer
                seeds, and what does not go round.
            anew: draw other neighbours in each epoch without shuffle, too; by default where
                input_nodes are given. Splits that are not shuffled keep the draws of evaluation.
            all_labels: have labels of all nodes of a batch, not of its seeds alone.
            positions: have ``input_id``, places of the seeds among the input nodes or the split.
            blocks: have ``blocks``; without them a batch is smaller.
            slots: batches in shared memory. All but one can be held without a copy.
            copy: copy each batch out of shared memory.
            device: where batches lie: ``"cpu"``; ``"cuda"``, on the GPU that the daemon runs on, or
                this process's first where the daemon can't give memory of its own; ``"cuda:1"``, on
                that GPU as PyTorch numbers them; or ``"auto"``, on a GPU where that goes.
            daemon_device: what the daemon samples and reads with, ``--device`` of ``train``:
                ``"auto"`` (a GPU if there is one), ``"host"``, ``"cuda"`` or ``"cuda:1"``, as
                PyTorch numbers them here; of several ranks that of the first.
            options: those of ``heliosctl train``, such as ``sampler="labor"``, ``mode="cpu"`` or
                ``gpu_cache="5%"``: a flag's name with underscores.
        """
        self._source = dataset
        self._copy = copy
        schema, kind, count = dataset.schema, None, dataset.num_nodes
        by_type: dict[EdgeType, Sequence[int]] = {}
        if schema is not None:
            lacks = ", ".join(t for t, dim in schema.dims.items() if not dim)
            if lacks:
                raise CapabilityError(
                    f"nodes of type {lacks} have no features, which batches need: give them some, "
                    "or train with heliosctl, which learns tables in their place (embed)"
                )
            num_neighbors, by_type = schema.fanouts(num_neighbors)
            if input_nodes is not None:
                kind, input_nodes = schema.seeds(input_nodes)
                count = schema.nodes[kind]
                input_nodes = np.arange(count) if input_nodes is None else input_nodes
        elif isinstance(num_neighbors, Mapping):
            raise CapabilityError("num_neighbors by type: the dataset has one type of edges")
        self._nodes = None if input_nodes is None else _node_ids(input_nodes, count)
        if split is not None and self._nodes is not None:
            raise UsageError("give a split or input_nodes, not both")
        if split is None and self._nodes is None:
            split = "train"
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is not from 0 to {world_size - 1}")
        keys: dict[str, Any] = {k.replace("_", "-"): v for k, v in options.items()}
        for key, parameter in _NAMED.items():
            if key in keys:
                raise UsageError(f"{key} is the parameter {parameter}")
        for name in set(options) - set(Settings.__annotations__):
            near = difflib.get_close_matches(name, self._names(), 1)
            if near:
                raise UsageError(f"unknown argument {name}; did you mean {near[0]}?")
        self._device = str(device)
        if not re.fullmatch(r"cpu|cuda(:\d+)?|auto", self._device):
            raise UsageError(
                f"device {self._device!r}: batches lie on {', '.join(DEVICES[:-1])} or "
                f"{DEVICES[-1]}; daemon_device names what the daemon works with"
            )
        if daemon_device is not None:
            keys["device"] = daemon_device
        if by_type:
            if "relation-fanout" in keys:
                raise UsageError("relation_fanout is num_neighbors by type; give one")
            keys["relation-fanout"] = relation_fanouts(by_type)
        if not num_neighbors:
            raise UsageError("num_neighbors is empty; give a number for each hop, such as [10, 5]")
        self._request: dict[str, Any] = {
            "options": {
                "fanout": ",".join(str(int(n)) for n in num_neighbors),
                "batch-size": int(batch_size),
                "seed": 0 if seed is None else int(seed),
                **{k: _plain(k, v) for k, v in keys.items() if v is not None},
            },
            "split": split,
            "shuffle": split == "train" if shuffle is None else bool(shuffle),
            "anew": self._nodes is not None if anew is None else bool(anew),
            "all_labels": all_labels,
            "positions": positions,
            "rank": int(rank),
            "world": int(world_size),
            "slots": int(slots),
            **self._asks,
        }
        if kind is not None:
            self._request["node_type"] = kind
        if not blocks:
            self._request["no_blocks"] = True
        self.drop_last = drop_last
        self._generator = generator
        self._random = seed is None and world_size == 1
        self._remote: _Remote | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._epoch = 0
        self._from = 0  # batches of that epoch, of all ranks, that are left out
        self._given = 0  # batches of ours behind them that the user has
        self._begun = False  # the epoch was begun by an iteration, and did not end
        self._placed = False  # the user named the epoch that comes next
        self._workers = 1  # of these ranks, each of which a process has dealt to so many
        self._turn = 0
        total = self._connected().total
        if self._in_epoch(total) == 0:
            raise UsageError(
                f"an epoch of {total} batches leaves none for each of {world_size} ranks"
                + (" with drop_last" if drop_last else "")
                + "; give smaller batches"
            )

    def _names(self) -> list[str]:
        """Returns the names that arguments may have."""
        own = inspect.signature(type(self).__init__).parameters
        return sorted({*own, *Settings.__annotations__} - {"self", "options"})

    def _in_epoch(self, total: int, begin: int = 0) -> int:
        """Returns how many batches each rank gets of an epoch of so many, from one of them on."""
        world = self.world_size // self._workers
        if self.drop_last:
            return max(0, self.num_seeds // self.batch_size - begin) // world
        return max(0, -(-(total - begin) // world)) if total >= world else 0

    def _wanted(self, total: int) -> int:
        """Returns how many batches an iteration that begins where we are placed gives."""
        if self._workers == 1:
            return self._in_epoch(total, self._from)
        mine = self.rank // (self.world_size // self._workers)
        return -(-(self._in_epoch(total) - mine) // self._workers) - self._left_out()

    def _connected(self) -> _Remote:
        session, handle = self._source.session()
        have = self._remote
        if have is not None and have.session is session and not have.lost:
            return have
        remote = self._opened(session, handle)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, session.forget, remote.id)
        self._finalizer.atexit = False
        self._remote = remote
        return remote

    def _opened(self, session: Session, handle: int) -> _Remote:
        """Opens the loader on the daemon's side, in the best way that goes."""
        lacks: list[CapabilityError] = []
        for device, pinned in self._ways():
            try:
                if device != "cpu" or pinned is not None:
                    self._check_gpu()
                    _cuda.driver()
                remote = self._open(session, handle, device, pinned)
            except CapabilityError as e:
                if str(e) not in map(str, lacks):
                    lacks.append(e)
                continue
            for why in lacks:
                _log.info("batches come through a %s ring: %s", remote.ring.kind, why)
            return remote
        if len(lacks) == 1:
            raise lacks[0]
        raise CapabilityError("; and through pinned memory: ".join(map(str, lacks)))

    def _ways(self) -> list[tuple[str, int | None]]:
        """Returns what to ask the daemon for, and the GPU that its ring is pinned for: best first.

        The ranks of a job have to ask for the same. Those on a GPU each, which they name or see
        alone, cannot all have a ring on the daemon's, so all of them take a pinned one.
        """
        kind, _, number = self._device.partition(":")
        if kind == "cpu":
            return [("cpu", None)]
        ways: list[tuple[str, int | None]] = [("cpu", int(number or 0))]
        if kind == "auto":
            ways.append(("cpu", None))
        each = number or "," not in os.environ.get(_daemon.VISIBLE, ",")
        return ways if each and self.world_size > 1 else [("cuda", None), *ways]

    def _check_gpu(self) -> None:
        """Raises a CapabilityError where the items that this loader makes cannot lie on a GPU."""

    def _open(self, session: Session, handle: int, device: str, pinned: int | None) -> _Remote:
        request = {"type": "loader", "handle": handle, **self._request}
        if device != "cpu":
            request["device"] = device
        if (visible := os.environ.get(_daemon.VISIBLE)) is not None:
            request["visible"] = visible
        fds: list[int] = []
        try:
            if self._nodes is not None:
                fds.append(_in_memory(self._nodes))
            message, received = session.ask(request, "loader", fds)
        finally:
            close_all(fds)
        try:
            remote = _Remote(session, message, received, pinned)
            remote.nodes = self._nodes
            remote.parse = functools.partial(
                _parse, self._source.schema, self._source.num_nodes, self._request
            )
        except (CapabilityError, DeviceError):
            session.forget(message["id"])
            raise
        except BaseException:
            close_all(received)
            session.close()
            raise
        ring = remote.ring
        if device == "cuda" and not isinstance(ring, GpuRing):
            session.forget(remote.id)
            raise CapabilityError(
                "device cuda: this daemon gives batches in the CPU's memory alone; it is older "
                "than this package"
            )
        wanted = self._device.partition(":")[2]
        if isinstance(ring, GpuRing) and wanted and ring.gpu.number != int(wanted):
            session.forget(remote.id)
            raise CapabilityError(f"the daemon runs on cuda:{ring.gpu.number}, not {self._device}")
        if device == "cpu" and isinstance(ring, GpuRing):
            session.close()
            raise ProtocolError("the daemon made a ring on a GPU for device cpu")
        return remote

    def __len__(self) -> int:
        """Batches of an epoch, of each rank."""
        return self._in_epoch(self._connected().total)

    @property
    def bytes_ssd(self) -> int | None:
        """Bytes that all ranks had read from SSDs at the end of this one's last epoch.

        None before that.
        """
        return None if self._remote is None else self._remote.bytes_ssd

    @property
    def next_batch(self) -> int:
        """The batch of the epoch, over all ranks, that the next iteration begins with."""
        return 0 if self._begun else self._from + self._given * self.world_size

    @property
    def dataset(self) -> Any:
        """The dataset of :func:`helios.open`."""
        return self._source

    @property
    def num_seeds(self) -> int:
        """Seeds of an epoch, of all ranks together."""
        if self._nodes is not None:
            return len(self._nodes)
        return self._source.splits[self._request["split"]]

    @property
    def batch_size(self) -> int:
        """Seeds of a batch; the last one of an epoch may have fewer."""
        return int(self._request["options"]["batch-size"])

    @property
    def rank(self) -> int:
        """Which of the ranks this loader is of."""
        return int(self._request["rank"])

    @property
    def world_size(self) -> int:
        """How many ranks share an epoch."""
        return int(self._request["world"])

    @property
    def device(self) -> str:
        """Where batches lie: ``"cpu"``, or ``"cuda:0"`` as PyTorch numbers GPUs."""
        ring = self._connected().ring
        return "cpu" if isinstance(ring, Ring) else f"cuda:{ring.gpu.number}"

    @property
    def ring(self) -> str:
        """What batches come through: ``"cpu"``, or to a GPU ``"gpu"`` or ``"pinned"``.

        ``"gpu"`` is the daemon's memory there; from ``"pinned"`` memory each batch is copied once.
        """
        return self._connected().ring.kind

    def _part(self, number: int, of: int) -> Loader[Item]:
        """Returns a loader of every of-th batch of this one, from its next one but number on."""
        done = self._left_out() + self._given
        mine = (done + number) % of
        other = copy.copy(self)
        other.__dict__.update(self.__getstate__())
        other._request = {
            **self._request,
            "rank": self.rank + self.world_size * mine,
            "world": self.world_size * of,
        }
        other._workers = self._workers * of
        other._place(self._epoch, self.world_size * done)
        other._placed = True
        return other

    @property
    def epoch(self) -> int:
        """The epoch under way, or the one that the next iteration begins."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Has the next iteration begin this epoch."""
        self._place(int(epoch))
        self._placed = True

    def __iter__(self) -> Iterator[Item]:
        """Begins the next epoch, or goes on where ``load_state_dict`` says.

        Several iterations may be under way; each has a loader of the daemon's to itself.
        """
        return _Iteration(self)

    def _own_batches(self) -> Iterator[Item]:
        """Is __iter__ without batches that are there to make ranks equal."""
        return _Iteration(self, repeats=False)

    def _begin(self, iteration: _Iteration[Item]) -> _Remote:
        """Begins an iteration, which it does with its first batch: some ask for more than one."""
        if self._begun:
            self._place(self._epoch + 1)
        if not self._placed:
            self._epoch = self._next_epoch()
        self._placed = False
        self._begun = True
        self._turn += 1
        remote = self._connected()
        iteration.epoch, iteration.turn = self._epoch, self._turn
        if self._nodes is not None and self._nodes is not remote.nodes:
            remote.total = remote.batches = -(-len(self._nodes) // self.batch_size)
        iteration.wanted = self._wanted(remote.total) - self._given
        if remote.busy():
            remote = self._opened(*self._source.session())
            iteration.finalizer = weakref.finalize(iteration, remote.session.forget, remote.id)
            iteration.finalizer.atexit = False
        first = min(self._left_out() + self._given, remote.batches)
        remote.start(self._epoch, first, iteration, self._nodes)
        return remote

    def _read(self, nodes: np.ndarray[Any, Any]) -> Iterator[Item]:
        """Iterates over other input nodes by the job that is there; for one rank."""
        self._nodes = np.ascontiguousarray(nodes, dtype="<i8")
        self.set_epoch(0)
        return iter(self)

    def _next_epoch(self) -> int:
        """Returns the epoch of an iteration for which the user named none."""
        if not self._random:
            return self._epoch
        try:
            import torch
        except ImportError:
            return int(np.random.randint(_MOST_EPOCHS))  # noqa: NPY002 - as np.random.seed says
        return int(torch.randint(_MOST_EPOCHS, (), generator=self._generator))

    def _place(self, epoch: int, begin: int = 0) -> None:
        self._epoch, self._from, self._given, self._begun = epoch, begin, 0, False

    def _left_out(self) -> int:
        """Returns how many of the batches that are left out are this rank's."""
        return max(0, -(-(self._from - self.rank) // self.world_size))

    def _next(self, remote: _Remote, of: _Iteration[Item]) -> Item | None:
        """Returns the next batch of an iteration; None at its end."""
        batch = None
        if of.given < of.wanted or (remote.running and not self.drop_last):
            batch = remote.next(self._copy)
            if batch is None and of.given < of.wanted and of.repeats:
                batch = self._first(remote, of)
        if batch is None:
            remote.abandon()
            if of.turn == self._turn:
                self._place(of.epoch + 1)
            return None
        if batch.epoch != of.epoch:
            raise ProtocolError(
                f"the daemon sent a batch of epoch {batch.epoch} in epoch {of.epoch}"
            )
        of.given += 1
        if of.turn == self._turn:
            self._given += 1
        return self._convert(batch)

    def _first(self, remote: _Remote, of: _Iteration[Item]) -> Batch | None:
        """Returns the first batch of an epoch of this rank once more."""
        if self._workers == 1:
            remote.start(of.epoch, 0, of, self._nodes)
            batch = remote.next(self._copy)
            remote.abandon()
            return batch
        alone = copy.copy(self)
        alone.__dict__.update(self.__getstate__())
        world = self.world_size // self._workers
        alone._request = {**self._request, "rank": self.rank % world, "world": world}
        alone._workers = 1
        try:
            return alone._first(alone._connected(), of)
        finally:
            alone.close()

    def _disconnect(self) -> None:
        if self._remote is not None:
            self._remote.session.close()

    def _convert(self, batch: Batch) -> Item:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns where the iteration is, to the batch, and what makes its batches.

        ``batch`` counts those of all ranks, which are in step: each has had as many as this one, or
        the epoch has no more for it. So rank 0's state is that of all.
        """
        batch = self._from + self._given * self.world_size
        return {"epoch": self._epoch, "batch": batch, "of": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iteration go on behind the last batch that the state's loader gave.

        The number of ranks may be another one: together they go on with the next batch of the
        epoch. Let all of them load the state of one, and of the same moment.
        """
        epoch, batch = state["epoch"], state["batch"]
        if not is_count(epoch) or not is_count(batch):
            raise UsageError(f"the state names batch {batch!r} of epoch {epoch!r}")
        theirs, ours = state["of"], self._identity()
        for key in sorted({*theirs, *ours}):
            if theirs.get(key) != ours.get(key):
                raise UsageError(
                    f"the state is of a loader with {key} {theirs.get(key)!r}, and this one has "
                    f"{ours.get(key)!r}: its batches are others"
                )
        self._place(epoch, batch)
        self._placed = True

    def _identity(self) -> dict[str, Any]:
        options = self._request["options"]
        return {
            "dataset": self._source.uuid,
            "split": self._request["split"],
            "nodes": None if self._nodes is None else len(self._nodes),
            "shuffle": self._request["shuffle"],
            "sampler": options.get("sampler", "neighbor"),
            **{k: options[k] for k in ("fanout", "batch-size", "seed")},
            **{k: options[k] for k in ("relation-fanout",) if k in options},
            **{k: self._request[k] for k in ("node_type",) if k in self._request},
        }

    def close(self) -> None:
        """Gives up the loader on the daemon's side. Batches that live stay valid."""
        if self._finalizer is not None:
            self._finalizer()
        self._remote = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remote": None, "_finalizer": None, "_begun": False}


class _Iteration(Iterator[Item]):
    """One pass over a loader. It keeps no batch, which a generator would, until the next one."""

    def __init__(self, loader: Loader[Item], repeats: bool = True) -> None:
        self._loader = loader
        self._remote: _Remote | None = None
        self.done = False
        self.repeats = repeats
        self.epoch = self.turn = self.wanted = self.given = 0
        self.finalizer: weakref.finalize[Any, Any] | None = None  # of a remote of its own

    def __next__(self) -> Item:
        if self.done:
            raise StopIteration
        try:
            if self._remote is None:
                self._remote = self._loader._begin(self)
            item = self._loader._next(self._remote, self)
        except BaseException as e:
            self._end()
            if isinstance(e, ProtocolError):
                self._loader._disconnect()
            raise
        if item is None:
            self._end()
            raise StopIteration
        return item

    def _end(self) -> None:
        self.done = True
        if self.finalizer is not None:
            self.finalizer()

    def __del__(self) -> None:
        if self._remote is not None and not self.done and self._remote.turn == self.turn:
            self._remote.abandon()


def _parse(
    schema: _hetero.Schema | None,
    nodes: int,
    request: Mapping[str, Any],
    message: dict[str, Any],
    arrays: Any,
) -> Any:
    """Returns the batch of a loader's message and its arrays; of a typed graph a HeteroBatch."""
    if schema is None:
        blocks = "no_blocks" not in request
        return _batch.parse(message, arrays, nodes, request["all_labels"], blocks)
    return _hetero.parse(message, arrays, schema, request)


def _plain(key: str, value: Any) -> Any:
    """Returns an option's value as JSON has it."""
    if isinstance(value, str) and not _is_word(value, FILES.get(key)):
        return os.path.abspath(value)  # noqa: PTH100
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.path.abspath(value)  # noqa: PTH100
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Sequence):
        return ",".join(str(_plain(key, v)) for v in value)
    raise UsageError(f"option {key} has the value {value!r}; give a number, a text or a list")


def _is_word(value: str, words: tuple[str, ...] | None) -> bool:
    """Whether the text of an option is no file, which the daemon would look for in its own folder.

    A word may have a number, as presample:2.
    """
    return words is None or {w.partition(":")[0] for w in value.split(",")} <= set(words)


def _node_ids(nodes: Any, num_nodes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns node numbers [n] from numbers, or from a mask [num_nodes], of NumPy or torch."""
    a = np.asarray(nodes)
    if a.size == 0:
        raise UsageError("input_nodes is empty")
    if a.ndim != 1:
        raise UsageError(f"input_nodes has {a.ndim} dimensions; give a list of node numbers")
    if a.dtype == np.bool_:
        if len(a) != num_nodes:
            raise UsageError(f"the mask input_nodes is of {len(a)} nodes, not {num_nodes}")
        a = np.flatnonzero(a)
        if len(a) == 0:
            raise UsageError("the mask input_nodes has no node")
    if not np.issubdtype(a.dtype, np.integer):
        raise UsageError(f"input_nodes has the type {a.dtype}; give whole numbers or a mask")
    if a.min() < 0 or a.max() >= num_nodes:
        raise UsageError(
            f"input_nodes has numbers from {a.min()} to {a.max()}; nodes are 0 to {num_nodes - 1}"
        )
    return np.ascontiguousarray(a, dtype="<i8")


def _in_memory(nodes: np.ndarray[Any, Any]) -> int:
    """Puts node numbers into a file without a name, sealed, and returns its descriptor."""
    fd = os.memfd_create("helios-nodes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(fd), "wb") as f:
            nodes.tofile(f)
        f_add_seals, seals = 1033, 0x0001 | 0x0002 | 0x0004 | 0x0008  # all: seal shrink grow write
        fcntl.fcntl(fd, f_add_seals, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


class NumpyLoader(Loader[Batch]):
    """Mini-batches as :class:`helios.Batch` of NumPy arrays.

    With ``device="cuda"`` they are of :class:`helios.DeviceArray`, which CuPy and JAX take.
    """

    def _convert(self, batch: Batch) -> Batch:
        return batch


__all__ = ["HeliosError", "Loader", "NumpyLoader"]
