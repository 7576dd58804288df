"""Stores for code that brings its own loader of PyG: ``NeighborLoader((features, graph), …)``.

The loader then samples in Python's process and asks for rows when it needs them; nothing reads
ahead. :class:`helios.NeighborLoader` is faster where its samplers do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._dataset import Dataset
from ._errors import CapabilityError, UsageError
from ._loader import NumpyLoader
from .torch import tensor  # before PyTorch: it says what lacks

import torch  # isort: skip

try:
    from torch_geometric.data import EdgeAttr, TensorAttr
    from torch_geometric.data import FeatureStore as _FeatureStore
    from torch_geometric.data import GraphStore as _GraphStore
except ImportError as e:
    raise CapabilityError("helios.pyg needs PyG; install it: pip install torch_geometric") from e

Array = np.ndarray[Any, Any]


def stores(dataset: Dataset, **options: Any) -> tuple[FeatureStore, GraphStore]:
    """Returns a dataset as PyG's two stores.

    >>> loader = torch_geometric.loader.NeighborLoader(
    ...     helios.pyg.stores(dataset), [10, 10], input_nodes=nodes, batch_size=1024
    ... )

    Args:
        dataset: of :func:`helios.open`, whose folder this process can read, too.
        options: how rows are read, as of a loader; by default ``mode="cpu"`` without caches.
    """
    return FeatureStore(dataset, **options), GraphStore(dataset)


class FeatureStore(_FeatureStore):  # type: ignore[misc]
    """``x``, read by the daemon from the SSDs, and ``y``, by node number.

    Each call is a job of the daemon's, of which it opens and closes the caches: give it none.
    """

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        """Makes it for a dataset; options are a loader's."""
        super().__init__()
        self.dataset = dataset
        self._options = {"mode": "cpu", "gpu_cache": "0", "cpu_cache": "0", **options}
        self._chosen = not {"mode", "io_stack"} & set(options)  # how to read, by us
        self._labels = dataset.files.array("labels")

    def get_all_tensor_attrs(self) -> list[Any]:
        """Returns what there is: ``x`` and ``y`` of the nodes."""
        return [TensorAttr(group_name=None, attr_name=name, index=None) for name in ("x", "y")]

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...]:
        nodes = self.dataset.num_nodes
        if self._named(attr) == "x":
            return nodes, self.dataset.num_features
        return tuple(self._labels.shape)

    def _get_tensor(self, attr: Any) -> Any:
        name = self._named(attr)
        nodes = _nodes(attr.index, self.dataset.num_nodes)
        if name == "y":
            return torch.from_numpy(self.dataset.files.targets(nodes))
        return self._rows(nodes)

    def _rows(self, nodes: Array) -> Any:
        distinct, places = np.unique(nodes, return_inverse=True)
        if len(distinct) == 0:
            nothing = self._rows(np.zeros(1, np.int64))
            return nothing[:0]
        if len(distinct) == len(nodes):
            distinct = nodes  # each once: in their order there is nothing to deal out
        loader = self._loader(distinct)
        (batch,) = loader
        loader.close()
        rows = tensor(batch.x, batch.x_dtype)
        return rows if distinct is nodes else rows[torch.from_numpy(places.reshape(-1))]

    def _loader(self, nodes: Array) -> NumpyLoader:
        try:
            return NumpyLoader(
                self.dataset,
                [1],  # of a graph without edges: only the nodes themselves
                batch_size=len(nodes),
                input_nodes=nodes,
                slots=2,
                no_edges=True,
                **self._options,
            )
        except CapabilityError:
            if not self._chosen:
                raise
        # The kernel has no file of the SSDs, or there are none but the dataset's folder.
        self._chosen = False
        self._options["io_stack"] = "async"
        return self._loader(nodes)

    def _named(self, attr: Any) -> str:
        name = str(attr.attr_name)
        if isinstance(attr.group_name, tuple) or name.startswith("edge"):
            raise UsageError(
                f"{name} is of edges, and datasets of heliosctl have features of nodes only: PyG "
                "would look them up by node number"
            )
        if name not in ("x", "y") or attr.group_name is not None:
            of = "" if attr.group_name is None else f" of {attr.group_name}"
            raise UsageError(f"the dataset has no {name}{of}; there are x and y of its nodes")
        return name

    def _put_tensor(self, tensor: Any, attr: Any) -> bool:
        raise UsageError(f"{attr.attr_name}: a dataset does not change; make one by helios.save")

    def _remove_tensor(self, attr: Any) -> bool:
        raise UsageError(f"{attr.attr_name}: a dataset does not change; make one by helios.save")

    def __repr__(self) -> str:
        return f"<helios.pyg.FeatureStore of {self.dataset!r}>"


class GraphStore(_GraphStore):  # type: ignore[misc]
    """The edges by destination (CSC), from the dataset's folder; 8 bytes of memory each."""

    def __init__(self, dataset: Dataset) -> None:
        """Reads the edges of a dataset."""
        super().__init__()
        self.dataset = dataset
        self._edges: tuple[Any, Any] | None = None

    def get_all_edge_attrs(self) -> list[Any]:
        """Returns the one layout that there is."""
        return [self._attr()]

    def _attr(self) -> Any:
        nodes = self.dataset.num_nodes
        return EdgeAttr(edge_type=None, layout="csc", is_sorted=True, size=(nodes, nodes))

    def _get_edge_index(self, edge_attr: Any) -> Any:
        if edge_attr.edge_type is not None:
            raise UsageError(f"the dataset has no edges of type {edge_attr.edge_type}")
        if edge_attr.layout != self._attr().layout:
            return None
        if self._edges is None:
            indices = self.dataset.files.array("indices").astype(np.int64)
            indptr = np.array(self.dataset.files.array("indptr"), np.int64)
            self._edges = torch.from_numpy(indices), torch.from_numpy(indptr)
        return self._edges

    def _put_edge_index(self, edge_index: Any, edge_attr: Any) -> bool:
        raise UsageError("edges: a dataset does not change; make one by helios.save")

    def _remove_edge_index(self, edge_attr: Any) -> bool:
        raise UsageError("edges: a dataset does not change; make one by helios.save")

    def __repr__(self) -> str:
        return f"<helios.pyg.GraphStore of {self.dataset!r}>"


def _nodes(index: Any, count: int) -> Array:
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


__all__ = ["FeatureStore", "GraphStore", "stores"]
