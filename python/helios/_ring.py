"""The memory that the daemon puts mini-batches into: slots in a file without a name, mapped here.

A slot is the daemon's until a batch names it, and then ours until we release it. Arrays of a
batch lie in the slot itself; while one of them lives, or a tensor or view made of it, the slot
stays ours.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from ._errors import ProtocolError

ALIGNMENT = 64

# bfloat16 has no NumPy type: its arrays hold the bits (uint16), and helios.torch views them right.
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "uint32": np.dtype("<u4"),
}


Owner = ctypes.Array[ctypes.c_char]
Arrays = dict[str, tuple[np.ndarray[Any, Any], str]]


class Ring:
    """slots × slot_bytes of shared memory."""

    on_gpu = False
    kind = "cpu"

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        """Maps the file; the caller keeps fd."""
        if slots < 1 or slot_bytes < 1:
            raise ProtocolError(f"the daemon made a ring of {slots} slots of {slot_bytes} bytes")
        size = slots * slot_bytes
        # A mapping beyond the file's end would kill the process when it is touched.
        have = os.fstat(fd).st_size
        if have < size:
            raise ProtocolError(
                f"the daemon's ring has {have} bytes; {slots} slots of {slot_bytes} need {size}"
            )
        self.slots = slots
        self.slot_bytes = slot_bytes
        try:
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as e:
            raise ProtocolError(f"the daemon's ring cannot be mapped: {e}") from None

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def take(self, described: object, slot: int, copy: bool) -> tuple[Arrays, Owner | None]:
        """Returns the arrays of a batch, and what lives as long as one that lies in the slot."""
        kind = ctypes.c_char * self.slot_bytes
        owner = kind.from_buffer(self._map, slot * self.slot_bytes)
        arrays = tensors(described, self.slot_bytes, owner)
        if copy:
            return {k: (a.copy(), kind) for k, (a, kind) in arrays.items()}, None
        return arrays, owner


@dataclass(slots=True)
class Place:
    """Where in a slot a tensor lies: count elements from the byte offset to end."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    count: int
    end: int


def tensors(described: object, slot_bytes: int, owner: Owner) -> Arrays:
    """Returns the arrays that a batch's message describes, by name, with their type's name.

    They lie in owner and keep it alive.
    """
    out: Arrays = {}
    memory = memoryview(owner)
    for p in places(described, slot_bytes):
        dtype = DTYPES[p.kind]
        flat = np.frombuffer(memory, dtype, p.count, p.offset) if p.count else np.empty(0, dtype)
        out[p.name] = flat.reshape(p.shape), p.kind
    return out


def places(described: object, slot_bytes: int) -> list[Place]:
    """Returns where the tensors lie that a batch's message describes.

    Whatever the message says, none reaches beyond the slot or into another one, for users may write
    to a batch.
    """
    if not isinstance(described, list):
        raise ProtocolError("the daemon sent a batch without a list of tensors")
    out: dict[str, Place] = {}
    for d in described:
        if not isinstance(d, dict):
            raise ProtocolError("the daemon described a tensor by something that is no object")
        name, kind, shape, offset = (d.get(k) for k in ("name", "dtype", "shape", "offset"))
        if not isinstance(name, str) or name in out:
            raise ProtocolError(f"the daemon named a tensor {name!r}, or named it twice")
        if not isinstance(kind, str) or kind not in DTYPES:
            raise ProtocolError(f"the daemon sent tensor {name} with the unknown type {kind!r}")
        if not isinstance(shape, list) or not all(is_count(n) for n in shape) or len(shape) > 8:
            raise ProtocolError(f"the daemon sent tensor {name} with the shape {shape!r}")
        count = math.prod(shape)
        end = offset + count * DTYPES[kind].itemsize if is_count(offset) else -1
        if not is_count(offset) or offset % ALIGNMENT or end > slot_bytes:
            raise ProtocolError(
                f"the daemon put tensor {name} of {count} × {kind} at byte {offset!r} of a "
                f"slot of {slot_bytes}"
            )
        out[name] = Place(name, kind, tuple(shape), offset, count, end)
    lie = sorted((p for p in out.values() if p.count), key=lambda p: p.offset)
    for one, other in itertools.pairwise(lie):
        if one.end > other.offset:
            raise ProtocolError(f"the daemon put tensor {other.name} into tensor {one.name}")
    return list(out.values())


def is_count(n: object) -> TypeGuard[int]:
    """Tells whether n is a whole number from 0 to what 63 bits hold."""
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63
