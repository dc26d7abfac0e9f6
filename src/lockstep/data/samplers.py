"""Orders that are the user's: a sampler or a batch sampler, for all ranks or divided between them already."""

import operator
import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from lockstep.collectives.agreement import agree
from lockstep.data.orders import moment
from lockstep.data.randomness import Borrowed
from lockstep.data.shares import Indices, count_batches, share
from lockstep.data.tasks import Run, Task
from lockstep.errors import UsageError
from lockstep.world import World

SAMPLER = 2  # see samples.BATCH
_BLOCK = 16  # global batches that are drawn at a time, since borrowing the generators costs something


class Given:
    """The indices that this rank was given in a run, 8 bytes each; nothing if they are not whole numbers."""

    def __init__(self) -> None:
        self._indices = array("q")
        self._ends: list[int] = []
        self._numbers = True

    def add(self, indices: list[Any]) -> None:
        """Note one local batch."""
        numbers = as_numbers(indices)
        self._numbers = self._numbers and numbers is not None
        self._indices.extend(numbers or ())
        self._ends.append(len(self._indices))

    def first(self, batches: int) -> Indices:
        """Give the indices of the first ``batches``."""
        if not self._numbers:
            raise UsageError(
                "the sampler gives keys that are not whole numbers, so there is no data set order to return to."
            )
        end = self._ends[batches - 1] if batches else 0
        return np.array(self._indices[:end], dtype=np.int64)


