"""Checkpoints: files that were written on a GPU, and ``map_location="cuda:0"``."""

import functools
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.rehearsal.devices import Devices, mark
from lockstep.compat.rehearsal.entry import Entry


def entries(devices: Devices) -> list[Entry]:
    """Where storages go, and what loaded tensors say."""
    restore: Any = torch.serialization.default_restore_location
    load = torch.load

    def put_back(storage: Any, location: str) -> Any:
        return restore(storage, "cpu" if str(location).startswith("cuda") else location)

    @functools.wraps(load)
    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = load(f, map_location, *args, **kwargs)
        index = devices.index(map_location) if isinstance(map_location, (str, torch.device)) else None
        return found if index is None else mark_all(found, index)

    return [
        Entry("torch.serialization", "default_restore_location", put_back),
        Entry("torch", "load", loaded),
    ]


def mark_all(thing: Any, index: int) -> Any:
    """Mark every tensor in nested dictionaries, lists and tuples."""
    if isinstance(thing, Tensor):
        mark(thing, index)
    elif isinstance(thing, dict):
        for value in thing.values():
            mark_all(value, index)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            mark_all(value, index)
    return thing
