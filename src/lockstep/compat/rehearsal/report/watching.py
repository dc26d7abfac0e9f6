"""Watches a script in one process: counts steps, looks at its models, ends it after the last step."""

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.distributed import DistributedSampler

from lockstep.compat.rehearsal import memory
from lockstep.compat.rehearsal.entry import Entry
from lockstep.compat.rehearsal.follow import Follow
from lockstep.compat.rehearsal.report import facts, models
from lockstep.compat.rehearsal.report.collectives import Collectives
from lockstep.compat.rehearsal.settings import Settings


class Watch:
    """What this process has seen so far."""

    def __init__(self, settings: Settings, mode: Follow) -> None:
        self._settings, self._mode = settings, mode
        self.collectives = Collectives(lambda: self.steps)
        self.saved: dict[str, None] = {}
        self.epochs: dict[Any, Epochs] = {}  # what is watched is kept: the facts are written when the script has ended
        self._rank, self._size = -1, 1
        self._child = False
        self._taken: dict[torch.optim.Optimizer, int] = {}
        self._gradients = models.Gradients()

    @property
    def steps(self) -> int:
        """Optimizer steps: those of the optimizer that has taken the fewest, among those that have taken one."""
        return min(self._taken.values(), default=0)

    def start(self) -> Callable[[], None]:
        """Watch from now on, in processes that are forked or spawned later, too; what comes back ends it."""
        if not self._settings.steps:
            return _nothing
        atexit.register(self.leave_facts)
        # In a process of multiprocessing's, which ends without atexit.
        util.register_after_fork(self, Watch._begin_again)
        hook = register_optimizer_step_post_hook(self._after_step)

        def end() -> None:
            hook.remove()
            atexit.unregister(self.leave_facts)

        return end

    def _begin_again(self) -> None:
        self._child = True
        self._taken.clear()
        self.collectives.seen.clear()
        self.saved.clear()
        util.Finalize(None, self.leave_facts, exitpriority=0)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        self._gradients.look()
        if dist.is_initialized():
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
        if self.steps >= self._settings.steps:
            self.leave_facts()
            sys.exit(0)

    def leave_facts(self) -> None:
        """Write what was seen; a child that took no step is a loader's worker or the like."""
        if self._child and not self.steps:
            return
        if dist.is_initialized():
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
        facts.write(self._settings.folder, self.sum_up())

    def sum_up(self) -> facts.Facts:
        """What was seen, as plain values."""
        return facts.Facts(
            rank=self._rank,
            size=self._size,
            steps=self.steps,
            peak=memory.peak(),
            collectives=tuple((*key, count) for key, count in self.collectives.seen.items()),
            counted=self.collectives.counted,
            without_gradient=tuple(self._gradients.missing()),
            unsynchronised=tuple(self._gradients.unsynchronised()),
            same_epoch=tuple(words for epochs in self.epochs.values() if (words := epochs.in_words())),
            saved=tuple(self.saved),
            misplaced=tuple((*key, count) for key, count in self._mode.misplaced.items()),
        )


class Epochs:
    """How often a sampler was begun, and whether anybody told it the epoch."""

    def __init__(self, sampler: Any) -> None:
        self.shuffles = bool(getattr(sampler, "shuffle", True))
        self.length = len(sampler)
        self.begun = 0
        self.told = False

    def in_words(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.told or not self.begun or not self.shuffles:
            return ""
        times = f"{self.begun} times" if self.begun > 1 else "once"
        return f"DistributedSampler of {self.length} samples a rank: begun {times}, set_epoch never called"


def _nothing() -> None:
    pass


def entries(watch: Watch) -> list[Entry]:
    """What has no hook of its own: saving, and samplers."""
    save, begin, tell = torch.save, DistributedSampler.__iter__, DistributedSampler.set_epoch

    @functools.wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        name = getattr(f, "name", f)
        if isinstance(name, (str, os.PathLike)):
            watch.saved[os.path.abspath(name)] = None  # noqa: PTH100
        save(obj, f, *args, **kwargs)

    def of(sampler: Any) -> Epochs:
        if sampler not in watch.epochs:
            watch.epochs[sampler] = Epochs(sampler)
        return watch.epochs[sampler]

    @functools.wraps(begin)
    def begun(self: Any) -> Iterator[Any]:
        of(self).begun += 1
        return begin(self)

    @functools.wraps(tell)
    def told(self: Any, epoch: int) -> None:
        of(self).told = True
        tell(self, epoch)

    owner = "torch.utils.data.distributed:DistributedSampler"
    return [Entry("torch", "save", saved), Entry(owner, "__iter__", begun), Entry(owner, "set_epoch", told)]
