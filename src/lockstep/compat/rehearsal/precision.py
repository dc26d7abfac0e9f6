"""Mixed precision: CUDA's autocast is the CPU's, in the type that CUDA would take."""

import functools
from typing import Any

import torch
from torch.amp import autocast_mode

from lockstep.compat.rehearsal.entry import Entry


def entries() -> list[Entry]:
    """Autocast and what asks for it. ``GradScaler`` works by itself once CUDA is said to be there."""
    begin = autocast_mode.autocast.__init__

    @functools.wraps(begin)
    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or cuda_type[0]
        begin(self, device_type, dtype, *args, **kwargs)

    cuda_type = [torch.float16]  # torch.set_autocast_gpu_dtype
    enabled, get, put, switch = (
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
        torch.set_autocast_dtype,
        torch.set_autocast_enabled,
    )

    def is_enabled(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    def get_dtype(device_type: str) -> torch.dtype:
        # Within autocast("cuda") the CPU's is the one in force.
        return cuda_type[0] if device_type == "cuda" and not enabled("cpu") else get(_cpu(device_type))

    def set_dtype(device_type: str, dtype: torch.dtype) -> None:
        if device_type == "cuda":
            cuda_type[0] = dtype
        put(_cpu(device_type), dtype)

    def set_enabled(*args: Any) -> None:
        switch(_cpu(args[0]) if len(args) == 2 else "cpu", args[-1])

    return [
        Entry("torch.amp.autocast_mode:autocast", "__init__", init),
        Entry("torch", "is_autocast_enabled", is_enabled),
        Entry("torch", "set_autocast_enabled", set_enabled),
        Entry("torch", "get_autocast_dtype", get_dtype),
        Entry("torch", "set_autocast_dtype", set_dtype),
        Entry("torch", "get_autocast_gpu_dtype", lambda: get_dtype("cuda")),
        Entry("torch", "set_autocast_gpu_dtype", lambda dtype: set_dtype("cuda", dtype)),
    ]


def _cpu(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type
