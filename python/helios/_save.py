"""Making a dataset's folder from arrays."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import UsageError
from ._verbs import Record, flags, run


def save(
    out: str | os.PathLike[str],
    features: Any,
    edge_index: Any,
    labels: Any,
    splits: Mapping[str, Any] | None = None,
    *,
    binary: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Record:
    """Makes the dataset's folder ``out`` from arrays, through ``heliosctl import npy``.

    Arrays are of NumPy or torch; memory-mapped ones are copied in pieces. A path in place of an
    array names an .npy file, which is read where it lies.

    Args:
        out: the folder to make.
        features: [nodes, dim], float16, float32 or float64.
        edge_index: [2, edges], source and destination.
        labels: [nodes], whole numbers; -1 (with ``unlabelled_ok=True``) has none.
        splits: ``train``, ``val`` and ``test``: node numbers, or masks. Without, they are dealt.
        binary: heliosctl; else $HELIOSCTL, else the one in PATH.
        options: those of ``heliosctl import npy``, such as ``undirected=True``.

    Returns:
        the import's result.
    """
    named = dict(splits or {})
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
                np.save(target, _array(name, value), allow_pickle=False)
        records = run(
            "import", "npy", f"--in={folder}", f"--out={out}", *flags(options), binary=binary
        )
    return records[-1] if records else {}


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    a: np.ndarray[Any, Any] = np.asanyarray(value)
    if a.dtype == object:
        raise UsageError(f"{name} is no array of numbers")
    return a
