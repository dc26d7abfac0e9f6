"""Lists, tuples, dicts, named tuples and dataclasses, taken apart into leaves and put together again."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast


def leaves(x: object) -> list[Any]:
    """Give everything in ``x`` that is not a container, in order.

    Example:
        >>> leaves({"a": [1, (2, 3)], "b": None})
        [1, 2, 3, None]
    """
    found: list[Any] = []
    map_leaves(found.append, x)
    return found


def map_leaves(function: Callable[[Any], Any], x: object) -> Any:
    """Give ``x`` with every leaf replaced by ``function(leaf)``; containers keep their types.

    Example:
        >>> map_leaves(lambda leaf: leaf * 2, {"a": [1, (2, 3)]})
        {'a': [2, (4, 6)]}
    """
    if dataclasses.is_dataclass(x) and not isinstance(x, type):  # first: transformers' outputs are dicts besides
        fields = {
            field.name: map_leaves(function, getattr(x, field.name)) for field in dataclasses.fields(x) if field.init
        }
        return dataclasses.replace(x, **fields)
    if isinstance(x, Mapping):
        return rebuild_mapping(x, {key: map_leaves(function, value) for key, value in x.items()})
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(map_leaves(function, value) for value in x))
    if isinstance(x, (list, tuple)):
        return rebuild_sequence(x, (map_leaves(function, value) for value in x))
    return function(x)


def rebuild_mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Give ``values`` in the type of ``like``."""
    if type(like) is dict:
        return values
    copy = getattr(like, "copy", None)
    if copy is None:
        return cast(Any, type(like))(values)
    same = copy()  # keeps what a constructor would not get, such as a defaultdict's factory
    same.update(values)
    return same


def rebuild_sequence(like: list[Any] | tuple[Any, ...], values: Iterable[Any]) -> Any:
    """Give ``values`` in the type of ``like``."""
    return type(like)(values)


def describe(x: object, leaf: Callable[[Any], str]) -> str:
    """Describe ``x`` without its values, to compare between ranks: containers, keys, and what ``leaf`` says of leaves.

    Example:
        >>> describe({"loss": 0.5, "hits": [1, 2]}, leaf=lambda leaf: type(leaf).__name__)
        "{'loss': float, 'hits': [int, int]}"
    """
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(value, leaf)}" for key, value in x.items()) + "}"
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(describe(value, leaf) for value in x) + "]"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts = (f"{field.name}={describe(getattr(x, field.name), leaf)}" for field in dataclasses.fields(x))
        return f"{type(x).__name__}({', '.join(parts)})"
    return leaf(x)
