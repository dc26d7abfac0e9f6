"""Puts a rehearsal in place: in a rank's first lines, and in every process that a rank starts."""

import os
import sys
from collections.abc import Callable, Collection

import torch._dynamo  # noqa: F401  every optimizer imports it; it lists torch's functions by identity, so before any is replaced

from lockstep.compat.rehearsal import (
    accelerator,
    calls,
    compiling,
    factories,
    follow,
    groups,
    loading,
    memory,
    moving,
    one_process,
    precision,
    processes,
    randomness,
    streams,
    typed,
)
from lockstep.compat.rehearsal.devices import Devices
from lockstep.compat.rehearsal.entry import Entry, put_in_place
from lockstep.compat.rehearsal.follow import Follow, Misplaced
from lockstep.compat.rehearsal.report import watching
from lockstep.compat.rehearsal.settings import Settings


def entries(settings: Settings, mode: Follow, watch: watching.Watch) -> list[Entry]:
    """Everything that is replaced."""
    devices = Devices(settings.devices)
    cuda = [*calls.entries(devices, settings.hide_cuda), *streams.entries(devices)]
    return [
        *factories.entries(devices),
        *moving.entries(devices),
        *cuda,
        *accelerator.entries(cuda, settings.hide_cuda),
        *memory.entries(devices),
        *randomness.entries(devices),
        *typed.entries(devices),
        *precision.entries(),
        *loading.entries(devices),
        *follow.entries(mode),
        *one_process.entries(devices),
        *groups.entries(settings, watch.collectives.of_group),
        *processes.entries(settings, mode),
        *compiling.entries(),
        *watching.entries(watch),
    ]


def install(settings: Settings, leaving_out: Collection[str] = ()) -> Callable[[], None]:
    """Begin a rehearsal in this process.

    Args:
        settings: What it is told.
        leaving_out: Entries that are not replaced, by name; for tests.

    Returns:
        What ends it, in the thread that began it; a rank never does.
    """
    mode = Follow(tell)
    watch = watching.Watch(settings, mode)
    undo = put_in_place(entry for entry in entries(settings, mode, watch) if str(entry) not in leaving_out)
    stop_watching = watch.start()
    mode.__enter__()  # type: ignore[no-untyped-call]

    def end() -> None:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        stop_watching()
        undo()

    return end


def tell(what: Misplaced) -> None:
    """Say once for each place what a GPU would refuse."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"lockstep: {what.place}: {what.what}; a GPU would refuse it\n")
