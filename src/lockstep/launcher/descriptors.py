"""What a launcher needs of its file descriptors before it makes any."""

import os
import resource
import sys

from lockstep.errors import UsageError

# Pipes and connections of the process that starts the ranks, which has more of them than any rank: measured, and some.
_OWN, _EACH = 28, 16


def fill_closed() -> None:
    """Open nothing where a standard stream is closed, as some daemons and a shell's ``>&-`` leave it.

    The next file would get the stream's number, and what ranks print would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def make_room(ranks: int) -> None:
    """Let this process and those that it starts have as many open files as so many ranks need.

    Raises:
        UsageError: The system does not let it.
    """
    needed = _OWN + _EACH * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{ranks} ranks need {needed} open files in one process, and the limit (ulimit -n) is {hard}. Raise it, or "
            f"start at most {max(1, (hard - _OWN) // _EACH)} with -n."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
