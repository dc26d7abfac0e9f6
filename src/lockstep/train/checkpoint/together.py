"""What goes wrong on one rank is known to all."""

import torch

from lockstep.collectives.agreement import exchange_texts
from lockstep.world import World

_MOST = 1000  # bytes of a problem that the others are told


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
    texts = exchange_texts(world, mine, _MOST) if any(row[0] for row in rows) else []
    problem = next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")
    return problem, [row[1:] for row in rows]
