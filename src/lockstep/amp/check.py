"""What `initialize` takes and what it refuses."""

from typing import Any

import torch
from torch import nn

from lockstep.amp.levels import HALF_TYPES
from lockstep.amp.state import _amp_state


def as_list(value: Any, what: str, *, is_one: bool) -> list[Any]:
    """One or a list of them, as a list.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(value, list):
        return value
    if is_one:
        return [value]
    raise TypeError(f"{what}s must be either a single {what} or a list of {what}s.")


def is_optimizer(value: Any) -> bool:
    """Whether something can be used as an optimizer: torch's, LARC and the like."""
    return all(hasattr(value, name) for name in ("param_groups", "step", "zero_grad"))


def refuse_optimizers(optimizers: list[Any]) -> None:
    """Raise for optimizers that amp must not wrap.

    Raises:
        RuntimeError: One keeps masters of its own, or is there twice.
    """
    for optimizer in optimizers:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise RuntimeError(
                f"An incoming optimizer is an instance of {type(optimizer).__module__}.FP16_Optimizer. If you wish to "
                "use Amp, give it the plain optimizer: it keeps fp32 masters and scales losses itself."
            )
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")


def refuse_half_models(models: list[nn.Module]) -> None:
    """Raise for models that are in half before amp has seen them.

    Raises:
        RuntimeError: Names the parameter or buffer.
    """
    if _amp_state.allow_incoming_model_not_fp32:
        return
    for model in models:
        for what, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                if tensor.dtype in HALF_TYPES:
                    raise RuntimeError(
                        f"Found {what} {name} with type {tensor.type()}, expected torch.cuda.FloatTensor.\nWhen using "
                        "amp.initialize, you do not need to call .half() on your model\nbefore passing it, no matter "
                        "what optimization level you choose."
                    )


def device_types(models: list[nn.Module]) -> tuple[str, ...]:
    """Where models lie: the types of device, in alphabetical order; a guess where there is nothing to go by."""
    found = {tensor.device.type for model in models for tensor in (*model.parameters(), *model.buffers())}
    found.discard("meta")
    return tuple(sorted(found)) or ("cuda" if torch.cuda.is_available() else "cpu",)
