"""Mini-batches as DGL has them: input nodes, output nodes and blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._batch import Batch
from ._errors import CapabilityError, UsageError
from ._hetero import HeteroBatch, Schema
from ._loader import Loader as _Loader
from .loader import Arguments, dataset_of, leave_out_idle
from .torch import tensors  # before PyTorch: it says what lacks

import torch  # isort: skip

try:
    import dgl
except ImportError as e:
    raise CapabilityError("helios.dgl needs DGL; install it, or use helios.torch.Loader") from e

if TYPE_CHECKING:
    from typing_extensions import Unpack

Item = tuple[Any, Any, list[Any]]  # of a typed graph the first two are dicts

# Traits of DGL's samplers that the daemon's lack, and how it draws.
_LACKING: dict[str, Any] = {"prob": None, "mask": None, "replace": False, "edge_dir": "in"}
_LACKING |= {"importance_sampling": 0, "layer_dependency": False}


class DataLoader(_Loader[Item]):
    """Yields ``(input_nodes, output_nodes, blocks)``, as ``dgl.dataloading.DataLoader`` does.

    >>> sampler = dgl.dataloading.NeighborSampler([10, 10], prefetch_node_feats=["feat"])
    >>> loader = helios.dgl.DataLoader(
    ...     dataset, dataset.train_mask.nonzero()[:, 0], sampler, batch_size=1024, shuffle=True
    ... )

    ``blocks[0]`` is the outermost. Its source nodes have ``feat``, the destination nodes of the
    last block ``label``, and all nodes ``dgl.NID``. Edges have ``dgl.EID``, their numbers in
    ``dataset.edge_index``, where ``edge_ids`` asks for them. Where the sampler weights nodes, edges
    have ``weight``: that of their source. Of a typed graph nodes are dicts by type, and blocks have
    all of its types.
    """

    def __init__(
        self,
        graph: Any,
        indices: Any,
        graph_sampler: Any,
        device: Any = None,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        use_prefetch_thread: bool | None = None,
        use_alternate_streams: bool | None = None,
        pin_prefetcher: bool | None = None,
        use_uva: bool = False,
        *,
        edge_ids: bool | None = None,
        seed: int | None = None,
        generator: Any = None,
        slots: int = 4,
        copy: bool = False,
        daemon_device: str | None = None,
        **options: Unpack[Arguments],
    ) -> None:
        """Makes the loader, on the daemon's side too.

        Args:
            graph: of :func:`helios.open`.
            indices: the seeds: numbers, or a mask; of a typed graph ``{"paper": numbers}``.
            graph_sampler: DGL's NeighborSampler, MultiLayerFullNeighborSampler or LaborSampler. As
                with DGL its fanouts are the layers', the seeds' last.
            device: everything is moved there.
            use_ddp, ddp_seed: this process is one of torch.distributed's ranks, which deal the
                batches. All get as many; ``set_epoch`` begins an epoch.
            batch_size, drop_last, shuffle: as of DGL's.
            use_prefetch_thread, use_alternate_streams, pin_prefetcher, use_uva: change nothing: the
                daemon makes batches ahead.
            edge_ids: have ``dgl.EID``, which takes as long as a batch; by default where the sampler
                has ``prefetch_edge_feats``.
            seed: of the order and of all draws. Without one, torch's generator says what an epoch
                draws, and ddp_seed with use_ddp.
            generator, slots, copy, daemon_device: as of :class:`helios.Loader`.
            options: those of ``heliosctl train``, such as ``mode="cpu"`` or ``gpu_cache="5%"``.
        """
        fanouts, more = _draws(graph_sampler, dataset_of(graph).schema)
        if edge_ids is None:
            edge_ids = bool(getattr(graph_sampler, "prefetch_edge_feats", None))
        self.edge_ids = edge_ids
        self.graph, self.indices, self.graph_sampler = graph, indices, graph_sampler
        self._to = device
        if isinstance(indices, dict):
            if len(indices) != 1:
                raise CapabilityError("indices of several types: the daemon deals seeds of one")
            ((kind, ids),) = indices.items()
            indices = (str(kind), ids)
        rank, world = 0, 1
        if use_ddp:
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
            seed = ddp_seed if seed is None else seed
        super().__init__(
            dataset_of(graph),
            fanouts,
            batch_size=batch_size,
            input_nodes=indices,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world,
            drop_last=drop_last,
            generator=generator,
            slots=slots,
            copy=copy,
            daemon_device=daemon_device,
            **{**leave_out_idle(dict(options)), **more},
        )

    def _names(self) -> list[str]:
        return sorted({*super()._names(), *Arguments.__annotations__})

    def _convert(self, batch: Batch) -> Item:
        b = tensors(batch)
        if isinstance(b, HeteroBatch):
            return self._typed(b)
        blocks = []
        for h, hop in enumerate(b.blocks):
            block = dgl.create_block(
                ("csc", (hop.indptr, hop.src, [])),
                num_src_nodes=hop.num_src,
                num_dst_nodes=hop.num_dst,
            )
            block.srcdata[dgl.NID] = b.n_id[: hop.num_src]
            block.dstdata[dgl.NID] = b.n_id[: hop.num_dst]
            if self.edge_ids:
                dst = np.repeat(batch.n_id[: hop.num_dst], np.diff(hop.indptr.numpy()))
                numbers = self._source.files.edge_numbers(batch.n_id[hop.src.numpy()], dst)
                block.edata[dgl.EID] = torch.from_numpy(numbers)
            if hop.weights is not None:
                block.edata["weight"] = hop.weights[hop.src]
            if h == 0:
                block.dstdata["label"] = b.y
            blocks.append(block)
        blocks.reverse()
        blocks[0].srcdata["feat"] = b.x
        seeds = b.n_id[: b.num_seeds]
        return self._there(b.n_id), self._there(seeds), [self._there(x) for x in blocks]

    def _typed(self, b: HeteroBatch) -> Item:
        """Is _convert of a typed graph: nodes and data are dicts by type."""
        types, blocks = self._source.node_types, []
        for h, hop in enumerate(b.blocks):
            src = {t: b.node_end[t][h + 1] for t in types}
            dst = {t: b.node_end[t][h] for t in types}
            block = dgl.create_block(
                {e: ("csc", (x.indptr, x.src, [])) for e, x in hop.items()},
                num_src_nodes=src,
                num_dst_nodes=dst,
            )
            for t in types:
                block.srcnodes[t].data[dgl.NID] = b.n_id[t][: src[t]]
                block.dstnodes[t].data[dgl.NID] = b.n_id[t][: dst[t]]
            for e, x in hop.items() if self.edge_ids else ():
                of = np.repeat(b.n_id[e[2]][: dst[e[2]]].numpy(), np.diff(x.indptr.numpy()))
                numbers = self._source[e].files.edge_numbers(b.n_id[e[0]][x.src].numpy(), of)
                block.edges[e].data[dgl.EID] = torch.from_numpy(numbers)
            blocks.append(block)
        if b.input_type == b.target_type:
            blocks[0].dstnodes[b.input_type].data["label"] = b.y
        blocks.reverse()
        for t in types:
            blocks[0].srcnodes[t].data["feat"] = b.x[t]
        inputs = {t: self._there(ids) for t, ids in b.n_id.items()}
        seeds = {t: self._there(b.n_id[t][: b.node_end[t][0]]) for t in types}
        return inputs, seeds, [self._there(x) for x in blocks]

    def _there(self, a: Any) -> Any:
        return a if self._to is None else a.to(self._to)


def _draws(sampler: Any, schema: Schema | None) -> tuple[Any, dict[str, Any]]:
    """Returns the neighbours of each hop, the seeds' first, and the daemon's options."""
    kinds = (dgl.dataloading.NeighborSampler, dgl.dataloading.LaborSampler)
    if not isinstance(sampler, kinds):
        raise UsageError(
            f"graph_sampler {type(sampler).__name__}: give dgl.dataloading's NeighborSampler, "
            "MultiLayerFullNeighborSampler or LaborSampler"
        )
    for name, have in _LACKING.items():
        value = getattr(sampler, name, have)
        if value is not have and value != have:
            kind = type(sampler).__name__
            raise CapabilityError(f"{kind} with {name}={value!r}: the daemon's lacks it")
    more: dict[str, Any] = {}
    if isinstance(sampler, dgl.dataloading.LaborSampler):
        more["sampler"] = "labor"
        if int(sampler.cnt[1]) > 1:
            more["batch_dependency"] = int(sampler.cnt[1])
    hops = list(reversed(sampler.fanouts))
    if not any(isinstance(f, dict) for f in hops):
        return [int(f) for f in hops], more
    if schema is None:
        raise CapabilityError("fanouts by type: the dataset has one type of edges")
    by = [
        {schema.edge_type(e): int(n) for e, n in f.items()}
        if isinstance(f, dict)
        else dict.fromkeys(schema.edge_types, int(f))
        for f in hops
    ]
    lacks = [e for e in schema.edge_types if any(e not in f for f in by)]
    if lacks:
        raise UsageError(f"fanouts lack edges of type {lacks[0]}; name all types")
    return {e: [f[e] for f in by] for e in schema.edge_types}, more


__all__ = ["DataLoader"]
