"""States as JSON and back: plain values as they are, others under a tag, a name wherever a tensor stands. Pure."""

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.train.checkpoint import forms

Put = Callable[[Tensor, str], str]
Take = Callable[[str], Tensor]

TAG = "!"
"""The key that marks an object as something other than a plain dict."""

_ITSELF = (str, int, bool, type(None))
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class MalformedError(Exception):
    """A tree that `encode` has not made."""


def encode(value: Any, path: str, put: Put) -> Any:
    """Give a state as JSON.

    Args:
        value: Tensors of any layout, numpy arrays, plain values, and containers of them.
        path: Where it stands, for names and messages.
        put: Takes every dense tensor and gives its name.

    Raises:
        UsageError: Something else is in it.

    Example:
        >>> encode({"lr": 0.1, "betas": (0.9, float("inf"))}, "optimizer", lambda tensor, path: path)
        {'lr': 0.1, 'betas': {'!': 'tuple', 'items': [0.9, {'!': 'float', 'value': 'inf'}]}}
    """
    kind = type(value)
    if kind in _ITSELF:
        return value
    if kind in _WRITERS:
        return _WRITERS[kind](value, path, put)
    if isinstance(value, Tensor):
        return _write_tensor(value, path, put)
    if isinstance(value, np.ndarray | np.generic):
        return _write_numpy(value, path, put)
    raise UsageError(_refusal(path, kind))


def _refusal(path: str, kind: type) -> str:
    return (
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold without pickle. It holds "
        f"tensors, numpy arrays, numbers, texts, bytes, None, and lists, tuples, sets and dicts of them: let the "
        f"part's state_dict() give these."
    )


def _write_float(value: float, path: str, put: Put) -> Any:  # noqa: ARG001
    return value if math.isfinite(value) else {TAG: "float", "value": str(value)}


def _write_complex(value: complex, path: str, put: Put) -> Any:
    return {TAG: "complex", "parts": [_write_float(part, path, put) for part in (value.real, value.imag)]}


def _write_bytes(value: bytes | bytearray, path: str, put: Put) -> Any:  # noqa: ARG001
    return {TAG: type(value).__name__, "base64": base64.b64encode(value).decode()}


def _items(values: Iterable[Any], path: str, put: Put) -> list[Any]:
    return [encode(value, f"{path}/{number}", put) for number, value in enumerate(values)]


def _write_list(value: list[Any], path: str, put: Put) -> Any:
    return _items(value, path, put)


def _write_row(value: Iterable[Any], path: str, put: Put) -> Any:
    return {TAG: type(value).__name__, "items": _items(value, path, put)}


def _write_set(value: set[Any] | frozenset[Any], path: str, put: Put) -> Any:
    # Ranks compare what they write, and a set has another order in every process.
    return {TAG: type(value).__name__, "items": sorted(_items(value, path, put), key=repr)}


def _write_deque(value: deque[Any], path: str, put: Put) -> Any:
    return {TAG: "deque", "items": _items(value, path, put), "maxlen": value.maxlen}


def _pairs(value: dict[Any, Any], path: str, put: Put) -> list[Any]:
    return [[encode(key, f"{path}/key", put), encode(each, f"{path}/{key}", put)] for key, each in value.items()]


def _write_dict(value: dict[Any, Any], path: str, put: Put) -> Any:
    if TAG not in value and all(type(key) is str for key in value):
        return {key: encode(each, f"{path}/{key}", put) for key, each in value.items()}
    return {TAG: "dict", "pairs": _pairs(value, path, put)}


def _write_ordered(value: "OrderedDict[Any, Any]", path: str, put: Put) -> Any:
    # A module's state_dict has the versions of its parts in this attribute, which loading looks at.
    metadata = encode(getattr(value, "_metadata", None), f"{path}/metadata", put)
    return {TAG: "OrderedDict", "pairs": _pairs(value, path, put), "metadata": metadata}


def _write_counter(value: "Counter[Any]", path: str, put: Put) -> Any:
    return {TAG: "Counter", "pairs": _pairs(value, path, put)}


def _write_text(value: Any, path: str, put: Put) -> Any:  # noqa: ARG001
    return {TAG: type(value).__name__, "value": str(value).removeprefix("torch.")}


