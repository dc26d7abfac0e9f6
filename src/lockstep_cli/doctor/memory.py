"""Free memory, and a container's limit."""

import contextlib
from pathlib import Path
from typing import NamedTuple

from lockstep_cli.doctor.line import Line, broken, doubtful, fine, size

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_LEAST = 2**29
_ENOUGH = 2**31


class Memory(NamedTuple):
    """Bytes.

    Attributes:
        whole: Of the machine.
        available: That can be had without swapping.
        limit: A container's limit; None without.
        used: What the container uses of it.
    """

    whole: int
    available: int
    limit: int | None = None
    used: int = 0


def look() -> Memory:
    """Ask the kernel."""
    import psutil  # type: ignore[import-untyped]

    now = psutil.virtual_memory()
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            return Memory(now.total, now.available, int(Path(limit).read_text()), int(Path(used).read_text()))
    return Memory(now.total, now.available)


def judge(memory: Memory) -> Line:
    """Say whether ranks fit: each takes about 300 MB for torch alone.

    Example:
        >>> judge(Memory(whole=2**36, available=2**35, limit=2**32, used=2**31)).found
        '4.0 GiB in this container, 2.0 GiB free'
    """
    whole, free, where = memory.whole, memory.available, ""
    if memory.limit is not None and memory.limit < whole:  # cgroup 1 writes a huge number for no limit
        whole, free, where = memory.limit, min(free, memory.limit - memory.used), " in this container"
    found = f"{size(whole)}{where}, {size(max(0, free))} free"
    if free >= _ENOUGH:
        return fine("memory", found)
    more = "Give the container more (docker run --memory)" if where else "End other programs"
    remedy = f"{more}, or start fewer ranks (-n): each takes about 300 MB before it holds anything."
    return (broken if free < _LEAST else doubtful)("memory", found, remedy)
