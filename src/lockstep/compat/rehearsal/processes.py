"""Processes and threads that the script starts: the rehearsal goes on in them."""

import functools
import multiprocessing
import multiprocessing.spawn
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes as start

from lockstep.compat.children import Ready, forget_launcher
from lockstep.compat.rehearsal.entry import Entry
from lockstep.compat.rehearsal.follow import Follow
from lockstep.compat.rehearsal.report import facts
from lockstep.compat.rehearsal.settings import Settings
from lockstep.errors import UsageError


def _get_ready(settings: tuple[Any, ...]) -> None:
    from lockstep.compat.rehearsal.install import install

    install(Settings(*settings))


class AsRank:
    """The function of ``mp.spawn``, in its process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        # multiprocessing hands "spawn" on to what this process starts, so that a loader's worker would take seconds.
        multiprocessing.set_start_method("fork", force=True)
        return self._function(*args)


def entries(settings: Settings, mode: Follow) -> list[Entry]:
    """``mp.spawn``, new interpreters and new threads."""
    prepare, begin = multiprocessing.spawn.get_preparation_data, threading.Thread.start

    def start_processes(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        if nprocs < 1:
            raise UsageError(
                f"mp.spawn(nprocs={nprocs}) would start nothing, train nothing and end as if all were well. "
                f"Without --hide-cuda, torch.cuda.device_count() is the number of ranks, {settings.devices}."
            )
        leave_to_rank_0()
        started = start(AsRank(fn), args, nprocs, join, daemon, start_method)  # type: ignore[no-untyped-call]
        if join and settings.steps and any(one.steps >= settings.steps for one in facts.read_all(settings.folder)):
            sys.exit(0)  # the ranks ended after their last step, and left nothing that the rest could go on with
        return started

    def get_preparation_data(name: str) -> dict[str, Any]:
        # A key that multiprocessing does not know; it is unpickled before multiprocessing acts upon the others.
        return {**prepare(name), "rehearsal": Ready(_get_ready, tuple(settings))}

    def start_thread(self: threading.Thread) -> None:
        run = self.run

        def run_followed() -> None:
            with mode:
                run()

        self.run = run_followed  # type: ignore[method-assign]
        begin(self)

    return [
        Entry("torch.multiprocessing", "spawn", functools.partial(start_processes)),
        Entry("torch.multiprocessing", "start_processes", start_processes),
        Entry("multiprocessing.spawn", "get_preparation_data", get_preparation_data),
        Entry("threading:Thread", "start", start_thread),
    ]


def leave_to_rank_0() -> None:
    """Where a launcher has started several of a script that starts its ranks itself, one of them is enough."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK", "0") != "0":
        sys.exit(0)
    forget_launcher(os.environ)
