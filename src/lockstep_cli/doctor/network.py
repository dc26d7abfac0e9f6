"""Interfaces, the route out, what the host's own name leads to, and variables that name interfaces."""

import ipaddress
import os
import socket
import threading
from typing import NamedTuple

from lockstep_cli.doctor.line import Line, broken, doubtful, fine

_ELSEWHERE = "203.0.113.1"
"""An address for documentation: nobody's. Connecting a datagram socket to it asks for the route and sends nothing."""

_PATIENCE = 3.0
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class Interface(NamedTuple):
    """One interface, its addresses and whether it is up."""

    name: str
    addresses: tuple[str, ...]
    up: bool


class Network(NamedTuple):
    """What the system says.

    Attributes:
        interfaces: All of them.
        source: The address from which this machine talks to others; empty without a route.
        host: Its name.
        resolved: What the name leads to; empty if to nothing, None if nothing was known after 3 seconds.
        chosen: The variables that name interfaces, those that are set.
    """

    interfaces: tuple[Interface, ...]
    source: str
    host: str
    resolved: tuple[str, ...] | None
    chosen: tuple[tuple[str, str], ...] = ()


def look() -> Network:
    """Ask the system; nothing is sent, but the name may be asked for."""
    import psutil  # type: ignore[import-untyped]

    up = psutil.net_if_stats()
    interfaces = tuple(
        Interface(
            name,
            tuple(row.address.partition("%")[0] for row in rows if row.family in (socket.AF_INET, socket.AF_INET6)),
            name in up and up[name].isup,
        )
        for name, rows in sorted(psutil.net_if_addrs().items())
    )
    host = socket.gethostname()
    chosen = tuple((name, os.environ[name]) for name in _VARIABLES if os.environ.get(name))
    return Network(interfaces, _source(), host, _resolve(host), chosen)


def _source() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        try:
            end.connect((_ELSEWHERE, 9))
        except OSError:
            return ""
        address: str = end.getsockname()[0]
        return address


def _resolve(host: str) -> tuple[str, ...] | None:
    """Look a name up, without waiting for longer than is bearable; the system's own call has no deadline."""
    found: list[tuple[str, ...]] = []

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            rows = []
        found.append(tuple(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return found[0] if found else None


def judge(network: Network) -> list[Line]:
    """Say how this machine talks to itself and to others."""
    chosen = [judge_variable(name, value, network.interfaces) for name, value in network.chosen]
    return [judge_loopback(network), judge_route(network), judge_name(network), *chosen]


def judge_loopback(network: Network) -> Line:
    """The ranks of one machine meet at 127.0.0.1."""
    for interface in network.interfaces:
        if "127.0.0.1" in interface.addresses and interface.up:
            return fine("loopback", interface.name)
    remedy = "Bring it up, since the ranks of one machine meet there: ip link set lo up."
    return broken("loopback", "no interface that is up has 127.0.0.1", remedy)


def judge_route(network: Network) -> Line:
    """Which interface leads to other machines."""
    name = route(network)
    others = [one.name for one in network.interfaces if one.up and one.name != name and not loops(one)]
    also = f"; also up: {', '.join(others)}" if others else ""
    if name:
        return fine("route out", f"{name}, {network.source}{also}")
    remedy = "For several machines, give an interface an address and a default route; for one, nothing is missing."
    return doubtful("route out", f"none{also}", remedy)


def route(network: Network) -> str:
    """The interface with the address that packets leave from; empty without.

    Example:
        >>> route(Network((Interface("eth0", ("10.0.0.7",), True),), "10.0.0.7", "ant", ()))
        'eth0'
    """
    return next((one.name for one in network.interfaces if network.source in one.addresses), "")


def loops(interface: Interface) -> bool:
    """Whether an interface leads to this machine alone, or nowhere."""
    return all(ipaddress.ip_address(address).is_loopback for address in interface.addresses)


def judge_name(network: Network) -> Line:
    """What gloo and NCCL find when they look the host's own name up, which they do unless told an interface."""
    host, name, about = network.host, route(network), "host name"
    entry = f"write '{network.source or 'ADDRESS'} {host}' into /etc/hosts"
    told = f", or set GLOO_SOCKET_IFNAME={name} there" if name else ""
    remedy = f"For several machines, {entry} of this one{told}; one machine needs nothing."
    if network.resolved is None:
        return doubtful(about, f"{host}: no answer within {_PATIENCE:g} s", remedy)
    if not network.resolved:
        return doubtful(about, f"{host} does not resolve", remedy)
    addresses = ", ".join(network.resolved)
    if any(ipaddress.ip_address(address).is_loopback for address in network.resolved):
        return doubtful(about, f"{host} is {addresses}, which other machines cannot reach", remedy)
    if not {address for one in network.interfaces for address in one.addresses} & set(network.resolved):
        return doubtful(about, f"{host} is {addresses}, which no interface here has", remedy)
    return fine(about, f"{host} is {addresses}")


def judge_variable(name: str, value: str, interfaces: tuple[Interface, ...]) -> Line:
    """Whether a variable names interfaces that exist and are up.

    NCCL takes beginnings of names, ``=`` before whole names and ``^`` before those that it must not use; gloo and
    TensorPipe take whole names.

    Example:
        >>> judge_variable("NCCL_SOCKET_IFNAME", "eth", (Interface("eth0", ("10.0.0.7",), True),)).state
        'fine'
        >>> judge_variable("GLOO_SOCKET_IFNAME", "eth", (Interface("eth0", ("10.0.0.7",), True),)).state
        'broken'
    """
    up = [one.name for one in interfaces if one.up]
    nccl = name.startswith("NCCL")
    if nccl and value.startswith("^"):
        return fine(name, value)
    wanted = value.removeprefix("=").split(",") if nccl else value.split(",")
    whole = not nccl or value.startswith("=")
    hits = [any(one == want or (not whole and one.startswith(want)) for one in up) for want in wanted]
    if any(hits) if nccl else all(hits):
        return fine(name, value)
    remedy = f"Unset it, or name one of {', '.join(up)}." if up else "Unset it."
    return broken(name, f"{value}, but no such interface is up", remedy)
