"""How this node reaches node 0: address, interface, and one sentence for each way in which that fails."""

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Mapping

from lockstep.errors import UsageError
from lockstep.launcher.cards import Card
from lockstep.launcher.link import INTERFACE_VARIABLES, Link
from lockstep.launcher.plan import Choice, LaunchPlan, Meeting

PATIENCE = 30.0
"""Seconds that nodes wait for each other at the first start; ``--rdzv-conf timeout=SECONDS`` says otherwise."""
RETURN_PATIENCE = 600.0
"""The same when a run starts again: a node may have to be replaced, or a cable to be put back."""
_NAME_PATIENCE = 10.0  # a name may appear a little after the machine that has it
TRIAL = 5.0
"""Seconds to reach a neighbour."""
STRANGER = "something else than lockstep answers there"

Interfaces = Mapping[str, tuple[str, ...]]
"""The addresses of every interface that is up."""


def patience(meeting: Meeting, first: bool = True) -> float:
    """Seconds to wait for other nodes.

    Example:
        >>> patience(Meeting("static", "a:1", "", {"timeout": 5})), patience(Meeting("static", "a:1", "", {}))
        (5.0, 30.0)
    """
    key = "timeout" if "timeout" in meeting.settings else "join_timeout"
    own = meeting.settings.get(key)
    try:
        return float(own) if own is not None else PATIENCE if first else RETURN_PATIENCE
    except ValueError:
        raise UsageError(f"--rdzv-conf {key}={own}: write a number of seconds, such as {key}=300.") from None


def read_endpoint(endpoint: str) -> tuple[str, int]:
    """Take host and port apart.

    Example:
        >>> read_endpoint("gpu3:29400"), read_endpoint("[fd00::1]:80"), read_endpoint("gpu3")
        (('gpu3', 29400), ('fd00::1', 80), ('gpu3', 29400))
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = endpoint, "29400"  # torchrun's own
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{endpoint}: {port!r} is no port. Write HOST:PORT.")
    return host.strip("[]"), int(port)


def find(meeting: Meeting, environ: Mapping[str, str]) -> Link:
    """Find the way to node 0.

    Args:
        meeting: Of several nodes.
        environ: The user's environment.

    Raises:
        UsageError: There is none, or the environment names an interface that does not lead to other nodes.
    """
    host, port = read_endpoint(meeting.endpoint)
    address = resolve(host, port, min(_NAME_PATIENCE, patience(meeting)))
    if sentence := loopback_name(host, address):
        raise UsageError(sentence)
    interfaces = look()
    local = meeting.local_addr and resolve(meeting.local_addr, 0, _NAME_PATIENCE)
    local = local or source(address, port, host)
    interface = interface_of(local, interfaces) or interface_of(local, look(down=True))
    link = Link(host, address, port, local, interface, is_here(address, interfaces))
    wanted = environ.get(INTERFACE_VARIABLES[0], "")
    if sentence := wrong_interface(wanted, link, interfaces):
        raise UsageError(sentence)
    if wanted:  # ranks are reached there, whatever the way to node 0
        first = wanted.split(",")[0]
        link = link._replace(interface=first, local=same_family(interfaces[first], address))
    return link


def look(*, down: bool = False) -> dict[str, tuple[str, ...]]:
    """The interfaces that are up, with their addresses; with ``down`` also those that are not, or have no carrier."""
    import psutil  # type: ignore[import-untyped]

    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(entry.address.partition("%")[0] for entry in entries if entry.family in families)
        for name, entries in psutil.net_if_addrs().items()
        if down or name not in states or states[name].isup
    }


def resolve(host: str, port: int, seconds: float) -> str:
    """Give a name's first address, asking again for a while.

    Raises:
        UsageError: It has none.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() >= until:
                raise UsageError(
                    f"the name {host} does not resolve on {socket.gethostname()} ({error.strerror}). Write node 0's "
                    f"address in numbers, or put the name into /etc/hosts or DNS on every node."
                ) from None
        time.sleep(0.5)


