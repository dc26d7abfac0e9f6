"""Forward and backward of batch norm with given statistics, to any order.

With N values per channel in the global batch, xhat = (x - mean) * invstd and s = weight * invstd, all per channel
(Ioffe and Szegedy, "Batch Normalization", 2015, section 3, collected):

    dweight = sum(dy * xhat)    dbias = sum(dy)    dx = s * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)

where the sums in dx run over all ranks: each rank's loss depends on each rank's input, through mean and variance.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lockstep.parallel.batchnorm.exchange import LayerPeers, add_up
from lockstep.parallel.batchnorm.kernels import Statistics, kernels_for, like


class Normalise(Function):
    """y = xhat * weight + bias. Statistics come in as constants; that they depend on x is part of the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        anchor: Tensor | None,  # noqa: ARG004  (makes the output part of the graph where nothing else does)
        mean: Tensor,
        variance: Tensor,
        eps: float,
        count: int,
        peers: LayerPeers | None,
    ) -> Tensor:
        over = Statistics(mean, variance, (variance + eps).rsqrt_(), eps, count)
        ctx.save_for_backward(x, weight, bias, mean, variance, over.invstd)
        ctx.others = eps, count, peers
        if x.numel() == 0:
            return torch.empty_like(x)
        return kernels_for(x).normalise(x, weight, bias, over)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, invstd = ctx.saved_tensors
        eps, count, peers = ctx.others
        # Either way one message of the same size, so that ranks may differ in whether they build a graph of the
        # gradients.
        backward = _differentiable_backward if torch.is_grad_enabled() else _fused_backward
        dx, dweight, dbias = backward(dy, x, weight, Statistics(mean, variance, invstd, eps, count), peers)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        return (
            dx if wants_x else None,
            like(dweight, weight.dtype) if wants_weight else None,
            like(dbias, bias.dtype) if wants_bias else None,
            *_CONSTANTS,
        )


_CONSTANTS = (None,) * 6  # gradients of what forward takes after the bias


def _fused_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, over: Statistics, peers: LayerPeers | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of x, weight and bias, on torch's kernels."""
    kernels = kernels_for(x)
    if x.numel() == 0:
        dbias = dweight = torch.zeros_like(over.mean)
    else:
        dbias, dweight = kernels.gradient_sums(dy, x, over)
    if peers is None:
        return None, dweight, dbias
    sums = add_up(torch.cat((dbias, dweight)), peers)
    if x.numel() == 0:
        return torch.zeros_like(x), dweight, dbias
    return kernels.input_gradient(dy, x, weight, over, sums), dweight, dbias


def _differentiable_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, over: Statistics, peers: LayerPeers | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The same in operations that have gradients of their own, for `create_graph=True`."""
    dims, view = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    mean, invstd = over.mean, over.invstd
    wide, dy = x.to(invstd.dtype), dy.to(invstd.dtype)
    if peers is not None:
        mean, invstd = _apply(_Moments, wide, mean, invstd, over.values, peers)
    xhat = (wide - mean.view(view)) * invstd.view(view)
    dbias, dweight = dy.sum(dims), (dy * xhat).sum(dims)
    if peers is None:
        return None, dweight, dbias
    mean_dy, mean_dy_xhat = (_apply(_Sum, torch.cat((dbias, dweight)), peers) / over.values).chunk(2)
    scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
    dx = scale.view(view) * (dy - mean_dy.view(view) - xhat * mean_dy_xhat.view(view))
    return dx.to(x.dtype), dweight, dbias


def _apply(function: type[Function], *arguments: Any) -> Any:
    """Apply with types: torch leaves its own untyped."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


class _Sum(Function):
    """The sum over ranks. Every rank has it, so its gradient is the sum over ranks of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: LayerPeers) -> Tensor:
        ctx.peers = peers
        return add_up(x.clone(), peers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _apply(_Sum, gradient, ctx.peers), None


class _Moments(Function):
    """Mean and invstd of the global batch as functions of this rank's values. Both are known: forward sends nothing."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, invstd: Tensor, count: int, peers: LayerPeers
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, mean, invstd)
        ctx.count, ctx.peers = count, peers
        return mean.clone(), invstd.clone()

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_invstd: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, invstd = ctx.saved_tensors
        mean, invstd = _apply(_Moments, x, mean, invstd, ctx.count, ctx.peers)
        view = (1, -1, *[1] * (x.dim() - 2))
        of_mean, of_invstd = (_apply(_Sum, torch.cat((of_mean, of_invstd)), ctx.peers) / ctx.count).chunk(2)
        # d mean / dx = 1 / N;  d invstd / dx = -invstd^3 (x - mean) / N
        dx = of_mean.view(view) - (of_invstd * invstd.pow(3)).view(view) * (x - mean.view(view))
        return dx, None, None, None, None
