"""Making a dataset's folder from arrays."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import HeliosError, UsageError
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

    >>> helios.save("g", data)  # a torch_geometric.data.Data or HeteroData, or a graph of DGL
    >>> helios.save("g", x, edge_index, y, {"train": ids})

    Arrays are of NumPy in any order, torch, pandas or SciPy, or of another kind that NumPy takes;
    memory-mapped ones are copied in pieces. A path in place of an array names an .npy file, which
    is read where it lies.

    Args:
        out: the folder to make.
        features: [nodes, dim], float16, float32, float64 or bfloat16, which is kept as float32; or
            PyG's Data with x, edge_index, y and, where it has them, the masks of splits; or a graph
            of DGL with feat, label and masks. Its types stay, of which one has labels.
        edge_index: [2, edges], source and destination; or an adjacency matrix of SciPy, whose entry
            (i, j) is the edge from i to j.
        labels: of a typed graph the name of the type with the labels, where several types have y.
            Of others [nodes] or [nodes, 1], whole numbers; -1 (with ``unlabelled_ok=True``) has
            none. With ``target="multi-label"`` [nodes, labels] of 0 and 1 (255: unknown), with
            ``target="regression"`` [nodes] or [nodes, columns] of numbers (NaN: none). ``y`` has
            the shape that they have here.
        splits: ``train``, ``val`` and ``test``: node numbers, or masks. Without, they are dealt.
        binary: heliosctl; else $HELIOSCTL, else the one in PATH.
        options: those of ``heliosctl import npy``, such as ``undirected=True``.

    Returns:
        the import's result.
    """
    named = dict(splits or {})
    typed = None
    if hasattr(features, "canonical_etypes"):
        typed = _of_dgl(features)
    elif hasattr(features, "node_types") and hasattr(features, "edge_types"):
        typed = _of_hetero(features)
    if typed is not None and (len(typed.x) > 1 or len(typed.edges) > 1):
        if edge_index is not None or named or not isinstance(labels, (str, type(None))):
            raise UsageError("give a graph alone, or its arrays")
        return _save_typed(Path(out), typed, labels, binary, options)
    if typed is not None:
        (features,), (edge_index,), (labels,) = (
            d.values() for d in (typed.x, typed.edges, typed.y)
        )
        named = {**typed.masks, **named}
    elif hasattr(features, "edge_index") and hasattr(features, "x"):
        if edge_index is not None or labels is not None:
            raise UsageError("give a Data alone, or its arrays")
        features, edge_index, labels, named = _of_data(features, named)
    for name, value in (("edge_index", edge_index), ("labels", labels)):
        if value is None:
            raise UsageError(f"{name} is missing; give features, edge_index and labels, or a Data")
    unknown = sorted(set(named) - {"train", "val", "test"})
    if unknown:
        raise UsageError(f"splits has {', '.join(unknown)}; give train, val and test")
    missing = [s for s in SPLITS if s not in named]
    if named and missing:
        raise UsageError(
            f"no split or mask for {' and '.join(missing)}; give all three (an empty one is fine), "
            "or none: then nodes are dealt"
        )
    out = Path(out)
    parent = _parent(out)
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
        return _import("npy", folder, out, *flags(options), binary=binary)


def _import(
    kind: str, folder: str, out: Path, *more: str, binary: str | os.PathLike[str] | None
) -> Record:
    """Imports a temporary folder. Errors name its files alone, for the folder is not the user's."""
    try:
        records = run("import", kind, f"--in={folder}", f"--out={out}", *more, binary=binary)
    except HeliosError as e:
        raise type(e)(str(e).replace(f"{folder}/", "")) from None
    return records[-1] if records else {}


def _parent(out: Path) -> Path:
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is no folder; make it first")
    return parent


@dataclass
class _Typed:
    """A graph by types; the first of what one type has is what save takes of it."""

    nodes: dict[str, int]
    x: dict[str, Any]  # None: the type has no features
    edges: dict[tuple[str, str, str], Any]
    y: dict[str, Any]  # None: no labels
    stores: dict[str, Any]  # for masks

    @property
    def masks(self) -> dict[str, Any]:
        """The masks of a graph of one type."""
        (name,) = self.stores
        return self.masks_of(name)

    def masks_of(self, name: str) -> dict[str, Any]:
        """The masks of the splits that a type has, by split."""
        store = self.stores[name]
        return {s: store[f"{s}_mask"] for s in SPLITS if f"{s}_mask" in store}


