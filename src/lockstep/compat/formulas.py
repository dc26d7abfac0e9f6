"""What apex's fused kernels computed, over lists of tensors, by torch's foreach and fused operations.

Parameters in half precision are computed in float32 and rounded once at the end; float64 stays float64. All functions
write into parameters and state in place, and leave gradients as they are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

Tensors = list[Tensor]


class AdamOptions(NamedTuple):
    """What all of a call's parameters share."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int  # from 1
    decoupled: bool
    bias_correction: bool
    weight_decay: float

    def corrections(self) -> tuple[float, float]:
        """What the moments are divided by."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step


def widen(tensors: Sequence[Tensor]) -> Tensors:
    """The same in float32 at least; those that are wide already stay what they are.

    Example:
        >>> [x.dtype for x in widen([torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.float64)])]
        [torch.float32, torch.float64]
    """
    return [x if x.dtype.itemsize >= 4 else x.float() for x in tensors]


def write_back(tensors: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    """Round what `widen` has made wider into the tensors it came from."""
    pairs = [(x, w) for x, w in zip(tensors, wide, strict=True) if x is not w]
    if pairs:
        torch._foreach_copy_([x for x, _ in pairs], [w for _, w in pairs])


def all_wide(*lists: Sequence[Tensor]) -> bool:
    """Whether nothing is in half precision."""
    return all(x.dtype.itemsize >= 4 for tensors in lists for x in tensors)


def norms(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Each tensor's norm, ``(len(tensors),)``, float32 at least; 0 for an empty tensor."""
    if not tensors:
        return torch.zeros(0)
    wide = widen(tensors)
    first = wide[0]
    return torch.stack([norm.to(first) for norm in torch._foreach_norm(wide, order)])


