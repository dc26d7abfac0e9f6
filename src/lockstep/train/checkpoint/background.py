"""One piece of work at a time, behind the loop's back."""

import atexit
import sys
import threading
from collections.abc import Callable


class Background:
    """Does one thing at a time in a thread; what it says of a failure waits for whoever asks.

    Python waits for the thread before the process ends.

    Example:
        >>> background = Background()
        >>> background.start(lambda: "the disk is full")
        >>> background.wait()
        'the disk is full'
        >>> background.wait()
        ''
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result = ""

    @property
    def failed(self) -> bool:
        """Whether something has failed and nobody has asked yet."""
        return self._thread is not None and not self._thread.is_alive() and bool(self._result)

    def start(self, work: Callable[[], str]) -> None:
        """Begin; what was begun before has been waited for."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._do, args=(work,), name="lockstep-checkpoint")
        self._thread.start()
        atexit.register(self._last_word)

    def wait(self) -> str:
        """Wait for the end of it; give what went wrong, once."""
        if self._thread is None:
            return ""
        self._thread.join()
        self._thread = None
        atexit.unregister(self._last_word)
        return self._result

    def _do(self, work: Callable[[], str]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._result = f"{type(error).__name__}: {error}"

    def _last_word(self) -> None:
        """Nobody has asked, and the program ends: python has waited for the thread by now."""
        if problem := self.wait():
            sys.stderr.write(f"lockstep: the last checkpoint could not be written: {problem}\n")
