"""GPUs: those that the driver has, those that torch can use, and who else is on them."""

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from lockstep_cli.doctor.inside import Inside
from lockstep_cli.doctor.line import Line, broken, doubtful, fine

_DRIVER = Path("/proc/driver/nvidia")
_IN_USE = 0.1
"""Memory in use, as a share, from which on somebody else is taken to compute there."""


class Driver(NamedTuple):
    """What NVIDIA's driver says, without torch.

    Attributes:
        version: Its version; empty without a driver.
        gpus: GPUs that it has.
        visible: ``CUDA_VISIBLE_DEVICES``, where it is set.
        memory: Bytes in use and bytes in all, of each GPU; empty if unknown.
    """

    version: str = ""
    gpus: int = 0
    visible: str | None = None
    memory: tuple[tuple[int, int], ...] = ()


def look() -> Driver:
    """Ask the driver."""
    version, gpus = "", 0
    with contextlib.suppress(OSError):
        version = read_version((_DRIVER / "version").read_text())
        gpus = len(list((_DRIVER / "gpus").iterdir()))
    return Driver(version, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), _memory() if gpus else ())


def _memory() -> tuple[tuple[int, int], ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return read_memory(done.stdout)


def read_version(text: str) -> str:
    """Find the version in what the driver says of itself.

    Example:
        >>> read_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024")
        '550.54.15'
    """
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""


def read_memory(text: str) -> tuple[tuple[int, int], ...]:
    r"""Read a table of used and whole memory in MiB; rows that are not numbers count as none in use.

    Example:
        >>> read_memory("1, 2\n[N/A], [N/A]\n")
        ((1048576, 2097152), (0, 0))
    """
    rows = [[part.strip() for part in row.split(",")] for row in text.splitlines() if row.strip()]
    return tuple(
        (int(row[0]) << 20, int(row[1]) << 20) if len(row) == 2 and all(map(str.isdecimal, row)) else (0, 0)
        for row in rows
    )


def judge(driver: Driver, inside: Inside) -> list[Line]:
    """Say what there is to compute on.

    Example:
        >>> judge(Driver(), Inside(torch="2.13.0"))[0].found
        'none; training runs on the CPU'
    """
    lines = [judge_gpus(driver, inside)]
    if driver.version:
        newest = f", for CUDA up to {inside.driver}" if inside.driver else ""
        lines.append(fine("CUDA driver", f"{driver.version}{newest}"))
    busy = [n for n, (used, whole) in enumerate(driver.memory) if whole and used / whole > _IN_USE]
    if busy:
        shares = ", ".join(f"GPU {n}: {driver.memory[n][0] / driver.memory[n][1]:.0%}" for n in busy)
        remedy = (
            "Look with nvidia-smi whose processes these are, and end them or choose others by CUDA_VISIBLE_DEVICES."
        )
        lines.append(doubtful("GPU memory", f"already in use on {shares}", remedy))
    return lines


def judge_gpus(driver: Driver, inside: Inside) -> Line:
    """Compare what torch can use with what the driver has."""
    has, sees = driver.gpus, len(inside.gpus)
    if not has and not sees:
        return fine("GPUs", "none; training runs on the CPU")
    if not sees:
        return _unseen(driver, inside)
    kinds = sorted(set(inside.gpus))
    found = ", ".join(f"{inside.gpus.count(kind)} x {kind}" for kind in kinds)
    if sees < has and driver.visible is None:
        remedy = "Look into nvidia-smi and dmesg for what the others are missing."
        return doubtful("GPUs", f"{found}; the driver has {has}", remedy)
    if len(kinds) > 1:
        remedy = "Train on those of one kind (CUDA_VISIBLE_DEVICES), or know that all wait for the slowest."
        return doubtful("GPUs", found, remedy)
    hidden = f"; CUDA_VISIBLE_DEVICES={driver.visible}" if driver.visible is not None else ""
    return fine("GPUs", found + hidden)


def _unseen(driver: Driver, inside: Inside) -> Line:
    found = f"{driver.gpus}, but torch can use none"
    if driver.visible in ("", "-1"):
        remedy = "Unset it to train on GPUs."
        return doubtful("GPUs", f"{found}: CUDA_VISIBLE_DEVICES={driver.visible}", remedy)
    if inside.torch and not inside.cuda:
        remedy = "Install a torch that is built for CUDA; pytorch.org/get-started has the command."
        return broken("GPUs", f"{found}: it is built without CUDA", remedy)
    wanted = f"for CUDA {inside.cuda} or newer" if inside.cuda else "that fits torch"
    remedy = f"Install a driver {wanted}, or a torch built for an older CUDA."
    return broken("GPUs", f"{found}: {inside.complaint or inside.trouble or 'CUDA does not start'}", remedy)
