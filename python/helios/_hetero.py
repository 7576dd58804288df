"""Mini-batches of typed graphs: arrays by type of nodes and by type of edges."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._batch import Array, Block, _Moves, below, targets
from ._cuda import DeviceArray
from ._errors import ProtocolError, UsageError
from ._ring import is_count

EdgeType = tuple[str, str, str]


@dataclass(frozen=True)
class Schema:
    """The types of a graph's nodes and edges, in the dataset's order, and the files of each."""

    node_types: list[str]
    edge_types: list[EdgeType]
    nodes: dict[str, int]  #: how many of each type
    edges: dict[EdgeType, int]
    dims: dict[str, int]  #: features of a node of each type; 0: the type has none
    target: str  #: the type whose nodes have labels, and that splits are of
    files: dict[Any, dict[str, str]]  #: of each type, by name, in the dataset's folder

    @staticmethod
    def of(d: Mapping[str, Any]) -> Schema | None:
        """Reads a daemon's description of a dataset; None: it has one type."""
        if "node_types" not in d:
            return None
        types, relations, target = d["node_types"], d["relations"], str(d["target_type"])
        nodes = {str(t["name"]): t for t in types}
        edges = {(str(r["src"]), str(r["name"]), str(r["dst"])): r for r in relations}
        if target not in nodes or not {t for e in edges for t in (e[0], e[2])} <= set(nodes):
            raise ValueError("an unknown type")
        if len(nodes) != len(types) or len(edges) != len(relations):
            raise ValueError("a type twice")
        counts = [
            *(t[k] for t in types for k in ("nodes", "dim")),
            *(r["edges"] for r in relations),
        ]
        if not all(map(is_count, counts)):
            raise ValueError(f"the counts {counts}")
        files: dict[Any, dict[str, str]] = {
            e: {k: str(r[k]) for k in ("indptr", "indices")} for e, r in edges.items()
        }
        for name, t in nodes.items():
            files[name] = {"features": str(t["features"])} if "features" in t else {}
        for path in itertools.chain.from_iterable(f.values() for f in files.values()):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ValueError(f"a file {path}")
        return Schema(
            list(nodes),
            list(edges),
            {n: t["nodes"] for n, t in nodes.items()},
            {e: r["edges"] for e, r in edges.items()},
            {n: t["dim"] for n, t in nodes.items()},
            target,
            files,
        )

    def edge_type(self, name: Any) -> EdgeType:
        """Returns the type that a user names: (src, relation, dst), (src, dst), or a relation."""
        if isinstance(name, str):
            parts = tuple(name.split("__"))
            found = [e for e in self.edge_types if e == parts or e[1] == name]
        else:
            parts = tuple(name)
            found = [e for e in self.edge_types if parts in (e, (e[0], e[2]))]
        if len(found) != 1:
            all_of = ", ".join(map(str, self.edge_types))
            why = "several" if found else "no"
            raise UsageError(f"{why} edges of type {name!r}; there are {all_of}")
        return found[0]

    def node_type(self, name: Any) -> str:
        """Returns the type that a user names."""
        if name not in self.nodes:
            raise UsageError(f"no nodes of type {name!r}; there are {', '.join(self.node_types)}")
        return str(name)

    def seeds(self, given: Any) -> tuple[str, Any]:
        """Returns the type of input nodes, and them: None for all of the type."""
        if isinstance(given, str):
            return self.node_type(given), None
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
            return self.node_type(given[0]), given[1]
        return self.target, given

    def fanouts(self, given: Any) -> tuple[Sequence[int], dict[EdgeType, Sequence[int]]]:
        """Returns the neighbours of each hop, and those of each type of edges if they are given."""
        if hasattr(given, "get_values"):  # PyG's NumNeighbors
            given = given.get_values(self.edge_types)
        if not isinstance(given, Mapping):
            return given, {}
        by: dict[EdgeType, Sequence[int]] = {
            self.edge_type(name): [int(n) for n in hops] for name, hops in given.items()
        }
        lack = [e for e in self.edge_types if e not in by]
        if lack:
            raise UsageError(f"num_neighbors lacks edges of type {lack[0]}; name all types")
        hops = {len(v) for v in by.values()}
        if len(hops) != 1 or hops == {0}:
            raise UsageError("num_neighbors has other numbers of hops for other types of edges")
        return [1] * hops.pop(), by


def relation_fanouts(by: Mapping[EdgeType, Sequence[int]]) -> str:
    """Returns the option of heliosctl that names them."""
    parts = []
    for e, hops in by.items():
        if any(c in "".join(e) for c in ";="):
            raise UsageError(f"num_neighbors by type: the name {e} has a ; or =")
        parts.append(f"{':'.join(e)}={','.join(map(str, hops))}")
    return ";".join(parts)


@dataclass(eq=False, repr=False)
class HeteroBatch(_Moves):
    """A mini-batch of a typed graph. Nodes of a type are in order of first appearance.

    Each dict has all types of the dataset, also those of which a batch has no node or edge.
    """

    epoch: int
    index: int  #: its number in the whole epoch, over all ranks
    num_seeds: int
    input_type: str  #: of the seeds, which are the first of their type
    target_type: str  #: of the labels
    node_end: dict[str, list[int]]  #: nodes of each type after each hop
    n_id: dict[str, Any]  #: int64 [rows], numbers of the nodes in their type
    x: dict[str, Any]  #: [rows, dim], their features
    #: labels of the seeds where they are of target_type; with all_labels of all nodes of that
    y: Any
    edge_index: dict[EdgeType, Any]  #: int64 [2, edges]: positions among the nodes of the types
    #: blocks[h] has what hop h drew, by type of edges; empty where it was not asked for
    blocks: list[dict[EdgeType, Block]] = field(default_factory=list)
    num_sampled_edges: dict[EdgeType, list[int]] = field(default_factory=dict)  #: by hop
    x_dtype: str = "float32"
    input_id: Any = None  #: int64 [num_seeds], places of the seeds among the input nodes, if asked

    @property
    def num_sampled_nodes(self) -> dict[str, list[int]]:
        """The nodes of each type that each hop added, the seeds first."""
        return {
            t: [b - a for a, b in zip([0, *end], end, strict=False)]
            for t, end in self.node_end.items()
        }


