"""Processes that a script starts by ``spawn``: they begin as the rank did, before the script is imported there."""

import importlib
import multiprocessing.spawn
from collections.abc import Callable, MutableMapping
from typing import Any

from lockstep.compat.choose import Compat
from lockstep.errors import UsageError

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
              "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")  # fmt: skip


def forget_launcher(environ: MutableMapping[str, str]) -> None:
    """Take away what a launcher tells a rank, and a script that starts its ranks by itself must not see.

    Example:
        >>> environ = {"RANK": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/root"}
        >>> forget_launcher(environ)
        >>> environ
        {'HOME': '/root'}
    """
    for name in [name for name in environ if name in _LAUNCHERS or name.startswith("TORCHELASTIC_")]:
        del environ[name]


class Ready:
    """Calls a function where it is unpickled: in a new process, before the script is imported there."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def _get_ready(compat: tuple[Any, ...]) -> None:
    from lockstep.compat.begin import begin_here

    begin_here(Compat(*compat))


def follow(compat: Compat) -> None:
    """Have new interpreters of multiprocessing begin like this one."""
    prepare = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        # A key that multiprocessing does not know; it is unpickled before the script, which is imported by another.
        return {"lockstep": Ready(_get_ready, tuple(compat)), **prepare(name)}

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
