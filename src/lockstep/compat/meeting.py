"""Ranks meet where their launcher is, whatever address a script has made up.

Old scripts write ``tcp://127.0.0.1:23456`` or set ``MASTER_PORT`` themselves. Under a launcher of today they wait for a
store which nobody keeps, since torch takes it for the launcher's; without one, the port may be taken. Uses one private
name of torch, checked on torch 2.9 to 2.14: ``torch.distributed.rendezvous._create_c10d_store``.
"""

import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def meet_at_the_launchers(host: str, port: int, one_node: bool) -> Callable[[], None]:
    """Have every rendezvous by address lead to the launcher's store; give what undoes it.

    Args:
        host: The launcher's ``MASTER_ADDR``.
        port: Its ``MASTER_PORT``.
        one_node: Whether all ranks are on this machine. If not, an address of the script's own stands, and rank 0 keeps
            the store there.
    """
    importlib.import_module("torch.distributed.rendezvous")
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of this name
    original = rendezvous._create_c10d_store
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def create(hostname: str, its_port: int, rank: int, world_size: int, timeout: timedelta, *more: Any) -> Any:
        if not one_node and (hostname, int(its_port)) != (host, port):
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            return original(hostname, its_port, rank, world_size, timeout, *more)
        if kept:  # torch 2.14 asks MASTER_ADDR and MASTER_PORT, too, and the script may have changed them
            return rendezvous.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
        return original(host, port, rank, world_size, timeout, *more)

    rendezvous._create_c10d_store = create

    def undo() -> None:
        rendezvous._create_c10d_store = original

    return undo
