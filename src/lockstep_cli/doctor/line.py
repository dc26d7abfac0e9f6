"""What is said of one thing: fine, doubtful or broken, and what to do about it."""

from collections.abc import Iterable
from typing import NamedTuple

STATES = ("fine", "doubtful", "broken")
"""From good to bad. Doubtful: it works, but slower than it could, or not in every case."""


class Line(NamedTuple):
    """One line of the page.

    Attributes:
        about: The thing looked at.
        state: One of `STATES`.
        found: What there is.
        remedy: What to do, in one sentence; empty where nothing has to be done.
    """

    about: str
    state: str
    found: str
    remedy: str = ""


def fine(about: str, found: str) -> Line:
    """A line on what is as it should be."""
    return Line(about, "fine", found)


def doubtful(about: str, found: str, remedy: str) -> Line:
    """A line on what works, but slower than it could, or not in every case."""
    return Line(about, "doubtful", found, remedy)


def broken(about: str, found: str, remedy: str) -> Line:
    """A line on what stops a run."""
    return Line(about, "broken", found, remedy)


def worst(lines: Iterable[Line]) -> str:
    """The worst state among lines.

    Example:
        >>> worst([fine("a", "1"), doubtful("b", "2", "Do it.")])
        'doubtful'
    """
    return max((line.state for line in lines), key=STATES.index, default="fine")


def size(bytes_: float) -> str:
    """Write a number of bytes as people do.

    Example:
        >>> size(64 * 2**20), size(2.5 * 2**30), size(0)
        ('64 MiB', '2.5 GiB', '0 MiB')
    """
    return f"{bytes_ / 2**30:.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:.0f} MiB"
