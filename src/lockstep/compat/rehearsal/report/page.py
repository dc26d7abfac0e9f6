"""The facts of all ranks as one report. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lockstep.compat.rehearsal.report.facts import Facts


class Report(NamedTuple):
    """What all ranks have seen together.

    Attributes:
        ranks: How many there were.
        steps: Optimizer steps, the fewest and the most of any rank.
        peaks: Peak memory in bytes, by rank.
        collectives: Kind, bytes and how many of the last whole step, of rank 0; largest first.
        counted: Whether they could be counted.
        without_gradient: Parameters without a gradient, and the ranks on which.
        unsynchronised: Batch-norm layers that see one rank's samples only.
        same_epoch: Samplers that shuffle every epoch alike.
        saved_by_several: Checkpoints that several ranks wrote, and which.
        misplaced: Place, what, and how often: calls that a GPU would refuse.
    """

    ranks: int
    steps: tuple[int, int]
    peaks: tuple[tuple[int, int], ...]
    collectives: tuple[tuple[str, int, int], ...]
    counted: bool
    without_gradient: tuple[tuple[str, tuple[int, ...]], ...]
    unsynchronised: tuple[str, ...]
    same_epoch: tuple[str, ...]
    saved_by_several: tuple[tuple[str, tuple[int, ...]], ...]
    misplaced: tuple[tuple[str, str, int], ...]


def put_together(everyone: Sequence[Facts]) -> Report:
    """Put the facts of all ranks together.

    Args:
        everyone: Of each process. Those that never were a rank nor took a step are left out: what only starts others.
    """
    found = [facts._replace(rank=max(0, facts.rank)) for facts in everyone if facts.rank >= 0 or facts.steps]
    steps = [facts.steps for facts in found] or [0]
    misplaced: Counter[tuple[str, str]] = Counter()
    for facts in found:
        for place, what, count in facts.misplaced:
            misplaced[place, what] += count
    size = max((facts.size for facts in found), default=0)
    first = found[0] if found else Facts()
    return Report(
        ranks=len({facts.rank for facts in found}),
        steps=(min(steps), max(steps)),
        peaks=tuple(sorted((facts.rank, facts.peak) for facts in found)),
        collectives=of_last_step(first),
        counted=all(facts.counted for facts in found),
        without_gradient=_by_rank([(facts.rank, facts.without_gradient) for facts in found]),
        unsynchronised=_once(name for facts in found if size > 1 for name in facts.unsynchronised),
        same_epoch=_once(words for facts in found for words in facts.same_epoch),
        saved_by_several=tuple(
            row for row in _by_rank([(facts.rank, facts.saved) for facts in found]) if len(row[1]) > 1
        ),
        misplaced=tuple((*key, count) for key, count in sorted(misplaced.items())),
    )


def of_last_step(facts: Facts) -> tuple[tuple[str, int, int], ...]:
    """Kind, bytes and how many in the last step that was taken, largest first.

    Example:
        >>> of_last_step(Facts(steps=2, collectives=((1, "broadcast", 8, 9), (2, "all_reduce", 4096, 1))))
        (('all_reduce', 4096, 1),)
    """
    rows = [(kind, size, count) for step, kind, size, count in facts.collectives if step == facts.steps]
    return tuple(sorted(rows, key=lambda row: (-row[1], row[0])))


def _by_rank(rows: Sequence[tuple[int, Sequence[str]]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    for rank, names in rows:
        for name in names:
            ranks[name].add(rank)
    return tuple((name, tuple(sorted(who))) for name, who in ranks.items())


def _once(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))
