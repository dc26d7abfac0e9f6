"""Learning rates that part: each rank steps with the same gradients, and goes its own way all the same.

A scheduler that follows a number of this rank's own (``ReduceLROnPlateau`` on its part of the validation), or that only
rank 0 steps, does that without a word. So the words of the next round have a number that is made of a rank's rates.
"""

from collections.abc import Sequence

from torch import Tensor

_MOST = 64  # so that the squares of what a thousand ranks say add up exactly in float32


def rates_of(groups: Sequence[dict[str, object]]) -> list[float]:
    """An optimizer's learning rates; a tensor on a device is left out, as reading it would wait for that."""
    found = (group.get("lr") for group in groups)
    return [float(lr) for lr in found if isinstance(lr, float | int) or (isinstance(lr, Tensor) and lr.is_cpu)]


def short_hash(rates: Sequence[float], steps: int) -> int:
    """A number below 64 for rates; another one in other steps, so that different ones are not taken for equal for long.

    Example:
        >>> short_hash([0.1, 0.01], 7) == short_hash([0.1, 0.01], 7)
        True
        >>> [short_hash([0.1], step) == short_hash([0.2], step) for step in range(4)]
        [False, False, False, False]
    """
    return hash((steps % 4, *rates)) % _MOST


def differ(total: float, squares: float, ranks: float) -> bool:
    """Whether ranks' numbers, of which these are the sums, are not all the same.

    Example:
        >>> differ(3.0 + 3.0, 9.0 + 9.0, 2), differ(3.0 + 4.0, 9.0 + 16.0, 2)
        (False, True)
    """
    return total * total != squares * ranks
