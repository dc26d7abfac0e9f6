"""A model's parameters in half, batch norm left in fp32; hooks that cast what goes in and out of it.

Nothing is replaced in a module: hooks are instances and functions of this file's top, so a model can be copied,
pickled, compiled and replicated as before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from lockstep.amp.levels import HALF_TYPES
from lockstep.amp.masters import master_of
from lockstep.amp.nested import cast_nested

_WRAPPERS = ("DistributedDataParallel", "DataParallel")


Hook = Callable[..., None]


class CastInputs:
    """A forward pre-hook: floating arguments become ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Cast."""
        return cast_nested(args, self.dtype), cast_nested(kwargs, self.dtype)


class CastOutputs:
    """A forward hook: what comes out becomes ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        """Cast."""
        return cast_nested(output, self.dtype)


def plain(model: nn.Module) -> nn.Module:
    """The module inside of data-parallel wrappers, whoever made them."""
    while type(model).__name__ in _WRAPPERS and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def cast_model(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool) -> None:
    """Cast floating parameters (each stays the object it is), their gradients and floating buffers.

    Affine batch norm keeps its type where ``keep_batchnorm`` is set. In place.
    """
    for module in model.modules():
        if keep_batchnorm and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            cast_tensor(tensor, dtype)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> None:
    """Give a parameter or buffer another type, its gradient too."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return
    grad, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    if grad is not None:
        tensor.grad = grad.to(dtype)


def hook_forward(model: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype) -> None:
    """Cast what goes in, and first of all hooks, what comes out."""
    if inputs is not None:
        model.register_forward_pre_hook(CastInputs(inputs), with_kwargs=True)
    model.register_forward_hook(CastOutputs(outputs), prepend=True)


def hook_states(model: nn.Module) -> None:
    """Have ``state_dict()`` give float32, with the precision of the masters, and loading keep it."""
    for module in model.modules():
        module.register_state_dict_post_hook(give_float32)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(take_float32)  # type: ignore[no-untyped-call]


def hook_casts(model: nn.Module, begin: Hook, forget: Hook) -> None:
    """Call ``begin`` before each forward, in the thread that runs it, and ``forget`` when weights are loaded."""
    model.register_forward_pre_hook(_ours(begin), prepend=True)
    for module in model.modules():
        module.register_load_state_dict_post_hook(_ours(forget))  # type: ignore[no-untyped-call]


def _ours(hook: Hook) -> Hook:
    hook.of_amp = True  # type: ignore[attr-defined]
    return hook


def give_float32(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Half entries of one module become float32: the master's values, else what they are."""
    for name, tensor in own_tensors(module):
        entry = state.get(prefix + name)
        if isinstance(entry, Tensor) and entry.dtype in HALF_TYPES:
            master = master_of(tensor)
            state[prefix + name] = entry.to(torch.float32) if master is None else master.detach().clone()


def take_float32(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """What a module is about to load goes into its masters as it is, before it is rounded."""
    for name, tensor in own_tensors(module):
        entry, master = state.get(prefix + name), master_of(tensor)
        if isinstance(entry, Tensor) and master is not None and entry.shape == master.shape:
            with torch.no_grad():
                master.copy_(entry)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of one module, without those of its children."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def unhook(model: nn.Module) -> bool:
    """Take away the hooks of an earlier `initialize`. Gives whether there were some."""
    found = False
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            found |= _drop(hooks, lambda hook: isinstance(hook, CastInputs | CastOutputs) or hasattr(hook, "of_amp"))
        found |= _drop(module._load_state_dict_post_hooks, lambda hook: hasattr(hook, "of_amp"))
        found |= _drop(module._state_dict_hooks, lambda hook: hook is give_float32)
        found |= _drop(module._load_state_dict_pre_hooks, lambda hook: getattr(hook, "hook", hook) is take_float32)
    return found


def _drop(hooks: Any, ours: Callable[[Any], bool]) -> bool:
    keys = [key for key, hook in hooks.items() if ours(hook)]
    for key in keys:
        del hooks[key]
    return bool(keys)


def rebuild_wrappers(model: nn.Module) -> None:
    """Let torch's DistributedDataParallel around a model that was cast learn the new types.

    Its engine made buckets for the old ones. Private names, checked on torch 2.9 to 2.14; the same that its own
    unpickling calls. lockstep's own engine notices by itself.
    """
    while type(model).__name__ in _WRAPPERS and isinstance(getattr(model, "module", None), nn.Module):
        if isinstance(model, TorchDistributedDataParallel):
            ddp: Any = model
            parameters, sparse = ddp._build_params_for_reducer()
            names = ddp._build_debug_param_to_name_mapping(parameters)
            ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        model = model.module  # type: ignore[assignment]
