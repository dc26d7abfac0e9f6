"""One rank of each node first, then the others: for downloads and caches."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.errors import LateRankError, LostRankError
from lockstep.world import group
from lockstep.world.place import Place, find_place
from lockstep.world.world import DEFAULT_TIMEOUT, current

_turns = itertools.count()


@contextmanager
def first(timeout: float = 3600.0) -> Iterator[None]:
    """Let one rank per node run the block before the others of its node do.

    Every rank runs the block: what the first one downloaded, the others find. Works before `lockstep.init` too. Every
    rank must come here equally often.

    Args:
        timeout: Seconds that the others wait.

    Raises:
        LateRankError: The first rank took longer.
        LostRankError: The first rank's block raised, or it ended inside; on the others instead of running the block.

    Example:
        >>> import lockstep
        >>> with lockstep.first():
        ...     data = "downloaded once per node"
    """
    place = find_place(os.environ)
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        yield from _by_collective()
    elif place.local_size > 1:
        yield from _by_store(place, timeout)
    else:
        next(_turns)
        yield


def _by_store(place: Place, timeout: float) -> Iterator[None]:
    store = group.connect(place, group.find_address(place, os.environ), DEFAULT_TIMEOUT)
    key = f"lockstep/first/{next(_turns)}/{place.node}"
    if place.local_rank == 0:
        try:
            yield
        except BaseException as error:
            store.set(key, f"{type(error).__name__}: {error}")
            raise
        store.set(key, "")
        return
    first_rank = f"local rank 0 of node {place.node}"
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistNetworkError as error:
        raise group.lost_store(place, f"{first_rank} was inside `with lockstep.first():`") from error
    except dist.DistError as error:
        raise LateRankError(
            f"rank {place.rank} of {place.size}: {first_rank} was not through its block within {timeout:g} s. Give it "
            f"longer with lockstep.first(timeout=...)."
        ) from error
    _refuse_failure(store.get(key).decode(), place.rank, first_rank)
    yield


def _by_collective() -> Iterator[None]:
    """For a process group that the script made by itself: its store is not ours to use."""
    world = current()
    if world.local_rank == 0:
        failed = True
        try:
            yield
            failed = False
        finally:
            world.ranks.line_up(torch.tensor(failed))
        return
    failures = world.ranks.line_up(torch.tensor(False)).nonzero().flatten().tolist()
    _refuse_failure(", ".join(f"rank {rank}" for rank in failures), world.rank, "a first rank")
    yield


def _refuse_failure(failure: str, rank: int, who: str) -> None:
    if failure:
        raise LostRankError(
            f"rank {rank}: {who} failed inside `with lockstep.first():` ({failure}); see its own error."
        )
