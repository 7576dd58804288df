"""Checkpoints of heliosctl: safetensors files that NumPy reads and writes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ._errors import DeviceError, UsageError

if TYPE_CHECKING:
    from .models import Network

Path_ = str | os.PathLike[str]
Array = np.ndarray[Any, Any]
Kept = Literal["best", "last"]

_SUM = "helios.file_crc32c"
_MODEL, _BEST = "model.", "best."


def load_pyg(checkpoint: Path_, parameters: Kept = "best") -> Network:
    """Returns the model of a checkpoint as a module of PyG's layers, in evaluation mode.

    >>> model = helios.load_pyg("run")
    >>> scores = model(x, edge_index).softmax(dim=1)

    Of a typed graph it takes and returns dicts by type: ``model(x_dict, edge_index_dict)``.

    Args:
        checkpoint: the folder of ``heliosctl train --checkpoint``, or a file in it.
        parameters: those of the ``"best"`` epoch, or the ``"last"`` ones.
    """
    from .models import pyg

    return pyg(*read_checkpoint(checkpoint, parameters))


def load_dgl(checkpoint: Path_, parameters: Kept = "best") -> Network:
    """Returns the model of a checkpoint as a module of DGL's layers: ``model(graph, x)``.

    Arguments are those of :func:`load_pyg`.
    """
    from .models import dgl

    return dgl(*read_checkpoint(checkpoint, parameters))


def save_checkpoint(model: Network | Mapping[str, Any], path: Path_, like: Path_ = "") -> None:
    """Writes a model as a checkpoint that ``heliosctl eval`` and ``predict`` take.

    ``heliosctl train --resume`` begins at epoch 1 with its parameters, by the settings that the
    original was trained with.

    Args:
        model: a module of :func:`load_pyg` or :func:`load_dgl`, or parameters by the names that
            checkpoints have, as :meth:`helios.models.Network.parameters_by_name` gives them.
        path: the file to write, ``NAME.safetensors``; a folder gets ``checkpoint.safetensors``.
        like: the checkpoint whose settings hold, for parameters by name.
    """
    if isinstance(model, Mapping):
        if not like:
            raise UsageError("parameters have no settings; give like=CHECKPOINT")
        config, _ = read_checkpoint(like)
        named = {k: np.ascontiguousarray(_host(v), np.float32) for k, v in model.items()}
    else:
        config, named = model.config, model.parameters_by_name()
    tensors = {_MODEL + k: v for k, v in named.items()}
    for moment in ("adam.m.", "adam.v."):
        tensors.update({moment + k: np.zeros_like(v) for k, v in named.items()})
    none = {"seconds": 0, "loss_sum": 0, "correct": 0, "counted": 0, "batches": 0}
    facts = {
        "config": config,
        "position": {"epoch": 0, "batch": 0, "adam_step": 0},
        "partial": none,
        "epochs": [],
        "best": {"epoch": -1, "acc": 0},
    }
    meta = {f"helios.{k}": json.dumps(v) for k, v in facts.items()}
    meta["helios.format"] = "7"
    meta["helios.written"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    path = Path(path)
    if path.suffix != ".safetensors":
        path.mkdir(parents=True, exist_ok=True)
        path /= "checkpoint.safetensors"
    part = path.with_name(path.name + ".part")
    part.write_bytes(_encode(tensors, meta))
    part.replace(path)


def read_checkpoint(
    checkpoint: Path_, parameters: Kept = "best"
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Returns a checkpoint's settings, and its parameters by their names."""
    path = Path(checkpoint)
    if path.is_dir():
        path /= "checkpoint.safetensors"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"checkpoint {path} does not exist") from None
    try:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        meta = header.pop("__metadata__")
        config = json.loads(meta["helios.config"])
        tensors = {
            name: np.frombuffer(
                data[8 + size + t["data_offsets"][0] : 8 + size + t["data_offsets"][1]], np.float32
            ).reshape(t["shape"])
            for name, t in header.items()
            if t["dtype"] == "F32"
        }
    except (KeyError, ValueError, TypeError, struct.error) as e:
        raise DeviceError(f"{path} is no checkpoint of heliosctl, or damaged: {e}") from None
    has_best = any(name.startswith(_BEST) for name in tensors)
    prefix = _BEST if parameters == "best" and has_best else _MODEL
    named = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    if not named:
        raise UsageError(f"{path} holds the best epoch's parameters alone; give parameters='best'")
    return config, named


def _host(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _encode(tensors: Mapping[str, Array], meta: dict[str, str]) -> bytes:
    """Encodes a safetensors file with heliosctl's checksum over all of it."""
    entries, offset = {}, 0
    for name, value in tensors.items():
        end = offset + value.nbytes
        entries[name] = {
            "dtype": "F32",
            "shape": list(value.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    zeros = "0" * 8
    header: dict[str, Any] = {"__metadata__": {**meta, _SUM: zeros}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(np.ascontiguousarray(v, "<f4").tobytes() for v in tensors.values())
    data = struct.pack("<Q", len(text)) + text + body
    mark = f'"{_SUM}":"{zeros}"'.encode()
    return data.replace(mark, f'"{_SUM}":"{_crc32c(data):08x}"'.encode(), 1)


def _crc32c(data: bytes) -> int:
    table = []
    for i in range(256):
        c = i
        for _ in range(8):
            c = c >> 1 ^ (0x82F63B78 if c & 1 else 0)
        table.append(c)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
