"""What every benchmark needs: an environment with the tools to compare with, alternating runs, medians."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def with_peers() -> None:
    """Go on in `.venv-bench`, which has lockstep and the tools it is compared with; make it if need be."""
    folder = ROOT / ".venv-bench"
    python, ready = folder / "bin" / "python", folder / "ready"
    if Path(sys.prefix).resolve() == folder.resolve():
        return
    wanted = "".join((ROOT / name).read_text() for name in ("requirements.txt", "benchmarks/requirements.txt"))
    if not ready.exists() or ready.read_text() != wanted:
        print("benchmarks: installing the tools to compare with into .venv-bench", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", ROOT / "requirements.txt", "-r", HERE / "requirements.txt"], check=True)
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", "-e", ROOT], check=True)
        ready.write_text(wanted)
    os.execv(python, [str(python), *sys.argv])


def alternate(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call every case once a round, in turn, after one round that does not count; each gives its own measurement."""
    rows: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            value = case()
            if number:
                rows[name].append(value)
    return rows


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def machine() -> str:
    """The machine, torch and the commit, in one line."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    import torch

    return f"{model}, {os.cpu_count()} cores; torch {torch.__version__}; commit {commit.stdout.strip() or 'unknown'}"


def keep(name: str, rows: object) -> None:
    """Keep the raw rows beside the benchmark, with the machine's name."""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
