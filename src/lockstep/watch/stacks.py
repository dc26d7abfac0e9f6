"""Where a thread is: the script's own line, the condition that it stands under, and the whole stack."""

import ast
import linecache
import os
import re
import sysconfig
import traceback
from types import FrameType
from typing import NamedTuple

_PATHS = sysconfig.get_paths()
_LIBRARY = tuple({os.path.join(_PATHS[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib")})  # noqa: PTH118
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # noqa: PTH118, PTH120
_LAUNCHER = os.path.join(_OURS, "launcher", "")  # noqa: PTH118
# By functions of torch's DataLoader and of pdb; private names, seen in torch 2.13 and Python 3.10 to 3.13.
_WAITS = {
    "_try_get_data": (
        "a wait for the next batch, which no worker of its DataLoader gives",
        os.path.join("torch", "utils", "data", "dataloader.py"),  # noqa: PTH118
    ),
    "interaction": ("the debugger, which waits for a command", "pdb.py"),
}
_DUMPED = re.compile(r'File "([^"]+)", line (\d+) in')
# Words by which a condition is known to be about who the process is.
_WHO = ("rank", "main", "master", "chief", "primary")


class Spot(NamedTuple):
    """Where a thread is.

    Attributes:
        place: File and line of the script's innermost frame, such as ``"train.py:61"``; empty if it has none.
        guard: The condition around that line, or around the call that led there.
        doing: The innermost function.
        inside: Whether the innermost frame is torch's or lockstep's: it waits, or computes, for them.
        names: Functions from the innermost outwards.
    """

    place: str
    guard: str
    doing: str
    inside: bool
    names: tuple[str, ...]


def find_spot(frame: FrameType) -> Spot:
    """Look at a thread's frames; they may move on while they are looked at."""
    frames = _frames(frame)
    own = [each for each in frames if _is_own(each.f_code.co_filename)]
    names = tuple(each.f_code.co_name for each in frames)
    place = f"{os.path.basename(own[0].f_code.co_filename)}:{own[0].f_lineno}" if own else ""  # noqa: PTH119
    if not frames:
        return Spot("", "", "", False, names)
    file = frames[0].f_code.co_filename
    inside = file.startswith(_OURS) or f"{os.sep}torch{os.sep}" in file
    doing = f"{frames[0].f_code.co_name} ({os.path.basename(file)}:{frames[0].f_lineno})"  # noqa: PTH119
    return Spot(place, find_guard(own), _said(own, doing, frames), inside, names)


def _said(own: list[FrameType], doing: str, frames: list[FrameType]) -> str:
    """The function, and the source line where the script calls something that has no frame, such as ``time.sleep``."""
    if own and own[0] is frames[0]:
        line = linecache.getline(own[0].f_code.co_filename, own[0].f_lineno).strip()
        return f"`{line}`" if line else own[0].f_code.co_name
    return next(filter(None, map(_waited_for, frames)), doing)


def _waited_for(frame: FrameType) -> str:
    """What a function is known to wait for; empty for all others."""
    words, file = _WAITS.get(frame.f_code.co_name, ("", ""))
    return words if words and frame.f_code.co_filename.endswith(file) else ""


def write_stack(frame: FrameType) -> str:
    """A thread's stack as Python writes it, indented."""
    frames = [(each, each.f_lineno) for each in reversed(_frames(frame))]
    lines = "".join(traceback.StackSummary.extract(iter(frames)).format()).splitlines()
    return "".join(f"  {line}\n" for line in lines)


def find_dumped(dump: str) -> str:
    r"""The script's innermost line in what Python's fault handler wrote; empty if there is none.

    Example:
        >>> find_dumped('Current thread 0x1:\\n  File "/a/train.py", line 7 in f\\n  File "/a/train.py", line 9 in g')
        'train.py:7'
    """
    current = dump.rpartition("Current thread")[2]
    own = next(((file, line) for file, line in _DUMPED.findall(current) if _is_own(file)), None)
    return f"{os.path.basename(own[0])}:{own[1]}" if own else ""  # noqa: PTH119


def find_guard(own: list[FrameType]) -> str:
    """The nearest condition that asks which rank this is; else the one that the innermost line stands under."""
    nearest = ""
    for depth, frame in enumerate(own):
        for test in conditions(_source(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_firstlineno):
            if any(word in test for word in _WHO):
                return test
            nearest = nearest or (test if depth == 0 else "")
    return nearest


def conditions(source: str, line: int, first: int = 0) -> list[str]:
    r"""Conditions that a line stands under, innermost first.

    Args:
        source: The file.
        line: The line's number, from 1.
        first: Where the function begins; what is around it is not a condition of this call.

    Example:
        >>> conditions("if rank == 0:\n    barrier()\nelse:\n    work()\n", 4)
        ['else of if rank == 0']
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and node.lineno >= first and "__name__" not in ast.unparse(node.test):
            for branch, words in ((node.body, "if"), (node.orelse, "else of if")):
                if branch and branch[0].lineno <= line <= (branch[-1].end_lineno or line):
                    found.append((branch[0].lineno, f"{words} {ast.unparse(node.test)}"))
    return [text for _, text in sorted(found, reverse=True)]


def _frames(frame: FrameType | None) -> list[FrameType]:
    """From the innermost outwards, up to what started the script."""
    frames: list[FrameType] = []
    while frame is not None and not frame.f_code.co_filename.startswith((_LAUNCHER, "<frozen runpy>")):
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_own(file: str) -> bool:
    return not file.startswith((*_LIBRARY, _OURS, "<frozen"))


def _source(file: str) -> str:
    return "".join(linecache.getlines(file))
