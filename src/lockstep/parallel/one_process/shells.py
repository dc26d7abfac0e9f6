"""Replicas of a module: its own objects' state, around other tensors.

Made for every forward, which takes microseconds a layer: whatever was set, hooked or moved in the module since the last
one counts, what a replica sets in itself is lost, and what a graph still holds (checkpointing runs a replica's forward
again in backward) stays as it was. What takes time are the tensors, and `copies.py` keeps those.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError


class _Listed(dict[str, Any]):
    """The parameters of a replica, there to be listed: torch's replicas have none, and old models ask for the first.

    ``in`` does not find them, so that a replica may assign to one (``self.weight += x``), which torch's replicas
    can; a module takes parameters only.
    """

    def __contains__(self, key: object) -> bool:
        return False


def make_replica(root: nn.Module, tensors: dict[int, Tensor]) -> nn.Module:
    """Give a module like ``root`` that computes with other parameters and buffers.

    Args:
        root: The module. Submodules, parameters and buffers that it shares are shared in the replica too.
        tensors: What stands for each of its parameters and buffers, by id.

    Raises:
        UsageError: A part of it is TorchScript, whose tensors cannot be exchanged.
    """
    # What torch.compile makes hands everything to the module inside it, so in a replica that one stands for both.
    modules = [module for module in root.modules() if _compiled(module) is None]
    shells = {id(module): _shell(module) for module in modules}
    for module in root.modules():
        inner = module
        while (inside := _compiled(inner)) is not None:
            inner = inside
        shells[id(module)] = shells[id(inner)]
    for module in modules:
        _fill(shells[id(module)], module, shells, tensors)
    return shells[id(root)]


def _compiled(module: nn.Module) -> nn.Module | None:
    return dict(module._modules).get("_orig_mod")  # TorchScript has no dict there


def _shell(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            f"DataParallel cannot replicate {type(module).__name__}, which is TorchScript. Give it the Python module "
            f"that was scripted or traced."
        )
    shell: Any = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    return shell  # type: ignore[no-any-return]


def _fill(shell: nn.Module, module: nn.Module, shells: dict[int, nn.Module], tensors: dict[int, Tensor]) -> None:
    own = shell.__dict__
    own["_parameters"], own["_buffers"], own["_modules"] = _Listed(), dict(module._buffers), dict(module._modules)
    for key, parameter in module._parameters.items():
        stand_in: Any = None if parameter is None else tensors[id(parameter)]
        setattr(shell, key, stand_in)  # an attribute like any other; recurrent layers keep a list of them besides
        own["_parameters"][key] = stand_in
    for key, buffer in module._buffers.items():
        own["_buffers"][key] = None if buffer is None else tensors[id(buffer)]
    for key, child in module._modules.items():
        own["_modules"][key] = None if child is None else shells[id(child)]
    for key, value in own.items():
        # `self.forward = self._forward_slowly` is bound to the module, whose parameters are on another device.
        if isinstance(value, MethodType) and id(value.__self__) in shells:
            own[key] = MethodType(value.__func__, shells[id(value.__self__)])
    if own.get("_compiled_call_impl") is not None:
        own["_compiled_call_impl"] = None  # as above: module.compile() runs the module itself
