"""A dataset, opened through a daemon."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from . import _daemon
from ._errors import CapabilityError, HeliosError, ProtocolError, UsageError
from ._hetero import EdgeType, Schema
from ._ring import is_count
from ._session import Session, join

PathLike = str | os.PathLike[str]
Array = np.ndarray[Any, Any]


UNKNOWN_LABEL = 255  # in labels.npy of several labels a node


class Files:
    """The arrays of a dataset's folder, mapped when they are asked for."""

    #: what :meth:`of_batch` finds
    LAZY = ("e_id", "train_mask", "val_mask", "test_mask")

    def __init__(
        self,
        folder: str,
        names: Mapping[str, str] | None = None,
        nodes: tuple[int, ...] = (),
        label_dims: int = 0,
    ) -> None:
        """Takes the folder, and the files in it of arrays whose names alone do not tell them.

        Of a typed graph they are those of one type, and nodes has how many it has: of edges those
        of the source's and the target's. Labels have so many dimensions; 0: those of their file.
        """
        self.folder = folder
        self._names = dict(names or {})
        self._nodes = nodes
        self._label_dims = label_dims
        self._mapped: dict[str, Array] = {}

    def array(self, name: str) -> Array:
        """Returns ``features``, ``labels``, ``indptr``, ``indices``, or the nodes of a split."""
        a = self._mapped.get(name)
        if a is None:
            path = Path(self.folder) / self._names.get(name, f"{name}.npy")
            try:
                a = self._mapped[name] = np.load(path, mmap_mode="r")
            except (OSError, ValueError) as e:
                raise UsageError(f"{path} cannot be read: {e}") from None
        return a

    def targets(self, nodes: Any = slice(None)) -> Array:
        """Returns classes, int64 [nodes]; of several labels or numbers float32 rows.

        One column of either has the shape that it came with, [nodes] or [nodes, 1].
        """
        a = self.array("labels")
        of: Array = a[nodes]
        y: Array = of.astype(np.int64 if a.ndim == 1 else np.float32)
        if a.dtype == np.uint8:
            y[of == UNKNOWN_LABEL] = np.nan
        return y.reshape(len(y), *self.target_shape())

    def target_shape(self) -> tuple[int, ...]:
        """Returns the shape of a node's label: () or (columns,)."""
        shape: tuple[int, ...] = self.array("labels").shape[1:]
        return {1: (), 2: shape or (1,)}.get(self._label_dims, shape)

    def mask(self, split: str) -> Array:
        """Returns which nodes a split has, bool [nodes]."""
        name = f"{split}_mask"
        a = self._mapped.get(name)
        if a is None:
            nodes = self._nodes[0] if self._nodes else len(self.array("indptr")) - 1
            a = np.zeros(nodes, bool)
            a[self.array(split)] = True
            self._mapped[name] = a
        return a

    def of_batch(self, name: str, n_id: Array, edge_index: Array) -> Array:
        """Returns the numbers of a batch's edges, or which of its nodes a split has."""
        if name != "e_id":
            return self.mask(name.removesuffix("_mask"))[n_id]
        return self.edge_numbers(n_id[edge_index[0]], n_id[edge_index[1]])

    def edge_numbers(self, src: Array, dst: Array) -> Array:
        """Returns which edges of the dataset these are, by their ends; of equal ones in turns.

        An edge that is there the other way only has the number of that one.
        """
        numbers = self._numbers(src, dst)
        if not self._nodes and (numbers < 0).any():
            lacks = numbers < 0
            numbers[lacks] = self._numbers(dst[lacks], src[lacks])
        return numbers

    def _numbers(self, src: Array, dst: Array) -> Array:
        nodes, place = np.unique(dst, return_inverse=True)
        flat, owner = self.lists(nodes)
        n = max(len(self.array("indptr")), *self._nodes, 0)  # above any node
        have = owner * n + self.array("indices")[flat]
        if (have[1:] < have[:-1]).any():  # lists that are not sorted
            order = np.argsort(have, kind="stable")
            have, flat = have[order], flat[order]
        want = place.reshape(-1) * n + src
        at = np.searchsorted(have, want)
        found = at < len(have)
        found[found] = have[at[found]] == want[found]
        # The k-th of equal edges of a batch is the k-th of the dataset's.
        several = np.flatnonzero(found & (at + 1 < len(have)))
        several = several[have[at[several] + 1] == want[several]]
        if len(several):
            in_turn = several[np.argsort(want[several], kind="stable")]
            ordered = want[in_turn]
            turn = np.arange(len(in_turn)) - np.searchsorted(ordered, ordered)
            last = np.searchsorted(have, ordered, side="right") - 1
            at[in_turn] = np.minimum(at[in_turn] + turn, last)
        out = np.full(len(want), -1, np.int64)
        out[found] = flat[at[found]]
        return out

    def lists(self, nodes: Array) -> tuple[Array, Array]:
        """Returns the places in ``indices`` of the lists of nodes, and whose each is."""
        indptr = self.array("indptr")
        begin = np.asarray(indptr[nodes], np.int64)
        count = np.asarray(indptr[nodes + 1], np.int64) - begin
        owner = np.repeat(np.arange(len(nodes)), count)
        before = np.cumsum(count) - count
        return np.arange(len(owner)) + (begin - before)[owner], owner

    def induced(self, n_id: Array) -> tuple[Array, Array]:
        """Returns all edges between nodes, as places in n_id, and their numbers."""
        flat, col = self.lists(n_id)
        src = self.array("indices")[flat]
        order = np.argsort(n_id, kind="stable")
        at = np.minimum(np.searchsorted(n_id[order], src), len(n_id) - 1)
        row = order[at]
        both = n_id[row] == src
        return np.stack([row[both], col[both]]), flat[both]

    def edge_index(self) -> Array:
        """Returns all edges, int64 [2, edges]: source and target, by target."""
        flat, dst = self.lists(np.arange(len(self.array("indptr")) - 1))
        return np.stack([self.array("indices")[flat].astype(np.int64), dst])

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.folder, self._names, self._nodes, self._label_dims)


