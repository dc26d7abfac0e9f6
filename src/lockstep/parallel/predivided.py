"""Buckets as apex's DistributedDataParallel sends them: divided before and after the sum as the script says."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from lockstep.parallel.flat import Bucket
from lockstep.parallel.peers import Peers
from lockstep.parallel.slots import Slot, unfrozen
from lockstep.parallel.transport import HALVES, receive_words, send_words, wire_dtype


class Predivided:
    """One all-reduce for each bucket; the result is the average.

    A sum of half gradients that leaves the range of its dtype is infinite on every rank, as it is in apex: that is what
    a loss scale goes by. A larger ``factor``, or ``wide``, keeps it in range.

    Args:
        peers: The ranks.
        factor: What gradients are divided by before the sum. After it they are multiplied by it, and divided by the
            number of ranks.
        wide: Whether half gradients are divided, summed and averaged in float32.
    """

    def __init__(self, peers: Peers, factor: float, wide: bool) -> None:
        self._peers, self._factor, self._wide = peers, factor, wide

    def scale_for(self, dtype: torch.dtype) -> float:
        """The division before."""
        return 1.0 if self._averaged_wide(dtype) else 1 / self._factor

    def narrow(self, dtype: torch.dtype) -> bool:
        """Whatever they travel in, they are kept in halves."""
        return dtype in HALVES

    def _averaged_wide(self, dtype: torch.dtype) -> bool:
        return self._wide and dtype in HALVES

    def place(self, *_: object) -> None:
        """Anywhere."""

    def send(self, bucket: Bucket) -> None:
        """Start the sum."""
        for slot in bucket.slots:
            if slot.times != 1:  # it did not grow in this round
                bucket.views[slot.place].div_(slot.times)
                slot.times = 1.0
        own = bucket.flat.dtype
        dtype = torch.float32 if self._averaged_wide(own) else wire_dtype(own, None, self._peers.backend)
        bucket.wire = bucket.flat if dtype == own else bucket.flat.to(dtype)
        if self._averaged_wide(own):
            bucket.wire[: len(bucket.body)].mul_(1 / self._factor)
        bucket.work = self._peers.sum_soon(bucket.wire)
        send_words(bucket, self._peers)

    def receive(self, bucket: Bucket) -> None:
        """Wait for it, and average."""
        self._peers.wait(bucket.work)
        assert bucket.wire is not None
        rest = self._factor / self._peers.size
        if self._averaged_wide(bucket.flat.dtype):
            bucket.wire[: len(bucket.body)].mul_(rest)
        if bucket.wire is not bucket.flat:
            bucket.flat.copy_(bucket.wire)
        if not self._averaged_wide(bucket.flat.dtype):
            bucket.body.mul_(rest)
        bucket.work = bucket.wire = None
        receive_words(bucket, self._peers)


def keep_sums_sums(slots: Iterable[Slot]) -> None:
    """For gradients that are summed: what was summed before is made an average again before more is added to it.

    The reducer averages whatever stands in ``.grad``, and multiplies at the end. A sum of before would be multiplied
    again, as it was in apex.
    """
    for slot in slots:
        with unfrozen(slot.param):
            slot.param.register_hook(partial(_divide, slot))  # type: ignore[no-untyped-call]


def _divide(slot: Slot, _: Tensor) -> None:
    if slot.times != 1:
        if slot.param.grad is not None:
            with torch.no_grad():
                slot.param.grad.div_(slot.times)
        slot.times = 1.0
