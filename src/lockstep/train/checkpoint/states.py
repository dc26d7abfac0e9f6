"""What a checkpoint is made of: things with a state, and dicts of plain values."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.data import DataLoader
from lockstep.errors import UsageError
from lockstep.parallel.attach import unwrap
from lockstep.train.checkpoint import randomness, trees
from lockstep.train.checkpoint.tensors import Collection, Held
from lockstep.train.update import Update

RANDOM = "random numbers"
"""The part that every checkpoint has; no keyword argument can be called so."""


class Told(NamedTuple):
    """A part's state as a tree and tensors."""

    tree: Any
    held: dict[str, Held]


def refuse_stateless(parts: dict[str, Any]) -> None:
    """Raise if something has no state."""
    for name, part in parts.items():
        if not isinstance(part, dict) and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(
                f"{name}={type(part).__name__}: a part of a checkpoint has state_dict() and load_state_dict(), or is a "
                f"dict of plain values that the script changes in place."
            )


def state_of(part: Any) -> Any:
    """Give a part's state; a model's without the prefixes of wrappers."""
    if isinstance(part, dict) and not hasattr(part, "state_dict"):
        return part
    return (unwrap(part) if isinstance(part, nn.Module) else part).state_dict()


def load(part: Any, state: Any) -> None:
    """Let a part go on from a state."""
    if isinstance(part, dict) and not hasattr(part, "state_dict"):
        part.clear()
        part.update(state)
        return
    (unwrap(part) if isinstance(part, nn.Module) else part).load_state_dict(state)


def tell(name: str, part: Any) -> Told:
    """Give a part's state as a tree and tensors, which are the part's own memory."""
    buffers = unwrap(part).buffers() if isinstance(part, nn.Module) else ()
    collection = Collection(frozenset(buffer.data_ptr() for buffer in buffers if buffer.layout is torch.strided))
    tree = trees.encode(state_of(part), name, collection.put)
    return Told(tree, collection.held)


def teller(parts: dict[str, Any]) -> Callable[[], dict[str, Told]]:
    """Give what collects every part's state, and this rank's random numbers."""
    return lambda: {name: tell(name, part) for name, part in {**parts, RANDOM: randomness}.items()}


def unfinished(parts: dict[str, Any]) -> bool:
    """Whether a step has begun that would be lost: micro-batches of an `Update`."""
    return any(part.unfinished for part in parts.values() if isinstance(part, Update))


def end_epoch(parts: dict[str, Any]) -> None:
    """A loader that was left in the middle begins a new epoch; let its state say so."""
    for part in parts.values():
        if isinstance(part, DataLoader) and part.state_dict()["position"]:
            part.set_epoch(part.epoch + 1)


def forgotten_loader(parts: dict[str, Any], gives: weakref.ref[object] | None) -> bool:
    """Whether the batches come from a `lockstep.DataLoader`, and the checkpoint holds the position of none.

    The loader that gave the last batch is often the evaluation's, whose position nobody needs: where there is any
    loader among the parts, the script has thought of it.

    Args:
        parts: Those of the checkpoint.
        gives: The loader that has given batches since the checkpoint was made.
    """
    loader = gives() if gives is not None else None
    return loader is not None and not any(isinstance(part, DataLoader) for part in parts.values())
