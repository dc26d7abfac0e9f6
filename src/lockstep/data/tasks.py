"""What the main process tells its workers: small, plain, and enough for a worker that knows nothing else."""

from collections.abc import Iterator
from typing import Any, NamedTuple


class Run(NamedTuple):
    """One iteration over a loader.

    Attributes:
        number: Counts the iterations of a loader: the same epoch may come twice.
        seed: What the order and all random numbers come from.
        epoch: Which order.
        start: Position in the epoch's order where it begins; not 0 if it was resumed.
        rank: This rank.
        size: Number of ranks.
    """

    number: int
    seed: int
    epoch: int
    start: int
    rank: int
    size: int


class Task(NamedTuple):
    """One local batch to make.

    Attributes:
        run: The iteration that it belongs to.
        at: Position of its global batch in the epoch's order.
        indices: This rank's samples, as the data set knows them; a stream needs none.
        like: Where there are none, a sample of which an empty batch takes its structure.
    """

    run: Run
    at: int
    indices: list[Any]
    like: Any = None


class Tasks:
    """What torch's loader takes for a sampler: the tasks of the iteration that is about to begin."""

    def __init__(self) -> None:
        self.coming: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        # torch asks twice at a loader's first iteration and uses only one; both are the same.
        return self.coming
