"""What goes wrong on one rank is known to all; and a few words from one rank to all."""

import torch

from lockstep.world import World

_MOST = 1000


def first_problem(world: World, mine: str, *numbers: int) -> tuple[str, list[list[int]]]:
    """Exchange a problem, if there is one, and a few numbers.

    Args:
        world: The world.
        mine: What went wrong here; empty if nothing did.
        numbers: As many on every rank, of 63 bits at most.

    Returns:
        What went wrong on the first rank where something did, with its number; empty if nothing did. And every rank's
        numbers.
    """
    row = torch.tensor([bool(mine), *numbers])
    rows: list[list[int]] = world.ranks.line_up(row).tolist()
    texts = tell_all(world, mine) if any(row[0] for row in rows) else []
    problem = next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")
    return problem, [row[1:] for row in rows]


def tell_all(world: World, mine: str) -> list[str]:
    """Give every rank's text, by rank; shortened."""
    message = torch.zeros(_MOST, dtype=torch.uint8)
    data = bytearray(mine.encode()[:_MOST])
    if data:
        message[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in world.ranks.line_up(message)]
