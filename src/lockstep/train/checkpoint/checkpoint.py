"""Everything that a run is, saved while it goes on, so that a restarted script goes on at the very next batch."""

import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import CheckpointError, UsageError
from lockstep.train.checkpoint import files, keeping, reading, restoring, saving, states
from lockstep.train.checkpoint.background import Background
from lockstep.train.checkpoint.lookout import Lookout, Seen
from lockstep.train.checkpoint.manifest import DamagedError
from lockstep.train.checkpoint.signals import Signals, name_of
from lockstep.train.checkpoint.tensors import Buffer
from lockstep.train.checkpoint.words import open_words
from lockstep.world import current
from lockstep.world.ending import SAVED


class Checkpoint:
    """Saves a run, and goes on where it was.

    Each checkpoint is a folder in ``directory``: safetensors files, to which every rank writes an equal share of what
    all hold, and a JSON manifest with a checksum of each. It holds the parts, the epoch, and each rank's random number
    generators. It appears under its name once it is whole and on the disk; a kill at any moment leaves the ones before
    it. No pickle anywhere: reading a stranger's checkpoint runs no code.

    A restarted script goes on at the next batch, to the bit with the same number of ranks. Another number of ranks may
    go on too, with the same global batches and all but the random numbers that each rank draws for itself.

    Every rank makes it, and calls its methods, alike. While `epochs` runs, and from the first `step` on, SIGTERM and
    SIGUSR1 let the step be finished, save, and end the process with exit code 75, on all ranks at the same step.

    Args:
        directory: Where checkpoints are; on several nodes one that all of them see.
        keep: How many of the newest stay.
        keep_best: Which stay besides: ``("accuracy", 1)`` the one with the highest accuracy that `note` was given,
            ``("loss", 2, "lowest")`` the two with the lowest loss.
        every_steps: Save at every so many steps. With neither this nor ``every_minutes``, at the end of every epoch;
            at the end of the last one always.
        every_minutes: Save at the next step when so much time has passed.
        background: Write while the loop goes on. It waits for the copy of the state only, and for the save before, if
            that is still being written.
        parts: What to save, each under its name: anything with ``state_dict`` and ``load_state_dict`` (models, wrapped
            or not, `lockstep.Update`, optimizers, schedulers, `lockstep.DataLoader`), and dicts of plain values, which
            the script changes in place.

    Attributes:
        epoch: The epoch in progress, from 0.
        step_count: Calls of `step` so far, of this run and those it goes on from; one for each step of an `Update`.

    Raises:
        UsageError: Something has no state; arguments that make no sense.

    Example:
        >>> import lockstep, tempfile, torch
        >>> directory, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
        >>> checkpoint = lockstep.Checkpoint(directory, model=model)
        >>> for epoch in checkpoint.epochs(3):
        ...     with torch.no_grad():
        ...         _ = model.weight.fill_(epoch)
        ...     checkpoint.step()
        >>> again = lockstep.Checkpoint(directory, model=torch.nn.Linear(2, 1))
        >>> again.restore(), again.epoch, again.step_count
        (True, 3, 3)
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        keep: int = 3,
        keep_best: tuple[Any, ...] | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        background: bool = True,
        **parts: Any,
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: at least one checkpoint stays. Write 1 or more.")
        if (every_steps is not None and every_steps < 1) or (every_minutes is not None and not every_minutes > 0):
            raise UsageError(
                f"every_steps={every_steps}, every_minutes={every_minutes}: write positive numbers, or None."
            )
        if not parts:
            raise UsageError("Nothing to save: write Checkpoint(directory, model=model, update=update, train=train).")
        states.refuse_stateless(parts)
        self.epoch = 0
        self.step_count = 0
        self._world = current()
        self._fed_before = self._world.feed.current
        self._directory = Path(directory).absolute()
        self._keep, self._best = keep, keeping.read_best(keep_best)
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._parts, self._in_background = parts, background
        self._restored = self._put_off = self._warned = False
        self._notes: dict[str, float] = {}
        self._saved_at = time.monotonic()
        self._serial = 0
        self._signals, self._lookout = Signals(), Lookout(self._world)
        self._background, self._buffer = Background(), Buffer()
        weakref.finalize(self, self._signals.give_back)

    def epochs(self, count: int) -> Iterator[int]:
        """Give the epochs that are left of ``count``, and save; begins with `restore` unless that was called.

        An epoch that was left in the middle is given again, and a `lockstep.DataLoader` among the parts goes on in it.
        """
        if not self._restored:
            self.restore()
        self._signals.take()
        try:
            while self.epoch < count:
                yield self.epoch
                states.end_epoch(self._parts)
                self.epoch += 1
                self._put_off = self._put_off or (self._every_steps is None and self._every_minutes is None)
                self._act(self._lookout.catch_up(self._look()), last=self.epoch >= count)
        finally:
            self._signals.give_back()

    def step(self) -> None:
        """Say that a step was made: save if it is time; after SIGTERM or SIGUSR1 save, and end the process.

        Call it behind every batch. In the middle of an accumulating `Update`'s step it does nothing.

        Raises:
            CheckpointError: A save in the background has failed, on any rank. Training may go on.
            SystemExit: With code 75, after a signal.
        """
        self._signals.take()
        if states.unfinished(self._parts):
            return
        self.step_count += 1
        if self._every_steps is not None and self.step_count % self._every_steps == 0:
            self._put_off = True
        self._act(self._lookout.exchange(self._look()))

    def note(self, **numbers: Any) -> None:
        """Write numbers into the next checkpoint, for ``keep_best`` and whoever reads its manifest.

        Args:
            numbers: The same on every rank, as `lockstep.mean` gives them.
        """
        self._notes.update({name: float(number) for name, number in numbers.items()})

    def save(self, wait: bool = False) -> None:
        """Save now.

        Args:
            wait: Come back only once it is on the disk.

        Raises:
            CheckpointError: It could not be written, or, without ``wait``, the one before could not; on every rank.
                Checkpoints that were whole still are.
            UsageError: In the middle of an `Update`'s step, whose micro-batches would be lost; or something in a part
                cannot be saved.
            MismatchError: Ranks have different parts, steps, epochs or notes.
        """
        self.wait()
        if states.unfinished(self._parts):
            raise UsageError(
                f"{self._who()}: save() in the middle of an Update's step; its micro-batches would be lost. Save where "
                f"update.stepped is true, or let checkpoint.step() find the moment."
            )
        self._save(wait)

    def _save(self, wait: bool) -> None:
        self._warn_of_forgotten_loader()
        self._put_off, self._saved_at = False, time.monotonic()
        self._lookout.settle()
        moment = saving.Moment(self.step_count, self.epoch, self._notes)
        name, told = saving.begin(self._world, self._directory, self._serial + 1, moment, states.teller(self._parts))
        self._serial, self._notes = name.serial, {}
        save = saving.Save(self._world, self._directory, name, moment, open_words(self._world))
        save.copy(saving.split(self._world, told), self._buffer)
        self._background.start(lambda: save.write(self._keep, self._best))
        if wait or not self._in_background:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress, if there is one, is on the disk.

        Raises:
            CheckpointError: It could not be written, on any rank; on every rank.
        """
        problem = self._background.wait()
        if problem:
            raise CheckpointError(f"{self._who()}: a checkpoint could not be written: {problem}")

    def restore(self, path: str | PathLike[str] | None = None) -> bool:
        """Go on from a checkpoint.

        Args:
            path: Its folder. None for the newest that is whole; one that is damaged is named in a warning and left out.

        Returns:
            Whether there was one.

        Raises:
            CheckpointError: The one at ``path`` is damaged, or all that there are; the newest was written by a later
                version of lockstep.
            UsageError: The checkpoint is of other parts, or of parts of another shape.
        """
        self.wait()
        self._restored = True
        folder = Path(path).absolute() if path is not None else None
        found = restoring.find(self._world, self._directory, folder)
        if found is None:
            return False
        restoring.load(self._world, self._parts, found)
        self.epoch, self.step_count = found.manifest.epoch, found.manifest.step
        self._saved_at = time.monotonic()
        return True

    def latest(self) -> Path | None:
        """Give the folder of the newest checkpoint that has its manifest; None if there is none."""
        for name in files.list_directory(self._directory):
            folder = self._directory / str(name)
            try:
                reading.read_manifest(folder)
            except DamagedError:
                continue
            return folder
        return None

    def _look(self) -> Seen:
        """What this rank has noticed; rank 0's clock counts."""
        due = (
            self._every_minutes is not None
            and self._world.is_main
            and time.monotonic() - self._saved_at >= 60 * self._every_minutes
        )
        return Seen(self._signals.seen, due, self._background.failed)

    def _act(self, seen: Seen, last: bool = False) -> None:
        """Do what all ranks have come to know; the same on each."""
        if seen.failed:
            self._lookout.settle()
            self.wait()
        if seen.signal:
            self._stop(seen.signal)
        if last or ((self._put_off or seen.due) and not states.unfinished(self._parts)):
            self.wait()
            self._save(wait=last)  # behind the last epoch nobody will finish a step that has begun

    def _stop(self, number: int) -> NoReturn:
        if problem := self._background.wait():
            sys.stderr.write(f"lockstep: {self._who()}: a checkpoint could not be written: {problem}\n")
        self.save(wait=True)
        if self._world.is_main:
            sys.stderr.write(
                f"lockstep: {name_of(number)}: saved at step {self.step_count} in {self._directory}; exit code "
                f"{SAVED}. Start the same command again to go on.\n"
            )
            sys.stderr.flush()
        raise SystemExit(SAVED)

    def _warn_of_forgotten_loader(self) -> None:
        gives = self._world.feed.current
        if self._warned or not self._world.is_main or gives is self._fed_before:
            return
        if states.forgotten_loader(self._parts, gives):
            self._warned = True
            warnings.warn(
                f"{self._who()}: the lockstep.DataLoader that gives the batches is no part of the checkpoint: a "
                f"restarted run begins an epoch again instead of going on in it. Write Checkpoint(..., train=train).",
                stacklevel=4,
            )

    def _who(self) -> str:
        return f"rank {self._world.rank} of {self._world.size}, step {self.step_count}"
