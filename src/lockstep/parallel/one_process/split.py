"""Batches apart, one piece for each device, and outputs together again, in any nesting."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep.collectives.nested import describe, leaves, map_leaves
from lockstep.errors import UsageError
from lockstep.parallel.one_process.hints import say_once

SCALARS = (
    "DataParallel: the module gives a scalar on each device, and scalars are gathered as a vector, one value for each "
    "device. Its .mean() weighs devices alike, also if their batches differ; DataParallel(..., loss=) weighs by count."
)


def split(batch: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Split every tensor of ``batch`` along ``dim``, in `torch.chunk`'s sizes, and move each piece to its device.

    Args:
        batch: Tensors in lists, tuples, dicts, named tuples and dataclasses. Tensors without dimensions and what is no
            tensor go to every device.
        devices: One for each piece.
        dim: The dimension to split along.

    Returns:
        One batch for each device that gets samples: fewer than ``devices`` if there are fewer samples, one if there is
        no tensor to split. Pieces can be written to without touching ``batch``, unless there is but one device.

    Raises:
        UsageError: A tensor has no such dimension, tensors give different numbers of pieces, or a packed sequence.

    Example:
        >>> [piece.tolist() for piece in split(torch.arange(5), [torch.device("cpu")] * 2, 0)]
        [[0, 1, 2], [3, 4]]
    """
    _refuse_packed(batch, "be split: its values are not in the order of samples. Pack inside the module's forward")
    if len(devices) == 1:
        return [map_leaves(lambda x: x.to(devices[0]) if isinstance(x, Tensor) else x, batch)]
    found = leaves(batch)
    pieces = [_pieces(x, len(devices), dim) if isinstance(x, Tensor) and x.dim() else None for x in found]
    counts = {len(parts): x for x, parts in zip(found, pieces, strict=True) if parts is not None}
    if len(counts) > 1:
        shapes = ", ".join(f"{list(x.shape)} in {count}" for count, x in sorted(counts.items()))
        raise UsageError(
            f"tensors are split along dimension {dim} over {len(devices)} devices, but not all into as many pieces: "
            f"shape {shapes}. Give them the same number of samples; what is no batch goes into a buffer of the module."
        )
    return [_take(batch, found, pieces, place, device) for place, device in enumerate(devices[: next(iter(counts), 1)])]


def _pieces(x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    if not -x.dim() <= dim < x.dim():
        raise UsageError(
            f"tensors are split along dim={dim}, which one of shape {list(x.shape)} does not have. Give it that "
            f"dimension, or pass it in as a list (.tolist()) if every replica needs all of it."
        )
    return x.chunk(count, dim)


def _take(batch: Any, found: list[Any], pieces: list[Any], place: int, device: torch.device) -> Any:
    """The batch of one device."""

    # A copy even on the tensor's own device. Replicas that write to their pieces (a ReLU in place) would otherwise
    # share one version counter, and autograd would find fault with the ones that did not write.
    def move(x: Any, parts: tuple[Tensor, ...] | None) -> Any:
        piece = x if parts is None else parts[place]
        return piece.to(device, copy=True, non_blocking=True) if isinstance(piece, Tensor) else piece

    moved = iter([move(x, parts) for x, parts in zip(found, pieces, strict=True)])
    return map_leaves(lambda _: next(moved), batch)


def join(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Put the outputs of all replicas together: tensors along ``dim``, scalars as a vector.

    Args:
        outputs: One for each replica, of the same nesting and types. What is no tensor must be the same in all.
        device: Where the result is to be.
        dim: The dimension to join along.

    Raises:
        UsageError: Outputs differ in nesting or in something that is no tensor, or tensors do not fit together.

    Example:
        >>> join([{"y": torch.zeros(2, 3), "n": 4}, {"y": torch.ones(1, 3), "n": 4}], torch.device("cpu"), 0)["y"].shape
        torch.Size([3, 3])
    """
    _refuse_packed(outputs, "be joined. Unpack inside the module's forward (torch.nn.utils.rnn.pad_packed_sequence)")
    forms = [describe(output, leaf=_kind) for output in outputs]
    different = next((place for place, form in enumerate(forms) if form != forms[0]), None)
    if different is not None:
        raise UsageError(
            f"replica 0 gave {forms[0]}, but replica {different} gave {forms[different]}: outputs are joined part by "
            f"part, so every replica must give the same ones, whatever its samples."
        )
    joined = iter([_join_leaf(column, device, dim) for column in zip(*map(leaves, outputs), strict=True)])
    return map_leaves(lambda _: next(joined), outputs[0])


def _kind(leaf: Any) -> str:
    return "Tensor" if isinstance(leaf, Tensor) else type(leaf).__name__


def _join_leaf(column: Sequence[Any], device: torch.device, dim: int) -> Any:
    first = column[0]
    if isinstance(first, Tensor):
        # Waiting for a copy to the CPU is what makes its values readable.
        moved = [x.to(device, non_blocking=device.type != "cpu") for x in column]
        if all(x.dim() == 0 for x in moved):
            say_once(SCALARS)
            return torch.stack(moved)
        return _concatenate(moved, dim)
    if all(x is first or (isinstance(x, (bool, int, float, complex, str, bytes)) and x == first) for x in column):
        return first
    raise UsageError(
        f"replicas gave {', '.join(repr(x) for x in column)} in the same place of their outputs. Only tensors are "
        f"joined: return torch.tensor(...) for a vector of all, or the same value in every replica."
    )


def _concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    try:
        return torch.cat(list(tensors), dim)
    except (RuntimeError, IndexError) as error:
        shapes = " and ".join(str(list(x.shape)) for x in tensors)
        raise UsageError(
            f"outputs of shapes {shapes} cannot be joined along dimension {dim}. Give them the same other dimensions, "
            f"for instance by padding to a fixed length. torch says: {error}"
        ) from error


def _refuse_packed(x: Any, cannot: str) -> None:
    if isinstance(x, PackedSequence):
        raise UsageError(f"DataParallel: a PackedSequence cannot {cannot}, and pass padded tensors and lengths.")
    if isinstance(x, (list, tuple)):
        for value in x:
            _refuse_packed(value, cannot)
    elif isinstance(x, Mapping):
        for value in x.values():
            _refuse_packed(value, cannot)
