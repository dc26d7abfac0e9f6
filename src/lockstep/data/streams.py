"""Iterable data sets, in a worker or in the main process: local batches over all ranks and workers.

A stream that does not divide itself is read whole by every worker, which keeps its slices by position. So the
composition of a step is the same whatever the number of ranks and workers, all know when the stream ends, and nobody
has to ask. A data set that asks ``get_worker_info`` how many workers there are divides itself; then what it gives is
taken as it comes.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lockstep.collectives.nested import leaves
from lockstep.data.empty import empty_batch
from lockstep.data.randomness import Borrowed, plant
from lockstep.data.samples import BATCH, tell_epoch
from lockstep.data.shares import share
from lockstep.data.tasks import Run, Task
from lockstep.data.workers import Seat, take
from lockstep.errors import UsageError

STREAM = 3  # see samples.BATCH
_NOTHING = object()


class Piece(NamedTuple):
    """What a worker answers to a task.

    Attributes:
        batch: The local batch; at the end an empty one, or None if there was no sample at all to take its structure
            from.
        samples: In the global batch.
        ended: Whether this worker's part of the stream is through.
        worker: Which of this rank's workers.
        divided: Whether the data set divides itself.
        mark: Tells streams apart by their first sample.
    """

    batch: Any
    samples: int
    ended: bool
    worker: int
    divided: bool
    mark: int


class Stream(Dataset[Any]):
    """Makes the local batch of a task out of what comes next.

    Args:
        dataset: An iterable data set.
        collate: Makes a batch of a list of samples.
        batch_size: Samples in a global batch.
        drop_last: Whether a last short batch is left out.
        rank: This rank, which its workers cannot find out by themselves.
        size: Number of ranks.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        batch_size: int,
        drop_last: bool,
        rank: int,
        size: int,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._rank, self._size = rank, size
        self._worker = 0
        self._seat: Seat | None = None
        self._run: Run | None = None
        self._draws = Borrowed(())
        self._samples: Iterator[Any] = iter(())
        self._first: Any = _NOTHING
        self._like: Any = _NOTHING
        self._at = 0
        self._divided = False
        self._mark = 0

    def take_seat(self, worker: int, count: int) -> int:
        """Show the data set its place among the workers of all ranks."""
        self._worker = worker
        number = self._rank * count + worker
        self._seat = Seat(number, self._size * count, self.dataset, self._part_ways)
        take(self._seat)
        return number

    def __getitem__(self, task: Task) -> Piece:
        if task.run != self._run:
            self._begin(task.run)
        with self._draws:
            taken = self._next_part() if self._divided else self._next_slice(task.at)
        if self._seat is not None and self._seat.divides != self._divided:
            raise UsageError(
                "the data set asked get_worker_info() for num_workers only after its first sample, too late to let it "
                "divide itself. Ask at the top of __iter__."
            )
        if get_worker_info() is not None:
            plant(task.run.seed, task.run.epoch, task.at, task.run.rank, BATCH)
        samples, total = taken
        if total:
            batch = self._collate(samples) if samples else empty_batch(self._like, self._collate)
        else:
            batch = self._template()
        return Piece(batch, total, not total, self._worker, self._divided, self._mark)

    def _begin(self, run: Run) -> None:
        """Open the stream anew; the first sample shows whether the data set divides itself."""
        self._run, self._at = run, 0
        self._draws = Borrowed((run.seed, run.epoch, STREAM))
        tell_epoch(self.dataset, run.epoch)
        with self._draws:
            if self._seat is not None and self._seat.divides:
                self._part_ways()
            stream = iter(self.dataset)
            self._first = next(stream, _NOTHING)
        self._divided = self._seat is not None and self._seat.divides
        self._samples = stream if self._first is _NOTHING else chain([self._first], stream)
        self._mark = 0 if self._divided else mark(self._first)
        if not self._divided and run.start:
            with self._draws:
                skip(self._samples, run.start)
            self._at = run.start

    def _part_ways(self) -> None:
        """Workers of a data set that divides itself draw different random numbers from then on."""
        if self._run is not None and self._seat is not None:
            plant(self._run.seed, self._run.epoch, STREAM, 1 + self._seat.id)

    def _next_slice(self, at: int) -> tuple[list[Any], int]:
        """Read on to the global batch at a position; give this rank's slice of it, and how long it is."""
        skip(self._samples, at - self._at)
        read = list(islice(self._samples, self._batch_size))
        self._at = at + self._batch_size
        if not read or (self._drop_last and len(read) < self._batch_size):
            return [], 0
        mine = share(len(read), self._rank, self._size)
        self._like = read[0]
        return read[mine.start : mine.stop], len(read)

    def _next_part(self) -> tuple[list[Any], int]:
        """Read this rank's share of a global batch from this worker's own part of the stream."""
        wanted = len(share(self._batch_size, self._rank, self._size))
        read = list(islice(self._samples, wanted))
        if self._drop_last and len(read) < wanted:
            return [], 0
        return read, len(read)

    def _template(self) -> Any:
        """Make an empty batch, for a rank that has run out while others go on. Only divided streams need one."""
        if not self._divided:
            return None
        if self._first is _NOTHING:
            # Not one sample for this worker: look at the whole stream, as a worker alone would see it.
            mine = take(Seat(0, 1, self.dataset, lambda: None))
            try:
                self._first = next(iter(self.dataset), _NOTHING)
            finally:
                take(mine)
        return None if self._first is _NOTHING else empty_batch(self._first, self._collate)


def skip(samples: Iterator[Any], count: int) -> None:
    """Read ``count`` samples and forget them."""
    deque(islice(samples, count), maxlen=0)


def mark(sample: Any) -> int:
    """Give a number that differs where samples do, as far as they are of numbers and texts.

    Example:
        >>> mark(("a", 1)) == mark(("a", 1)), mark(("a", 1)) == mark(("a", 2))
        (True, False)
    """
    if sample is _NOTHING:
        return 0
    total = 1
    for leaf in leaves(sample):
        if isinstance(leaf, Tensor):
            raw = repr((leaf.dtype, tuple(leaf.shape), leaf.detach().double().nan_to_num().sum().item())).encode()
        elif isinstance(leaf, np.ndarray):
            raw = leaf.tobytes() if leaf.dtype != object else b""
        elif isinstance(leaf, str | bytes | int | float):
            raw = repr(leaf).encode()
        else:
            raw = type(leaf).__name__.encode()
        total = zlib.crc32(raw, total)
    return total