class NodeType:
    """The nodes of one type of a typed graph."""

    def __init__(self, files: Files, nodes: int, dim: int, splits: Mapping[str, int]) -> None:
        self.files, self.num_nodes, self.num_features, self._splits = files, nodes, dim, splits

    @property
    def x(self) -> Any:
        """Features, [nodes, dim], mapped: rows are read when they are indexed."""
        if not self.num_features:
            raise AttributeError("nodes of this type have no x")
        return _tensor(self.files.array("features"))

    @property
    def y(self) -> Any:
        """Labels, int64 [nodes] or as they came [nodes, 1], -1 where there is none."""
        return _tensor(self._of_target("y", self.files.targets))

    @property
    def train_mask(self) -> Any:
        """Which nodes are for training, bool [nodes]; val_mask and test_mask are like it."""
        return _tensor(self._of_target("train_mask", lambda: self.files.mask("train")))

    @property
    def val_mask(self) -> Any:
        """Which nodes are for validation."""
        return _tensor(self._of_target("val_mask", lambda: self.files.mask("val")))

    @property
    def test_mask(self) -> Any:
        """Which nodes are for the test."""
        return _tensor(self._of_target("test_mask", lambda: self.files.mask("test")))

    def _of_target(self, name: str, get: Callable[[], Array]) -> Array:
        if not self._splits:
            raise AttributeError(f"nodes of this type have no {name}")
        return get()

    def __len__(self) -> int:
        """How many nodes there are."""
        return self.num_nodes

    def __repr__(self) -> str:
        return f"<helios nodes: {self.num_nodes}, {self.num_features} features>"


class Edges:
    """The edges of one type of a typed graph."""

    def __init__(self, files: Files, edges: int) -> None:
        self.files, self.num_edges = files, edges

    @property
    def edge_index(self) -> Any:
        """All edges, int64 [2, edges]: source and target, by target. ``e_id`` counts them."""
        return _tensor(self.files.edge_index())

    def __repr__(self) -> str:
        return f"<helios edges: {self.num_edges}>"


