"""What a launcher needs of the system before it starts anything: file descriptors and semaphores."""

import multiprocessing
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


def need_semaphores() -> None:
    """See whether there can be semaphores: python's multiprocessing, which starts the ranks, has them in /dev/shm.

    Raises:
        UsageError: There cannot.
    """
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        raise UsageError(
            f"no semaphore can be made ({error.strerror}), and python's multiprocessing, which starts the ranks, needs "
            f"them. They lie in /dev/shm: mount -t tmpfs tmpfs /dev/shm, or in Docker --shm-size=1g, and let this user "
            f"write there."
        ) from None
