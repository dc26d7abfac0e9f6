"""``FP16_Optimizer``: float32 masters and a loss scale around an optimizer of half parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lockstep.amp.levels import HALF_TYPES
from lockstep.compat.wrapped import WrappedOptimizer

from ..amp.scaler import LossScaler, restored
from .fp16util import master_params_to_model_params


class FP16_Optimizer(WrappedOptimizer):
    """Steps float32 masters of half parameters, with a scaled loss; skips steps whose gradients overflowed.

    Args:
        init_optimizer: The optimizer; its half parameters are replaced by masters.
        static_loss_scale: The scale, if it is not dynamic.
        dynamic_loss_scale: Whether it is.
        dynamic_loss_args: ``init_scale``, ``scale_factor`` and ``scale_window`` of a dynamic one.
        verbose: Whether it says what it does to which parameter.

    Attributes:
        optimizer: The one inside.
        overflow: Whether the last gradients were not finite.
        fp16_groups: The half parameters of each group.
        fp32_from_fp16_groups: Their masters.
        fp32_from_fp32_groups: The float32 parameters, which are their own masters.
        loss_scaler: The scale.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(init_optimizer)
        self.verbose = verbose
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for number, group in enumerate(self.optim.param_groups):
            self.maybe_print(f"FP16_Optimizer processing param group {number}:")
            self._take_group(group)
        self.optim.load_state_dict(self.optim.state_dict())  # casts state to the masters' dtype
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.loss_scaler = (
            LossScaler("dynamic", **(dynamic_loss_args or {})) if dynamic_loss_scale else LossScaler(static_loss_scale)
        )
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm_

    @property
    def optimizer(self) -> Any:
        """The optimizer inside."""
        return self.optim

    def maybe_print(self, msg: str) -> None:
        """Print, if it was asked to."""
        if self.verbose:
            print(msg)

    def _take_group(self, group: dict[str, Any]) -> None:
        halves: list[Tensor] = []
        masters: list[Tensor] = []
        wide: list[Tensor] = []
        for place, param in enumerate(group["params"]):
            if not param.requires_grad:
                continue
            if param.dtype in HALF_TYPES:
                self.maybe_print(f"FP16_Optimizer received {param.type()} with {param.size()}")
                master = param.detach().clone().float().requires_grad_()
                group["params"][place] = master
                if param in self.optim.state:
                    self.optim.state[master] = self.optim.state.pop(param)
                halves.append(param)
                masters.append(master)
            elif param.is_floating_point():
                self.maybe_print(f"FP16_Optimizer received {param.type()} with {param.size()}")
                wide.append(param)
            else:
                raise TypeError(f"Wrapped parameters must be of a floating type. Received {param.type()}")
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(wide)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; half ones get masters."""
        self.optim.add_param_group(param_group)
        self._take_group(self.optim.param_groups[-1])

    def zero_grad(self, set_grads_to_None: bool = False, *, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Set the gradients of parameters and masters to zero, or to None."""
        forget = set_grads_to_None if set_to_none is None else set_to_none
        params = [param for group in self.optim.param_groups for param in group["params"]]
        for param in (*params, *(param for group in self.fp16_groups for param in group)):
            if forget:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Backward of the scaled loss; then `update_master_grads`, unless told not to."""
        (loss.float() * self.loss_scaler.loss_scale()).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the model's gradients to the masters, without the scale; look for overflow and move the scale."""
        self.loss_scaler.clear_overflow_state()
        pairs = [
            (model, master)
            for models, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True)
            for model, master in zip(models, masters, strict=True)
            if model.grad is not None
        ]
        for _, master in pairs:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        scale = self.loss_scaler.loss_scale()
        if pairs:
            self.loss_scaler.unscale(
                [model.grad for model, _ in pairs if model.grad is not None],
                [master.grad for _, master in pairs if master.grad is not None],
                scale,
            )
        own = [param.grad for group in self.fp32_from_fp32_groups for param in group if param.grad is not None]
        if own:
            self.loss_scaler.unscale(own, own, scale, models_are_masters=True)
        self.overflow = self.loss_scaler.update_scale()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients; give their norm before, or -1 after an overflow."""
        if self.overflow:
            return -1
        params = [param for group in self.optim.param_groups for param in group["params"]]
        return self.clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Each group's gradients, float32 and without the scale; None after an overflow."""
        if self.overflow:
            print(
                "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state.  "
                "Gradients are currently invalid (may be inf, nan, or stale).  Returning None."
            )
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.optim.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and copy them to the model; nothing after an overflow, but a line."""
        if self.overflow and closure is None:
            scale = self.loss_scaler.loss_scale()
            print(f"Gradient overflow.  Skipping step, reducing loss scale to {scale}")
            self.__dict__["_opt_called"] = True  # for schedulers: a step was called
            return None
        result = self.optim.step() if closure is None else self._step_with_closure(closure)
        self._master_params_to_model_params()
        return result

    def _master_params_to_model_params(self) -> None:
        for models, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            master_params_to_model_params(models, masters)

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def until_finite() -> Any:
            # The optimizer may have moved the masters between two calls; it does not know of the model.
            if not self.first_closure_call_this_step:
                self._master_params_to_model_params()
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                scale = self.loss_scaler.loss_scale()
                print(f"OVERFLOW within closure! Skipping step, reducing loss scale to {scale}")
                loss = closure()
            return loss

        try:
            return self.optim.step(until_finite)
        finally:
            self.first_closure_call_this_step = True

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    def state_dict(self) -> dict[str, Any]:
        """The scale, the masters of half parameters and the optimizer's own state, under apex's keys."""
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optim.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave; the model is loaded before."""
        self.loss_scaler = restored(state_dict["loss_scaler"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optim.load_state_dict(state_dict["optimizer_state_dict"])
        with torch.no_grad():
            for masters, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
                for master, values in zip(masters, saved, strict=True):
                    master.copy_(values)
