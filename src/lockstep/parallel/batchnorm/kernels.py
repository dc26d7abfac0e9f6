"""The passes over this rank's own values, on torch's fused kernels: one table row for each kind of device.

The operators below are torch's, but most have no page in its documentation. Checked on torch 2.13 (CPU; tests/gpu
compares the CUDA row with the CPU row where there is a GPU).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm


class Kernels(NamedTuple):
    """What a device has to be able to do. ``x`` and ``dy`` are ``(N, C, ...)`` and not empty, the rest is ``(C,)``."""

    measure: Callable[[Tensor, float], tuple[Tensor, Tensor]]
    """(x, eps) to mean and biased variance of each channel, in the dtype of `statistics_dtype`."""

    normalise: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, float], Tensor]
    """(x, weight, bias, mean, variance, eps) to y."""

    gradient_sums: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(dy, x, mean, invstd) to the sums of dy and of dy * xhat, xhat being the normalised x."""

    input_gradient: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Tensor]
    """(dy, x, weight, mean, invstd, mean of dy, mean of dy * xhat) to dx; both means over the global batch."""


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Statistics are kept in float64 for float64 values, else in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# From this size of a plane on, measuring each plane by itself is the faster way.
_PLANE = 32


def _cpu_measure(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    samples, channels = x.shape[:2]
    plane = x.numel() // (samples * channels)
    if plane >= _PLANE and x.is_contiguous() and x.dtype == statistics_dtype(x):
        # torch's statistics of contiguous batches are summed one by one; those of its group norm are vectorised, faster
        # although they write a normalised copy as well. One group for each plane, all of one size, so that merging them
        # needs no counts. A constant plane has rstd = inf, whose -2nd power is the right 0.
        _, mean, rstd = torch.native_group_norm(x, None, None, samples, channels, plane, channels, 0.0)
        merged = mean.mean(0)
        return merged, (rstd.pow(-2) + (mean - merged).square()).mean(0)
    # With half types the result has the dtype of the running statistics, which a momentum of 0 leaves unread.
    unused = x.new_zeros(channels, dtype=torch.float32) if x.dtype != statistics_dtype(x) else None
    return torch.batch_norm_update_stats(x, unused, unused, 0.0)


def _cpu_normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    return batch_norm(x, mean, variance, _like(weight, mean), _like(bias, mean), False, 0.0, eps)


def _cpu_gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    # Given global statistics, what torch calls the gradients of weight and bias are just these two sums, in one pass.
    _, of_xhat, of_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return of_dy, of_xhat


def _cpu_input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, mean_dy: Tensor, mean_dy_xhat: Tensor
) -> Tensor:
    # dx = s (dy - mean_dy - xhat mean_dy_xhat) with s = weight * invstd. torch's own backward pass would take local
    # means, so the part in x is written as a batch norm of x with constants, and the part in dy is added: two passes.
    scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
    slope, offset = -scale * invstd * mean_dy_xhat, -scale * mean_dy
    wide = x if x.dtype == invstd.dtype else x.to(invstd.dtype)
    part = batch_norm(wide, mean, torch.ones_like(mean), slope, offset, False, 0.0, 0.0)
    return part.addcmul_(dy.to(invstd.dtype), scale.view(1, -1, *[1] * (x.dim() - 2))).to(x.dtype)


def _cuda_measure(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, invstd = torch.batch_norm_stats(_dense(x), eps)
    return mean, (invstd.pow(-2) - eps).clamp_min_(0)


def _cuda_normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    invstd = (variance + eps).rsqrt_()
    return torch.batch_norm_elemt(_dense(x), _like(weight, mean), _like(bias, mean), mean, invstd, eps)


def _cuda_gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    # Of sum_dy, sum_dy_xmu, grad_weight and grad_bias, the third is the sum of dy * xhat.
    sum_dy, _, of_xhat, _ = torch.batch_norm_backward_reduce(
        _dense(dy), _dense(x), mean, invstd, torch.ones_like(mean), True, True, False
    )
    return sum_dy, of_xhat


def _cuda_input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, mean_dy: Tensor, mean_dy_xhat: Tensor
) -> Tensor:
    # The kernel divides both sums by the number of values itself. Ours are divided already, so that number is 1; and it
    # wants the sum of dy * (x - mean), which is that of dy * xhat over invstd.
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(
        _dense(dy), _dense(x), mean, invstd, _like(weight, mean), mean_dy, mean_dy_xhat / invstd, one
    )


def _like(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(other.dtype)


def _dense(x: Tensor) -> Tensor:
    """The kernels for CUDA know contiguous and channels-last tensors only."""
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x if x.dim() in (4, 5) and x.is_contiguous(memory_format=last) else x.contiguous()


_CPU = Kernels(_cpu_measure, _cpu_normalise, _cpu_gradient_sums, _cpu_input_gradient)
_CUDA = Kernels(_cuda_measure, _cuda_normalise, _cuda_gradient_sums, _cuda_input_gradient)


def kernels_for(x: Tensor) -> Kernels:
    """The row for the tensor's device."""
    return _CUDA if x.is_cuda else _CPU
