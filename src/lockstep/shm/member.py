"""One rank in a segment: runs calls, and says what went wrong with one."""

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import LateRankError, LockstepError, LostRankError, MismatchError, UsageError
from lockstep.shm.agreement import describe, say_difference
from lockstep.shm.pace import AT_ONCE, UnfinishedError
from lockstep.shm.segment import Meeting

MISMATCH, LATE, LOST, LEFT, STOPPED = 1, 2, 3, 4, 5
PENDING, TOO_LARGE = 7, 8
_UNFINISHED = (PENDING, TOO_LARGE)
STAYS, LEFT_IN_ORDER, GAVE_UP = 0, 1, 2

SPINS = 3000
"""Looks at a peer's counter before sleeping, about 0.1 ms: what a message takes at most if nobody is late."""

YIELDS = 4000
"""Looks after that, of which each leaves the core to whoever else wants it: 1 ms or more.

To be woken takes longer than most ranks are late, where cores are virtual.
"""

SPINS_BESIDE = 100
"""The same for a thread that works beside its caller, which needs the core for something better."""


MOMENT = 0.05
"""Seconds that who takes a message from anybody waits before looking whether another thread has taken it."""


class Member:
    """This process in a segment. Calls come one at a time; messages one at a time for each peer and direction.

    Args:
        meeting: From `lockstep.shm.create`.
        rank: This rank within the group.
        names: The group's ranks as numbers in the world, for messages.
        timeout: Seconds that a call waits for its peers.
        group: What messages call the group; None: its ranks.
    """

    def __init__(self, meeting: Meeting, rank: int, names: list[int], timeout: float, group: str | None = None) -> None:
        self.core = meeting.core
        self.timeout = timeout
        self.pids = meeting.pids
        self.over = ""  # why nothing can be called any more, if that is so
        self.places = 0  # tensors that all ranks have mapped (`lockstep.shm.placed`)
        self._meeting, self._rank, self._names = meeting, rank, names
        self.nth = count_group("shm", names)
        whole = names == list(range(len(names)))
        self._group = group or (f"of {len(names)}" if whole else f"(group of ranks {names})")
        self._calls = 0
        self._failure: LockstepError | None = None
        self._closed = threading.Lock()
        crowded = outnumber_cores(meeting.pids)
        patient = SPINS_BESIDE if crowded else SPINS
        self._spins = (SPINS_BESIDE, patient, 0, patient)  # by pace
        self._yields = (0, 0 if crowded else YIELDS, 0, 0)
        _members.add(self)

    @property
    def who(self) -> str:
        """Who speaks, in messages."""
        return f"rank {self._names[self._rank]} {self._group}"

    def call(
        self,
        pace: int,
        kind: int,
        op: int,
        type_: int,
        root: int,
        count: int,
        width: int,
        ins: int | tuple[int, ...],
        outs: int | tuple[int, ...],
        give: int | tuple[int, ...] | None = None,
        take: int | tuple[int, ...] | None = None,
        timeout: float | None = None,
        homes: tuple[int, ...] | None = None,
        place: int = 0,
    ) -> None:
        """Run one collective; the arguments are the core's.

        Raises:
            MismatchError: Ranks brought different calls, on every rank; the group is as good as before.
            LateRankError: A rank did not come in time.
            LostRankError: A rank died or left. After this and the one before, the group is of no use any more.
            UnfinishedError: The pace is not one that waits.
        """
        if self._failure is not None:
            raise self._again()
        seconds = self.timeout if timeout is None else timeout
        number = self._calls
        try:
            verdict = self.core.run(
                *(kind, op, type_, root, count, width, ins, outs, give, take, homes, place),
                *(seconds, self._spins[pace], self._yields[pace], pace >= AT_ONCE),
            )
        except BaseException:  # a signal's handler raised, Ctrl-C for one
            self.core.leave(GAVE_UP)
            self._failure = LostRankError(f"{self.who} was interrupted in collective number {number}.")
            raise
        if verdict in _UNFINISHED:
            raise UnfinishedError(begun=verdict == PENDING)
        self._calls += 1
        if verdict:
            what = f"{describe((number, kind, op, type_, self._names[root], count))}, collective number {number}"
            raise self._explain(verdict & 255, (verdict >> 8) - 1, what, seconds, self._late)

    def send(self, pace: int, peer: int, address: int, size: int, tag: int, number: int) -> None:
        """Send one message; `number` stands for its dtype."""
        arguments = (peer, address, size, tag, number, self.timeout, self._spins[pace])
        self._message(f"send to rank {self._names[peer]}", self.core.send, *arguments)

    def open(self, pace: int, peer: int) -> tuple[int, int, int]:
        """Bytes, tag and dtype of the next message from ``peer``."""
        what = f"recv from rank {self._names[peer]}"
        envelope: tuple[int, int, int] = self._message(what, self.core.open, peer, self.timeout, self._spins[pace])
        return envelope

    def read(self, pace: int, peer: int, address: int, size: int) -> None:
        """Take the bytes of the message that was opened."""
        what = f"recv from rank {self._names[peer]}"
        self._message(what, self.core.read, peer, address, size, self.timeout, self._spins[pace])

    def find_mail(self, deadline: float) -> bool:
        """Wait a moment for a message from anybody, and say whether there is one; raises if the deadline passes."""
        left = deadline - time.monotonic()
        found = self.core.mail(min(left, MOMENT))
        if found == LATE and left > MOMENT:
            return False
        self._message("recv from any rank", lambda: found)
        return True

    def refuse_if_over(self) -> None:
        """Raise, if nothing can be called any more."""
        if self.over:
            raise UsageError(f"{self.who}: {self.over}")

    def refuse(self, text: str) -> MismatchError:
        """Say that a message is not what was expected."""
        return MismatchError(f"{self.who}: {text}")

    def stop(self) -> None:
        """End every wait of this process, and tell the others."""
        self.core.stop()
        self.core.leave(LEFT_IN_ORDER if self._failure is None else GAVE_UP)

    def close(self) -> None:
        """Close what belongs to the system; the memory goes with the last reference to the core."""
        if self._closed.acquire(blocking=False):
            for fd in self._meeting.watch:
                if fd >= 0:
                    os.close(fd)

    def _again(self) -> LockstepError:
        failure = self._failure
        assert failure is not None
        return type(failure)(f"{self.who}: this shm group ended earlier: {failure}")

    def _message(self, what: str, act: Callable[..., Any], *arguments: object) -> Any:
        """What the core gives, unless it is a verdict other than that all is well."""
        if self._failure is not None:
            raise self._again()
        try:
            found = act(*arguments)
        except BaseException:  # a signal's handler raised: nobody knows how much of the message has passed
            self.core.leave(GAVE_UP)
            self._failure = LostRankError(f"{self.who} was interrupted in {what}.")
            raise
        if isinstance(found, int) and found:
            raise self._explain(found & 255, (found >> 8) - 1, what, self.timeout, self._late_message)
        return found

    def _explain(
        self, outcome: int, culprit: int, what: str, seconds: float, late: Callable[[int, str, float], str]
    ) -> LockstepError:
        if outcome == MISMATCH:
            return MismatchError(self._mismatch(what))
        if outcome == STOPPED:
            return LostRankError(f"{self.who}: the group was destroyed while it was in {what}.")
        if outcome == LATE:
            failure: LockstepError = LateRankError(late(culprit, what, seconds))
        else:
            failure = LostRankError(self._lost(outcome, culprit, what))
        self.core.leave(GAVE_UP)
        self._failure = failure
        return failure

    def _mismatch(self, what: str) -> str:
        words = [self.core.words(rank) for rank in range(len(self._names))]
        rows = [(*row[:4], self._names[row[4]], row[5]) for row in words]
        return (
            f"{self.who}: the ranks brought different calls to {what}: "
            f"{say_difference(rows, self.core.shares, self._names)}. Every rank must make the same calls in the same "
            f"order, with the same sizes and dtypes."
        )

    def _late(self, culprit: int, what: str, seconds: float) -> str:
        came = self.core.came()
        away = [rank for rank, here in enumerate(came) if not here] or [culprit]
        missing = ", ".join(map(self._name, away))
        here = ", ".join(str(self._names[rank]) for rank in range(len(came)) if rank not in away)
        return (
            f"{self.who}: {missing} did not come within {seconds:g} s to {what}; rank(s) {here} did. See what it is "
            f"doing (py-spy dump --pid {self.pids[away[0]]}); a step that takes longer needs a larger timeout."
        )

    def _late_message(self, culprit: int, what: str, seconds: float) -> str:
        """Of a message; ``culprit`` is -1 where any rank could have sent it."""
        why, pid = ("no rank has sent anything", "PID")
        if culprit >= 0:
            why, pid = f"it waited for {self._name(culprit)}", str(self.pids[culprit])
        return (
            f"{self.who}: {what} was not over within {seconds:g} s: {why}. See what the other side is doing "
            f"(py-spy dump --pid {pid}); a step that takes longer needs a larger timeout."
        )

    def _lost(self, outcome: int, culprit: int, what: str) -> str:
        if culprit < 0:
            return f"{self.who}: no other rank is there any more that could send anything, in {what}."
        remedy = "Look for its own error first."
        if outcome == LOST:
            how = "died"
        elif self.core.gone(culprit) == GAVE_UP:
            how = "gave up after an error of its own"
        else:
            how = "came to its end or left (destroy_process_group)"
            remedy += (
                " If it has none, it made fewer calls than the others: every rank must take as many steps as they."
            )
        return f"{self.who}: {self._name(culprit)} {how} while it was waited for in {what}. {remedy}"

    def _name(self, rank: int) -> str:
        return f"rank {self._names[rank]} (pid {self.pids[rank]})" if rank >= 0 else "any rank"


_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def count_group(kind: str, names: Sequence[int]) -> int:
    """Give a new group its number among those of its kind and ranks, from 1; the same on each of them."""
    key = (kind, tuple(names))
    _made[key] += 1
    return _made[key]


def outnumber_cores(pids: Sequence[int]) -> bool:
    """Whether this process and those of ``pids`` that may run on its cores are more than the cores they have together.

    Each looks at its own alone, so that ranks with a core of their own, as a launcher gives them, are not taken for
    many on one.
    """
    mine = os.sched_getaffinity(0)
    near = [cores for pid in pids if (cores := _cores_of(pid)) & mine]
    return len(near) > len(set().union(*near))


def _cores_of(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except OSError:  # it has ended, or another user's
        return set()


_members: "weakref.WeakSet[Member]" = weakref.WeakSet()


def _disown() -> None:
    """A process that the rank has forked is none itself: it must not speak in the rank's name, nor leave in it."""
    for member in _members:
        member.over = (
            f"process {os.getpid()} was forked from this rank and is none itself. Call collectives in the rank: not in "
            f"a data loader's workers, for one."
        )


os.register_at_fork(after_in_child=_disown)
