"""``apex.optimizers.FusedAdagrad``."""

from typing import Any

from torch import Tensor

from lockstep.compat.formulas import adagrad

from ._base import FusedOptimizer, by_kind, gradients, wide_zeros, with_gradients


class FusedAdagrad(FusedOptimizer):
    """Adagrad over lists of tensors.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        eps: Added to the divisor.
        weight_decay: Decay.
        set_grad_none: What ``zero_grad`` does.
        adagrad_w_mode: Whether decay is added to the step instead of the gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)

    def _take_step(self) -> None:
        for group in self.param_groups:
            for members in by_kind(with_gradients(group, "FusedAdagrad")):
                self._step_some(group, members)

    def _step_some(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            if "sum" not in self.state[param]:
                self.state[param]["sum"] = wide_zeros(param)
        adagrad(
            gradients(params),
            params,
            [self.state[param]["sum"] for param in params],
            lr=float(group["lr"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=bool(self.adagrad_w_mode),
        )
