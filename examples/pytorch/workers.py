"""A loader's batches through torch's workers, stopped and resumed: python workers.py DATASET.

torchdata's StatefulDataLoader keeps the place. As a DistributedSampler, it wants set_epoch.
"""

import sys

from torchdata.stateful_dataloader import StatefulDataLoader

import helios
from helios.torch import IterableDataset

with helios.open(sys.argv[1]) as dataset:

    def loader() -> tuple[IterableDataset, StatefulDataLoader]:
        batches = helios.NeighborLoader(
            dataset, [10, 10], split="train", batch_size=64, shuffle=True, seed=1
        )
        data = IterableDataset(batches)
        return data, StatefulDataLoader(data, batch_size=None, num_workers=2)

    data, stateful = loader()
    data.set_epoch(1)
    whole = [batch.index for batch in stateful]
    data.set_epoch(1)
    begun = iter(stateful)
    first = [next(begun).index for _ in range(3)]
    state = stateful.state_dict()
    del begun

    data, stateful = loader()
    stateful.load_state_dict(state)
    rest = [batch.index for batch in stateful]
    print(f"epoch 1: {len(whole)} batches; stopped after {len(first)}, then {len(rest)} more")
    assert first + rest == whole
