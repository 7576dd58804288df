"""Mini-batches as PyG's NeighborLoader gives them."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from ._batch import Batch, Block
from ._cuda import DeviceArray
from ._errors import CapabilityError
from ._loader import Loader


@functools.cache
def _kinds() -> tuple[Any, Any, Any]:
    """Returns what makes the result, the tensors and a block's edges, of what is installed."""
    try:
        from . import torch
    except ImportError:
        return SimpleNamespace, None, _edges
    except RuntimeError:  # CapabilityError: no PyTorch
        return SimpleNamespace, None, _edges
    try:
        from torch_geometric.data import Data
    except ImportError:
        return SimpleNamespace, torch.tensors, torch.block_edges
    return Data, torch.tensors, torch.block_edges


def _edges(block: Block) -> Any:
    import numpy as np

    if isinstance(block.indptr, DeviceArray):
        raise CapabilityError("adjs: edges on a GPU are made by PyTorch, which is not installed")
    dst = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
    return np.stack([block.src, dst])


class NeighborLoader(Loader[Any]):
    """Yields a ``torch_geometric.data.Data`` for each mini-batch, as PyG's NeighborLoader does.

    ========================  ===================================================================
    ``x``                     [rows, dim], features of all nodes of the batch
    ``y``                     int64 [batch_size], labels of the seeds, -1 where there is none
    ``n_id``                  int64 [rows], numbers of the nodes in the dataset, the seeds first
    ``edge_index``            int64 [2, edges], each node's neighbours drawn once
    ``batch_size``            the number of seeds
    ``num_sampled_nodes``     by hop, the seeds first (for ``torch_geometric.utils.trim_to_layer``)
    ``num_sampled_edges``     by hop
    ``index``                 the batch's number in the whole epoch
    ``blocks``                what each hop drew for *all* nodes before it, as ``heliosctl train``
                              uses it: :class:`helios.Block`, the seeds' hop first; see :func:`adjs`
    ========================  ===================================================================

    Without PyG the batch is a plain object with these attributes; without PyTorch they are NumPy
    arrays, or with ``device="cuda"`` :class:`helios.DeviceArray`. ``y`` has the seeds' labels only:
    ``batch.y[:batch.batch_size]`` works as with PyG.
    """

    def _check_gpu(self) -> None:
        if _kinds()[1] is not None:
            from .torch import check_gpu

            check_gpu()

    def _convert(self, batch: Batch) -> Any:
        kind, convert, _ = _kinds()
        b = batch if convert is None else convert(batch)
        item = kind(
            x=b.x,
            y=b.y,
            n_id=b.n_id,
            edge_index=b.edge_index,
            batch_size=b.num_seeds,
            num_sampled_nodes=b.num_sampled_nodes,
            num_sampled_edges=b.num_sampled_edges,
            index=b.index,
            blocks=b.blocks,
        )
        if b.degrees is not None:
            item.degrees = b.degrees
        return item


def adjs(batch: Any) -> list[tuple[Any, tuple[int, int]]]:
    """Returns ``(edge_index, (sources, destinations))`` for each layer, the outermost first.

    For bipartite layers: ``x = conv((x, x[:size[1]]), edge_index)``. The edges are those that
    ``heliosctl train`` uses in that layer.
    """
    edges = _kinds()[2]
    return [(edges(b), (b.num_src, b.num_dst)) for b in reversed(batch.blocks)]
