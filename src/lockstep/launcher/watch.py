"""The agent's second thread: passes signals on, notices which rank fails first, and sees that the others end in time."""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from lockstep.launcher import failure, orphans, reports
from lockstep.launcher.failure import End
from lockstep.launcher.plan import LaunchPlan

FAILURE_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for the others when a rank has failed: they wait for one that will not come."""

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TOUCH = b"\0"


class Rank:
    """One rank of the present attempt, as its launcher sees it."""

    def __init__(self, local_rank: int, report: Connection) -> None:
        self.local_rank = local_rank
        self.pipe = report.fileno()
        self.data = b""
        self.report = reports.Report()
        self.pidfd = -1
        self.died = 0.0
        self.status: os.waitid_result | None = None
        self.told = 0  # the last signal that it got from us to end

    @property
    def alive(self) -> bool:
        """Whether it has started and not ended."""
        return self.pidfd >= 0 and not self.died


class Watch:
    """Sees everything that happens to the ranks."""

    def __init__(
        self, plan: LaunchPlan, control: Connection, pipes: list[Connection], say: Callable[..., None]
    ) -> None:
        self._plan = plan
        self._control = control.fileno()
        self._pipes = pipes
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._ranks: list[Rank] = []
        self._lock = threading.Lock()
        self._deadline = float("inf")
        self._stop = 0
        self.starts = 0

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        threading.Thread(target=self._watch, name="lockstep-watch", daemon=True).start()

    def _watch(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ, self._hear)
        while True:
            wait = min(1.0, max(0.0, self._deadline - time.monotonic()))
            for key, _ in self._selector.select(wait):
                with self._lock:
                    key.data()
            with self._lock:
                if time.monotonic() >= self._deadline:
                    self._deadline = float("inf")
                    self._send(signal.SIGKILL)
                if self._stop and not self._ranks:
                    os._exit(128 + self._stop)  # told to end while no rank was running, such as while waiting for other nodes

    def before_start(self) -> None:
        """Called by the agent before it starts ranks: the last attempt is over."""
        if self.starts:
            self._say(say=self._tell_restart())
        orphans.kill_descendants(os.getpid())
        with self._lock:
            if self._stop:
                os._exit(128 + self._stop)
            for rank in self._ranks:
                self._forget(rank)
            self._ranks = [Rank(number, pipe) for number, pipe in enumerate(self._pipes)]
            for rank in self._ranks:
                os.set_blocking(rank.pipe, False)
                self._selector.register(rank.pipe, selectors.EVENT_READ, lambda rank=rank: self._listen(rank))
            self._deadline = float("inf")
        self.starts += 1

    def ends(self) -> list[End]:
        """How the ranks of the last attempt ended; once all have."""
        with self._lock:
            for rank in self._ranks:
                self._listen(rank)
            return [self._end_of(rank) for rank in self._ranks if rank.died or rank.report.code is not None]

    def _tell_restart(self) -> str:
        ends = self.ends()
        first = failure.find_first(ends)
        text = first.text if first else ""
        return text + failure.restart_line(first, self.starts, self._plan.max_restarts)

    def _end_of(self, rank: Rank) -> End:
        report, status = rank.report, rank.status
        killed = status is not None and status.si_code != os.CLD_EXITED
        code = report.code
        if code is None and status is not None and not killed:
            code = status.si_status
        return End(
            rank=report.rank,
            local_rank=rank.local_rank,
            host=socket.gethostname(),
            when=report.when or rank.died,
            code=code,
            signal=status.si_status if status is not None and killed and code is None else 0,
            told=bool(rank.told),
            error=report.error,
            text=report.text,
            echo=failure.is_echo(report.kind, report.error),
        )

    def _hear(self) -> None:
        """The front passes on a signal: its number, and whether the ranks have it already. If it is gone, all must go."""
        message = os.read(self._control, 2)
        if not message:
            orphans.kill_descendants(os.getpid())
            os._exit(137)
        number, had = message
        if number in _STOPS:
            again = bool(self._stop)
            self._stop = self._stop or number
            grace = 0.0 if again and number == signal.SIGINT else self._plan.grace
            self._deadline = min(self._deadline, time.monotonic() + grace)
        if not had:
            self._send(number)
        elif number in _STOPS:
            self._mark(number)

    def _mark(self, number: int) -> None:
        for rank in self._ranks:
            if rank.alive:
                rank.told = number

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.alive:
                if number in (*_STOPS, signal.SIGKILL):
                    rank.told = number
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, number)

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
        try:
            rank.pidfd = os.pidfd_open(rank.report.pid)
        except ProcessLookupError:  # it came and went
            rank.died = time.monotonic()
            return
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._bury(rank))
        if self._stop:
            rank.told = self._stop
            signal.pidfd_send_signal(rank.pidfd, self._stop)

    def _bury(self, rank: Rank) -> None:
        """A rank has ended. Its status stays for torch's agent to collect."""
        rank.died = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            rank.status = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        self._selector.unregister(rank.pidfd)
        os.close(rank.pidfd)
        self._listen(rank)
        if self._end_of(rank).failed:
            self._end_others(rank)

    def _end_others(self, failed: Rank) -> None:
        """One has failed: the others would wait for it. They may end by themselves, but not for long."""
        if self._deadline < float("inf") or self._stop:
            return
        self._deadline = time.monotonic() + min(FAILURE_GRACE, self._plan.grace)
        for rank in self._ranks:
            if rank is not failed and rank.alive:
                rank.told = signal.SIGTERM
                signal.pidfd_send_signal(rank.pidfd, signal.SIGTERM)

    def _forget(self, rank: Rank) -> None:
        self._selector.unregister(rank.pipe)
        if rank.alive:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
