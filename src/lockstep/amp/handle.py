"""The interface before `initialize`: ``amp.init()`` and the handle it gives."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.amp.casting import CASTS
from lockstep.amp.levels import half_for
from lockstep.amp.scaler import LossScaler
from lockstep.amp.state import _amp_state


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,  # noqa: ARG001
) -> "AmpHandle | NoOpHandle":
    """Turn on O1's casts as scripts of 2018 do; the handle scales losses.

    Args:
        enabled: False gives a handle that does nothing.
        loss_scale: ``"dynamic"``, or a number.
        enable_caching: Taken as it was; half copies of weights are kept until a backward is through.
        verbose: Taken as it was.
        allow_banned: Taken as it was: binary cross entropy runs in float32 either way.

    Example:
        >>> from lockstep import amp
        >>> handle = amp.init(enabled=False)
        >>> handle.is_active()
        False
    """
    if not enabled:
        CASTS.deactivate()
        return NoOpHandle()
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    CASTS.activate(devices, half_for(devices, None))
    _amp_state.handle = AmpHandle(loss_scale, enable_caching=enable_caching, verbose=verbose)
    return _amp_state.handle  # type: ignore[no-any-return]


class AmpHandle:
    """Turns O1's casts on and off, and scales the losses of scripts that use `init`."""

    def __init__(self, loss_scale: float | str, *, enable_caching: bool = True, verbose: bool = False) -> None:
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._wrapped = False
        self._scaler = LossScaler(loss_scale)
        self._devices, self._half = CASTS.devices, CASTS.half

    def is_active(self) -> bool:
        """Whether casts are on."""
        return self._is_active

    @property
    def _is_active(self) -> bool:
        return CASTS.by_autocast()

    @_is_active.setter
    def _is_active(self, on: bool) -> None:
        if on and not CASTS.devices:
            CASTS.activate(self._devices, self._half)
        CASTS.switch(on)

    @property
    def has_cache(self) -> bool:
        """Whether half copies of weights are kept."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Any, Any]:
        """Nothing: autocast keeps the copies, out of reach."""
        return {}

    @property
    def verbose(self) -> bool:
        """As given to `init`."""
        return self._verbose

    def remove_cache(self, _: Any) -> None:
        """Forget the copies."""
        CASTS.clear_cache()

    def _clear_cache(self) -> None:
        CASTS.clear_cache()

    def _disable_casts(self) -> AbstractContextManager[None]:
        return CASTS.disabled()

    def _deactivate(self) -> None:
        CASTS.deactivate()

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Give the loss times the scale; unscale the optimizer's gradients in place afterwards.

        Raises:
            RuntimeError: `wrap_optimizer` has been used: its result scales the losses.
        """
        if not self.is_active():
            yield loss
            return
        if self._wrapped:
            raise RuntimeError(
                "After calling `handle.wrap_optimizer()`, you must explicitly use `optimizer.scale_loss(loss)`."
            )
        yield from scaled(loss, optimizer, self._scaler)
        if self._scaler.update_scale():
            skip_once(optimizer)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """An optimizer that scales its losses itself, ``num_loss`` of them each step."""
        from lockstep.amp.wrapped import OptimWrapper

        self._wrapped = True
        return OptimWrapper(optimizer, self, num_loss)


class NoOpHandle:
    """What `init` gives when it is disabled."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Never."""
        return False

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:  # noqa: ARG002
        """Give the loss."""
        yield loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """An optimizer with ``scale_loss``."""
        from lockstep.amp.wrapped import OptimWrapper

        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def _clear_cache(self) -> None:
        """Nothing to clear."""

    def _deactivate(self) -> None:
        """Nothing to turn off."""


def scaled(loss: Tensor, optimizer: Any, scaler: LossScaler) -> Iterator[Tensor]:
    """Yield the scaled loss; unscale and decide afterwards, as all ranks found."""
    try:
        yield loss.float() * scaler.loss_scale()
    finally:
        CASTS.clear_cache()
    scaler.clear_overflow_state()
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    scaler.check_and_scale(grads, 1.0 / scaler.loss_scale())
    if scaler.dynamic:
        scaler.decide(scaler.found_by_all())


def skip_once(optimizer: Any) -> None:
    """The optimizer's next step says that it is skipped, and does nothing else."""
    real = vars(optimizer).get("step")

    def skip(closure: Any = None) -> None:  # noqa: ARG001
        sys.stdout.write("Gradient overflow, skipping update\n")
        optimizer._opt_called = True
        if real is None:
            del optimizer.step
        else:
            optimizer.step = real

    skip._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = skip
