"""What is wrong in a script's text: ``async`` is Python's own word since 3.7, and was an argument of torch's."""

import io
import itertools
import runpy
import sys
import tokenize
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from lockstep.compat.mends.book import shown
from lockstep.compat.mends.row import Mend, Note, Undo, replacement

_NEXT = ("def", "for", "with")


def renamed(source: str) -> tuple[str, list[int]]:
    """Write ``non_blocking`` for every ``async`` that is a name.

    Returns:
        The text, and the numbers of the lines that changed.

    Example:
        >>> renamed("x = x.cuda(async=True)  # async")
        ('x = x.cuda(non_blocking=True)  # async', [1])
        >>> renamed("async def f(): pass")
        ('async def f(): pass', [])
    """
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    found = [
        token.start
        for token, after in itertools.pairwise(tokens)
        if token.type in _NAMES and token.string == "async" and after.string not in _NEXT
    ]
    for row, column in reversed(found):
        line = lines[row - 1]
        lines[row - 1] = f"{line[:column]}non_blocking{line[column + len('async') :]}"
    return "".join(lines), sorted({row for row, _ in found})


_NAMES = (tokenize.NAME, getattr(tokenize, "ASYNC", tokenize.NAME))


def _reading_async(original: Any, note: Note) -> Any:
    def source_to_code(self: Any, data: Any, path: Any, **named: Any) -> Any:
        try:
            return original(self, data, path, **named)
        except SyntaxError:
            try:
                mended, rows = renamed(data if isinstance(data, str) else data.decode())
                code = original(self, mended, path, **named)
            except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
                rows = []
            if not rows:
                raise
            sys.dont_write_bytecode = True  # else the next python, without this, would find it compiled
            for row in rows:
                note(f"{shown(str(path))}:{row}")
            return code

    return source_to_code


def _through_loader(original: Any, note: Note) -> Any:
    """Multiprocessing has runpy read the script, which compiles by itself. A private name: Python 3.10 to 3.14."""
    del note  # the loader does

    def get_code_from_file(*args: Any) -> Any:
        try:
            return original(*args)
        except SyntaxError:
            path = args[-1]
            code = SourceFileLoader("__main__", path).source_to_code(Path(path).read_bytes(), path)
            return code if len(args) == 1 else (code, path)  # until Python 3.11 it had the run's name, and gave both

    return get_code_from_file


def _put(note: Note) -> Undo:
    undo = replacement(lambda: SourceFileLoader, "source_to_code", _reading_async)(note)
    undo_runpy = replacement(lambda: runpy, "_get_code_from_file", _through_loader)(note)

    def undo_both() -> None:
        undo_runpy()
        undo()

    return undo_both


MENDS = (
    Mend(
        old="async=True",
        gone="Python 3.7",
        today="non_blocking=True",
        example="def move(x, async=False):\n    return x.to('cpu', async=async)\n"
        "import torch\nassert move(torch.ones(1), async=True).item() == 1",
        put=_put,
    ),
)
