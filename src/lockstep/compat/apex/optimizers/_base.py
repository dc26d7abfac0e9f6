"""What apex's fused optimizers share: the step's number in the group, float32 state, how they are called."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from lockstep.compat.formulas import AdamOptions


class FusedOptimizer(Optimizer):
    """An optimizer whose groups are stepped as a whole.

    ``state_dict`` has apex's layout: the number of steps is ``param_groups[i]["step"]``. It loads torch's layout too,
    where each parameter has its own. State that is float32 for a half parameter stays float32 when it is loaded.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget gradients; what ``set_grad_none`` said, unless told otherwise."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; give the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._take_step()
        return loss

    @abstractmethod
    def _take_step(self) -> None:
        """Step every group."""

    def _counted_groups(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Count a step in each group; give each that has gradients, and the parameters that have them."""
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = with_gradients(group, type(self).__name__)
            if params:
                yield group, params

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load apex's layout or torch's."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(saved, mine, strict=True):
            # torch has cast state to the parameter's dtype.
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dtype.itemsize > param.dtype.itemsize and value.dim():
                    self.state[param][name] = value.to(device=param.device, copy=True)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            steps = [int(self.state[param].pop("step")) for param in group["params"] if "step" in self.state[param]]
            if steps:
                group["step"] = max(steps)


def with_gradients(group: dict[str, Any], who: str) -> list[Tensor]:
    """A group's parameters that have a gradient.

    Raises:
        RuntimeError: One of them is sparse.
    """
    params: list[Tensor] = [param for param in group["params"] if param.grad is not None]
    if any(param.grad is not None and param.grad.is_sparse for param in params):
        raise RuntimeError(f"{who} does not support sparse gradients, please consider SparseAdam instead")
    return params


def by_kind(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split parameters by device, and by whether they are in half precision."""
    kinds: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for param in params:
        kinds.setdefault((param.device, param.dtype.itemsize < 4), []).append(param)
    yield from kinds.values()


def gradients(params: list[Tensor]) -> list[Tensor]:
    """Their gradients."""
    return [param.grad for param in params if param.grad is not None]


def wide_zeros(param: Tensor) -> Tensor:
    """Zeros like a parameter, float32 at least."""
    return torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))


def adam_options(group: dict[str, Any], decoupled: bool) -> AdamOptions:
    """What a group says of its next step."""
    beta1, beta2 = group["betas"]
    return AdamOptions(
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        step=group["step"],
        decoupled=decoupled,
        bias_correction=bool(group["bias_correction"]),
        weight_decay=group["weight_decay"],
    )


def refuse_amsgrad(amsgrad: bool, who: str) -> None:
    """None of them has it."""
    if amsgrad:
        raise RuntimeError(f"{who} does not support the AMSGrad variant.")
