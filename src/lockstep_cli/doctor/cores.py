"""Cores: those of the machine, those that this process may use, a container's share of time, NUMA nodes."""

import os
from pathlib import Path
from typing import NamedTuple

from lockstep_cli.doctor.inside import Inside
from lockstep_cli.doctor.line import Line, doubtful, fine

_NODES = Path("/sys/devices/system/node")


class Cores(NamedTuple):
    """What the kernel says.

    Attributes:
        machine: Cores of the machine (hardware threads).
        allowed: How many of them this process may use.
        numa: Cores of each NUMA node, as the kernel writes them; empty if unknown.
        threads: ``OMP_NUM_THREADS``, where it is set.
        load: How many processes of the machine wanted to compute, over the last minute.
    """

    machine: int
    allowed: int
    numa: tuple[str, ...] = ()
    threads: str = ""
    load: float = 0.0


def look() -> Cores:
    """Ask the kernel."""
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    lists = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    numa = tuple(text for text in (path.read_text().strip() for path in lists) if text)
    return Cores(machine, allowed, numa, os.environ.get("OMP_NUM_THREADS", ""), os.getloadavg()[0])


def judge(cores: Cores, inside: Inside) -> list[Line]:
    """Say what there is to compute with, and what `lockstep run` makes of it.

    Example:
        >>> judge(Cores(machine=64, allowed=1), Inside())[0].state
        'doubtful'
    """
    lines = [judge_share(cores, inside.quota)]
    if cores.load > cores.machine:
        remedy = (
            "Look with top at what else computes here: a run, and what is measured below, shares the cores with it."
        )
        lines.append(doubtful("load", f"{cores.load:.1f} processes want {cores.machine} cores", remedy))
    if len(cores.numa) > 1:
        lines.append(fine("NUMA", f"{len(cores.numa)} nodes: cores {' | '.join(cores.numa)}"))
    if (threads := judge_threads(cores)) is not None:
        lines.append(threads)
    if inside.run:
        lines.append(fine("lockstep run", inside.run.removeprefix("lockstep: ").removesuffix(" Another number: -n")))
    return lines


def judge_share(cores: Cores, quota: float | None) -> Line:
    """Say how much of the machine is this process's."""
    found = f"{cores.allowed} of {cores.machine}" if cores.allowed < cores.machine else f"{cores.machine}"
    if quota is not None and quota < cores.allowed:
        found += f"; time for {quota:g} in this container"
        if quota < 1:
            remedy = (
                "Give the container at least one whole core (docker run --cpus): ranks wait for each other's share."
            )
            return doubtful("cores", found, remedy)
    if cores.allowed == 1 and cores.machine > 1:
        remedy = "Ask for more, if they are yours: srun --cpus-per-task, or without taskset; all ranks share this one."
        return doubtful("cores", found, remedy)
    return fine("cores", found)


def judge_threads(cores: Cores) -> Line | None:
    """Say when somebody has set more threads than there are cores."""
    first = cores.threads.split(",")[0]
    if not first.isdecimal() or int(first) <= cores.allowed:
        return None
    remedy = "Unset it, and each rank gets its share of the cores."
    return doubtful(
        "threads", f"OMP_NUM_THREADS={cores.threads} on {cores.allowed} core{'s' * (cores.allowed > 1)}", remedy
    )
