"""The shared segment: made by rank 0, mapped by all, without ever having a name.

Rank 0 makes it with ``memfd_create``; the others open it through ``/proc`` while rank 0 keeps it open, which asks the
kernel for the same permission as reading that process's memory. There is no file to leave behind, whatever is killed
when, and the size of /dev/shm does not matter. All pages are taken at once: a machine without room says so here and not
by a SIGBUS in the middle of an epoch.
"""

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lockstep.errors import LateRankError, LostRankError, UsageError

try:
    from lockstep.shm import _core
except ImportError:  # not Linux, or installed without a C compiler
    _core = None  # type: ignore[assignment]

CHUNK = 256 * 1024
"""Bytes that a rank shows at once: two of them, and a peer's, stay in a core's second cache.

From 64 KiB to 2 MiB it makes a difference of a tenth.
"""

CHANNELS = 256 * 1024
"""Bytes of all rings for messages from one rank together, about."""

MOST_RANKS = 256


@dataclass(frozen=True)
class Meeting:
    """What a rank knows once all have met.

    Attributes:
        core: The segment.
        pids: Every rank's process.
        watch: A pidfd for every peer (-1 for this rank), to be closed.
        channel: Bytes of one ring.
    """

    core: "_core.Segment"
    pids: tuple[int, ...]
    watch: tuple[int, ...]
    channel: int


def available() -> str:
    """Say why this process cannot use shared memory; an empty string if it can.

    Example:
        >>> available()
        ''
    """
    if sys.platform != "linux":
        return f"shared memory between ranks needs Linux, this is {sys.platform}"
    if _core is None:
        return "lockstep was installed without its C part; install it again with a C compiler"
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        return "this Python was built without pidfd_open or memfd_create"
    return ""


