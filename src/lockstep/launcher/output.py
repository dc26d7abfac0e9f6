"""The ranks' output on its way to the terminal: pipes and a terminal of its own for the rank that owns it."""

import contextlib
import fcntl
import os
import select
import selectors
import struct
import termios
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import UsageError
from lockstep.launcher.screen import Screen

_PATIENCE = 1.0
"""Seconds after which an unfinished line is written to a file as it is: a prompt, or a rank that hangs."""


class Source(NamedTuple):
    """One stream of one rank, and where it goes."""

    local_rank: int
    fd: int
    target: int
    own: bool


class Output:
    """Carries what the ranks print; a thread of the front, which forks nobody after it has started."""

    def __init__(self, ranks: int, owner: int, direct: bool, host: str, log_dir: str) -> None:
        self._thread = threading.Thread(target=self._run, name="lockstep-output", daemon=True)
        self._names = {rank: rank for rank in range(ranks)}
        self._host = host
        self._last = 0.0
        self._sources: list[Source] = []
        self._theirs: list[Connection] = []
        self._terminals: list[int] = []
        self._selector = selectors.DefaultSelector()
        same = _same(1, 2)
        colour = "NO_COLOR" not in os.environ
        screens = {fd: Screen(os.isatty(fd), colour and os.isatty(fd)) for fd in (1, 2)}
        if same:
            screens[2] = screens[1]
        self._screens = screens
        # Nodes often have a folder in common.
        self._logs = _open_logs(log_dir, f"{host.strip()}-local_rank" if host else "rank", ranks)
        self.streams = [self._connect(rank, rank == owner, direct, same) for rank in range(ranks)]

    def _connect(self, rank: int, own: bool, direct: bool, same: bool) -> tuple[Connection | None, Connection | None]:
        if direct and own:
            return None, None
        out = self._open(rank, 1, own)
        err = out if same else self._open(rank, 2, own)
        return out, err

    def _open(self, rank: int, target: int, own: bool) -> Connection:
        ours, theirs = _terminal_like(target) if own and os.isatty(target) else os.pipe()
        if os.isatty(theirs):
            self._terminals.append(ours)
        self._sources.append(Source(rank, ours, target, own))
        self._theirs.append(Connection(theirs, readable=False))
        return self._theirs[-1]

    def close_theirs(self) -> None:
        """In the front, after the fork: only ranks write."""
        for end in self._theirs:
            end.close()

    def close_ours(self) -> None:
        """In the agent, after the fork: only the front reads."""
        for source in self._sources:
            os.close(source.fd)

    def listen(self, fd: int, hear: Callable[[], bool]) -> None:
        """Let the thread also call ``hear`` whenever there is something to read at ``fd``, until it gives False."""
        self._selector.register(fd, selectors.EVENT_READ, hear)

    def name(self, local_rank: int, rank: int) -> None:
        """The agent has told which rank a local rank is."""
        self._names[local_rank] = rank

    def say(self, text: str) -> None:
        """Write lines of the launcher's own to stderr, after everything else."""
        if text:
            self.settle()
            self._write(2, text.removesuffix("\n").encode(errors="replace") + b"\n")

    def settle(self) -> None:
        """End unfinished lines."""
        for target, screen in self._screens.items():
            self._write(target, screen.settle())

    def log(self, local_rank: int, text: str | bytes) -> None:
        """Write to one rank's log only, if it has one."""
        log = self._logs.get(local_rank)
        if log is None:
            return
        data = memoryview(text.encode(errors="backslashreplace") if isinstance(text, str) else text)
        try:
            while data:
                data = data[log.write(data) :]
        except OSError as error:  # a full disk must not stop what carries the ranks' output: they would wait for it
            self._logs.pop(local_rank).close()
            self.say(f"lockstep: {log.name} cannot be written any more ({error.strerror}); the ranks go on without it")

    def resize(self) -> None:
        """The terminal has another size: tell the ranks' own."""
        for fd in self._terminals:
            _copy_size(fd)

    def start(self) -> None:
        """Begin to carry."""
        self._thread.start()

    def join(self, timeout: float | None) -> None:
        """Wait until every stream has ended."""
        self._thread.join(timeout)

    def _run(self) -> None:
        for source in self._sources:
            self._selector.register(source.fd, selectors.EVENT_READ, source)
        while self._selector.get_map():
            for key, _ in self._selector.select(_PATIENCE if any(map(self._waits, self._screens)) else None):
                more = self._carry(key.data) if isinstance(key.data, Source) else key.data()
                if not more:
                    self._selector.unregister(key.fd)
            for target, screen in self._screens.items():
                if screen.keeps and not self._waits(target):
                    self._write(target, screen.release())
        for log in self._logs.values():
            log.close()

    def _waits(self, target: int) -> bool:
        """Whether the owner's unfinished line is still expected to go on."""
        return self._screens[target].keeps and time.monotonic() < self._last + _PATIENCE

    def _carry(self, source: Source) -> bool:
        try:
            data = os.read(source.fd, 65536)
        except OSError:  # how a terminal says that nobody has the other side
            data = b""
        screen, name = self._screens[source.target], f"{self._host}rank {self._names[source.local_rank]}"
        self.log(source.local_rank, data)
        if source.own:
            self._last = time.monotonic()
            whole = self._write(source.target, screen.own(data) if data else screen.release())
        else:
            whole = self._write(
                source.target, screen.other(source, name, data) if data else screen.finish(source, name)
            )
        if not whole or not data:
            os.close(source.fd)  # whoever writes more gets a broken pipe, as if it wrote there itself
            return False
        return True

    def _write(self, target: int, data: bytes) -> bool:
        while data:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:  # whoever made the pipe writes to it without waiting; we have time
                select.select([], [target], [])
            except OSError:
                return False
        return True


def _same(a: int, b: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(a), os.fstat(b))
    return False


def _open_logs(folder: str, name: str, ranks: int) -> dict[int, Any]:
    if not folder:
        return {}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return {rank: (Path(folder) / f"{name}{rank}.log").open("ab", buffering=0) for rank in range(ranks)}
    except OSError as error:
        raise UsageError(
            f"--log-dir {folder}: {error.filename} cannot be written ({os.strerror(error.errno or 0).lower()}). Name a "
            f"folder that can be made or is there, and that you may write to."
        ) from None


def _terminal_like(real: int) -> tuple[int, int]:
    """Make a terminal like the real one, so that the owner sees one; what it writes comes out unchanged."""
    ours, theirs = os.openpty()
    modes = termios.tcgetattr(real)
    modes[1] &= ~termios.OPOST  # the real terminal does this
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    _copy_size(ours, real)
    return ours, theirs


def _copy_size(fd: int, real: int = 1) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, fcntl.ioctl(real, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0)))
