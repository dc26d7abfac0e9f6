"""Counts, means and squared deviations of local batches, merged into those of the global batch. Pure."""

from torch import Tensor


def combine_moments(count: Tensor, mean: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of each rank's local batch into those of the global batch.

    Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983, equation 2.1, over any number of ranks.
    The same rows give the same bits on every rank.

    Args:
        count: Values per channel on each rank, shape ``(ranks, 1)``. A rank may have none, but not all of them.
        mean: Mean per rank and channel, shape ``(ranks, channels)``; 0 where the rank has no values.
        m2: Sum of squared deviations from that mean, same shape.

    Returns:
        Count ``(1,)``, mean ``(channels,)`` and m2 ``(channels,)`` of all values.

    Example:
        >>> import torch
        >>> x = torch.arange(6.0).reshape(2, 3, 1)                     # 2 ranks, 3 values, 1 channel
        >>> n, mu = torch.tensor([[3.0], [3.0]]), x.mean(1)
        >>> combine_moments(n, mu, ((x - mu[:, None]) ** 2).sum(1))[2] / 6 == x.var(correction=0)
        tensor([True])
    """
    total = count.sum(0)
    merged = (count * mean).sum(0) / total
    return total, merged, (m2 + count * (mean - merged).square()).sum(0)
