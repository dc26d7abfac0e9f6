"""send and recv: messages of one pair of ranks in order, taken by their tags."""

import threading
import time

import torch
from torch import Tensor

from lockstep.errors import LockstepError, UsageError
from lockstep.shm.agreement import DTYPES, NUMBERS, UNKNOWN
from lockstep.shm.member import Member
from lockstep.shm.tensors import is_plain, plain, put
from lockstep.shm.work import Finished, Lane, Pending

_ENVELOPE = 16
_MOST_TAG = 2**31 - 1
_ANYONE = -1

Kept = tuple[int, int, int, Tensor]
"""A message that nobody has asked for yet: its sender, its tag, its dtype's number and its bytes."""


class Messages:
    """What one rank sends to and receives from each of the others.

    A small message goes out at once, and one that is already there is taken at once; everything else is done in a
    thread for each peer and direction, so that two ranks may send to each other first and receive later. Whoever takes
    a message off a ring gives it to the request that was first to ask for it, whichever request it is there for.
    """

    def __init__(self, member: Member, size: int) -> None:
        self._member, self._size = member, size
        self._out = [Lane(f"shm send to {peer}") for peer in range(size)]
        self._in = [Lane(f"shm recv from {peer}") for peer in range(size)]
        self._any = Lane("shm recv from any")
        self._matching = threading.Lock()  # for the next two
        self._requests: list[_Request] = []
        self._kept: list[Kept] = []

    def send(self, x: Tensor, peer: int, tag: int) -> Finished | Pending:
        """Send ``x`` to ``peer``."""
        self._check_address("send", peer, tag)
        flat = plain(x.detach())
        size, number = flat.numel() * flat.element_size(), NUMBERS.get(x.dtype, UNKNOWN)

        def job(pace: int) -> None:
            self._member.send(pace, peer, flat.data_ptr(), size, tag, number)

        lane = self._out[peer]
        if lane.idle() and self._member.core.room(peer) >= size + _ENVELOPE:
            lane.now(job)
            return Finished([x])
        return lane.later(job, [x])

    def receive(self, x: Tensor, peer: int, tag: int) -> Pending:
        """Fill ``x`` with the next message from ``peer`` that has the tag."""
        self._check_address("recv", peer, tag)
        lane = self._in[peer]
        request = self._ask(x, peer, tag, lane)
        if not request.over and lane.idle() and self._is_here(request):
            lane.now(lambda pace: self._serve(pace, request, wait=False))
        if not request.over:
            lane.later(lambda pace: self._serve(pace, request, wait=True), [])
        return request.work

    def receive_any(self, x: Tensor, tag: int) -> Pending:
        """Fill ``x`` with the next message from anybody that has the tag."""
        self._check_address("recv", 0, tag)
        request = self._ask(x, _ANYONE, tag, self._any)
        if not request.over:
            self._any.later(lambda pace: self._serve_from_any(pace, request), [])
        return request.work

    def close(self, timeout: float) -> None:
        """End the threads."""
        for lane in (*self._out, *self._in, self._any):
            lane.close(timeout)

    def _check_address(self, call: str, peer: int, tag: int) -> None:
        self._member.refuse_if_over()
        if not 0 <= peer < self._size:
            raise UsageError(f"{self._member.who}: {call}: there is no rank {peer} in a group of {self._size}.")
        if not 0 <= tag <= _MOST_TAG:
            raise UsageError(f"{self._member.who}: {call}: tag {tag} is none; give one from 0 to {_MOST_TAG}.")

    def _is_here(self, request: "_Request") -> bool:
        """Whether so much has come from its peer as a message for a request takes."""
        return self._member.core.arrived(request.peer) >= request.size + _ENVELOPE

    def _ask(self, x: Tensor, peer: int, tag: int, lane: Lane) -> "_Request":
        """Ask for a message; it is over at once if the message was put aside before."""
        request = _Request(x, peer, tag, lane)
        with self._matching:
            kept = next((kept for kept in self._kept if request.wants(kept[0], kept[1])), None)
            if kept is None:
                self._requests.append(request)
                return request
            self._kept = [other for other in self._kept if other is not kept]
        self._fill(request, *kept)
        return request

    def _serve(self, pace: int, request: "_Request", *, wait: bool) -> None:
        """Take messages from a request's peer until it has its own, or, without waiting, while one is there."""
        try:
            while not request.over and (wait or self._is_here(request)):
                self._take_next(pace, request.peer)
        except BaseException as error:
            self._give_up(request, error)

    def _serve_from_any(self, pace: int, request: "_Request") -> None:
        deadline = time.monotonic() + self._member.timeout
        try:
            while not request.over:
                if not self._take_from_any(pace) and self._member.find_mail(deadline):
                    # Whoever has that peer's turn takes it, or fails by its own timeout; another may send meanwhile.
                    time.sleep(0.0005)
        except BaseException as error:
            self._give_up(request, error)

    def _take_from_any(self, pace: int) -> bool:
        for peer, lane in enumerate(self._in):
            if self._member.core.arrived(peer) and lane.turn.acquire(blocking=False):
                try:
                    if self._member.core.arrived(peer):
                        self._take_next(pace, peer)
                        return True
                finally:
                    lane.turn.release()
        return False

    def _take_next(self, pace: int, peer: int) -> None:
        """With the turn: take the next message off a ring, for the first who wants it, or aside."""
        size, tag, number = self._member.open(pace, peer)
        with self._matching:
            request = next((request for request in self._requests if request.wants(peer, tag)), None)
            if request is not None:
                self._requests.remove(request)
        try:
            if request is not None and request.fits(size, number) and is_plain(request.x):
                self._member.read(pace, peer, request.x.data_ptr(), size)
                request.finish(peer)
                return
            raw = torch.empty(size, dtype=torch.uint8)
            self._member.read(pace, peer, raw.data_ptr(), size)
        except BaseException as error:
            if request is not None:
                request.finish(peer, error)
            raise
        if request is None:
            with self._matching:  # somebody may have asked for it meanwhile
                request = next((request for request in self._requests if request.wants(peer, tag)), None)
                if request is None:
                    self._kept.append((peer, tag, number, raw))
                    return
                self._requests.remove(request)
        self._fill(request, peer, tag, number, raw)

    def _fill(self, request: "_Request", peer: int, _: int, number: int, raw: Tensor) -> None:
        """Give a request the bytes of its message."""
        x = request.x
        error: BaseException | None = None
        if request.fits(raw.numel(), number):
            try:
                put(x, raw.view(x.dtype).view(x.shape))
            except RuntimeError as refused:  # torch's own, for a tensor that cannot be written to
                error = refused
        else:
            sent = str(DTYPES[number]).removeprefix("torch.") if number < UNKNOWN else "other"
            error = self._member.refuse(
                f"recv expected {x.numel()} {str(x.dtype).removeprefix('torch.')}, but rank {peer} of the group sent "
                f"{raw.numel()} bytes of {sent}. Give recv a tensor of the shape and dtype that is sent."
            )
        request.finish(peer, error)

    def _give_up(self, request: "_Request", error: BaseException) -> None:
        with self._matching:
            waits = request in self._requests
            if waits:
                self._requests.remove(request)
        if waits:
            request.finish(request.peer, error)
        if not isinstance(error, LockstepError):  # Ctrl-C, for one
            raise error


