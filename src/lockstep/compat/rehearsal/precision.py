"""Mixed precision: CUDA's autocast is the CPU's, in the type that CUDA would take."""

from typing import Any

import torch

from lockstep.compat.rehearsal.entry import Entry


def entries() -> list[Entry]:
    """What torch's autocast is made of. It and ``GradScaler`` work by themselves once CUDA is said to be there."""
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
        Entry("torch", "is_autocast_enabled", is_enabled),
        Entry("torch", "set_autocast_enabled", set_enabled),
        Entry("torch", "get_autocast_dtype", get_dtype),
        Entry("torch", "set_autocast_dtype", set_dtype),
        Entry("torch", "get_autocast_gpu_dtype", lambda: get_dtype("cuda")),
        Entry("torch", "set_autocast_gpu_dtype", lambda dtype: set_dtype("cuda", dtype)),
    ]


def _cpu(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type
