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

Job = Callable[[bool], object]
"""What is to be done; the argument says whether it is done in the caller's own thread."""


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

    def __init__(self, job: Job, result: list[Tensor]) -> None:
        super().__init__()
        self._job, self._result = job, result
        self._error: BaseException | None = None
        self._source = -1
        self._running = threading.Lock()
        self._running.acquire()
        self._guard = threading.Lock()
        self._done = False
        self._signal: Future[Any] | None = None

    def perform(self) -> None:
        """Do it."""
        try:
            found = self._job(False)
            self._source = found if isinstance(found, int) else -1
        except BaseException as error:
            self._error = error
        del self._job

    def announce(self) -> None:
        """Tell whoever waits that it is done."""
        with self._guard:
            self._done = True
            signal = self._signal
        self._running.release()
        if signal is not None:
            signal.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is over.

        Raises:
            LockstepError: What went wrong with it, in its own class.
            LateRankError: It is not over within ``timeout``; it goes on all the same.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._done:
            if not self._running.acquire(timeout=seconds if seconds > 0 else -1):
                raise LateRankError(
                    f"work.wait(): the call is not over after {seconds:g} s. It goes on; wait again, or longer."
                )
            self._running.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait, as torch calls it for devices with streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Give what went wrong, if anything did."""
        return self._error

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

    In the caller's thread if nothing is ahead of them, else in a thread of the lane's own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.turn = threading.Lock()
        self._queue: deque[Pending | None] = deque()
        self._filled = threading.Semaphore(0)
        self._ahead = 0
        self._count = threading.Lock()
        self._thread: threading.Thread | None = None

    def now(self, job: Job) -> None:
        """Do it, after what is ahead of it."""
        if not self._ahead and self.turn.acquire(blocking=False):
            try:
                job(True)
            finally:
                self.turn.release()
        else:
            self.later(job, []).wait()

    def idle(self) -> bool:
        """Whether nothing is ahead."""
        return not self._ahead

    def later(self, job: Job, result: list[Tensor]) -> Pending:
        """Have it done, and return at once."""
        work = Pending(job, result)
        with self._count:
            self._ahead += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._go_on, name=self._name, daemon=True)
                self._thread.start()
            self._queue.append(work)
        self._filled.release()
        return work

    def close(self, timeout: float) -> None:
        """Let the thread end once it has done what is ahead."""
        if self._thread is not None:
            self._queue.append(None)
            self._filled.release()
            self._thread.join(timeout)
            self._thread = None

    def _go_on(self) -> None:
        while True:
            self._filled.acquire()
            work = self._queue.popleft()
            if work is None:
                return
            with self.turn:
                work.perform()
            # Before anyone hears of it: who waited may then go on in its own thread.
            with self._count:
                self._ahead -= 1
            work.announce()
            del work
