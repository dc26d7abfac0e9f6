"""Which rank failed first, what is said of it, and the exit code. Pure."""

import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lockstep.world.ending import SAVED


class End(NamedTuple):
    """How one rank ended.

    Attributes:
        rank: Its number.
        local_rank: Its number on its node.
        host: The node's name.
        when: Seconds on the node's monotonic clock: when it raised, else when its death was seen.
        code: What it would exit with by itself, 0 to 255; None if a signal ended it.
        signal: The signal that ended it; 0 if none did.
        told: Whether the launcher had told it to end before.
        error: The exception in one line, such as ``"ValueError: no such file"``; empty if there was none.
        text: Its traceback, or what the fault handler wrote.
        echo: Whether the exception says that another rank was lost, rather than what is wrong.
    """

    rank: int
    local_rank: int
    host: str
    when: float
    code: int | None
    signal: int = 0
    told: bool = False
    error: str = ""
    text: str = ""
    echo: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended badly."""
        return self.code != 0


# What gloo, nccl and torch's stores say when the other side is gone. Only the order of blame depends on these words.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
)
_ECHO_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "LostRankError", "LateRankError")


def is_echo(error_type: str, message: str) -> bool:
    """Say whether an exception tells of another rank's end.

    Example:
        >>> is_echo("RuntimeError", "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3412")
        True
        >>> is_echo("ValueError", "bad label")
        False
    """
    return error_type in _ECHO_TYPES or any(words in message for words in _ECHOES)


def find_first(ends: Iterable[End]) -> End | None:
    """Find the rank whose failure caused the others'.

    A rank that the launcher told to end is no cause, unless all were told. One that says "the peer is gone" comes
    after one that says what is wrong, whatever their clocks say: a killed rank's death is seen only after its peers
    have felt it. So does SIGTERM, which torch's agent sends of its own accord where it is the first to see a failure.

    Example:
        >>> killed = End(1, 1, "a", when=2.0, code=None, signal=9)
        >>> felt = End(0, 0, "a", when=1.9, code=1, error="RuntimeError: Connection closed by peer", echo=True)
        >>> find_first([felt, killed]).rank
        1
    """

    def blame(end: End) -> tuple[bool, bool, bool, float]:
        return end.told, end.echo, end.signal == signal.SIGTERM, end.when

    return min((end for end in ends if end.failed), key=blame, default=None)


def exit_code(end: End | None) -> int:
    """The launcher's exit code: the first failing rank's, as a shell would give it.

    Example:
        >>> exit_code(None), exit_code(End(0, 0, "a", 0.0, code=3)), exit_code(End(0, 0, "a", 0.0, code=None, signal=9))
        (0, 3, 137)
    """
    if end is None:
        return 0
    return 128 + end.signal if end.code is None else end.code


def saved(end: End | None) -> bool:
    """Whether a rank saved and ended because a signal had asked it to; then nothing is to be started again here.

    Example:
        >>> saved(End(0, 0, "a", 0.0, code=75)), saved(End(0, 0, "a", 0.0, code=1))
        (True, False)
    """
    return end is not None and end.code == SAVED


def cause(end: End) -> str:
    """What a rank died of, in a few words.

    Example:
        >>> cause(End(0, 0, "a", 0.0, code=3)), cause(End(0, 0, "a", 0.0, code=None, signal=11))
        ('exit code 3', 'SIGSEGV')
    """
    if end.error:
        return end.error
    return signal_name(end.signal) if end.code is None else f"exit code {end.code}"


def signal_name(number: int) -> str:
    """A signal's name, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(ends: Sequence[End], size: int, stopped_by: int = 0) -> str:
    """Everything said at the end: who else failed, by time, and at last the first failing rank and its traceback.

    Args:
        ends: Of this node's ranks.
        size: How many ranks there are on all nodes.
        stopped_by: The signal that told the launcher to end; 0 if none did.

    Example:
        >>> print(report([End(1, 1, "ant", 0.5, code=3)], size=2), end="")
        lockstep: rank 1 of 2 (local rank 1 on ant) failed first: exit code 3
        >>> seen_late = End(1, 1, "ant", 0.5, code=None, signal=9), End(0, 0, "ant", 0.4, code=None, signal=15)
        >>> print(report(seen_late, size=2), end="")
        lockstep: +0.00 s: rank 0 was ended (SIGTERM)
        lockstep: rank 1 of 2 (local rank 1 on ant) failed first: SIGKILL
        >>> print(report([End(0, 0, "ant", 0.5, code=None, signal=15, told=True)], 1, stopped_by=15), end="")
        lockstep: told to end by SIGTERM, and so were its ranks
    """
    first = find_first(ends)
    if first is None or saved(first):  # rank 0 has said so
        return ""
    if stopped_by and first.told and not first.error:  # nothing failed
        killed = sorted(end.rank for end in ends if end.signal == signal.SIGKILL)
        return f"lockstep: told to end by {signal_name(stopped_by)}, and so were its ranks" + (
            f"; SIGKILL at last for {', '.join(map(str, killed))}\n" if killed else "\n"
        )
    others = sorted((end for end in ends if end.failed and end is not first), key=lambda end: end.when)
    lines = [f"lockstep: {_after(end, first):+.2f} s: rank {end.rank} {_lot(end)} ({cause(end)})\n" for end in others]
    where = f"rank {first.rank} of {size} (local rank {first.local_rank} on {first.host})"
    return "".join(lines) + f"lockstep: {where} failed first: {cause(first)}\n" + first.text + hint(first)


