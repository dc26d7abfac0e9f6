"""A bucket: gradients of one dtype and device, one behind the other in one flat tensor, of which each is a view."""

import sys
from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.parallel.buckets import small_first
from lockstep.parallel.engine import storage_uses
from lockstep.parallel.slots import Slot, room

if TYPE_CHECKING:
    from lockstep.shm.placed import Placed

# From this size on a gradient is copied as soon as it is there, while it is in the cache and so that its memory is free
# again; smaller ones are copied together when the bucket is full, which costs a sixth of the time of one call each.
LARGE = 64 * 1024


class Bucket:
    """Gradients that travel together.

    Behind the gradients lies one flag for each, 1 where this rank has one; their sum says whether any rank has. `words`
    more numbers at the very end are whatever the reducer writes there; they lie apart, in float32, where the bucket
    travels in halves.

    Attributes:
        flat: Everything that travels.
        body: The gradients.
        words: The numbers at the end.
        last: Whether it is the last one of a round.
        apart: Whether they travel by themselves.
        slots: The parameters.
        waiting: How many gradients are still to come.
        placed: Memory that all ranks see, if `flat` lies there.
        sum: What starts the sum of `flat` over ranks, where it travels as it is; None until it first has.
    """

    def __init__(
        self,
        number: int,
        slots: list[Slot],
        kind: tuple[torch.dtype, torch.device],
        scale: float,
        words: int,
        apart: bool,
        memory: Callable[[int, torch.dtype, torch.device], "Placed | None"] = lambda *_: None,
    ) -> None:
        order, small = small_first([slot.param.numel() * slot.param.element_size() for slot in slots], LARGE)
        self.number, self.scale = number, scale
        self.slots = [slots[i] for i in order]
        self.params = [slot.param for slot in self.slots]
        self.dtypes = [param.dtype for param in self.params]
        self._small = small
        self._shape = (sum(room(param) for param in self.params), len(slots), words)
        self._kind = kind
        self.last = words > 0
        self.apart = apart and self.last
        for place, slot in enumerate(self.slots):
            slot.bucket, slot.place, slot.large = self, place, place >= small
        self.work: Any = None
        self.words_work: Any = None
        self.sum: Any = None
        self.wire: Tensor | None = None
        self.placed = memory(self._length(), *kind)
        self._lie_in(self.placed.own if self.placed is not None else self._new_memory())
        self.restart()

    def allocate(self) -> None:
        """Lie in new memory; this rank's alone, since the others know nothing of it."""
        self.placed = self.sum = None
        self._lie_in(self._new_memory())

    def _length(self) -> int:
        size, flags, words = self._shape
        return size + flags + (0 if self.apart else words)

    def _new_memory(self) -> Tensor:
        return torch.zeros(self._length(), dtype=self._kind[0], device=self._kind[1])

    def _lie_in(self, memory: Tensor) -> None:
        size, flags, words = self._shape
        self.flat = memory
        self.body, self.tail = self.flat[:size], self.flat[size:]
        self.flags = self.tail[:flags]
        self.words = torch.zeros(words, device=self._kind[1]) if self.apart else self.tail[flags:]
        # Two views of each gradient: one that nobody else gets, and one to be `.grad`, which a script may point
        # elsewhere.
        self.views = views_of(self.body, self.params)
        self._small_views = self.views[: self._small]
        self._small_body = self.body[: sum(room(param) for param in self.params[: self._small])]
        self.grads = [view.detach() for view in self.views]
        self._pointers = [view.data_ptr() for view in self.views]
        self._uses = storage_uses(self.flat)

    def restart(self) -> None:
        """Wait for every gradient again."""
        self.waiting, self.complete, self._ready, self.work = len(self.slots), False, False, None
        for slot in self.slots:
            slot.fired, slot.taken = 0, False

    def take(self, slot: Slot) -> None:
        """Copy one gradient in, scaled, and let its memory go."""
        self._prepare()
        grad, view = slot.param.grad, self.views[slot.place]
        assert grad is not None
        if self.scale == 1 or grad.layout is not torch.strided:
            copy_all([view], [grad])
            view.mul_(self.scale)
        else:
            torch.mul(grad.detach(), self.scale, out=view)
        slot.param.grad, slot.taken = None, True

    def fill(self) -> None:
        """Copy in what is not there yet, scaled; flag what is missing.

        From here until they come back parameters have no `.grad`, so that one that grows again while the bucket is
        under way does so in memory of its own.
        """
        self._prepare()
        self.flags.fill_(1)
        small = self.params[: self._small]
        grads = [param.grad for param in small]
        missing = [place for place, grad in enumerate(grads) if grad is None]
        views = self._small_views
        if missing:
            torch._foreach_zero_([views[place] for place in missing])
            views = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
        if views:
            copy_all(views, [grad for grad in grads if grad is not None])
            if self.scale != 1:
                self._small_body.mul_(self.scale)
        for param in small:
            param.grad = None
        for slot in self.slots[self._small :]:
            if not slot.taken and slot.param.grad is not None:
                self.take(slot)
            if not slot.taken:
                missing.append(slot.place)
                self.views[slot.place].zero_()
        if missing:
            self.flags[missing] = 0
        self.complete = not missing

    def fill_nothing(self) -> None:
        """Take part without gradients."""
        self.flat.zero_()

    def keep(self, slot: Slot) -> None:
        """Move a gradient in without sending it, so that there is one copy of it while more is added."""
        param, place = slot.param, slot.place
        grad = param.grad
        if grad is None or grad is self.grads[place] or grad.requires_grad:
            return
        if sys.getrefcount(self.grads[place]) > _HELD or storage_uses(self.flat) != self._uses:
            self.allocate()
        copy_all([self.views[place]], [grad])
        param.grad = self.grads[place]

    def _prepare(self) -> None:
        """Before the first gradient of a round: leave the memory to a script that has kept an old gradient."""
        if self._ready:
            return
        self._ready = True
        kept = storage_uses(self.flat) != self._uses
        if not kept:
            current = [param.grad for param in self.params]
            held = map(sys.getrefcount, self.grads)
            if not any(map(is_, current, self.grads)):
                kept = sum(held) != _HELD_IN_MAP * len(current)
        if kept:
            self.allocate()

    def hand_back(self) -> None:
        """Make every gradient that some rank has a view of this bucket; what none has stays None."""
        if [grad.data_ptr() for grad in self.grads] != self._pointers:
            self.grads = [view.detach() for view in self.views]
        if self.complete:
            for param, grad in zip(self.params, self.grads, strict=True):
                param.grad = grad
            return
        for param, grad, there in zip(self.params, self.grads, self.flags.tolist(), strict=True):
            param.grad = grad if there else None

    def multiply(self, factor: float, *, tell: bool) -> None:
        """Multiply every gradient; with ``tell`` each slot knows of it until its gradient grows again."""
        self.body.mul_(factor)
        if tell:
            for slot in self.slots:
                slot.times = factor

    def tie_graphs(self, factor: float) -> None:
        """After a backward that made a graph: each average keeps the graph of this rank's own part.

        It has the average's value and the local gradient's derivative: a penalty on it, averaged over ranks in its
        turn, then has the derivative of the same penalty on the whole batch.
        """
        for slot in self.slots:
            if slot.graph is not None and slot.param.grad is not None:
                with torch.enable_grad():
                    own = slot.graph * factor
                    slot.param.grad = own + (self.views[slot.place] - own).detach()
            slot.graph = None


