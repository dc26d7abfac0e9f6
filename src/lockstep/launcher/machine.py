"""What this node has: cores by shared cache, a container's limit, GPUs."""

import os
from collections.abc import Callable
from pathlib import Path

from lockstep.launcher.plan import Machine

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def look(count: Callable[[], int] | None = None) -> Machine:
    """Look at this node; ``count`` counts its GPUs, by default in a way that leaves this process fit to fork."""
    return Machine(gpus=(count or count_gpus)(), groups=core_groups(os.sched_getaffinity(0)), quota=read_quota())


def core_groups(allowed: set[int]) -> tuple[tuple[int, ...], ...]:
    """Put cores that share their last-level cache together; all in one group where the kernel does not say."""
    groups: dict[str, list[int]] = {}
    for core in sorted(allowed):
        caches = sorted(
            (_CPUS / f"cpu{core}" / "cache").glob("index[0-9]*"), key=lambda folder: _read(folder / "level")
        )
        groups.setdefault(_read(caches[-1] / "shared_cpu_list") if caches else "", []).append(core)
    return tuple(map(tuple, groups.values()))


def read_quota() -> float | None:
    """Read how many processors' worth of time a container may use, from cgroup 2 or 1."""
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(_CGROUP / "cpu/cpu.cfs_quota_us"), _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if not quota.isdecimal() or not period.isdecimal():  # "max", -1 or no such file: no limit
        return None
    return int(quota) / int(period)


def count_gpus() -> int:
    """Count the GPUs that torch can use, in a process of its own: one that has asked CUDA must not fork ranks."""
    if not Path("/proc/driver/nvidia/gpus").exists() and not Path("/dev/nvidia0").exists():
        return 0
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0
        try:
            import torch

            count = torch.cuda.device_count()
        finally:
            os.write(theirs, str(count).encode())
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return int(text or 0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
