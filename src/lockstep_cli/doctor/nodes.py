"""All nodes together: what each has found, in what they differ, how quickly they talk; by a short `lockstep run`."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep_cli.doctor.inside import ask
from lockstep_cli.doctor.line import Line, broken, doubtful, fine, worst
from lockstep_cli.doctor.meet import FOUND, PAGE
from lockstep_cli.doctor.page import verdict
from lockstep_cli.doctor.speed import Speed, show, within

_MEASURING = 60.0
"""Seconds for that, once all nodes are there."""

SLOW = {"gloo": (5000.0, 0.05), "nccl": (2000.0, 0.5)}
"""From how many microseconds, and below how many GB/s, a backend is doubtful between nodes."""

REMEDIES = {
    "gloo": "Look at the link (ethtool): 1 Gbit/s gives 0.12 GB/s. GLOO_SOCKET_IFNAME names a faster interface.",
    "nccl": "Set NCCL_DEBUG=INFO to see what NCCL uses; NCCL_SOCKET_IFNAME and NCCL_IB_HCA name something faster.",
}

COMPARED = {
    "python": "Install the same, if you save or send objects that another version may not read.",
    "nccl": "Install the same torch build on every node: NCCL's versions rarely talk to each other.",
    "gpus": "Know that all wait for the slowest, and that ranks are counted by GPUs.",
}
"""What should be the same on all nodes, beside lockstep and torch, which `lockstep run` compares; and what to do."""


_SAID = {"`lockstep run`": "`lockstep doctor`", "--rdzv-conf timeout=SECONDS": "--timeout SECONDS"}
"""What the launcher's sentences say of its own options, and what it is here."""


class Place(NamedTuple):
    """Where nodes meet, and which one this is; ``seconds`` is how long they wait for each other."""

    nodes: int
    node: int
    host: str
    port: int
    seconds: float

    def options(self) -> list[str]:
        """The same for `lockstep run`."""
        where = {"nnodes": self.nodes, "node-rank": self.node, "master-addr": self.host, "master-port": self.port}
        return [f"--{name}={value}" for name, value in where.items()] + [f"--rdzv-conf=timeout={self.seconds:.0f}"]


class Together(NamedTuple):
    """What came of a meeting of all nodes.

    Attributes:
        pages: Of each node: ``host``, ``lines``, and what is compared.
        speed: What was measured between them.
        interface: By which interface this node talks to the others.
        trouble: Why there is nothing, or no more: the launcher's last sentence.
    """

    pages: tuple[dict[str, Any], ...] = ()
    speed: tuple[Speed, ...] = ()
    interface: str = ""
    trouble: str = ""


def look(page: dict[str, Any], place: Place) -> Together:
    """Meet the other nodes, by a `lockstep run` of one rank on each.

    Args:
        page: What this node shows the others.
        place: Where.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        (Path(folder) / PAGE).write_text(json.dumps(page))
        run = ("run", *place.options(), "-n", "1", "--no-watch", "-m", "lockstep_cli.doctor.meet", folder)
        code, _, errors = ask(place.seconds + _MEASURING, "from lockstep_cli import main; main()", *run)
        left = Path(folder) / FOUND
        return understand(left.read_text() if left.exists() else "", code, errors)


def understand(left: str, code: int, errors: str) -> Together:
    r"""Put together what the rank has left and how the run ended.

    Example:
        >>> understand("", 2, "lockstep: a meets the others\nlockstep: node 1 of 2 did not come.\n").trouble
        'node 1 of 2 did not come.'
    """
    found: dict[str, Any] = json.loads(left) if left else {"pages": [], "speed": [], "interface": ""}
    said = [line.removeprefix("lockstep: ") for line in errors.strip().splitlines() if line.strip()]
    trouble = (said[-1] if said else f"the run ended with code {code}") if code or not left else ""
    speeds = tuple(Speed(**row) for row in found["speed"])
    return Together(tuple(found["pages"]), speeds, found["interface"], trouble)


def judge(together: Together, node: int) -> list[Line]:
    """Say how all nodes are, what differs, and how quickly they talk.

    Args:
        together: What came of the meeting.
        node: This one's number; its own lines are on the page already.

    Example:
        >>> page = {"host": "a", "lines": [], "python": "3.11.2", "nccl": "", "gpus": []}
        >>> [line.about for line in judge(Together((page, page), (Speed("gloo", 90.0, 0.1),), "eth0"), 0)]
        ['node 1 (a)', '2 nodes, gloo']
    """
    lines = [judge_node(number, page) for number, page in enumerate(together.pages) if number != node]
    lines += [line for what in COMPARED if (line := judge_same(what, together.pages)) is not None]
    lines += [judge_speed(speed, len(together.pages), together.interface) for speed in together.speed]
    if together.trouble and not any(speed.trouble for speed in together.speed):
        lines.append(judge_trouble(together.trouble))
    return lines


def judge_trouble(sentence: str) -> Line:
    """What the launcher has said, with its own remedy.

    Example:
        >>> judge_trouble("node 1 did not come. Start `lockstep run` there too.")[2:]
        ('node 1 did not come', 'Start `lockstep doctor` there too.')
    """
    for theirs, ours in _SAID.items():
        sentence = sentence.replace(theirs, ours)
    found, _, remedy = sentence.partition(". ")
    return broken("nodes", found, remedy or "Look at what the other nodes say.")


def judge_node(number: int, page: dict[str, Any]) -> Line:
    """What another node has found."""
    about, lines = f"node {number} ({page['host']})", [Line(*line) for line in page["lines"]]
    if worst(lines) != "broken":
        return fine(about, verdict(lines))
    what = "; ".join(f"{line.about}: {line.found}" for line in lines if line.state == "broken")
    return broken(about, what, "Its own page says what to do.")


def judge_same(what: str, pages: Sequence[dict[str, Any]]) -> Line | None:
    """Say so where nodes differ.

    Example:
        >>> judge_same("python", [{"python": "3.11.2"}, {"python": "3.12.1"}]).found
        '3.11.2 on node 0, 3.12.1 on node 1'
    """
    values = [_words(page[what]) for page in pages]
    other = next((number for number, value in enumerate(values) if value != values[0]), None)
    if other is None:
        return None
    return doubtful(what, f"{values[0]} on node 0, {values[other]} on node {other}", COMPARED[what])


def _words(value: str | list[str]) -> str:
    if isinstance(value, str):
        return value or "none"
    return ", ".join(f"{value.count(kind)} x {kind}" for kind in sorted(set(value))) or "none"


def judge_speed(speed: Speed, nodes: int, interface: str) -> Line:
    """Compare with what ordinary networks do."""
    about = f"{nodes} nodes, {speed.backend}"
    if speed.trouble:
        return broken(about, speed.trouble, "Look at what the other nodes say; all ports between them must be open.")
    found = f"{show(speed)}, by {interface}" if interface else show(speed)
    if not within(speed, SLOW[speed.backend]):
        return doubtful(about, found, REMEDIES[speed.backend])
    return fine(about, found)
