"""What a step amounts to over all ranks: how much its losses weigh, their sum, and who has losses that are no numbers.

Alone and together are two of one kind, so that `Update` need not know whether there are others.
"""

import math
import zlib
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from lockstep.errors import MismatchError
from lockstep.parallel.reducer import Reducer

# Over all ranks and micro-batches: the weight, the weighted sum of losses, and the ranks whose losses are NaN.
Totals: TypeAlias = tuple[float, float, tuple[int, ...]]


class Ranks(Protocol):
    """Those whose gradients make one step."""

    size: int

    def announce(self, weight: float | Tensor, loss: float | Tensor) -> None:
        """Say what this rank's part of the step amounts to, before its last backward."""
        ...

    def keep(self, backward: Callable[[Tensor], None], loss: Tensor) -> None:
        """Run the backward of a micro-batch that is not the last one."""
        ...

    def add_up(self, weight: float | Tensor, settings: str) -> float:
        """The sum over ranks of one number, now; raise if ranks have other ``settings``."""
        ...

    def give_up(self) -> None:
        """This rank leaves the step that is being made."""
        ...

    def meet(self) -> None:
        """This rank has left out the last batch of an epoch."""
        ...

    def collect(self) -> Totals:
        """See to it that gradients are those of all ranks, and give what the step amounts to."""
        ...


class Alone:
    """One rank, whose gradients nobody waits for."""

    size = 1

    def __init__(self) -> None:
        self._weight: float | Tensor = 0.0
        self._loss: float | Tensor = 0.0

    def announce(self, weight: float | Tensor, loss: float | Tensor) -> None:
        """Keep it."""
        self._weight, self._loss = weight, loss

    def keep(self, backward: Callable[[Tensor], None], loss: Tensor) -> None:
        """Nothing to hold back."""
        backward(loss)

    def add_up(self, weight: float | Tensor, settings: str) -> float:  # noqa: ARG002
        """The number itself."""
        return float(weight)

    def give_up(self) -> None:
        """Nobody meets it anywhere."""

    def meet(self) -> None:
        """Nobody to meet."""

    def collect(self) -> Totals:
        """What was announced."""
        loss = float(self._loss)
        return float(self._weight), loss, (0,) if loss != loss else ()


class Together:
    """Ranks that share a reducer. A step's numbers travel behind its last bucket, in no collective of their own."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self.size = reducer, reducer.peers.size
        self._bad: float | Tensor = 0.0

    def announce(self, weight: float | Tensor, loss: float | Tensor) -> None:
        """Give it to the reducer; a NaN would hide what the others have, so it goes as a flag beside a zero."""
        if isinstance(loss, Tensor):
            loss = loss.double()
            self._bad = loss.isnan().double()
            self._reducer.carry(torch.stack((torch.as_tensor(weight).to(loss), loss.nan_to_num(0.0), self._bad)))
        else:
            self._bad = float(math.isnan(loss))
            self._reducer.carry((float(weight), 0.0 if self._bad else loss, self._bad))

    def keep(self, backward: Callable[[Tensor], None], loss: Tensor) -> None:
        """Gradients stay on this rank."""
        before, self._reducer.syncing = self._reducer.syncing, False
        try:
            backward(loss)
        finally:
            self._reducer.syncing = before

    def add_up(self, weight: float | Tensor, settings: str) -> float:
        """One collective, in which a checksum of the settings travels too."""
        peers = self._reducer.peers
        mine = torch.tensor(
            [float(weight), zlib.crc32(settings.encode())], dtype=torch.float64, device=self._reducer.device
        )
        weights, sums = peers.line_up(mine).T.tolist()
        others = [rank for rank, other in zip(peers.ranks, sums, strict=True) if other != sums[0]]
        if others:
            raise MismatchError(
                f"rank {peers.rank}: lockstep.Update is another one on rank(s) {', '.join(map(str, others))} than on "
                f"rank {peers.ranks[0]}; here it is {settings}. Every rank must make the same optimizer and the same "
                f"Update, or their models part."
            )
        return float(sum(weights))

    def give_up(self) -> None:
        """Others that do not leave it find out at their backward."""
        self._reducer.give_up()

    def meet(self) -> None:
        """Others that are in a step raise, and so does this rank."""
        self._reducer.meet()

    def collect(self) -> Totals:
        """Usually there already; only a NaN costs another collective, to find out whose it is."""
        self._reducer.sync()
        weight, loss, bad = self._reducer.carried
        return weight, loss, self._bad_ranks() if bad else ()

    def _bad_ranks(self) -> tuple[int, ...]:
        peers = self._reducer.peers
        flags = peers.line_up(torch.as_tensor(self._bad, dtype=torch.float64, device=self._reducer.device)).tolist()
        return tuple(rank for rank, flag in zip(peers.ranks, flags, strict=True) if flag)
