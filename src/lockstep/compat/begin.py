"""What a rank does before an old script begins: the one call that the launcher makes."""

import atexit
import importlib
import multiprocessing
import os
import sys
from multiprocessing import util
from typing import Any

from lockstep.compat import children, meeting, rank_argument, slurm
from lockstep.compat.choose import Compat
from lockstep.compat.install import install
from lockstep.compat.mends import loading, table
from lockstep.compat.mends.book import Book


def begin(compat: Compat, *, one_node: bool) -> None:
    """Put everything in place, in a rank that has torchrun's variables."""
    is_main = os.environ.get("RANK", "0") == "0"
    if compat.own_ranks:
        children.forget_launcher(os.environ)
        children.refuse_to_spawn_nothing()
    elif "RANK" in os.environ:
        rank_argument.watch_parsers(os.environ["LOCAL_RANK"])
        meeting.meet_at_the_launchers(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), one_node)
        if compat.slurm and one_node:
            os.environ.update(slurm.variables(os.environ))
    book = begin_here(compat)
    if is_main:
        atexit.register(tell, book)


def begin_here(compat: Compat) -> Book:
    """Put in place what any process of the script needs; give the book of what is mended in it."""
    install()
    book = Book()
    table.put_in_place(compat.mends, book)
    torch: Any = importlib.import_module("torch")
    torch.load = (loading.trusting if compat.trust else loading.naming_the_classes)(torch.load)
    children.follow(compat)
    # multiprocessing leaves atexit out in the processes that it starts; this runs in these only.
    util.Finalize(None, _tell_of_first_child, args=(book,), exitpriority=0)
    return book


def _tell_of_first_child(book: Book) -> None:
    if multiprocessing.current_process().name in ("SpawnProcess-1", "ForkServerProcess-1"):
        tell(book)


def tell(book: Book) -> None:
    """Say at the end what was mended."""
    lines = book.lines()
    if lines:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