def any_not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether an element of any of them is infinite or no number, ``()`` bool."""
    if not tensors:
        return torch.zeros((), dtype=torch.bool)
    # The largest magnitude of each; nan wins over everything, and an empty tensor has none.
    filled = [x for x in tensors if x.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.bool, device=tensors[0].device)
    return ~torch.isfinite(norms(filled, float("inf"))).all()


def adam(grads: Tensors, params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, options: AdamOptions) -> None:
    """Adam; with ``decoupled`` AdamW."""
    if options.bias_correction and all_wide(grads, params, exp_avgs, exp_avg_sqs):
        _adam_by_torch(grads, params, exp_avgs, exp_avg_sqs, options)
        return
    gs, ps, ms, vs = widen(grads), widen(params), widen(exp_avgs), widen(exp_avg_sqs)
    if not options.decoupled and options.weight_decay:
        gs = _added(gs, ps, options.weight_decay)
    update = _adam_update(gs, ms, vs, options)
    if options.decoupled and options.weight_decay:
        torch._foreach_add_(update, ps, alpha=options.weight_decay)
    torch._foreach_add_(ps, update, alpha=-options.lr)
    for narrow, wide in ((params, ps), (exp_avgs, ms), (exp_avg_sqs, vs)):
        write_back(narrow, wide)


def _adam_by_torch(
    grads: Tensors, params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, options: AdamOptions
) -> None:
    """One kernel for everything, where torch has it."""
    fused = params[0].device.type in ("cpu", "cuda")
    steps = torch.full((len(params),), float(options.step - 1), device=params[0].device if fused else "cpu")
    torch_adam(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        list(steps.unbind()),
        fused=fused,
        foreach=not fused,
        decoupled_weight_decay=options.decoupled,
        amsgrad=False,
        beta1=options.beta1,
        beta2=options.beta2,
        lr=options.lr,
        weight_decay=options.weight_decay,
        eps=options.eps,
        maximize=False,
    )


def _adam_update(gs: Tensors, ms: Tensors, vs: Tensors, options: AdamOptions, weight: float | None = None) -> Tensors:
    """Move the moments; what lr is multiplied by."""
    first, second = options.corrections()
    torch._foreach_mul_(ms, options.beta1)
    torch._foreach_add_(ms, gs, alpha=1 - options.beta1 if weight is None else weight)
    torch._foreach_mul_(vs, options.beta2)
    torch._foreach_addcmul_(vs, gs, gs, value=1 - options.beta2)
    divisors = torch._foreach_div(vs, second)
    torch._foreach_sqrt_(divisors)
    torch._foreach_add_(divisors, options.eps)
    update = torch._foreach_div(ms, first)
    torch._foreach_div_(update, divisors)
    return list(update)


def _added(xs: Sequence[Tensor], ys: Sequence[Tensor], factor: float) -> Tensors:
    return list(torch._foreach_add(list(xs), list(ys), alpha=factor))


def old_adam(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    options: AdamOptions,
    *,
    scale: float,
    eps_inside_sqrt: bool,
) -> None:
    """Adam as apex's FusedAdam was before August 2019: eps is not corrected for bias, decay is.

    ``p -= s * (m / (sqrt(v) + eps) + wd * p)`` with ``s = lr * sqrt(1 - b2**t) / (1 - b1**t)``; gradients are
    divided by ``scale`` before.
    """
    ps, ms, vs = widen(params), widen(exp_avgs), widen(exp_avg_sqs)
    gs = list(torch._foreach_mul(widen(grads), 1 / scale))
    torch._foreach_mul_(ms, options.beta1)
    torch._foreach_add_(ms, gs, alpha=1 - options.beta1)
    torch._foreach_mul_(vs, options.beta2)
    torch._foreach_addcmul_(vs, gs, gs, value=1 - options.beta2)
    if eps_inside_sqrt:
        divisors = list(torch._foreach_sqrt(torch._foreach_add(vs, options.eps)))
    else:
        divisors = list(torch._foreach_add(torch._foreach_sqrt(vs), options.eps))
    update = list(torch._foreach_div(ms, divisors))
    if options.weight_decay:
        torch._foreach_add_(update, ps, alpha=options.weight_decay)
    first, second = options.corrections()
    torch._foreach_add_(ps, update, alpha=-options.lr * second**0.5 / first)
    for narrow, wide in ((params, ps), (exp_avgs, ms), (exp_avg_sqs, vs)):
        write_back(narrow, wide)


class SgdOptions(NamedTuple):
    """What all of a call's parameters share."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    decay_after_momentum: bool
    first: bool  # whether the momentum buffers hold nothing yet
    scale: float = 1.0  # what gradients are multiplied by


def sgd(grads: Tensors, params: Tensors, buffers: Tensors, options: SgdOptions) -> None:
    """SGD; ``buffers`` is not looked at without momentum."""
    gs, ps = widen(grads), widen(params)
    if options.scale != 1:
        gs = list(torch._foreach_mul(gs, options.scale))
    if options.weight_decay and not options.decay_after_momentum:
        gs = _added(gs, ps, options.weight_decay)
    step = gs
    if options.momentum:
        bs = widen(buffers)
        if options.first:
            torch._foreach_copy_(bs, gs)
        else:
            torch._foreach_mul_(bs, options.momentum)
            torch._foreach_add_(bs, gs, alpha=1 - options.dampening)
        write_back(buffers, bs)
        bs = widen(buffers)  # the step goes by the momentum that is kept
        step = _added(gs, bs, options.momentum) if options.nesterov else bs
    if options.weight_decay and options.decay_after_momentum:
        step = _added(step, ps, options.weight_decay)
    torch._foreach_add_(ps, step, alpha=-options.lr)
    write_back(params, ps)


class LambOptions(NamedTuple):
    """What all of a call's parameters share, beside Adam's options."""

    adam: AdamOptions
    grad_averaging: bool
    use_nvlamb: bool
    clip: Tensor | float = 1.0  # what gradients are divided by


