"""``amp_C``: what scripts call of apex's kernels, as functions with the kernels' arguments.

A script takes the kernels' way as soon as this can be imported, so what is here has the kernels' numbers, and what is
not here raises AttributeError. ``chunk`` is not needed; ``flag`` is an int32 tensor of one element that becomes 1 where
a value is not finite.
"""

import torch
from torch import Tensor

from lockstep.compat import formulas

Lists = list[list[Tensor]]


def _mark(flag: Tensor, tensors: list[Tensor]) -> None:
    flag.masked_fill_(formulas.any_not_finite(tensors).to(flag.device), 1)


@torch.no_grad()
def multi_tensor_scale(chunk: int, flag: Tensor, lists: Lists, scale: float) -> None:
    """Write ``src * scale`` into ``dst``; ``lists`` is ``[src, dst]``."""
    source, target = lists
    _mark(flag, source)
    torch._foreach_copy_(target, torch._foreach_mul(formulas.widen(source), scale))


@torch.no_grad()
def multi_tensor_axpby(chunk: int, flag: Tensor, lists: Lists, a: float, b: float, arg_to_check: int = -1) -> None:
    """Write ``a * x + b * y`` into ``out``; ``lists`` is ``[x, y, out]``.

    ``arg_to_check`` says what must be finite: 0 is x, 1 is y, -1 both.
    """
    x, y, out = lists
    _mark(flag, {0: x, 1: y}.get(arg_to_check, [*x, *y]))
    total = torch._foreach_mul(formulas.widen(x), a)
    torch._foreach_add_(total, formulas.widen(y), alpha=b)
    torch._foreach_copy_(out, total)


@torch.no_grad()
def multi_tensor_l2norm(chunk: int, flag: Tensor, lists: Lists, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """The norm of all tensors together, ``(1,)``, and that of each, or nothing."""
    each = formulas.norms(lists[0]).float()
    # A norm that overflows is not a value that is not finite.
    _mark(flag, lists[0])
    return torch.linalg.vector_norm(each).reshape(1), each if per_tensor else each.new_empty(0)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk: int,
    flag: Tensor,
    lists: Lists,
    scale: float,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """Write ``src * scale`` into ``dst``, and give the norms of that; ``lists`` is ``[src, dst]``."""
    multi_tensor_scale(chunk, flag, lists, scale)
    return multi_tensor_l2norm(chunk, flag, [list(torch._foreach_mul(formulas.widen(lists[0]), scale))], per_tensor)


@torch.no_grad()
def multi_tensor_adam(
    chunk: int,
    flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam, or with ``mode`` 1 of AdamW; ``lists`` is ``[grads, params, exp_avg, exp_avg_sq]``."""
    options = formulas.AdamOptions(
        float(lr), beta1, beta2, epsilon, int(step), mode == 1, bool(bias_correction), weight_decay
    )
    grads, params, exp_avgs, exp_avg_sqs = lists
    formulas.adam(grads, params, exp_avgs, exp_avg_sqs, options)


@torch.no_grad()
def multi_tensor_sgd(
    chunk: int,
    flag: Tensor,
    lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """One step of SGD; ``lists`` is ``[grads, params, momentum]``; rounded copies of params may be a fourth."""
    if int(flag):
        return
    options = formulas.SgdOptions(
        float(lr), momentum, dampening, wd, bool(nesterov), bool(wd_after_momentum), bool(first_run), scale
    )
    grads, params, buffers = lists[:3]
    formulas.sgd(grads, params, buffers, options)
    if len(lists) == 4:
        torch._foreach_copy_(lists[3], params)


@torch.no_grad()
def multi_tensor_lamb(
    chunk: int,
    flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor | float,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """One step of LAMB; ``lists`` is ``[grads, params, exp_avg, exp_avg_sq]``."""
    adam = formulas.AdamOptions(
        float(lr), beta1, beta2, epsilon, int(step), mode == 1, bool(bias_correction), weight_decay
    )
    clip = max(1.0, float(global_grad_norm) / max_grad_norm) if max_grad_norm > 0 else 1.0
    options = formulas.LambOptions(adam, bool(grad_averaging), bool(use_nvlamb), clip)
    grads, params, exp_avgs, exp_avg_sqs = lists
    formulas.lamb(grads, params, exp_avgs, exp_avg_sqs, options)
