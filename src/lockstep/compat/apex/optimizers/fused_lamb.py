"""``apex.optimizers.FusedLAMB``."""

from typing import Any

import torch
from torch import Tensor

from lockstep.compat.formulas import LambOptions, lamb, norms

from ._base import FusedOptimizer, adam_options, by_kind, gradients, refuse_amsgrad, with_gradients


class FusedLAMB(FusedOptimizer):
    """LAMB over lists of tensors; state has the parameter's dtype, gradients stay as they are.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Whether moments are corrected for their start at zero.
        betas: How much of the moments stays.
        eps: Added to the divisor.
        weight_decay: Decay.
        amsgrad: Not supported, as in apex.
        adam_w_mode: Whether decay is decoupled.
        grad_averaging: Whether new gradients count ``1 - beta1`` in the first moment, or 1.
        set_grad_none: What ``zero_grad`` does.
        max_grad_norm: Norm to which the gradients of all groups together are clipped.
        use_nvlamb: Whether steps are scaled in groups without decay too.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_amsgrad(amsgrad, "FusedLAMB")
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none)
        self._clip: Tensor | float = 1.0

    def _take_step(self) -> None:
        everything = [param for group in self.param_groups for param in with_gradients(group, "FusedLAMB")]
        self._clip = clip_of(gradients(everything), self.defaults["max_grad_norm"])
        for group, params in self._counted_groups():
            self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for members in by_kind(params):
            for param in members:
                if "exp_avg" not in self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
                    self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
            first, second = ([self.state[p][name] for p in members] for name in ("exp_avg", "exp_avg_sq"))
            lamb(gradients(members), members, first, second, self._options(group, members[0].device))

    def _options(self, group: dict[str, Any], device: torch.device) -> LambOptions:
        return lamb_options(group, bool(self.adam_w_mode), self.use_nvlamb, self._clip, device)


def lamb_options(
    group: dict[str, Any], decoupled: bool, nvlamb: bool, clip: Tensor | float, device: torch.device
) -> LambOptions:
    """What a group says of its next step on one device; ``clip`` is what `clip_of` gives."""
    here = clip.to(device) if isinstance(clip, Tensor) else clip
    return LambOptions(adam_options(group, decoupled), bool(group["grad_averaging"]), nvlamb, here)


def clip_of(grads: list[Tensor], most: float) -> Tensor | float:
    """What gradients are divided by, so that their common norm is at most ``most``; 0 or less means any norm."""
    if not grads or not most or most <= 0:
        return 1.0
    device = grads[0].device
    lengths = [norms(members).to(device) for members in by_kind(grads)]
    length: Tensor = torch.linalg.vector_norm(torch.cat(lengths))
    return (length / most).clamp(min=1.0)
