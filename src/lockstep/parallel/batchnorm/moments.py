"""Counts, means and variances of local batches, merged into those of the global batch. Pure."""

from torch import Tensor


def combine_moments(share: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the moments of each rank's local batch into those of the global batch.

    Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983, equation 2.1, over any number of ranks
    and divided by the number of values. The same rows give the same bits on every rank.

    Args:
        share: The part of all values that each rank has, shape ``(ranks, 1)``. A rank may have none.
        mean: Mean per rank and channel, shape ``(ranks, channels)``; 0 where the rank has no values.
        variance: Mean squared deviation from that mean, same shape; 0 where the rank has no values.

    Returns:
        Mean and (biased) variance of all values, ``(channels,)`` each.

    Example:
        >>> import torch
        >>> x = torch.arange(6.0).reshape(2, 3, 1)                     # 2 ranks, 3 values, 1 channel
        >>> combine_moments(torch.tensor([[0.5], [0.5]]), x.mean(1), x.var(1, correction=0))[1] == x.var(correction=0)
        tensor([True])
    """
    merged = (mean * share).sum(0)
    return merged, (mean - merged).square_().add_(variance).mul_(share).sum(0)
