"""``apex.optimizers.FusedAdam``: AdamW by default, as apex had it; and the one of before August 2019."""

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.formulas import AdamOptions, adam, norms, old_adam, write_back

from ._base import FusedOptimizer, adam_options, by_kind, gradients, refuse_amsgrad, wide_zeros, with_gradients


class FusedAdam(FusedOptimizer):
    """Adam on torch's fused kernel.

    Decay is decoupled (AdamW) unless ``adam_w_mode=False``. State is float32 for half parameters, which are computed in
    float32 and rounded once.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Whether moments are corrected for their start at zero.
        betas: How much of the moments stays.
        eps: Added to the divisor.
        adam_w_mode: Whether decay is decoupled.
        weight_decay: Decay.
        amsgrad: Not supported, as in apex.
        set_grad_none: What ``zero_grad`` does.
        capturable: Accepted.
        master_weights: Keep float32 values of half parameters, and step those.
        eps_inside_sqrt: Of before August 2019; given, like the next two, it chooses the step of that time.
        max_grad_norm: Clip each group's gradients to this norm.
        use_mt: Accepted.
        amp_scale_adjustment: Accepted.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        eps_inside_sqrt: bool | None = None,
        max_grad_norm: float | None = None,
        use_mt: bool | None = None,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        refuse_amsgrad(amsgrad, "FusedAdam")
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with the capturable version.")
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable, self.master_weights = capturable, master_weights
        self.old = not (eps_inside_sqrt is None and max_grad_norm is None and use_mt is None)
        self.eps_inside_sqrt = bool(eps_inside_sqrt)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        if self.old:
            defaults["max_grad_norm"] = max_grad_norm or 0.0
        super().__init__(params, defaults, set_grad_none)
        if adam_w_mode and not self.old and any(group["weight_decay"] for group in self.param_groups):
            warnings.warn(
                "apex.optimizers.FusedAdam decays weights as torch.optim.AdamW does, since adam_w_mode=True is its "
                "default; adam_w_mode=False gives torch.optim.Adam.",
                stacklevel=2,
            )

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float | None = None,
        grad_norms: Any = None,
    ) -> Any:
        """Take one step; the last four are for the step of before August 2019."""
        if any(given is not None for given in (grads, output_params, scale, grad_norms)):
            if not self.old:
                raise RuntimeError(
                    "FusedAdam has been updated. Simply initialize it identically to torch.optim.Adam, and call step() "
                    "with no arguments. apex.contrib.optimizers.FusedAdam takes them."
                )
            with torch.no_grad():
                self._step_given(nested(grads), nested(output_params), 1.0 if scale is None else scale, grad_norms)
            return closure() if closure is not None else None
        return super().step(closure)

    def _take_step(self) -> None:
        for group, params in self._counted_groups():
            if self.old:
                self._old_step(group, params, gradients(params), 1.0, None)
            else:
                self._new_step(group, params)

    def _new_step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for members in by_kind(params):
            moments = self._moments(members)
            # With master_weights the float32 values are stepped, and the parameters get a rounded copy.
            stepped = [self._master(member) for member in members] if self.master_weights else members
            adam(gradients(members), stepped, *moments, self._options(group))
            write_back(members, stepped)

    def _master(self, param: Tensor) -> Tensor:
        if param.dtype.itemsize >= 4:
            return param
        state = self.state[param]
        if "master_param" not in state:
            state["master_param"] = param.detach().float()
        master: Tensor = state["master_param"]
        return master

    def _moments(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for param in params:
            if "exp_avg" not in self.state[param]:
                self.state[param]["exp_avg"] = wide_zeros(param)
                self.state[param]["exp_avg_sq"] = wide_zeros(param)
        return [self.state[p]["exp_avg"] for p in params], [self.state[p]["exp_avg_sq"] for p in params]

    def _options(self, group: dict[str, Any]) -> AdamOptions:
        return adam_options(group, bool(self.adam_w_mode))

    def _old_step(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], scale: float, norm: Any
    ) -> None:
        if group["max_grad_norm"] > 0:
            # The norm is that of scaled gradients.
            length = float(torch.linalg.vector_norm(norms(grads))) if norm is None else float(norm)
            scale *= max(1.0, (length / scale + 1e-6) / group["max_grad_norm"])
        old_adam(
            grads, params, *self._moments(params), self._options(group), scale=scale,
            eps_inside_sqrt=self.eps_inside_sqrt,
        )  # fmt: skip

    def _step_given(self, grads: Any, copies: Any, scale: float, norms: Any) -> None:
        """Step with the caller's gradients, and write rounded copies of the parameters."""
        for number, group in enumerate(self.param_groups):
            group["step"] = int(group.get("step", 0)) + 1
            given = gradients(with_gradients(group, "FusedAdam")) if grads is None else grads[number]
            pairs = [(p, g) for p, g in zip(group["params"], given, strict=True) if g is not None]
            if pairs:
                params = [param for param, _ in pairs]
                self._old_step(group, params, [g for _, g in pairs], scale, norms[number] if norms else None)
            for copy, param in zip(copies[number], group["params"], strict=True) if copies is not None else ():
                copy.copy_(param)


def nested(given: Any) -> Sequence[Sequence[Tensor]] | None:
    """Lists of tensors for each group; one list, or a generator, is that of the only group."""
    if given is None:
        return None
    given = list(given)
    first = next(chain(given), None)
    return given if isinstance(first, (list, tuple)) else [given]
