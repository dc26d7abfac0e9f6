"""An optimizer under amp: the attributes it gets, and one permanent ``step`` that knows when to skip."""

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from lockstep.amp.casting import CASTS
from lockstep.amp.masters import AmpOptimizerState
from lockstep.amp.scaler import LossScaler
from lockstep.amp.state import _amp_state

_METHODS = (
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_amp_lazy_init",
)


def adopt(optimizer: Any, *, masters: bool) -> None:
    """Put an optimizer under amp, in place; one that is under it already is released first."""
    release(optimizer)
    stash = AmpOptimizerState(optimizer, masters=masters)
    optimizer._amp_stash = stash
    for name in _METHODS:
        setattr(optimizer, name, MethodType(globals()[name], optimizer))
    # The scheduler's own wrapper of step, if there is one, is among these.
    inner = {name: getattr(optimizer, name, None) for name in ("step", "zero_grad", "add_param_group")}
    optimizer._amp_inner = inner
    optimizer._amp_before = {name: vars(optimizer)[name] for name in inner if name in vars(optimizer)}
    optimizer.step = MethodType(step, optimizer)
    if inner["add_param_group"]:
        optimizer.add_param_group = MethodType(add_param_group, optimizer)
    if masters:
        optimizer.zero_grad = MethodType(zero_grad, optimizer)
    if getattr(optimizer, "state", None):
        optimizer.load_state_dict(optimizer.state_dict())  # to the types that the parameters have now


def release(optimizer: Any) -> None:
    """Undo `adopt`."""
    stash = getattr(optimizer, "_amp_stash", None)
    if stash is None:
        return
    stash.give_up(optimizer)
    for name in ("step", "zero_grad", "add_param_group"):
        vars(optimizer).pop(name, None)
    vars(optimizer).update(optimizer._amp_before)
    for name in (*_METHODS, "_amp_stash", "_amp_inner", "_amp_before"):
        vars(optimizer).pop(name, None)


def stash_of(optimizer: Any) -> AmpOptimizerState:
    """An optimizer's state under amp.

    Raises:
        RuntimeError: It was not given to ``amp.initialize``.
    """
    stash = getattr(optimizer, "_amp_stash", None)
    if stash is None:
        raise RuntimeError(
            f"amp does not know this {type(optimizer).__name__}: pass every optimizer through amp.initialize, as in "
            "model, optimizer = amp.initialize(model, optimizer, opt_level='O1'), before amp.scale_loss."
        )
    found: AmpOptimizerState = stash
    return found


def step(optimizer: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """The optimizer's step, or what is done in its place when gradients overflowed."""
    stash: AmpOptimizerState = optimizer._amp_stash
    optimizer._opt_called = True  # what schedulers look at
    if stash.already_patched:
        return _skip(optimizer, stash)
    if stash.has_masters:
        if closure is not None:
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
    elif closure is not None:
        closure = CASTS.reenabled(closure)
    stash.send_kept(stepping=True)
    with CASTS.disabled():
        result = optimizer._amp_inner["step"](*(() if closure is None else (closure,)), *args, **kwargs)
    CASTS.clear_cache()
    if stash.has_masters:
        stash.write_back()
    stash.drop_gradients()
    return result


step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so that schedulers leave it alone, whenever they come


def _skip(optimizer: Any, stash: AmpOptimizerState) -> None:
    assert stash.overflow is not None
    loss_id, scaler = stash.overflow
    if _amp_state.verbosity > 0:
        sys.stdout.write(
            f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}\n"
        )
    stash.already_patched, stash.overflow = False, None
    stash.drop_gradients()
    if hasattr(optimizer, "most_recent_scale"):  # FusedSGD
        optimizer.most_recent_scale, optimizer.scale_set_by_backward = 1.0, False


def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """Clear gradients; those of half parameters too, which the optimizer does not see."""
    stash: AmpOptimizerState = optimizer._amp_stash
    for param in stash.all_fp16_params:
        if set_to_none or param.grad is None:
            param.grad = None
        else:
            param.grad = torch.zeros_like(param.grad)
    for param in stash.all_fp32_from_fp32_params:
        if set_to_none or param.grad is None:
            param.grad = None
        else:
            param.grad = torch.zeros_like(param.grad)
    for master in stash.all_fp32_from_fp16_params:
        master.grad = None
    stash.unsent = False
    CASTS.clear_cache()


def add_param_group(optimizer: Any, group: dict[str, Any]) -> None:
    """Add a group, with masters for its half parameters."""
    stash: AmpOptimizerState = optimizer._amp_stash
    optimizer._amp_inner["add_param_group"](group)  # which refuses what is wrong, and makes a list of the parameters
    stash.take_in(optimizer.param_groups[-1], getattr(optimizer, "state", {}))


def _lazy_init_maybe_master_weights(_: Any) -> None:
    """Nothing is left to do: masters are there from the start."""


def _amp_lazy_init(_: Any) -> None:
    """Nothing is left to do."""


def _master_params_to_model_params(optimizer: Any) -> None:
    optimizer._amp_stash.write_back()


def _prepare_amp_backward(optimizer: Any, scale: float | None = None) -> None:
    optimizer._amp_stash.prepare(_amp_state.loss_scalers[0].loss_scale() if scale is None else scale)


def _post_amp_backward(optimizer: Any, loss_scaler: LossScaler) -> None:
    optimizer._amp_stash.finish(loss_scaler, loss_scaler.loss_scale())
