"""Sums over ranks: everything is added up first and divided once, never an average of averages."""

from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lockstep.collectives.agreement import agree, problems_reach_all
from lockstep.collectives.nested import describe, leaves, map_leaves
from lockstep.errors import UsageError
from lockstep.world import World, current

T = TypeVar("T")

_NARROW = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32)
"""Summed in int64: a few ranks' samples are soon too many for them."""


def total(x: T) -> T:
    """Add ``x`` up over all ranks.

    Args:
        x: A number, a tensor of any shape (the same on every rank), or lists, tuples, dicts and dataclasses of them.
            Everything with one dtype travels in one message.

    Returns:
        The same structure on every rank, with the same bits. Python numbers stay python numbers (integers are exact,
        floats are added in float64; a bool counts as 0 or 1). Tensors keep dtype and device and carry no gradient; half
        types are added in float32, bool tensors become int64.

    Raises:
        MismatchError: Ranks bring different structures, shapes or dtypes; on every rank.
        UsageError: Something is neither a number nor a tensor, or a sum of integers does not fit into their dtype.

    Example:
        >>> import lockstep, torch
        >>> lockstep.total({"correct": 9, "loss": torch.tensor([0.5, 1.5])})
        {'correct': 9, 'loss': tensor([0.5000, 1.5000])}
    """
    world = current()
    with problems_reach_all(world, "lockstep.total"):
        parts = [as_tensor(leaf, world.size) for leaf in leaves(x)]
    agree(world, "lockstep.total", describe(x, leaf=kind_and_shape))
    summed = iter(sum_packed(world, parts))
    return cast(T, map_leaves(lambda leaf: like(leaf, next(summed)), x))


def mean(total: Any, count: Any) -> Any:
    """Add up ``total`` and ``count`` over all ranks, then divide once.

    Args:
        total: This rank's sum: a number, or a tensor of any shape.
        count: Of how many: a number, or a tensor that ``total`` can be divided by.

    Returns:
        The quotient on every rank: a float where both are numbers, else a tensor in ``total``'s dtype (float32 at
        least), divided in float64. NaN where nothing was counted on any rank.

    Raises:
        MismatchError: Ranks bring different shapes or dtypes.
        UsageError: One of them is neither a number nor a tensor, or complex.

    Example:
        >>> import lockstep
        >>> lockstep.mean(9, 12)
        0.75
    """
    world = current()
    with problems_reach_all(world, "lockstep.mean"):
        both = [as_tensor(total), as_tensor(count)]
        if any(part.is_complex() for part in both):
            raise UsageError("lockstep.mean divides real numbers; give it x.real and x.imag one after the other.")
    agree(world, "lockstep.mean", describe([total, count], leaf=kind_and_shape))
    device = total.device if isinstance(total, Tensor) else both[1].device
    above, below = sum_packed(world, [part.to(device, torch.float64) for part in both])
    quotient = above / below
    if not isinstance(total, Tensor) and not isinstance(count, Tensor):
        return quotient.item()
    kept = total.dtype if isinstance(total, Tensor) and total.is_floating_point() else torch.float32
    return quotient.to(torch.float64 if kept == torch.float64 else torch.float32)


def as_tensor(leaf: object, ranks: int = 1) -> Tensor:
    """A leaf in a dtype in which so many ranks' can be summed without loss."""
    if isinstance(leaf, Tensor):
        if leaf.is_sparse or leaf.is_quantized:
            raise UsageError(f"a {leaf.layout} tensor cannot be summed over ranks; pass x.to_dense().")
        if leaf.dtype in (torch.float16, torch.bfloat16):
            return leaf.detach().float()
        return leaf.detach().long() if leaf.dtype in _NARROW else leaf.detach()
    if isinstance(leaf, bool | int):
        if not -(2**63) <= leaf * ranks < 2**63:
            raise UsageError(f"{leaf} on each of {ranks} rank(s) does not fit into 64 bits; pass it as a float.")
        return torch.tensor(int(leaf))
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    if hasattr(leaf, "item") and getattr(leaf, "ndim", None) == 0:  # numpy's scalars
        return as_tensor(leaf.item(), ranks)
    raise UsageError(
        f"lockstep adds up numbers and tensors, not {type(leaf).__name__}. Convert it, with "
        f"torch.as_tensor for instance, or leave it out."
    )


def kind_and_shape(leaf: object) -> str:
    """What must be equal on all ranks."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}".removeprefix("torch.")
    return type(leaf).__name__


def like(leaf: object, summed: Tensor) -> Any:
    """The sum in the kind that went in."""
    if not isinstance(leaf, Tensor):
        return summed.item()
    if leaf.dtype == torch.bool:
        return summed
    kept = summed.to(leaf.dtype)
    if leaf.dtype in _NARROW and not torch.equal(kept.long(), summed):
        most = int(summed[kept.long() != summed].flatten()[0])
        raise UsageError(f"lockstep.total: a sum is {most}, which {leaf.dtype} cannot hold. Pass x.long().")
    return kept


def sum_packed(world: World, parts: list[Tensor]) -> list[Tensor]:
    """Sum every tensor over ranks, in one message for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, part in enumerate(parts):
        kinds.setdefault((part.dtype, part.device), []).append(i)
    out = list(parts)
    for members in kinds.values():
        packed = world.ranks.add_up(torch.cat([parts[i].reshape(-1) for i in members]))
        pieces = torch.split(packed, [parts[i].numel() for i in members])
        for i, piece in zip(members, pieces, strict=True):
            out[i] = piece.reshape(parts[i].shape)
    return out