def parse(
    message: dict[str, Any],
    arrays: Mapping[str, tuple[Array, str]],
    schema: Schema,
    request: Mapping[str, Any],
) -> HeteroBatch:
    """Makes a batch of a message and its arrays, whose sizes and numbers have to fit together."""

    def wrong(what: str) -> ProtocolError:
        return ProtocolError(f"the daemon sent a batch in which {what}")

    def table(name: str, rows: int, columns: int) -> list[list[int]]:
        got = message.get(name)
        if (
            not isinstance(got, list)
            or len(got) != rows
            or not all(isinstance(r, list) and len(r) == columns for r in got)
            or not all(is_count(n) for r in got for n in r)
        ):
            raise wrong(f"{name} is {got!r}, not {rows} lists of {columns} numbers")
        return got

    def array(name: str, dtype: str, shape: tuple[int | None, ...]) -> Array:
        if name not in arrays:
            raise wrong(f"tensor {name} is missing")
        a, kind = arrays[name]
        if (
            (dtype and kind != dtype)
            or len(a.shape) != len(shape)
            or any(
                want is not None and want != got for want, got in zip(shape, a.shape, strict=True)
            )
        ):
            raise wrong(f"tensor {name} is {kind} {list(a.shape)}, not {dtype} {list(shape)}")
        return a

    numbers = {k: message.get(k) for k in ("epoch", "index", "num_seeds")}
    if not all(is_count(n) for n in numbers.values()):
        raise wrong(f"{numbers} are not all numbers")
    seeds: int = message["num_seeds"]
    hops = request["options"]["fanout"].count(",") + 1
    ends = table("type_end", len(schema.node_types), hops + 1)
    of = request.get("node_type") or schema.target
    if any(e != sorted(e) for e in ends) or [e[0] for e in ends] != [
        seeds if t == of else 0 for t in schema.node_types
    ]:
        raise wrong(f"type_end {ends} does not begin with {seeds} seeds, or falls")
    node_end = dict(zip(schema.node_types, ends, strict=True))
    counted = table("relation_edges", len(schema.edge_types), hops)
    rows = [e[-1] for e in ends]
    labelled = seeds if of == schema.target else 0
    if request.get("all_labels"):
        labelled = node_end[schema.target][-1]
    blocks: list[dict[EdgeType, Block]] = [{} for _ in range(hops)]
    if request.get("no_blocks"):
        blocks = []
    edge_index = {}
    for r, e in enumerate(schema.edge_types):
        edge_index[e] = array(f"edge_index.{r}", "int64", (2, sum(counted[r])))
        for h, block in enumerate(blocks):
            num_dst, num_src = node_end[e[2]][h], node_end[e[0]][h + 1]
            indptr = array(f"indptr.{h}.{r}", "int64", (num_dst + 1,))
            src = array(f"src.{h}.{r}", "int64", (None,))
            if not _runs(indptr, src, num_src):
                raise wrong(f"indptr.{h}.{r} does not run over {len(src)} edges")
            block[e] = Block(num_dst, num_src, indptr, src)
    kind = arrays.get("x.0", (None, ""))[1]
    batch = HeteroBatch(
        epoch=message["epoch"],
        index=message["index"],
        num_seeds=seeds,
        input_type=of,
        target_type=schema.target,
        node_end=node_end,
        n_id={t: array(f"n_id.{i}", "int64", (rows[i],)) for i, t in enumerate(schema.node_types)},
        x={
            t: array(f"x.{i}", kind, (rows[i], schema.dims[t]))
            for i, t in enumerate(schema.node_types)
        },
        y=array("y", *targets(arrays, labelled)),
        edge_index=edge_index,
        blocks=blocks,
        num_sampled_edges=dict(zip(schema.edge_types, counted, strict=True)),
        x_dtype=kind,
    )
    for t, n_id in batch.n_id.items():
        if not below(n_id, schema.nodes[t]):
            raise wrong(f"n_id of {t} leaves its {schema.nodes[t]} nodes")
    for e, pairs in edge_index.items():
        if isinstance(pairs, DeviceArray):
            continue
        for end, places in zip((e[0], e[2]), pairs, strict=True):
            if not below(places, node_end[end][-1]):
                raise wrong(f"edge_index of {e} leaves the {node_end[end][-1]} rows of {end}")
    if "input_id" in arrays:
        batch.input_id = array("input_id", "int64", (seeds,))
    return batch


def _runs(indptr: Array, src: Array, num_src: int) -> bool:
    """Whether a block's lists are lists of its sources."""
    if isinstance(indptr, DeviceArray):
        return True
    whole = indptr[0] == 0 and indptr[-1] == len(src)
    return bool(whole and (indptr[1:] >= indptr[:-1]).all() and below(src, num_src))


__all__ = ["EdgeType", "HeteroBatch", "Schema", "parse", "relation_fanouts"]
