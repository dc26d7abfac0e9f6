"""The passes over this rank's own values, on torch's fused kernels: one table row for each kind of device.

The operators below are torch's, but most have no page in its documentation. Checked on torch 2.9 to 2.14 (CPU;
tests/gpu compares the CUDA row with the CPU row where there is a GPU).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """Of the global batch; ``(C,)`` in the dtype of `statistics_dtype`."""

    mean: Tensor
    variance: Tensor  # biased
    invstd: Tensor  # 1 / sqrt(variance + eps)
    eps: float
    values: int  # per channel


class Kernels(NamedTuple):
    """What a device has to be able to do. ``x`` and ``dy`` are ``(N, C, ...)`` and not empty, the rest is ``(C,)``."""

    measure: Callable[[Tensor, float], tuple[Tensor, Tensor]]
    """(x, eps) to mean and biased variance of each channel, in the dtype of `statistics_dtype`."""

    normalise: Callable[[Tensor, Tensor | None, Tensor | None, Statistics], Tensor]
    """(x, weight, bias, statistics) to y."""

    gradient_sums: Callable[[Tensor, Tensor, Statistics], tuple[Tensor, Tensor]]
    """(dy, x, statistics) to the sums of dy and of dy * xhat, xhat being the normalised x."""

    input_gradient: Callable[[Tensor, Tensor, Tensor | None, Statistics, Tensor], Tensor]
    """(dy, x, weight, statistics, both sums over all ranks ``(2 C,)``) to dx."""


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Statistics are kept in float64 for float64 values, else in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _cpu_measure(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    # torch sums the statistics of contiguous batches value by value. Below are two ways to its vectorised kernels, both
    # two to four times faster where they are taken: all groups are of one size, so that merging them needs no counts.
    samples, channels = x.shape[:2]
    plane = x.numel() // (samples * channels)
    if plane > 1 and x.is_contiguous():
        if samples >= _SAMPLES and plane <= _SAMPLES * samples:
            return _measure_by_place(x, channels, plane)
        if plane >= _PLANE and x.dtype == statistics_dtype(x):
            return _measure_by_plane(x, samples, channels, plane)
    return _column_statistics(x, channels)


# Where one way becomes faster than another, by 16 batches of up to 64 samples and planes of 2 x 2 to 56 x 56.
_SAMPLES, _PLANE = 8, 32


def _measure_by_place(x: Tensor, channels: int, plane: int) -> tuple[Tensor, Tensor]:
    """Each place of each plane over the samples, then over the places."""
    mean, variance = _column_statistics(x.view(-1, channels * plane), channels * plane)
    mean, variance = mean.view(channels, plane), variance.view(channels, plane)
    merged = mean.mean(1)
    return merged, (mean - merged.view(-1, 1)).square_().add_(variance).mean(1)


def _measure_by_plane(x: Tensor, samples: int, channels: int, plane: int) -> tuple[Tensor, Tensor]:
    """Each plane by group norm's kernel, although that writes a normalised copy as well, then over the samples."""
    _, mean, rstd = torch.native_group_norm(x, None, None, samples, channels, plane, channels, 0.0)
    merged = mean.mean(0)
    # A constant plane has rstd = inf, whose -2nd power is the right 0.
    return merged, (mean - merged).square_().add_(rstd.pow_(-2)).mean(0)


def _column_statistics(x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    # With half types the result has the dtype of the running statistics, which a momentum of 0 leaves unread.
    unused = x.new_zeros(channels, dtype=torch.float32) if x.dtype != statistics_dtype(x) else None
    return torch.batch_norm_update_stats(x, unused, unused, 0.0)


def _cpu_normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, over: Statistics) -> Tensor:
    return _normalise_by(x, over, _fitting(weight, over.mean), _fitting(bias, over.mean))


def _normalise_by(x: Tensor, over: Statistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return torch.batch_norm(x, weight, bias, over.mean, over.variance, False, 0.0, over.eps, False)


def _cpu_gradient_sums(dy: Tensor, x: Tensor, over: Statistics) -> tuple[Tensor, Tensor]:
    # Given global statistics, what torch calls the gradients of weight and bias are just these two sums, in one pass.
    _, of_xhat, of_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, None, None, over.mean, over.invstd, True, 0.0, [False, True, True]
    )
    return of_dy, of_xhat


def _cpu_input_gradient(dy: Tensor, x: Tensor, weight: Tensor | None, over: Statistics, sums: Tensor) -> Tensor:
    # dx = s (dy - mean_dy - xhat mean_dy_xhat) with s = weight * invstd. torch's own backward pass would take local
    # means, so the part in x is written as a batch norm of x with another weight and bias, and the part in dy is added:
    # two passes.
    wide = over.mean.dtype
    scale = over.invstd if weight is None else over.invstd * like(weight, wide)
    bias, slope = (sums.view(2, -1) * (scale * (-1.0 / over.values))).unbind()
    part = _normalise_by(like(x, wide), over, slope, bias)
    return like(part.addcmul_(like(dy, wide), scale.view(-1, *[1] * (x.dim() - 2))), x.dtype)


def _cuda_measure(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, invstd = torch.batch_norm_stats(_dense(x), eps)
    return mean, (invstd.pow(-2) - eps).clamp_min_(0)


def _cuda_normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, over: Statistics) -> Tensor:
    mean = over.mean
    return torch.batch_norm_elemt(_dense(x), _fitting(weight, mean), _fitting(bias, mean), mean, over.invstd, over.eps)


def _cuda_gradient_sums(dy: Tensor, x: Tensor, over: Statistics) -> tuple[Tensor, Tensor]:
    # Of sum_dy, sum_dy_xmu, grad_weight and grad_bias, the third is the sum of dy * xhat.
    sum_dy, _, of_xhat, _ = torch.batch_norm_backward_reduce(
        _dense(dy), _dense(x), over.mean, over.invstd, torch.ones_like(over.mean), True, True, False
    )
    return sum_dy, of_xhat


def _cuda_input_gradient(dy: Tensor, x: Tensor, weight: Tensor | None, over: Statistics, sums: Tensor) -> Tensor:
    # The kernel divides both sums by the number of values itself, an int32. Ours are divided already, so that number is
    # 1; and it wants the sum of dy * (x - mean), which is that of dy * xhat over invstd.
    mean_dy, mean_dy_xhat = (sums / over.values).chunk(2)
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(
        _dense(dy),
        _dense(x),
        over.mean,
        over.invstd,
        _fitting(weight, over.mean),
        mean_dy,
        mean_dy_xhat / over.invstd,
        one,
    )


def like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``tensor.to(dtype)`` gives, without the call where it would do nothing.

    Between two passes over large tensors the code of each small operation comes from far away: 10 us instead of 2.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _fitting(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    return None if tensor is None else like(tensor, other.dtype)


def _dense(x: Tensor) -> Tensor:
    """The kernels for CUDA know contiguous and channels-last tensors only."""
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x if x.dim() in (4, 5) and x.is_contiguous(memory_format=last) else x.contiguous()


_CPU = Kernels(_cpu_measure, _cpu_normalise, _cpu_gradient_sums, _cpu_input_gradient)
_CUDA = Kernels(_cuda_measure, _cuda_normalise, _cuda_gradient_sums, _cuda_input_gradient)


def kernels_for(x: Tensor) -> Kernels:
    """The row for the tensor's device."""
    return _CPU if x.is_cpu else _CUDA  # in a rehearsal is_cuda may be true of a CPU tensor; is_cpu is never wrong
