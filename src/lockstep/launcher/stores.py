"""Stores and sockets that a launcher opens for other nodes, and questions that a broken network never answers."""

import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

GREETING = 10.0
"""Seconds in which whoever listens where a store is looked for has to speak as one does."""

LINGER = 3.0
"""Seconds that the node whose store it is stays for others to read what is wrong."""

T = TypeVar("T")


def listen(address: str, port: int = 0, backlog: int = 64) -> socket.socket:
    """Listen at one address only, at a port that the kernel picks where none is said."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def keep_store(listener: socket.socket) -> tuple[object, int]:
    """Keep a store there; give it, which ends with its last reference, and its port."""
    host, port = listener.getsockname()[:2]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, int(port)


def within(seconds: float, act: Callable[[], T], late: Exception | None) -> T:
    """Do it in a thread, which is left behind if it does not end in time; then ``late`` is raised, if there is one."""
    found: list[T] = []
    errors: list[BaseException] = []

    def go() -> None:
        try:
            found.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors and late:
        raise errors[0]
    if not found and late:
        raise late
    return found[0] if found else None  # type: ignore[return-value]
