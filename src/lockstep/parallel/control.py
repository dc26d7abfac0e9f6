"""The few words that travel behind the last bucket of a round: can the ranks go on as they are?"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 4  # optimizer steps and batches are told apart modulo this
CARRIED = 3  # numbers that the reducer adds up over ranks for whoever takes the steps


class Control(NamedTuple):
    """What a rank says; summed over ranks: how many of them said it.

    Attributes:
        changed: The model has changed.
        late: A gradient grew once more after its bucket had left.
        failed: The backward raised.
        inactive: This rank has no more data.
        step0: An active rank has taken a number of optimizer steps and batches that leaves this rest when divided by
            `STEPS`.
        step1: The same for the next rest.
        step2: And the next.
        step3: And the last.
        rated: Since the last round an optimizer step was made, of all parameters.
        rates: A short hash of its learning rates.
        squared_rates: The square of that.
        carried0: Whatever `Reducer.carry` was given.
        carried1: Its second number.
        carried2: Its third.
    """

    changed: float
    late: float
    failed: float
    inactive: float
    step0: float
    step1: float
    step2: float
    step3: float
    rated: float = 0.0
    rates: float = 0.0
    squared_rates: float = 0.0
    carried0: float = 0.0
    carried1: float = 0.0
    carried2: float = 0.0

    @property
    def carried(self) -> tuple[float, ...]:
        """The sums of what was carried."""
        return self[-CARRIED:]


WORDS = 4 + STEPS + 3 + CARRIED


def say(*, changed: bool, late: bool, failed: bool, inactive: bool, steps: int, rates: int | None = None) -> Control:
    """Put a rank's state into words; one that is not active has no step of its own, and ``rates`` may be None."""
    one_hot = [0.0] * STEPS
    one_hot[steps % STEPS] = float(not inactive)
    rated, rate = float(rates is not None), float(rates or 0)
    own = (float(changed), float(late), float(failed), float(inactive), *one_hot, rated, rate, rate * rate)
    return Control._make((*own, *(0.0,) * CARRIED))


@lru_cache(maxsize=8)  # the same few words come again and again, and a tensor costs more to make than to copy
def as_tensor(words: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """What travels; not to be written to."""
    return torch.tensor(words, dtype=dtype)


def understand(words: Sequence[float]) -> Control:
    """Read the sums of all ranks' words."""
    return Control(*words)


def in_step(heard: Control) -> bool:
    """Whether all active ranks have taken the same number of optimizer steps and batches (modulo `STEPS`).

    Example:
        >>> rest = dict(changed=False, late=False, failed=False, inactive=False)
        >>> one, other = say(**rest, steps=5), say(**rest, steps=6)
        >>> same, different = ([a + b for a, b in zip(one, row)] for row in (one, other))
        >>> in_step(understand(same)), in_step(understand(different))
        (True, False)
    """
    return sum(count > 0 for count in (heard.step0, heard.step1, heard.step2, heard.step3)) <= 1
