"""A progress bar on rank 0, counting the samples of the whole world."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import Tensor

from lockstep.collectives.nested import leaves
from lockstep.world import current

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

T = TypeVar("T")

_REFRESH = 0.1  # seconds between two pictures of the bar
_LINES = 30.0  # seconds between two lines where there is no terminal


def progress(loader: Iterable[T], description: str = "") -> "Progress[T]":
    """Iterate over a loader with a progress bar on rank 0: batches, samples per second over all ranks, time left.

    Without a terminal it prints a line now and then instead. Goes to stderr.

    Args:
        loader: A `lockstep.DataLoader`, or anything that can be iterated.
        description: Stands before the bar.

    Returns:
        An iterable of the same batches, with ``set(**numbers)`` for what should stand behind the bar.

    Example:
        >>> import lockstep
        >>> bar = lockstep.progress([1.0, 0.5], "epoch 3")
        >>> for loss in bar:
        ...     bar.set(loss=loss)
    """
    return Progress(loader, description)


class Progress(Generic[T]):
    """What `progress` gives."""

    def __init__(self, loader: Iterable[T], description: str) -> None:
        self._loader, self._description = loader, description
        self._numbers: dict[str, Any] = {}
        self._world = current()

    def set(self, **numbers: float | Tensor) -> None:
        """Show these numbers, as this rank has them; a tensor is read only when the picture changes."""
        # Detached, or the last loss would keep its graph alive into the next step.
        self._numbers.update({name: x.detach() if isinstance(x, Tensor) else x for name, x in numbers.items()})

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        if not self._world.is_main:
            yield from self._loader
            return
        total = len(self._loader) if isinstance(self._loader, Sized) else None
        picture: Picture = Bar(self._description, total) if sys.stderr.isatty() else Lines(self._description, total)
        count, drawn = Count(), time.monotonic()
        try:
            for batch in self._loader:
                yield batch
                count.add(batch, self._world.size)
                if time.monotonic() - drawn >= picture.every:
                    picture.draw(count, self._numbers)
                    drawn = time.monotonic()
        finally:
            picture.draw(count, self._numbers)
            picture.close()


class Count:
    """Batches and samples so far, and since when."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.batches = 0
        self.samples = 0

    def add(self, batch: object, size: int) -> None:
        """Count a batch: the leading dimension of its first tensor here, times the ranks."""
        self.batches += 1
        first = next((leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
        self.samples += size * (1 if first is None else len(first))

    @property
    def speed(self) -> str:
        """Samples per second over all ranks."""
        return f"{self.samples / max(time.monotonic() - self.start, 1e-9):,.0f} samples/s"


class Picture(Protocol):
    """Something that shows how far it is."""

    every: float

    def draw(self, count: Count, numbers: dict[str, Any]) -> None:
        """Show the state."""
        ...

    def close(self) -> None:
        """The last picture stays."""
        ...


class Bar:
    """A bar in a terminal."""

    every = _REFRESH

    def __init__(self, description: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            "{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            "{task.fields[speed]}",
        )
        # No refreshing thread: it would be one more thing alive when data workers are forked.
        self._progress: RichProgress = Progress(
            *columns, TextColumn("{task.fields[numbers]}"), console=Console(stderr=True), auto_refresh=False
        )
        self._progress.start()
        self._task: TaskID = self._progress.add_task(description, total=total, speed="", numbers="")

    def draw(self, count: Count, numbers: dict[str, Any]) -> None:
        """Draw the bar again."""
        self._progress.update(
            self._task, completed=count.batches, speed=count.speed, numbers=show(numbers), refresh=True
        )

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class Lines:
    """A line now and then."""

    every = _LINES

    def __init__(self, description: str, total: int | None) -> None:
        self._description, self._total = description, total

    def draw(self, count: Count, numbers: dict[str, Any]) -> None:
        """Print one line."""
        of = f"/{self._total}" if self._total is not None else ""
        words = (self._description, f"{count.batches}{of}", count.speed, show(numbers))
        sys.stderr.write("  ".join(word for word in words if word) + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing to tidy."""


def show(numbers: dict[str, Any]) -> str:
    """Names and numbers, short.

    Example:
        >>> show({"loss": 0.123456, "lr": 3e-05, "epoch": 3})
        'loss 0.1235  lr 3e-05  epoch 3'
    """
    return "  ".join(f"{name} {float(value):.4g}" for name, value in numbers.items())
