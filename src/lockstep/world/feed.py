"""Where the batches come from, for parts that do not know each other: loaders tell, whoever takes steps listens."""

import threading
import weakref
from collections.abc import Callable

import torch


class Feed:
    """The data loader that gave the last batch, and who wants to know when its epoch is over.

    Attributes:
        current: That loader; None before the first batch. Weak, as a loader that nobody uses any more takes its workers
            with it.
        given: How many batches loaders have given to train on, and how often they came to their end. Counted where
            gradients are on, and in the main thread: one that draws ahead is further on some ranks than on others.

    Example:
        >>> class Steps:
        ...     def end_of(self, loader):
        ...         print("the end of", loader)
        >>> class Loader:
        ...     def __repr__(self):
        ...         return "train"
        >>> steps, feed, train = Steps(), Feed(), Loader()
        >>> feed.call_at_end(steps.end_of)
        >>> feed.gives(train)
        >>> feed.current()
        train
        >>> feed.ended(train)
        the end of train
    """

    def __init__(self) -> None:
        self.current: weakref.ref[object] | None = None
        self.given = 0
        self._listeners: list[weakref.WeakMethod[Callable[[object], None]]] = []

    @property
    def shared(self) -> bool:
        """Whether there is, or was, more than one who listens."""
        return len(self._listeners) > 1

    def gives(self, loader: object) -> None:
        """A loader is about to give a batch."""
        self.current = weakref.ref(loader)
        self._count()

    def ended(self, loader: object) -> None:
        """A loader's epoch is over."""
        self._count()
        for listener in self._listeners:
            call = listener()
            if call is not None:
                call(loader)

    def call_at_end(self, method: Callable[[object], None]) -> None:
        """Call a method with every loader whose epoch is over, as long as the method's object lives."""
        alive = [listener for listener in self._listeners if listener() is not None]
        self._listeners = [*alive, weakref.WeakMethod(method)]

    def _count(self) -> None:
        self.given += torch.is_grad_enabled() and threading.current_thread() is threading.main_thread()
