"""What two ranks run to measure backends: ``lockstep run -n 2 -m lockstep_cli.doctor.measure FOLDER BACKEND...``.

Each leaves a file in the folder, named by its rank; - stands for standard output.
"""

import contextlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SMALL, _LARGE = 4, 16 * 2**20
TIMEOUT = 15.0
"""Seconds that ranks wait for each other."""

Row = dict[str, str | float]


def main(folder: str, backends: list[str]) -> None:
    """Measure one backend after the other; a row is on disk before the next begins."""
    for backend in backends:
        row = try_backend(backend)
        with contextlib.nullcontext(sys.stdout) if folder == "-" else _file(folder).open("a") as file:
            file.write(json.dumps(row) + "\n")


def try_backend(backend: str) -> Row:
    """Measure a backend, or say what went wrong: the fields of a `speed.Speed`."""
    try:
        latency, bandwidth = measure(backend)
    except Exception as error:
        traceback.print_exc()
        return {"backend": backend, "latency": 0.0, "bandwidth": 0.0, "trouble": in_one_line(error)}
    return {"backend": backend, "latency": latency, "bandwidth": bandwidth, "trouble": ""}


def _file(folder: str) -> Path:
    return Path(folder) / os.environ["RANK"]


def measure(backend: str) -> tuple[float, float]:
    """Measure all_reduce: microseconds for few bytes, GB/s for many."""
    import torch
    import torch.distributed as dist

    import lockstep

    world = lockstep.init(device="cuda" if backend == "nccl" else "cpu", backend=backend, timeout=TIMEOUT)
    try:
        wait: Callable[[], Any] = torch.cuda.synchronize if backend == "nccl" else lambda: None
        small = torch.ones(_SMALL // 4, device=world.device)
        large = torch.ones(_LARGE // 4, device=world.device)
        latency = _median(lambda: dist.all_reduce(small), wait, 300)
        bandwidth = _LARGE / _median(lambda: dist.all_reduce(large), wait, 7)
        return latency * 1e6, bandwidth / 1e9
    finally:
        dist.destroy_process_group()


def _median(call: Callable[[], Any], wait: Callable[[], Any], times: int) -> float:
    """Seconds for one call, after a few that warm up."""
    seconds = []
    for turn in range(times + times // 5 + 1):
        begin = time.perf_counter()
        call()
        wait()
        if turn > times // 5:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def in_one_line(error: Exception) -> str:
    r"""An exception's name and the first line of what it says.

    Example:
        >>> in_one_line(ValueError("no\nmore of this"))
        'ValueError: no'
    """
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
