"""Mini-batches of typed graphs as PyG's HeteroData. Importing it needs PyG."""

from __future__ import annotations

from typing import Any

from torch_geometric.data import HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage

from ._dataset import Dataset, Files
from ._hetero import HeteroBatch
from .loader import _like, _numpy


class _Lazy:
    """A store with attributes that are found in the dataset's files when they are asked for."""

    def __getitem__(self, name: str) -> Any:
        """Returns an attribute, found if need be; PyG's stores have __getattr__ ask here, too."""
        store: Any = self
        if name in store._lazy and name not in store._mapping:
            store._mapping[name] = store._find(name)
        return super().__getitem__(name)  # type: ignore[misc]


class NodeStore(_Lazy, NodeStorage):  # type: ignore[misc]
    """PyG's, of nodes of a type, with the masks of the splits."""

    def _find(self, name: str) -> Any:
        mask = self._files.mask(name.removesuffix("_mask"))
        return _like(self.n_id, mask[_numpy(self.n_id)])


class EdgeStore(_Lazy, EdgeStorage):  # type: ignore[misc]
    """PyG's, of edges of a type, with ``e_id``, which counts those of the dataset's."""

    def _find(self, _: str) -> Any:
        batch, (src, _, dst) = self._parent(), self._key
        row, col = _numpy(self.edge_index)
        sources, targets = _numpy(batch[src].n_id)[row], _numpy(batch[dst].n_id)[col]
        return _like(self.edge_index, self._files.edge_numbers(sources, targets))


def make(b: HeteroBatch, dataset: Dataset) -> Any:
    """Returns a batch of tensors as PyG's loader would give it."""
    data = HeteroData()
    counts = b.num_sampled_nodes
    for t, n_id in b.n_id.items():
        store = NodeStore(_parent=data, _key=t)
        store._files = dataset[t].files
        store._lazy = Files.LAZY[1:] if t == b.target_type else ()
        store.n_id, store.x, store.num_sampled_nodes = n_id, b.x[t], counts[t]
        data._node_store_dict[t] = store
    data[b.target_type].y = b.y
    data[b.input_type].input_id = b.input_id
    data[b.input_type].batch_size = b.num_seeds
    for e, edge_index in b.edge_index.items():
        edges = EdgeStore(_parent=data, _key=e)
        edges._files, edges._lazy = dataset[e].files, Files.LAZY[:1]
        edges.edge_index, edges.num_sampled_edges = edge_index, b.num_sampled_edges[e]
        data._edge_store_dict[e] = edges
    data.index = b.index
    return data
