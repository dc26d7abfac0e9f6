"""The order of a map-style data set that is not the user's: from the first to the last, or shuffled."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from lockstep.collectives.agreement import agree
from lockstep.data.permutation import BLOCK, Permutation
from lockstep.data.shares import Indices, count_batches, end_of_epoch, own_positions, share
from lockstep.data.tasks import Run, Task
from lockstep.world import World


class Order(Protocol):
    """Which samples make which batch."""

    name: str

    def __len__(self) -> int:
        """Give the number of batches in a whole epoch."""
        ...

    def begin(self, world: World, run: Run) -> Iterator[Task]:
        """Make sure that all ranks begin the same, and give this rank's tasks."""
        ...

    def batches(self, world: World, run: Run, made: Iterator[Any]) -> Iterator[Any]:
        """Give the batches out of what the workers made of the tasks."""
        ...

    def position(self, run: Run, batches: int) -> int:
        """Give the position behind the first ``batches`` of a run."""
        ...

    def given(self, run: Run, batches: int) -> Indices:
        """Give the data set indices that this rank got in the first ``batches`` of a run."""
        ...

    def facts(self, world: World) -> dict[str, Any]:
        """Give what must be the same for a position to mean the same when it is loaded."""
        ...


class Positions:
    """The data set's own order, or a shuffle of it; nothing is ever stored.

    Args:
        dataset: Has a length.
        batch_size: Samples in a global batch.
        shuffle: Whether each epoch has an order of its own.
        drop_last: Whether a last short global batch is left out.
    """

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._drop_last = drop_last
        self.name = "shuffled" if shuffle else "in order"

    def __len__(self) -> int:
        return count_batches(len(self._dataset), self._batch_size, self._drop_last)

    def begin(self, world: World, run: Run) -> Iterator[Task]:
        """See `Order`."""
        facts = f"{len(self._dataset)} samples {self.name}, batches of {self._batch_size}, drop_last={self._drop_last}"
        agree(world, "an iteration over lockstep.DataLoader", f"{facts}, {moment(run)}")
        return self._tasks(run)

    def batches(self, world: World, run: Run, made: Iterator[Any]) -> Iterator[Any]:  # noqa: ARG002
        """See `Order`: what was made are the batches."""
        return made

    def position(self, run: Run, batches: int) -> int:
        """See `Order`."""
        return min(run.start + batches * self._batch_size, self._end(run))

    def given(self, run: Run, batches: int) -> Indices:
        """See `Order`: computed again."""
        mine = own_positions(run.start, self.position(run, batches), self._batch_size, run.rank, run.size)
        return self._lookup(run)(mine)

    def facts(self, world: World) -> dict[str, Any]:  # noqa: ARG002
        """See `Order`."""
        return {"order": self.name, "samples": len(self._dataset)}

    def even(self, world: World) -> bool:
        """Whether the number of ranks divides every global batch."""
        tail = 0 if self._drop_last else len(self._dataset) % self._batch_size
        return self._batch_size % world.size == 0 and tail % world.size == 0

    def _end(self, run: Run) -> int:
        return end_of_epoch(run.start, len(self._dataset), self._batch_size, self._drop_last)

    def _lookup(self, run: Run) -> Callable[[Indices], Indices]:
        if self._shuffle:
            return Permutation(len(self._dataset), (run.seed, run.epoch))
        return lambda positions: positions

    def _tasks(self, run: Run) -> Iterator[Task]:
        lookup, end, size = self._lookup(run), self._end(run), self._batch_size
        block = max(1, BLOCK * run.size // size) * size
        for first in range(run.start, end, block):
            stop = min(first + block, end)
            indices: list[int] = lookup(own_positions(first, stop, size, run.rank, run.size)).tolist()
            taken = 0
            for at in range(first, stop, size):
                count = len(share(min(size, stop - at), run.rank, run.size))
                like = None if count else int(lookup(np.array([at]))[0])
                yield Task(run, at, indices[taken : taken + count], like)
                taken += count


def moment(run: Run) -> str:
    """Say where in the training a run begins, so that ranks can compare."""
    return f"epoch {run.epoch} from position {run.start}, seed {run.seed}"
