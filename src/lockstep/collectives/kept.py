"""Gradients that stayed on this rank: the engine that averages gradients knows of them, and who stored them asks.

Mixed precision takes gradients out of ``.grad`` between two backwards, where an engine would look for them. The two do
not know each other; they meet here.
"""

import weakref
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Channel(Protocol):
    """The ranks of an engine."""

    size: int

    def add_up(self, x: Tensor) -> None:
        """Sum ``x`` over ranks in place."""
        ...


class Engine(Protocol):
    """What averages the gradients of some parameters over ranks; ``syncing`` outside of blocks like ``no_sync``."""

    syncing: bool

    @property
    def peers(self) -> Channel:
        """Its ranks."""
        ...

    def owns_any(self, ids: Collection[int]) -> bool:
        """Whether some of the parameters with these ids are its own."""
        ...


engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def engines_of(params: Collection[Tensor]) -> list[Engine]:
    """Those that own some of these parameters."""
    ids = {id(param) for param in params}
    return [engine for engine in engines if engine.owns_any(ids)]


def average_gradients(holders: Sequence[Tensor], peers: Channel) -> None:
    """Average ``.grad`` of tensors that stand for an engine's parameters; one that no rank has stays None.

    Parts that were averaged before are equal on all ranks, and so stay what they are.
    """
    for dtype in dict.fromkeys(holder.dtype for holder in holders):
        mine = [holder for holder in holders if holder.dtype == dtype]
        there = torch.tensor([holder.grad is not None for holder in mine], dtype=dtype, device=mine[0].device)
        parts = [torch.zeros_like(h) if h.grad is None else h.grad for h in mine]
        flat = torch.cat([*(part.detach().reshape(-1) for part in parts), there])
        peers.add_up(flat)
        *means, counts = torch.split(flat, [*(holder.numel() for holder in mine), len(mine)])
        for holder, mean, count in zip(mine, means, counts.tolist(), strict=True):
            if count:
                holder.grad = (mean / peers.size).view_as(holder)
