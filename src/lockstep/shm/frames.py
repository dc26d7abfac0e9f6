"""What ranks of a node, and then nodes, show each other in front of every call over nodes.

The call in words, so that those that do different things find out before any data are mixed; why somebody cannot take
part; and the data, if they are few.
"""

import struct

import torch
from torch import Tensor

from lockstep.errors import LateRankError, LockstepError, LostRankError, MismatchError
from lockstep.shm.agreement import describe

Words = tuple[int, int, int, int, int, int]
"""Number, kind, operation, dtype, root and count of a call."""

SMALL = 1024
"""Bytes of data that travel in the frame itself; also the longest trouble."""

_WORDS = struct.Struct("6qB")  # six words, and the trouble's kind
_HEAD = 64
FRAME = _HEAD + SMALL
"""Bytes, always: frames of different calls must be of one size to be compared at all."""

_TROUBLES: tuple[type[LockstepError], ...] = (MismatchError, LateRankError, LostRankError)
"""By number, from 1 on."""


def pack(words: Words, data: Tensor | None = None, trouble: LockstepError | None = None) -> Tensor:
    """Make a frame.

    Args:
        words: The call.
        data: Contiguous, `SMALL` bytes at most.
        trouble: Goes in place of data.

    Returns:
        `FRAME` bytes.

    Example:
        >>> frame = pack((7, 1, 1, 0, 0, 2), torch.tensor([1.0, 2.0]))
        >>> read_words(frame), read_data(frame, torch.float32, 2), read_trouble(frame, "")
        ((7, 1, 1, 0, 0, 2), tensor([1., 2.]), None)
    """
    space = bytearray(FRAME)
    if trouble is not None:
        text = str(trouble).encode()[:SMALL]
        kind = next((n for n, kind in enumerate(_TROUBLES, 1) if isinstance(trouble, kind)), len(_TROUBLES))
        _WORDS.pack_into(space, 0, *words, kind)
        space[_HEAD : _HEAD + len(text)] = text
        return torch.frombuffer(space, dtype=torch.uint8)
    _WORDS.pack_into(space, 0, *words, 0)
    frame = torch.frombuffer(space, dtype=torch.uint8)
    if data is not None and data.numel():
        own = data.view(torch.uint8)
        frame[_HEAD : _HEAD + own.numel()] = own
    return frame


def read_words(frame: Tensor) -> Words:
    """Give the call that somebody is in."""
    return tuple(frame[:48].view(torch.int64).tolist())


def read_data(frame: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """Give the data that came along, flat; they stay where they are in the frame."""
    return frame[_HEAD : _HEAD + count * dtype.itemsize].view(dtype)


def read_trouble(frame: Tensor, who: str) -> LockstepError | None:
    """Give why somebody does not take part, in its own class.

    Args:
        frame: Theirs.
        who: Begins the sentence.
    """
    kind = int(frame[48])
    if not kind:
        return None
    return _TROUBLES[kind - 1](who + bytes(frame[_HEAD:].tolist()).rstrip(b"\0").decode(errors="replace"))


def find_difference(calls: list[Words], ranks: list[int]) -> str:
    """Say which ranks brought which calls, if they are not all the same.

    Args:
        calls: One for each of `ranks`.
        ranks: As numbers in the world.

    Example:
        >>> find_difference([(4, 9, 0, 0, 0, 0)] * 2, [0, 1])
        ''
        >>> find_difference([(4, 9, 0, 0, 0, 0), (4, 5, 0, 0, 1, 3)], [0, 1])[:71]
        'rank 0 called barrier, rank 1 called broadcast of 3 float32 from 1, col'
    """
    other = next((place for place, call in enumerate(calls) if call != calls[0]), None)
    if other is None:
        return ""
    numbers = f"number {calls[0][0]}" + (f" and {calls[other][0]}" if calls[other][0] != calls[0][0] else "")
    return (
        f"rank {ranks[0]} called {describe(calls[0])}, rank {ranks[other]} called {describe(calls[other])}, collective "
        f"{numbers}. Every rank must make the same calls in the same order, with the same sizes and dtypes."
    )
