"""Steps of an optimiser that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ._errors import UsageError
from ._loader import Loader

Item = TypeVar("Item")


@dataclass
class Part(Generic[Item]):
    """What a rank does of a step: a batch, or nothing where the epoch has no more."""

    batch: Item | None
    #: for the mean loss of the batch's seeds: with it, the mean over the ranks (what DDP makes of
    #: gradients) is that over all seeds of the step
    weight: float
    #: the step's last part of this rank: let the gradients be added up, and step
    last: bool


def steps(loader: Loader[Item], batches: int) -> Iterator[Part[Item]]:
    """Yields the parts of an epoch's steps, each of ``batches`` batches of all ranks together.

    Every rank has as many parts in each step, and as many steps. Any number of ranks that divides
    ``batches`` makes the same steps, to the rounding of sums; so a run goes on with another one.

    >>> for part in helios.steps(loader, batches=4):
    ...     with contextlib.nullcontext() if part.last else model.no_sync():
    ...         if part.batch is None:  # all ranks take part in adding up
    ...             loss = 0 * model(torch.zeros(1, features), torch.empty(2, 0).long()).sum()
    ...         else:
    ...             loss = part.weight * loss_of(model, part.batch)
    ...         loss.backward()
    ...     if part.last:
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    """
    rank, world, size = loader.rank, loader.world_size, loader.batch_size
    if batches < 1 or batches % world:
        raise UsageError(
            f"steps of {batches} batches cannot be dealt to {world} ranks; give a multiple"
        )
    if loader.drop_last:
        raise UsageError("steps deal out all seeds of an epoch; leave drop_last out of the loader")
    return _parts(loader, batches, rank, world, size)


def _parts(
    loader: Loader[Item], batches: int, rank: int, world: int, size: int
) -> Iterator[Part[Item]]:
    seeds = loader.num_seeds
    iteration = loader._own_batches()
    done = loader.next_batch
    if done % batches and done * size < seeds:
        raise UsageError(
            f"the loader goes on at batch {done}, in the middle of a step of {batches}; save its "
            "state between steps"
        )
    while done * size < seeds:
        of_step = min((done + batches) * size, seeds) - done * size
        for index in range(done + rank, done + batches, world):
            here = max(0, min(size, seeds - index * size))
            yield Part(
                batch=next(iteration) if here else None,
                weight=here * world / of_step,
                last=index + world >= done + batches,
            )
        done += batches
    next(iteration, None)  # the epoch's end, which the loader notes
