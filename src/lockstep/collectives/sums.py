"""Sums over ranks: everything is added up first and divided once, never an average of averages."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.collectives.agreement import agree
from lockstep.collectives.nested import leaves, map_leaves, structure
from lockstep.errors import UsageError
from lockstep.world import World, current

T = TypeVar("T")


def total(x: T) -> T:
    """Add ``x`` up over all ranks.

    Args:
        x: A number, a tensor of any shape (the same on every rank), or lists, tuples, dicts and dataclasses of them. Everything
            with one dtype travels in one message.

    Returns:
        The same structure on every rank, with the same bits. Python numbers stay python numbers (integers are exact, floats
        are added in float64; a bool counts as 0 or 1). Tensors keep dtype and device and carry no gradient; half types are
        added in float32, bool tensors become int64.

    Raises:
        MismatchError: Ranks bring different structures, shapes or dtypes; on every rank.
        UsageError: Something is neither a number nor a tensor.

    Example:
        >>> import lockstep, torch
        >>> lockstep.total({"correct": 9, "loss": torch.tensor([0.5, 1.5])})
        {'correct': 9, 'loss': tensor([0.5000, 1.5000])}
    """
    world = current()
    parts = [as_tensor(leaf, world) for leaf in leaves(x)]
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    agree(world, "lockstep.total", f"{structure(x)} with shapes {shapes}")
    summed = iter(sum_packed(world, parts))
    return map_leaves(lambda leaf: like(leaf, next(summed)), x)


def mean(total: Any, count: Any) -> Any:
    """Add up ``total`` and ``count`` over all ranks, then divide once.

    Args:
        total: This rank's sum: a number, or a tensor of any shape.
        count: Of how many: a number, or a tensor that ``total`` can be divided by.

    Returns:
        The quotient on every rank: a float where both are numbers, else a tensor in ``total``'s dtype (float32 at least).
        NaN where nothing was counted on any rank.

    Raises:
        MismatchError: Ranks bring different shapes or dtypes.
        UsageError: One of them is neither a number nor a tensor.

    Example:
        >>> import lockstep
        >>> lockstep.mean(9, 12)
        0.75
    """
    world = current()
    both = [as_tensor(total, world), as_tensor(count, world)]
    agree(
        world,
        "lockstep.mean",
        f"{structure([total, count])} with shapes {tuple(both[0].shape)}, {tuple(both[1].shape)}",
    )
    wide = [part.double() if part.device.type != "mps" else part.float() for part in both]
    above, below = sum_packed(world, wide)
    quotient = above / below.to(above.device)
    if not isinstance(total, Tensor) and not isinstance(count, Tensor):
        return quotient.item()
    kept = total.dtype if isinstance(total, Tensor) and total.is_floating_point() else torch.float32
    return quotient.to(torch.float64 if kept == torch.float64 else torch.float32)


def as_tensor(leaf: object, world: World) -> Tensor:
    """A leaf in a dtype that can be summed without loss."""
    if isinstance(leaf, Tensor):
        if leaf.is_sparse or leaf.is_quantized:
            raise UsageError(
                f"rank {world.rank}: a {leaf.layout} tensor cannot be summed over ranks; pass x.to_dense()."
            )
        if leaf.dtype in (torch.float16, torch.bfloat16):
            return leaf.detach().float()
        return leaf.detach().long() if leaf.dtype == torch.bool else leaf.detach()
    if isinstance(leaf, bool | int):
        if not -(2**63) <= leaf < 2**63:
            raise UsageError(f"rank {world.rank}: {leaf} does not fit into 64 bits; pass it as a float.")
        return torch.tensor(int(leaf))
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    if hasattr(leaf, "item") and getattr(leaf, "ndim", None) == 0:  # numpy's scalars
        return as_tensor(leaf.item(), world)
    raise UsageError(
        f"rank {world.rank}: lockstep adds up numbers and tensors, not {type(leaf).__name__}. Convert it, with "
        f"torch.as_tensor for instance, or leave it out."
    )


def like(leaf: object, summed: Tensor) -> Any:
    """The sum in the kind that went in."""
    if isinstance(leaf, Tensor):
        return summed.to(leaf.dtype) if leaf.dtype != torch.bool else summed
    return summed.item()


def sum_packed(world: World, parts: list[Tensor]) -> list[Tensor]:
    """Sum every tensor over ranks, in one message for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, part in enumerate(parts):
        kinds.setdefault((part.dtype, part.device), []).append(i)
    out = list(parts)
    for members in kinds.values():
        packed = world.ranks.add_up(torch.cat([parts[i].reshape(-1) for i in members]))
        pieces = packed.split([parts[i].numel() for i in members])
        for i, piece in zip(members, pieces, strict=True):
            out[i] = piece.reshape(parts[i].shape)
    return out
