"""A mini-batch as arrays of NumPy or of a GPU, checked against what it says of itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ._cuda import DeviceArray
from ._errors import ProtocolError, UsageError
from ._ring import is_count

Array = np.ndarray[Any, Any] | DeviceArray


class _Moves:
    """Tensors in a dataclass that go together."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a copy whose tensors are where ``torch.Tensor.to`` puts them."""
        return self._each(lambda a: a.to(*args, **kwargs))

    def cpu(self) -> Any:
        """Returns a copy in the CPU's memory."""
        return self._each(lambda a: a.cpu())

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a copy on a GPU."""
        return self._each(lambda a: a.cuda(*args, **kwargs))

    def pin_memory(self, *args: Any) -> Any:
        """Returns a copy in page-locked memory."""
        return self._each(lambda a: a.pin_memory(*args))

    def _each(self, move: Callable[[Any], Any]) -> Any:
        """Returns a copy whose tensors are moved; those of NumPy and DeviceArrays are none."""
        moved: dict[str, Any] = {}
        for f in fields(self):  # type: ignore[arg-type]
            a = getattr(self, f.name)
            if isinstance(a, list) and f.name == "blocks":
                moved[f.name] = [_moved(b, move) for b in a]
            else:
                moved[f.name] = _moved(a, move)
        return replace(self, **moved)  # type: ignore[type-var]

    def __eq__(self, other: object) -> bool:
        """Whether all numbers are equal, wherever they lie."""
        if type(other) is not type(self):
            return NotImplemented
        return all(
            _equal(getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)  # type: ignore[arg-type]
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Shows shapes in place of the numbers."""
        shown = []
        for f in fields(self):  # type: ignore[arg-type]
            a = getattr(self, f.name)
            a = {k: _shape(v) for k, v in a.items()} if isinstance(a, dict) else _shape(a)
            if a is not None:
                shown.append(f"{f.name}={a}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _moved(a: Any, move: Callable[[Any], Any]) -> Any:
    if isinstance(a, dict):
        return {k: _moved(v, move) for k, v in a.items()}
    if isinstance(a, Block):
        return a._each(move)
    if isinstance(a, (np.ndarray, DeviceArray)):
        raise UsageError("these arrays are no tensors; helios.torch.Loader gives tensors")
    return move(a) if hasattr(a, "dtype") else a


def _shape(a: Any) -> Any:
    return f"[{', '.join(map(str, a.shape))}]" if hasattr(a, "dtype") else a


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    if not hasattr(a, "dtype") or not hasattr(b, "dtype"):
        return bool(a == b) if not hasattr(a, "dtype") and not hasattr(b, "dtype") else False
    if hasattr(a, "cpu") and hasattr(b, "cpu"):
        return a.dtype == b.dtype and bool(a.cpu().equal(b.cpu()))
    one, other = (x.numpy() if isinstance(x, DeviceArray) else x for x in (a, b))
    return one.dtype == other.dtype and bool(np.array_equal(one, other))


@dataclass(eq=False, repr=False)
class Block(_Moves):
    """The edges that one hop drew, by destination (CSC).

    Destinations are the first num_dst nodes of the batch, sources its first num_src.
    """

    num_dst: int
    num_src: int
    indptr: Any  #: int64 [num_dst + 1]
    src: Any  #: int64 [num_edges], positions in n_id
    weights: Any = None  #: float32 [num_src] of layer-wise sampling, else None


@dataclass(eq=False, repr=False)
class Batch(_Moves):
    """A mini-batch. Nodes are in order of first appearance, the seeds first."""

    epoch: int
    index: int  #: its number in the whole epoch, over all ranks
    num_seeds: int
    hop_end: list[int]  #: nodes after each hop; hop_end[0] is num_seeds
    n_id: Any  #: int64 [rows], numbers of the nodes in the dataset
    x: Any  #: [rows, dim], their features
    #: int64 [num_seeds], labels of the seeds, -1 where there is none; several labels a node and
    #: numbers are float32 rows, NaN where there is none; one column of either is as the dataset's.
    #: Of all nodes with all_labels.
    y: Any
    edge_index: Any  #: int64 [2, edges]: source and destination, positions in n_id
    blocks: list[Block] = field(default_factory=list)  #: blocks[h] is what hop h drew
    num_sampled_edges: list[int] = field(default_factory=list)  #: of edge_index, by hop
    x_dtype: str = "float32"
    degrees: Any = None  #: uint32 [rows], in-degrees in the dataset, where a sampler needs them
    input_id: Any = None  #: int64 [num_seeds], places of the seeds among the input nodes, if asked

    @property
    def num_sampled_nodes(self) -> list[int]:
        """The nodes that each hop added, the seeds first."""
        return [b - a for a, b in zip([0, *self.hop_end], self.hop_end, strict=False)]


def below(a: Array, bound: int) -> bool:
    """Whether all numbers of an int64 array are from 0 to bound - 1; of a GPU's nobody looks."""
    return isinstance(a, DeviceArray) or not a.size or int(a.view(np.uint64).max()) < bound


def targets(
    arrays: Mapping[str, tuple[Array, str]], nodes: int
) -> tuple[str, tuple[int | None, ...]]:
    """Returns the type and shape of the labels of so many nodes: a class a node, or columns."""
    y, kind = arrays.get("y", (None, ""))
    columns = () if y is None or len(y.shape) < 2 else (None,)
    return ("float32" if kind == "float32" else "int64"), (nodes, *columns)


def parse(
    message: dict[str, Any],
    arrays: Mapping[str, tuple[Array, str]],
    nodes: int,
    all_labels: bool = False,
    with_blocks: bool = True,
) -> Batch:
    """Makes a batch of a message and its arrays, whose sizes and numbers have to fit together.

    The dataset has so many nodes. The numbers of blocks, which are twice those of edge_index, are
    not looked at.
    """

    def wrong(what: str) -> ProtocolError:
        return ProtocolError(f"the daemon sent a batch in which {what}")

    numbers = {k: message.get(k) for k in ("epoch", "index", "num_seeds")}
    if not all(is_count(n) for n in numbers.values()):
        raise wrong(f"{numbers} are not all numbers")
    hop_end = message.get("hop_end")
    seeds: int = message["num_seeds"]
    if not isinstance(hop_end, list) or not all(is_count(n) for n in hop_end):
        raise wrong(f"hop_end is {hop_end!r}")
    if not hop_end or hop_end[0] != seeds or hop_end != sorted(hop_end):
        raise wrong(f"hop_end {hop_end} does not begin with {seeds} seeds, or falls")
    rows = hop_end[-1]

    def array(name: str, dtype: str, shape: tuple[int | None, ...]) -> Array:
        if name not in arrays:
            raise wrong(f"tensor {name} is missing")
        a, kind = arrays[name]
        if dtype and kind != dtype:
            raise wrong(f"tensor {name} is {kind}, not {dtype}")
        if len(a.shape) != len(shape) or any(
            want is not None and want != got for want, got in zip(shape, a.shape, strict=True)
        ):
            raise wrong(f"tensor {name} has the shape {list(a.shape)}, not {list(shape)}")
        return a

    edges = message.get("hop_edges")
    if edges is not None and (
        not isinstance(edges, list)
        or len(edges) != len(hop_end) - 1
        or not all(is_count(n) for n in edges)
    ):
        raise wrong(f"hop_edges is {edges!r}, of {len(hop_end) - 1} hops")
    counted = [] if with_blocks else edges or []

    blocks = []
    for h, (num_dst, num_src) in enumerate(itertools.pairwise(hop_end) if with_blocks else []):
        indptr = array(f"indptr.{h}", "int64", (num_dst + 1,))
        src = array(f"src.{h}", "int64", (None,))
        if isinstance(indptr, DeviceArray):  # the message tells it, for the GPU does not at once
            if edges is None or edges[h] > len(src):
                raise wrong(f"hop_edges is {edges!r}, and src.{h} has {len(src)} edges")
            counted.append(edges[h])
        elif indptr[0] != 0 or indptr[-1] != len(src):
            raise wrong(f"indptr.{h} runs from {indptr[0]} to {indptr[-1]} over {len(src)} edges")
        else:
            counted.append(int(indptr[-1] - indptr[hop_end[h - 1] if h else 0]))
        weights = None
        if f"weights.{h}" in arrays:
            weights = array(f"weights.{h}", "float32", (None,))
        blocks.append(Block(num_dst, num_src, indptr, src, weights))
    x = array("x", "", (rows, None))
    batch = Batch(
        epoch=message["epoch"],
        index=message["index"],
        num_seeds=seeds,
        hop_end=hop_end,
        n_id=array("n_id", "int64", (rows,)),
        x=x,
        y=array("y", *targets(arrays, rows if all_labels else seeds)),
        edge_index=array("edge_index", "int64", (2, None)),
        blocks=blocks,
        num_sampled_edges=counted,
        x_dtype=arrays["x"][1],
    )
    if edges is not None and edges != counted:
        raise wrong(f"hop_edges is {edges}, and the blocks have {counted}")
    if not below(batch.n_id, nodes) or not below(batch.edge_index, rows):
        raise wrong(f"n_id leaves the {nodes} nodes, or edge_index the {rows} rows")
    if sum(batch.num_sampled_edges) != batch.edge_index.shape[1]:
        raise wrong(
            f"edge_index has {batch.edge_index.shape[1]} edges and the blocks "
            f"{batch.num_sampled_edges}"
        )
    if "degrees" in arrays:
        batch.degrees = array("degrees", "uint32", (rows,))
    if "input_id" in arrays:
        batch.input_id = array("input_id", "int64", (seeds,))
    return batch
