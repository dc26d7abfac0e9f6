"""The agent's second thread: passes signals on, notices which rank fails first, sees that the others end in time."""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from lockstep.launcher import failure, orphans, reports
from lockstep.launcher.failure import End
from lockstep.launcher.plan import LaunchPlan
from lockstep.launcher.stall import Stall

FAILURE_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for the others when a rank has failed: they wait for one that will not come."""
_LAST_GRACE = 3.0
"""Seconds from there on that the agent gets to notice that all is over."""

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_NEVER = float("inf")


class Rank:
    """One rank of the present attempt, as its launcher sees it."""

    def __init__(self, local_rank: int, pipe: int) -> None:
        self.local_rank = local_rank
        self.pipe = pipe
        self.data = b""
        self.report = reports.Report()
        self.pidfd = -1
        self.died = 0.0
        self.status: os.waitid_result | None = None
        self.told_at = _NEVER
        self.told: set[int] = set()

    @property
    def alive(self) -> bool:
        """Whether it has started and not ended."""
        return self.pidfd >= 0 and not self.died

    def tell(self, number: int) -> None:
        """Send a signal to this very process, never to one that has its number by now."""
        if self.alive:
            self.mark(number)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def mark(self, number: int) -> None:
        """Remember that it was told to end."""
        if number in (*_STOPS, signal.SIGKILL):
            self.told.add(number)
            self.told_at = min(self.told_at, time.monotonic())

    def _last_told(self) -> int:
        return signal.SIGKILL if signal.SIGKILL in self.told else max(self.told, default=0)

    def end(self, seen: int | None = None) -> End:
        """How it ended, as far as that is known.

        Args:
            seen: The exit code that torch's agent saw, negative for a signal; it counts if nothing else is known.
        """
        report, status = self.report, self.status
        killed = status is not None and status.si_code != os.CLD_EXITED
        number = status.si_status if status is not None and killed else 0
        code = status.si_status if report.code is None and status is not None and not killed else report.code
        if status is None and code is None and seen is not None:
            number, code = (-seen, None) if seen < 0 else (0, seen)
        when = report.when or self.died or time.monotonic()
        return End(
            rank=report.rank,
            local_rank=self.local_rank,
            host=socket.gethostname(),
            when=when,
            code=code,
            signal=0 if code is not None else number or self._last_told(),
            # Dead of a signal that nobody here has sent, it is a cause, whatever it was told.
            told=when > self.told_at and (code is not None or not number or number in self.told),
            error=report.error,
            text=report.text,
            echo=failure.is_echo(report.kind, report.error),
        )


class Watch:
    """Sees everything that happens to the ranks of this node.

    Args:
        plan: Grace and restarts.
        control: Signals from the front: a number, and whether the ranks have it already.
        pipes: The ranks' reports.
        say: Sends a word to the front.
        stall: Notices when no rank goes on.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        control: Connection,
        pipes: list[Connection],
        say: Callable[..., None],
        stall: Stall,
    ) -> None:
        self._plan = plan
        self._control = control.fileno()
        self._pipes = [pipe.fileno() for pipe in pipes]
        self._say = say
        self._stall = stall
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ, self._hear)
        for number, answer in enumerate(stall.answers):
            self._selector.register(answer, selectors.EVENT_READ, lambda number=number: stall.hear(number))
        self._ranks: list[Rank] = []
        self._lock = threading.Lock()
        self._kill_at = _NEVER
        self._leave_at = _NEVER
        self.stopped_by = 0
        self.starts = 0

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        threading.Thread(target=self._watch, name="lockstep-watch", daemon=True).start()

    def before_start(self, seen: dict[int, int], by_another: bool) -> None:
        """Called by the agent before it starts ranks: an attempt before is over.

        Args:
            seen: As in `ends`.
            by_another: Another node starts again; the ranks here were well, and were ended for that.
        """
        orphans.kill_descendants(os.getpid(), spare=orphans.tracker())
        if self.stopped_by:
            raise RendezvousGracefulExitError
        if self.starts:
            first = None if by_another else failure.find_first(self.ends(seen))
            if failure.saved(first):
                raise RendezvousGracefulExitError
            line = failure.restart_line(first, self.starts, self._plan.max_restarts)
            self._say(say=(first.text if first else "") + line)
        with self._lock:
            for rank in self._ranks:
                self._forget(rank)
            self._ranks = [Rank(number, pipe) for number, pipe in enumerate(self._pipes)]
            for rank in self._ranks:
                os.set_blocking(rank.pipe, False)
                self._selector.register(rank.pipe, selectors.EVENT_READ, lambda rank=rank: self._listen(rank))
            self._stall.begin(self._ranks)
            if not self.stopped_by:
                self._kill_at = _NEVER
        self.starts += 1

    def ends(self, seen: dict[int, int] | None = None) -> list[End]:
        """How the ranks of the last attempt ended, once all have.

        Args:
            seen: Exit codes by rank that torch's agent saw, for one that this thread was too late to see.
        """
        with self._lock:
            for rank in self._ranks:
                self._listen(rank)
            # The agent may have collected a status before this thread saw it: what the rank has told is here all the
            # same. A rank of which nobody knows more was ended by us, if it was told to.
            known_of = seen or {}
            ends = [
                r.end(known_of.get(r.report.rank))
                for r in self._ranks
                if r.status is not None
                or r.report.code is not None
                or r.told
                or (r.report.pid and r.report.rank in known_of)
            ]
            base = min((rank.report.rank - rank.local_rank for rank in self._ranks if rank.report.pid), default=0)
        known = {end.rank for end in ends}
        for number, code in known_of.items():
            if number not in known:
                how = (None, -code) if code < 0 else (code, 0)
                ends.append(End(number, number - base, socket.gethostname(), time.monotonic(), *how))
        return ends

    def size(self) -> int:
        """How many ranks there are on all nodes."""
        return max((rank.report.size for rank in self._ranks), default=0) or len(self._ranks)

    def _watch(self) -> None:
        while True:
            until = min(self._kill_at, self._leave_at, self._stall.due, time.monotonic() + 60)
            for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
                with self._lock:
                    # While this thread waited for the lock, another attempt may have begun, with the same pipes.
                    if self._selector.get_map().get(key.fd) == key:
                        key.data()
            with self._lock:
                self._keep_time(time.monotonic())

    def _keep_time(self, now: float) -> None:
        if self._kill_at == _NEVER and not self.stopped_by:
            self._stall.keep_time(now)
        else:
            self._stall.end()
        if now >= self._kill_at:
            self._kill_at, self._leave_at = _NEVER, now + _LAST_GRACE
            for rank in self._ranks:
                rank.tell(signal.SIGKILL)
        if now >= self._leave_at:
            self._leave_at = _NEVER
            if self.stopped_by:  # the agent does not come back by itself while it waits for other nodes
                os._exit(128 + self.stopped_by)

    def _hear(self) -> None:
        """A signal from the front; if the front is gone, all must go."""
        message = os.read(self._control, 2)
        if not message:
            orphans.kill_descendants(os.getpid())
            os._exit(128 + signal.SIGKILL)
        number, had = message
        for rank in self._ranks:
            if had:
                rank.mark(number)
            else:
                rank.tell(number)
        if number in _STOPS:
            hurry = self.stopped_by and number == signal.SIGINT
            waiting = not any(rank.report.pid for rank in self._ranks)
            self.stopped_by = self.stopped_by or number
            self._kill_at = min(self._kill_at, time.monotonic() + (0.0 if hurry or waiting else self._plan.grace))

    def _listen(self, rank: Rank) -> None:
        """Read what a rank has told."""
        before = rank.report
        with contextlib.suppress(BlockingIOError):
            while data := os.read(rank.pipe, 65536):
                rank.data += data
        rank.report = reports.read(rank.data)
        if rank.report.pid and not before.pid:
            self._greet(rank)
        if rank.report.code:
            self._end_others(rank)

    def _greet(self, rank: Rank) -> None:
        if not self._plan.one_node:
            self._say(name=[rank.local_rank, rank.report.rank])
        try:
            rank.pidfd = os.pidfd_open(rank.report.pid)
        except ProcessLookupError:  # it came and went
            rank.died = time.monotonic()
            return
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._bury(rank))
        if self.stopped_by:
            rank.tell(self.stopped_by)

    def _bury(self, rank: Rank) -> None:
        """A rank has ended. Its status stays, for torch's agent to collect."""
        rank.died = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            rank.status = os.waitid(os.P_PID, rank.report.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        self._selector.unregister(rank.pidfd)
        os.close(rank.pidfd)
        rank.pidfd = -1
        self._listen(rank)
        if rank.end().failed and rank.status is not None:
            self._end_others(rank)

    def _end_others(self, failed: Rank) -> None:
        """One has failed: the others would wait for it. They may end by themselves, but not for long."""
        if self._kill_at == _NEVER:
            # One that has saved does not leave others waiting: they have saved too, and are on their way out.
            grace = self._plan.grace if failure.saved(failed.end()) else min(FAILURE_GRACE, self._plan.grace)
            self._kill_at = time.monotonic() + grace
            for rank in self._ranks:
                if rank is not failed:
                    rank.tell(signal.SIGTERM)

    def _forget(self, rank: Rank) -> None:
        self._selector.unregister(rank.pipe)
        if rank.alive:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
