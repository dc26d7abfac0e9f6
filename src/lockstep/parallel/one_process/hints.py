"""Lines that a user reads once per process."""

import functools
import sys


@functools.cache
def say_once(line: str) -> None:
    """Write a line to stderr the first time it is said in this process."""
    sys.stderr.write(f"lockstep: {line}\n")
