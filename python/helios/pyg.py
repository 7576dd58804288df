"""PyG's own loaders over a dataset, and the stores for code that brings another one.

They sample in Python's process and ask for rows when they need them; nothing reads ahead.
:class:`helios.NeighborLoader` is faster where its samplers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ._dataset import Dataset
from ._errors import CapabilityError, UsageError
from ._rows import Rows, node_numbers
from .loader import attach, dataset_of
from .torch import tensor  # before PyTorch: it says what lacks

import torch  # isort: skip

try:
    from torch_geometric.data import Data, EdgeAttr, TensorAttr
    from torch_geometric.data import FeatureStore as _FeatureStore
    from torch_geometric.data import GraphStore as _GraphStore
    from torch_geometric.loader import LinkNeighborLoader as _LinkNeighborLoader
    from torch_geometric.loader import NeighborLoader as _NeighborLoader

    from ._sampler import Sampler
except ImportError as e:
    raise CapabilityError("helios.pyg needs PyG; install it: pip install torch_geometric") from e


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


def _finish(batch: Any, dataset: Dataset, transform: Callable[[Any], Any] | None) -> Any:
    """Gives a batch the masks and what users have set on the dataset."""
    schema = dataset.schema
    of = dataset if schema is None else dataset[schema.target]
    store = batch if schema is None else batch[schema.target]
    for split in ("train", "val", "test"):
        mask = of.files.mask(split)[store.n_id.numpy()]
        setattr(store, f"{split}_mask", torch.from_numpy(mask))
    attach(batch, dataset)
    return batch if transform is None else transform(batch)


def _arguments(data: Any, num_neighbors: Any, more: dict[str, Any]) -> Dataset:
    """Returns the dataset, and has the arguments of PyG's loader name our sampler."""
    dataset = dataset_of(data)
    names = ("subgraph_type", "replace", "disjoint", "temporal_strategy", "time_attr")
    how = {k: more[k] for k in (*names, "weight_attr") if k in more}
    if not more.get("directed", True):
        how["subgraph_type"] = "induced"
    if more.get("neighbor_sampler") is None:
        more["neighbor_sampler"] = Sampler(dataset, num_neighbors, **how)
    more["transform"] = functools.partial(_finish, dataset=dataset, transform=more.get("transform"))
    return dataset


