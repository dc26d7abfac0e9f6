"""How a bucket travels: summed as it is, in another dtype, or by a hook of the user's."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.errors import UsageError
from lockstep.parallel.flat import Bucket
from lockstep.parallel.hooked import HookBucket
from lockstep.parallel.peers import Peers

if TYPE_CHECKING:
    from lockstep.shm.placed import Placed

WIRE_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = (torch.bfloat16, torch.float16)


class Transport(Protocol):
    """What sends a bucket and waits for it."""

    def scale_for(self, dtype: torch.dtype) -> float:
        """What gradients of a dtype are multiplied by on their way into a bucket."""
        ...

    def narrow(self, dtype: torch.dtype) -> bool:
        """Whether gradients of a dtype travel in halves, in which not every number can be counted to."""
        ...

    def place(self, count: int, dtype: torch.dtype, device: torch.device) -> "Placed | None":
        """Memory for a bucket that all ranks see; None if it may lie anywhere. All ranks call it alike."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Start."""
        ...

    def receive(self, bucket: Bucket) -> None:
        """Wait until ``bucket.flat`` has the result."""
        ...


def travelling_dtype(communicate: str | None, rank: int) -> torch.dtype | None:
    """What ``communicate=`` means. Asked before any rank connects: one that raised later would leave the others alone.

    Raises:
        UsageError: There is no such name.

    Example:
        >>> travelling_dtype("bf16", rank=0)
        torch.bfloat16
    """
    if communicate not in WIRE_DTYPES:
        raise UsageError(f"rank {rank}: communicate={communicate!r}; write 'bf16', 'fp16' or None.")
    return WIRE_DTYPES[communicate]


class Summed:
    """One all-reduce for each bucket, of gradients that were divided by the number of ranks before.

    Args:
        peers: The ranks.
        communicate: What gradients travel as, see `travelling_dtype`; None for their own dtype. Half gradients are
            summed in float32: nccl and shm do so by themselves, for gloo they are sent as float32.
    """

    def __init__(self, peers: Peers, communicate: torch.dtype | None = None) -> None:
        self._peers, self._wanted = peers, communicate

    def scale_for(self, dtype: torch.dtype) -> float:
        """One part of as many as there are ranks; halves that travel as float32 are divided there."""
        return 1.0 if self._widens(dtype) else 1 / self._peers.size

    def narrow(self, dtype: torch.dtype) -> bool:
        """As wide as they travel, and as they lie in the bucket before and after."""
        return dtype in HALVES or wire_dtype(dtype, self._wanted, self._peers.backend) in HALVES

    def _widens(self, dtype: torch.dtype) -> bool:
        return wire_dtype(dtype, self._wanted, self._peers.backend).itemsize > dtype.itemsize

    def place(self, count: int, dtype: torch.dtype, device: torch.device) -> "Placed | None":
        """Where the group has such memory, and buckets travel as they are."""
        same = wire_dtype(dtype, self._wanted, self._peers.backend) == dtype
        return self._peers.place(count, dtype, device) if same else None

    def send(self, bucket: Bucket) -> None:
        """Start the sum."""
        if bucket.sum is None:
            dtype = wire_dtype(bucket.flat.dtype, self._wanted, self._peers.backend)
            if dtype == bucket.flat.dtype:
                bucket.sum = self._peers.prepare_sum(bucket.flat, bucket.placed, last=bucket.last)
        if bucket.sum is not None:
            bucket.wire, bucket.work = bucket.flat, self._peers.start(bucket.sum)
        else:
            bucket.wire = bucket.flat.to(dtype)
            if self._widens(bucket.flat.dtype):
                bucket.wire[: len(bucket.body)].div_(self._peers.size)
            bucket.work = self._peers.sum_soon(bucket.wire)
        send_words(bucket, self._peers)

    def receive(self, bucket: Bucket) -> None:
        """Wait for it."""
        self._peers.wait(bucket.work)
        assert bucket.wire is not None
        if bucket.wire is not bucket.flat:
            bucket.flat.copy_(bucket.wire)
        bucket.work = bucket.wire = None
        receive_words(bucket, self._peers)


class Hooked:
    """What torch calls a communication hook, run unchanged; the flags behind the gradients travel by themselves.

    A hook may send more when its first collective is through, as PowerSGD's does. On the CPU that comes from a thread,
    at moments that differ between ranks, so a bucket's hook is called when the one before is through: collectives of
    two buckets would be taken for each other.

    Args:
        peers: The ranks.
        state: The hook's first argument.
        hook: Takes the state and a bucket, gives a future of the averaged gradients.
    """

    def __init__(self, peers: Peers, state: object, hook: Callable[[Any, Any], Any]) -> None:
        self._peers, self._state, self._hook = peers, state, hook
        self._queue: deque[Bucket] = deque()
        self._under_way: Any = None

    def scale_for(self, _: torch.dtype) -> float:
        """Hooks divide by themselves."""
        return 1.0

    def narrow(self, dtype: torch.dtype) -> bool:
        """As wide as they are."""
        return dtype in HALVES

    def place(self, *_: object) -> None:
        """Hooks give their results in memory of their own."""

    def send(self, bucket: Bucket) -> None:
        """Call the hook, or have it called later."""
        if not bucket.number:
            self._queue.clear()  # of a round that failed
            self._under_way = None
        self._queue.append(bucket)
        while self._queue and (bucket.flat.is_cuda or self._under_way is None or self._under_way.done()):
            self._call_next()

    def _call_next(self) -> None:
        bucket = self._queue.popleft()
        self._under_way = self._hook(self._state, HookBucket(bucket))
        bucket.work = self._under_way, self._peers.sum_soon(bucket.tail)
        send_words(bucket, self._peers)

    def receive(self, bucket: Bucket) -> None:
        """Wait for its future."""
        while bucket.work is None:
            self._under_way.wait()
            self._call_next()
        future, work = bucket.work
        result = future.wait()
        result = result[0] if isinstance(result, (list, tuple)) else result
        if result.data_ptr() != bucket.body.data_ptr():
            bucket.body.copy_(result)
        self._peers.wait(work)
        bucket.work = bucket.wire = None
        receive_words(bucket, self._peers)


def send_words(bucket: Bucket, peers: Peers) -> None:
    """Send the numbers behind the last bucket, if they travel by themselves."""
    bucket.words_work = peers.sum_soon(bucket.words) if bucket.apart else None


def receive_words(bucket: Bucket, peers: Peers) -> None:
    """Wait for them."""
    if bucket.words_work is not None:
        peers.wait(bucket.words_work)
        bucket.words_work = None


def wire_dtype(gradients: torch.dtype, wanted: torch.dtype | None, backend: str) -> torch.dtype:
    """The dtype in which a bucket travels.

    Example:
        >>> wire_dtype(torch.float32, torch.bfloat16, "nccl"), wire_dtype(torch.bfloat16, None, "gloo")
        (torch.bfloat16, torch.float32)
    """
    if wanted is not None:
        return wanted
    return torch.float32 if gradients in HALVES and "gloo" in backend and "nccl" not in backend else gradients
