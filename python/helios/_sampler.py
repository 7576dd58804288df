"""A sampler for PyG's loaders, in NumPy: weights, times, subgraphs of a seed each, links."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._dataset import Array, Dataset
from ._errors import CapabilityError, UsageError
from .loader import attributes

import torch  # isort: skip

from torch_geometric.sampler import (  # isort: skip
    HeteroSamplerOutput,
    NeighborSampler,
    SamplerOutput,
)
from torch_geometric.sampler.base import DataType, SubgraphType  # isort: skip

Values = dict[Any, Any]  # by the type of nodes or edges; None where there is one


class Sampler(NeighborSampler):  # type: ignore[misc]
    """PyG's NeighborSampler of a dataset: no compiled package is needed.

    The edges stay in the dataset's files, mapped. torch's generator says what is drawn.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_neighbors: Any,
        subgraph_type: Any = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
    ) -> None:
        """Makes it for a dataset; arguments are as of PyG's."""
        schema = dataset.schema
        self.data_type, self.sample_direction = DataType.remote, "forward"
        self.perm, self.keep_orig_edges = None, False
        self.node_types: list[Any] = [None] if schema is None else list(schema.node_types)
        self.edge_types: list[Any] = [None] if schema is None else list(schema.edge_types)
        self.num_nodes: Any = dataset.num_nodes if schema is None else dict(schema.nodes)
        self._files = {e: dataset.files if e is None else dataset[e].files for e in self.edge_types}
        self.num_neighbors, self.replace = num_neighbors, replace
        self.subgraph_type = SubgraphType(getattr(subgraph_type, "value", subgraph_type))
        self.temporal_strategy, self.disjoint = temporal_strategy, disjoint
        if temporal_strategy not in ("uniform", "last"):
            raise UsageError(f'temporal_strategy {temporal_strategy!r} is not "uniform" or "last"')
        more = attributes(dataset)
        self._node_time = _named(more, time_attr, "n_id")
        self._edge_time = _named(more, time_attr, "e_id")
        self._weight = _named(more, weight_attr, "e_id")
        if time_attr is not None and bool(self._node_time) == bool(self._edge_time):
            raise UsageError(
                f"time_attr {time_attr!r} is no attribute of either nodes or edges; set it on the "
                "dataset, one time a node or edge"
            )
        if weight_attr is not None and not self._weight:
            raise UsageError(
                f"weight_attr {weight_attr!r} is no attribute of edges; set it on the dataset, one "
                "weight an edge of dataset.edge_index"
            )
        if any((w < 0).any() or not np.isfinite(w).all() for w in self._weight.values()):
            raise UsageError(f"weight_attr {weight_attr!r} has weights below 0, or not finite")
        self.node_time = self._public(self._node_time)  # PyG draws negatives by it
        self.edge_time = self._public(self._edge_time)
        self.edge_weight = self._public(self._weight)
        if self.subgraph_type == SubgraphType.induced and (schema is not None or self.disjoint):
            raise CapabilityError("subgraph_type induced of a typed graph, or with disjoint=True")

    def _public(self, by: Values) -> Any:
        tensors = {t: torch.from_numpy(a) for t, a in by.items()}
        return tensors.get(None) if self.edge_types == [None] else tensors or None

    def _sample(self, seed: Any, seed_time: Any = None, **_: Any) -> Any:
        typed = isinstance(seed, dict)
        walk = _Walk(
            self, seed if typed else {None: seed}, seed_time if typed else {None: seed_time}
        )
        if typed:
            hops = list(self.num_neighbors.get_values(self.edge_types).values())
        else:
            hops = [self.num_neighbors.get_values()]
        for hop in range(self.num_neighbors.num_hops):
            walk.hop([h[hop] for h in hops])
        if self.subgraph_type == SubgraphType.induced:
            nodes = walk.nodes[None]
            edges, e_id = self._files[None].induced(nodes)
            parts = map(torch.from_numpy, (nodes, edges[0], edges[1], e_id))
            return SamplerOutput(*parts, batch=None)
        node, of = ({t: torch.from_numpy(a) for t, a in x.items()} for x in (walk.nodes, walk.of))
        row, col, edge = (
            {
                e: torch.from_numpy(np.concatenate([_NONE, *(h[i] for h in x)]))
                for e, x in walk.drawn.items()
            }
            for i in range(3)
        )
        batch = of if self.disjoint else None
        new = {t: np.diff(ends, prepend=0).tolist() for t, ends in walk.ends.items()}
        drawn = {e: [len(h[0]) for h in x] for e, x in walk.drawn.items()}
        if typed:
            return HeteroSamplerOutput(node, row, col, edge, batch, new, drawn)
        one = (x[None] for x in (node, row, col, edge))
        return SamplerOutput(*one, of[None] if self.disjoint else None, new[None], drawn[None])


_NONE = np.zeros(0, np.int64)


def _named(more: Any, name: str | None, kind: str) -> Values:
    """Returns an attribute by the type of nodes or edges that has it."""
    return {of: np.asarray(v) for (of, n), (k, v) in more.items() if n == name and k == kind}


def _runs(owner: Array) -> tuple[Array, Array]:
    """Returns where the run of each owner begins in a sorted list of them, and how long it is."""
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    return firsts, np.diff(firsts, append=len(owner))


