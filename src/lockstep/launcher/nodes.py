"""The nodes of a fixed number meet at node 0's store: who is there, whether they fit, whether they reach each other.

Torch's own static rendezvous waits ten minutes for a node without a word, and has no second meeting: a node that was
replaced would join ranks that have started before. Here every start is a round with a number of its own, and a store
of its own for the ranks: torch's `init_process_group` would find what ranks of the start before have written, such as
addresses where nobody listens any more.
"""

import math
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from lockstep.errors import UsageError
from lockstep.launcher import cards, network
from lockstep.launcher.cards import Card
from lockstep.launcher.child import ROUND
from lockstep.launcher.link import Link
from lockstep.launcher.plan import Meeting
from lockstep.launcher.stores import GREETING, LINGER, keep_store, listen, within

_LOOK_EVERY = 0.05  # seconds between looks at the store
_SAY_EVERY = 30.0
_LEFT = 5.0  # seconds for ranks to notice by themselves that those of another node are gone
_FAILED = "failed"

T = TypeVar("T")


class Nodes(RendezvousHandler):
    """The rendezvous of a fixed number of nodes that have numbers.

    Args:
        meeting: How many, which one this is.
        link: The way to node 0.
        card: What this node says of itself.
    """

    def __init__(self, meeting: Meeting, link: Link, card: Card) -> None:
        self._meeting, self._link, self._card = meeting, link, card
        self._node, self._size = int(meeting.settings["rank"]), meeting.most_nodes
        self._round = -1
        self._seconds = network.patience(meeting)
        self._store: Store | None = None
        self._for_ranks: object = None  # kept by node 0, because the store ends with its last reference
        self._looked, self._left_since = 0.0, math.inf

    def get_backend(self) -> str:
        """Its name."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """Ranks, rank 0 too, join a store of node 0's agent."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes.

        Raises:
            UsageError: A node cannot be reached, does not come or does not fit; the message says which.
        """
        self._seconds = network.patience(self._meeting, first=self._round < 0)
        until = time.monotonic() + self._seconds
        if self._store is None:
            self._store = self._open()
        try:
            with listen(self._link.local) as listener:
                card = self._card._replace(port=listener.getsockname()[1])
                self._enter(card, until)
                came = self._roll_call(until)
                self._refuse(self._try_neighbour(came, until))
                where = RendezvousStoreInfo(came[0].address, int(self._get(f"{self._round}/ranks")))
        except dist.DistError:
            raise UsageError(f"node 0 ({self._link.host}) has ended; look for its own message.") from None
        os.environ[ROUND] = str(self._round)
        prefix = f"{self._meeting.run_id}/{self._round}"
        store = dist.PrefixStore(prefix, self._store)  # type: ignore[attr-defined]
        return RendezvousInfo(store, self._node, self._size, where)

    def is_closed(self) -> bool:
        """Never closed."""
        return False

    def set_closed(self) -> None:
        """The store closes with node 0."""

    def num_nodes_waiting(self) -> int:
        """Whether a node wants to start again, or has ended for good, which ranks that wait for it may not notice.

        Only node 0 looks: the store is its own, so that a broken network cannot keep it from watching its ranks.
        """
        now = time.monotonic()
        if self._node or self._store is None or now < self._looked + 1.0:
            return 0
        self._looked = now
        if self._left_since == math.inf and self._who_left(_FAILED) is not None:
            self._left_since = now  # ranks mostly notice by themselves, and say more
        if now > self._left_since + _LEFT:
            return 1
        wanted = self._card.restarts and self._store.check(["want"])
        return int(wanted and int(self._store.get("want")) > self._round)

    def get_run_id(self) -> str:
        """What the ranks find in TORCHELASTIC_RUN_ID."""
        return self._meeting.run_id

    def shutdown(self) -> bool:
        """Nothing to close: the store goes with node 0's process."""
        return True

    def give_up(self, failed: bool) -> None:
        """Tell the others that this node's ranks do not start again: they have failed, or were told to end."""
        if self._store is not None and self._node:
            store, how = self._store, _FAILED if failed else "were told to end"
            within(LINGER, lambda: store.set(f"left/{self._node}", how), None)

    def _open(self) -> Store:
        """Keep the store, on the address where others look for it and no other; or find it."""
        link, seconds = self._link, self._seconds
        if self._node == 0:
            return cast("Store", keep_store(_listen_at(link))[0])
        if what := network.obstacle_on(link, seconds):
            raise UsageError(network.no_way(link, what, seconds))
        late = UsageError(network.no_way(link, network.STRANGER, seconds))
        try:
            return within(
                GREETING,
                lambda: dist.TCPStore(  # type: ignore[attr-defined]
                    link.address, link.port, is_master=False, timeout=timedelta(seconds=max(5.0, seconds))
                ),
                late,
            )
        except dist.DistError:
            raise late from None

    def _open_for_ranks(self) -> int:
        """Keep a new store for the ranks, where the neighbour reaches this node; give its port."""
        self._for_ranks = None
        self._for_ranks, port = keep_store(listen(self._link.local))
        return port

    def _enter(self, card: Card, until: float) -> None:
        """Take this node's seat in the next round, which node 0 opens."""
        if self._node == 0:
            self._round += 1
            self._set("card", card.write())
            port = self._open_for_ranks()
            self._ask(lambda store: store.set(f"{self._round}/ranks", str(port)), until)
            self._ask(lambda store: store.set("round", str(self._round)), until)
            return
        other: list[str] = []

        def sit(store: Store) -> bool:
            opened = int(store.get("round")) if store.check(["round"]) else -1
            if opened > self._round:
                key, mine = f"{opened}/card/{self._node}", card.write()
                found = store.compare_set(key, "", mine).decode()
                if found == mine:
                    self._round = opened
                    return True
                other[:] = [found]
            if opened >= 0:
                store.set("want", str(opened + 1))
            return False

        def taken() -> str:
            return cards.taken(self._node, cards.read(other[0])) if other else ""

        try:
            self._poll(sit, until, taken)
        except dist.DistError:
            if not other:
                raise
            raise UsageError(taken()) from None  # node 0 waited for a node whose number this one has not been given

    def _roll_call(self, until: float) -> list[Card]:
        """Every node's card; what does not fit is said as soon as it is seen, whoever else is missing."""
        found: list[Card | None] = [None] * self._size

        def know(store: Store) -> bool:
            for node in [node for node, card in enumerate(found) if card is None]:
                key = f"{self._round}/card/{node}"
                if store.check([key]):
                    found[node] = cards.read(store.get(key))
            return None not in found or bool(cards.disagreement(found))

        why = network.wrong_place(self._node, self._link)
        self._poll(know, until, lambda: cards.missing(found, self._seconds, why))
        self._refuse(cards.disagreement(found))
        return [card for card in found if card is not None]

    def _try_neighbour(self, came: list[Card], until: float) -> str:
        """Reach the next node as ranks will, in a ring; give what is wrong anywhere."""
        node = (self._node + 1) % self._size
        there = came[node]
        found = network.try_neighbour(self._node, self._card, node, there, min(network.TRIAL, self._seconds))
        self._set("trial", found)
        trials = self._gather("trial", came, max(until, time.monotonic() + 2 * network.TRIAL))
        return next(filter(None, trials), "")

    def _refuse(self, sentence: str) -> None:
        if not sentence:
            return
        self._set("read", "")
        if self._node == 0:
            names = [f"{self._round}/read/{node}" for node in range(self._size)]
            end = time.monotonic() + LINGER
            while time.monotonic() < end and not self._ask(lambda store: store.check(names), end):
                time.sleep(_LOOK_EVERY)
        raise UsageError(sentence)

    def _set(self, what: str, text: str) -> None:
        key = f"{self._round}/{what}/{self._node}"
        self._ask(lambda store: store.set(key, text), time.monotonic() + self._seconds)

    def _gather(self, what: str, came: list[Card], until: float) -> list[str]:
        """Wait for what every node writes."""
        names = [f"{self._round}/{what}/{node}" for node in range(self._size)]

        def absent() -> str:
            found = [card if self._has(name) else None for card, name in zip(came, names, strict=True)]
            return cards.missing(found, self._seconds)

        self._poll(lambda store: store.check(names), until, absent)
        return [self._get(name) for name in names]

    def _has(self, name: str) -> bool:
        return self._ask(lambda store: store.check([name]), time.monotonic() + network.TRIAL)

    def _get(self, name: str) -> str:
        return str(self._ask(lambda store: store.get(name), time.monotonic() + network.TRIAL).decode())

    def _poll(self, true: Callable[[Store], bool], until: float, late: Callable[[], str]) -> None:
        """Look until it is true; say from time to time that it is not, and at the end what is wrong."""
        say_at = time.monotonic() + _SAY_EVERY
        while not self._ask(true, until):
            now = time.monotonic()
            self._raise_left()
            if now > until:
                raise UsageError(
                    late() or f"node 0 ({self._link.host}) did not start again within {self._seconds:g} s."
                )
            if now > say_at:
                say_at = now + _SAY_EVERY
                sys.stderr.write(f"lockstep: node {self._node} of {self._size} waits for the other nodes\n")
            time.sleep(_LOOK_EVERY)

    def _raise_left(self) -> None:
        if (node := self._who_left()) is not None:
            how = self._get(f"left/{node}")
            raise UsageError(f"node {node} has ended: its ranks {how}, and it does not start them again.")

    def _who_left(self, how: str = "") -> int | None:
        others = [node for node in range(1, self._size) if node != self._node and self._has(f"left/{node}")]
        return next((node for node in others if how in ("", self._get(f"left/{node}"))), None)

    def _ask(self, question: Callable[[Store], T], until: float) -> T:
        """Ask the store. Over a network that is down an answer may never come, and torch does not stop waiting."""
        store, seconds = self._store, max(1.0, until - time.monotonic())
        assert store is not None
        if self._node == 0:
            return question(store)
        late = UsageError(
            f"node 0 ({network.name(self._link.host, self._link.address)}) does not answer any more, for "
            f"{seconds:.0f} s: the network between the nodes is down."
        )
        return within(seconds, lambda: question(store), late)


def _listen_at(link: Link) -> socket.socket:
    """Node 0 listens at the address where it is looked for; behind a port that is forwarded, at its own."""
    address = link.address if link.is_here else link.local
    try:
        return listen(address, link.port, backlog=1024)
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise UsageError(
            f"node 0 cannot listen at {network.name(link.host, address)}, port {link.port}: {why}. Choose another with "
            f"--master-port, the same on every node."
        ) from None
