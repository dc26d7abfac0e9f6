"""Which mends were used, and on which line of the script: told once, at the end."""

import os
import sys
from pathlib import Path
from types import FrameType

from lockstep.compat.mends.row import Mend

_OURS = str(Path(__file__).parents[2])
_LIMIT = 3


class Book:
    """What was mended in this process."""

    def __init__(self) -> None:
        self._used: dict[Mend, dict[str, None]] = {}  # a mend's places, in order

    def enter(self, mend: Mend, place: str = "") -> None:
        """Note that a mend was used, where it was if nobody says otherwise."""
        self._used.setdefault(mend, {})[place or caller()] = None

    def lines(self) -> list[str]:
        r"""The report; empty if nothing was mended.

        Example:
            >>> book = Book()
            >>> book.enter(Mend("np.float", "numpy 1.24", "float", "", lambda note: note), "train.py:7")
            >>> print("\n".join(book.lines()))
            lockstep: mended 1 thing that this script uses and that is gone:
              train.py:7  np.float (gone since numpy 1.24); write: float
        """
        if not self._used:
            return []
        count = len(self._used)
        things, are = ("thing", "is") if count == 1 else ("things", "are")
        lines = [f"lockstep: mended {count} {things} that this script uses and that {are} gone:"]
        for mend, places in self._used.items():
            where = ", ".join([*list(places)[:_LIMIT], *(["..."] if len(places) > _LIMIT else [])])
            lines.append(f"  {where}  {mend.old} (gone since {mend.gone}); write: {mend.today}")
        return lines


def caller() -> str:
    """File and line of the nearest caller that is neither lockstep's, torch's nor python's own."""
    nearest = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OURS, "<")):
            place = f"{shown(path)}:{frame.f_lineno}"
            nearest = nearest or place
            if not _is_installed(path):
                return place
        frame = frame.f_back
    return nearest or "?"


def shown(path: str) -> str:
    """A path as short as it can be written from here."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _is_installed(path: str) -> bool:
    return "site-packages" in path or "dist-packages" in path or path.startswith(_STANDARD)


_STANDARD = str(Path(os.__file__).parent) + os.sep
