"""A batch of no samples, in the structure that batches of this data set have."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lockstep.collectives.nested import rebuild_mapping, rebuild_sequence
from lockstep.errors import UsageError


class UnknownKindError(Exception):
    """Something of which there is no way to tell what a batch without samples has in its place."""


def empty_batch(sample: object, collate: Callable[[list[Any]], Any]) -> Any:
    """Give what ``collate`` would make of no samples at all, which few such functions can do themselves.

    One sample and the same sample twice are collated; what grew shrinks by as much. So it does not matter which
    dimension counts the samples, what is a list of samples and what a container.

    Args:
        sample: Any sample of the data set.
        collate: Makes a batch of a list of samples.

    Raises:
        UsageError: The batch has something in it of which the size cannot be told.

    Example:
        >>> empty_batch((torch.ones(3), "cat"), torch.utils.data.default_collate)
        [tensor([], size=(0, 3)), ()]
    """
    # Copies, since some functions take the samples apart.
    one = collate([copy.copy(sample)])
    two = collate([copy.copy(sample), copy.copy(sample)])
    try:
        return shrink(one, two)
    except UnknownKindError as kind:
        try:
            return collate([])
        except Exception as error:
            raise UsageError(
                f"this rank's share of a global batch is empty, and there is no way to tell what a batch without "
                f"samples looks like: {kind} in the result of collate_fn. Let collate_fn([]) return one, or use "
                f"drop_last=True."
            ) from error


def shrink(one: Any, two: Any) -> Any:
    """Continue the row "batch of two, batch of one" downwards.

    Example:
        >>> shrink({"x": torch.ones(1, 3), "n": 1, "s": ["a"]}, {"x": torch.ones(2, 3), "n": 2, "s": ["a", "b"]})
        {'x': tensor([], size=(0, 3)), 'n': 0, 's': []}
    """
    if type(one) is not type(two):
        raise UnknownKindError(f"now {type(one).__name__}, now {type(two).__name__}")
    if isinstance(one, torch.Tensor | np.ndarray):
        return _shrink_array(one, two)
    if isinstance(one, Mapping):
        return rebuild_mapping(one, {key: shrink(value, two[key]) for key, value in one.items() if key in two})
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*map(shrink, one, two))
    if isinstance(one, list | tuple):
        grown = len(two) - len(one)
        return rebuild_sequence(one, one[: max(0, len(one) - grown)] if grown else map(shrink, one, two))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one) if field.init]
        return dataclasses.replace(one, **{name: shrink(getattr(one, name), getattr(two, name)) for name in names})
    return _shrink_leaf(one, two)


def _shrink_leaf(one: Any, two: Any) -> Any:
    """Numbers count something and go on; a word stays as it is."""
    if isinstance(one, int | float) and not isinstance(one, bool):
        return one - (two - one)
    if one is None or isinstance(one, str | bytes | bool | torch.dtype | torch.device):
        return one
    raise UnknownKindError(f"{type(one).__name__}")


def _shrink_array(one: Any, two: Any) -> Any:
    """Cut every dimension that grew; a number without dimensions continues its row."""
    if one.ndim != two.ndim:
        raise UnknownKindError("an array whose number of dimensions changes")
    if one.ndim == 0:
        return one if one.dtype in (torch.bool, np.bool_) else one - (two - one)
    lengths = [max(0, a - (b - a)) for a, b in zip(one.shape, two.shape, strict=True)]
    cut = one[tuple(slice(0, length) for length in lengths)]
    # A copy: the sample's own memory need not stay.
    return cut.clone() if isinstance(cut, torch.Tensor) else cut.copy()
