"""`initialize` and `scale_loss`: the two calls of a training script."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.amp import models as of_models
from lockstep.amp.casting import CASTS, begin_forward, forget_copies
from lockstep.amp.check import as_list, device_types, is_optimizer, refuse_half_models, refuse_optimizers
from lockstep.amp.handle import AmpHandle
from lockstep.amp.levels import HALF_TYPES, LEVELS, OPTIONS, Properties, defaults_of, half_for, override
from lockstep.amp.masters import AmpOptimizerState, master_of
from lockstep.amp.names import name_first_not_finite, remember_names
from lockstep.amp.optimizers import adopt, release, stash_of
from lockstep.amp.scaler import LossScaler
from lockstep.amp.state import _amp_state, maybe_print, warn_or_err

_TIMES_TO_TELL = 3  # shrinks in a row after which the cause is looked for


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place; a later call starts anew.

    Args:
        models: A model or a list of them, in fp32, on its device; data-parallel wrappers may be there or come later.
        optimizers: An optimizer, or a list of them; None if there is nothing to train.
        enabled: False gives everything back as it is.
        opt_level: ``"O0"`` fp32; ``"O1"`` functions cast by list; ``"O2"`` half model, batch norm and master weights in
            fp32; ``"O3"`` half throughout. Half is fp16 on CUDA and bf16 on a CPU (see ``cast_model_type``).
        cast_model_type: What the model is cast to. ``torch.float16`` or ``torch.bfloat16`` asks for that half type; the
            variable ``LOCKSTEP_HALF`` (``fp16``, ``bf16``) does so at O1 too.
        patch_torch_functions: Whether functions are cast; O1 only.
        keep_batchnorm_fp32: Whether batch norm stays in fp32; not with O1.
        master_weights: Whether the optimizer works on fp32 masters of half parameters; not with O1.
        loss_scale: A number, or ``"dynamic"``.
        cast_model_outputs: What the model's outputs are cast to; None: float32 where the model is cast.
        num_losses: How many losses have a scale of their own.
        verbosity: 0 prints nothing.
        min_loss_scale: Where a dynamic scale stops shrinking.
        max_loss_scale: Where it stops growing.

    Returns:
        What was given: models, or models and optimizers; lists as the same lists.

    Raises:
        RuntimeError: An option does not go with the level; a model is in half already; an optimizer is there twice.
        TypeError: Models or optimizers are neither one nor a list.

    Example:
        >>> from lockstep import amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> loss = model(torch.ones(3, 4)).square().mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> model.weight.dtype, next(amp.master_params(optimizer)).dtype
        (torch.bfloat16, torch.float32)
        >>> _ = amp.initialize(model, optimizer, enabled=False)
    """
    _amp_state.opt_properties = Properties()
    _amp_state.verbosity = verbosity
    if not enabled:
        CASTS.deactivate()
        vars(_amp_state).pop("loss_scalers", None)
        return models if optimizers is None else (models, optimizers)
    asked = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    properties = _choose(opt_level, asked)
    optimizer_list = [] if optimizers is None else as_list(optimizers, "optimizer", is_one=is_optimizer(optimizers))
    model_list = as_list(models, "model", is_one=isinstance(models, nn.Module))
    refuse_optimizers(optimizer_list)
    bare = [of_models.plain(model) for model in model_list]
    _start_anew(bare, optimizer_list)
    if opt_level != "O3":
        refuse_half_models(bare)
    properties.half = half_for(device_types(bare), cast_model_type)
    _tell_substitution(properties)
    _amp_state.opt_properties = properties
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    remember_names(bare)
    for model, inner in zip(model_list, bare, strict=True):
        _prepare_model(model, inner, properties, cast_model_outputs)
    for optimizer in optimizer_list:
        adopt(optimizer, masters=bool(properties.master_weights))
    assert properties.loss_scale is not None
    _amp_state.loss_scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    if properties.patch_torch_functions:
        CASTS.activate(device_types(bare), properties.half)
        _amp_state.handle = AmpHandle("dynamic")
    return models if optimizers is None else (models, optimizers)


def _choose(opt_level: Any, asked: dict[str, Any]) -> Properties:
    """The level's options with the user's overrides, told on the way as apex did."""
    properties = defaults_of(opt_level)
    maybe_print(f"Selected optimization level {LEVELS[opt_level].brief}", rank0=True)
    maybe_print("Defaults for this optimization level are:", rank0=True)
    _print_options(properties)
    maybe_print("Processing user overrides (additional kwargs that are not None)...", rank0=True)
    for name, value in asked.items():
        if value is not None:
            override(properties, name, value, warn_or_err)
    maybe_print("After processing overrides, optimization options are:", rank0=True)
    _print_options(properties)
    return properties


def _print_options(properties: Properties) -> None:
    for name in OPTIONS:
        maybe_print(f"{name:22} : {getattr(properties, name)}", rank0=True)