@dataclass(frozen=True)
class _How:
    """How to reach the daemon, and what it is to open."""

    dataset: str
    socket: str | None
    binary: str | None
    timeout: float
    options: tuple[tuple[str, Any], ...]


class Dataset:
    """A dataset that a daemon has open. Make one with :func:`helios.open`.

    A forked child that uses it gets a connection of its own. After the daemon's death the next use
    connects again.
    """

    def __init__(self, how: _How) -> None:
        self._how = how
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._live: Session | None = None
        self._handle = 0
        self._closed = False
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._of: Dataset | None = None  # of a copy, which has its connection
        self._dropped: tuple[str, ...] = ()  # x and y that were deleted
        self._describe(self._connect()[2])

    def _describe(self, d: Mapping[str, Any]) -> None:
        try:
            self.name = str(d["name"])
            self.uuid = str(d.get("uuid", ""))
            self.num_nodes = int(d["nodes"])
            self.num_edges = int(d["edges"])
            self.num_features = int(d["dim"])
            self.num_classes = int(d["classes"])
            self.row_dtype = str(d["row_dtype"])
            #: how many nodes each split has, by its name
            self.splits: dict[str, int] = {str(k): int(v) for k, v in d["splits"].items()}
            arrays = {str(k): str(v) for k, v in d.get("arrays", {}).items()}
            dims = int(d.get("label_dims", 0))
            self.files = Files(self._how.dataset, arrays, label_dims=dims)
            #: the types of a typed graph; None: nodes and edges have one
            self.schema = Schema.of(d)
            self._types = {} if self.schema is None else self._stores(self.schema, arrays, dims)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            self.close()
            raise ProtocolError(f"the daemon described the dataset as {d!r}: {e!r}") from None

    def _stores(
        self, s: Schema, arrays: Mapping[str, str], dims: int
    ) -> dict[Any, NodeType | Edges]:
        folder, all_of = self._how.dataset, {}
        for t in s.node_types:
            more, splits = (arrays, self.splits) if t == s.target else ({}, {})
            files = Files(folder, {**more, **s.files[t]}, (s.nodes[t],), dims)
            all_of[t] = NodeType(files, s.nodes[t], s.dims[t], splits)
        edges = {
            e: Edges(Files(folder, s.files[e], (s.nodes[e[0]], s.nodes[e[2]])), s.edges[e])
            for e in s.edge_types
        }
        return {**all_of, **edges}

    @property
    def node_types(self) -> list[str]:
        """The types of nodes of a typed graph."""
        return [] if self.schema is None else list(self.schema.node_types)

    @property
    def edge_types(self) -> list[EdgeType]:
        """The types of edges of a typed graph: source, relation, target."""
        return [] if self.schema is None else list(self.schema.edge_types)

    def metadata(self) -> tuple[list[str], list[EdgeType]]:
        """Returns node_types and edge_types, as PyG's HeteroData does."""
        return self.node_types, self.edge_types

    def __getitem__(self, name: Any) -> Any:
        """Returns the nodes or edges of a type of a typed graph, as PyG's HeteroData does.

        0 is the whole: PyG's own datasets have their one graph there.
        """
        if isinstance(name, int) and name == 0:
            return self
        if self.schema is None:
            raise UsageError(f"the dataset has one type of nodes and edges, and no {name!r}")
        if isinstance(name, str) and name in self.schema.nodes:
            return self._types[name]
        return self._types[self.schema.edge_type(name)]

    def _untyped(self, name: str) -> Files:
        if name in self._dropped:
            raise AttributeError(f"{name} was deleted")
        if self.schema is not None:
            of = repr(self.schema.edge_types[0] if name == "edge_index" else self.schema.target)
            raise AttributeError(f"{name} is that of a type: dataset[{of}].{name}")
        return self.files

    @property
    def x(self) -> Any:
        """Features of all nodes, [nodes, dim], mapped: rows are read when they are indexed.

        They are those of the folder, whatever type the rows on the SSDs have. These arrays are
        tensors where PyTorch is installed.
        """
        return _tensor(self._untyped("x").array("features"))

    @x.deleter
    def x(self) -> None:
        """Has a NeighborLoader of this dataset, or copy, sample without reading features."""
        self._untyped("x")
        self._dropped = (*self._dropped, "x")

    @property
    def y(self) -> Any:
        """Labels of all nodes, int64 [nodes], -1 where there is none.

        Several labels a node and numbers are float32 [nodes, columns], NaN where there is none. One
        column of either has the shape that it was saved with, [nodes] or [nodes, 1].
        """
        return _tensor(self._untyped("y").targets())

    @y.deleter
    def y(self) -> None:
        """Has batches without labels, as ``del dataset.x`` has them without features."""
        self._untyped("y")
        self._dropped = (*self._dropped, "y")

    @property
    def edge_index(self) -> Any:
        """All edges, int64 [2, edges]: source and target, by target. ``e_id`` counts them."""
        return _tensor(self._untyped("edge_index").edge_index())

    @property
    def train_mask(self) -> Any:
        """Which nodes are for training, bool [nodes]; val_mask and test_mask are like it."""
        return _tensor(self._untyped("train_mask").mask("train"))

    @property
    def val_mask(self) -> Any:
        """Which nodes are for validation."""
        return _tensor(self._untyped("val_mask").mask("val"))

    @property
    def test_mask(self) -> Any:
        """Which nodes are for the test."""
        return _tensor(self._untyped("test_mask").mask("test"))

    @property
    def num_node_features(self) -> Any:
        """Is num_features, as of PyG's Data; by type, as of its HeteroData."""
        return self.num_features if self.schema is None else dict(self.schema.dims)

    def __len__(self) -> int:
        """How many nodes there are."""
        return self.num_nodes

    def to(self, device: Any, *_: str) -> Dataset:
        """Is PyG's, for the CPU alone: features stay where they are."""
        if str(device) != "cpu":
            raise CapabilityError(
                f"a dataset stays on its SSDs: give the loader device={str(device)!r}, or move "
                "batches"
            )
        return self

    def get_idx_split(self) -> dict[str, Any]:
        """Returns the nodes of the splits by OGB's names: train, valid and test."""
        names = {"train": "train", "valid": "val", "test": "test"}
        return {k: _tensor(np.array(self.files.array(s), np.int64)) for k, s in names.items()}

    def to_data(self) -> Any:
        """Returns PyG's Data, or HeteroData, of all, whose features are still in the files."""
        try:
            from torch_geometric.data import Data, HeteroData
        except ImportError:
            raise CapabilityError("to_data needs PyG: pip install torch_geometric") from None
        if self.schema is not None:
            data = HeteroData()
            for t, dim in self.schema.dims.items():
                if dim:
                    data[t].x = self[t].x
                else:
                    data[t].num_nodes = self[t].num_nodes
            for name in ("y", "train_mask", "val_mask", "test_mask"):
                data[self.schema.target][name] = getattr(self[self.schema.target], name)
            for e in self.edge_types:
                data[e].edge_index = self[e].edge_index
            return data
        masks = {f"{s}_mask": getattr(self, f"{s}_mask") for s in ("train", "val", "test")}
        return Data(x=self.x, y=self.y, edge_index=self.edge_index, **masks)

    @property
    def path(self) -> str:
        """The dataset's folder."""
        return self._how.dataset

    def session(self) -> tuple[Session, int]:
        """Returns a session of this process and the dataset's handle in it."""
        session, handle, _ = self._connect()
        return session, handle

    def _connect(self) -> tuple[Session, int, Mapping[str, Any]]:
        if self._of is not None:
            return self._of._connect()
        if self._pid != os.getpid():
            # The parent's session and a lock that one of its threads may have held.
            self._lock, self._pid, self._live = threading.Lock(), os.getpid(), None
            if self._finalizer is not None:
                self._finalizer()
        with self._lock:
            if self._closed:
                raise HeliosError(f"dataset {self._how.dataset} is closed")
            if self._live is not None and self._live.alive:
                return self._live, self._handle, {}
            if self._finalizer is not None:
                self._finalizer()
            self._live = session = self._new_session()
            self._finalizer = weakref.finalize(self, session.close)
            try:
                opened, _ = session.ask(
                    {
                        "type": "open",
                        "dataset": self._how.dataset,
                        "typed": True,
                        **dict(self._how.options),
                    },
                    "opened",
                )
                if not is_count(opened.get("handle")) or not isinstance(
                    opened.get("dataset"), dict
                ):
                    raise ProtocolError(f"the daemon opened the dataset with {opened!r}")
            except BaseException:
                self._finalizer()
                raise
            self._handle = opened["handle"]
            return session, self._handle, opened["dataset"]

    def _new_session(self) -> Session:
        how = self._how
        if how.socket is not None:
            return Session(_daemon.connect(how.socket, how.timeout), how.timeout)
        return join(how.binary, how.timeout)

    def close(self) -> None:
        """Closes the connection. Batches that live stay valid."""
        self._closed = True
        if self._finalizer is not None and self._pid == os.getpid():
            self._finalizer()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __copy__(self) -> Dataset:
        """Returns one that shares the connection, and has attributes and deletions of its own."""
        other = Dataset.__new__(Dataset)
        other.__dict__ = {**self.__dict__, "_of": self._of or self, "_finalizer": None}
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        set_by_users = {k: v for k, v in vars(self).items() if getattr(v, "shape", ())}
        return (
            Dataset,
            (self._how,),
            {"_types": self._types, "_dropped": self._dropped, **set_by_users},
        )

    def __repr__(self) -> str:
        return (
            f"<helios.Dataset {self.name}: {self.num_nodes} nodes, {self.num_edges} edges, "
            f"{self.num_features} features>"
        )


