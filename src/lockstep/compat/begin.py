"""What a rank does before an old script begins: the one call that the launcher makes."""

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from lockstep.compat import meeting, rank_argument, slurm
from lockstep.compat.choose import Compat
from lockstep.compat.mends import loading, table
from lockstep.compat.mends.book import Book
from lockstep.errors import UsageError

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
              "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")  # fmt: skip


def begin(compat: Compat, *, one_node: bool) -> None:
    """Put everything in place, in a rank that has torchrun's variables."""
    rank, local_rank = os.environ["RANK"], os.environ["LOCAL_RANK"]
    if compat.own_ranks:
        for name in [name for name in os.environ if name in _LAUNCHERS or name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        _spawn_at_least_one()
    else:
        rank_argument.watch_parsers(local_rank)
        meeting.meet_at_the_launchers(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), one_node)
        if compat.slurm and one_node:
            os.environ.update(slurm.variables(os.environ))
    _install_apex()
    book = Book()
    table.put_in_place(compat.mends, book)
    torch = sys.modules["torch"]
    torch.load = (loading.trusting if compat.trust else loading.naming_the_classes)(torch.load)  # type: ignore[attr-defined]
    if rank == "0":
        atexit.register(tell, book)


def _install_apex() -> None:
    if importlib.util.find_spec("lockstep.compat.install"):
        importlib.import_module("lockstep.compat.install").install()


def tell(book: Book) -> None:
    """Say at the end what was mended."""
    lines = book.lines()
    if lines:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def _spawn_at_least_one() -> None:
    """Torch's spawn of no process comes back at once, and a script that trained nothing seems to have ended well."""
    mp: Any = importlib.import_module("torch.multiprocessing")
    original: Callable[..., Any] = mp.spawn

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **named: Any) -> Any:
        if nprocs == 0:
            raise UsageError(
                "mp.spawn(nprocs=0) starts nothing: torch sees no GPU here. To rehearse the script without one, write: "
                "lockstep run --device cpu -n 2"
            )
        return original(fn, args, nprocs, *more, **named)

    mp.spawn = spawn
