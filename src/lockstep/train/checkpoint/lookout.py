"""What one rank notices at a step, all know one step later: a signal, the time, a save that failed."""

import signal
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.world import World


class Seen(NamedTuple):
    """What ranks have noticed.

    Attributes:
        signal: The signal's number; 0 if none came.
        due: Whether it is time to save.
        failed: Whether a save has failed.
    """

    signal: int
    due: bool
    failed: bool


NOTHING = Seen(0, due=False, failed=False)


class Lookout:
    """Lets all ranks act at the same step on what one of them has noticed.

    One sum of four small numbers a step. It is sent at one step and read at the next, so that nobody waits for it; a
    world of one knows at once.

    Example:
        >>> import lockstep
        >>> Lookout(lockstep.init()).exchange(Seen(15, False, False))
        Seen(signal=15, due=False, failed=False)
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._coming: Callable[[], Tensor] | None = None
        self._settled = False

    def settle(self) -> None:
        """What was due or had failed is dealt with: the message that is on its way does not count for that."""
        self._settled = self._coming is not None

    def exchange(self, mine: Seen) -> Seen:
        """Send what this rank has noticed; give what all together had noticed at the step before."""
        if self._world.size == 1:
            return mine
        before, self._coming = self._coming, self._send(mine)
        if before is None:
            return NOTHING
        seen, settled = _read(before()), self._settled
        self._settled = False
        return seen._replace(due=False, failed=False) if settled else seen

    def catch_up(self, mine: Seen) -> Seen:
        """The same, and wait: give what all have noticed by now."""
        if self._world.size == 1:
            return mine
        first = self.exchange(mine)
        assert self._coming is not None
        second = _read(self._coming())
        self._coming = None
        return Seen(first.signal or second.signal, first.due or second.due, first.failed or second.failed)

    def _send(self, mine: Seen) -> Callable[[], Tensor]:
        row = [mine.signal == signal.SIGTERM, mine.signal == signal.SIGUSR1, mine.due, mine.failed]
        return self._world.ranks.add_up_later(torch.tensor(row, dtype=torch.int32))


def _read(row: Tensor) -> Seen:
    term, usr1, due, failed = row.tolist()
    return Seen(int(signal.SIGTERM) if term else int(signal.SIGUSR1) if usr1 else 0, bool(due), bool(failed))
