"""Tensors that every rank of a group has mapped: they are summed where they lie, with nothing copied in or out.

Each rank makes its own and opens the others', as it opened the group's segment: files without a name, which only the
kernel's permission to read the maker's memory gives access to, and which are gone with the last who has them.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.shm.segment import open_of, room_for

if TYPE_CHECKING:
    from lockstep.shm.backend import SharedMemoryGroup


@dataclass(frozen=True)
class Placed:
    """A flat tensor of this rank that the others see, and theirs.

    Attributes:
        own: This rank's, zeros at first.
        everyone: All ranks', by rank.
        number: Which of the group's it is, from 1 on; the same on all ranks.
    """

    own: Tensor
    everyone: tuple[Tensor, ...]
    number: int

    @property
    def homes(self) -> tuple[int, ...]:
        """Where they lie, in this process."""
        return tuple(x.data_ptr() for x in self.everyone)


def place(group: "SharedMemoryGroup", count: int, dtype: torch.dtype) -> Placed | None:
    """Make a tensor that all ranks see, on every rank at once; None, on all of them, if one has no room.

    Args:
        group: Its ranks; all of them call this, in the same order among the group's collectives.
        count: Elements, the same on all ranks.
        dtype: The same on all ranks.
    """
    own, mapped, member = -1, None, group._member
    try:
        with suppress(OSError):
            own = room_for(count * dtype.itemsize)
        fds = _line_up(group, own)
        with suppress(OSError, RuntimeError):  # torch's own error for a file that cannot be mapped
            if min(fds) >= 0:
                mapped = tuple(
                    torch.from_file(open_of(pid, fd), shared=True, size=count, dtype=dtype)
                    for pid, fd in zip(member.pids, fds, strict=True)
                )
        everywhere = min(_line_up(group, int(mapped is not None)))
    except LockstepError:  # the group is of no use any more; whoever sends through it next hears why
        return None
    finally:
        if own >= 0:
            os.close(own)
    if mapped is None or not everywhere:
        return None
    member.places += 1
    return Placed(mapped[group.rank()], mapped, member.places)


def _line_up(group: "SharedMemoryGroup", number: int) -> list[int]:
    """Every rank's number."""
    mine = torch.tensor([number])
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([rows], [mine]).wait()
    return [int(row) for row in rows]
