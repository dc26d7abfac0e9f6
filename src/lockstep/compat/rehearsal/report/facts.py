"""What one process has seen, as plain values, and its way to the launcher: a file in a private folder."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """What one process has seen.

    Attributes:
        rank: Its rank; -1 if it never was one.
        size: How many ranks it knew of.
        steps: Optimizer steps that it took.
        peak: The most bytes of the process in memory at once.
        collectives: ``(step, kind, bytes, how many)``; step 0 is what came before the first one had begun.
        counted: Whether its groups let themselves be counted; gloo's do not.
        without_gradient: Parameters that never had a gradient, by name.
        unsynchronised: Batch-norm layers over this rank's samples only, by name.
        same_epoch: Shuffling samplers that were not told of a new epoch, in words.
        saved: Paths of checkpoints that it wrote.
        misplaced: ``(place, what, how often)`` of calls that a GPU would refuse.
    """

    rank: int = -1
    size: int = 1
    steps: int = 0
    peak: int = 0
    collectives: tuple[tuple[int, str, int, int], ...] = ()
    counted: bool = True
    without_gradient: tuple[str, ...] = ()
    unsynchronised: tuple[str, ...] = ()
    same_epoch: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    misplaced: tuple[tuple[str, str, int], ...] = ()


def write(folder: str, facts: Facts) -> None:
    """Leave facts for the launcher; a second time takes the place of the first."""
    path = Path(folder) / f"facts-{os.getpid()}.json"
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(facts._asdict()))
    beside.rename(path)


def read_all(folder: str) -> list[Facts]:
    """Read what every process has left, by rank."""
    found = [from_plain(json.loads(path.read_text())) for path in Path(folder).glob("facts-*.json")]
    return sorted(found, key=lambda facts: facts.rank)


def from_plain(values: Mapping[str, Any]) -> Facts:
    """Undo what JSON does to tuples."""
    rows = ("collectives", "misplaced")
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Facts(**plain | {name: tuple(map(tuple, plain[name])) for name in rows})
