"""Which samples of a global batch a rank takes: arithmetic only.

Global batch ``k`` of an epoch is positions ``[k * G, (k + 1) * G)`` of the epoch's order; rank ``r`` of ``W`` takes the
slice ``[r * n // W, (r + 1) * n // W)`` of the ``n`` samples in it. What forms a step never depends on the number of
ranks.
"""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def share(n: int, rank: int, size: int) -> range:
    """Give the places in a global batch of ``n`` samples that ``rank`` of ``size`` takes; none if ``n`` is too small.

    Example:
        >>> [list(share(5, rank, 3)) for rank in range(3)]
        [[0], [1, 2], [3, 4]]
    """
    return range(rank * n // size, (rank + 1) * n // size)


def count_batches(n: int, batch_size: int, drop_last: bool) -> int:
    """Give how many global batches ``n`` samples make.

    Example:
        >>> count_batches(10, 4, drop_last=False), count_batches(10, 4, drop_last=True)
        (3, 2)
    """
    return n // batch_size if drop_last else -(-n // batch_size)


def end_of_epoch(start: int, n: int, batch_size: int, drop_last: bool) -> int:
    """Give the position behind the last sample that an epoch of ``n`` samples uses if it begins at ``start``.

    Example:
        >>> end_of_epoch(0, 10, 4, drop_last=True), end_of_epoch(2, 10, 4, drop_last=True)
        (8, 10)
    """
    return start + (n - start) // batch_size * batch_size if drop_last and n > start else n


def own_positions(start: int, stop: int, batch_size: int, rank: int, size: int) -> Indices:
    """Give a rank's positions in the global batches that begin at ``start``; the last may be short.

    Args:
        start: Position where the first of the batches begins.
        stop: Position behind the last sample.
        batch_size: Samples in a global batch.
        rank: Whose positions.
        size: Number of ranks.

    Returns:
        Positions in ascending order, ``(n,)``.

    Example:
        >>> own_positions(0, 10, 4, rank=1, size=2).tolist()
        [2, 3, 6, 7, 9]
    """
    whole, rest = divmod(max(0, stop - start), batch_size)
    mine = share(batch_size, rank, size)
    heads = start + batch_size * np.arange(whole, dtype=np.int64)
    # (batches, own samples of each)
    positions = (heads[:, None] + np.arange(mine.start, mine.stop, dtype=np.int64)).reshape(-1)
    if not rest:
        return positions
    tail = share(rest, rank, size)
    tail_start = start + whole * batch_size
    return np.concatenate((positions, np.arange(tail_start + tail.start, tail_start + tail.stop, dtype=np.int64)))
