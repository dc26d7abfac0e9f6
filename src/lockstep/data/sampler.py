"""torch's DistributedSampler without its list of the whole data set."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from lockstep.data.permutation import BLOCK, Permutation
from lockstep.data.shares import Indices
from lockstep.errors import UsageError
from lockstep.world import current


class DistributedSampler(Sampler[int]):
    """Gives each rank its part of a data set; torch's `DistributedSampler`, for torch's own `DataLoader`.

    Position ``p`` of an epoch's order goes to rank ``p % num_replicas``. As with torch, every rank gets equally many:
    leading positions come again at the end to even out, or ``drop_last`` leaves out the tail. With ``exact=True``
    neither happens. The order is computed in blocks while it is used, so an epoch starts at once and in little memory,
    however large the data set.

    Unlike torch's, it goes on to the next epoch by itself when it is iterated again; `set_epoch` still decides.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None for all of the world.
        rank: Which rank's part; None for this one's.
        shuffle: Whether each epoch has an order of its own.
        seed: Fixes the orders; the same on every rank.
        drop_last: Whether the tail that does not divide by ``num_replicas`` is left out.
        exact: Whether each index comes on exactly one rank, once; then the ranks' lengths differ by one at most.

    Raises:
        UsageError: ``num_replicas`` or ``rank`` make no sense; nothing is left with ``drop_last``.

    Attributes:
        longest: Length on the rank that has most.

    Example:
        >>> import lockstep
        >>> [list(lockstep.DistributedSampler(range(5), 2, rank, shuffle=False)) for rank in range(2)]
        [[0, 2, 4], [1, 3, 0]]
        >>> [list(lockstep.DistributedSampler(range(5), 2, rank, shuffle=False, exact=True)) for rank in range(2)]
        [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        exact: bool = False,
    ) -> None:
        world = current() if num_replicas is None or rank is None else None
        replicas: int = num_replicas if num_replicas is not None else world.size  # type: ignore[union-attr]
        own_rank: int = rank if rank is not None else world.rank  # type: ignore[union-attr]
        _refuse(len(dataset), replicas, own_rank, drop_last, exact)
        self.dataset = dataset
        self.num_replicas = replicas
        self.rank = own_rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.exact = exact
        self.epoch = 0
        self._next = (0, 0)  # epoch, and position in its order, where the next iteration begins
        self._open: _Place | None = None  # where the iteration in progress is

    @property
    def num_samples(self) -> int:
        """How many indices a whole epoch has on this rank."""
        return self._count(0, self.rank)

    @property
    def longest(self) -> int:
        """How many a whole epoch has on the rank with most."""
        return self._count(0, 0)

    @property
    def total_size(self) -> int:
        """How many a whole epoch has on all ranks."""
        return sum(self._count(0, rank) for rank in range(self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        # A generator, so that an iterator nobody uses (torch's loader makes one) does not count as an epoch.
        self.epoch, start = self._next
        self._next = (self.epoch + 1, 0)
        place = self._open = _Place(start)
        count, step, n = self._count(start, self.rank), self.num_replicas, len(self.dataset)
        lookup = Permutation(n, (self.seed, self.epoch)) if self.shuffle else None
        for first in range(0, count, BLOCK):
            numbers = np.arange(first, min(first + BLOCK, count), dtype=np.int64)
            positions: Indices = (start + self.rank + numbers * step) % n
            indices: list[int] = (positions if lookup is None else lookup(positions)).tolist()
            for index in indices:
                place.position += step
                yield index
        if self._open is place:
            self._open = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration give the order of ``epoch``; without this each gives the next one.

        A position in this very epoch that `load_state_dict` brought stays.
        """
        if epoch != self._next[0]:
            self._next = (epoch, 0)
        self.epoch = epoch
        self._open = None

    def state_dict(self) -> dict[str, int]:
        """Give what it takes to go on from here, with any number of ranks: plain numbers.

        Counts the indices that were taken from the sampler. torch's `DataLoader` takes some ahead of what it gives out;
        `lockstep.DataLoader` has a ``state_dict`` that does not.
        """
        samples = len(self.dataset)
        epoch, position = self._next if self._open is None else (self.epoch, min(self._open.position, samples))
        return {"epoch": epoch, "position": position, "seed": self.seed, "samples": samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a sampler was, at once; the epoch after that is a whole one.

        Raises:
            UsageError: The state is of a data set of another length.
        """
        if state["samples"] != len(self.dataset):
            raise UsageError(
                f"the state is of a data set of {state['samples']} samples, this one has {len(self.dataset)}: "
                f"positions would mean other samples. Give the sampler the same data set."
            )
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._next = (state["epoch"], state["position"])
        self._open = None

    def _count(self, start: int, rank: int) -> int:
        """Indices of a rank in the rest of an epoch from a position on."""
        rest = max(0, len(self.dataset) - start)
        if self.exact:
            return len(range(rank, rest, self.num_replicas))
        return rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)


class _Place:
    """A position that moves."""

    def __init__(self, position: int) -> None:
        self.position = position


def _refuse(n: int, replicas: int, rank: int, drop_last: bool, exact: bool) -> None:
    """Raise if there is no sensible division."""
    if replicas < 1:
        raise UsageError(f"num_replicas={replicas}: there must be at least one rank.")
    if not 0 <= rank < replicas:
        raise UsageError(
            f"rank={rank} does not fit into num_replicas={replicas}: ranks count from 0 to {replicas - 1}."
        )
    if drop_last and exact:
        raise UsageError("exact=True gives every index, drop_last=True leaves some out: write one of them.")
    if drop_last and 0 < n < replicas:
        raise UsageError(
            f"{n} samples on {replicas} ranks with drop_last=True leave nothing for any rank. Use fewer ranks, or "
            f"drop_last=False."
        )
