"""The table of what is mended, and putting it in place."""

import re
from collections.abc import Callable, Iterable
from functools import partial

from lockstep.compat.mends import (
    loading,
    numpy_names,
    python_names,
    schedulers,
    sources,
    tensors,
    torch_functions,
    torch_modules,
)
from lockstep.compat.mends.book import Book
from lockstep.compat.mends.row import Mend

TABLE: tuple[Mend, ...] = (
    *sources.MENDS,
    *python_names.MENDS,
    *numpy_names.MENDS,
    *torch_modules.MENDS,
    *torch_functions.MENDS,
    *tensors.MENDS,
    *schedulers.MENDS,
    *loading.MENDS,
)


def wanted(texts: Iterable[str]) -> list[str]:
    """Names of the mends that a script with these texts may need.

    Example:
        >>> "loss.data[0]" in wanted(["total += loss.data[0]"]), "loss.data[0]" in wanted(["total += loss.item()"])
        (True, False)
    """
    everything = "\n".join(texts)
    return [mend.old for mend in TABLE if not mend.sign or re.search(mend.sign, everything)]


def put_in_place(names: Iterable[str], book: Book) -> Callable[[], None]:
    """Put mends in place, by name.

    Args:
        names: As `wanted` gives them.
        book: Where it is noted which are used.

    Returns:
        What takes them away again.
    """
    chosen = set(names)
    undo = [mend.put(partial(book.enter, mend)) for mend in TABLE if mend.old in chosen]

    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all