# What torch says where there is no CUDA, by the call that wanted it.
_NO_CUDA = (
    "_cuda_setDevice",
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "ProcessGroupNCCL is only supported with GPUs",
    "Distributed package doesn't have NCCL",
)


# What breakpoint() and input() raise where nobody can answer.
_NO_TERMINAL = ("bdb.BdbQuit", "EOFError: EOF when reading a line")


def hint(end: End) -> str:
    r"""A line more where the cause is plain and the traceback does not say what to do.

    Example:
        >>> hint(End(0, 0, "a", 0.0, code=1, error="AssertionError: Torch not compiled with CUDA enabled"))
        'lockstep: this script wants a GPU. To rehearse it on the CPU: lockstep run --device cpu\n'
        >>> hint(End(1, 1, "a", 0.0, code=1, error="bdb.BdbQuit"))
        'lockstep: local rank 0 has the terminal. To give it to this one: lockstep run --debug 1\n'
    """
    if any(words in end.error for words in _NO_CUDA):
        return "lockstep: this script wants a GPU. To rehearse it on the CPU: lockstep run --device cpu\n"
    if end.local_rank and end.error.startswith(_NO_TERMINAL):
        return (
            f"lockstep: local rank 0 has the terminal. To give it to this one: lockstep run --debug {end.local_rank}\n"
        )
    return ""


def _after(end: End, first: End) -> float:
    """Seconds. A rank that was ended for the first's failure came after it, in whatever order their ends were seen."""
    after = end.when - first.when
    return max(0.0, after) if _lot(end) == "was ended" else after


def _lot(end: End) -> str:
    return "was ended" if not end.error and (end.told or end.signal == signal.SIGTERM) else "failed too"


def restart_line(first: End | None, restart: int, most: int) -> str:
    r"""What is said when ranks start again.

    Example:
        >>> restart_line(End(1, 1, "ant", 0.5, code=None, signal=9), 1, 3)
        'lockstep: restart 1 of 3: rank 1 (local rank 1 on ant) died of SIGKILL\n'
    """
    if first is None:
        return "lockstep: another node has come, gone or started again; the ranks here were ended for that\n"
    return (
        f"lockstep: restart {restart} of {most}: rank {first.rank} (local rank {first.local_rank} on {first.host}) "
        f"died of {cause(first)}\n"
    )
