"""Nobody outlives the launcher.

Three processes guard one another. The front (what the user started) and the agent below it are both subreapers:
whoever loses its parent among the ranks' own children is handed to them, so that a walk over descendants finds
everybody, also what has left its session. If the agent dies, the front ends the rest; if the front dies, the agent
sees its control pipe close and does so. Ranks ask the kernel to kill them when the agent dies, which holds even where
both were killed at once.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from multiprocessing import resource_tracker
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that happens."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def descendants(root: int) -> set[int]:
    """Every living process below ``root``; one that has ended and waits to be reaped is not living."""
    children: dict[int, list[int]] = {}
    ended = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended while we looked
                # The name in parentheses may hold anything, spaces and parentheses too.
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(folder.name))
                if state in "ZX":
                    ended.add(int(folder.name))
    found: set[int] = set()
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found - ended


_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_CLEANERS_TIME = 2.0


def kill_descendants(root: int, spare: Collection[int] = (), seconds: float = 5.0) -> set[int]:
    """Kill every process below ``root`` but those in ``spare``, again and again until none is left.

    Those that only wait to remove what the others leave in /dev/shm get a moment to do so, and end by themselves.

    Returns:
        Who could not be killed in time: processes that hang inside the kernel.
    """
    start = time.monotonic()
    while left := descendants(root) - set(spare):
        patient = time.monotonic() < start + _CLEANERS_TIME
        for pid in left:
            if not (patient and _cleans_up(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > start + seconds:
            return left
        time.sleep(0.005)
    return set()


def _cleans_up(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)


def reap(spare: Collection[int] = ()) -> None:
    """Collect the exit status of adopted children that have ended, but of none in ``spare``, which others wait for."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in map(int, (task / "children").read_text().split()):
                if pid not in spare:
                    os.waitpid(pid, os.WNOHANG)


def tracker() -> set[int]:
    """Give the one helper that multiprocessing starts for ``spawn``, which lives as long as the launcher."""
    return {pid for pid in [getattr(resource_tracker._resource_tracker, "_pid", None)] if pid}
