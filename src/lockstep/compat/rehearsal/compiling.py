"""``torch.compile`` gives back what it was given: the same numbers, at once, and without a C++ compiler."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lockstep.compat.rehearsal.entry import Entry


def entries() -> list[Entry]:
    """The function; dynamo cannot trace what follows tensors."""

    @functools.wraps(torch.compile)
    def compile(model: Any = None, **_: Any) -> Any:  # noqa: A001  (torch's name)
        if model is None:

            def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
                return function

            return decorate
        return model

    def compile_in_place(self: torch.nn.Module, *_: Any, **__: Any) -> None:
        pass

    return [Entry("torch", "compile", compile), Entry("torch.nn:Module", "compile", compile_in_place)]
