"""``apex.optimizers.FusedNovoGrad``."""

from typing import Any

import torch
from torch import Tensor

from lockstep.compat.formulas import NovoGradOptions, grad_norms, novograd

from ._base import FusedOptimizer, adam_options, gradients, refuse_amsgrad


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad over lists of tensors.

    The second moments, one number for each tensor, lie in ``param_groups[i]["exp_avg_sq"]``: two vectors, for half and
    for wider parameters, in the order in which those have had gradients.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Whether moments are corrected for their start.
        betas: How much of the moments stays.
        eps: Added to the divisor.
        weight_decay: Decay.
        amsgrad: Not supported, as in apex.
        reg_inside_moment: Whether decay goes into the first moment.
        grad_averaging: Whether new gradients count ``1 - beta1`` in the first moment, or 1.
        norm_type: 2, or 0 for the largest magnitude.
        init_zero: Whether norms start at 0 instead of the first gradient's.
        set_grad_none: What ``zero_grad`` does.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad(amsgrad, "FusedNovoGrad")
        if norm_type not in (0, 2):
            raise RuntimeError("FusedNovoGrad only support l2/inf norm now.")
        self.moment_mode = 0 if reg_inside_moment else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)

    def _take_step(self) -> None:
        for group, params in self._counted_groups():
            kinds = [[p for p in params if p.dtype.itemsize < 4], [p for p in params if p.dtype.itemsize >= 4]]
            if "exp_avg_sq" not in group:
                group["exp_avg_sq"] = [self._first_norms(group, members) for members in kinds]
            for number, members in enumerate(kinds):
                if members:
                    group["exp_avg_sq"][number] = kept = group["exp_avg_sq"][number].to(members[0].device)
                    self._step_some(group, members, kept)

    def _first_norms(self, group: dict[str, Any], members: list[Tensor]) -> Tensor:
        if not members or group["init_zero"]:
            return torch.zeros(len(members), device=members[0].device if members else None)
        return grad_norms(gradients(members), group["norm_type"])

    def _step_some(self, group: dict[str, Any], members: list[Tensor], kept: Tensor) -> None:
        if len(kept) != len(members):
            raise RuntimeError(
                f"FusedNovoGrad has norms of {len(kept)} gradients, but {len(members)} parameters have one now; its "
                "parameters must have gradients from the first step on, or never."
            )
        for param in members:
            if "exp_avg" not in self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        shared = adam_options(group, decoupled=True)
        options = NovoGradOptions(shared, bool(group["grad_averaging"]), group["norm_type"], self.moment_mode == 0)
        novograd(gradients(members), members, [self.state[p]["exp_avg"] for p in members], kept, options)