def source(address: str, port: int, host: str) -> str:
    """Give the address that this node would send from; nothing is sent.

    Raises:
        UsageError: There is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port or 9))
        except OSError as error:
            raise UsageError(
                f"no route from {socket.gethostname()} to {name(host, address)} ({error.strerror}). Check that its "
                f"network is up here (`ip route get {address}`), and that --master-addr is the right one."
            ) from None
        return str(probe.getsockname()[0])


def name(host: str, address: str) -> str:
    """A host with its address, where they differ.

    Example:
        >>> name("gpu3", "10.0.0.3"), name("10.0.0.3", "10.0.0.3")
        ('gpu3 (10.0.0.3)', '10.0.0.3')
    """
    return host if host == address else f"{host} ({address})"


def loopback_name(host: str, address: str) -> str:
    """What to say of a name that means "this machine" on this machine; empty if it is fine.

    An address that was written as one, and ``localhost``, are meant: several nodes on one machine.

    Example:
        >>> loopback_name("gpu3", "127.0.1.1")[:51]
        'gpu3 resolves to 127.0.1.1 here, which is loopback:'
        >>> loopback_name("localhost", "127.0.0.1"), loopback_name("127.0.0.2", "127.0.0.2")
        ('', '')
    """
    if host in (address, "localhost") or not ipaddress.ip_address(address).is_loopback:
        return ""
    return (
        f"{host} resolves to {address} here, which is loopback: this node would wait for itself, and others cannot "
        f"come. Remove that line from /etc/hosts on {socket.gethostname()}, or write node 0's address in numbers."
    )


def is_here(address: str, interfaces: Interfaces) -> bool:
    """Whether an address is this machine's own.

    Example:
        >>> is_here("127.0.0.2", {}), is_here("10.0.0.3", {"eth0": ("10.0.0.3",)}), is_here("10.0.0.4", {})
        (True, True, False)
    """
    return ipaddress.ip_address(address).is_loopback or any(address in own for own in interfaces.values())


def interface_of(local: str, interfaces: Interfaces) -> str:
    """The interface that has an address; loopback's for any address of loopback.

    Example:
        >>> interface_of("10.0.0.3", {"lo": ("127.0.0.1",), "eth0": ("10.0.0.3",)})
        'eth0'
    """
    for interface, own in interfaces.items():
        if local in own:
            return interface
    return "lo" if ipaddress.ip_address(local).is_loopback else ""


def same_family(own: tuple[str, ...], address: str) -> str:
    """Of an interface's addresses the first that is like ``address``, IPv4 or IPv6.

    Example:
        >>> same_family(("fd00::2", "10.0.0.2"), "10.0.0.1")
        '10.0.0.2'
    """
    return next((one for one in own if (":" in one) == (":" in address)), own[0])


def wrong_interface(wanted: str, link: Link, interfaces: Interfaces) -> str:
    """What to say of ``GLOO_SOCKET_IFNAME`` if it names an interface that cannot work; empty if it can.

    Example:
        >>> link = Link("a", "10.0.0.1", 29500, "10.0.0.2", "eth0", is_here=False)
        >>> wrong_interface("ib0", link, {"lo": ("127.0.0.1",), "eth0": ("10.0.0.2",)})
        'GLOO_SOCKET_IFNAME=ib0: there is no interface ib0 that is up here, but lo and eth0. The way to a is eth0.'
    """
    way = f"The way to {link.host} is {link.interface or link.local}."
    for each in filter(None, wanted.split(",")):
        if each not in interfaces:
            there = " and ".join(interfaces) or "none"
            return f"GLOO_SOCKET_IFNAME={wanted}: there is no interface {each} that is up here, but {there}. {way}"
        if not interfaces[each]:
            return f"GLOO_SOCKET_IFNAME={wanted}: {each} has no address. {way}"
        loopback = all(ipaddress.ip_address(one).is_loopback for one in interfaces[each])
        if loopback and not ipaddress.ip_address(link.address).is_loopback:
            return f"GLOO_SOCKET_IFNAME={wanted}: {each} is loopback, where no other node comes. {way}"
    return ""


def knock(address: str, port: int, seconds: float) -> str:
    """Try to connect for so long; give what is in the way, empty if nothing is."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=min(5.0, max(0.1, left))).close()
        except OSError as error:
            if time.monotonic() + 0.2 >= until:
                return obstacle(error)
        else:
            return ""
        time.sleep(0.2)