class _Request:
    """Somebody who wants a message.

    Attributes:
        x: What it is for.
        size: Its bytes.
        peer: Who is to have sent it.
        work: What the caller holds.
        over: It has its message, or has failed.
    """

    def __init__(self, x: Tensor, peer: int, tag: int, lane: Lane) -> None:
        self.x, self.peer, self._tag = x, peer, tag
        self.size = x.numel() * x.element_size()
        self.over = False
        self.work = Pending(lambda _: self._result(), [x], lane)
        self._sender = peer
        self._error: BaseException | None = None

    def wants(self, peer: int, tag: int) -> bool:
        return self._tag == tag and self.peer in (peer, _ANYONE)

    def fits(self, size: int, number: int) -> bool:
        return size == self.size and number == NUMBERS.get(self.x.dtype, UNKNOWN)

    def finish(self, sender: int, error: BaseException | None = None) -> None:
        """Say that it is over; called once."""
        self._sender, self._error, self.over = sender, error, True
        self.work.perform(0)
        signal = self.work.settle()
        if signal is not None:  # what it calls back may want the next message, and this thread has the turn
            threading.Thread(target=signal.set_result, args=(None,), daemon=True).start()

    def _result(self) -> int:
        if self._error is not None:
            raise self._error
        return self._sender
