"""The buckets of one model, and in which order they travel."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from lockstep.parallel.buckets import Piece, complete_order, fill_buckets
from lockstep.parallel.control import WORDS
from lockstep.parallel.flat import Bucket
from lockstep.parallel.slots import Slot, real_dtype
from lockstep.parallel.transport import Transport


class Layout:
    """Divides gradients into buckets: in reverse registration order first, then in the order in which they really came.

    Attributes:
        slots: All parameters.
        dense: The parameters that lie in buckets.
        sparse: Those whose gradients travel by themselves.
        buckets: In the order of sending; the last one has room for the reducer's words.
        seen: The numbers of the gradients that came in this round, as they came; None once the order is known.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        transport: Transport,
        device: torch.device,
        caps: Sequence[int],
        ends: Collection[Tensor] = (),
    ) -> None:
        self.slots = slots = list(slots)
        self.sparse = [slot for slot in slots if slot.sparse]
        self.dense = [slot for slot in slots if not slot.sparse]
        for number, slot in enumerate(self.dense):
            slot.number, slot.expected = number, 1
        for slot in self.sparse:
            slot.bucket = None
        self._dtypes = [slot.param.dtype for slot in self.dense]
        self._transport, self._device, self._caps = transport, device, caps
        closing = {id(param) for param in ends}
        self._ends = {number for number, slot in enumerate(self.dense) if id(slot.param) in closing}
        self._order = list(reversed(range(len(self.dense))))
        self._groups = self._divide()
        self.seen: list[int] | None = []
        self.build(transport)

    def build(self, transport: Transport) -> None:
        """Make the buckets anew, for this transport."""
        self._transport = transport
        last = len(self._groups) - 1
        self.buckets = [
            self._bucket(number, [self.dense[i] for i in group], WORDS if number == last else 0)
            for number, group in enumerate(self._groups)
        ]

    def _bucket(self, number: int, slots: list[Slot], words: int) -> Bucket:
        dtype, device = (real_dtype(slots[0].param), slots[0].param.device) if slots else (torch.float32, self._device)
        scale, apart = self._transport.scale_for(dtype), self._transport.narrow(dtype)
        return Bucket(number, slots, (dtype, device), scale, words, apart, self._transport.place)

    def _divide(self) -> list[list[int]]:
        pieces = [Piece(slot.param.nbytes, (real_dtype(slot.param), slot.param.device)) for slot in self.dense]
        return fill_buckets(pieces, self._order, self._caps, self._ends) or [[]]

    def fits(self) -> bool:
        """Whether every parameter still has the dtype for which its place was made."""
        return [slot.param.dtype for slot in self.dense] == self._dtypes

    def has_place(self, slot: Slot) -> bool:
        """Whether a gradient can lie in its bucket."""
        return slot.bucket is not None and slot.param.dtype == self._dtypes[slot.number]

    def order_seen(self) -> list[int]:
        """How many gradients were seen, then all of them: those in their order, then the others in the planned one."""
        seen = self.seen or []
        return [len(seen), *complete_order(seen, self._order)]

    def follow(self, order: list[int]) -> None:
        """From the next round on, send in this order."""
        self._order, self.seen = order, None
        groups = self._divide()
        if groups != self._groups:
            self._groups = groups
            self.build(self._transport)

    def expect_the_same(self, late: Iterable[Slot]) -> None:
        """Expect of the next round what happened in this one: how often each gradient grew."""
        for bucket in self.buckets:
            if bucket.waiting:
                for slot in bucket.slots:
                    slot.expected = max(1, slot.fired)
        for slot in late:
            slot.expected = slot.fired

    def restart(self) -> None:
        """Wait for every gradient again."""
        if self.seen is not None:
            self.seen = []
        for bucket in self.buckets:
            bucket.restart()