def obstacle(error: OSError) -> str:
    """What a failed connection means.

    Example:
        >>> obstacle(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
        'nothing listens there'
        >>> obstacle(TimeoutError())[:19]
        'no answer: a firewa'
    """
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "no answer: a firewall drops the packets, the machine is down, or the address is another network's"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
        return f"{(error.strerror or 'unreachable').lower()}: the network is down, or a firewall rejects the connection"
    return error.strerror or str(error)


def obstacle_on(link: Link, seconds: float) -> str:
    """What keeps this node from node 0, after it was tried for so long; empty if nothing does."""
    what = knock(link.address, link.port, seconds)
    if what and link.interface and link.interface not in look():
        return f"{link.interface} is down: its cable or the switch behind it"
    return what


def try_neighbour(node: int, card: Card, other: int, there: Card, seconds: float) -> str:
    """Reach another node as ranks will; what to say if it can't be, else empty."""
    what = knock(there.address, there.port, seconds)
    return what and (
        f"node {node} ({card.host}, {card.address} on {card.interface}) cannot reach node {other} ({there.host}) at "
        f"{there.address} on {there.interface}: {what}. Ranks need all ports between the nodes; GLOO_SOCKET_IFNAME and "
        f"NCCL_SOCKET_IFNAME name the interface."
    )


def wrong_place(node: int, link: Link) -> str:
    """What to say of node 0 that is on another machine than the others look for it on; empty if it is in its place.

    Example:
        >>> wrong_place(0, Link("a", "10.0.0.1", 29500, "10.0.0.2", "eth0", False))[:65]
        'this launcher is node 0, but a (10.0.0.1) is no address of this m'
        >>> wrong_place(1, Link("a", "10.0.0.1", 29500, "10.0.0.2", "eth0", False))
        ''
    """
    if node or link.is_here:
        return ""
    return (
        f"this launcher is node 0, but {name(link.host, link.address)} is no address of this machine, and the others "
        f"look for node 0 there. Write --node-rank on every node (without it, a node is node 0), and node 0's address "
        f"as --master-addr."
    )


def no_way(link: Link, what: str, seconds: float, who: str = "node 0", option: str = "--master-port") -> str:
    """What to say if node 0, or whoever keeps the store, could not be reached.

    Example:
        >>> no_way(Link("a", "10.0.0.1", 29500, "10.0.0.2", "eth0", False), "nothing listens there", 30.0)[:69]
        'node 0 could not be reached at a (10.0.0.1), port 29500, within 30 s '
    """
    advice = f"Open the port between the nodes, or choose an open one with {option}."
    if link.is_here:
        advice = f"That is this machine: start {who} on it too, or write the address of the machine that it is on."
    elif what.startswith("nothing"):
        advice = f"Start {who} too, with the same {option}; was it started, look for its own message."
    elif what == STRANGER:
        advice = f"Choose another port with {option}, the same on every node."
    elif "is down" in what:
        advice = "Put it back, and start again."
    return (
        f"{who} could not be reached at {name(link.host, link.address)}, port {link.port}, within {seconds:g} s from "
        f"{link.local} on {link.interface}: {what}. {advice}"
    )


def put_in(plan: LaunchPlan, link: Link, environ: Mapping[str, str]) -> LaunchPlan:
    """The plan with what the network has to do with it: ranks keep to the interface, unless the user has named one."""
    more = {variable: link.interface for variable in INTERFACE_VARIABLES if variable not in environ and link.interface}
    seats = tuple(seat._replace(environment=seat.environment | more) for seat in plan.seats)
    own = environ.get(INTERFACE_VARIABLES[0])
    rule = f"{INTERFACE_VARIABLES[0]} in the environment" if own else f"the way to {name(link.host, link.address)}"
    choices = plan.choices | {"interface": Choice(f"{link.interface}, {link.local}", rule)}
    return plan._replace(seats=seats, choices=choices, link=link)


def say(plan: LaunchPlan) -> str:
    """One line on the network."""
    choice = plan.choices["interface"]
    return f"lockstep: {os.uname().nodename} meets the other nodes by {choice.value} ({choice.rule})"
