"""Notices that no rank goes on, asks all where they are, and prints it. In the agent's second thread, never waiting."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from lockstep.launcher import reports
from lockstep.launcher.others import Asked, Others
from lockstep.watch.record import ALL, STACK_SIGNAL, STEPS, read_seen
from lockstep.watch.stacks import find_dumped
from lockstep.watch.verdict import Seen, find_cause, report, waits

_PATIENCE = 3.0
"""Seconds that a rank gets to answer by itself; then its stack is taken without its help."""
_LAST_PATIENCE = 1.0
"""Seconds for that."""
_NEVER = float("inf")
_LOOKS = 8
"""Looks at the steps in one stall time, so that a stall is told at most an eighth later."""
_MEANWHILE = 0.25
"""Seconds between looks at the steps while other nodes are waited for."""


class Rank(Protocol):
    """What this file needs of a rank (`lockstep.launcher.watch.Rank`)."""

    report: reports.Report
    died: float

    @property
    def alive(self) -> bool:
        """Whether it has started and not ended."""
        ...

    def tell(self, number: int) -> None:
        """Send it a signal."""
        ...


class Stall:
    """When did a rank last finish a step? Where are all of them, if that is long ago?

    Args:
        seconds: How long is long; 0 for never.
        asks: To each rank of this node.
        answers: From each of them.
        say: Sends a word to the front.
    """

    def __init__(
        self, seconds: float, asks: Sequence[Connection], answers: Sequence[Connection], say: Callable[..., None]
    ) -> None:
        self._seconds = seconds
        self._asks = [end.fileno() for end in asks]
        self.answers = [end.fileno() for end in answers]
        self._say = say
        self.others = Others()
        for fd in (*self._asks, *self.answers):
            os.set_blocking(fd, False)
        self.begin([])

    def begin(self, ranks: Sequence[Rank]) -> None:
        """An attempt begins."""
        self._ranks = list(ranks)
        count = len(self._ranks)
        self._data = [b""] * count
        self._steps = [-1] * count
        self._seen: dict[int, dict[str, Any]] = {}
        self._moved = self._since = time.monotonic()  # the last step; from when on it has been quiet, or told
        self._told: tuple[str, list[int]] | None = None
        self._asking = self._signalled = False
        self._here: list[Seen] = []
        self._asked: Asked | None = None  # the other nodes
        self.due = time.monotonic() + self._seconds / _LOOKS if self._asks and ranks else _NEVER

    def end(self) -> None:
        """The ranks are about to end: nobody is asked any more."""
        self.due = _NEVER

    def hear(self, number: int) -> None:
        """An answer of a rank."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.answers[number], 65536):
                data += part
        if number >= len(self._ranks):
            return
        *lines, rest = (self._data[number] + data).split(b"\n")
        kept = [line for line in lines if line and not self._take(number, line)]
        # Lines that are no answer are the fault handler's.
        self._data[number] = b"".join(line + b"\n" for line in kept) + rest

    def _take(self, number: int, line: bytes) -> bool:
        if not line.startswith(b"\0"):
            return False
        with contextlib.suppress(ValueError):
            answer = json.loads(line[1:])
            if answer["pid"] in (self._ranks[number].report.pid, 0):
                self._count(number, answer["steps"])
                if "seen" in answer:
                    self._seen[number] = answer["seen"]
        return True

    def _count(self, number: int, steps: int) -> None:
        if steps > self._steps[number]:
            if self._told:
                self._say(say="lockstep: the ranks go on: a step was finished\n")
            self._told = None
            self.others.forget()
            self._here, self._asked = [], None
            self._steps[number] = steps
            self._moved = self._since = time.monotonic()

    def keep_time(self, now: float) -> None:
        """Do what is due."""
        if now < self.due and not (self._asking and self._complete()):
            return
        if self._asking:
            self._collect(now)
            return
        if self._asked is not None:
            self._hear_others(self._asked, now)
            return
        late = now >= self._since + self._seconds
        self._ask(ALL if late else STEPS)
        self._asking = late
        self.due = now + (_PATIENCE if late else self._pause)

    def _ask(self, question: bytes) -> None:
        for number, rank in enumerate(self._ranks):
            if rank.alive:
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it has not taken the questions before
                    os.write(self._asks[number], question)

    def _complete(self) -> bool:
        return all(number in self._seen or not rank.alive for number, rank in enumerate(self._ranks))

    def _collect(self, now: float) -> None:
        """All have answered, or it is time: take the stacks of those who did not, then tell."""
        if not self._complete() and not self._signalled:
            self._signalled = True
            for number, rank in enumerate(self._ranks):
                # One that has never answered may not know the signal yet, and would die of it.
                if number not in self._seen and self._steps[number] >= 0:
                    self._data[number] = b""
                    rank.tell(STACK_SIGNAL)
            self.due = now + _LAST_PATIENCE
            return
        ranks = sorted(self._what_was_seen(number, rank) for number, rank in enumerate(self._ranks) if rank.report.pid)
        self._seen = {}
        self._asking = self._signalled = False
        self.due = now + self._pause
        if ranks and now >= self._since + self._seconds:  # no step has come in meanwhile
            self._since = now
            self._here = ranks
            # Other nodes look at their ranks at other times, and give them as long to answer.
            self._asked = self.others.ask(ranks, 2 * self._seconds / _LOOKS + _PATIENCE + 2 * _LAST_PATIENCE)
            self._hear_others(self._asked, now)

    def _hear_others(self, asked: Asked, now: float) -> None:
        """All nodes have answered, or it is time."""
        if asked.missing and now < asked.until:
            self._ask(STEPS)
            self.due = now + min(_MEANWHILE, self._pause)
            return
        self._asked = None
        self.due = now + self._pause
        others, missing = asked.came, asked.missing
        ranks = sorted([*self._here, *(seen for node in others for seen in node.ranks)])
        # Who has taken no step yet and waits for nobody is no training that hangs: a server, a download.
        if not waits(ranks) and max(seen.steps for seen in ranks) == 0:
            return
        # Said once, unless it changes, which it may without a step.
        told = (find_cause(ranks), missing)
        if told != self._told:
            self._say(say=report(told[0], self._here, now - self._moved, others, missing))
        self._told = told

    @property
    def _pause(self) -> float:
        return max(0.05, self._seconds / _LOOKS)

    def _what_was_seen(self, number: int, rank: Rank) -> Seen:
        steps = max(0, self._steps[number])
        if rank.died or rank.report.code == 0:
            return Seen(rank.report.rank, steps, ended=True)
        if number in self._seen:
            return read_seen(rank.report.rank, self._seen[number])
        dump = "".join(f"  {line}\n" for line in self._data[number].decode(errors="replace").splitlines())
        pid, host = rank.report.pid, os.uname().nodename
        why = f"it is stopped, kill -CONT {pid} on {host} lets it go on" if _stopped(pid) else ""
        return Seen(rank.report.rank, steps, silent=True, stack=dump, doing=why, place=find_dumped(dump))


def _stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    import psutil  # type: ignore[import-untyped]

    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
