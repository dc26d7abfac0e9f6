"""How quickly two ranks talk, measured for each backend by a short `lockstep run`."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep_cli.doctor.inside import Inside, ask
from lockstep_cli.doctor.line import Line, broken, doubtful, fine

_PATIENCE = 30.0

SLOW = {"shm": (500.0, 0.2), "gloo": (5000.0, 0.1), "nccl": (500.0, 2.0)}
"""From how many microseconds, and below how many GB/s, a backend is doubtful: far worse than on ordinary machines."""

REMEDIES = {
    "shm": "Measure again while nothing else runs, and give two ranks two cores of their own (taskset, --cpus).",
    "gloo": "Measure again while nothing else runs; CPU ranks of one machine use shm where they can.",
    "nccl": "Look at nvidia-smi topo -m for how the GPUs are joined, and set NCCL_DEBUG=INFO to see what NCCL uses.",
}


class Speed(NamedTuple):
    """What two ranks measured.

    Attributes:
        backend: Which one.
        latency: Microseconds for an all_reduce of 4 bytes; the median.
        bandwidth: GB/s for an all_reduce of 16 MiB, its bytes by its time; the median.
        trouble: What went wrong instead.
    """

    backend: str
    latency: float = 0.0
    bandwidth: float = 0.0
    trouble: str = ""


def choose(inside: Inside, meet: bool) -> list[str]:
    """Which backends can be measured here; nccl last, since it is the one that hangs.

    Args:
        inside: What torch has.
        meet: Whether ranks can meet at all, which they do on loopback.

    Example:
        >>> choose(Inside(torch="2.13.0", gloo=True), meet=True), choose(Inside(trouble="no torch"), meet=True)
        (['shm', 'gloo'], [])
    """
    if inside.trouble or not inside.gloo or not meet:
        return []
    return [*(["shm"] if not inside.shm else []), "gloo", *(["nccl"] if inside.nccl and len(inside.gpus) > 1 else [])]


def look(backends: list[str]) -> list[Speed]:
    """Start two ranks and collect what they leave in a private folder."""
    if not backends:
        return []
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        code, errors = _run(folder, backends)
        left = [[json.loads(line) for line in _lines(Path(folder) / f"{rank}")] for rank in range(2)]
    return understand(backends, left, code, errors)


def _run(folder: str, backends: list[str]) -> tuple[int, str]:
    run = ("run", "--standalone", "-n", "2", "-m", "lockstep_cli.doctor.measure", folder, *backends)
    code, _, errors = ask(_PATIENCE, "from lockstep_cli import main; main()", *run)
    return code, errors


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def understand(backends: list[str], left: list[list[Mapping[str, Any]]], code: int, errors: str) -> list[Speed]:
    """Put together what both ranks have left; the first rank's trouble counts.

    Args:
        backends: What was asked for.
        left: For each rank, what it wrote after each backend.
        code: How the run ended.
        errors: What it printed on the way.

    Example:
        >>> understand(["gloo"], [[{"backend": "gloo", "latency": 9.0, "bandwidth": 2.0, "trouble": ""}], []], 0, "")
        [Speed(backend='gloo', latency=9.0, bandwidth=2.0, trouble='')]
        >>> understand(["gloo"], [[], []], 1, "ValueError: no")
        [Speed(backend='gloo', latency=0.0, bandwidth=0.0, trouble='ValueError: no')]
    """
    speeds = []
    for backend in backends:
        rows = [Speed(**row) for rank in left for row in rank if row["backend"] == backend]
        said = [line for line in errors.strip().splitlines() if line.strip()]
        ended = Speed(backend, trouble=said[-1] if said and code else f"the ranks ended with code {code}")
        speeds.append(next((row for row in rows if row.trouble), rows[0] if rows else ended))
    return speeds


def judge(speeds: list[Speed]) -> list[Line]:
    """Say how quickly two ranks talk.

    Example:
        >>> judge([Speed("shm", 7.2, 4.5)])[0].found
        '7.2 µs for 4 bytes, 4.5 GB/s'
    """
    return [judge_one(speed) for speed in speeds]


def judge_one(speed: Speed) -> Line:
    """Compare with what ordinary machines do."""
    about = f"2 ranks, {speed.backend}"
    if speed.trouble:
        remedy = f"Look at the whole of it: lockstep run -n 2 -m lockstep_cli.doctor.measure - {speed.backend}."
        return broken(about, speed.trouble, remedy)
    if not within(speed, SLOW[speed.backend]):
        return doubtful(about, show(speed), REMEDIES[speed.backend])
    return fine(about, show(speed))


def show(speed: Speed) -> str:
    """A measurement in words.

    Example:
        >>> show(Speed("gloo", 136.4, 1.1))
        '136 µs for 4 bytes, 1.1 GB/s'
    """
    return f"{speed.latency:,.{1 if speed.latency < 100 else 0}f} µs for 4 bytes, {speed.bandwidth:.2g} GB/s"


def within(speed: Speed, slow: tuple[float, float]) -> bool:
    """Whether it is better than these microseconds and GB/s."""
    latency, bandwidth = slow
    return speed.latency <= latency and speed.bandwidth >= bandwidth
