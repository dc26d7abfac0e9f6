"""Tensors that are not one block of numbers, taken apart into those that are: sparse and quantised ones. Pure."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UsageError


class Form(NamedTuple):
    """A tensor in parts.

    Attributes:
        name: How they are put together.
        parts: Dense tensors and plain values by name.
    """

    name: str
    parts: dict[str, Any]


def take_apart(tensor: Tensor) -> Form | None:
    """Give the parts of a tensor; None if it is dense.

    Example:
        >>> take_apart(torch.tensor([0.0, 2.0]).to_sparse()).name
        'sparse_coo'
        >>> take_apart(torch.zeros(2)) is None
        True
    """
    if tensor.is_quantized:
        return _quantised(tensor)
    if tensor.layout == torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values(), "coalesced": tensor.is_coalesced()}
        return Form("sparse_coo", {**parts, "size": list(tensor.shape)})
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed, plain = tensor.crow_indices(), tensor.col_indices()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        compressed, plain = tensor.ccol_indices(), tensor.row_indices()
    else:
        return None
    name = str(tensor.layout).removeprefix("torch.")
    return Form(name, {"compressed": compressed, "plain": plain, "values": tensor.values(), "size": list(tensor.shape)})


def _quantised(tensor: Tensor) -> Form:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        parts: dict[str, Any] = {"scale": tensor.q_scale(), "zero": tensor.q_zero_point()}
        return Form("per_tensor", {"numbers": tensor.int_repr(), **parts})
    if scheme not in (torch.per_channel_affine, torch.per_channel_symmetric):
        raise UsageError(f"a quantised tensor with {scheme} cannot be saved; save what it was made of.")
    parts = {"scales": tensor.q_per_channel_scales(), "zeros": tensor.q_per_channel_zero_points()}
    return Form("per_channel", {"numbers": tensor.int_repr(), **parts, "axis": tensor.q_per_channel_axis()})


def put_together(name: str, parts: dict[str, Any]) -> Tensor:
    """Undo `take_apart`; what does not fit together raises what torch raises."""
    return _MAKERS[name](parts)


def _make_coo(parts: dict[str, Any]) -> Tensor:
    coalesced = bool(parts["coalesced"]) or None
    size = parts["size"]
    return torch.sparse_coo_tensor(
        parts["indices"], parts["values"], size, is_coalesced=coalesced, check_invariants=True
    )


def _compressed(layout: torch.layout) -> Callable[[dict[str, Any]], Tensor]:
    def make(parts: dict[str, Any]) -> Tensor:
        rows = (parts["compressed"], parts["plain"], parts["values"])
        return torch.sparse_compressed_tensor(*rows, parts["size"], layout=layout, check_invariants=True)

    return make


# torch has no public way to a quantised tensor that does not round through floats; these two as in torch 2.9 to 2.14.
# They tell the dtype by that of the numbers.


def _make_per_tensor(parts: dict[str, Any]) -> Tensor:
    return torch._make_per_tensor_quantized_tensor(parts["numbers"], parts["scale"], parts["zero"])


def _make_per_channel(parts: dict[str, Any]) -> Tensor:
    return torch._make_per_channel_quantized_tensor(parts["numbers"], parts["scales"], parts["zeros"], parts["axis"])


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_MAKERS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "sparse_coo": _make_coo,
    "per_tensor": _make_per_tensor,
    "per_channel": _make_per_channel,
    **{str(layout).removeprefix("torch."): _compressed(layout) for layout in _COMPRESSED},
}
