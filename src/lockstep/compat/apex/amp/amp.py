"""Registrations, decorators and the interface of 2018."""

from typing import Any

from lockstep.amp.casting import (
    CASTS,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from lockstep.amp.handle import init

__all__ = [
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]


class _DecoratorHandle:
    """What scripts turn decorated functions off with: ``apex.amp.amp._DECORATOR_HANDLE._deactivate()``."""

    def is_active(self) -> bool:
        return CASTS.on()

    def _deactivate(self) -> None:
        CASTS.deactivate()


_DECORATOR_HANDLE: Any = _DecoratorHandle()
