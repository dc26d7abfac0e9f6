"""Arguments that contradict each other, and what to write instead."""

import os
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lockstep.data.samplers import division
from lockstep.errors import UsageError
from lockstep.world import World

_CROWDED = 2  # processes that load per core


def refuse(
    dataset: Any,
    batch_size: int | None,
    shuffle: bool | None,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
    in_order: bool,
    seed: int | None,
    generator: torch.Generator | None,
) -> None:
    """Raise for the first of the contradictions.

    Raises:
        UsageError: With what to write.
    """
    others = {"shuffle": bool(shuffle), "sampler": sampler is not None, "batch_sampler": batch_sampler is not None}
    given = [name for name, there in others.items() if there]
    stream = isinstance(dataset, IterableDataset)
    own_order = not stream and sampler is None and batch_sampler is None
    problems = (
        (stream and bool(given), _stream_problem(given)),
        (batch_sampler is not None and _besides(batch_size, given, drop_last), _BESIDES),
        (batch_size is None, _NO_BATCHES),
        (bool(shuffle) and sampler is not None, _shuffle_problem(sampler)),
        (own_order and not hasattr(dataset, "__len__"), _length_problem(dataset)),
        (not in_order, "in_order=False would let ranks take parts of different global batches. Leave it out."),
        (seed is not None and generator is not None, "seed and generator both fix the order: write one of them."),
    )
    for wrong, message in problems:
        if wrong:
            raise UsageError(message)
    if own_order:
        _refuse_nothing(len(dataset), batch_size or 1, drop_last)


_NO_BATCHES = (
    "batch_size=None: lockstep.DataLoader counts samples over all ranks, so it must make the batches. Write "
    "batch_size=..., or batch_sampler=... for a sampler that gives lists of indices; a stream that gives whole batches "
    "must give samples."
)
_BESIDES = (
    "batch_sampler makes the batches, so batch_size, shuffle, sampler and drop_last have no meaning beside it: leave "
    "them out, or leave batch_sampler out."
)


def _besides(batch_size: int | None, given: list[str], drop_last: bool) -> bool:
    return batch_size != 1 or len(given) > 1 or drop_last


def _length_problem(dataset: Any) -> str:
    return (
        f"{type(dataset).__name__} has no __len__. Give it one, or derive it from torch.utils.data.IterableDataset if "
        f"it can only be read from its beginning."
    )


def _stream_problem(given: list[str]) -> str:
    return (
        f"{' and '.join(given)} with an IterableDataset: a stream has an order of its own. Leave it out, and let the "
        f"data set shuffle in __iter__ (random numbers from python, numpy or torch are the same there on every rank)."
    )


def _shuffle_problem(sampler: Any) -> str:
    if sampler is not None and (division(sampler) or hasattr(sampler, "num_replicas")):
        return (
            f"shuffle=True with sampler={type(sampler).__name__}: lockstep.DataLoader divides between ranks by itself. "
            f"Leave the sampler out and keep shuffle=True."
        )
    return "shuffle=True with a sampler: the sampler decides on the order. Leave one of them out."


def _refuse_nothing(n: int, batch_size: int, drop_last: bool) -> None:
    if drop_last and 0 < n < batch_size:
        raise UsageError(
            f"{n} samples in global batches of {batch_size} with drop_last=True make no batch at all. Use a smaller "
            f"batch_size, or drop_last=False."
        )


def refuse_small_batch(world: World, batch_size: int | None) -> None:
    """Raise if some ranks would never get a sample."""
    if batch_size is not None and batch_size < world.size:
        raise UsageError(
            f"rank {world.rank} of {world.size}: batch_size={batch_size} counts the samples of all ranks together, so "
            f"it must be at least {world.size}, the number of ranks. Write batch_size={world.size} or more."
        )


def cores_of_node() -> int:
    """Cores that the ranks of this node have together: the launcher's, as it may have given each rank its own few."""
    if not hasattr(os, "sched_getaffinity"):  # macOS does not say which are ours
        return os.cpu_count() or 1
    mine = os.sched_getaffinity(0)
    try:
        return len(mine | os.sched_getaffinity(os.getppid()))
    except OSError:  # the launcher is gone
        return len(mine)


def crowded(num_workers: int, world: World, cores: int) -> str | None:
    """Say so, on rank 0, if the workers of this node's ranks are far too many for its cores."""
    workers = num_workers * world.local_size
    if world.rank or world.local_size == 1 or workers <= _CROWDED * cores:
        return None
    return (
        f"lockstep.DataLoader: num_workers={num_workers} on {world.local_size} ranks are {workers} processes on "
        f"{cores} cores. num_workers={max(1, cores // world.local_size)} would do."
    )
