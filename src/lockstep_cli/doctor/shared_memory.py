"""Room in /dev/shm, where loader workers hand over batches and NCCL its buffers."""

import os
from typing import NamedTuple

from lockstep_cli.doctor.line import Line, broken, doubtful, fine, size

_WHERE = "/dev/shm"  # noqa: S108
_DOCKER = 64 * 2**20
_ENOUGH = 2**30


class Room(NamedTuple):
    """Bytes in all and bytes free; None where there is no /dev/shm."""

    whole: int
    free: int


def look() -> Room | None:
    """Ask the file system."""
    try:
        found = os.statvfs(_WHERE)
    except OSError:
        return None
    return Room(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def judge(room: Room | None) -> Line:
    """Say whether batches fit: 128 colour images of 224 x 224 pixels are 77 MB.

    Example:
        >>> judge(Room(64 * 2**20, 64 * 2**20)).state
        'broken'
    """
    if room is None:
        return broken(_WHERE, "not there", f"Mount it: mount -t tmpfs -o size=8g tmpfs {_WHERE}.")
    found = f"{size(room.whole)}, {size(room.free)} free"
    too_little = f"{found}: less than one batch of images; loader workers end with a bus error"
    if room.whole <= _DOCKER:
        remedy = (
            "Start the container with --shm-size=8g or --ipc=host; in Kubernetes, mount an emptyDir of medium Memory."
        )
        return broken(_WHERE, too_little, remedy)
    if room.free <= _DOCKER:
        return broken(_WHERE, too_little, f"Delete what runs that have ended left there (ls -l {_WHERE}).")
    if room.free < _ENOUGH:
        remedy = (
            f"Make it larger before you use many loader workers: mount -o remount,size=8g {_WHERE}, or --shm-size=8g."
        )
        return doubtful(_WHERE, found, remedy)
    return fine(_WHERE, found)
