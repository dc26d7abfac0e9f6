"""``apex_C``: lists of tensors to one flat tensor and back."""

from collections.abc import Sequence

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors, one behind the other, in one dimension."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, with the shapes of ``tensors``."""
    return list(_unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call]
