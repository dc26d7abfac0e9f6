"""What a round's words tell of ranks that are not in the same step, said on every rank."""

from collections.abc import Sequence

import torch

from lockstep.errors import LostRankError, MismatchError
from lockstep.parallel.control import Control, in_step
from lockstep.parallel.peers import Peers
from lockstep.parallel.rates import differ

_SHOWN = 8  # learning rates of each rank


def refuse_disagreement(
    heard: Control, peers: Peers, device: torch.device, steps: int, batches: int, rates: Sequence[float]
) -> None:
    """Raise, on every rank, if the words say that a rank is somewhere else.

    Args:
        heard: The sums of all ranks' words.
        peers: The ranks.
        device: Where the words came in.
        steps: This rank's optimizer steps so far.
        batches: Its batches of a `lockstep.DataLoader`.
        rates: The learning rates of its last step.

    Raises:
        MismatchError: Steps, batches or learning rates differ.
        LostRankError: A backward raised on some of the ranks.
    """
    if not in_step(heard):
        mine = torch.tensor([steps, batches], device=device)
        raise MismatchError(_explain_steps(peers.rank, peers.ranks, peers.line_up(mine).tolist()))
    if 0 < heard.failed < peers.size:
        raise LostRankError(
            f"rank {peers.rank}: a backward raised on {heard.failed:g} of ranks {peers.ranks}, so this step's "
            f"gradients are not complete on any. Look for that rank's own error; if it was caught, skip the step on "
            f"every rank."
        )
    if differ(heard.rates, heard.squared_rates, heard.rated):
        mine = torch.full((_SHOWN,), torch.nan, dtype=torch.float64, device=device)
        mine[: len(rates)] = torch.tensor(rates[:_SHOWN], dtype=torch.float64)
        raise MismatchError(_explain_rates(peers.rank, peers.ranks, peers.line_up(mine).tolist()))


def _explain_steps(rank: int, ranks: Sequence[int], counts: Sequence[Sequence[int]]) -> str:
    """Say how ranks differ that are not in the same step.

    Args:
        rank: Who says so.
        ranks: All, as numbers in the world.
        counts: Each one's optimizer steps, and batches of a `lockstep.DataLoader`.

    Example:
        >>> _explain_steps(1, [0, 1], [[7, 8], [7, 9]])[101:153]
        'so far: rank 0: 7, rank 1: 7; batches: rank 0: 8, ra'
    """
    steps, batches = (
        ", ".join(f"rank {one}: {count[column]}" for one, count in zip(ranks, counts, strict=True)) for column in (0, 1)
    )
    skipped = len({count[1] for count in counts}) > 1
    return (
        f"rank {rank}: this backward met another step's on other ranks; optimizer steps taken, or left by an error, so "
        f"far: {steps}{f'; batches: {batches}' if skipped else ''}. Every rank must take the same steps: where one has "
        f"no data, or skips a batch, let it call lockstep.sync_gradients(model) and the optimizer all the same"
        f"{', or update.backward(losses) with its empty losses' if skipped else ''}."
    )


def _explain_rates(rank: int, ranks: Sequence[int], rates: Sequence[Sequence[float]]) -> str:
    """Say which rank had which; NaN fills the rows.

    Example:
        >>> _explain_rates(1, [0, 1], [[0.1, float("nan")], [0.2, float("nan")]])[53:128]
        'tes on other ranks, so the models parted: rank 0: 0.1; rank 1: 0.2. Step a '
    """
    shown = "; ".join(
        f"rank {one}: {', '.join(f'{rate:g}' for rate in row if rate == rate) or 'none'}"
        for one, row in zip(ranks, rates, strict=True)
    )
    return (
        f"rank {rank}: the last optimizer step had other learning rates on other ranks, so the models parted: {shown}. "
        f"Step a scheduler on every rank, and give one that follows a number, as ReduceLROnPlateau does, the same "
        f"number on each: scheduler.step(lockstep.mean(total, count)). Go on from the last checkpoint."
    )