def ring_bytes(size: int) -> int:
    """Bytes of the ring for one ordered pair of ranks: a power of two.

    Example:
        >>> ring_bytes(2), ring_bytes(4), ring_bytes(200)
        (131072, 65536, 4096)
    """
    return max(4096, 1 << (CHANNELS // size).bit_length() - 1)


def create(store: Store, rank: int, size: int, timeout: float) -> Meeting:
    """Meet the other ranks and share a segment with them.

    Args:
        store: Where they meet; the keys are this group's alone.
        rank: This rank within the group.
        size: Ranks in the group, 256 at most.
        timeout: Seconds to wait for the others.

    Raises:
        UsageError: The ranks cannot share memory; the same on all of them, with the reason.
        LateRankError: A rank did not come.
        LostRankError: A rank died while the others were waiting for it here.
    """
    table = _Table(store, rank, size, timeout)
    table.put("here", {"pid": os.getpid(), "place": _place(), "trouble": available() or _too_many(size)})
    here = [table.get(f"here/{peer}", peer) for peer in range(size)]
    trouble = next((row["trouble"] for row in here if row["trouble"]), "") or _apart([row["place"] for row in here])
    if trouble:
        raise _unusable(trouble)
    table.pids = tuple(row["pid"] for row in here)
    with contextlib.ExitStack() as opened:
        descriptors = _Descriptors(opened)
        channel = ring_bytes(size)
        own, mine = -1, {"trouble": "", "fd": -1}
        if rank == 0:
            own, mine = _attempt(lambda: room_for(_core.segment_bytes(size, CHUNK, channel)), descriptors)
            table.put("made", mine)
        made = table.get("made/0", 0)
        if made["trouble"]:
            raise _unusable(made["trouble"])
        fd, seen = (own, mine) if rank == 0 else _attempt(lambda: _open(table.pids[0], made["fd"]), descriptors)
        watch, watching = _watch(table.pids, rank, descriptors)
        table.put("mapped", {"trouble": seen["trouble"] or watching})
        table.raise_first_trouble("mapped")
        core, trouble = None, ""
        try:
            core = _core.Segment(fd, rank, size, CHUNK, channel, watch)
        except OSError as error:
            trouble = f"{error.strerror} (no room to map the segment)"
        table.put("ready", {"trouble": trouble})  # rank 0 keeps its descriptor until all have mapped
        table.raise_first_trouble("ready")
        assert core is not None
        descriptors.keep(watch)
        return Meeting(core, table.pids, watch, channel)


def _unusable(reason: str) -> UsageError:
    return UsageError(
        f"the shm backend cannot be used here: {reason}. Use gloo instead; lockstep.init() does so by itself."
    )


def _too_many(size: int) -> str:
    return f"{size} ranks are more than {MOST_RANKS}" if size > MOST_RANKS else ""


def _place() -> str:
    """What two processes must have in common: the running system, and the table of process numbers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError as error:
        return f"{os.uname().nodename}: {error}"


def _apart(places: list[str]) -> str:
    other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
    return "" if other is None else f"ranks 0 and {other} run on different machines or in different containers"


def room_for(size: int) -> int:
    """Make a file without a name that others can map: its descriptor. All pages are taken; it stays as large as it is.

    Raises:
        OSError: There is no room.
    """
    fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_of(pid: int, fd: int) -> str:
    """Where a process's descriptor can be opened by another."""
    return f"/proc/{pid}/fd/{fd}"


def _open(pid: int, fd: int) -> int:
    return os.open(open_of(pid, fd), os.O_RDWR | os.O_CLOEXEC)


class _Descriptors:
    """File descriptors that are closed at the end unless they are kept."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._open: set[int] = set()
        stack.callback(self._close)

    def add(self, fd: int) -> int:
        self._open.add(fd)
        return fd

    def keep(self, fds: tuple[int, ...]) -> None:
        self._open -= set(fds)

    def _close(self) -> None:
        for fd in self._open:
            os.close(fd)


def _attempt(act: Callable[[], int], descriptors: _Descriptors) -> tuple[int, dict[str, object]]:
    """A descriptor, and what the others are told about it."""
    try:
        fd = descriptors.add(act())
    except OSError as error:
        return -1, {"trouble": f"{error.strerror} ({error.filename or 'no room for the segment'})", "fd": -1}
    return fd, {"trouble": "", "fd": fd}


def _watch(pids: tuple[int, ...], rank: int, descriptors: _Descriptors) -> tuple[tuple[int, ...], str]:
    try:
        return tuple(-1 if peer == rank else descriptors.add(os.pidfd_open(pid)) for peer, pid in enumerate(pids)), ""
    except OSError as error:
        return (), f"the processes of the other ranks cannot be watched ({error.strerror})"


def _has_ended(pid: int) -> bool:
    """Whether a process has ended, though whoever started it may not have asked for its status yet."""
    import psutil  # type: ignore[import-untyped]

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


class _Table:
    """Rows that the ranks show each other through the store; waiting for one ends if its rank dies."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._deadline = time.monotonic() + timeout
        self.pids: tuple[int, ...] = ()

    def put(self, name: str, row: dict[str, object]) -> None:
        self._store.set(f"{name}/{self._rank}", json.dumps(row))

    def get(self, key: str, peer: int) -> dict[str, Any]:  # values as written by put
        pause = 0.0005
        try:
            while not self._store.check([key]):
                self._give_up(key, peer)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            row: dict[str, Any] = json.loads(self._store.get(key))
        except dist.DistError as error:
            raise LostRankError(
                f"rank {self._rank} of {self._size}: the store where the ranks meet is gone while rank {peer} was "
                f"waited for ({error}). Rank 0 keeps it; look for its own error first."
            ) from error
        return row

    def raise_first_trouble(self, name: str) -> None:
        rows = [self.get(f"{name}/{peer}", peer) for peer in range(self._size)]
        trouble = next((f"rank {peer}: {row['trouble']}" for peer, row in enumerate(rows) if row["trouble"]), "")
        if trouble:
            raise _unusable(trouble)

    def _give_up(self, key: str, peer: int) -> None:
        if self.pids and peer != self._rank and _has_ended(self.pids[peer]):
            raise LostRankError(
                f"rank {self._rank} of {self._size}: rank {peer} (pid {self.pids[peer]}) died while the ranks were "
                f"making their shared segment. Look for its own error first."
            )
        if time.monotonic() > self._deadline:
            raise LateRankError(
                f"rank {self._rank} of {self._size}: rank {peer} did not come to the shm group within "
                f"{self._timeout:g} s (waiting for {key!r}). Look for its own error first; a rank that needs "
                f"longer to start needs a larger timeout."
            )
