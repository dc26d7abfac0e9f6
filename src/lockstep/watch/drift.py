"""Are replicas still equal? A checksum of every parameter and buffer, compared over ranks every so many steps."""

import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.collectives.agreement import agree
from lockstep.collectives.fingerprint import fingerprint
from lockstep.errors import MismatchError, UsageError
from lockstep.world import World, current

_CALL = "lockstep.check_in_step"


class StepCheck:
    """What `check_in_step` gives: compares now and then, until it is removed.

    Attributes:
        step: Optimizer steps of the model since it was made.
    """

    def __init__(self, model: nn.Module, every: int, buffers: bool) -> None:
        self._model, self._every, self._buffers = weakref.ref(model), every, buffers
        self._optimizer: weakref.ref[Any] | None = None
        self.step = 0
        self._hook = register_optimizer_step_post_hook(self._count)

    def remove(self) -> None:
        """Compare no more; on every rank, after the same step."""
        self._hook.remove()
        model = self._model()
        if model is not None and _checks.get(model) is self:
            del _checks[model]

    def _count(self, optimizer: Any, *_: Any) -> None:
        model = self._model()
        if model is None:
            self._hook.remove()
            return
        if self._optimizer is None and _holds(optimizer, model):
            self._optimizer = weakref.ref(optimizer)  # of several optimizers, the first one's steps count
        if self._optimizer is None or self._optimizer() is not optimizer:
            return
        self.step += 1
        if self.step % self._every == 0:
            compare(model, self._buffers, self.step, current())


_checks: "weakref.WeakKeyDictionary[nn.Module, StepCheck]" = weakref.WeakKeyDictionary()


def check_in_step(model: nn.Module, every: int = 100, *, buffers: bool = True) -> StepCheck:
    """Compare the model over ranks after every so many steps of its optimizer, from now on.

    Call it once, on every rank, before training. It costs one reading of the model and one small collective each time.
    A second call for the same model changes nothing but replaces the first.

    Args:
        model: Replicated on every rank, by whatever means.
        every: Steps between two comparisons.
        buffers: Whether buffers must be equal too. False where each rank's batch norm keeps its own statistics, as in
            torch's DDP between two forwards.

    Returns:
        The check; ``.remove()`` ends it.

    Raises:
        UsageError: ``every`` is no number of steps.
        MismatchError: In ``optimizer.step()``, on every rank: the first parameter that differs, the ranks and the step.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> check = check_in_step(model, every=2)
        >>> for _ in range(4):
        ...     optimizer.step()
        >>> check.step
        4
        >>> check.remove()
    """
    if every < 1:
        raise UsageError(f"{_CALL}(every={every}): write a number of steps from 1 on.")
    before = _checks.get(model)
    if before is not None:
        before.remove()
    check = _checks[model] = StepCheck(model, every, buffers)
    return check


def compare(model: nn.Module, buffers: bool, step: int, world: World) -> None:
    """Compare the model over all ranks; every rank calls it.

    Raises:
        MismatchError: On every rank, with the same words but for its own number.
    """
    named = dict(model.named_parameters()) | (dict(model.named_buffers()) if buffers else {})
    lines = "\n".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in named.items())
    mine = f"step {step}, {len(named)} parameters and buffers with names and shapes {zlib.crc32(lines.encode()):08x}"
    sums = torch.stack([fingerprint(x).cpu() for x in named.values()]).tolist() if named else []
    rows = agree(world, _CALL, mine, sums)
    number, ranks = find_drift(rows)
    if ranks:
        name = list(named)[number]
        raise MismatchError(
            f"rank {world.rank} of {world.size}: at step {step} the replicas differ. The first that does is {name!r}: "
            f"{_say(ranks, world.size)}. Something changes it on some ranks only: a step, a load or an assignment "
            f"under a condition, or gradients that were not averaged."
        )


def find_drift(rows: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Where the ranks' checksums part first, and which ranks are not with the most (of two halves, with rank 0).

    Example:
        >>> find_drift([[1, 2, 3], [1, 9, 3], [1, 2, 3]])
        (1, [1])
    """
    for number, column in enumerate(zip(*rows, strict=True)):
        usual = Counter(column).most_common(1)[0][0]  # the first of those that are equally common
        differing = [rank for rank, value in enumerate(column) if value != usual]
        if differing:
            return number, differing
    return 0, []


def _say(ranks: list[int], size: int) -> str:
    others = [rank for rank in range(size) if rank not in ranks]
    return f"rank(s) {', '.join(map(str, ranks))} not as on rank(s) {', '.join(map(str, others))}"


def _holds(optimizer: Any, model: nn.Module) -> bool:
    """Whether it trains the model: its own parameters, or the float32 copies that apex's O2 makes of half ones."""
    mine = list(model.parameters())
    theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {id(parameter) for parameter in mine} & {id(parameter) for parameter in theirs}:
        return True
    trained = [parameter for parameter in mine if parameter.requires_grad]
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in trained)
    return half and sorted(map(_shape, trained)) == sorted(map(_shape, theirs))


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)