class NeighborLoader(_NeighborLoader):  # type: ignore[misc]
    """PyG's NeighborLoader over a dataset, for what the daemon's sampler lacks.

    It takes ``weight_attr``, ``time_attr``, ``disjoint``, ``replace`` and ``neighbor_sampler``.
    Weights and times are attributes that you set on the dataset, and come in the batches, too:
    ``dataset.edge_weight = w``, one for each edge of ``dataset.edge_index``. No compiled package is
    needed.
    """

    def __init__(
        self, data: Any, num_neighbors: Any, input_nodes: Any = None, input_time: Any = None,
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Makes it for a dataset of :func:`helios.open`; arguments are those of PyG's."""
        dataset = _arguments(data, num_neighbors, arguments)
        if dataset.schema is None:
            every = np.arange(dataset.num_nodes)
            input_nodes = torch.as_tensor(np.asarray(every if input_nodes is None else input_nodes))
        elif isinstance(input_nodes, str) or (
            isinstance(input_nodes, tuple) and input_nodes[1] is None
        ):
            kind = input_nodes if isinstance(input_nodes, str) else input_nodes[0]
            input_nodes = kind, torch.arange(dataset[kind].num_nodes)
        super().__init__(stores(dataset), num_neighbors, input_nodes, input_time, **arguments)


class LinkNeighborLoader(_LinkNeighborLoader):  # type: ignore[misc]
    """PyG's LinkNeighborLoader over a dataset: mini-batches of edges, with negative ones.

    >>> loader = helios.pyg.LinkNeighborLoader(
    ...     dataset, [10, 10], neg_sampling_ratio=1.0, batch_size=256, shuffle=True
    ... )

    Weights and times are as of :class:`NeighborLoader`.
    """

    def __init__(
        self, data: Any, num_neighbors: Any, edge_label_index: Any = None, edge_label: Any = None,
        edge_label_time: Any = None, **arguments: Any,
    ) -> None:  # fmt: skip
        """Makes it for a dataset of :func:`helios.open`; arguments are those of PyG's."""
        dataset = _arguments(data, num_neighbors, arguments)
        kind, pairs = None, edge_label_index
        if dataset.schema is not None:
            typed = isinstance(pairs, tuple) and len(pairs) == 2 and not isinstance(pairs[0], str)
            kind, pairs = pairs if typed else (pairs, None)
            kind = dataset.schema.edge_type(kind)
        elif isinstance(pairs, tuple) and pairs[0] is None:
            pairs = pairs[1]
        if pairs is None:
            pairs = (dataset if kind is None else dataset[kind]).edge_index
        super().__init__(
            stores(dataset), num_neighbors, (kind, pairs), edge_label, edge_label_time, **arguments
        )


class FeatureStore(_FeatureStore):  # type: ignore[misc]
    """``x``, read by the daemon from the SSDs, and ``y``, by node number.

    A job of the daemon's answers all calls, of each type one, as long as this lives. A second after
    the last call it gives the SSDs back, and takes them again for the next.
    """

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        """Makes it for a dataset; options are a loader's."""
        super().__init__()
        self.dataset = dataset
        self._rows = Rows(dataset, **options)

    def get_all_tensor_attrs(self) -> list[Any]:
        """Returns what there is: ``x`` and ``y`` of the nodes, by type where they have several."""
        schema = self.dataset.schema
        of: Sequence[tuple[str | None, str]] = [(None, "x"), (None, "y")]
        if schema is not None:
            of = [(t, "x") for t, dim in schema.dims.items() if dim] + [(schema.target, "y")]
        of = [(t, name) for t, name in of if name not in self.dataset._dropped]
        return [TensorAttr(group_name=t, attr_name=name, index=None) for t, name in of]

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...]:
        if self._named(attr) == "y":
            files = self.dataset.files
            return len(files.array("labels")), *files.target_shape()
        schema = self.dataset.schema
        if schema is None:
            return self.dataset.num_nodes, self.dataset.num_features
        return schema.nodes[attr.group_name], schema.dims[attr.group_name]

    def _get_tensor(self, attr: Any) -> Any:
        name, kind, schema = self._named(attr), attr.group_name, self.dataset.schema
        nodes = node_numbers(
            attr.index, self.dataset.num_nodes if schema is None else schema.nodes[kind]
        )
        if name == "y":
            return torch.from_numpy(self.dataset.files.targets(nodes))
        return self._rows.read(nodes, kind)

    def _named(self, attr: Any) -> str:
        name = str(attr.attr_name)
        if isinstance(attr.group_name, tuple) or name.startswith("edge"):
            raise UsageError(
                f"{name} is of edges, and datasets of heliosctl have features of nodes only: PyG "
                "would look them up by node number"
            )
        schema, kind = self.dataset.schema, attr.group_name
        known = kind is None if schema is None else kind in schema.nodes
        if (
            name not in ("x", "y")
            or not known
            or (schema and name == "y" and kind != schema.target)
        ):
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
        self._edges: dict[Any, tuple[Any, Any]] = {}

    def get_all_edge_attrs(self) -> list[Any]:
        """Returns the one layout that there is, of each type of edges."""
        schema = self.dataset.schema
        if schema is None:
            return [self._attr(None, self.dataset.num_nodes, self.dataset.num_nodes)]
        return [self._attr(e, schema.nodes[e[0]], schema.nodes[e[2]]) for e in schema.edge_types]

    def _attr(self, kind: Any, sources: int, targets: int) -> Any:
        return EdgeAttr(edge_type=kind, layout="csc", is_sorted=True, size=(sources, targets))

    def _get_edge_index(self, edge_attr: Any) -> Any:
        kind = edge_attr.edge_type
        attrs = {a.edge_type: a for a in self.get_all_edge_attrs()}
        if kind not in attrs:
            raise UsageError(f"the dataset has no edges of type {kind}")
        if edge_attr.layout != attrs[kind].layout:
            return None
        if kind not in self._edges:
            files = self.dataset.files if kind is None else self.dataset[kind].files
            indices = files.array("indices").astype(np.int64)
            indptr = np.array(files.array("indptr"), np.int64)
            self._edges[kind] = torch.from_numpy(indices), torch.from_numpy(indptr)
        return self._edges[kind]

    def _put_edge_index(self, edge_index: Any, edge_attr: Any) -> bool:
        raise UsageError("edges: a dataset does not change; make one by helios.save")

    def _remove_edge_index(self, edge_attr: Any) -> bool:
        raise UsageError("edges: a dataset does not change; make one by helios.save")

    def __repr__(self) -> str:
        return f"<helios.pyg.GraphStore of {self.dataset!r}>"


class InferenceLoader(_NeighborLoader):  # type: ignore[misc]
    """Batches for ``model.inference(loader)`` of PyG, and for layer-wise loops of your own.

    >>> scores = model.inference(helios.pyg.InferenceLoader(dataset, batch_size=1024))

    A batch has nodes in their order, as many as batch_size, and all edges into them: ``n_id``,
    ``edge_index`` and ``batch_size``. It comes from the dataset's files, and no feature is read for
    it: the model takes those from ``dataset.x``, once.
    """

    def __init__(self, dataset: Dataset, batch_size: int = 1024) -> None:
        """Makes it for a dataset of one type."""
        if dataset.schema is not None:
            raise CapabilityError(
                "InferenceLoader: the dataset has types, and PyG's inference none"
            )
        if batch_size < 1:
            raise UsageError(f"batch_size {batch_size} is not above 0")
        self.data, self.dataset = dataset, range(dataset.num_nodes)
        self._size = batch_size
        self.node_sampler = SimpleNamespace(num_neighbors=[-1])

    def __len__(self) -> int:
        """How many batches there are."""
        return (len(self.dataset) + self._size - 1) // self._size

    def __iter__(self) -> Iterator[Any]:
        """Yields all nodes, in their order."""
        files = self.data.files
        for first in range(0, len(self.dataset), self._size):
            seeds = np.arange(first, min(first + self._size, len(self.dataset)))
            flat, col = files.lists(seeds)
            src = files.array("indices")[flat].astype(np.int64)
            others = np.unique(src[(src < first) | (src > seeds[-1])])
            row = np.searchsorted(others, src) + len(seeds)
            inside = (src >= first) & (src <= seeds[-1])
            row[inside] = src[inside] - first
            yield Data(
                n_id=tensor(np.concatenate([seeds, others])),
                edge_index=tensor(np.stack([row, col])),
                batch_size=len(seeds),
            )


__all__ = [
    "FeatureStore",
    "GraphStore",
    "InferenceLoader",
    "LinkNeighborLoader",
    "NeighborLoader",
    "stores",
]
