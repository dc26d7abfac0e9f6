"""Which of the groups of the same ranks a group is: all its ranks make them in the same order."""

from collections import Counter
from collections.abc import Sequence

_made: Counter[tuple[str, ...]] = Counter()


def count_group(kind: str, names: Sequence[int]) -> int:
    """Give a new group its number among those of its kind and ranks, from 1; the same on each of them."""
    key = (kind, *map(str, names))
    _made[key] += 1
    return _made[key]
