"""Where the ranks of other nodes are, told between launchers by the store where the nodes met.

Each launcher looks at its own ranks. When they do not go on, it writes down what it has seen, and reads what the others
have written; all notice at about the same time, since all ranks wait for each other. Nothing is sent while ranks go on.
"""

import collections
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousInfo

from lockstep.watch.record import read_seen
from lockstep.watch.verdict import Node, Seen

_LOOK_EVERY = 0.1
"""Seconds between looks into the store."""
_PAST = 50
"""Calls of each rank that are told to other nodes."""


class Asked:
    """A question to the other nodes, and the answers that have come.

    Args:
        others: The nodes that are asked.
        until: When it is given up.
    """

    def __init__(self, others: set[int], until: float) -> None:
        self.until = until
        self._asked = others
        self._came: dict[int, Node] = {}

    def add(self, node: Node) -> None:
        """An answer."""
        self._came[node.number] = node

    @property
    def missing(self) -> list[int]:
        """Nodes that have not answered."""
        return sorted(self._asked - self._came.keys())

    @property
    def came(self) -> list[Node]:
        """What the others have seen."""
        return sorted(self._came.values())


class Others:
    """This launcher's word to others, and theirs. What could wait for the network does so in a thread of its own."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._node, self._nodes = 0, 1
        self._told = False
        self._lock = threading.Lock()
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._works = False

    def meet(self, info: RendezvousInfo) -> None:
        """The nodes have met, for the first time or again; what was written before is not found in this store."""
        self._store, self._node, self._nodes = info.store, info.rank, info.world_size

    def ask(self, ranks: Sequence[Seen], seconds: float) -> Asked:
        """Tell where the ranks of this node are, and collect for so long what the others tell."""
        asked = Asked(set(range(self._nodes)) - {self._node}, time.monotonic() + seconds)
        mine, store = Node(self._node, os.uname().nodename, tuple(ranks)), self._store
        if asked.missing and store is not None:
            self._told = True
            self._do(lambda: _swap(store, mine, asked))
        return asked

    def forget(self) -> None:
        """The ranks go on: what this node has told is over."""
        store, key = self._store, _key(self._node)
        if self._told and store is not None:
            self._told = False
            self._do(lambda: _forget(store, key))

    def _do(self, job: Callable[[], None]) -> None:
        """One after the other; what stands behind a job that hangs is given up by whoever asked."""
        with self._lock:
            self._jobs.append(job)
            if not self._works:
                self._works = True
                threading.Thread(target=self._work, name="lockstep-others", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._works = False
                    return
                job = self._jobs.popleft()
            # Whoever keeps the store may have ended, and then there is nobody to be told.
            with contextlib.suppress(dist.DistError, RuntimeError, ValueError, KeyError):
                job()


def _key(node: int) -> str:
    return f"lockstep/stall/{node}"


def _swap(store: Store, mine: Node, asked: Asked) -> None:
    # A connection of its own: the agent's waits for nodes to meet or to end, and would keep this from the store.
    store = store.clone()  # type: ignore[attr-defined]
    store.set(_key(mine.number), write(mine))
    while asked.missing and time.monotonic() < asked.until:
        for node in asked.missing:
            if store.check([_key(node)]):
                asked.add(read(node, store.get(_key(node))))
        time.sleep(_LOOK_EVERY)


def _forget(store: Store, key: str) -> None:
    store.clone().delete_key(key)  # type: ignore[attr-defined]


def write(node: Node) -> str:
    """A node as text for the store; stacks stay at home."""
    ranks = [seen._replace(stack="", past=seen.past[-_PAST:])._asdict() for seen in node.ranks]
    return json.dumps({"host": node.host, "ranks": ranks})


def read(number: int, text: str | bytes) -> Node:
    """What `write` gave.

    Example:
        >>> node = Node(1, "b", (Seen(2, steps=5, place="train.py:3"),))
        >>> read(1, write(node)) == node
        True
    """
    facts = json.loads(text)
    return Node(number, facts["host"], tuple(read_seen(rank.pop("rank"), rank) for rank in facts["ranks"]))
