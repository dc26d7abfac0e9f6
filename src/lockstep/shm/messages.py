"""send and recv: messages of one pair of ranks in order, taken by their tags."""

import threading
import time
from collections import deque

import torch
from torch import Tensor

from lockstep.shm.agreement import DTYPES, NUMBERS, UNKNOWN
from lockstep.shm.member import Member
from lockstep.shm.tensors import is_plain, plain
from lockstep.shm.work import Finished, Lane, Pending

_ENVELOPE = 16


class Messages:
    """What one rank sends to and receives from each of the others.

    A small message goes out at once, and one that is already there is taken at once; everything else is done in a
    thread for each peer and direction, so that two ranks may send to each other first and receive later.
    """

    def __init__(self, member: Member, size: int) -> None:
        self._member = member
        self._out = [Lane(f"shm send to {peer}") for peer in range(size)]
        self._in = [Lane(f"shm recv from {peer}") for peer in range(size)]
        self._any = Lane("shm recv from any")
        self._kept: list[deque[tuple[int, int, Tensor]]] = [deque() for _ in range(size)]  # tag, dtype's number, bytes
        self._moving = threading.Lock()

    def send(self, x: Tensor, peer: int, tag: int) -> Finished | Pending:
        """Send ``x`` to ``peer``."""
        flat = plain(x.detach())
        size, number = flat.numel() * flat.element_size(), NUMBERS.get(x.dtype, UNKNOWN)

        def job(pace: int) -> None:
            self._member.send(pace, peer, flat.data_ptr(), size, tag, number)

        lane = self._out[peer]
        if lane.idle() and self._member.core.room(peer) >= size + _ENVELOPE:
            lane.now(job)
            return Finished([x])
        return lane.later(job, [x])

    def receive(self, x: Tensor, peer: int, tag: int) -> Finished | Pending:
        """Fill ``x`` with the next message from ``peer`` that has the tag."""
        lane, found = self._in[peer], [False]

        def look(pace: int) -> None:
            found[0] = self._take_arrived(pace, x, peer, tag)

        if self._is_here(x, peer) and not self._kept[peer] and lane.idle():
            lane.now(look)
        return Finished([x]) if found[0] else lane.later(lambda pace: self._receive(pace, x, peer, tag), [x])

    def receive_any(self, x: Tensor, tag: int) -> Pending:
        """Fill ``x`` with the next message from anybody that has the tag."""
        return self._any.later(lambda pace: self._receive_any(pace, x, tag), [x])

    def close(self, timeout: float) -> None:
        """End the threads."""
        for lane in (*self._out, *self._in, self._any):
            lane.close(timeout)

    def _is_here(self, x: Tensor, peer: int) -> bool:
        """Whether so much has come from ``peer`` as a message for ``x`` takes."""
        return self._member.core.arrived(peer) >= x.numel() * x.element_size() + _ENVELOPE

    def _take_arrived(self, pace: int, x: Tensor, peer: int, tag: int) -> bool:
        """Look through what has come, without waiting for more: a caller may have to send before its peer goes on."""
        while self._is_here(x, peer):
            if self._take_next(pace, x, peer, tag):
                return True
        return False

    def _receive(self, pace: int, x: Tensor, peer: int, tag: int) -> None:
        while not (self._take_kept(x, peer, tag) or self._take_next(pace, x, peer, tag)):
            pass

    def _take_kept(self, x: Tensor, peer: int, tag: int) -> bool:
        for kept in self._kept[peer]:
            if kept[0] == tag:
                self._kept[peer].remove(kept)
                _, number, raw = kept
                self._check(x, peer, raw.numel(), number)
                x.copy_(raw.view(x.dtype).view(x.shape))
                return True
        return False

    def _take_next(self, pace: int, x: Tensor, peer: int, tag: int) -> bool:
        """Take the next message off the ring: into ``x`` if it is meant for it, else aside."""
        size, found, number = self._member.open(pace, peer)
        fits = found == tag and size == x.numel() * x.element_size() and number == NUMBERS.get(x.dtype, UNKNOWN)
        if fits and is_plain(x):
            self._member.read(pace, peer, x.data_ptr(), size)
            return True
        raw = torch.empty(size, dtype=torch.uint8)
        self._member.read(pace, peer, raw.data_ptr(), size)
        self._kept[peer].append((found, number, raw))
        return False

    def _check(self, x: Tensor, peer: int, size: int, number: int) -> None:
        if size != x.numel() * x.element_size() or number != NUMBERS.get(x.dtype, UNKNOWN):
            sent = str(DTYPES[number]).removeprefix("torch.") if number < UNKNOWN else "other"
            raise self._member.refuse(
                f"recv expected {x.numel()} {str(x.dtype).removeprefix('torch.')}, but rank {peer} of the group sent "
                f"{size} bytes of {sent}. Give recv a tensor of the shape and dtype that is sent."
            )

    def _receive_any(self, pace: int, x: Tensor, tag: int) -> int:
        while True:
            for peer, lane in enumerate(self._in):
                if (self._kept[peer] or self._member.core.arrived(peer)) and lane.turn.acquire(blocking=False):
                    try:
                        if self._take_kept(x, peer, tag):
                            return peer
                        if self._member.core.arrived(peer) and self._take_next(pace, x, peer, tag):
                            return peer
                    finally:
                        lane.turn.release()
            if not self._member.core.arrived(self._member.find_mail()):
                time.sleep(0)
