"""Batch norm over a group of ranks, in training: what is sent, what is learnt, what is differentiated."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import batch_norm

from lockstep.parallel.batchnorm.exchange import LayerPeers, backward_meets, gather_rows, role
from lockstep.parallel.batchnorm.gradients import Normalise
from lockstep.parallel.batchnorm.kernels import kernels_for, statistics_dtype
from lockstep.parallel.batchnorm.moments import combine_moments


class Running(NamedTuple):
    """Running statistics, moved in place towards those of each global batch."""

    mean: Tensor  # (C,)
    variance: Tensor  # (C,), unbiased
    momentum: float


def batch_norm_over_ranks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None, *, eps: float, group: Any
) -> Tensor:
    """Normalise by the statistics of the global batch; every rank of the group calls it.

    Args:
        x: This rank's values, ``(N, C, ...)``; ``N`` may differ between ranks, and be 0.
        weight: Scale, ``(C,)``, or None.
        bias: Shift, ``(C,)``, or None.
        running: What learns the statistics, or None.
        eps: Added to the variance.
        group: The ranks that take part; None for all.

    Returns:
        The normalised values, in the dtype and memory format of ``x``. In backward the gradient of ``x`` is that of the
        losses of all ranks together; those of ``weight`` and ``bias`` are of this rank's own loss, to be summed or
        averaged with the gradients of all other parameters.

    Raises:
        ValueError: All ranks together have one value per channel; on every rank.
        MismatchError: Some ranks record gradients and some do not; on every rank.
        LateRankError: A rank did not come.
        LostRankError: A rank is gone.
    """
    peers = LayerPeers(group, dist.get_world_size(group), f"SyncBatchNorm({x.shape[1]})")
    with torch.no_grad():
        count, mean, variance = _measure(x, eps)
    rows = gather_rows(count, mean, variance, role(x), peers)
    everything = sum(rows.counts)
    if everything == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {list(x.shape)} on rank "
            f"{dist.get_rank(group)} of {len(rows.counts)}, and one value per channel over all of them"
        )
    meets = backward_meets(rows.roles, peers)
    if everything == 0:  # torch's own way: an empty output, nothing learnt, nobody to meet in backward
        return batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    mean, variance = combine_moments(rows.values * (1.0 / everything), rows.mean, rows.variance)
    if running is not None:
        learn(running, mean, variance * (everything / (everything - 1)))
    # A rank whose own input and parameters need no gradient must come to backward all the same if others wait there.
    anchor = mean.new_empty(0).requires_grad_() if meets and not x.requires_grad else None
    y: Tensor = Normalise.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, anchor, mean, variance, eps, everything, peers if meets else None
    )
    return y


def _measure(x: Tensor, eps: float) -> tuple[int, Tensor, Tensor]:
    """Count, mean and biased variance of this rank's values."""
    if x.numel() == 0:
        zeros = x.new_zeros(x.shape[1], dtype=statistics_dtype(x))
        return 0, zeros, zeros
    count = x.numel() // x.shape[1]
    mean, variance = kernels_for(x).measure(x, eps)
    return count, mean, variance


def learn(running: Running, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics; the step is worked out in the dtype of the new ones, and rounded once."""
    for kept, new in ((running.mean, mean), (running.variance, variance)):
        if kept.dtype == new.dtype:
            kept.lerp_(new, running.momentum)
        else:
            kept.copy_(torch.lerp(kept.to(new.dtype), new, running.momentum))
