"""Rows of nodes by their numbers, read by the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ._dataset import Dataset
from ._errors import CapabilityError, UsageError
from ._hetero import relation_fanouts
from ._loader import NumpyLoader
from .torch import tensor  # before PyTorch: it says what lacks

import torch  # isort: skip

Array = np.ndarray[Any, Any]


_MIN_ROWS = 1024
_BATCH_BYTES = 64 << 20  # of rows that are read at once; more rows take several batches


class _Job(NumpyLoader):
    """Gives the SSDs back while nobody reads, for others to use them alone."""

    _asks: ClassVar[Mapping[str, Any]] = {"rests": True}


class Rows:
    """The rows of a dataset. A job of the daemon's reads them, for each type, while this lives."""

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        """Makes it for a dataset; options are a loader's, by default mode cpu without caches."""
        self.dataset = dataset
        self._options = {"mode": "cpu", "gpu_cache": "0", "cpu_cache": "0", **options}
        self._chosen = not {"mode", "io_stack"} & set(options)  # how to read, by us
        # Idle jobs. A reader takes one out while it reads, so threads and forks need no lock.
        self._idle: dict[str | None, list[NumpyLoader]] = {}

    def read(self, nodes: Array, kind: str | None = None) -> Any:
        """Returns the rows of nodes, of a type where there are several; one may stand twice."""
        distinct, places = np.unique(nodes, return_inverse=True)
        if len(distinct) == 0:
            nothing = self.read(np.zeros(1, np.int64), kind)
            return nothing[:0]
        if len(distinct) == len(nodes):
            distinct = nodes  # each once: in their order there is nothing to deal out
        idle = self._idle.setdefault(kind, [])
        loader = self._kept(idle) or self._loader(distinct, kind)
        if loader.batch_size < min(len(distinct), self._max_rows(kind)):
            loader.close()
            loader = self._loader(distinct, kind)
        rows = self._rows(loader, distinct, kind)
        if not idle:
            idle.append(loader)
        return rows if distinct is nodes else rows[torch.from_numpy(places.reshape(-1))]

    def _kept(self, idle: list[NumpyLoader]) -> NumpyLoader | None:
        """Takes a job of the daemon that we have now: another one's may not read in its way."""
        session, _ = self.dataset.session()
        while idle:
            with contextlib.suppress(IndexError):  # another thread has it
                loader = idle.pop()
                if loader._remote is not None and loader._remote.session is session:
                    return loader
                loader.close()
        return None

    def _rows(self, loader: NumpyLoader, nodes: Array, kind: str | None) -> Any:
        all_of = None
        for i, batch in enumerate(loader._read(nodes)):
            x: Any = batch.x
            rows = tensor(x if kind is None else x[kind], batch.x_dtype)
            if len(rows) == len(nodes):
                all_of = rows
                continue  # there is no other
            if all_of is None:
                all_of = torch.empty((len(nodes), rows.shape[1]), dtype=rows.dtype)
            first = i * loader.batch_size
            all_of[first : first + len(rows)] = rows
        return all_of

    def _max_rows(self, kind: str | None) -> int:
        """Returns the number of rows that are read at once."""
        schema = self.dataset.schema
        dim = self.dataset.num_features if schema is None else schema.dims[str(kind)]
        return int(max(_MIN_ROWS, _BATCH_BYTES // (4 * max(dim, 1))))

    def _loader(self, nodes: Array, kind: str | None) -> NumpyLoader:
        schema = self.dataset.schema
        # Only the nodes themselves: of a graph without edges, or with none of any type.
        only: dict[str, Any] = {"no_edges": True}
        if schema is not None:
            only = {"relation_fanout": relation_fanouts({e: [0] for e in schema.edge_types})}
        size = max(_MIN_ROWS, 1 << (len(nodes) - 1).bit_length())
        try:
            return _Job(
                self.dataset,
                [1],
                batch_size=min(size, self._max_rows(kind)),
                input_nodes=nodes if kind is None else (kind, nodes),
                **only,
                **self._options,
            )
        except CapabilityError:
            if not self._chosen:
                raise
        # The kernel has no file of the SSDs, or there are none but the dataset's folder.
        self._chosen = False
        self._options["io_stack"] = "async"
        return self._loader(nodes, kind)


def node_numbers(index: Any, count: int) -> Array:
    """Returns the numbers that None (all), a slice, a mask or numbers name of so many nodes."""
    if index is None:
        return np.arange(count)
    if isinstance(index, slice):
        return np.arange(count)[index]
    a = np.asarray(index)
    if a.dtype == np.bool_:
        a = np.flatnonzero(a)
    a = np.atleast_1d(a).astype(np.int64, copy=False)
    if len(a) and (a.min() < 0 or a.max() >= count):
        raise UsageError(f"nodes {a.min()} to {a.max()} are asked for; there are 0 to {count - 1}")
    return a


__all__ = ["Rows", "node_numbers"]