SPLITS = ("train", "val", "test")


def _of_hetero(data: Any) -> _Typed:
    """Reads PyG's HeteroData."""
    stores = {t: data[t] for t in data.node_types}
    return _Typed(
        {t: int(s.num_nodes or 0) for t, s in stores.items()},
        {t: s.get("x") for t, s in stores.items()},
        {tuple(e): data[e].edge_index for e in data.edge_types},
        {t: s.get("y") for t, s in stores.items()},
        stores,
    )


def _of_dgl(graph: Any) -> _Typed:
    """Reads a graph of DGL."""
    stores = {t: graph.nodes[t].data for t in graph.ntypes}
    edges = {}
    for e in graph.canonical_etypes:
        src, dst = graph.edges(etype=e, order="eid")
        edges[tuple(e)] = np.stack([src.cpu().numpy(), dst.cpu().numpy()])
    return _Typed(
        {t: int(graph.num_nodes(t)) for t in graph.ntypes},
        {t: s.get("feat") for t, s in stores.items()},
        edges,
        {t: s.get("label") for t, s in stores.items()},
        stores,
    )


def _save_typed(
    out: Path,
    graph: _Typed,
    target: str | None,
    binary: str | os.PathLike[str] | None,
    options: dict[str, Any],
) -> Record:
    """Saves a typed graph through ``heliosctl import graphbolt``, whose description has types."""
    labelled = [t for t, y in graph.y.items() if y is not None]
    if target is None and len(labelled) != 1:
        raise UsageError(
            f"{len(labelled)} types have y ({', '.join(labelled)}); name one with labels="
            if labelled
            else "no type has y (of DGL: label); give one of them its labels"
        )
    target = labelled[0] if target is None else target
    if target not in labelled:
        raise UsageError(f"labels names type {target!r}, which has no y; {labelled} have")
    masks = graph.masks_of(target)
    for name in [*graph.nodes, *(e[1] for e in graph.edges)]:
        if ":" in name:
            raise UsageError(f"the name {name!r} has a colon; rename it")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=_parent(out)) as folder:

        def put(kind: str, name: str, value: Any) -> dict[str, str]:
            path = f"{kind}-{len(list(Path(folder).iterdir()))}.npy"
            _write(Path(folder) / path, name, value)
            return {"format": "numpy", "path": path}

        # Without sets the task is of the first type.
        types = sorted(graph.nodes, key=lambda t: t != target) if not masks else list(graph.nodes)
        features = [
            {"domain": "node", "type": t, "name": "feat", **put("x", "features", graph.x[t])}
            for t in types
            if graph.x[t] is not None
        ]
        sets = {}
        for split, key in zip(SPLITS, ("train_set", "validation_set", "test_set"), strict=True):
            if split in masks:
                ids = _array(split, masks[split])
                ids = np.flatnonzero(ids) if ids.dtype == np.bool_ else ids
                seeds = {"name": "seeds", **put("seeds", split, ids.astype(np.int64))}
                sets[key] = [{"type": target, "data": [seeds]}]
        description = {
            "dataset_name": out.name,
            "graph": {
                "nodes": [{"type": t, "num": graph.nodes[t]} for t in types],
                "edges": [
                    {"type": ":".join(e), **put("edges", "edge_index", pairs)}
                    for e, pairs in graph.edges.items()
                ],
            },
            "feature_data": features,
            "tasks": [{"name": "label", **sets}] if sets else [],
        }
        labels = put("labels", "labels", graph.y[target])["path"]
        (Path(folder) / "metadata.yaml").write_text(json.dumps(description))
        return _import(
            "graphbolt",
            folder,
            out,
            f"--labels={folder}/{labels}",
            *flags(options),
            binary=binary,
        )


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
        if name == "features" and value.ndim == 1:
            value = value.reshape(-1, 1)
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
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":
                value = value.float()
            if "strided" not in str(value.layout):
                raise TypeError(f"a tensor of layout {value.layout}")
            value = value.numpy()
        a: np.ndarray[Any, Any] = np.asanyarray(value)
        if a.dtype == object:
            raise TypeError(f"a {type(value).__name__} of objects")
    except (TypeError, ValueError, RuntimeError) as e:
        how = "a dense array of numbers, whose rows are equally long"
        if name == "edge_index":
            how += ", or an adjacency matrix of SciPy"
        raise UsageError(f"{name} is no array of numbers: {e}; give {how}") from None
    return a
