"""Mini-batches as plain PyTorch tensors: no PyG, no DGL."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from ._batch import Batch, Block
from ._errors import CapabilityError
from ._loader import Loader as _Loader

try:
    import torch
except ImportError as e:
    raise CapabilityError(
        "helios.torch needs PyTorch; install it (pip install torch), or use helios.NumpyLoader"
    ) from e

_VIEWS = {"bfloat16": torch.bfloat16}
# Unsigned types that older versions of PyTorch lack; their values fit the signed ones.
_SIGNED = {"uint32": np.int32}


def tensor(a: Any, kind: str = "") -> torch.Tensor:
    """Returns an array as a tensor on the same memory, which it keeps alive."""
    if kind in _SIGNED:
        a = a.view(_SIGNED[kind])
    elif a.dtype == np.uint16:
        a = a.view(np.int16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        t = torch.from_numpy(a)
    return t.view(_VIEWS[kind]) if kind in _VIEWS else t


def tensors(batch: Batch) -> Batch:
    """Returns a batch whose arrays are tensors on the same memory."""
    return replace(
        batch,
        n_id=tensor(batch.n_id),
        x=tensor(batch.x, batch.x_dtype),
        y=tensor(batch.y),
        edge_index=tensor(batch.edge_index),
        blocks=[
            Block(
                num_dst=b.num_dst,
                num_src=b.num_src,
                indptr=tensor(b.indptr),
                src=tensor(b.src),
                weights=None if b.weights is None else tensor(b.weights),
            )
            for b in batch.blocks
        ],
        degrees=None if batch.degrees is None else tensor(batch.degrees, "uint32"),
    )


class Loader(_Loader[Batch]):
    """Mini-batches as :class:`helios.Batch` of tensors.

    ``x`` is [rows, dim], ``y`` int64 [num_seeds], ``n_id`` int64 [rows], ``edge_index`` int64
    [2, edges]; ``blocks[h]`` has what hop h drew, by destination.
    """

    def _convert(self, batch: Batch) -> Batch:
        return tensors(batch)


def block_edges(block: Block) -> torch.Tensor:
    """Returns the edges of a block, int64 [2, edges]: source, destination; positions in n_id."""
    dst = torch.arange(block.num_dst).repeat_interleave(block.indptr[1:] - block.indptr[:-1])
    return torch.stack([block.src, dst])


__all__ = ["Loader", "block_edges", "tensor", "tensors"]
