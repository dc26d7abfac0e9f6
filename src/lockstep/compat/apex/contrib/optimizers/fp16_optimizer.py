"""``FP16_Optimizer`` of before August 2019: every parameter has a float32 master; any overflow skips the step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.formulas import any_not_finite, widen
from lockstep.compat.wrapped import WrappedOptimizer

_SCALE_KEYS = ("dynamic_loss_scale", "cur_scale", "cur_iter")
_DYNAMIC_KEYS = ("last_overflow_iter", "scale_factor", "scale_window")


class FP16_Optimizer(WrappedOptimizer):
    """Steps float32 masters of a model in half precision.

    Args:
        init_optimizer: The optimizer; its parameters are replaced by masters.
        static_loss_scale: The scale, if it is not dynamic.
        dynamic_loss_scale: Whether it is: it begins at 2**16, halves at each overflow, doubles after 1000 good steps.
        dynamic_loss_args: Not taken, as in apex.
        verbose: Whether an overflow is told.

    Attributes:
        fp16_groups: The model's parameters of each group.
        fp32_groups: Their masters.
        cur_scale: The scale.
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
        if dynamic_loss_scale and dynamic_loss_args is not None:
            raise SystemError("Do not support dynamic loss scale args for now.")
        self.verbose, self.overflow = verbose, False
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_groups: list[list[Tensor]] = []
        for group in self.optim.param_groups:
            models = list(group["params"])
            masters = [param.detach().clone().float().requires_grad_() for param in models]
            self.fp16_groups.append(models)
            self.fp32_groups.append(masters)
            group["params"] = masters
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.cur_scale = 2.0**16 if dynamic_loss_scale else float(static_loss_scale)
        self.cur_iter = 0
        self.last_overflow_iter, self.scale_factor, self.scale_window = -1, 2.0, 1000

    @property
    def optimizer(self) -> Any:
        """The optimizer inside."""
        return self.optim

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.cur_scale = value

    def zero_grad(self, set_grads_to_None: bool = True, *, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Forget the model's gradients."""
        forget = set_grads_to_None if set_to_none is None else set_to_none
        for param in (param for group in self.fp16_groups for param in group):
            if forget:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def backward(self, loss: Tensor) -> None:
        """Backward of the scaled loss."""
        (loss.float() * self.cur_scale).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the masters with the model's gradients and copy them back; nothing after an overflow, but a line."""
        if closure is not None:
            raise RuntimeError("FP16_Optimizer does not support closure use.")
        grads = [param.grad for group in self.fp16_groups for param in group if param.grad is not None]
        self.overflow = bool(any_not_finite(grads))
        if self.overflow:
            self.__dict__["_opt_called"] = True  # for schedulers: a step was called
        else:
            self._step_masters()
        self._update_scale(self.overflow)

    def _step_masters(self) -> None:
        pairs = [
            (model, master)
            for models, masters in zip(self.fp16_groups, self.fp32_groups, strict=True)
            for model, master in zip(models, masters, strict=True)
        ]
        for model, master in pairs:
            master.grad = None if model.grad is None else widen([model.grad])[0] * (1 / self.cur_scale)
        self.optim.step()
        for model, master in pairs:
            master.grad = None
            model.copy_(master)

    def _update_scale(self, skip: bool) -> None:
        if skip and self.verbose:
            kind = "dynamic" if self.dynamic_loss_scale else "static"
            print(f"\nGrad overflow on iteration {self.cur_iter}")
            print(f"Using {kind} loss scale of {self.cur_scale}")
        if self.dynamic_loss_scale and skip:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif self.dynamic_loss_scale and (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """The scale, the masters and the optimizer's own state, under apex's keys."""
        keys = _SCALE_KEYS + (_DYNAMIC_KEYS if self.dynamic_loss_scale else ())
        scale = {key: getattr(self, key) for key in keys}
        return scale | {"optimizer_state_dict": self.optim.state_dict(), "fp32_groups": self.fp32_groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, now or when each group had one flat master; the model is loaded before."""
        for key in (*_SCALE_KEYS, *_DYNAMIC_KEYS):
            if key in state_dict:
                setattr(self, key, state_dict[key])
        inner = state_dict["optimizer_state_dict"]
        saved: Sequence[Sequence[Tensor]]
        if "fp32_groups_flat" in state_dict:
            saved = [split(flat, group) for flat, group in zip(_ones(state_dict), self.fp32_groups, strict=True)]
            inner = split_state(inner, self.fp32_groups)
        else:
            saved = state_dict["fp32_groups"]
        self.optim.load_state_dict(inner)
        for masters, values in zip(self.fp32_groups, saved, strict=True):
            for master, value in zip(masters, values, strict=True):
                master.copy_(value)


def _ones(state_dict: dict[str, Any]) -> list[Tensor]:
    return [x if isinstance(x, Tensor) else x[0] for x in state_dict["fp32_groups_flat"]]


def split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """One flat tensor as views with the shapes of ``like``.

    Example:
        >>> [x.shape for x in split(torch.arange(5.0), [torch.zeros(2, 1), torch.zeros(3)])]
        [torch.Size([2, 1]), torch.Size([3])]
    """
    pieces = flat.detach().split_with_sizes([x.numel() for x in like])
    return [piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]


def split_state(inner: dict[str, Any], groups: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    """An optimizer's state of one flat parameter for each group, as that of the parameters it was made of."""
    state: dict[int, dict[str, Any]] = {}
    described = []
    for saved, like in zip(inner["param_groups"], groups, strict=True):
        numbers = range(len(state), len(state) + len(like))
        whole = inner["state"].get(saved["params"][0], {})
        apart = {
            name: split(value, like) if isinstance(value, Tensor) and value.dim() else [value] * len(like)
            for name, value in whole.items()
        }
        for place, number in enumerate(numbers):
            state[number] = {name: values[place] for name, values in apart.items()}
        described.append(saved | {"params": list(numbers)})
    return {"state": state, "param_groups": described}
