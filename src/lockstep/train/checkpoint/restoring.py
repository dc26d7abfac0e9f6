"""Going on from a checkpoint: finding one that is whole, and handing each part its state."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import CheckpointError, UsageError
from lockstep.train.checkpoint import files, randomness, reading, states, together
from lockstep.train.checkpoint.keeping import Name
from lockstep.train.checkpoint.manifest import DamagedError, Manifest
from lockstep.world import World, seeds


class Found(NamedTuple):
    """A checkpoint that every rank has looked at."""

    folder: Path
    manifest: Manifest


def find(world: World, directory: Path, path: Path | None) -> Found | None:
    """Find the newest checkpoint that is whole, the same on every rank; or look at the one at ``path``.

    Raises:
        CheckpointError: The one at ``path``, or every one that there is, is damaged; the newest that is not was written
            by a later version of lockstep.
    """
    if path is not None:
        problem, found = reading.verify(world, path)
        if found is None:
            raise CheckpointError(f"rank {world.rank} of {world.size}: {path} cannot be used: {problem}.")
        return Found(path, found)
    problems = []
    for name in _candidates(world, directory):
        problem, found = reading.verify(world, directory / str(name))
        if found is not None:
            return Found(directory / str(name), found)
        problems.append(f"{directory / str(name)}: {problem}")
        if world.is_main:
            warnings.warn(f"lockstep: this checkpoint is left out: {problems[-1]}", stacklevel=4)
    if problems:
        raise CheckpointError(
            f"rank {world.rank} of {world.size}: there are checkpoints, but none can be used; the newest is "
            f"{problems[0]}. To begin anew, move them away."
        )
    return None


def _candidates(world: World, directory: Path) -> Iterator[Name]:
    """Give rank 0's checkpoints to every rank, newest first."""
    names = files.list_directory(directory) if world.is_main else []
    while True:
        name = names.pop(0) if names else Name(0, 0)
        _, rows = together.first_problem(world, "", *name)
        if not rows[0][0]:
            return
        yield Name(*rows[0])


def load(world: World, targets: dict[str, Any], found: Found) -> None:
    """Hand every part its state, then the random number generators theirs.

    All states are read before the first is handed over, so that a checkpoint which turns out not to be one changes
    nothing.

    Raises:
        CheckpointError: The files do not hold what the manifest says.
        UsageError: A part is not in the checkpoint, or refuses its state.
    """
    manifest = found.manifest
    ranks = len(manifest.own)
    view = manifest.view(world.rank if world.rank < ranks else 0)
    who = f"rank {world.rank} of {world.size}"
    missing = [name for name in (*targets, states.RANDOM) if name not in view.trees]
    if missing:
        raise UsageError(
            f"{who}: {found.folder} has no part {missing[0]!r}; it has {sorted(set(view.trees) - {states.RANDOM})}. "
            f"Make the Checkpoint with the same parts, or with fewer."
        )
    problem, read = "", {}
    try:
        reading.refuse_repeated(view)
        with reading.opened(found.folder, manifest) as handles:
            for name in (*targets, states.RANDOM):
                read[name] = reading.read_part(view.trees[name], view, handles, world.device)
    except DamagedError as error:
        problem = str(error)
    problem, _ = together.first_problem(world, problem)
    if problem:
        raise CheckpointError(f"{who}: {found.folder} cannot be used: {problem}.")
    if manifest.parted:
        world.part_ways()
    if world.rank < ranks:
        targets = {**targets, states.RANDOM: randomness}
    problem, _ = together.first_problem(world, _hand_over(targets, read))
    if problem:
        raise UsageError(f"{who}: {found.folder} does not fit: {problem}")
    if manifest.parted and world.rank >= ranks:  # this rank was not there: numbers that nobody has drawn yet
        seeds.plant(seeds.derive_seed(seeds.derive_seed(world.seed, manifest.step), world.rank))


def _hand_over(targets: dict[str, Any], read: dict[str, Any]) -> str:
    """Load; what goes wrong is given in words, for all ranks to know."""
    for name, part in targets.items():
        try:
            states.load(part, read.pop(name))
        except Exception as error:
            return f"part {name!r}: {type(error).__name__}: {error}"
    return ""
