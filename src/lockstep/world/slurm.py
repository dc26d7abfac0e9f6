"""What Slurm's variables say about hosts. Pure."""

import re

from lockstep.errors import UsageError

_PART = re.compile(r"([^\[,]*)(?:\[([^\]]*)\])?")


def first_host(nodelist: str) -> str:
    """Give the first host of a node list as Slurm writes it.

    Args:
        nodelist: The value of ``SLURM_STEP_NODELIST`` or ``SLURM_JOB_NODELIST``.

    Raises:
        UsageError: It is not such a list.

    Example:
        >>> first_host("gpu[007-009,12]-ib,login1"), first_host("a1,a2")
        ('gpu007-ib', 'a1')
    """
    host, position = "", 0
    while position < len(nodelist) and nodelist[position] != ",":
        part = _PART.match(nodelist, position)
        if part is None or part.end() == position:
            break
        prefix, ranges = part.groups()
        host += prefix + (re.split("[-,]", ranges)[0] if ranges else "")
        position = part.end()
    whole = position == len(nodelist) or nodelist[position] == ","
    if not whole or not host or "]" in host:
        raise UsageError(
            f"{nodelist!r} is not a Slurm node list such as 'gpu[01-04]'. Set MASTER_ADDR to rank 0's host."
        )
    return host


def port_of_job(job: str, step: str = "") -> int:
    """Give a port that the ranks of one job step agree on, that others on the same hosts rarely share.

    It lies below the range that Linux hands out by itself (from 32768), so no stranger sits on it by accident.
    Jobs that start one after the other have numbers one apart, so the steps of one lie further apart.

    Example:
        >>> port_of_job("123456"), port_of_job("123456", "1")
        (18456, 19453)
    """
    number, of_step = (int(re.sub(r"\D", "", text) or 0) for text in (job, step))
    return 15000 + (number + 997 * of_step) % 15000
