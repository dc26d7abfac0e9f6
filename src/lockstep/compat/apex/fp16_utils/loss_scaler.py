"""The loss scalers of before amp."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.formulas import any_not_finite

from .fp16util import to_python_float

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class _Scale:
    """What both have: a scale, and losses and gradients that are multiplied by it."""

    cur_scale: float

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: Any) -> tuple[Tensor, ...]:
        """Multiply gradients, as a module's backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class LossScaler(_Scale):
    """A scale that never moves.

    Args:
        scale: What losses are multiplied by.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Never looks."""
        return False

    def _has_inf_or_nan(self, x: Tensor) -> bool:
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""


class DynamicLossScaler(_Scale):
    """A scale that shrinks at each overflow, down to 1, and grows after each window without.

    Args:
        init_scale: Where it begins.
        scale_factor: What it is divided and multiplied by.
        scale_window: Good steps until it grows.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor, self.scale_window = scale_factor, scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient is not finite."""
        return bool(any_not_finite([param.grad.data for param in params if param.grad is not None]))

    def _has_inf_or_nan(self, x: Tensor) -> bool:
        return bool(any_not_finite([x]))

    def update_scale(self, overflow: bool) -> None:
        """Move the scale after a step."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


# Optimizer checkpoints hold one. They have numbers in them and nothing else, so torch.load may make them.
torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler])
