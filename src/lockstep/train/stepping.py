"""What is done with the gradients of a step, once they are those of the whole world."""

from collections.abc import Callable

import torch
from torch import Tensor


class Scaler(torch.amp.GradScaler):
    """torch's loss scaler, which multiplies by one more factor in the pass over the gradients that it makes anyway.

    ``_unscale_grads_`` is private; as it is in torch 2.9 to 2.14.
    """

    factor = 1.0

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale * self.factor, found_inf, allow_fp16)


def step(
    optimizer: torch.optim.Optimizer, factor: float, scaler: Scaler | None, clip_norm: float | None
) -> tuple[bool, Tensor | None]:
    """Multiply the gradients by ``factor`` (and unscale), clip, step.

    Returns:
        Whether the optimizer stepped (not if a scaler found an overflow: gradients are the same on all ranks by now, so
        it is one decision for the world), and the norm before clipping if that was computed.
    """
    norm = None
    if scaler is not None:
        scaler.factor = factor
        scaler.unscale_(optimizer)
    elif factor != 1.0:
        torch._foreach_mul_(gradients(optimizer), factor)
    if clip_norm is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    if scaler is None:
        optimizer.step()
        return True, norm
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before, norm


def zero_grad_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What drops every gradient of an optimizer: its ``zero_grad``, or where that is torch's own, what it comes to.

    Without the profiler's record that torch makes around it, this takes a tenth of the time.
    """
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return optimizer.zero_grad

    def drop() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return drop


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every gradient that the optimizer would use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """The 2-norm of the whole gradient."""
    return torch.nn.utils.get_total_norm(gradients(optimizer))
