"""Features for GraphBolt's pipelines: they sample, and the daemon reads rows from the SSDs."""

from __future__ import annotations

from typing import Any

from ._dataset import Dataset
from ._errors import CapabilityError, UsageError
from ._rows import Rows, node_numbers

import torch  # isort: skip

try:
    import dgl.graphbolt as gb
except ImportError as e:
    raise CapabilityError("helios.graphbolt needs DGL 2 or newer; install it") from e

Key = tuple[str, str | None, str]


class FeatureStore(gb.FeatureStore):  # type: ignore[misc]
    """``feat`` and ``label`` of nodes, as GraphBolt's ``fetch_feature`` asks for them.

    >>> store = helios.graphbolt.FeatureStore(dataset)
    >>> pipe = gb.ItemSampler(items, batch_size=1024).sample_neighbor(graph, [10, 10])
    >>> pipe = pipe.fetch_feature(store, node_feature_keys=["feat"])

    Rows are read one batch at a time, by a job of the daemon's that lives as long as this: nothing
    is read ahead or cached, which :class:`helios.dgl.DataLoader` does.
    """

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        """Makes it for a dataset of :func:`helios.open`.

        Options say how rows are read, as of a loader; by default ``mode="cpu"`` without caches.
        """
        super().__init__()
        self.dataset = dataset
        self._rows = Rows(dataset, **options)
        self._updated: dict[Key, Any] = {}

    def keys(self) -> list[Key]:
        """Returns what there is: (domain, type, name); the type is None where there is one."""
        schema = self.dataset.schema
        if schema is None:
            return [("node", None, "feat"), ("node", None, "label")]
        feats: list[Key] = [("node", t, "feat") for t, dim in schema.dims.items() if dim]
        return [*feats, ("node", schema.target, "label")]

    def _nodes(self, domain: str, type_name: str | None, feature_name: str) -> int:
        """Checks a key, and returns how many nodes have the feature."""
        key = (domain, type_name, feature_name)
        if key not in self.keys():
            raise UsageError(f"the dataset has no feature {key}; there are {self.keys()}")
        schema = self.dataset.schema
        if schema is None or type_name is None:
            return self.dataset.num_nodes
        return schema.nodes[type_name]

    def read(self, domain: str, type_name: str | None, feature_name: str, ids: Any = None) -> Any:
        """Returns a feature of nodes; of all without ids. It lies where ids do."""
        nodes = node_numbers(ids, self._nodes(domain, type_name, feature_name))
        if (domain, type_name, feature_name) in self._updated:
            rows = self._updated[domain, type_name, feature_name][torch.from_numpy(nodes)]
        elif feature_name == "label":
            rows = torch.from_numpy(self.dataset.files.targets(nodes))
        else:
            rows = self._rows.read(nodes, type_name)
        return rows if ids is None else rows.to(getattr(ids, "device", "cpu"))

    def size(self, domain: str, type_name: str | None, feature_name: str) -> Any:
        """Returns the size of a feature of one node."""
        self._nodes(domain, type_name, feature_name)
        if (domain, type_name, feature_name) in self._updated:
            return self._updated[domain, type_name, feature_name].shape[1:]
        if feature_name == "label":
            return torch.Size(self.dataset.files.target_shape())
        schema = self.dataset.schema
        if schema is None or type_name is None:
            return torch.Size([self.dataset.num_features])
        return torch.Size([schema.dims[type_name]])

    def metadata(self, domain: str, type_name: str | None, feature_name: str) -> dict[str, Any]:
        """Returns what else is known of a feature: nothing."""
        self._nodes(domain, type_name, feature_name)
        return {}

    def update(
        self, domain: str, type_name: str | None, feature_name: str, value: Any, ids: Any = None
    ) -> None:
        """Has this store give another tensor, which it keeps in memory; the dataset stays."""
        nodes = self._nodes(domain, type_name, feature_name)
        if ids is not None or len(value) != nodes:
            raise UsageError(f"{feature_name}: a dataset does not change; give all {nodes} rows")
        self._updated[domain, type_name, feature_name] = value

    def __len__(self) -> int:
        """How many features there are."""
        return len(self.keys())

    def __repr__(self) -> str:
        return f"<helios.graphbolt.FeatureStore of {self.dataset!r}>"


__all__ = ["FeatureStore"]
