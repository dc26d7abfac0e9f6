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
    carried0: float = 0.0
    carried1: float = 0.0
    carried2: float = 0.0

    @property
    def carried(self) -> tuple[float, ...]:
        """The sums of what was carried."""
        return self[-CARRIED:]


WORDS = 4 + STEPS + CARRIED


def say(*, changed: bool, late: bool, failed: bool, inactive: bool, steps: int) -> Control:
    """Put a rank's state into words; a rank that is not active has no step of its own."""
    one_hot = [0.0] * STEPS
    one_hot[steps % STEPS] = float(not inactive)
    return Control(float(changed), float(late), float(failed), float(inactive), *one_hot)


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


def explain_steps(rank: int, ranks: Sequence[int], counts: Sequence[Sequence[int]]) -> str:
    """Say how ranks differ that are not in the same step.

    Args:
        rank: Who says so.
        ranks: All, as numbers in the world.
        counts: Each one's optimizer steps, and batches of a `lockstep.DataLoader`.

    Example:
        >>> explain_steps(1, [0, 1], [[7, 8], [7, 9]])[101:153]
        'so far: rank 0: 7, rank 1: 7; batches: rank 0: 8, ra'
    """
    steps, batches = (
        ", ".join(f"rank {one}: {count[column]}" for one, count in zip(ranks, counts, strict=True)) for column in (0, 1)
    )
    skipped = len({count[1] for count in counts}) > 1
    return (
        f"rank {rank}: this backward met another step's on other ranks; optimizer steps taken, or left by an error, so "
        f"far: {steps}{f'; batches: {batches}' if skipped else ''}. Every rank must take the same steps: where one has "
        f"no data, or skips a batch, let it call lockstep.sync_gradients(model) and the optimizer all the same"
        f"{', or update.backward(losses) with its empty losses' if skipped else ''}."
    )
