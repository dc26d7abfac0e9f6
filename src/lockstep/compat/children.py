"""Processes that a script starts by ``spawn``: they begin as the rank did, before the script is imported there."""

import importlib
import multiprocessing.spawn
from collections.abc import Callable
from typing import Any

from lockstep.compat.choose import Compat
from lockstep.errors import UsageError


class Ready:
    """Puts everything in place where it is unpickled."""

    def __init__(self, compat: Compat) -> None:
        self._compat = compat

    def __reduce__(self) -> Any:
        return _get_ready, (tuple(self._compat),)


def _get_ready(compat: tuple[Any, ...]) -> None:
    from lockstep.compat.begin import begin_here

    begin_here(Compat(*compat))


def follow(compat: Compat) -> None:
    """Have new interpreters of multiprocessing begin like this one."""
    prepare = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        # A key that multiprocessing does not know; it is unpickled before the script, which is imported by another.
        return {"lockstep": Ready(compat), **prepare(name)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def refuse_to_spawn_nothing() -> None:
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
