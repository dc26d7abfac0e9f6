"""Which checkpoints there are, by name, and which may go. Pure."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lockstep.errors import UsageError

_NAME = re.compile(r"(\d{6,12})-step-(\d{1,18})")
_LEFTOVER = re.compile(r"\.\d{6,12}-step-\d{1,18}\.(partial|gone)")


class Name(NamedTuple):
    """A checkpoint's folder.

    Attributes:
        serial: Counts the checkpoints of a directory; a later one is newer, whatever its step.
        step: How many steps had been made.
    """

    serial: int
    step: int

    def __str__(self) -> str:
        return f"{self.serial:06d}-step-{self.step}"

    @property
    def partial(self) -> str:
        """What it is called until it is whole."""
        return f".{self}.partial"

    @property
    def gone(self) -> str:
        """What it is called while it is being removed."""
        return f".{self}.gone"


def read_names(names: Iterable[str]) -> list[Name]:
    """Find the checkpoints among the names in a directory, newest first.

    Example:
        >>> read_names(["000002-step-20", "notes.txt", "000010-step-15", ".000011-step-25.partial"])
        [Name(serial=10, step=15), Name(serial=2, step=20)]
    """
    found = (_NAME.fullmatch(name) for name in names)
    return sorted((Name(int(match[1]), int(match[2])) for match in found if match), reverse=True)


def leftovers(names: Iterable[str]) -> list[str]:
    """Find what a save or a removal that was killed has left.

    Example:
        >>> leftovers(["000002-step-20", ".000003-step-25.partial"])
        ['.000003-step-25.partial']
    """
    return [name for name in names if _LEFTOVER.fullmatch(name)]


class Best(NamedTuple):
    """How many checkpoints stay for their number, and which is the better one."""

    name: str
    most: int
    lowest: bool


def read_best(wish: Any) -> Best | None:
    """Read ``keep_best``.

    Example:
        >>> read_best(("loss", 1, "lowest"))
        Best(name='loss', most=1, lowest=True)
    """
    if wish is None:
        return None
    match wish:
        case (str(name), int(count)) if count > 0:
            return Best(name, count, lowest=False)
        case (str(name), int(count), "lowest" | "highest" as which) if count > 0:
            return Best(name, count, which == "lowest")
    raise UsageError(
        f"keep_best={wish!r}: write a name and how many, such as ('accuracy', 1) or ('loss', 1, 'lowest'), and give "
        f"the number with checkpoint.note(accuracy=...)."
    )


def to_prune(whole: Sequence[tuple[Name, dict[str, float]]], newest: Name, keep: int, best: Best | None) -> list[Name]:
    """Decide which checkpoints go, once ``newest`` is whole.

    Args:
        whole: Those with a manifest, with the numbers noted for each.
        newest: Stays, whatever else is said.
        keep: How many of the newest stay.
        best: Which stay besides.

    Example:
        >>> whole = [(Name(n, n), {"accuracy": a}) for n, a in enumerate([0.5, 0.9, 0.7, 0.8])]
        >>> to_prune(whole, Name(3, 3), keep=1, best=Best("accuracy", 1, lowest=False))
        [Name(serial=2, step=2), Name(serial=0, step=0)]
    """
    ordered = sorted(whole, reverse=True, key=lambda pair: pair[0])
    stay = {newest, *(name for name, _ in ordered[:keep])}
    if best is not None:
        noted = [(notes[best.name], name) for name, notes in ordered if _is_number(notes.get(best.name))]
        noted.sort(key=lambda pair: (pair[0] if best.lowest else -pair[0], -pair[1].serial))
        stay |= {name for _, name in noted[: best.most]}
    return [name for name, _ in ordered if name not in stay]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)
