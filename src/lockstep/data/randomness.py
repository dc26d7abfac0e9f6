"""Random numbers of python, numpy and torch: planted from plain keys, borrowed and given back."""

import random
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from lockstep.world.seeds import derive_seed


def plant(*key: int) -> None:
    """Seed python, numpy and torch (CPU) from a key."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class Borrowed:
    """Random numbers of its own for a piece of code that draws from the global generators.

    Inside the ``with`` block the generators stand where the last block left them, at first where the key puts them;
    outside they are as if nothing had happened. So a sampler or a stream draws the same on every rank, whatever else a
    rank draws.

    Args:
        key: What fixes the numbers.
        generators: Generators of torch that the code has besides the global ones.

    Example:
        >>> draws = Borrowed((0, 1))
        >>> with draws:
        ...     first = random.random()
        >>> again = Borrowed((0, 1))
        >>> with again:
        ...     first == random.random()
        True
    """

    def __init__(self, key: tuple[int, ...], generators: Sequence[torch.Generator] = ()) -> None:
        self._key = key
        self._generators = list(generators)  # besides torch's own, which must not travel to a worker with this
        self._own: list[Any] = []
        self._callers: list[Any] = []

    def __enter__(self) -> None:
        self._callers = self._states()
        if self._own:
            self._restore(self._own)
        else:
            plant(*self._key)
            for number, generator in enumerate(self._generators):
                generator.manual_seed(derive_seed(*self._key, number, generator.initial_seed()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = self._states()
        self._restore(self._callers)

    def _states(self) -> list[Any]:
        return [random.getstate(), np.random.get_state(), *(each.get_state() for each in self._all())]

    def _restore(self, states: list[Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for generator, state in zip(self._all(), states[2:], strict=True):
            generator.set_state(state)

    def _all(self) -> list[torch.Generator]:
        return [torch.default_generator, *self._generators]
