"""Calls one after another, and what a caller holds of one that goes on without it."""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.errors import LateRankError
from lockstep.shm.pace import AT_ONCE, BESIDE, FOR_A_MOMENT, IN_CALLER, UnfinishedError

Job = Callable[[int], object]
"""What is to be done, at which pace (`lockstep.shm.pace`)."""


class Finished(dist.Work):
    """A call that was over when it returned."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always: a failure was raised instead."""
        return True

    def exception(self) -> None:
        """Give none."""

    def result(self) -> list[Tensor]:
        """Give the tensors that were filled."""
        return self._result

    def get_future(self) -> Future[Any]:
        """Give a future that is done."""
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future

    def source_rank(self) -> int:
        """Nobody in particular."""
        return -1

    _source_rank = source_rank


class Pending(dist.Work):
    """A call that goes on while the caller does something else."""

    def __init__(self, job: Job, result: list[Tensor], lane: "Lane") -> None:
        super().__init__()
        self._job, self._result, self._lane = job, result, lane
        self._error: BaseException | None = None
        self.begun = False
        self._source = -1
        self._running = threading.Lock()
        self._running.acquire()
        self._guard = threading.Lock()
        self._done = False
        self._signal: Future[Any] | None = None

    def perform(self, pace: int) -> bool:
        """Do it, or as much of it as the pace allows; say whether it is over."""
        try:
            found = self._job(pace)
            self._source = found if isinstance(found, int) else -1
        except UnfinishedError as unfinished:
            self.begun = unfinished.begun
            return False
        except BaseException as error:
            self._error = error
        del self._job
        return True

    def announce(self) -> None:
        """Tell whoever waits that it is done, and call back."""
        signal = self.settle()
        if signal is not None:
            signal.set_result(None)

    def settle(self) -> "Future[Any] | None":
        """Tell whoever waits that it is done; gives what calls back, if anything does, once its result is set."""
        with self._guard:
            self._done = True
            signal = self._signal
        self._running.release()
        return signal

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is over.

        Raises:
            LockstepError: What went wrong with it, in its own class.
            LateRankError: It is not over within ``timeout``; it goes on all the same.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._done:
            if seconds > 0:
                self._lane.hand_over(self)
            else:
                self._lane.go_on(self, IN_CALLER)
            if not self._running.acquire(timeout=seconds if seconds > 0 else -1):
                raise LateRankError(
                    f"work.wait(): the call is not over after {seconds:g} s. It goes on; wait again, or longer."
                )
            self._running.release()
        self.raise_error()
        return True

    def raise_error(self, kind: type[BaseException] | tuple[type[BaseException], ...] = BaseException) -> None:
        """Raise what went wrong, if that is of a kind."""
        if isinstance(self._error, kind):
            raise self._error

    def synchronize(self) -> None:
        """Wait, as torch calls it for devices with streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        if not self._done:
            self._lane.go_on(self, AT_ONCE)
        return self._done

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Give what went wrong, if anything did."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Give the tensors that are filled once it is over."""
        return self._result

    def source_rank(self) -> int:
        """Give the rank that a message came from, where any was welcome."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Give a future of the tensors, for hooks to chain.

        An error arrives in it as a RuntimeError with the class's name in its text: torch does not carry Python's
        classes through.
        """
        if not self._done:
            self._lane.go_on(self, FOR_A_MOMENT)
            self._lane.hand_over(self)
        with self._guard:
            if self._signal is None:
                self._signal = Future()
                self._future: Future[Any] = self._signal.then(self._give)
                if self._done:
                    self._signal.set_result(None)
            return self._future

    def _give(self, _: Future[Any]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result


class Lane:
    """Calls in the order in which they were made.

    In the caller's thread if nothing is ahead of them, else in a thread of the lane's own. A small call that need not
    be over yet is only begun: this rank's part is out, so that no peer waits for it, and whoever has the next turn
    finishes it, whether that is the caller when it waits, its next call, or the lane's thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.turn = threading.Lock()
        self._begun: Pending | None = None  # written by who has the turn
        self._queue: deque[Pending | None] = deque()  # None: only what was begun
        self._filled = threading.Semaphore(0)
        self._ahead = 0
        self._count = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calling_back = False  # the thread is in callbacks
        self._ending = False

    def now(self, job: Job) -> None:
        """Do it, after what is ahead of it."""
        if not self._ahead and self.turn.acquire(blocking=False):
            over = None
            try:
                over = self._settle(IN_CALLER)
                if over is not None:
                    over.raise_error((KeyboardInterrupt, SystemExit))
                job(IN_CALLER)
            finally:
                self.turn.release()
                if over is not None:
                    over.announce()
        else:
            self.later(job, []).wait()

    def idle(self) -> bool:
        """Whether nothing is ahead."""
        return not self._ahead

    def soon(self, job: Job, result: list[Tensor]) -> Pending:
        """Begin it, if nothing is ahead of it and a single call of the core does it; else have it done."""
        if not self._ahead and self.turn.acquire(blocking=False):
            work, done, over = Pending(job, result, self), False, None
            try:
                over = self._settle(AT_ONCE)
                if self._begun is None:
                    done = work.perform(AT_ONCE)
                    if work.begun:
                        self._begun = work
            finally:
                self.turn.release()
            for each in (over, work if done else None):
                if each is not None:
                    each.announce()
            if done or work.begun:
                return work
        return self.later(job, result)

    def later(self, job: Job, result: list[Tensor]) -> Pending:
        """Have it done, and return at once."""
        work = Pending(job, result, self)
        with self._count:
            self._ahead += 1
        if self._begun is not None:
            self._put(None)
        self._put(work)
        return work

    def go_on(self, work: Pending, pace: int) -> None:
        """Go on with a call, if it was only begun and, unless there is all the time, nobody else is at it."""
        over = None
        if self._begun is work and self.turn.acquire(blocking=pace == IN_CALLER):
            try:
                if self._begun is work:
                    over = self._settle(pace)
            finally:
                self.turn.release()
        if over is not None:
            over.announce()

    def hand_over(self, work: Pending) -> None:
        """Have a call that was only begun finished without its caller."""
        if self._begun is work:
            self._put(None)

    def close(self, timeout: float) -> None:
        """Let the thread end once it has done what is ahead."""
        begun = self._begun
        if begun is not None:
            self.go_on(begun, IN_CALLER)
        if self._thread is not None:
            self._ending = True
            self._filled.release()
            if self._thread is not threading.current_thread():
                self._thread.join(timeout)
            self._thread = None

    def _settle(self, pace: int) -> Pending | None:
        """With the turn: go on with what was begun; gives it if it is over, to be announced after the turn."""
        begun = self._begun
        if begun is None or not begun.perform(pace):
            return None
        self._begun = None
        return begun

    def _put(self, work: Pending | None) -> None:
        with self._count:
            if self._thread is None or self._calling_back:
                self._start()
            self._queue.append(work)
        self._filled.release()

    def _start(self) -> None:
        self._calling_back = False
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._thread is threading.current_thread():  # no other one has taken over while this one called back
            self._filled.acquire()
            if not self._queue:
                assert self._ending
                return
            work = self._queue.popleft()
            with self.turn:
                over = self._settle(BESIDE)
                if work is not None:
                    work.perform(BESIDE)
            # Before anyone hears of it: who waited may then go on in its own thread.
            if work is not None:
                with self._count:
                    self._ahead -= 1
            signals = [signal for each in (over, work) if each is not None and (signal := each.settle()) is not None]
            if signals:
                self._call_back(signals)
            del work, over, signals

    def _call_back(self, signals: "list[Future[Any]]") -> None:
        """A callback may wait for a call behind it: another thread goes on as soon as there is one."""
        with self._count:
            self._calling_back = True
            if self._queue:
                self._start()
        for signal in signals:
            signal.set_result(None)
        with self._count:
            if self._thread is threading.current_thread():
                self._calling_back = False
