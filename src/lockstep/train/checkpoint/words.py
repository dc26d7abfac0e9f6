"""What ranks tell each other behind the loop's back: through the store where they first met, never by a collective.

Collectives are matched by their order, and the loop makes its own meanwhile. ``_get_default_store`` is private; as it
is in torch 2.9 to 2.14.
"""

import itertools
import threading
import time
from typing import Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.errors import LateRankError
from lockstep.world import World

_PATIENCE, _AT_THE_END = 3600.0, 60.0
"""Seconds that a share may take to write: a slow disk is no reason to give up while the loop goes on, and a rank that
is gone ends it anyway. Once the main thread has ended, only this wait keeps the process."""
_LOOK_EVERY = 0.01

_talks = itertools.count()


class Words(Protocol):
    """One text from every rank to rank 0, and one from rank 0 to all."""

    def collect(self, mine: str) -> list[str]:
        """On rank 0: give every rank's text, by rank."""
        ...

    def tell(self, text: str) -> None:
        """On rank 0: answer all, and wait until they have heard."""
        ...

    def hear(self, mine: str) -> str:
        """On the others: say it, and give rank 0's answer."""
        ...


class Alone:
    """Nobody to talk to."""

    def collect(self, mine: str) -> list[str]:
        """Give one text."""
        return [mine]

    def tell(self, text: str) -> None:
        """Nobody hears."""

    def hear(self, mine: str) -> str:
        """Never called: a world of one has rank 0 only."""
        raise AssertionError(mine)


class Store:
    """By the store of the default process group, between two ranks or more."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        # A clone has a connection of its own: one that waits does not keep the loop from using the other.
        self._store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._prefix = f"lockstep/checkpoint/{next(_talks)}"

    def _key(self, rank: int, what: str) -> str:
        return f"{self._prefix}/{rank}/{what}"

    def _wait(self, keys: list[str]) -> None:
        """Wait for words of other ranks."""
        until, ending = time.monotonic() + _PATIENCE, False
        # Not by the store's own wait: the end of its patience is a warning on the screen.
        while not self._store.check(keys):
            if not ending and not threading.main_thread().is_alive():
                until, ending = time.monotonic() + _AT_THE_END, True
            if time.monotonic() > until:
                missing = [key.split("/")[-2] for key in keys if not self._store.check([key])]
                raise LateRankError(f"rank(s) {', '.join(missing)} did not write their share in time")
            time.sleep(_LOOK_EVERY)

    def collect(self, mine: str) -> list[str]:
        """Wait for all."""
        keys = [self._key(rank, "report") for rank in range(1, self._size)]
        self._wait(keys)
        texts = [mine, *(self._store.get(key).decode() for key in keys)]
        for key in keys:
            self._store.delete_key(key)
        return texts

    def tell(self, text: str) -> None:
        """Answer; rank 0 may keep the store itself, so it stays until all have heard."""
        self._store.set(self._key(0, "verdict"), text)
        keys = [self._key(rank, "heard") for rank in range(1, self._size)]
        self._wait(keys)
        for key in (self._key(0, "verdict"), *keys):
            self._store.delete_key(key)

    def hear(self, mine: str) -> str:
        """Say it, wait, and say that it was heard."""
        self._store.set(self._key(self._rank, "report"), mine)
        self._wait([self._key(0, "verdict")])
        text: str = self._store.get(self._key(0, "verdict")).decode()
        self._store.set(self._key(self._rank, "heard"), "")
        return text


def open_words(world: World) -> Words:
    """Begin a talk; every rank begins its talks in the same order."""
    return Store(world.rank, world.size) if dist.is_initialized() and world.size > 1 else Alone()
