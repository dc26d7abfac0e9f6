"""``torch.accelerator``: newer names for what `torch.cuda` does; torch's own DataParallel and loader ask here."""

from collections.abc import Iterable
from typing import Any

import torch

from lockstep.compat.rehearsal.entry import Entry

_SAME = {
    "current_device_index": "current_device",
    "set_device_index": "set_device",
    "device_index": "device",
    "current_stream": "current_stream",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
}


def entries(others: Iterable[Entry], hide_cuda: bool) -> list[Entry]:
    """The same answers as those of ``torch.cuda``, which are among the ``others``."""
    cuda = {entry.name: entry.value for entry in others if entry.owner == "torch.cuda"}

    def current_accelerator(check_available: bool = False) -> Any:  # noqa: ARG001
        return None if hide_cuda else torch.device("cuda")

    return [
        Entry("torch.accelerator", "current_accelerator", current_accelerator),
        *(Entry("torch.accelerator", name, cuda[there]) for name, there in _SAME.items()),
    ]
