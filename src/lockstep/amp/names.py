"""Which parameter it was: names for the message about a loss scale that goes on shrinking."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.amp.scaler import LossScaler

_names: Any = WeakIdKeyDictionary()


def remember_names(models: Iterable[nn.Module]) -> None:
    """Remember what the parameters of these models are called there."""
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            _names[param] = name if number == 0 else f"{name} (of models[{number}])"


def name_first_not_finite(optimizers: Iterable[Any], scaler: LossScaler, loss_id: int) -> str:
    """The sentence that says which gradient is not finite."""
    rank = (
        f"rank {dist.get_rank()} of {dist.get_world_size()}: " if dist.is_available() and dist.is_initialized() else ""
    )
    start = f"{rank}loss scaler {loss_id} has shrunk three times in a row, to {scaler.loss_scale()}. "
    name = next((_name(param, place) for param, place in _params(optimizers) if _not_finite(param)), None)
    if name is None:
        return start + "The gradients that are not finite are another rank's; see its own message."
    return (
        f"{start}The first parameter whose gradient is not finite is {name}. A loss or a layer that gives inf or nan "
        "in half precision is the usual cause: run it in fp32, with amp.float_function for instance."
    )


def _params(optimizers: Iterable[Any]) -> Iterator[tuple[Tensor, str]]:
    """The model's parameters, in the order of the optimizers' groups."""
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        models = {id(master): param for param, master in stash.pairs()}
        for i, group in enumerate(optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                yield models.get(id(param), param), f"number {j} of group {i}"


def _not_finite(param: Tensor) -> bool:
    grad = param.grad
    if grad is None:
        return False
    return not bool((grad._values() if grad.is_sparse else grad).isfinite().all())


def _name(param: Tensor, place: str) -> str:
    return f"{_names.get(param) or place!r}, shape {tuple(param.shape)}"
