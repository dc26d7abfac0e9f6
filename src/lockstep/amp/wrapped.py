"""The optimizer of ``handle.wrap_optimizer``: it scales several losses a step and sums their gradients."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lockstep.amp.casting import CASTS
from lockstep.amp.handle import AmpHandle, NoOpHandle, scaled
from lockstep.amp.scaler import LossScaler


class OptimWrapper:
    """An optimizer whose ``scale_loss`` is called ``num_loss`` times a step, each loss with a scale of its own."""

    def __init__(self, optimizer: Any, amp_handle: AmpHandle | NoOpHandle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._skip_next = [False] * num_loss
        static = amp_handle._scaler if isinstance(amp_handle, AmpHandle) else None
        start: float | str = "dynamic" if static is None or static.dynamic else static.loss_scale()
        self._loss_scaler = [LossScaler(start) for _ in range(num_loss)]

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Give the next loss times its scale; add its gradients to those of this step's earlier losses."""
        if not self._amp_handle.is_active():
            yield loss
            return
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        earlier = [None] * len(params) if self._loss_idx == 0 else [param.grad for param in params]
        if self._loss_idx:
            for param in params:
                param.grad = None
        scaler = self._loss_scaler[self._loss_idx]
        yield from scaled(loss, self._optimizer, scaler)
        self._skip_next[self._loss_idx] = scaler.update_scale()
        self._loss_idx += 1
        for param, grad in zip(params, earlier, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad

    def step(self, closure: Any = None) -> Any:
        """Step, unless one of the losses overflowed.

        Raises:
            NotImplementedError: A closure cannot be evaluated again under a loss scale.
        """
        if closure is not None:
            raise NotImplementedError(
                "The `closure` argument is unsupported by the amp optimizer wrapper. Run the closure under scale_loss, "
                "then call step() without it."
            )
        self._loss_idx = 0
        if any(self._skip_next):
            self._skip_next = [False] * self._num_loss
            sys.stdout.write("Gradient overflow, skipping update\n")
            self._optimizer._opt_called = True
            return None
        with CASTS.disabled():
            result = self._optimizer.step()
        CASTS.clear_cache()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)
