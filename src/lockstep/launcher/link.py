"""The way from this node to node 0, once it is found."""

from typing import NamedTuple

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""By which gloo, NCCL and TensorPipe are told the interface to use."""


class Link(NamedTuple):
    """This node's way to node 0.

    Attributes:
        host: Node 0 as the user wrote it.
        address: Its address in numbers.
        port: Where it listens.
        local: This node's own address on the way there; ranks are reached at it.
        interface: The interface that has it.
        is_here: Whether ``address`` is this node's own.
    """

    host: str
    address: str
    port: int
    local: str
    interface: str
    is_here: bool
