"""Process groups: ``"nccl"`` is shared memory, and ranks meet without a port where the script names one."""

import functools
import hashlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lockstep.compat.rehearsal.entry import Entry
from lockstep.compat.rehearsal.settings import Settings
from lockstep.errors import UsageError

_AGENT = "TORCHELASTIC_RUN_ID"
"""Set where torch's agent, and so the launcher, has started this process and keeps a store for it."""

_THIRTY_MINUTES = timedelta(minutes=30)


def entries(settings: Settings, watch: Callable[[Any], None]) -> list[Entry]:
    """What starts groups and asks for them.

    Args:
        settings: Of this rehearsal.
        watch: Called with every group that is made.
    """
    begin, split, name_of_backend = dist.init_process_group, dist.new_group, dist.get_backend
    signature = inspect.signature(begin)
    meetings: Counter[str] = Counter()
    asked: dict[Any, str] = {}

    @functools.wraps(begin)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        wish = given.arguments
        wish["pg_options"] = wish["device_id"] = None
        wish["rank"], wish["world_size"] = int(wish["rank"]), int(wish["world_size"])  # some scripts give strings
        backends = transports(wish["backend"])
        if len(backends) > 1 and wish["store"] is None:
            wish["store"], wish["rank"], wish["world_size"] = _meet(settings, wish, meetings)
            wish["init_method"] = None
        _begin(begin, given, backends)
        asked[dist.group.WORLD] = str(args[0] if args else kwargs.get("backend") or "nccl")
        watch(dist.group.WORLD)

    @functools.wraps(split)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **more: Any) -> Any:
        more = {name: value for name, value in more.items() if name not in ("pg_options", "device_id")}
        made = split(ranks, timeout, backend and transports(backend)[0], **more)
        watch(made)
        return made

    def get_backend(group: Any = None) -> str:
        """To the script, what it has asked for; to torch and lockstep, which act on it, what it is."""
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in ("torch", "lockstep"):
            return name_of_backend(group)
        name = asked.get(group or dist.group.WORLD, "")
        return name if name == "nccl" else name_of_backend(group)

    return [
        Entry("torch.distributed", "init_process_group", init_process_group),
        Entry("torch.distributed.distributed_c10d", "init_process_group", init_process_group),
        Entry("torch.distributed", "new_group", new_group),
        Entry("torch.distributed.distributed_c10d", "new_group", new_group),
        Entry("torch.distributed", "get_backend", get_backend),
        Entry("torch.distributed", "is_nccl_available", lambda: True),
    ]


def transports(backend: str | None) -> tuple[str, ...]:
    """What stands for a backend; more than one is tried in turn.

    Example:
        >>> transports("gloo"), transports("nccl")[-1], transports("cpu:gloo,cuda:nccl")[-1]
        (('gloo',), 'gloo', 'gloo')
    """
    if backend is not None and "nccl" not in backend.lower():
        return (backend,)
    return ("shm", "gloo") if sys.platform == "linux" else ("gloo", "gloo")


def _begin(begin: Callable[..., None], given: inspect.BoundArguments, backends: tuple[str, ...]) -> None:
    store = given.arguments["store"]
    for backend in backends:
        given.arguments["backend"] = backend
        if store is not None:
            given.arguments["store"] = dist.PrefixStore(backend, store)  # type: ignore[attr-defined]
        try:
            begin(*given.args, **given.kwargs)
        except UsageError:  # shm says so on every rank
            if backend == backends[-1]:
                raise
        else:
            return


def _meet(settings: Settings, wish: dict[str, Any], meetings: Counter[str]) -> tuple[Any, int, int]:
    """Find the other ranks.

    A fixed port may be taken, and torch refuses the multicast addresses that old scripts have. Since all ranks are on
    this machine and have a folder in common, they meet in a file there; a port is only used where the agent listens.
    """
    url = wish["init_method"] or "env://"
    timeout = wish["timeout"] or _THIRTY_MINUTES
    if url.startswith("file://") or not settings.folder or (url == "env://" and _AGENT in os.environ):
        return next(rendezvous(url, wish["rank"], wish["world_size"], timeout=timeout))  # type: ignore[no-any-return]
    rank = wish["rank"] if wish["rank"] >= 0 else _number("RANK")
    size = wish["world_size"] if wish["world_size"] > 0 else _number("WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(f"init_process_group: rank {rank} of {size}; ranks count from 0 to world_size - 1.")
    meetings[url] += 1
    name = f"{url} {size} {meetings[url]} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    path = Path(settings.folder) / f"meeting-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    store = dist.FileStore(str(path), size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    return store, rank, size


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except KeyError:
        raise UsageError(f"init_process_group: no rank and world_size were given, and {name} is not set.") from None
