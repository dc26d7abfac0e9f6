"""A model's batch norm layers made synchronised, and back."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep.parallel.batchnorm.layer import BatchNorm, SyncBatchNorm

Converter = Callable[[nn.Module], nn.Module | None]

# Classes whose whole behaviour SyncBatchNorm has.
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNorm, _BatchNorm)
# What a subclass of them may define without behaving differently once it is built.
_HARMLESS = {
    "__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__constants__", "__parameters__",
    "_version",
    "__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "_check_input_dim", "extra_repr", "__dict__", "__weakref__",
}  # fmt: skip


class Found(NamedTuple):
    """A batch norm layer in a model."""

    name: str
    layer: nn.Module
    obstacle: str  # why it cannot be converted; empty if it can


def find_batchnorms(module: nn.Module) -> list[Found]:
    """Find the layers that `convert_sync_batchnorm` would look at, each once; synchronised ones are not among them.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d())
        >>> [(name, obstacle) for name, _, obstacle in find_batchnorms(model)]
        [('0', ''), ('1', 'LazyBatchNorm1d has seen no input yet')]
    """
    return [
        Found(name, layer, obstacle(layer))
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
    ]


def obstacle(layer: nn.Module) -> str:
    """Why a layer cannot become a SyncBatchNorm without losing something; empty if it can."""
    kind = type(layer)
    if isinstance(layer, LazyModuleMixin):
        return f"{kind.__name__} has seen no input yet"
    if "forward" in vars(layer):
        return f"this {kind.__name__} has a forward of its own"
    for cls in kind.__mro__:
        if cls in _PLAIN:
            return ""
        own = sorted(set(vars(cls)) - _HARMLESS)
        if own:
            return f"{kind.__name__} has its own {', '.join(own[:3])}"
    return ""


def count_synchronised(module: nn.Module) -> int:
    """How many layers of a model are synchronised."""
    return sum(isinstance(layer, SyncBatchNorm) for layer in module.modules())


def convert_sync_batchnorm(
    module: nn.Module, process_group: Any = None, converter: Converter | None = None
) -> nn.Module:
    """Make every BatchNorm1d, 2d and 3d (and torch.nn.SyncBatchNorm) in a model synchronised, in place.

    The layers stay the same objects with another class, so parameters, buffers, hooks, flags, other attributes and
    whatever else refers to them stay as they are, as do optimizers that were built before.

    Args:
        module: The model; it may be a batch norm layer itself.
        process_group: The ranks that normalise together, see `create_syncbn_process_group`; None for all (a
            torch.nn.SyncBatchNorm keeps its own).
        converter: Called with each layer that cannot be converted without losing something: a subclass with its own
            forward or other methods, a lazy layer. Returns what to put in its place, the layer itself to leave it
            without a warning, or None to leave it with one.

    Returns:
        The model, or what the converter made of it if it is such a layer itself.

    Warns:
        UserWarning: Layers were left as they are, with their names; on rank 0.

    Example:
        >>> import lockstep
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> [type(layer).__name__ for layer in lockstep.convert_sync_batchnorm(model)]
        ['Linear', 'SyncBatchNorm']
    """
    replacements: dict[nn.Module, nn.Module] = {}
    left = []
    for name, layer, why in find_batchnorms(module):
        if not why:
            _synchronise(layer, process_group)
            continue
        new = converter(layer) if converter is not None else None
        if new is None:
            left.append(f"{name or 'the model itself'!r} ({why})")
        elif new is not layer:
            replacements[layer] = new
    _warn(
        left,
        "convert_sync_batchnorm",
        "so they normalise by the local batch only. Pass converter= to say what to put there.",
    )
    return _replace(module, replacements)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Make every `SyncBatchNorm` in a model ordinary again, in place: for export, or to go on with one device.

    A converted layer gets back the class that it had; one that was made as a `SyncBatchNorm` becomes an ordinary batch
    norm for inputs of any dimension. The state_dict stays the same.

    Args:
        module: The model; it may be a `SyncBatchNorm` itself.

    Returns:
        The model.

    Warns:
        UserWarning: Layers were left as they are, since ordinary batch norm has no ``channel_last`` and ``fuse_relu``;
            on rank 0.

    Example:
        >>> import lockstep
        >>> from torch import nn
        >>> type(lockstep.revert_sync_batchnorm(lockstep.convert_sync_batchnorm(nn.BatchNorm1d(3)))).__name__
        'BatchNorm1d'
    """
    left = []
    for name, layer in module.named_modules():
        if not isinstance(layer, SyncBatchNorm):
            continue
        if layer.channel_last or layer.fuse_relu:
            left.append(
                f"{name or 'the model itself'!r} (channel_last={layer.channel_last}, fuse_relu={layer.fuse_relu})"
            )
            continue
        state = vars(layer)
        former = state.pop("_former_class", BatchNorm)
        for own in ("_group", "channel_last", "fuse_relu"):
            state.pop(own, None)
        layer.__class__ = former
    _warn(
        left, "revert_sync_batchnorm", "since ordinary batch norm cannot do this. Alone they normalise the local batch."
    )
    return module


def _synchronise(layer: nn.Module, process_group: Any) -> None:
    """Change the class of a layer, and remember the one it had."""
    former = type(layer)
    own_group = vars(layer).pop("process_group", None)  # torch.nn.SyncBatchNorm has one
    layer.__class__ = SyncBatchNorm
    assert isinstance(layer, SyncBatchNorm)
    # torch's class cannot train on CPU, so there is no way back to it.
    vars(layer)["_former_class"] = BatchNorm if issubclass(former, nn.SyncBatchNorm) else former
    if process_group is not None or own_group is not None:
        layer.process_group = process_group if process_group is not None else own_group


def _replace(module: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """Put new modules in place of old ones, wherever they are used."""
    # All places first: a new module may hold the old one.
    places = [
        (parent, name, replacements[child])
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child in replacements
    ]
    for parent, name, new in places:
        setattr(parent, name, new)
    return replacements.get(module, module)


def _warn(left: list[str], function: str, why: str) -> None:
    if left and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        warnings.warn(
            f"lockstep.{function} left {len(left)} layer(s) as they are: {', '.join(left)}, {why}", stacklevel=3
        )