def _tell_substitution(properties: Properties) -> None:
    casts = properties.cast_model_type in HALF_TYPES or properties.patch_torch_functions
    if casts and properties.half != (properties.cast_model_type or torch.float16):
        maybe_print(f"Half precision is {properties.half} here; LOCKSTEP_HALF=fp16 asks for torch.float16.", rank0=True)


def _start_anew(models: list[nn.Module], optimizers: list[Any]) -> None:
    """Undo what an earlier `initialize` did to these, and turn off its casts."""
    CASTS.deactivate()
    for model in models:
        if of_models.unhook(model):
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dtype in HALF_TYPES:
                    master = master_of(tensor)
                    of_models.cast_tensor(tensor, torch.float32)
                    if master is not None:
                        tensor.data.copy_(master.detach())
    for optimizer in optimizers:
        release(optimizer)


def _prepare_model(model: nn.Module, inner: nn.Module, properties: Properties, outputs: torch.dtype | None) -> None:
    dtype = properties.model_dtype
    if dtype is not None:
        if dtype != torch.float32:
            of_models.cast_model(inner, dtype, keep_batchnorm=bool(properties.keep_batchnorm_fp32))
            of_models.rebuild_wrappers(model)
        of_models.hook_forward(inner, dtype, outputs or torch.float32)
        of_models.hook_states(inner)
    elif outputs is not None:
        of_models.hook_forward(inner, None, outputs)
    if properties.patch_torch_functions:
        of_models.hook_casts(inner, begin_forward, forget_copies)


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,  # noqa: ARG001
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Give the loss times its scale; afterwards take the scale out of the gradients and see whether they overflowed.

    With several ranks, an overflow on one is an overflow on all: every rank comes here equally often.

    Args:
        loss: The loss, any floating type.
        optimizers: The optimizer whose parameters the backward reaches, or a list of them.
        loss_id: Which loss this is, of the ``num_losses`` of `initialize`.
        model: Not used, as in apex.
        delay_unscale: Leave the gradients scaled, since another backward adds to them before the step.
        delay_overflow_check: Unscale, but leave the scale and the next step alone.

    Yields:
        The scaled loss, float32; call ``backward()`` on it.

    Raises:
        RuntimeError: `initialize` has not been called, or not with this optimizer.

    Example:
        >>> from lockstep import amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O0", loss_scale=8, verbosity=0)
        >>> with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> model.bias.grad
        tensor([1., 1.])
        >>> _ = amp.initialize(model, optimizer, enabled=False)
    """
    properties = getattr(_amp_state, "opt_properties", None)
    if properties is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
        )
    if not properties.enabled:
        yield loss
        return
    given = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    stashes = [stash_of(optimizer) for optimizer in given]
    scaler = _amp_state.loss_scalers[loss_id]
    scale = scaler.loss_scale()
    if scale == 1.0 and not scaler.dynamic and not any(stash.has_masters for stash in stashes):
        with _fresh_copies_afterwards():
            yield loss.float()
        return
    for stash in stashes:
        if not stash.params_have_scaled_gradients:
            stash.prepare(scale)
    try:
        with _fresh_copies_afterwards():
            yield loss.float() * scale
    except BaseException:
        for stash in stashes:
            stash.restore()
        raise
    _after(stashes, scaler, scale, delay_unscale)
    if not delay_unscale and not delay_overflow_check:
        _update(scaler, loss_id, given, stashes)


def _after(stashes: list[AmpOptimizerState], scaler: LossScaler, scale: float, delay_unscale: bool) -> None:
    if not delay_unscale:
        scaler.clear_overflow_state()
    for stash in stashes:
        if not delay_unscale:
            stash.finish(scaler, scale)
        stash.params_have_scaled_gradients = delay_unscale


@contextmanager
def _fresh_copies_afterwards() -> Iterator[None]:
    try:
        yield
    finally:
        CASTS.clear_cache()


def _update(scaler: LossScaler, loss_id: int, optimizers: list[Any], stashes: list[AmpOptimizerState]) -> None:
    """Move the scale, by what all ranks found, and arm the skipping of the next step."""
    if scaler.dynamic:
        scaler.decide(scaler.found_by_all())
    elif scaler.first_ignored_overflow():
        warnings.warn(
            f"gradients are not finite, and the static loss scale of {scaler.loss_scale()} takes every step as it is, "
            "so the weights are not finite from here on. loss_scale='dynamic' skips such steps.",
            stacklevel=4,
        )
    if not scaler.update_scale():
        return
    if scaler.shrunk == _TIMES_TO_TELL:
        warnings.warn(name_first_not_finite(optimizers, scaler, loss_id), stacklevel=4)
    for stash in stashes:
        if not stash.already_patched:
            stash.already_patched, stash.overflow = True, (loss_id, scaler)
