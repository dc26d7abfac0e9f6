"""Autocast by name."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lockstep.errors import UsageError

_TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(precision: str, device_type: str) -> AbstractContextManager[object] | None:
    """The context of the forward pass; can be entered again and again. None for fp32, which needs none.

    Raises:
        UsageError: There is no such precision.

    Example:
        >>> with autocast_for("bf16", "cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if precision not in _TYPES:
        raise UsageError(f"precision={precision!r} is not one that lockstep knows: write 'fp32', 'bf16' or 'fp16'.")
    dtype = _TYPES[precision]
    if dtype is None:
        return None
    from lockstep.amp.casting import KEEP_COPIES

    return torch.autocast(device_type, dtype=dtype, cache_enabled=KEEP_COPIES)


def backward_for(precision: str, device_type: str) -> Callable[[Tensor], None]:
    """The backward pass of a scalar, which torch wants outside of `autocast_for`'s context."""
    if _TYPES[precision] is None:
        return torch.autograd.backward

    def backward(loss: Tensor) -> None:
        with torch.autocast(device_type, enabled=False):
            torch.autograd.backward(loss)

    return backward
