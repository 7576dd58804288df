"""Reads the rows that each mini-batch of a run looked up, from `heliosctl train --trace FILE`."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

# cache/trace/trace.go: kinds of records, and how many numbers follow the simple ones.
BEGIN, PART, MORE, RESET, LIVE, HOTNESS, PLACE, SUPERBATCH = range(1, 9)
NUMBERS = {RESET: 1, LIVE: 10, SUPERBATCH: 7}


def batches(path: Path) -> dict[tuple[int, int, int], list[int]]:
    """Returns the rows of each batch in the order of the lookups, by kind of pass, epoch, index."""
    data = path.read_bytes()
    assert data[:8] == b"HELTRACE"
    (header,) = struct.unpack_from("<I", data, 12)
    at = 16 + header + 4
    (end,) = struct.unpack_from("<Q", data, len(data) - 24)
    out: dict[tuple[int, int, int], list[int]] = {}
    rows: list[int] = []
    while at < end:
        raw, length, _ = struct.unpack_from("<III", data, at)
        block = zlib.decompress(data[at + 12 : at + 12 + length], wbits=-15)
        assert len(block) == raw
        at += 12 + length
        numbers = iter(_varints(block))
        for tag in numbers:
            if tag == BEGIN:
                rows = out[next(numbers), next(numbers), next(numbers)] = []
            elif tag in (PART, MORE):
                rows += _rows(numbers)
            elif tag == PLACE:
                next(numbers), next(numbers), _rows(numbers)
            elif tag == HOTNESS:
                for _ in range(next(numbers)):
                    next(numbers)
            else:
                for _ in range(NUMBERS[tag]):
                    next(numbers)
    return out


def _varints(block: bytes):
    value = shift = 0
    for b in block:
        value |= (b & 127) << shift
        shift += 7
        if b < 128:
            yield value
            value = shift = 0


def _rows(numbers) -> list[int]:
    last, rows = 0, []
    for _ in range(next(numbers)):
        n = next(numbers)
        last += (n >> 1) ^ -(n & 1)
        rows.append(last)
    return rows
