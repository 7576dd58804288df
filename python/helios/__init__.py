"""Mini-batches of graphs whose node features stay on SSDs.

>>> import helios
>>> dataset = helios.open("g")
>>> loader = helios.loader.NeighborLoader(
...     dataset, [10, 10], split="train", batch_size=1024, shuffle=True
... )
>>> for batch in loader:
...     out = model(batch.x, batch.edge_index)[: batch.batch_size]

A daemon (``heliosctl serve``) owns the SSDs, the caches and the sampler; batches come through
shared memory, without a copy. docs/guide/pytorch.md tells more.
"""

from ._batch import Batch, Block
from ._checkpoint import load_dgl, load_pyg, save_checkpoint
from ._cuda import DeviceArray
from ._dataset import Dataset, open  # noqa: A004
from ._errors import (
    CapabilityError,
    DaemonDied,
    DeviceError,
    HeliosError,
    Interrupted,
    ProtocolError,
    RefusedError,
    UsageError,
)
from ._hetero import HeteroBatch
from ._loader import Loader, NumpyLoader
from ._save import save
from ._steps import Part, steps
from ._verbs import bench, compare, import_, run, scalars, train
from ._version import __version__
from .loader import NeighborLoader, adjs

__all__ = [
    "Batch",
    "Block",
    "CapabilityError",
    "DaemonDied",
    "Dataset",
    "DeviceArray",
    "DeviceError",
    "HeliosError",
    "HeteroBatch",
    "Interrupted",
    "Loader",
    "NeighborLoader",
    "NumpyLoader",
    "Part",
    "ProtocolError",
    "RefusedError",
    "UsageError",
    "__version__",
    "adjs",
    "bench",
    "compare",
    "import_",
    "load_dgl",
    "load_pyg",
    "open",
    "run",
    "save",
    "save_checkpoint",
    "scalars",
    "steps",
    "train",
]
