"""Gathering rows from all ranks: any number on each, in the order of the data set if wanted."""

from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.collectives.agreement import agree, problems_reach_all
from lockstep.collectives.nested import describe, leaves, map_leaves
from lockstep.errors import MismatchError, UsageError
from lockstep.world import World, current

T = TypeVar("T")

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
_MOST_DIMENSIONS = 16


class Ordered(Protocol):
    """What knows where in the data set the samples came from, such as a `lockstep.DataLoader`."""

    def positions(self) -> Tensor:
        """Data set index of every sample that this rank was given in the current or last epoch, ``(n,)`` int64."""
        ...


def gather(x: T, loader: Ordered | None = None) -> T:
    """Put the rows of all ranks together, on every rank.

    Gradients flow through it, back to the rank that a row came from, so a loss may look at the whole global batch. Each
    rank then has to run a backward through what it got, even on an empty batch.

    Args:
        x: A tensor with any number of rows on each rank (none is fine), a number (one row), or lists, tuples, dicts and
            dataclasses of them. Everything but the number of rows must be the same on every rank.
        loader: The `lockstep.DataLoader` whose samples the rows belong to, one row for each sample that it has given to
            this rank in this epoch: then the result is in the order of the data set, each sample once, whatever the
            number of ranks. Without it rows come rank by rank, which for one batch of a loader is its own order.

    Returns:
        The same structure on every rank; a number becomes a vector with one entry for each rank.

    Raises:
        MismatchError: Ranks bring different structures, dtypes or row shapes; on every rank.
        UsageError: There are not as many rows as the loader gave samples; something is neither a number nor a tensor.
            Where that is so on one rank only, the others raise MismatchError.

    Example:
        >>> import lockstep, torch
        >>> lockstep.gather(torch.tensor([[1, 2], [3, 4]]))
        tensor([[1, 2],
                [3, 4]])
    """
    world = current()
    with problems_reach_all(world, "lockstep.gather"):
        parts = [as_rows(leaf) for leaf in leaves(x)]
        if loader is not None:
            parts.append(matching_positions(parts, loader))
    what = describe(x, leaf=lambda leaf: "tensor" if isinstance(leaf, Tensor) else type(leaf).__name__)
    heads = exchange_headers(world, f"{what}{' and a loader' if loader is not None else ''}", parts)
    gathered = [gather_part(world, part, head) for part, head in zip(parts, heads, strict=True)]
    if loader is not None:
        order = gathered.pop().argsort(stable=True)
        gathered = [rows[order.to(rows.device)] for rows in gathered]
    whole = iter(gathered)
    return cast(T, map_leaves(lambda _: next(whole), x))


def as_rows(leaf: object) -> Tensor:
    """A leaf as a tensor of one dimension at least."""
    if isinstance(leaf, bool | int | float):
        return torch.tensor([leaf], dtype=torch.float64 if isinstance(leaf, float) else None)
    if not isinstance(leaf, Tensor):
        raise UsageError(
            f"lockstep.gather takes tensors and numbers, not {type(leaf).__name__}. Encode it as a tensor, or use "
            f"torch.distributed.all_gather_object where every rank is trusted."
        )
    if leaf.dtype not in _DTYPES or leaf.layout != torch.strided or leaf.ndim > _MOST_DIMENSIONS:
        raise UsageError(f"lockstep.gather cannot send a {leaf.layout} tensor of {leaf.dtype}; convert it first.")
    return leaf.reshape(1) if leaf.ndim == 0 else leaf


def matching_positions(parts: list[Tensor], loader: Ordered) -> Tensor:
    """The data set index of every row."""
    positions = loader.positions()
    wrong = next((len(part) for part in parts if len(part) != len(positions)), None)
    if wrong is not None:
        raise UsageError(
            f"lockstep.gather got {wrong} rows, but the loader has given this rank {len(positions)} samples in this "
            f"epoch. Gather once after the loop, with one row for each sample; inside the loop leave `loader` out."
        )
    return positions


