"""The ranks that share gradients, on a channel of their own."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LockstepError, LostRankError
from lockstep.parallel.roll_call import missing_ranks

if TYPE_CHECKING:
    from lockstep.shm.placed import Placed


class _InWait:
    """Work that is done when it is waited for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.wait = call


class Peers:
    """A process group that nobody else uses.

    Buckets leave while backward goes on, so their place among other collectives (synchronised batch norm's, another
    model's) may differ from rank to rank; on one group they would be taken for each other.

    Attributes:
        rank: This process's number in the whole world, for messages.
        ranks: The numbers of all ranks that share.
        size: How many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        wide = group is None or group == dist.group.WORLD
        self.rank = dist.get_rank()
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.size = len(self.ranks)
        self.backend = dist.get_backend(group)
        self.group: Any = dist.new_group(
            None if wide else self.ranks, timeout=timeout_of(group), use_local_synchronization=not wide
        )

    def sum_soon(self, x: Tensor) -> Any:
        """Start to sum ``x`` over ranks in place; gives torch's work."""
        return self.start(partial(self.group.allreduce, [x]))

    def prepare_sum(self, x: Tensor, placed: "Placed | None" = None, *, last: bool = False) -> Callable[[], Any]:
        """What `start` needs to sum ``x``, whose memory stays where it is, over ranks in place, in every step.

        Args:
            x: What to sum.
            placed: What `place` gave, if ``x`` lies there.
            last: It is waited for before anything else is started. On shm the caller then does it itself, when it
                waits: handing it to a thread would take longer.
        """
        if self.backend != "shm" or not x.is_cpu:
            return partial(self.group.allreduce, [x])
        from lockstep.shm.tensors import LATER, NOW

        job = self.group._tensors.prepare_sum(x, placed)
        if not last:
            return partial(self.group.sum_again, x, job, LATER)
        in_wait = _InWait(partial(self.group.sum_again, x, job, NOW))
        return lambda: in_wait

    def place(self, count: int, dtype: torch.dtype, device: torch.device) -> "Placed | None":
        """A flat tensor that all ranks see, made on all of them at once; None where it cannot be or would not help."""
        if self.backend != "shm" or device.type != "cpu":
            return None
        from lockstep.shm.placed import place
        from lockstep.shm.segment import CHUNK

        return place(self.group, count, dtype) if count * dtype.itemsize > CHUNK else None

    def start(self, call: Callable[[], Any]) -> Any:
        """Make a call of the group; gives torch's work."""
        try:
            return call()
        except LockstepError:
            raise
        except RuntimeError as error:
            raise self._name_the_lost(error) from error

    def wait(self, work: Any) -> None:
        """Wait for what `sum_soon` began.

        Raises:
            LostRankError: A rank left, or did not come within the process group's timeout.
        """
        self.start(work.wait)

    def add_up(self, x: Tensor) -> None:
        """Sum ``x`` over ranks in place."""
        self.wait(self.sum_soon(x))

    def line_up(self, x: Tensor) -> Tensor:
        """Give every rank's ``x`` (same shape and dtype on each), by rank, as ``(size, *x.shape)``."""
        mine = x.detach().contiguous()
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self.wait(self.start(partial(self.group.allgather, [rows], [mine])))
        return torch.stack(rows)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite ``x`` with that of the rank at position ``source``."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self.wait(self.start(partial(self.group.broadcast, [x], options)))

    def _name_the_lost(self, error: RuntimeError) -> LostRankError:
        missing = missing_ranks(self.group.get_group_store(), self.rank, self.ranks)
        who = f"rank(s) {', '.join(map(str, missing))}" if missing else "a rank"
        return LostRankError(
            f"rank {self.rank} of {dist.get_world_size()}: {who} left, or did not come in time, while gradients "
            f"were being averaged over ranks {', '.join(map(str, self.ranks))}. Look for its own error first. "
            f"({error})"
        )


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """How long a group's collectives wait; None, torch's default, where it does not tell. Private, torch 2.9-2.14."""
    whole: Any = group or dist.group.WORLD
    options = getattr(
        whole._get_backend(torch.device("cpu" if dist.get_backend(group) != "nccl" else "cuda")), "options", None
    )
    return getattr(options, "_timeout", None)
