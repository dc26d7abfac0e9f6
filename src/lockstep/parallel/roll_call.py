"""When a collective fails: which ranks are still there?"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

PATIENCE = timedelta(seconds=3)


def missing_ranks(store: Any, rank: int, ranks: Sequence[int], patience: timedelta = PATIENCE) -> list[int]:
    """Ask every rank of a group that saw a failure to answer; those that do not have left, or have not noticed yet.

    Args:
        store: Where they meet. If it is gone, so is the rank that keeps it, the first one.
        rank: This rank.
        ranks: All ranks of the group.
        patience: How long the others get.

    Example:
        >>> import torch.distributed as dist
        >>> missing_ranks(dist.HashStore(), 0, [0, 1], timedelta(seconds=0.01))
        [1]
    """
    try:
        store.set(f"roll call/{rank}", "")
        store.wait([f"roll call/{other}" for other in ranks], patience)
        return []
    except RuntimeError:  # torch's DistStoreError is one; a file store raises it plain
        pass
    try:
        return [other for other in ranks if not store.check([f"roll call/{other}"])]
    except RuntimeError:
        return [ranks[0]]
