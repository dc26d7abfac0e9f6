"""``LARC``: layer-wise adaptive rates around any optimizer."""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.compat.formulas import norms
from lockstep.compat.wrapped import WrappedOptimizer


class LARC(WrappedOptimizer):
    """Scales each gradient by ``trust_coefficient * |p| / (|g| + decay * |p| + eps)`` before the optimizer's step.

    Decay goes into the scaled gradient, so the group's own is 0 during the step. Where a parameter or its gradient is 0
    nothing is scaled and nothing decays.

    Args:
        optimizer: The optimizer.
        trust_coefficient: See above.
        clip: Whether the scale bounds the learning rate, instead of multiplying it.
        eps: See above.
    """

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        super().__init__(optimizer)
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the closure, if there is one, is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay") for group in self.optim.param_groups]
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                self._scale(group, decay or 0)
                if decay is not None:
                    group["weight_decay"] = 0
            result = self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay
        return result if closure is None else loss

    @torch.no_grad()
    def _scale(self, group: dict[str, Any], decay: float) -> None:
        kinds: dict[Any, list[Any]] = {}
        for param in group["params"]:
            if param.grad is not None:
                kinds.setdefault((param.device, param.dtype), []).append(param)
        for params in kinds.values():
            grads = [param.grad for param in params]
            lengths, steps = norms(params), norms(grads)
            rate = self.trust_coefficient * lengths / (steps + lengths * decay + self.eps)
            if self.clip:
                rate = (rate / float(group["lr"])).clamp(max=1)
            moves = (lengths != 0) & (steps != 0)
            rates = torch.where(moves, rate, 1.0).to(grads[0].dtype)
            if decay:
                decays = torch.where(moves, decay, 0.0).to(grads[0].dtype)
                torch._foreach_add_(grads, torch._foreach_mul(params, list(decays.unbind())))
            torch._foreach_mul_(grads, list(rates.unbind()))
