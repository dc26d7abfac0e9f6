"""Small questions about tensors."""

from typing import Any

import torch
from torch import Tensor


def is_cuda_enabled() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def is_fp_tensor(x: Any) -> bool:
    """Whether it is a floating-point tensor, or a sequence of them."""
    if isinstance(x, (list, tuple)):
        return all(map(is_fp_tensor, x))
    return isinstance(x, Tensor) and x.is_floating_point()


def type_string(x: Tensor) -> str:
    """Such as ``FloatTensor``."""
    return x.type().split(".")[-1]
