"""Which gradient lies in which bucket: plain values in, plain values out."""

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

MEBIBYTE = 2**20


class Piece(NamedTuple):
    """One gradient: what it takes, and what it can share a bucket with (a dtype and a device)."""

    bytes: int
    kind: Hashable


def fill_buckets(
    pieces: Sequence[Piece], order: Sequence[int], caps: Sequence[int], ends: Collection[int] = ()
) -> list[list[int]]:
    """Divide gradients into buckets, in the order in which they are expected.

    Args:
        pieces: All gradients.
        order: Their indices, each once, the one expected first in front.
        caps: Bytes after which the first bucket is full (few, so that something travels early), the second, and so on;
            the last number is for all others.
        ends: Gradients with which every bucket is full, whatever it holds.

    Returns:
        The indices in each bucket, buckets in the order in which they become full. A bucket has one kind, and holds one
        gradient at least.

    Example:
        >>> pieces = [Piece(4, "fp32"), Piece(4, "fp32"), Piece(2, "bf16"), Piece(8, "fp32")]
        >>> fill_buckets(pieces, order=[3, 2, 1, 0], caps=[8, 16])
        [[3], [2], [1, 0]]
        >>> fill_buckets(pieces, order=[3, 2, 1, 0], caps=[99], ends={2})
        [[3], [2], [1, 0]]
    """
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    for index in order:
        kind = pieces[index].kind
        filling.setdefault(kind, []).append(index)
        held[kind] = held.get(kind, 0) + pieces[index].bytes
        if index in ends:
            full.extend(filling.values())
            filling, held = {}, {}
        elif held[kind] >= caps[min(len(full), len(caps) - 1)]:
            full.append(filling.pop(kind))
            held.pop(kind)
    return full + list(filling.values())


def small_first(sizes: Sequence[int], limit: int) -> tuple[list[int], int]:
    """Order gradients within a bucket: the small ones lie together, so that one operation serves them all.

    Returns:
        The positions in their new order, and how many of them are small.

    Example:
        >>> small_first([9, 1, 8, 2], limit=5)
        ([1, 3, 0, 2], 2)
    """
    small = [i for i, size in enumerate(sizes) if size < limit]
    return small + [i for i, size in enumerate(sizes) if size >= limit], len(small)


def complete_order(seen: Sequence[int], planned: Sequence[int]) -> list[int]:
    """Complete an order that was seen: what did not come keeps its planned place behind the others.

    Example:
        >>> complete_order([2, 0], planned=[3, 2, 1, 0])
        [2, 0, 3, 1]
    """
    came = set(seen)
    return [*seen, *(index for index in planned if index not in came)]
