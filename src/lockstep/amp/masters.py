"""What amp keeps beside an optimizer: fp32 masters of half parameters, gradients set aside, and the skipped step."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.amp.levels import HALF_TYPES
from lockstep.amp.scaler import LossScaler
from lockstep.collectives.kept import average_gradients, engines_of

# From a half parameter to its master. Both ends are weak: a model must not keep its optimizer's memory alive.
_masters: Any = WeakIdKeyDictionary()


def master_of(param: Tensor) -> Tensor | None:
    """The master of a half parameter, None if it has none. What was written into the parameter meanwhile is in it."""
    found = _masters.get(param)
    master: Tensor | None = found() if found is not None else None
    if master is not None and not _same_bits(master.detach().to(param.dtype), param.detach()):
        take_over(param, master)
    return master


def _same_bits(rounded: Tensor, param: Tensor) -> bool:
    """Whether two half tensors are the same, looked at four elements at a time: once a step, over all weights."""
    if rounded.is_contiguous() and param.is_contiguous() and param.numel() % 4 == param.storage_offset() % 4 == 0:
        rounded, param = rounded.view(-1).view(torch.int64), param.view(-1).view(torch.int64)
    return torch.equal(rounded, param)


@torch.no_grad()
def take_over(param: Tensor, master: Tensor) -> None:
    """Element by element: where the model still holds the rounded master, keep the master; else the model wins."""
    kept = master.to(param.dtype) == param
    master.copy_(torch.where(kept, master, param.to(master.dtype)))


class AmpOptimizerState:
    """An optimizer's ``_amp_stash``; the attributes that scripts reach for have apex's names.

    With masters, gradients accumulate in fp32, in the masters. Without, they accumulate where they are: before a
    backward, what is there is multiplied by the loss scale, and afterwards all of it is divided. So an engine that
    averages ``.grad`` over ranks sees everything that was accumulated. Gradients in fp16 would overflow; they are set
    aside and added again.

    Attributes:
        already_patched: Whether the next step is going to be skipped.
        params_have_scaled_gradients: Whether the gradients still carry a loss scale (``delay_unscale``).
        lazy_init_called: Whether the lists below are complete; always.
        has_masters: Whether half parameters have fp32 masters.
        unsent: Whether the masters hold gradients that no other rank has seen (``no_sync``).
    """

    def __init__(self, optimizer: Any, *, masters: bool) -> None:
        self.has_masters = masters
        self.lazy_init_called = True
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.unsent = False
        self.overflow: tuple[int, LossScaler] | None = None
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        self.all_fp32_params: list[Tensor] = []
        self._seeded: list[tuple[Tensor, Tensor]] = []  # parameter, gradient that was there
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._buffers: dict[int, Tensor] = {}  # masters' gradients between steps: fresh memory is slow on a CPU
        for group in optimizer.param_groups:
            self.take_in(group, getattr(optimizer, "state", {}))

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Every half parameter that trains (without masters: every half parameter)."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their masters."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """Parameters that need no master."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def all_fp16_grad_stash(self) -> list[Tensor | None]:
        """Gradients set aside, by half parameter."""
        aside = {id(param): grad for param, grad in self._aside}
        return [aside.get(id(param)) for param in self.all_fp16_params]

    def take_in(self, group: dict[str, Any], state: Any) -> None:
        """List a group's parameters; with masters, put those in their places."""
        halves: list[Tensor] = []
        masters: list[Tensor] = []
        singles: list[Tensor] = []
        for i, param in enumerate(group["params"]):
            if self.has_masters and param.requires_grad and param.dtype in HALF_TYPES:
                master = param.detach().to(torch.float32, copy=True).requires_grad_(True)
                group["params"][i] = master
                if param in state:
                    state[master] = _in_float32(state.pop(param))
                _masters[param] = weakref.ref(master)
                halves.append(param)
                masters.append(master)
            elif not self.has_masters and param.dtype in HALF_TYPES:
                halves.append(param)
            elif param.requires_grad or not self.has_masters:
                singles.append(param)
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(singles)
        if not self.has_masters:
            self.all_fp32_params.extend(singles)

    def give_up(self, optimizer: Any) -> None:
        """Put the model's own parameters back in their places, with float32 values in them where there were masters."""
        models = {
            id(master): param
            for master, param in zip(self.all_fp32_from_fp16_params, self.all_fp16_params, strict=False)
        }
        state = getattr(optimizer, "state", {})
        for group in optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = models.get(id(master))
                if param is not None:
                    group["params"][i] = param
                    if master in state:
                        state[param] = state.pop(master)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each half parameter and its master."""
        return zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=False)

    def in_place(self) -> list[Tensor]:
        """The parameters whose own gradients the optimizer uses."""
        singles = self.all_fp32_from_fp32_params
        return singles if self.has_masters else [*self.all_fp16_params, *singles]

    def reconcile(self) -> None:
        """Let what was written into the model since the last step (clamped, loaded, swapped) into the masters."""
        pairs = list(self.pairs())
        if any(param.device.type != "cpu" for param, _ in pairs) and not _differ(pairs):
            return  # one wait for the device, instead of one for each parameter
        for param, _ in pairs:
            master_of(param)

    def prepare(self, scale: float) -> None:
        """Before a backward whose gradients will carry ``scale``."""
        self._seeded, self._aside = [], []
        if self.has_masters:
            if all(master.grad is None for master in self.all_fp32_from_fp16_params):
                self.reconcile()
            for param in self.all_fp16_params:
                param.grad = None
        kept = [param for param in self.in_place() if param.grad is not None]
        if self.already_patched:  # this step is skipped, so what has been gathered for it is not needed
            for param in kept:
                param.grad = None
            return
        for param in kept:
            assert param.grad is not None
            if param.dtype == torch.float16 or param.grad.is_sparse:
                self._aside.append((param, param.grad))
                param.grad = None
            else:
                self._seeded.append((param, param.grad))
        if self._seeded:
            for (param, _), seed in zip(
                self._seeded, torch._foreach_mul([grad.detach() for _, grad in self._seeded], scale), strict=True
            ):
                param.grad = seed

    def restore(self) -> None:
        """After a backward that raised: as before `prepare`."""
        if self.params_have_scaled_gradients:
            return
        for param in (*self.all_fp16_params, *self.in_place()):
            param.grad = None
        for param, grad in (*self._seeded, *self._aside):
            param.grad = grad
        self._seeded, self._aside = [], []

    def finish(self, scaler: LossScaler, scale: float) -> None:
        """After a backward: take ``scale`` out of all gradients, in one pass, and note what is not finite."""
        scaler.check_and_scale([param.grad for param in self.in_place() if param.grad is not None], 1.0 / scale)
        for param, grad in self._aside:
            param.grad = grad if param.grad is None else param.grad + grad
        self._seeded, self._aside = [], []
        if self.has_masters:
            self._fill_masters(scaler, scale)
        self.send_kept(stepping=False)

    def send_kept(self, *, stepping: bool) -> None:
        """Average over ranks what a block without communication has left in the masters, where an engine cannot see it.

        With the first block that communicates again, as engines do; at the latest before the step.
        """
        halves = self.all_fp16_params
        if not halves or not (self.has_masters or any(param.dtype == torch.float16 for param in halves)):
            return
        engines = engines_of(halves)
        if not stepping and any(not engine.syncing for engine in engines):
            self.unsent = True
        elif self.unsent:
            self.unsent = False
            for engine in engines:
                average_gradients(self.all_fp32_from_fp16_params if self.has_masters else halves, engine.peers)

    @torch.no_grad()
    def _fill_masters(self, scaler: LossScaler, scale: float) -> None:
        pairs = [(param, master) for param, master in self.pairs() if param.grad is not None]
        if not pairs:
            return
        fresh = [self._buffer(master) if master.grad is None else torch.empty_like(master) for _, master in pairs]
        torch._foreach_copy_(fresh, [param.grad for param, _ in pairs if param.grad is not None])
        scaler.check_and_scale(fresh, 1.0 / scale)
        for (_, master), grad in zip(pairs, fresh, strict=True):
            if master.grad is None:
                master.grad = grad
            else:
                master.grad.add_(grad)

    def _buffer(self, master: Tensor) -> Tensor:
        if id(master) not in self._buffers:
            self._buffers[id(master)] = torch.empty_like(master, requires_grad=False)
        return self._buffers[id(master)]

    def drop_gradients(self) -> None:
        """After a step, taken or skipped."""
        self.unsent = False
        for master in self.all_fp32_from_fp16_params:
            master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """The model gets its masters' values, rounded."""
        if self.all_fp16_params:
            torch._foreach_copy_(self.all_fp16_params, self.all_fp32_from_fp16_params)


@torch.no_grad()
def _differ(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    rounded = [torch.empty_like(param) for param, _ in pairs]
    torch._foreach_copy_(rounded, [master for _, master in pairs])
    torch._foreach_sub_(rounded, [param for param, _ in pairs])
    norms = torch._foreach_norm(rounded, float("inf"))
    return bool((torch.stack([norm.to(norms[0].device) for norm in norms]) != 0).any())


def _in_float32(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {
        key: value.float() if isinstance(value, Tensor) and value.dtype in HALF_TYPES else value
        for key, value in state.items()
    }