def lamb(grads: Tensors, params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, options: LambOptions) -> None:
    """LAMB: Adam's step, with a length in proportion to that of the parameter."""
    decay, lr = options.adam.weight_decay, options.adam.lr
    ps, ms, vs = widen(params), widen(exp_avgs), widen(exp_avg_sqs)
    gs = list(torch._foreach_div(widen(grads), options.clip))
    if decay and not options.adam.decoupled:
        gs = _added(gs, ps, decay)
    update = _adam_update(gs, ms, vs, options.adam, None if options.grad_averaging else 1.0)
    if decay and options.adam.decoupled:
        torch._foreach_add_(update, ps, alpha=decay)
    if decay or options.use_nvlamb:
        lengths, steps = norms(ps), norms(update)
        trust = torch.where((lengths > 0) & (steps > 0), lengths / steps, 1.0)
        torch._foreach_mul_(update, list(trust.unbind()))
    torch._foreach_add_(ps, update, alpha=-lr)
    for narrow, wide in ((params, ps), (exp_avgs, ms), (exp_avg_sqs, vs)):
        write_back(narrow, wide)


class NovoGradOptions(NamedTuple):
    """What all of a call's parameters share."""

    adam: AdamOptions
    grad_averaging: bool
    norm_type: int  # 2, or 0 for the largest magnitude
    decay_inside: bool


def novograd(grads: Tensors, params: Tensors, exp_avgs: Tensors, kept: Tensor, options: NovoGradOptions) -> None:
    """NovoGrad: Adam whose second moment is one number for each tensor.

    Args:
        grads: Gradients.
        params: Parameters.
        exp_avgs: First moments.
        kept: The blended norm of each gradient, ``(len(grads),)``; overwritten.
        options: See there.
    """
    one = options.adam
    gs, ps, ms = widen(grads), widen(params), widen(exp_avgs)
    kept.copy_(blend(kept, grad_norms(gs, options.norm_type), one.beta2, options.norm_type))
    first, second = one.corrections()
    divisors = list((kept.to(gs[0]) / second**0.5 + one.eps).unbind())
    weight = 1 - one.beta1 if options.grad_averaging else 1.0
    if options.decay_inside:
        gs = _added(torch._foreach_div(gs, divisors), ps, one.weight_decay)
    torch._foreach_mul_(ms, one.beta1)
    torch._foreach_add_(ms, gs, alpha=weight)
    update = list(torch._foreach_div(ms, first))
    if not options.decay_inside:
        torch._foreach_div_(update, divisors)
        torch._foreach_add_(update, ps, alpha=one.weight_decay)
    torch._foreach_add_(ps, update, alpha=-one.lr)
    write_back(params, ps)
    write_back(exp_avgs, ms)


def grad_norms(grads: Sequence[Tensor], norm_type: int) -> Tensor:
    """Each gradient's norm as NovoGrad takes it: 2, or 0 for the largest magnitude."""
    return norms(grads, 2 if norm_type == 2 else float("inf"))


def blend(kept: Tensor, new: Tensor, beta2: float, norm_type: int) -> Tensor:
    """The running norm, moved towards the new one."""
    new = new.to(kept)
    if norm_type == 2:
        return (beta2 * kept.square() + (1 - beta2) * new.square()).sqrt()
    return beta2 * kept + (1 - beta2) * new


def adagrad(
    grads: Tensors, params: Tensors, sums: Tensors, *, lr: float, eps: float, weight_decay: float, decoupled: bool
) -> None:
    """Adagrad; ``decoupled`` adds the decay to the step instead of the gradient."""
    gs, ps, ss = widen(grads), widen(params), widen(sums)
    if weight_decay and not decoupled:
        gs = _added(gs, ps, weight_decay)
    torch._foreach_addcmul_(ss, gs, gs)
    divisors = torch._foreach_sqrt(ss)
    torch._foreach_add_(divisors, eps)
    update = list(torch._foreach_div(gs, divisors))
    if weight_decay and decoupled:
        torch._foreach_add_(update, ps, alpha=weight_decay)
    torch._foreach_add_(ps, update, alpha=-lr)
    write_back(params, ps)
    write_back(sums, ss)
