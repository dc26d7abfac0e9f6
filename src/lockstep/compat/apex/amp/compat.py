"""What amp asked of very old versions of torch; today's answers."""

from typing import Any

import torch


def variable_is_tensor() -> bool:
    """They are the same."""
    return True


def tensor_is_variable() -> bool:
    """They are the same."""
    return True


def tensor_is_float_tensor() -> bool:
    """A tensor's class no longer tells its dtype."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Whether it is a tensor."""
    return torch.is_tensor(x)


def is_floating_point(x: Any) -> bool:
    """Whether a tensor holds floating-point numbers."""
    return torch.is_floating_point(x)


def scalar_python_val(x: Any) -> Any:
    """The number in a tensor of one element."""
    return x.item() if hasattr(x, "item") else x[0]