class _Walk:
    """The nodes and edges drawn so far for a batch, by type."""

    def __init__(self, sampler: Sampler, seeds: Values, times: Any) -> None:
        self.s = sampler
        self.rng = np.random.default_rng(int(torch.randint(2**62, (1,))))
        self.nodes, self.of = dict.fromkeys(sampler.node_types, _NONE), {}
        for t, ids in seeds.items():
            self.nodes[t] = ids.numpy().astype(np.int64)
        first, when = 0, []
        for t, ids in self.nodes.items():
            # Whose subgraph a node is in: with disjoint, a seed's.
            self.of[t] = np.arange(first, first + len(ids)) if sampler.disjoint else ids * 0
            first += len(ids)
            if sampler.is_temporal and len(ids):
                when.append(self._time(t, ids, (times or {}).get(t)))
        self.when = np.concatenate(when) if when else _NONE
        self.ends = {t: [len(ids)] for t, ids in self.nodes.items()}
        self.drawn: dict[Any, list[tuple[Array, Array, Array]]] = {
            e: [] for e in sampler.edge_types
        }

    def _time(self, t: Any, ids: Array, given: Any) -> Array:
        if given is not None:
            return np.asarray(given)
        if t not in self.s._node_time:
            raise UsageError("the seeds have no time: give input_time or edge_label_time")
        return np.asarray(self.s._node_time[t][ids])

    def hop(self, counts: list[int]) -> None:
        """Draws neighbours of the nodes of the last hop, as many as counts has by type of edges."""
        last = {
            t: slice((ends[-2] if len(ends) > 1 else 0), ends[-1]) for t, ends in self.ends.items()
        }
        for e, count in zip(self.s.edge_types, counts, strict=True):
            src, dst = (None, None) if e is None else (e[0], e[2])
            files, at = self.s._files[e], last[dst]
            flat, owner = files.lists(self.nodes[dst][at])
            who, of = files.array("indices")[flat].astype(np.int64), self.of[dst][at][owner]
            time = None
            if src in self.s._node_time:
                time = self.s._node_time[src][who]
            elif e in self.s._edge_time:
                time = self.s._edge_time[e][flat]
            if time is not None:
                early = time <= self.when[of]
                flat, owner, who, of, time = (a[early] for a in (flat, owner, who, of, time))
            weight = self.s._weight.get(e)
            pick = self._pick(owner, int(count), None if weight is None else weight[flat], time)
            row = self._places(src, who[pick], of[pick])
            self.drawn[e].append((row, owner[pick] + at.start, flat[pick]))
        for t, ids in self.nodes.items():
            self.ends[t].append(len(ids))

    def _pick(self, owner: Array, count: int, weight: Array | None, time: Array | None) -> Array:
        """Returns which neighbours to take, at most count of each owner; below 0 all."""
        every = np.arange(len(owner))
        if count < 0 or not len(owner):
            return every
        firsts, sizes = _runs(owner)
        if self.s.replace:
            draw = self.rng.random((len(firsts), count))
            picked: Array
            if weight is None:
                picked = firsts[:, None] + (draw * sizes[:, None]).astype(np.int64)
                return picked.reshape(-1)
            total = np.cumsum(weight, dtype=np.float64)
            below = total[firsts] - weight[firsts]
            span = total[firsts + sizes - 1] - below
            at = np.searchsorted(total, below[:, None] + draw * span[:, None], side="right")
            at = np.minimum(at, (firsts + sizes - 1)[:, None])
            picked = at[span > 0]
            return picked.reshape(-1)
        if time is not None and self.s.temporal_strategy == "last":
            key = -time.astype(np.float64)
        else:
            key = self.rng.random(len(owner))
        if weight is not None and self.s.temporal_strategy == "uniform":
            with np.errstate(divide="ignore"):
                key = -np.log(1 - key) / weight  # the least of these are a draw by weight
        taken = np.repeat(sizes <= count, sizes)
        may = ~taken
        if weight is None and self.s.temporal_strategy == "uniform":
            # The least keys of a long run are far below 1: no others need sorting.
            low = key * np.repeat(sizes, sizes) < 2 * count + 16
            enough = np.add.reduceat(low, firsts, dtype=np.int64) >= count
            may &= low | np.repeat(~enough, sizes)
        rest = np.flatnonzero(may)
        order = rest[np.lexsort((key[rest], owner[rest]))]
        firsts, sizes = _runs(owner[rest])
        place = np.arange(len(rest)) - np.repeat(firsts, sizes)  # in its run, and so in order's
        taken[order[(place < count) & np.isfinite(key[order])]] = True
        return np.flatnonzero(taken)

    def _places(self, t: Any, ids: Array, of: Array) -> Array:
        """Returns the places of nodes in those of a type, to which it adds the new ones."""
        nodes = self.s.num_nodes if t is None else self.s.num_nodes[t]
        key = np.concatenate([self.of[t] * nodes + self.nodes[t], of * nodes + ids])
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        first, inverse = first.reshape(-1), inverse.reshape(-1)
        have = len(self.nodes[t])
        new = np.sort(first[first >= have]) - have
        self.nodes[t] = np.concatenate([self.nodes[t], ids[new]])
        self.of[t] = np.concatenate([self.of[t], of[new]])
        place = first.copy()
        place[first >= have] = have + np.searchsorted(new, first[first >= have] - have)
        at: Array = place[inverse][have:]
        return at
