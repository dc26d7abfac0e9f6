"""Gradients that stayed on this rank: the engine that averages gradients knows of them, and who stored them asks.

Mixed precision takes gradients out of ``.grad`` between two backwards, where an engine would look for them. The two do
not know each other; they meet here.
"""

import weakref
from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor


class Engine(Protocol):
    """What averages the gradients of some parameters over ranks."""

    syncing: bool

    def owns_any(self, ids: Collection[int]) -> bool:
        """Whether some of the parameters with these ids are its own."""
        ...

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over its ranks, in place."""
        ...


engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def engines_of(params: Collection[Tensor]) -> list[Engine]:
    """Those that own some of these parameters."""
    ids = {id(param) for param in params}
    return [engine for engine in engines if engine.owns_any(ids)]