def copy_all(views: list[Tensor], grads: list[Tensor]) -> None:
    """Copy each gradient into its view; sparse ones where dense ones were expected too."""
    try:
        torch._foreach_copy_(views, grads)
    except RuntimeError:
        if all(grad.layout is torch.strided for grad in grads):
            raise
        torch._foreach_copy_(views, [grad.to_dense() for grad in grads])


def views_of(body: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    """One view of ``body`` for each parameter, with its shape, dtype and, where it has no gaps, its strides."""
    views, at = [], 0
    for param in params:
        piece = body[at : at + room(param)]
        at += room(param)
        piece = torch.view_as_complex(piece.view(-1, 2)) if param.is_complex() else piece[: param.numel()]
        views.append(piece.as_strided(param.shape, param.stride()) if dense(param) else piece.view(param.shape))
    return views


def dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill their memory without gaps or overlaps, in whatever order of dimensions.

    Example:
        >>> dense(torch.zeros(2, 3).t()), dense(torch.zeros(1).expand(3)), dense(torch.zeros(4)[::2])
        (True, False, False)
    """
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# What getrefcount gives for a tensor that only its list holds, called on an element and from within map.
_ONE = [torch.empty(0)]
_HELD, (_HELD_IN_MAP,) = sys.getrefcount(_ONE[0]), map(sys.getrefcount, _ONE)
