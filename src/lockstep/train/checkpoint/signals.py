"""SIGTERM and SIGUSR1, which say that this machine will be taken: noticed, and no more than that."""

import os
import signal
import threading
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


def name_of(number: int) -> str:
    """A signal's name."""
    return signal.Signals(number).name


class Signals:
    """Notices the signals while it has them.

    What was ignored stays ignored. Only python's main thread can have signals; in another one nothing is noticed.

    Example:
        >>> signals = Signals()
        >>> signals.take()
        >>> signal.raise_signal(signal.SIGUSR1)
        >>> signals.seen == signal.SIGUSR1
        True
        >>> signals.give_back()
    """

    def __init__(self) -> None:
        self.seen = 0
        self._before: dict[int, object] = {}
        self._owner = 0

    def take(self) -> None:
        """Begin to notice."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._owner = os.getpid()
        for number in NUMBERS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN and before is not None:
                self._before[number] = before
                signal.signal(number, self._notice)

    def give_back(self) -> None:
        """Let them do what they did before."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)  # type: ignore[arg-type]

    def _notice(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if os.getpid() != self._owner:  # a worker that was forked from here has nothing to save
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.seen = self.seen or number
