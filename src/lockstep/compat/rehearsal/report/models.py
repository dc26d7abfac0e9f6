"""The models of a script, found among all objects: which parameters have gradients, which batch norms stand alone."""

import gc
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.parallel.batchnorm import SyncBatchNorm


class Gradients:
    """Which parameters have had a gradient after some step."""

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self._had: set[int] = set()

    def look(self) -> None:
        """Look at every model, after a step and before gradients are taken away."""
        if not self._models:
            self._models = find_models()
        for model in self._models:
            self._had.update(id(p) for p in model.parameters() if p.grad is not None)

    def missing(self) -> Iterator[str]:
        """Names of parameters that want a gradient and never had one, in models where others had."""
        for model in self._trained():
            for name, p in model.named_parameters():
                if p.requires_grad and id(p) not in self._had:
                    yield inner_name(name)

    def unsynchronised(self) -> Iterator[str]:
        """Names of batch norms in training mode that see this rank's samples only."""
        for model in self._trained():
            for name, layer in model.named_modules():
                alone = isinstance(layer, _BatchNorm) and not isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))
                if alone and layer.training:
                    yield inner_name(name)

    def _trained(self) -> list[nn.Module]:
        return [model for model in self._models if any(id(p) in self._had for p in model.parameters())]


def find_models() -> list[nn.Module]:
    """Every module with parameters that is not part of another."""
    modules = [thing for thing in gc.get_objects() if isinstance(thing, nn.Module)]
    parts = {id(part) for module in modules for part in module._modules.values()}
    return [module for module in modules if id(module) not in parts and any(True for _ in module.parameters())]


def inner_name(name: str) -> str:
    """A name without what a wrapper puts in front.

    Example:
        >>> inner_name("module.head.weight"), inner_name("head.weight")
        ('head.weight', 'head.weight')
    """
    return name.removeprefix("module.")
