"""Do all ranks bring the same thing? Compared before anything is sent that would hang or be garbage otherwise."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.errors import MismatchError, UsageError
from lockstep.world import World

_SHOWN = 512  # bytes of a rank's description that travel when there is something to show


def agree(world: World, call: str, mine: str, numbers: list[int] | None = None) -> list[list[int]]:
    """Raise on every rank unless all bring the same description; exchange a few numbers on the way.

    Args:
        world: The world.
        call: What the user wrote, for the message.
        mine: Describes what this rank brings. Ranks with equal descriptions bring equally many numbers.
        numbers: Integers to hand to every rank.

    Returns:
        Every rank's ``numbers``, by rank.

    Raises:
        MismatchError: Descriptions differ; the message has both.
    """
    if world.size == 1:
        return [numbers or []]
    text = f"{call}: {mine}"
    rows = world.ranks.line_up(torch.tensor([zlib.crc32(text.encode()), len(text)]))
    if not bool((rows == rows[0]).all()):
        raise MismatchError(_difference(world, call, text))
    if not numbers:
        return [[] for _ in range(world.size)]
    found: list[list[int]] = world.ranks.line_up(torch.tensor(numbers)).tolist()
    return found


@contextmanager
def problems_reach_all(world: World, call: str) -> Iterator[None]:
    """What is wrong on one rank is raised on all: the others wait, or soon will, in `agree` for the same call.

    Raises:
        UsageError: The block raised it, with the same words on every rank.
        MismatchError: It raised on some ranks only, or with other words.
    """
    try:
        yield
    except UsageError as problem:
        agree(world, call, f"an error: {problem}")
        raise UsageError(f"rank {world.rank} of {world.size}: {problem}") from None


def _difference(world: World, call: str, mine: str) -> str:
    """Say who brought what; every rank comes here, since every rank saw the difference."""
    texts = exchange_texts(world, mine, _SHOWN)
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
    return (
        f"rank {world.rank} of {world.size}: ranks brought different things to {call}. Rank 0: {texts[0]}; "
        f"rank {other}: {texts[other]}. Every rank must make the same calls in the same order, with the same "
        f"structure, shapes and dtypes."
    )


def exchange_texts(world: World, mine: str, most: int) -> list[str]:
    """Give every rank's text, by rank; ``most`` bytes of each."""
    message = torch.tensor(list(mine.encode()[:most].ljust(most, b"\0")), dtype=torch.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in world.ranks.line_up(message).tolist()]
