"""Torch's own rendezvous (c10d and what else is registered), with words where it would wait or end without any."""

import contextlib
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
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.errors import UsageError
from lockstep.launcher import cards, network
from lockstep.launcher.cards import Card
from lockstep.launcher.link import Link
from lockstep.launcher.plan import Meeting

_SAY_EVERY = 30.0
_ROLL_CALL = 30.0  # seconds; all nodes have just met


class Torchs(RendezvousHandler):
    """One of torch's own, for nodes without numbers.

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

    def get_backend(self) -> str:
        """The inner one's."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """The inner one's."""
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet, and see that the nodes fit.

        Raises:
            UsageError: Too few came, or one does not fit.
        """
        began = time.monotonic()
        try:
            with self._patient():
                info = self._inner.next_rendezvous()
            came = self._roll_call(info)
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
            raise UsageError(f"the store of the nodes is gone ({self._where}): {error}") from None
        if sentence := cards.disagreement(came):
            raise UsageError(sentence)
        return info

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
        names = [f"lockstep/card/{node}" for node in range(info.world_size)]
        info.store.set(names[info.rank], self._card.write())
        info.store.wait(names, timedelta(seconds=_ROLL_CALL))
        found = [cards.read(info.store.get(name)) for name in names]
        info.store.add("lockstep/read", 1)
        end = time.monotonic() + 3.0  # whoever keeps the store stays for the others to read what is wrong
        while int(info.store.add("lockstep/read", 0)) < info.world_size and time.monotonic() < end:
            time.sleep(0.01)
        return found

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
    for attempt in attempts:
        if attempt.get("is_host") == "false" and (what := network.knock(link.address, link.port, seconds)):
            raise UsageError(network.no_way(link, what, seconds))
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
            return get_rendezvous_handler(parameters)
        except RendezvousConnectionError as error:
            failure = error  # somebody on this machine keeps it already
    raise UsageError(f"no store at {meeting.endpoint}: {failure}")
