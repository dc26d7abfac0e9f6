"""Tensors from one device to another, small ones together; and whether two devices hold the same."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Up to here a message of its own costs more than packing, and so does a kernel of its own to look at it.
_SMALL = 1 << 18  # bytes
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
        pieces = pack.split([tensor.numel() for tensor in some])
        torch._foreach_copy_(there, [piece.view_as(tensor) for piece, tensor in zip(pieces, some, strict=True)])
        sent.update(zip(places, there, strict=True))
    return [sent[place] for place in range(len(tensors))]


def differing(these: Sequence[Tensor], those: Sequence[Tensor]) -> list[bool]:
    """Say of each pair whether the values differ; small ones count as one, and differ together.

    Each device looks at its own, and only sums travel.

    Args:
        these: Tensors of one device, strided.
        those: As many of the same shapes and dtypes, of one device.
    """
    if not these:
        return []
    here, there = _sums(these), _sums(those)
    sizes = [x.numel() for x in here]
    pairs = zip(here, torch.cat(there).to(here[0].device).split(sizes), strict=True)
    unlike = iter(torch.stack([(a != b).any() for a, b in pairs]).tolist())
    small = next(unlike)
    return [next(unlike) if tensor.nbytes > _SMALL else small for tensor in these]


def _sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of all small tensors together, then of each large one: sums over its bits, 1-D, int64."""
    packed = torch.cat([_bits(tensor) for tensor in tensors if tensor.nbytes <= _SMALL] or [_bits(tensors[0])[:0]])
    found = [_weighted(packed)]
    for tensor in tensors:
        if tensor.nbytes > _SMALL:
            bits = _bits(tensor)
            blocks = bits.numel() // (8 * _BLOCK)
            head, tail = bits.split([8 * _BLOCK * blocks, bits.numel() - 8 * _BLOCK * blocks])
            found.append(torch.cat([head.view(torch.int64).view(blocks, _BLOCK).sum(1), _weighted(tail)]))
    return found


def _bits(tensor: Tensor) -> Tensor:
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bits if bits.storage_offset() % 8 == 0 else bits.clone()


def _weighted(bits: Tensor) -> Tensor:
    """One sum in which every word counts by its place."""
    words = torch.cat([bits, bits.new_zeros(-bits.numel() % 8)]).view(torch.int64)
    return (words * torch.arange(1, 2 * words.numel(), 2, device=bits.device)).sum().view(1)