def _tensor(a: Array) -> Any:
    """Returns an array as a tensor on the same memory, where PyTorch is installed."""
    try:
        from .torch import tensor
    except CapabilityError:
        return a
    return tensor(a)


def open(  # noqa: A001 - the name that users write is helios.open
    dataset: PathLike,
    socket: PathLike | None = None,
    binary: PathLike | None = None,
    *,
    ssd_file: PathLike | Iterable[PathLike] | None = None,
    ssd: str | Iterable[str] | None = None,
    timeout: float = 600.0,
) -> Dataset:
    """Opens a dataset's folder through a daemon.

    Args:
        dataset: the folder that ``heliosctl import`` or :func:`helios.save` made.
        socket: of a daemon that runs (``heliosctl serve --socket PATH``). Without one, all of
            your processes share a daemon, which the first one starts and the last one ends.
        binary: heliosctl, to start it; else $HELIOSCTL, else the one in PATH.
        ssd_file: files that play SSDs and hold the dataset's rows.
        ssd: names of bound SSDs to use. Without either, all that are bound.
        timeout: seconds that the daemon may be silent while we wait for it, such as while it finds
            the hottest rows of a large graph. A daemon that dies is noticed at once.
    """
    options: list[tuple[str, Any]] = []
    if ssd_file is not None:
        files = [ssd_file] if isinstance(ssd_file, (str, os.PathLike)) else list(ssd_file)
        options.append(("ssd_file", [os.path.abspath(f) for f in files]))  # noqa: PTH100
    if ssd is not None:
        options.append(("ssd", [ssd] if isinstance(ssd, str) else list(ssd)))
    return Dataset(
        _How(
            dataset=os.path.abspath(dataset),  # noqa: PTH100
            socket=None if socket is None else os.path.abspath(socket),  # noqa: PTH100
            binary=None if binary is None else os.fspath(binary),
            timeout=timeout,
            options=tuple(options),
        )
    )
