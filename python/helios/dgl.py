"""Mini-batches as DGL has them: input nodes, output nodes and blocks."""

from __future__ import annotations

from typing import Any

from ._batch import Batch
from ._errors import CapabilityError
from ._loader import Loader as _Loader
from .torch import tensors

try:
    import dgl
except ImportError as e:
    raise CapabilityError("helios.dgl needs DGL; install it, or use helios.torch.Loader") from e

Item = tuple[Any, Any, list[Any]]


class DataLoader(_Loader[Item]):
    """Yields ``(input_nodes, output_nodes, blocks)``, as ``dgl.dataloading.DataLoader`` does.

    ``blocks[0]`` is the outermost. Its source nodes have ``feat`` and ``dgl.NID``; the destination
    nodes of the last block have ``label``. Where the sampler weights nodes, edges have ``weight``:
    that of their source.
    """

    def _check_gpu(self) -> None:
        raise CapabilityError(
            'device cuda: helios.dgl makes blocks in the CPU\'s memory; give device="cpu" and '
            "move them, or use helios.torch.Loader"
        )

    def _convert(self, batch: Batch) -> Item:
        b = tensors(batch)
        blocks = []
        for h, hop in enumerate(b.blocks):
            block = dgl.create_block(
                ("csc", (hop.indptr, hop.src, [])),
                num_src_nodes=hop.num_src,
                num_dst_nodes=hop.num_dst,
            )
            block.srcdata[dgl.NID] = b.n_id[: hop.num_src]
            block.dstdata[dgl.NID] = b.n_id[: hop.num_dst]
            if hop.weights is not None:
                block.edata["weight"] = hop.weights[hop.src]
            if h == 0:
                block.dstdata["label"] = b.y
            blocks.append(block)
        blocks.reverse()
        blocks[0].srcdata["feat"] = b.x
        return b.n_id, b.n_id[: b.num_seeds], blocks


__all__ = ["DataLoader"]