def header(part: Tensor) -> list[int]:
    """Rows, dtype and row shape as numbers of a fixed count; last, whether gradients shall flow."""
    shape = list(part.shape[1:])
    padding, learns = [0] * (_MOST_DIMENSIONS - len(shape)), torch.is_grad_enabled() and part.requires_grad
    return [len(part), _DTYPES.index(part.dtype), len(shape), *shape, *padding, int(learns)]


def exchange_headers(world: World, what: str, parts: list[Tensor]) -> list[list[list[int]]]:
    """Every rank's header for each tensor; raises on all ranks if they do not fit together."""
    headers = [header(part) for part in parts]
    rows = agree(world, "lockstep.gather", what, [number for one in headers for number in one])
    size = 3 + _MOST_DIMENSIONS + 1
    by_tensor = [[row[i * size : (i + 1) * size] for row in rows] for i in range(len(parts))]
    for i, heads in enumerate(by_tensor):
        refuse_difference(world, i, heads)
    return by_tensor


def refuse_difference(world: World, tensor: int, heads: list[list[int]]) -> None:
    """Rows must have one dtype and shape; a rank without rows may not know them, so what it brings does not count."""
    filled = [(rank, head[1:-1]) for rank, head in enumerate(heads) if head[0]]
    other = next((entry for entry in filled if entry[1] != filled[0][1]), None)
    if other is not None:
        raise MismatchError(
            f"rank {world.rank} of {world.size}: lockstep.gather got different rows in tensor {tensor}: "
            f"{show(*filled[0])}, but {show(*other)}. Only the number of rows may differ between ranks."
        )


def show(rank: int, head: list[int]) -> str:
    """Dtype and row shape for a message."""
    shape = tuple(head[2 : 2 + head[1]])
    return f"{shape} of {_DTYPES[head[0]]} on rank {rank}".replace("torch.", "")


def gather_part(world: World, part: Tensor, heads: list[list[int]]) -> Tensor:
    """All ranks' rows of one tensor; with gradients on all ranks if one wants them, as their backwards meet."""
    if not any(head[-1] for head in heads):
        return gather_rows(world, part.detach(), heads)
    if not heads[world.rank][-1]:
        # Rows that nobody learns from, or none at all, of whatever dtype: something must ask for the backward.
        asks, silent = torch.empty(0, requires_grad=True), part.detach()
        return cast(Tensor, _Gathered.apply(asks, silent, world, heads))  # type: ignore[no-untyped-call]
    return cast(Tensor, _Gathered.apply(part, None, world, heads))  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    """`gather_rows`. A row's gradient is what the losses of all ranks say of it."""

    @staticmethod
    def forward(ctx: Any, asks: Tensor, silent: Tensor | None, world: World, heads: list[list[int]]) -> Tensor:
        ctx.world, ctx.heads, ctx.silent = world, heads, silent is not None
        ctx.shape, ctx.dtype = asks.shape, asks.dtype
        return gather_rows(world, asks if silent is None else silent, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
        whole = ctx.world.ranks.add_up(wide) if wide.numel() else wide
        if ctx.silent:
            return None, None, None, None
        rank = ctx.world.rank
        first = sum(head[0] for head in ctx.heads[:rank])
        mine = whole[first : first + ctx.heads[rank][0]]
        return mine.to(ctx.dtype).reshape(ctx.shape), None, None, None


def gather_rows(world: World, part: Tensor, heads: list[list[int]]) -> Tensor:
    """Pad to the longest, line up, cut. Padding is never seen by anyone."""
    filled = next((head for head in heads if head[0]), heads[0])
    dtype, shape = _DTYPES[filled[1]], filled[3 : 3 + filled[2]]
    most = max(head[0] for head in heads)
    padded = torch.zeros([most, *shape], dtype=dtype, device=part.device)
    if not padded.numel():
        return padded.new_zeros([sum(head[0] for head in heads), *shape])
    if len(part):
        padded[: len(part)] = part
    # As bytes: no backend knows every dtype, every backend moves bytes.
    rows = world.ranks.line_up(padded.view(torch.uint8).reshape(-1))
    whole = rows.view(dtype).reshape([world.size, most, *shape])
    return torch.cat([whole[rank, : head[0]] for rank, head in enumerate(heads)])
