"""PyG's loaders by PyG's meaning, of batches that the daemon samples and reads."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ._batch import Batch, Block
from ._cuda import DeviceArray
from ._dataset import Dataset, Files
from ._errors import CapabilityError, UsageError
from ._hetero import HeteroBatch
from ._loader import Loader
from ._settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Arguments(Settings, total=False):
    """Further arguments of torch's DataLoader, and heliosctl's options."""

    num_workers: int
    persistent_workers: bool
    pin_memory: bool
    pin_memory_device: str
    prefetch_factor: int | None
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any
    collate_fn: Any
    dataset: Any
    in_order: bool
    batch_sampler: Any
    custom_cls: Any


# Arguments of PyG's and torch's loaders that change no batch here, and what they are by default.
_IDLE: dict[str, Any] = {
    "is_sorted": False,
    "filter_per_worker": None,
    "num_workers": 0,
    "persistent_workers": False,
    "pin_memory": False,
    "pin_memory_device": "",
    "prefetch_factor": None,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "collate_fn": None,  # PyG's loader has one of its own, too
    "dataset": None,
    "in_order": True,
}

# Arguments that ask for what the daemon's sampler lacks: what they are by default, and why not.
_LACKING: dict[str, tuple[Any, str]] = {
    "input_time": (None, "knows no times"),
    "replace": (False, "draws without replacement"),
    "disjoint": (False, "makes one subgraph for all seeds of a batch"),
    "time_attr": (None, "knows no times"),
    "weight_attr": (None, "draws neighbours uniformly"),
    "transform_sampler_output": (None, "has no output but the batch, which transform gets"),
    "neighbor_sampler": (None, "is the one"),
    "batch_sampler": (None, "deals seeds itself"),
    "custom_cls": (None, "makes a torch_geometric.data.Data"),
}
_explained: set[str] = set()


class NeighborLoader(Loader[Any]):
    """Yields a ``torch_geometric.data.Data`` for each mini-batch, as PyG's NeighborLoader does.

    Arguments, their order and their defaults are those of PyG's. A batch has

    =====================  ===================================================================
    ``x``                  [rows, dim], features of all nodes of the batch
    ``y``                  int64 [rows], their labels, -1 where there is none; float32 rows, NaN
                           where there is none, of several labels a node and of numbers
    ``train_mask``, …      bool [rows], whether a node is of that split; ``val_mask``, ``test_mask``
    ``n_id``               int64 [rows], numbers of the nodes in the dataset, the seeds first
    ``edge_index``         int64 [2, edges], each node's neighbours drawn once
    ``e_id``               int64 [edges], numbers of the edges in ``dataset.edge_index``
    ``input_id``           int64 [batch_size], places of the seeds in ``input_nodes``
    ``batch_size``         the number of seeds
    ``num_sampled_nodes``  by hop, the seeds first (for ``torch_geometric.utils.trim_to_layer``)
    ``num_sampled_edges``  by hop
    ``index``              the batch's number in the whole epoch
    ``blocks``             what each hop drew for *all* nodes before it, as ``heliosctl train`` uses
                           it: :class:`helios.Block`, the seeds' hop first; see :func:`adjs`
    =====================  ===================================================================

    ``e_id`` and the masks are found when they are asked for. Without PyG the batch is a plain
    object without them; without PyTorch it has NumPy arrays, or with ``device="cuda"``
    :class:`helios.DeviceArray`.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Any = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        generator: Any = None,
        split: str | None = None,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        slots: int = 4,
        copy: bool = False,
        device: Any = "cpu",
        daemon_device: str | None = None,
        **options: Unpack[Arguments],
    ) -> None:
        """Makes the loader, on the daemon's side too.

        Args:
            data: of :func:`helios.open`, or its :func:`helios.pyg.stores`.
            num_neighbors: neighbours that each hop draws, the seeds' first; -1 takes all. Of a
                typed graph those of each type of edges, or a dict by it.
            input_nodes: the seeds: numbers, of which one may stand twice, or a mask; by default all
                nodes. Of a typed graph ``("paper", numbers)``, or ``"paper"`` for all of a type.
            subgraph_type: ``"directional"``, ``"bidirectional"`` or ``"induced"``, as of PyG.
            transform: gets each batch, and returns what is yielded.
            batch_size, shuffle, drop_last, generator: as of ``torch.utils.data.DataLoader``.
            split: in place of input_nodes ``"train"``, ``"val"`` or ``"test"``. With
                ``shuffle=True`` and a seed, train's batches are those of ``heliosctl train``.
            seed: of the order and of all draws; epochs are then numbered from 0. Without one,
                torch's generator says what an epoch draws, as with PyG; ranks take 0.
            rank, world_size: this process gets the batches i with i % world_size == rank. All ranks
                get as many: at the end those that lack one repeat their first.
            slots, copy, device, daemon_device: as of :class:`helios.Loader`.
            input_time, replace, disjoint, temporal_strategy, time_attr, weight_attr,
                transform_sampler_output, neighbor_sampler: taken at PyG's defaults, and else
                refused by name; :class:`helios.pyg.NeighborLoader` has them.
            is_sorted, filter_per_worker: change nothing, nor do ``num_workers``, ``pin_memory`` and
                their like: the daemon makes batches ahead, in processes of its own.
            directed: False is ``subgraph_type="induced"``, as with PyG.
            options: those of ``heliosctl train``, such as ``sampler="labor"``, ``mode="cpu"`` or
                ``gpu_cache="5%"``: a flag's name with underscores.
        """
        here = locals()
        more: dict[str, Any] = dict(options)
        for name, (default, why) in _LACKING.items():
            value = more.pop(name, default) if name not in here else here[name]
            if value is not default and value != default:
                raise CapabilityError(
                    f"{name}={value!r}: the daemon's sampler {why}; leave it out, or take "
                    "helios.pyg.NeighborLoader, which samples in this process"
                )
        if temporal_strategy not in ("uniform", "last"):
            raise UsageError(f'temporal_strategy {temporal_strategy!r} is not "uniform" or "last"')
        more |= {"is_sorted": is_sorted, "filter_per_worker": filter_per_worker}
        more = leave_out_idle(more)
        self._type = "directional" if directed else "induced"
        if directed:
            self._type = str(getattr(subgraph_type, "value", subgraph_type))
        if self._type not in ("directional", "bidirectional", "induced"):
            raise UsageError(
                f"subgraph_type {subgraph_type!r} is not directional, bidirectional or induced"
            )
        self.data = dataset_of(data)
        schema = self.data.schema
        if schema is None and hasattr(num_neighbors, "get_values"):  # PyG's NumNeighbors
            num_neighbors = num_neighbors.values
        if schema is None and isinstance(num_neighbors, dict):
            raise CapabilityError("num_neighbors by type: the dataset has one type of edges")
        if schema is not None and self._type != "directional":
            raise CapabilityError(
                f"subgraph_type {self._type} of a typed graph: a batch has the edges that were "
                "drawn; leave it out"
            )
        self.num_neighbors = num_neighbors
        self.input_nodes = input_nodes
        self.transform = transform
        self._masked = False  # input_nodes is a mask, whose places are node numbers
        if split is None and schema is not None:
            if input_nodes is None:
                raise UsageError(
                    'input_nodes of a typed graph name a type: "paper" or ("paper", numbers); or '
                    "give a split"
                )
            self._masked = np.asarray(schema.seeds(input_nodes)[1]).dtype == np.bool_
        elif split is None:
            nodes = np.arange(self.data.num_nodes) if input_nodes is None else input_nodes
            self._masked = getattr(np.asarray(nodes), "dtype", None) == np.bool_
            input_nodes = nodes
        super().__init__(
            self.data,
            num_neighbors,
            batch_size=batch_size,
            split=split,
            input_nodes=input_nodes,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            generator=generator,
            anew=split in (None, "train"),
            all_labels=True,
            positions=shuffle,
            blocks=schema is None,
            slots=slots,
            copy=copy,
            device=device,
            daemon_device=daemon_device,
            **more,
        )

    def _names(self) -> list[str]:
        return sorted({*super()._names(), *Arguments.__annotations__})

    @property
    def dataset(self) -> range:
        """The places of the seeds in input_nodes, as of PyG's loader; the graph is ``data``."""
        return range(self.num_seeds)

    def __iter__(self) -> Iterator[Any]:
        """Begins the next epoch. Without features, after ``del data.x``, this process samples."""
        return iter(self._bare()) if self.data._dropped else super().__iter__()

    def _bare(self) -> Any:
        """Returns a loader of PyG's that asks for no features."""
        from .pyg import NeighborLoader as Own

        if self.world_size > 1 or self._request["options"].get("sampler") or not self._random:
            raise CapabilityError(
                f"a loader without {' and '.join(self.data._dropped)} samples in this process, by "
                "torch's generator: leave out seed, rank and sampler"
            )
        return Own(
            self.data,
            self.num_neighbors,
            np.asarray(self._seeds()),
            subgraph_type=self._type,
            transform=self.transform,
            batch_size=self.batch_size,
            shuffle=self._request["shuffle"],
            drop_last=self.drop_last,
        )

    def __call__(self, index: Any) -> Any:
        """Returns a batch of the input nodes at these places."""
        if self.data._dropped:
            return self._bare()(index)
        places = np.atleast_1d(np.asarray(index))
        seeds = self._seeds()[places]
        one = copy.copy(self)
        one.__dict__.update(self.__getstate__())
        options = {**self._request["options"], "batch-size": len(seeds)}
        one._nodes = np.ascontiguousarray(seeds, "<i8")
        one._request = {**self._request, "options": options, "split": None, "shuffle": False}
        one._request |= {"anew": True, "positions": False, "rank": 0, "world": 1}
        one._workers, one.drop_last, one._masked, one.transform = 1, False, False, None
        try:
            (batch,) = one
        finally:
            one.close()
        if self.data.schema is None:
            batch.input_id = _like(batch.n_id, places)
        else:
            of = batch[self._request.get("node_type", self.data.schema.target)]
            of.input_id = _like(of.n_id, places)
        return batch if self.transform is None else self.transform(batch)

    def _seeds(self) -> Any:
        if self._nodes is not None:
            return self._nodes
        return self.data.files.array(self._request["split"])

    def _check_gpu(self) -> None:
        if _kinds()[1] is not None:
            from .torch import check_gpu

            check_gpu()

    def _convert(self, batch: Batch) -> Any:
        kind, convert, _ = _kinds()
        b = batch if convert is None else convert(batch)
        if isinstance(b, HeteroBatch):
            item = self._typed(b)
            if not isinstance(item, HeteroBatch):
                attach(item, self.data)
            return item if self.transform is None else self.transform(item)
        item = kind(
            x=b.x,
            y=b.y,
            n_id=b.n_id,
            edge_index=b.edge_index,
            input_id=self._input_id(b),
            batch_size=b.num_seeds,
            num_sampled_nodes=b.num_sampled_nodes,
            num_sampled_edges=b.num_sampled_edges,
            index=b.index,
            blocks=b.blocks,
        )
        if b.degrees is not None:
            item.degrees = b.degrees
        if hasattr(kind, "e_id"):
            item.__dict__["_files"] = self.data.files
        if self._type != "directional":
            _other_edges(item, self._type, self.data.files)
        attach(item, self.data)
        return item if self.transform is None else self.transform(item)

    def _input_id(self, b: Batch | HeteroBatch) -> Any:
        n_id = b.n_id[b.input_type] if isinstance(b, HeteroBatch) else b.n_id
        if self._masked:
            return n_id[: b.num_seeds]
        if b.input_id is not None:
            return b.input_id
        first = b.index * self.batch_size
        return _like(n_id, np.arange(first, first + b.num_seeds))

    def _typed(self, b: HeteroBatch) -> Any:
        b.input_id = self._input_id(b)
        try:
            from ._heterodata import make
        except ImportError:
            return b
        return make(b, self.data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def dataset_of(data: Any) -> Dataset:
    """Returns the dataset that data is, or that our stores are of."""
    if isinstance(data, tuple):
        data = getattr(data[0], "dataset", None)
    if not isinstance(data, Dataset):
        raise UsageError(
            "data is no dataset of helios.open: give one, or its helios.pyg.stores; helios.save "
            "makes one of a torch_geometric.data.Data"
        )
    return data


def attributes(dataset: Dataset) -> dict[tuple[Any, str], tuple[str, Any]]:
    """Returns what users have set on a dataset, by whose it is and its name: its kind and value.

    The kind is ``n_id`` of a value for each node, ``e_id`` of one for each edge, else nothing.
    """
    found: dict[tuple[Any, str], tuple[str, Any]] = {}
    stores: dict[Any, Any] = dataset._types if dataset.schema is not None else {None: dataset}
    for of, store in stores.items():
        nodes, edges = getattr(store, "num_nodes", -1), getattr(store, "num_edges", -1)
        for name, value in vars(store).items():
            if name.startswith("_") or not getattr(value, "shape", ()):
                continue
            kind = {nodes: "n_id", edges: "e_id"}.get(len(value), "")
            if nodes == edges == len(value):
                kind = "e_id" if name.startswith("edge") else "n_id"
            found[of, name] = kind, value
    return found


def attach(batch: Any, dataset: Dataset) -> Any:
    """Gives a batch its part of what users have set on the dataset."""
    for (of, name), (kind, value) in attributes(dataset).items():
        store = batch if of is None else batch[of]
        part = value
        if kind:
            index = getattr(store, kind, None)
            if index is None:  # without PyG a batch has no e_id
                continue
            part = value[index.to(value.device) if hasattr(value, "device") else _numpy(index)]
        setattr(store, name, part)
    return batch


def leave_out_idle(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments without those of torch's that change nothing, which it explains once."""
    if not isinstance(arguments.get("sampler") or "", str):
        raise CapabilityError(
            "sampler: the daemon deals seeds; name them and give shuffle=True, and rank and "
            "world_size in place of a DistributedSampler"
        )
    for name, value in arguments.items():
        default = _IDLE.get(name)
        if name in _IDLE and value is not default and value != default:
            _explain(name)
    return {k: v for k, v in arguments.items() if k not in _IDLE}


def _explain(name: str) -> None:
    """Says once that an argument changes nothing."""
    if name not in _explained:
        _explained.add(name)
        warnings.warn(
            f"{name} has no effect: the daemon makes batches ahead, in shared memory and by "
            "processes of its own",
            stacklevel=4,
        )


def _like(n_id: Any, a: Any) -> Any:
    """Returns an array as n_id is: a tensor on its device, or of NumPy."""
    if not hasattr(n_id, "new_tensor"):
        return a
    import torch

    return torch.from_numpy(np.ascontiguousarray(a)).to(n_id.device)


def _numpy(a: Any) -> Any:
    """Returns a tensor, or an array, as one of NumPy."""
    return np.asarray(a.cpu() if hasattr(a, "cpu") else a)


@functools.cache
def _kinds() -> tuple[Any, Any, Any]:
    """Returns what makes the result, the tensors and a block's edges, of what is installed."""
    try:
        from . import torch
    except ImportError:
        return SimpleNamespace, None, _edges
    except RuntimeError:  # CapabilityError: no PyTorch
        return SimpleNamespace, None, _edges
    try:
        from torch_geometric.data import Data
    except ImportError:
        return SimpleNamespace, torch.tensors, torch.block_edges
    return _with_lazy(Data), torch.tensors, torch.block_edges


def _with_lazy(data: Any) -> Any:
    """Returns PyG's Data with what is found in the dataset's files when it is asked for."""

    def found(name: str) -> property:
        def get(self: Any) -> Any:
            if name not in self._store:
                value = self._files.of_batch(name, _numpy(self.n_id), _numpy(self.edge_index))
                self._store[name] = _like(self.n_id, value)
            return self._store[name]

        return property(get)

    def item(self: Any, name: str) -> Any:
        return getattr(self, name) if name in Files.LAZY else data.__getitem__(self, name)

    members = {name: found(name) for name in Files.LAZY}
    return type("Data", (data,), {**members, "__getitem__": item, "__module__": __name__})


def __getattr__(name: str) -> Any:
    """Has pickle find the class of batches, which is made when PyG is there."""
    if name == "Data":
        return _kinds()[0]
    raise AttributeError(f"module {__name__} has no attribute {name}")


def _other_edges(item: Any, kind: str, files: Files) -> None:
    """Gives a batch all edges between its nodes, or those that were drawn both ways."""
    n_id = _numpy(item.n_id)
    if kind == "induced":
        edges, e_id = files.induced(n_id)
        item.e_id = _like(item.n_id, e_id)
    else:
        row, col = _numpy(item.edge_index)
        both = np.unique(np.concatenate([col * len(n_id) + row, row * len(n_id) + col]))
        edges = np.stack([both % len(n_id), both // len(n_id)])
    item.edge_index = _like(item.n_id, edges)
    item.num_sampled_nodes = item.num_sampled_edges = None


def _edges(block: Block) -> Any:
    if isinstance(block.indptr, DeviceArray):
        raise CapabilityError("adjs: edges on a GPU are made by PyTorch, which is not installed")
    dst = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
    return np.stack([block.src, dst])


def adjs(batch: Any) -> list[tuple[Any, tuple[int, int]]]:
    """Returns ``(edge_index, (sources, destinations))`` for each layer, the outermost first.

    For bipartite layers: ``x = conv((x, x[:size[1]]), edge_index)``. The edges are those that
    ``heliosctl train`` uses in that layer.
    """
    edges = _kinds()[2]
    return [(edges(b), (b.num_src, b.num_dst)) for b in reversed(batch.blocks)]


__all__ = ["NeighborLoader", "adjs"]
