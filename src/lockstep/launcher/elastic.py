"""Torch's own rendezvous (c10d and what else is registered), with words where it would wait or end without any."""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.errors import UsageError
from lockstep.launcher import cards, network
from lockstep.launcher.cards import Card
from lockstep.launcher.child import ROUND
from lockstep.launcher.link import Link
from lockstep.launcher.plan import Meeting
from lockstep.launcher.stores import GREETING, LINGER, keep_store, listen, within

_SAY_EVERY = 30.0
_ROLL_CALL = 30.0  # seconds; all nodes have just met
_STORE = "lockstep/store"
_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Torchs(RendezvousHandler):
    """One of torch's own, for nodes without numbers.

    The ranks of every start get a store of its own here. Torch's shares one between all starts, whose address only the
    first start tells: a node that comes later waits for it in vain, and all others for that node.

    Args:
        meeting: How many, and where.
        link: The way there.
        card: What this node says of itself.

    Raises:
        UsageError: Nobody keeps the store at the endpoint.
    """

    def __init__(self, meeting: Meeting, link: Link, card: Card) -> None:
        self._meeting, self._card = meeting, card
        self._where = f"--rdzv-endpoint {meeting.endpoint}, --rdzv-id {meeting.run_id}"
        self._inner = join(meeting, link, card.restarts)
        self._start = 0
        self._for_ranks: object = None  # kept by the first node, because the store ends with its last reference

    def get_backend(self) -> str:
        """The inner one's."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Ranks, rank 0 too, join a store of an agent."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet, and see that the nodes fit.

        Raises:
            UsageError: Too few came, or one does not fit.
        """
        began = time.monotonic()
        try:
            with self._patient(), _no_shared_store():
                info = self._inner.next_rendezvous()
            came = self._roll_call(info)
            where = self._open_for_ranks(info)
        except RendezvousTimeoutError:
            raise UsageError(
                f"fewer than {self._meeting.least_nodes} nodes came within {time.monotonic() - began:.0f} s "
                f"({self._where}). Start `lockstep run` with the same options on the others; if it was started, look "
                f"for its own message. Longer: --rdzv-conf join_timeout=SECONDS."
            ) from None
        except RendezvousClosedError:
            raise UsageError(
                f"another node has ended this run ({self._where}); look for its own message. Choose a new --rdzv-id to "
                f"start again."
            ) from None
        except (RendezvousError, dist.DistError) as error:
            raise UsageError(
                f"the node that keeps the store has ended, or the network to it is down ({self._where}); look for its "
                f"own message. ({error})"
            ) from None
        # A node that has come later has not seen the starts before.
        start = max(card.start for card in came)
        self._start, os.environ[ROUND] = start + 1, str(start)
        return RendezvousInfo(info.store, info.rank, info.world_size, where)

    def is_closed(self) -> bool:
        """The inner one's."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Close the inner one."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """The inner one's."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The inner one's."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Shut the inner one down."""
        return self._inner.shutdown()

    def _roll_call(self, info: RendezvousInfo) -> list[Card]:
        with listen(self._card.address) as listener:
            card = self._card._replace(start=self._start, port=listener.getsockname()[1])
            came = [cards.read(text) for text in self._swap(info, "card", card.write())]
            sentence = cards.disagreement(came)
            if not sentence and len(came) > 1:
                node = (info.rank + 1) % info.world_size
                found = network.try_neighbour(info.rank, card, node, came[node], network.TRIAL)
                sentence = next(filter(None, self._swap(info, "trial", found)), "")
        if sentence:
            # Whoever keeps the store stays for the others to read what is wrong.
            with contextlib.suppress(UsageError):
                self._swap(info, "read", "", LINGER)
            raise UsageError(sentence)
        return came

    def _swap(self, info: RendezvousInfo, what: str, text: str, seconds: float = _ROLL_CALL) -> list[str]:
        """Tell all nodes a word, and hear theirs.

        Raises:
            UsageError: Some have met the others, and say nothing.
        """
        names = [f"lockstep/{what}/{node}" for node in range(info.world_size)]
        info.store.set(names[info.rank], text)
        try:
            info.store.wait(names, timedelta(seconds=seconds))
        except dist.DistStoreError:
            silent = [node for node, name in enumerate(names) if not info.store.check([name])]
            raise UsageError(
                f"{len(silent)} of {len(names)} nodes met the others and then did not answer for {seconds:g} s "
                f"({self._where}); look for their own messages."
            ) from None
        return [info.store.get(name).decode() for name in names]

    def _open_for_ranks(self, info: RendezvousInfo) -> RendezvousStoreInfo:
        """The first node keeps a new store for the ranks, and tells the others where."""
        self._for_ranks = None
        if info.rank == 0:
            self._for_ranks, port = keep_store(listen(self._card.address))
            info.store.set(_STORE, f"{self._card.address} {port}")
        info.store.wait([_STORE], timedelta(seconds=_ROLL_CALL))
        host, number = info.store.get(_STORE).decode().split()
        return RendezvousStoreInfo(host, int(number))

    @contextlib.contextmanager
    def _patient(self) -> Iterator[None]:
        """Say from time to time that this node waits."""
        over = threading.Event()

        def say() -> None:
            while not over.wait(_SAY_EVERY):
                sys.stderr.write(f"lockstep: waiting for other nodes ({self._where})\n")

        threading.Thread(target=say, daemon=True).start()
        try:
            yield
        finally:
            over.set()


@contextlib.contextmanager
def _no_shared_store() -> Iterator[None]:
    """Torch's own word for it; what the user has said of it is left to the ranks."""
    before = os.environ.get(_NOT_SHARED)
    os.environ[_NOT_SHARED] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NOT_SHARED)
        if before is not None:
            os.environ[_NOT_SHARED] = before


def join(meeting: Meeting, link: Link, restarts: int) -> RendezvousHandler:
    """Make torch's handler; for c10d, whoever has the endpoint's address keeps the store, by whatever name it goes.

    Raises:
        UsageError: Nobody keeps it.
    """
    settings = dict(meeting.settings)
    seconds = network.patience(meeting)
    if meeting.least_nodes == meeting.most_nodes and not restarts:
        settings.setdefault("join_timeout", int(seconds))
    attempts: list[dict[str, str]] = [{}]
    if meeting.backend == "c10d" and "is_host" not in settings:
        attempts = [{"is_host": "true"}] * link.is_here + [{"is_host": "false"}]
    keeper = ("the node that keeps the store", "--rdzv-endpoint")
    stranger = UsageError(network.no_way(link, network.STRANGER, seconds, *keeper))
    for attempt in attempts:
        if attempt.get("is_host") == "false" and (what := network.obstacle_on(link, seconds)):
            raise UsageError(network.no_way(link, what, seconds, *keeper))
        parameters = RendezvousParameters(
            backend=meeting.backend,
            endpoint=meeting.endpoint,
            run_id=meeting.run_id,
            min_nodes=meeting.least_nodes,
            max_nodes=meeting.most_nodes,
            local_addr=meeting.local_addr or link.local,
            **(settings | attempt),
        )
        try:
            return within(GREETING, functools.partial(get_rendezvous_handler, parameters), stranger)
        except RendezvousConnectionError as error:
            failure = error  # somebody on this machine keeps it already
        except (ValueError, ImportError) as error:
            raise UsageError(f"--rdzv-backend {meeting.backend} cannot be used: {error}") from None
    raise UsageError(f"no store at {meeting.endpoint}: {failure}")
