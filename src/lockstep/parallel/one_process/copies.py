"""The copies of parameters and buffers that a device keeps between steps; what changed is copied again."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.parallel.one_process.shipping import differing, ship, sums


class _State(NamedTuple):
    """What tells that a tensor is as it was, as far as tensors tell."""

    version: int
    pointer: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class _Kept(NamedTuple):
    master: Tensor  # held, so that no other tensor gets its id
    state: _State | None
    copy: Tensor
    copy_version: int


class Copies:
    """What one device holds of a module.

    Attributes:
        moved: How many tensors the last `refresh` copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved = 0
        self._kept: dict[int, _Kept] = {}
        self._seen: tuple[list[tuple[int, int]], list[Tensor]] = ([], [])  # which copies, and their sums

    def refresh(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> dict[int, Tensor]:
        """Give the copy of each tensor, by its id; those that are out of date are made anew.

        Never by writing to the old copy: a graph may still need it.

        Args:
            parameters: Those of the module.
            buffers: Those of the module.
        """
        with torch.inference_mode(False), torch.no_grad():
            stale = [*self._stale(parameters, self._sums_seen), *self._stale(buffers, self._sums_now)]
            for tensor in stale:
                self._kept.pop(id(tensor), None)  # its memory is free for the new one
            for tensor, copy in zip(stale, ship([t.detach() for t in stale], self.device), strict=True):
                self._kept[id(tensor)] = _Kept(tensor, _state(tensor), copy, copy._version)
        self.moved = len(stale)
        present = {id(tensor) for tensor in (*parameters, *buffers)}
        self._kept = {key: kept for key, kept in self._kept.items() if key in present}
        return {key: kept.copy for key, kept in self._kept.items()}

    def _stale(self, group: Sequence[Tensor], sums_of: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        unsure = [tensor for tensor in group if self._looks_current(tensor)]
        # Versions do not tell everything: optimizers of old write to p.data, and batch norm's kernels move running
        # statistics, and neither counts. So what looks the same is compared, by sums that each device makes by itself.
        unlike = differing(unsure, sums_of([self._kept[id(tensor)].copy for tensor in unsure]))
        current = {id(tensor) for tensor, differs in zip(unsure, unlike, strict=True) if not differs}
        return [tensor for tensor in group if id(tensor) not in current]

    def _sums_now(self, copies: list[Tensor]) -> list[Tensor]:
        """Of copies that replicas write to without telling, as batch norm does."""
        home = next(iter(self._kept.values())).master.device if self._kept else self.device
        return [x.to(home) for x in sums(copies)]

    def _sums_seen(self, copies: list[Tensor]) -> list[Tensor]:
        """Of copies that nobody writes to without telling: made once; comparing then reads the module's side only."""
        key = [(id(copy), copy._version) for copy in copies]
        if key != self._seen[0]:
            self._seen = key, self._sums_now(copies)
        return self._seen[1]

    def _looks_current(self, tensor: Tensor) -> bool:
        kept = self._kept.get(id(tensor))
        return (
            kept is not None
            and kept.state is not None
            and kept.state == _state(tensor)
            and kept.copy_version == kept.copy._version
        )


def _state(tensor: Tensor) -> _State | None:
    """None if nobody can tell: tensors made in inference mode count no versions, sparse ones cannot be compared."""
    if tensor.is_inference() or tensor.layout != torch.strided:
        return None
    return _State(tensor._version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
