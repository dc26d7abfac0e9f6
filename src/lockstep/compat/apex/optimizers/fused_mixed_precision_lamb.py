"""``apex.optimizers.FusedMixedPrecisionLamb``: LAMB that keeps float32 copies of half parameters."""

from typing import Any

import torch
from torch import Tensor

from lockstep.compat.formulas import lamb, write_back

from ._base import FusedOptimizer, by_kind, gradients, refuse_amsgrad, wide_zeros, with_gradients
from .fused_lamb import clip_of, lamb_options


class FusedMixedPrecisionLamb(FusedOptimizer):
    """LAMB with state, and a copy of half parameters, in float32.

    Args:
        params: Parameters or groups.
        lr: Learning rate, a number or a tensor.
        step: Steps taken before.
        bias_correction: Whether moments are corrected for their start at zero.
        betas: How much of the moments stays.
        eps: Added to the divisor.
        weight_decay: Decay.
        amsgrad: Not supported, as in apex.
        adam_w_mode: Whether decay is decoupled.
        grad_averaging: Whether new gradients count ``1 - beta1`` in the first moment, or 1.
        max_grad_norm: Norm to which the gradients of all groups together are clipped.
        use_nvlamb: Whether steps are scaled in groups without decay too.
        reduced_precision_dtype: Accepted; a parameter's own dtype says as much.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_amsgrad(amsgrad, "FusedMixedPrecisionLamb")
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb, self.reduced_precision_dtype = use_nvlamb, reduced_precision_dtype
        defaults = {
            "lr": lr,
            "step": int(step),
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, True)
        self._clip: Tensor | float = 1.0

    def _take_step(self) -> None:
        everything = [param for group in self.param_groups for param in with_gradients(group, type(self).__name__)]
        self._clip = clip_of(gradients(everything), self.defaults["max_grad_norm"])
        for group, params in self._counted_groups():
            self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for members in by_kind(params):
            for param in members:
                if "exp_avg" not in self.state[param]:
                    self.state[param] = {"exp_avg": wide_zeros(param), "exp_avg_sq": wide_zeros(param)}
                    if param.dtype.itemsize < 4:
                        self.state[param]["param_fp32"] = param.detach().float()
            stepped = [self.state[param].get("param_fp32", param) for param in members]
            options = lamb_options(group, bool(self.adam_w_mode), self.use_nvlamb, self._clip, members[0].device)
            first, second = ([self.state[p][name] for p in members] for name in ("exp_avg", "exp_avg_sq"))
            lamb(gradients(members), stepped, first, second, options)
            write_back(members, stepped)
