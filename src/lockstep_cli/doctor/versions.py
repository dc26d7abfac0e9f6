"""Versions of lockstep, Python and torch, and whether torch can be imported at all."""

import platform
import sys
from importlib import metadata

from lockstep_cli.doctor.inside import Inside
from lockstep_cli.doctor.line import Line, broken, fine

OLDEST_TORCH = (2, 9)


def look() -> tuple[str, str, str]:
    """Lockstep's version, Python's and where it is."""
    return metadata.version("lockstep-torch"), platform.python_version(), sys.executable


def judge(facts: tuple[str, str, str], inside: Inside) -> list[Line]:
    """Say what is installed.

    Example:
        >>> [line.state for line in judge(("0.1.0", "3.11.2", "/usr/bin/python"), Inside(torch="2.4.1"))]
        ['fine', 'fine', 'broken']
    """
    lockstep, python, where = facts
    return [fine("lockstep", lockstep), fine("python", f"{python}, {where}"), judge_torch(inside)]


def judge_torch(inside: Inside) -> Line:
    """Say whether there is a torch that can be used."""
    if inside.trouble:
        remedy = (
            "Install torch again in this environment (pip install --force-reinstall torch) and look for this error."
        )
        return broken("torch", f"torch and lockstep cannot be imported: {inside.trouble}", remedy)
    numbers = tuple(int(part) for part in inside.torch.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        return broken("torch", inside.torch, f"Install torch {wanted} or newer, which lockstep needs.")
    return fine("torch", f"{inside.torch}, built {f'for CUDA {inside.cuda}' if inside.cuda else 'without CUDA'}")
