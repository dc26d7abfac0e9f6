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


def disagreement(cards: Sequence[Card]) -> str:
    """What does not fit between nodes; empty if all does.

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
    for what in ("lockstep", "torch"):
        for node, card in enumerate(cards):
            if getattr(card, what) != getattr(cards[0], what):
                first = f"node 0 ({cards[0].host}) has {what} {getattr(cards[0], what)}"
                other = f"node {node} ({card.host}) has {what} {getattr(card, what)}"
                return f"{first}, {other}. Install the same on every node."
    for node, card in enumerate(cards):
        if card.ranks != cards[0].ranks and not all(one.wanted.isdecimal() for one in cards):
            return (
                f"node 0 ({cards[0].host}) starts {cards[0].ranks} ranks, node {node} ({card.host}) {card.ranks}, and "
                f"nobody wrote these numbers. If a device is missing, look for it; if it is meant so, write -n with a "
                f"number on every node."
            )
        if card.restarts != cards[0].restarts:
            return (
                f"node 0 ({cards[0].host}) has --max-restarts {cards[0].restarts}, node {node} ({card.host}) has "
                f"{card.restarts}: they would not start again together. Write the same on every node."
            )
    return ""


def missing(came: Sequence[Card | None], seconds: float) -> str:
    """Say which nodes did not come.

    Example:
        >>> a = Card("a", 1, "1.0", "2.13.0", 4, "auto", "", 0, "", 0)
        >>> missing([a, None, None], 30.0)[:61]
        'nodes 1 and 2 of 3 did not come within 30 s; node 0 (a) came.'
    """
    away = [node for node, card in enumerate(came) if card is None]
    here = ", ".join(f"node {node} ({card.host})" for node, card in enumerate(came) if card is not None)
    names = f"node{'s' * (len(away) > 1)} {' and '.join(map(str, away))} of {len(came)}"
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
