"""Tensors from one device to another, small ones together; and whether two devices hold the same."""

from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL = 1 << 18  # bytes; up to here a message of its own costs more than packing
_TINY = 1 << 14  # bytes; up to here a kernel of its own to look at it costs more than packing
_BLOCK = 1024  # words in a block that is summed; 8 KiB


def ship(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Give tensors of one device as new ones on another, with the same strides; small ones travel together."""
    sent: dict[int, Tensor] = {}
    packs: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        packable = tensor.layout == torch.strided and tensor.is_contiguous() and tensor.nbytes <= _SMALL
        if device.type == "cpu" or not packable:
            sent[place] = tensor.to(device, copy=True, non_blocking=device.type != "cpu")
        else:
            packs.setdefault(tensor.dtype, []).append(place)
    for places in packs.values():
        some = [tensors[place] for place in places]
        pack = torch.cat([tensor.reshape(-1) for tensor in some]).to(device, non_blocking=True)
        there = [torch.empty_like(tensor, device=device) for tensor in some]
        # Views of the pack would share one version counter, and a write to one would count as a write to all.
        pieces = torch.split(pack, [tensor.numel() for tensor in some])
        torch._foreach_copy_(there, [piece.view_as(tensor) for piece, tensor in zip(pieces, some, strict=True)])
        sent.update(zip(places, there, strict=True))
    return [sent[place] for place in range(len(tensors))]


def sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Give sums over all bits: of tiny tensors together, then of each other one.

    Args:
        tensors: Of one device, strided.

    Returns:
        Sums, 1-D, int64, on that device.
    """
    if not tensors:
        return []
    none = _bits(tensors[0])[:0]
    tiny = torch.cat([none, *(_bits(tensor) for tensor in tensors if tensor.nbytes <= _TINY)])
    return [_weighted(tiny), *(_in_blocks(_bits(tensor)) for tensor in tensors if tensor.nbytes > _TINY)]


def differing(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> list[bool]:
    """Say which tensors do not have the values any more that they had; tiny ones differ together.

    Args:
        tensors: As `sums` takes them.
        before: The `sums` of as many tensors of the same shapes and dtypes, on the device of ``tensors``.
    """
    now = sums(tensors)
    if not now or torch.equal(torch.cat(now), torch.cat(list(before))):
        return [False] * len(tensors)
    tiny, *others = (not torch.equal(a, b) for a, b in zip(now, before, strict=True))
    rest = iter(others)
    return [next(rest) if x.nbytes > _TINY else tiny for x in tensors]


def _bits(tensor: Tensor) -> Tensor:
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bits if bits.storage_offset() % 8 == 0 else bits.clone()


def _weighted(bits: Tensor) -> Tensor:
    """One sum in which every word counts by its place."""
    words = torch.cat([bits, bits.new_zeros(-bits.numel() % 8)]).view(torch.int64)
    return (words * (2 * torch.arange(words.numel(), device=bits.device) + 1)).sum().view(1)


def _in_blocks(bits: Tensor) -> Tensor:
    blocks = bits.numel() // (8 * _BLOCK)
    head = bits[: 8 * _BLOCK * blocks].view(torch.int64).view(blocks, _BLOCK).sum(1)
    tail = bits[8 * _BLOCK * blocks :]
    return torch.cat([head, _weighted(tail)]) if tail.numel() else head
