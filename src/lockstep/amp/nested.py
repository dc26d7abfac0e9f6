"""Floating tensors to another type, in whatever they are nested in."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def cast_nested(value: Any, dtype: torch.dtype) -> Any:
    """Give ``value`` with every floating tensor in it as ``dtype``; what need not change is the same object.

    Reaches into lists, tuples, named tuples, sets, mappings (of any class that can be copied and assigned to),
    dataclasses and objects with a ``to`` method, such as packed sequences. Integer tensors, strings, arrays,
    generators and everything unknown stay as they are.

    Example:
        >>> inside = cast_nested({"x": [torch.ones(1)], "n": 3}, torch.float16)
        >>> inside["x"][0].dtype, inside["n"]
        (torch.float16, 3)
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if value is None or isinstance(value, _LEFT):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, dtype)
    if callable(getattr(value, "to", None)):  # packed sequences are tuples too
        return value.to(dtype)
    if isinstance(value, _GROUPS):
        return _sequence(value, dtype, getattr(value, "_make", type(value)))
    return _dataclass(value, dtype) if dataclasses.is_dataclass(value) else value


_LEFT = (str, bytes, int, float, nn.Module, type)
_GROUPS = (list, tuple, set, frozenset)  # torch 2.9's compiler does not know types joined by |


def _sequence(value: Any, dtype: torch.dtype, make: Any) -> Any:
    changed, after = False, []
    for old in value:
        new = cast_nested(old, dtype)
        changed = changed or new is not old
        after.append(new)
    return make(after) if changed else value


def _mapping(value: Mapping[Any, Any], dtype: torch.dtype) -> Any:
    changed = {}
    for key, old in value.items():
        new = cast_nested(old, dtype)
        if new is not old:
            changed[key] = new
    if not changed:
        return value
    out: Any = copy.copy(value)
    for key, new in changed.items():
        out[key] = new
    return out


def _dataclass(value: Any, dtype: torch.dtype) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = cast_nested(old, dtype)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    out = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(out, name, new)  # frozen ones too, and without running __init__ again
    return out
