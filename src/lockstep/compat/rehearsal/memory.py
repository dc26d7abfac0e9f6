"""Memory statistics: those of this process, since its memory is where the tensors are."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.compat.rehearsal.devices import Devices
from lockstep.compat.rehearsal.entry import Entry

_STATUS = Path("/proc/self/status")


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return read_status(_STATUS.read_text(), "VmRSS")


def peak() -> int:
    """The most bytes of this process that were in memory at once, since it began or since `forget_peak`."""
    return read_status(_STATUS.read_text(), "VmHWM")


def forget_peak() -> None:
    """Count the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def installed() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_status(text: str, field: str) -> int:
    r"""Read one field of ``/proc/self/status`` in bytes.

    Example:
        >>> read_status("Name:\tpython\nVmHWM:\t    2048 kB\n", "VmHWM")
        2097152
    """
    line = next((line for line in text.splitlines() if line.startswith(f"{field}:")), "0 0")
    return int(line.split()[1]) * 1024


def entries(devices: Devices) -> list[Entry]:
    """What ``torch.cuda`` says of memory; the rest of it asks ``memory_stats``."""

    def of_device(answer: Callable[[], Any]) -> Callable[..., Any]:
        def ask(device: Any = None, *_: Any, **__: Any) -> Any:
            devices.cuda(device)
            return answer()

        return ask

    def free_and_all() -> tuple[int, int]:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), installed()

    def statistics() -> dict[str, int]:
        kinds = {"current": resident(), "peak": peak()}
        return {
            f"{what}_bytes.all.{kind}": value
            for what in ("allocated", "reserved", "active")
            for kind, value in kinds.items()
        }

    def summary() -> str:
        return f"rehearsal on CPU: {resident() / 2**20:.0f} MiB in memory now, {peak() / 2**20:.0f} MiB at most\n"

    def nothing() -> None:
        pass

    answers: dict[str, Callable[[], Any]] = {
        "reset_peak_memory_stats": forget_peak,
        "reset_accumulated_memory_stats": nothing,
        "mem_get_info": free_and_all,
        "memory_stats": statistics,
        "memory_summary": summary,
        "memory_snapshot": list,
        "list_gpu_processes": lambda: f"GPU: this is process {os.getpid()}, on CPU",
    }
    calls = {name: of_device(answer) for name, answer in answers.items()}

    def set_fraction(fraction: float, device: Any = None) -> None:  # noqa: ARG001
        devices.cuda(device)

    calls["set_per_process_memory_fraction"] = set_fraction
    return [Entry(owner, name, call) for owner in ("torch.cuda", "torch.cuda.memory") for name, call in calls.items()]
