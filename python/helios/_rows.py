"""Rows of nodes by their numbers, read by the daemon."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._dataset import Dataset
from ._errors import CapabilityError, UsageError
from ._hetero import relation_fanouts
from ._loader import NumpyLoader
from .torch import tensor  # before PyTorch: it says what lacks

import torch  # isort: skip

Array = np.ndarray[Any, Any]


class Rows:
    """The rows of a dataset. Each read is a job of the daemon's, which opens and closes caches."""

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        """Makes it for a dataset; options are a loader's, by default mode cpu without caches."""
        self.dataset = dataset
        self._options = {"mode": "cpu", "gpu_cache": "0", "cpu_cache": "0", **options}
        self._chosen = not {"mode", "io_stack"} & set(options)  # how to read, by us

    def read(self, nodes: Array, kind: str | None = None) -> Any:
        """Returns the rows of nodes, of a type where there are several; one may stand twice."""
        distinct, places = np.unique(nodes, return_inverse=True)
        if len(distinct) == 0:
            nothing = self.read(np.zeros(1, np.int64), kind)
            return nothing[:0]
        if len(distinct) == len(nodes):
            distinct = nodes  # each once: in their order there is nothing to deal out
        loader = self._loader(distinct, kind)
        (batch,) = loader
        loader.close()
        x: Any = batch.x
        rows = tensor(x if kind is None else x[kind], batch.x_dtype)
        return rows if distinct is nodes else rows[torch.from_numpy(places.reshape(-1))]

    def _loader(self, nodes: Array, kind: str | None) -> NumpyLoader:
        schema = self.dataset.schema
        # Only the nodes themselves: of a graph without edges, or with none of any type.
        only: dict[str, Any] = {"no_edges": True}
        if schema is not None:
            only = {"relation_fanout": relation_fanouts({e: [0] for e in schema.edge_types})}
        try:
            return NumpyLoader(
                self.dataset,
                [1],
                batch_size=len(nodes),
                input_nodes=nodes if kind is None else (kind, nodes),
                slots=2,
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
