"""Making a dataset's folder from arrays."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import CapabilityError, UsageError
from ._verbs import Record, flags, run


def save(
    out: str | os.PathLike[str],
    features: Any,
    edge_index: Any = None,
    labels: Any = None,
    splits: Mapping[str, Any] | None = None,
    *,
    binary: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Record:
    """Makes the dataset's folder ``out`` from arrays, through ``heliosctl import npy``.

    >>> helios.save("g", data)  # a torch_geometric.data.Data
    >>> helios.save("g", x, edge_index, y, {"train": ids})

    Arrays are of NumPy in any order, torch, pandas or SciPy, or of another kind that NumPy takes;
    memory-mapped ones are copied in pieces. A path in place of an array names an .npy file, which
    is read where it lies.

    Args:
        out: the folder to make.
        features: [nodes, dim], float16, float32, float64 or bfloat16, which is kept as float32; or
            PyG's Data with x, edge_index, y and, where it has them, the masks of splits.
        edge_index: [2, edges], source and destination; or an adjacency matrix of SciPy, whose entry
            (i, j) is the edge from i to j.
        labels: [nodes], whole numbers; -1 (with ``unlabelled_ok=True``) has none. With
            ``target="multi-label"`` [nodes, labels] of 0 and 1 (255: unknown), with
            ``target="regression"`` [nodes] or [nodes, columns] of numbers (NaN: none).
        splits: ``train``, ``val`` and ``test``: node numbers, or masks. Without, they are dealt.
        binary: heliosctl; else $HELIOSCTL, else the one in PATH.
        options: those of ``heliosctl import npy``, such as ``undirected=True``.

    Returns:
        the import's result.
    """
    named = dict(splits or {})
    if hasattr(features, "node_types"):
        raise CapabilityError(
            "a HeteroData has types, and save takes graphs of one type: give data.to_homogeneous()"
        )
    if hasattr(features, "edge_index") and hasattr(features, "x"):
        if edge_index is not None or labels is not None:
            raise UsageError("give a Data alone, or its arrays")
        features, edge_index, labels, named = _of_data(features, named)
    for name, value in (("edge_index", edge_index), ("labels", labels)):
        if value is None:
            raise UsageError(f"{name} lacks; give features, edge_index and labels, or a Data")
    unknown = sorted(set(named) - {"train", "val", "test"})
    if unknown:
        raise UsageError(f"splits has {', '.join(unknown)}; give train, val and test")
    out = Path(out)
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is no folder; make it first")
    arrays = {"features": features, "edge_index": edge_index, "labels": labels, **named}
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=parent) as folder:
        for name, value in arrays.items():
            target = Path(folder) / f"{name}.npy"
            if isinstance(value, (str, os.PathLike)):
                source = Path(value).absolute()
                if not source.is_file():
                    raise UsageError(f"{name}: {source} is no file")
                target.symlink_to(source)
            else:
                _write(target, name, value)
        records = run(
            "import", "npy", f"--in={folder}", f"--out={out}", *flags(options), binary=binary
        )
    return records[-1] if records else {}


def _of_data(data: Any, splits: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Returns features, edges, labels and splits of PyG's Data."""
    for name in ("x", "edge_index", "y"):
        if getattr(data, name, None) is None:
            raise UsageError(f"the Data has no {name}; give arrays in its place")
    for split in ("train", "val", "test"):
        mask = getattr(data, f"{split}_mask", None)
        if mask is not None:
            splits.setdefault(split, mask)
    return data.x, data.edge_index, data.y, splits


ROWS = 1 << 16  # copied at a time


def _write(target: Path, name: str, value: Any) -> None:
    """Writes an array as an .npy file in C's order."""
    if name == "edge_index" and hasattr(value, "tocoo"):
        matrix = value.tocoo()
        value = np.stack([matrix.row, matrix.col])
    if hasattr(value, "tocsr"):  # a sparse matrix of features
        value = value.tocsr()
        kind = value.dtype
    else:
        value = _array(name, value)
        kind = value.dtype
        if name == "features" and value.ndim == 1 or name == "labels" and value.shape[1:] == (1,):
            value = value.reshape(-1, 1) if name == "features" else value.reshape(-1)
        if kind.name == "bfloat16":  # of ml_dtypes
            kind = np.dtype(np.float32)
        elif value.flags.c_contiguous or not value.flags.f_contiguous:
            np.save(target, value, allow_pickle=False)
            return
    out = np.lib.format.open_memmap(target, "w+", kind, value.shape)
    for at in range(0, value.shape[0], ROWS):
        rows = value[at : at + ROWS]
        out[at : at + ROWS] = rows.toarray() if hasattr(rows, "toarray") else rows
    out.flush()


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        value = value.numpy()
    a: np.ndarray[Any, Any] = np.asanyarray(value)
    if a.dtype == object:
        raise UsageError(f"{name} is no array of numbers")
    return a
