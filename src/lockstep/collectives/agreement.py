"""Do all ranks bring the same thing? Compared before anything is sent that would hang or be garbage otherwise."""

import zlib

import torch
from torch import Tensor

from lockstep.errors import MismatchError
from lockstep.world import World

_SHOWN = 512


def agree(world: World, call: str, mine: str, numbers: list[int] | None = None) -> list[list[int]]:
    """Raise on every rank unless all bring the same description; exchange a few numbers on the way.

    Args:
        world: The world.
        call: What the user wrote, for the message.
        mine: Describes what this rank brings.
        numbers: Integers to hand to every rank.

    Returns:
        Every rank's ``numbers``, by rank.

    Raises:
        MismatchError: Descriptions differ; the message has both.
    """
    numbers = numbers or []
    if world.size == 1:
        return [numbers]
    text = f"{call}: {mine}".encode()
    # The count of numbers is not sent: it follows from the description, and the row has a fixed length only if that is equal.
    header = torch.tensor([zlib.crc32(text), len(text)])
    rows = world.ranks.line_up(header)
    if not bool((rows == rows[0]).all()):
        raise MismatchError(_difference(world, call, f"{call}: {mine}"))
    if not numbers:
        return [[] for _ in range(world.size)]
    found: list[list[int]] = world.ranks.line_up(torch.tensor(numbers)).tolist()
    return found


def _difference(world: World, call: str, mine: str) -> str:
    """Say who brought what; every rank is here, since every rank saw the difference."""
    texts = [_decode(row) for row in world.ranks.line_up(_encode(mine))]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
    return (
        f"rank {world.rank} of {world.size}: ranks brought different things to {call}. Rank 0: {texts[0]}; rank {other}: "
        f"{texts[other]}. Every rank must call the same, in the same order, with the same structure and dtypes."
    )


def _encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode()[:_SHOWN].ljust(_SHOWN, b" ")), dtype=torch.uint8)


def _decode(row: Tensor) -> str:
    return bytes(row.tolist()).decode(errors="replace").rstrip()
