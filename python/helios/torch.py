"""Mini-batches as plain PyTorch tensors: no PyG, no DGL."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from ._batch import Batch, Block
from ._cuda import DeviceArray
from ._errors import CapabilityError
from ._hetero import HeteroBatch
from ._loader import Loader as _Loader

try:
    import torch
except ImportError as e:
    raise CapabilityError(
        "helios.torch needs PyTorch; install it (pip install torch), or use helios.NumpyLoader"
    ) from e

try:
    torch.from_numpy(np.zeros(1))
except RuntimeError as e:  # PyTorch before 2.3 with NumPy 2
    raise CapabilityError(
        f"PyTorch {torch.__version__} cannot use NumPy {np.__version__}: {e}; "
        'install an older one (pip install "numpy<2"), or a newer PyTorch'
    ) from None

_VIEWS = {"bfloat16": torch.bfloat16}
# Unsigned types that older versions of PyTorch lack; their values fit the signed ones.
_SIGNED = {"uint32": np.int32}


def tensor(a: Any, kind: str = "") -> torch.Tensor:
    """Returns an array as a tensor on the same memory, which it keeps alive."""
    if isinstance(a, DeviceArray):
        return torch.from_dlpack(a.view("int32") if kind in _SIGNED else a)
    if kind in _SIGNED:
        a = a.view(_SIGNED[kind])
    elif a.dtype == np.uint16:
        a = a.view(np.int16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        t = torch.from_numpy(a)
    return t.view(_VIEWS[kind]) if kind in _VIEWS else t


def check_gpu() -> None:
    """Raises a CapabilityError where PyTorch has no GPU."""
    if torch.version.cuda is None:
        raise CapabilityError(
            f"device cuda: PyTorch {torch.__version__} is built without CUDA; install a build with "
            'it, or give device="cpu"'
        )
    if not torch.cuda.is_available():
        raise CapabilityError(
            'device cuda: PyTorch finds no GPU here (torch.cuda.is_available()); give device="cpu"'
        )


def _block(b: Block) -> Block:
    return Block(
        num_dst=b.num_dst,
        num_src=b.num_src,
        indptr=tensor(b.indptr),
        src=tensor(b.src),
        weights=None if b.weights is None else tensor(b.weights),
    )


def typed_tensors(batch: HeteroBatch) -> HeteroBatch:
    """Is tensors for a batch of a typed graph."""
    return replace(
        batch,
        n_id={t: tensor(a) for t, a in batch.n_id.items()},
        x={t: tensor(a, batch.x_dtype) for t, a in batch.x.items()},
        y=tensor(batch.y),
        edge_index={e: tensor(a) for e, a in batch.edge_index.items()},
        blocks=[{e: _block(b) for e, b in hop.items()} for hop in batch.blocks],
        input_id=None if batch.input_id is None else tensor(batch.input_id),
    )


def tensors(batch: Any) -> Any:
    """Returns a batch whose arrays are tensors on the same memory."""
    if isinstance(batch, HeteroBatch):
        return typed_tensors(batch)
    return replace(
        batch,
        n_id=tensor(batch.n_id),
        x=tensor(batch.x, batch.x_dtype),
        y=tensor(batch.y),
        edge_index=tensor(batch.edge_index),
        blocks=[_block(b) for b in batch.blocks],
        degrees=None if batch.degrees is None else tensor(batch.degrees, "uint32"),
        input_id=None if batch.input_id is None else tensor(batch.input_id),
    )


class Loader(_Loader[Batch]):
    """Mini-batches as :class:`helios.Batch` of tensors.

    ``x`` is [rows, dim], ``y`` int64 [num_seeds], ``n_id`` int64 [rows], ``edge_index`` int64
    [2, edges]; ``blocks[h]`` has what hop h drew, by destination.
    """

    def _check_gpu(self) -> None:
        check_gpu()

    def _convert(self, batch: Batch) -> Batch:
        made: Batch = tensors(batch)
        return made


class IterableDataset(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """A loader's batches for the workers of ``torch.utils.data.DataLoader``.

    Worker w of n makes every n-th batch, so batches come in the loader's order whatever n is::

        data = helios.torch.IterableDataset(loader)
        for epoch in range(epochs):
            data.set_epoch(epoch)
            for batch in torch.utils.data.DataLoader(data, batch_size=None, num_workers=2):
                ...

    An iteration is of the epoch that was set last, as with a DistributedSampler. The daemon makes
    batches ahead without any worker; this is for code that has them anyway.
    """

    def __init__(self, loader: _Loader[Any]) -> None:
        """Takes over a loader of any kind."""
        self.loader = loader
        # Shared, for workers that outlive an epoch.
        self._epoch = torch.full((1,), loader.epoch).share_memory_()
        self._mine: _Loader[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Has the next iteration begin this epoch, as of a DistributedSampler."""
        self._epoch[0] = epoch
        self.loader.set_epoch(epoch)

    def _of_worker(self) -> _Loader[Any]:
        info = torch.utils.data.get_worker_info()
        if info is None:
            return self.loader
        if self._mine is None:
            self._mine = self.loader._part(info.id, info.num_workers)
        return self._mine

    def __iter__(self) -> Any:
        loader, epoch = self._of_worker(), int(self._epoch[0])
        if loader.epoch != epoch or loader._begun or not loader._placed:
            loader.set_epoch(epoch)
            info = torch.utils.data.get_worker_info()
            if info is not None and loader.rank // self.loader.world_size != info.id:
                # Its part began in the middle of an epoch; in a whole one it is another.
                self.loader.set_epoch(epoch)
                self._mine = None
                loader = self._of_worker()
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state: in a worker, that of its part."""
        return self._of_worker().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has the loader go on behind a state."""
        self._of_worker().load_state_dict(state)
        self._epoch[0] = state["epoch"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mine": None}


def block_edges(block: Block) -> torch.Tensor:
    """Returns the edges of a block, int64 [2, edges]: source, destination; positions in n_id."""
    dst = torch.arange(block.num_dst, device=block.indptr.device).repeat_interleave(
        block.indptr[1:] - block.indptr[:-1]
    )
    return torch.stack([block.src, dst])


__all__ = ["IterableDataset", "Loader", "block_edges", "check_gpu", "tensor", "tensors"]
