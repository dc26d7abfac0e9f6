"""How many files a process may have open. Every rank, worker and tensor on its way between processes takes some."""

import resource
from typing import NamedTuple

from lockstep_cli.doctor.line import Line, broken, doubtful, fine

_LEAST = 256
_ENOUGH = 4096


class Files(NamedTuple):
    """The limit that holds, and up to where a process may raise it; -1 for none."""

    soft: int
    hard: int


def look() -> Files:
    """Ask the kernel."""
    return Files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge(files: Files) -> Line:
    """Say whether that is enough.

    Example:
        >>> judge(Files(1024, 524288)).remedy
        'Write ulimit -n 65536 before the run: workers hand over each tensor of a batch as an open file.'
    """
    if files.soft == -1 or files.soft >= _ENOUGH:
        return fine("open files", "no limit" if files.soft == -1 else f"{files.soft:,} a process")
    within = 65536 if files.hard == -1 else min(65536, files.hard)
    if within >= _ENOUGH:
        remedy = f"Write ulimit -n {within} before the run: workers hand over each tensor of a batch as an open file."
    else:
        remedy = "Raise the hard limit too: nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536."
    found = f"{files.soft:,} a process, may be raised to {'any number' if files.hard == -1 else f'{files.hard:,}'}"
    return (broken if files.soft < _LEAST else doubtful)("open files", found, remedy)