def _write_tensor(value: Tensor, path: str, put: Put) -> Any:
    plain = value.detach()
    if type(plain) is not Tensor or plain.is_meta:
        raise UsageError(_refusal(path, type(value)) if not plain.is_meta else f"{path} is on the meta device: empty.")
    form = forms.take_apart(plain)
    if form is None:
        return {TAG: "tensor", "name": put(plain, path)}
    return {TAG: "form", "form": form.name, "parts": encode(form.parts, path, put)}


def _write_numpy(value: Any, path: str, put: Put) -> Any:
    try:
        tensor = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    except TypeError:
        raise UsageError(_refusal(path, type(value))) from None
    return {TAG: "array" if isinstance(value, np.ndarray) else "scalar", "name": put(tensor, path)}


_WRITERS: dict[type, Callable[[Any, str, Put], Any]] = {
    float: _write_float,
    complex: _write_complex,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    list: _write_list,
    tuple: _write_row,
    torch.Size: _write_row,
    set: _write_set,
    frozenset: _write_set,
    deque: _write_deque,
    dict: _write_dict,
    OrderedDict: _write_ordered,
    Counter: _write_counter,
    torch.dtype: _write_text,
    torch.device: _write_text,
}


def decode(tree: Any, take: Take) -> Any:
    """Give the state that `encode` made a tree of.

    Args:
        tree: From `encode`, by way of JSON.
        take: Gives the tensor of a name.

    Raises:
        MalformedError: It is not such a tree.

    Example:
        >>> decode({"!": "tuple", "items": [1, {"!": "float", "value": "inf"}]}, {}.__getitem__)
        (1, inf)
    """
    try:
        return _decode(tree, take)
    except (KeyError, TypeError, ValueError, RuntimeError, RecursionError, AttributeError) as error:
        raise MalformedError(f"{type(error).__name__}: {error}"[:300]) from error


def _decode(tree: Any, take: Take) -> Any:
    if isinstance(tree, list):
        return [_decode(item, take) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: _decode(value, take) for key, value in tree.items()}
    return _READERS[tree[TAG]](tree, take)


def _read_pairs(tree: Any, take: Take) -> Any:
    return ((_decode(key, take), _decode(value, take)) for key, value in tree["pairs"])


def _read_ordered(tree: Any, take: Take) -> Any:
    ordered: OrderedDict[Any, Any] = OrderedDict(_read_pairs(tree, take))
    if tree["metadata"] is not None:
        ordered._metadata = _decode(tree["metadata"], take)  # type: ignore[attr-defined]
    return ordered


_READERS: dict[str, Callable[[Any, Take], Any]] = {
    "tensor": lambda tree, take: take(tree["name"]),
    "array": lambda tree, take: take(tree["name"]).numpy(),
    "scalar": lambda tree, take: take(tree["name"]).numpy()[()],
    "form": lambda tree, take: forms.put_together(tree["form"], _decode(tree["parts"], take)),
    "float": lambda tree, take: float(tree["value"]),  # noqa: ARG005
    "complex": lambda tree, take: complex(*_decode(tree["parts"], take)),
    "bytes": lambda tree, take: base64.b64decode(tree["base64"]),  # noqa: ARG005
    "bytearray": lambda tree, take: bytearray(base64.b64decode(tree["base64"])),  # noqa: ARG005
    "tuple": lambda tree, take: tuple(_decode(tree["items"], take)),
    "Size": lambda tree, take: torch.Size(_decode(tree["items"], take)),
    "set": lambda tree, take: set(_decode(tree["items"], take)),
    "frozenset": lambda tree, take: frozenset(_decode(tree["items"], take)),
    "deque": lambda tree, take: deque(_decode(tree["items"], take), tree["maxlen"]),
    "dict": lambda tree, take: dict(_read_pairs(tree, take)),
    "OrderedDict": _read_ordered,
    "Counter": lambda tree, take: Counter(dict(_read_pairs(tree, take))),
    "dtype": lambda tree, take: _DTYPES[tree["value"]],  # noqa: ARG005
    "device": lambda tree, take: torch.device(tree["value"]),  # noqa: ARG005
}


def dtype_of(name: Any) -> torch.dtype:
    """Give the dtype of a name such as ``"float32"``.

    Raises:
        MalformedError: There is none.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise MalformedError(f"there is no dtype {name!r}"[:100])
    return _DTYPES[name]
