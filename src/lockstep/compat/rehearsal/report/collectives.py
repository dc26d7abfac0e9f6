"""Counts what goes through a group: an object in front of each method that torch calls, from Python and from C++."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.shm.backend import SharedMemoryGroup

KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "sum_again": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""Methods of a group by both of torch's names, and its own; and what people call them."""

_GIVES_SECOND = frozenset(("all_gather", "gather", "reduce_scatter", "all_to_all"))
"""Their first argument is what comes out; what a rank gives is the second."""


class Collectives:
    """How many of which kind and size there were, by step."""

    def __init__(self, step: Callable[[], int]) -> None:
        self.seen: Counter[tuple[int, str, int]] = Counter()
        self.counted = True
        self._step = step
        self._inside = False  # one of a group's methods may call another

    def of_group(self, group: Any) -> None:
        """Count what goes through this group from now on."""
        if not isinstance(group, SharedMemoryGroup):
            self.counted = self.counted and not hasattr(group, "allreduce")  # not a member: nothing goes through it
            return
        for method, kind in KINDS.items():
            if hasattr(group, method):
                setattr(group, method, self._in_front(getattr(group, method), kind))

    def _in_front(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        what = 1 if kind in _GIVES_SECOND else 0

        @functools.wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self.seen[self._step() + 1, kind, bytes_in(args[what : what + 1])] += 1
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False

        return counted


def bytes_in(things: Any) -> int:
    """Bytes of all tensors in nested lists.

    Example:
        >>> import torch
        >>> bytes_in([[torch.ones(2), torch.ones(3)]])
        20
    """
    if isinstance(things, Tensor):
        return things.nbytes
    return sum(map(bytes_in, things)) if isinstance(things, (list, tuple)) else 0
