"""The few words that travel behind the last bucket of a round: does anything keep the ranks from going on as they are?"""

from collections.abc import Sequence
from typing import NamedTuple

STEPS = 4  # optimizer steps are told apart modulo this


class Control(NamedTuple):
    """What a rank says, or over how many ranks it was said.

    Summed over ranks in the bucket's dtype: counts of up to 256 ranks are exact even in bfloat16, and "some rank said it" always.
    """

    changed: float
    late: float
    failed: float
    inactive: float
    steps: tuple[float, ...]

    def words(self) -> list[float]:
        """Everything in a row."""
        return [self.changed, self.late, self.failed, self.inactive, *self.steps]


WORDS = 4 + STEPS


def say(*, changed: bool, late: bool, failed: bool, inactive: bool, steps: int) -> Control:
    """Put a rank's state into words; a rank that is not active has no step of its own."""
    one_hot = tuple(float(steps % STEPS == i and not inactive) for i in range(STEPS))
    return Control(float(changed), float(late), float(failed), float(inactive), one_hot)


def understand(words: Sequence[float]) -> Control:
    """Read the sums.

    Example:
        >>> both = [a + b for a, b in zip(say(changed=True, late=False, failed=False, inactive=False, steps=5).words(),
        ...                               say(changed=False, late=False, failed=False, inactive=False, steps=6).words())]
        >>> understand(both).changed, in_step(understand(both))
        (1.0, False)
    """
    changed, late, failed, inactive, *steps = words
    return Control(changed, late, failed, inactive, tuple(steps))


def in_step(control: Control) -> bool:
    """Whether all active ranks have taken the same number of optimizer steps (modulo `STEPS`)."""
    return sum(count > 0 for count in control.steps) <= 1
