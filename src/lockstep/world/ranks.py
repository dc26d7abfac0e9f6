"""The few operations between ranks that everything else is built from, for one rank and for many."""

import os
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError


class Ranks(Protocol):
    """All ranks together. Every rank calls the same operations in the same order."""

    size: int

    def add_up(self, x: Tensor) -> Tensor:
        """Give the sum over ranks, the same bits on each; ``x`` stays as it is."""
        ...

    def add_up_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Start `add_up`; the function that comes back waits for the sum."""
        ...

    def line_up(self, x: Tensor) -> Tensor:
        """Give every rank's ``x`` (same shape and dtype on each), by rank, as ``(size, *x.shape)``."""
        ...

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...


class Alone:
    """A world of one: nothing to send, and no process group needed."""

    size = 1

    def add_up(self, x: Tensor) -> Tensor:
        """Give a copy: the sum over one rank."""
        return x.detach().clone()

    def add_up_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Nothing to wait for."""
        mine = self.add_up(x)
        return lambda: mine

    def line_up(self, x: Tensor) -> Tensor:
        """Give ``(1, *x.shape)``."""
        return x.detach().clone().unsqueeze(0)

    def barrier(self) -> None:
        """Nobody to wait for."""


class Group:
    """The default process group."""

    def __init__(self, device: torch.device) -> None:
        self.size = dist.get_world_size()
        # nccl alone moves CUDA tensors only; with "cpu:gloo,cuda:nccl" every tensor travels from where it is.
        self._carrier = device if dist.get_backend() == "nccl" else None

    def add_up(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        there = self._copy(x)
        dist.all_reduce(there)
        return there.to(x.device)

    def add_up_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the sum over ranks."""
        there = self._copy(x)
        work = dist.all_reduce(there, async_op=True)

        def wait() -> Tensor:
            assert work is not None  # only for ranks outside the group
            work.wait()
            return there.to(x.device)

        return wait

    def _copy(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=self._carrier or x.device).copy_(x.detach())

    def line_up(self, x: Tensor) -> Tensor:
        """Gather by rank."""
        mine = x.detach().contiguous().to(self._carrier or x.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return torch.stack(rows).to(x.device)

    def barrier(self) -> None:
        """Wait for every rank; a sum, since every backend has one and it needs no device of its own."""
        self.add_up(torch.zeros(1))


class NotStarted:
    """A launcher started several ranks, but nothing connects them yet."""

    def __init__(self, size: int) -> None:
        self.size = size

    def _refuse(self) -> UsageError:
        return UsageError(
            f"rank {os.environ.get('RANK', '?')} of {self.size}: the ranks are not connected yet. "
            f"Call lockstep.init() at the top of the script."
        )

    def add_up(self, x: Tensor) -> Tensor:  # noqa: ARG002
        """Refuse."""
        raise self._refuse()

    def add_up_later(self, x: Tensor) -> Callable[[], Tensor]:  # noqa: ARG002
        """Refuse."""
        raise self._refuse()

    def line_up(self, x: Tensor) -> Tensor:  # noqa: ARG002
        """Refuse."""
        raise self._refuse()

    def barrier(self) -> None:
        """Refuse."""
        raise self._refuse()
