"""What a thread waits for in shared memory, read off its frames: nothing is written down while calls go on."""

from types import FrameType
from typing import NamedTuple

from lockstep.shm.agreement import describe
from lockstep.shm.crossing import Crossing
from lockstep.shm.member import Member


class Glance(NamedTuple):
    """A call that goes on. ``number`` is its place among the group's collectives, -1 for a message."""

    group: str
    ranks: list[int]
    number: int
    kind: str
    detail: str


def find_call(frame: FrameType | None) -> Glance | None:
    """The collective or message that a thread is in; None if it is in none.

    A collective over nodes is made of several within the node and between leaders, so the outermost is the script's.
    """
    found = None
    while frame is not None:
        if frame.f_code is Crossing._guard.__code__:
            return _over_nodes(frame)
        if found is None and frame.f_code is Member.call.__code__:
            found = _collective(frame)
        if frame.f_code in _MESSAGES:
            return _message(frame)
        frame = frame.f_back
    return found


def _over_nodes(frame: FrameType) -> Glance | None:
    here = frame.f_locals
    if "words" not in here:  # it has only begun
        return None
    kind, _, detail = describe(here["words"]).partition(" ")
    return Glance(_name("hierarchy", here["self"]), here["self"]._names, here["words"][0], kind, detail)


_MESSAGES = {Member.send.__code__: "send to", Member.open.__code__: "recv from", Member.read.__code__: "recv from"}


def _collective(frame: FrameType) -> Glance | None:
    here = frame.f_locals
    member = here["self"]
    if "number" not in here:  # it has only begun
        return None
    names = member._names
    words = (here["number"], here["kind"], here["op"], here["type_"], names[here["root"]], here["count"])
    kind, _, detail = describe(words).partition(" ")
    return Glance(_name("shm", member), names, here["number"], kind, detail)


def _message(frame: FrameType) -> Glance:
    member, peer = frame.f_locals["self"], frame.f_locals["peer"]
    names = member._names
    return Glance(
        _name("shm", member),
        [names[peer], names[member._rank]],
        -1,
        f"{_MESSAGES[frame.f_code]} rank {names[peer]}",
        "",
    )


def _name(kind: str, group: Member | Crossing) -> str:
    """Tell groups apart, also those of the same ranks: the reducer has one of its own beside the world's."""
    return f"{kind} {group._names} {group.nth}"
