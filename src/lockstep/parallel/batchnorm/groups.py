"""Groups of neighbouring ranks that normalise together."""

from typing import Any

import torch.distributed as dist

from lockstep.errors import UsageError


def neighbours(group_size: int, world_size: int) -> list[range]:
    """Split the ranks into groups of neighbours.

    Raises:
        UsageError: The groups would not be of equal size.

    Example:
        >>> neighbours(2, world_size=4)
        [range(0, 2), range(2, 4)]
    """
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or world_size % group_size:
        fitting = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise UsageError(
            f"create_syncbn_process_group(group_size={group_size!r}): {world_size} rank(s) cannot be split into groups "
            f"of that size. Choose one of {fitting}, or 0 for all ranks together."
        )
    return [range(first, first + group_size) for first in range(0, world_size, group_size)]


def create_syncbn_process_group(group_size: int) -> Any:
    """Make groups of ``group_size`` neighbouring ranks; every rank calls it.

    Args:
        group_size: Ranks in a group; divides the size of the world. 0 means all.

    Returns:
        This rank's group, for ``process_group=``; None where that is all ranks.

    Raises:
        UsageError: ``group_size`` does not divide the size of the world.

    Example:
        >>> import lockstep
        >>> layer = lockstep.SyncBatchNorm(8, process_group=lockstep.create_syncbn_process_group(1))
    """
    connected = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if connected else 1
    if group_size == 0 and not isinstance(group_size, bool):
        return None
    groups = neighbours(group_size, size)
    if len(groups) == 1:
        return None
    # Every rank makes every group, in one order, as torch asks for.
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return made[dist.get_rank() // group_size]
