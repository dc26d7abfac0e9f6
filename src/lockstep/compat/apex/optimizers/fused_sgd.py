"""``apex.optimizers.FusedSGD``."""

from typing import Any

import torch
from torch import Tensor

from lockstep.compat.formulas import SgdOptions, sgd

from ._base import FusedOptimizer, by_kind, gradients, with_gradients

required = object()


class FusedSGD(FusedOptimizer):
    """SGD over lists of tensors; the momentum buffer has the parameter's dtype.

    Args:
        params: Parameters or groups.
        lr: Learning rate; has to be given.
        momentum: Momentum.
        dampening: Dampening of momentum.
        weight_decay: Decay.
        nesterov: Nesterov momentum.
        wd_after_momentum: Whether decay is added after momentum instead of before.
        materialize_master_grads: Accepted; master gradients always exist.
        set_grad_none: What ``zero_grad`` does.

    Attributes:
        most_recent_scale: 1, for scripts that look at it.
        scale_set_by_backward: False, likewise.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if lr is not required and lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if momentum < 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if weight_decay < 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        super().__init__(params, defaults, set_grad_none)
        if any(group["lr"] is required for group in self.param_groups):
            raise ValueError("parameter group didn't specify a value of required optimization parameter lr")

    def _take_step(self) -> None:
        for group in self.param_groups:
            for members in by_kind(with_gradients(group, "FusedSGD")):
                fresh = [param for param in members if "momentum_buffer" not in self.state[param]]
                known = [param for param in members if "momentum_buffer" in self.state[param]]
                for some, first in ((fresh, True), (known, False)):
                    if some:
                        self._step_some(group, some, first)

    def _step_some(self, group: dict[str, Any], params: list[Tensor], first: bool) -> None:
        buffers = []
        if group["momentum"]:
            for param in params if first else ():
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
            buffers = [self.state[param]["momentum_buffer"] for param in params]
        options = SgdOptions(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            decay_after_momentum=self.wd_after_momentum,
            first=first,
        )
        sgd(gradients(params), params, buffers, options)
