"""Map-style data sets: local batches by index, in a worker or in the main process."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lockstep.data.empty import empty_batch
from lockstep.data.randomness import plant
from lockstep.data.tasks import Run, Task
from lockstep.data.workers import Seat, take

BATCH = 1  # what a seed is for, so that no two uses of one position share random numbers


class Samples(Dataset[Any]):
    """Makes the local batch of a task.

    Inside a worker the random numbers of each batch come from (seed, epoch, position, rank) alone: ranks, workers and
    epochs differ, and neither the number of workers nor resuming in the middle changes what a batch gets.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._run: Run | None = None
        self._in_worker = False

    def take_seat(self, worker: int, count: int) -> int:
        """Let the data set find itself, rather than this wrapper, in ``get_worker_info``."""
        take(Seat(worker, count, self.dataset, when_asked=lambda: None))
        return worker

    def __getitem__(self, task: Task) -> Any:
        if task.run != self._run:
            self._begin(task.run)
        if self._in_worker:
            plant(task.run.seed, task.run.epoch, task.at, task.run.rank, BATCH)
        if not task.indices:
            return empty_batch(self._fetch([task.like])[0], self._collate)
        return self._collate(self._fetch(task.indices))

    def _begin(self, run: Run) -> None:
        self._run = run
        self._in_worker = get_worker_info() is not None
        tell_epoch(self.dataset, run.epoch)

    def _fetch(self, indices: list[Any]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if many:
            found: list[Any] = many(indices)
            return found
        return [self.dataset[index] for index in indices]


def nested_sets(dataset: Any) -> Iterator[Any]:
    """Give a data set and what it wraps, as ``Subset`` and ``ConcatDataset`` do."""
    waiting, seen = [dataset], set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inner = vars(each) if hasattr(each, "__dict__") else {}
        waiting.append(inner.get("dataset"))
        waiting.extend(inner["datasets"] if isinstance(inner.get("datasets"), list | tuple) else ())


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` wherever a data set, or one that it wraps, has it."""
    for each in nested_sets(dataset):
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)