class Drawn:
    """A user's sampler, in its own order, drawn alike on every rank and never built anew.

    Args:
        sampler: Gives indices, or lists of them if there is no batch size.
        batch_size: Samples in a global batch; None for a batch sampler, each of whose batches is a global one.
        drop_last: Whether a last short global batch is left out.
    """

    def __init__(self, sampler: Iterable[Any], batch_size: int | None, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._given = Given()
        self.name = "sampler" if batch_size else "batch sampler"

    def __len__(self) -> int:
        length = len(self._sampler)  # type: ignore[arg-type]
        return count_batches(length, self._batch_size, self._drop_last) if self._batch_size else length

    def begin(self, world: World, run: Run) -> Iterator[Task]:
        """See `Order`."""
        tell_sampler(self._sampler, run.epoch)
        blocks = self._blocks(run)
        first = next(blocks, [])
        facts = (
            f"a {self.name} in batches of {self._batch_size or 'its own'}, drop_last={self._drop_last}, {moment(run)}"
        )
        marks = agree(world, "an iteration over lockstep.DataLoader", facts, [fingerprint(first)])
        other = next((rank for rank, mark in enumerate(marks) if mark != marks[0]), None)
        if other is not None:
            raise UsageError(
                f"rank {run.rank} of {run.size}: the {self.name} gives other indices on rank {other} than on rank 0, "
                f"so samples would be lost or come twice. lockstep.DataLoader divides them by itself: give every rank "
                f"the same sampler, seeded alike."
            )
        self._given = Given()
        return self._tasks(run, first, blocks)

    def batches(self, world: World, run: Run, made: Iterator[Any]) -> Iterator[Any]:  # noqa: ARG002
        """See `Order`: what was made are the batches."""
        return made

    def position(self, run: Run, batches: int) -> int:
        """See `Order`; counted in samples, in batches for a batch sampler."""
        return run.start + batches * (self._batch_size or 1)

    def given(self, run: Run, batches: int) -> Indices:  # noqa: ARG002
        """See `Order`."""
        return self._given.first(batches)

    def facts(self, world: World) -> dict[str, Any]:  # noqa: ARG002
        """See `Order`."""
        return {"order": self.name}

    def _tasks(self, run: Run, first: list[list[Any]], blocks: Iterator[list[list[Any]]]) -> Iterator[Task]:
        at = run.start
        while first:
            for batch in first:
                mine = share(len(batch), run.rank, run.size)
                indices = batch[mine.start : mine.stop]
                self._given.add(indices)
                yield Task(run, at, indices, None if indices else batch[0])
                at += self._batch_size or 1
            first = next(blocks, [])

    def _blocks(self, run: Run) -> Iterator[list[list[Any]]]:
        """Draw global batches, some at a time, from random numbers of their own: the caller's stay as they are."""
        draws = Borrowed((run.seed, run.epoch, SAMPLER), own_generators(self._sampler))
        with draws:
            batches = self._global_batches(run.start)
        while True:
            with draws:
                block = list(islice(batches, _BLOCK))
            if not block:
                return
            yield block

    def _global_batches(self, start: int) -> Iterator[list[Any]]:
        indices = islice(iter(self._sampler), start, None)
        if self._batch_size is None:
            yield from (list(batch) for batch in indices if len(batch))
            return
        while batch := list(islice(indices, self._batch_size)):
            if len(batch) == self._batch_size or not self._drop_last:
                yield batch


class Divided:
    """A sampler that gives each rank its own part already, such as torch's DistributedSampler: left as it is.

    Args:
        sampler: Gives this rank's indices, or lists of them if there is no batch size.
        batch_size: Samples in a *global* batch, a multiple of the number of ranks; None for a batch sampler, each of
            whose batches is a local one.
        drop_last: Whether a last short local batch is left out.
    """

    name = "divided sampler"

    def __init__(self, sampler: Iterable[Any], batch_size: int | None, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._given = Given()

    def __len__(self) -> int:
        wraps = type(self._sampler) is torch_data.BatchSampler
        longest = getattr(division(self._sampler), "longest", None)
        if self._batch_size is None and wraps and longest is not None:
            return count_batches(longest, self._sampler.batch_size, self._sampler.drop_last)  # type: ignore[attr-defined]
        return self._count(len_of(self._sampler, "longest"))

    def begin(self, world: World, run: Run) -> Iterator[Task]:
        """See `Order`; ranks whose part ends earlier get empty batches until all are through."""
        refuse_other_division(world, self._sampler, self._batch_size)
        tell_sampler(self._sampler, run.epoch)
        facts = (
            f"a divided sampler, batches of {self._batch_size or 'its own'}, drop_last={self._drop_last}, {moment(run)}"
        )
        own = self._count(len_of(self._sampler))
        counts = agree(world, "an iteration over lockstep.DataLoader", facts, [own])
        self._given = Given()
        return self._tasks(run, own, max(row[0] for row in counts))

    def batches(self, world: World, run: Run, made: Iterator[Any]) -> Iterator[Any]:  # noqa: ARG002
        """See `Order`: what was made are the batches."""
        return made

    def position(self, run: Run, batches: int) -> int:
        """See `Order`."""
        return run.start + batches * (self._batch_size or 1)

    def given(self, run: Run, batches: int) -> Indices:  # noqa: ARG002
        """See `Order`."""
        return self._given.first(batches)

    def facts(self, world: World) -> dict[str, Any]:
        """See `Order`; batches of a batch sampler's own mean nothing to another number of ranks."""
        return {"order": self.name, **({} if self._batch_size else {"ranks": world.size})}

    def _count(self, length: int) -> int:
        if self._batch_size is None:
            return length
        return count_batches(length, self._batch_size // self._ranks, self._drop_last)

    @property
    def _ranks(self) -> int:
        ranks: int = division(self._sampler).num_replicas
        return ranks

    def _tasks(self, run: Run, own: int, most: int) -> Iterator[Task]:
        size = self._batch_size or 1
        skipped = run.start // size
        batches = self._local_batches(skipped)
        like: Any = 0
        for number in range(skipped, most):
            indices = next(batches, None) if number < own else []
            if indices is None:
                raise UsageError(
                    f"rank {run.rank}: the sampler ended after {number} batches, but its length says {own}."
                )
            like = indices[0] if indices else like
            self._given.add(indices)
            yield Task(run, number * size, indices, like)
        if next(batches, None) is not None:
            raise UsageError(f"rank {run.rank}: the sampler goes on after the {own} batches that its length says.")

    def _local_batches(self, skipped: int) -> Iterator[list[Any]]:
        if self._batch_size is None:
            yield from (list(batch) for batch in islice(iter(self._sampler), skipped, None))
            return
        local = self._batch_size // self._ranks
        indices = islice(iter(self._sampler), skipped * local, None)
        while batch := list(islice(indices, local)):
            if len(batch) == local or not self._drop_last:
                yield batch


def chain(sampler: Any) -> Iterator[Any]:
    """Give a sampler and those that it wraps."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def division(sampler: Any) -> Any:
    """Give the part of a sampler that divides between ranks, as torch's DistributedSampler does; None if none does."""
    for each in chain(sampler):
        replicas = getattr(each, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 1 and isinstance(getattr(each, "rank", None), int):
            return each
    return None


def refuse_other_division(world: World, sampler: Any, batch_size: int | None) -> None:
    """Raise if a divided sampler does not fit this world: samples would be lost."""
    found = division(sampler)
    if (found.num_replicas, found.rank) != (world.size, world.rank):
        raise UsageError(
            f"rank {world.rank} of {world.size}: the sampler divides for rank {found.rank} of {found.num_replicas}, so "
            f"samples would be lost. Leave the sampler out: lockstep.DataLoader divides by itself."
        )
    if batch_size is not None and batch_size % world.size:
        raise UsageError(
            f"rank {world.rank} of {world.size}: batch_size={batch_size} counts the samples of all ranks, and with a "
            f"sampler that is divided already it must be a multiple of {world.size}. Leave the sampler out, or write "
            f"batch_size={-(-batch_size // world.size) * world.size}."
        )


def tell_sampler(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` wherever a sampler, or one that it wraps, has it."""
    for each in chain(sampler):
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)


def epoch_of(sampler: Any) -> int | None:
    """Give the epoch that a sampler, or one that it wraps, was told last; None if it takes none."""
    found = (getattr(each, "epoch", None) for each in chain(sampler) if callable(getattr(each, "set_epoch", None)))
    return next((epoch for epoch in found if isinstance(epoch, int)), None)


def own_generators(sampler: Any) -> list[torch.Generator]:
    """Give the generators that a sampler keeps for itself."""
    found = (getattr(each, "generator", None) for each in chain(sampler))
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def len_of(sampler: Any, name: str = "") -> int:
    """Give a sampler's length, or that of the rank which gets most, where the sampler knows."""
    found = getattr(sampler, name, None) if name else None
    if found is not None:
        return int(found)
    if not hasattr(sampler, "__len__"):
        raise UsageError(
            f"{type(sampler).__name__} is divided between ranks, so it must have a length: give it a __len__."
        )
    return len(sampler)


def as_numbers(indices: Iterable[Any]) -> list[int] | None:
    """Give indices as whole numbers; None if they are something else."""
    try:
        return [operator.index(each) for each in indices]
    except TypeError:
        return None


def fingerprint(batches: list[list[Any]]) -> int:
    """Give a number that differs where indices do; keys other than numbers and texts are not looked at."""
    texts: list[Any] = [as_numbers(batch) or [each for each in batch if isinstance(each, str)] for batch in batches]
    return zlib.crc32(repr(texts).encode())
