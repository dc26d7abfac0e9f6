"""What nodes tell each other before anything starts, and the sentence where that does not fit. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Card(NamedTuple):
    """What one node says of itself.

    Attributes:
        host: Its name.
        pid: Its launcher's process.
        lockstep: Version.
        torch: Version, without the build.
        ranks: How many it starts.
        wanted: ``--nproc-per-node`` as it was written; a number, or a word such as auto.
        address: Where its ranks are reached.
        port: Where it listens for its neighbour's trial.
        interface: The interface with that address.
        restarts: ``--max-restarts``.
        nodes: ``--nnodes``.
        start: How often the ranks were started, as far as this node has seen.
    """

    host: str
    pid: int
    lockstep: str
    torch: str
    ranks: int
    wanted: str
    address: str
    port: int
    interface: str
    restarts: int
    nodes: str = ""
    start: int = 0

    def write(self) -> str:
        """As text for the store."""
        return json.dumps(self._asdict(), sort_keys=True)


def read(text: str | bytes) -> Card:
    """Read a card; of another version's, which may have other fields, what is missing stays empty.

    Example:
        >>> read('{"host": "a", "lockstep": "9", "colour": "red"}').lockstep
        '9'
    """
    values: Mapping[str, Any] = json.loads(text)
    usual = Card("", 0, "", "", 0, "", "", 0, "", 0)
    return usual._replace(**{field: values[field] for field in Card._fields if field in values})


def disagreement(cards: Sequence[Card | None]) -> str:
    """What does not fit between nodes; empty if all does that have come.

    Different numbers of ranks are meant where every node was given its number, and a mistake where one was counted: a
    node that has lost a GPU, most often.

    Example:
        >>> a = Card("a", 1, "1.0", "2.13.0", 4, "auto", "", 0, "", 0)
        >>> disagreement([a, a._replace(host="b", torch="2.12.0")])
        'node 0 (a) has torch 2.13.0, node 1 (b) has torch 2.12.0. Install the same on every node.'
        >>> disagreement([a, a._replace(host="b", ranks=3)])[:64]
        'node 0 (a) starts 4 ranks, node 1 (b) 3, and nobody wrote these '
        >>> disagreement([a._replace(wanted="4"), a._replace(ranks=3, wanted="3")])
        ''
    """
    came = [(node, card) for node, card in enumerate(cards) if card is not None]
    return next(filter(None, (_between(*came[0], *other, came) for other in came[1:])), "")


def _between(first: int, a: Card, node: int, b: Card, came: Sequence[tuple[int, Card]]) -> str:
    """What does not fit between two nodes."""
    here, there = f"node {first} ({a.host})", f"node {node} ({b.host})"
    for what in ("lockstep", "torch"):
        if getattr(a, what) != getattr(b, what):
            return (
                f"{here} has {what} {getattr(a, what)}, {there} has {what} {getattr(b, what)}. Install the same on "
                f"every node."
            )
    if a.nodes != b.nodes:
        return f"{here} has --nnodes {a.nodes}, {there} has --nnodes {b.nodes}. Write the same on every node."
    if a.ranks != b.ranks and not all(card.wanted.isdecimal() for _, card in came):
        return (
            f"{here} starts {a.ranks} ranks, {there} {b.ranks}, and nobody wrote these numbers. If a device is "
            f"missing, look for it; if it is meant so, write -n with a number on every node."
        )
    if a.restarts != b.restarts:
        return (
            f"{here} has --max-restarts {a.restarts}, {there} has {b.restarts}: they would not start again together. "
            f"Write the same on every node."
        )
    return ""


def missing(came: Sequence[Card | None], seconds: float, why: str = "") -> str:
    """Say which nodes did not come, and why, if that is known.

    Example:
        >>> a = Card("a", 1, "1.0", "2.13.0", 4, "auto", "", 0, "", 0)
        >>> missing([a, None, None], 30.0)[:61]
        'nodes 1 and 2 of 3 did not come within 30 s; node 0 (a) came.'
    """
    away = [node for node, card in enumerate(came) if card is None]
    here = ", ".join(f"node {node} ({card.host})" for node, card in enumerate(came) if card is not None)
    names = f"node{'s' * (len(away) > 1)} {' and '.join(map(str, away))} of {len(came)}"
    if why:
        return f"{names} did not come within {seconds:g} s: {why}"
    return (
        f"{names} did not come within {seconds:g} s; {here} came. Start `lockstep run` there too, with its own "
        f"--node-rank; if it was started, look for its own message. Longer: --rdzv-conf timeout=SECONDS."
    )


def taken(node: int, other: Card) -> str:
    """Say that two launchers have one number."""
    return (
        f"node {node} is there already: {other.host}, process {other.pid}. Give every node its own --node-rank; if "
        f"this one is to replace that one, the job needs --max-restarts."
    )
