"""What the ranks told, in words: one sentence that names the cause where it is plain, then rank by rank. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Call(NamedTuple):
    """A collective or message that a rank is in.

    Attributes:
        ranks: Who takes part, as numbers in the world; empty where that is not known.
        group: The process group's name; the same on all its ranks.
        number: Its place among the group's calls; -1 where calls are not counted.
        kind: Such as ``"all_reduce"``.
        detail: Such as ``"of 4 float32"``.
    """

    ranks: tuple[int, ...]
    group: str
    number: int
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        number = f" #{self.number}" if self.number >= 0 else ""
        return f"{self.kind}{number} {self.detail}".rstrip()


class Seen(NamedTuple):
    """What one rank is at.

    Attributes:
        rank: Its number.
        steps: Optimizer steps that it has finished.
        call: What it waits in; None if it waits for no other rank.
        place: Its script's line, such as ``"train.py:61"``.
        guard: The condition that this line stands under, such as ``"if rank == 0"``.
        doing: The function that it is in; of a silent one why it is that, where it is known.
        ended: Whether its script has come to its end.
        silent: Whether it did not answer, and only its stack was taken.
        stack: Python's stack, ready to print.
        past: Calls that it has made lately: group, number, and what it was.
    """

    rank: int
    steps: int = 0
    call: Call | None = None
    place: str = ""
    guard: str = ""
    doing: str = ""
    ended: bool = False
    silent: bool = False
    stack: str = ""
    past: tuple[tuple[str, int, str], ...] = ()


class Node(NamedTuple):
    """What the launcher of one node has seen.

    Attributes:
        number: The node's.
        host: Its name.
        ranks: Its ranks.
    """

    number: int
    host: str
    ranks: tuple[Seen, ...]


def report(
    cause: str, ranks: Sequence[Seen], seconds: float, others: Sequence[Node] = (), missing: Sequence[int] = ()
) -> str:
    r"""Everything that is printed.

    Args:
        cause: From `find_cause`, for the ranks of all nodes that are known of.
        ranks: Those of this node, whose stacks are shown.
        seconds: How long none has finished a step.
        others: What other nodes have told.
        missing: Nodes that have told nothing.

    Example:
        >>> print(report("why", [Seen(0, steps=3, ended=True)], 120.0), end="")
        lockstep: no rank has finished a step for 120 s: why
        lockstep: rank 0: 3 steps, has ended
    """
    rows = [f"rank {seen.rank}: {_row(seen)}\n{seen.stack}" for seen in ranks]
    rows += [f"node {node.number} ({node.host}) prints the stacks of {_names(node.ranks)}\n" for node in others]
    rows += [
        f"node {node} has not told where its ranks are: they go on, nobody watches there (--watch), or the network is "
        f"down\n"
        for node in missing
    ]
    none = "no rank of this node" if missing else "no rank"
    return f"lockstep: {none} has finished a step for {seconds:.0f} s: {cause}\n" + "".join(
        f"lockstep: {row}" for row in rows
    )


def waits(ranks: Iterable[Seen]) -> bool:
    """Whether any rank waits for another."""
    return any(seen.call for seen in ranks)


def find_cause(ranks: Sequence[Seen]) -> str:
    """One sentence on what keeps the ranks.

    Example:
        >>> call = Call((0, 1), "0", 7, "barrier")
        >>> find_cause([Seen(0, 5, call, "a.py:6", "if rank == 0"), Seen(1, 5, None, "a.py:9", "", "f")])
        'rank 1 never entered barrier #7, in which rank 0 waits, a.py:6, under `if rank == 0`; rank 1 is in f, a.py:9'
    """
    waiting = [seen for seen in ranks if seen.call]
    if not waiting:
        return "no rank waits for another: " + _list(ranks)
    groups = _together(waiting)
    first = groups[0]
    missing = _missing(first, ranks)
    if missing:
        text = _away(first, missing)
    elif len(groups) == 1:
        text = _all_in_one(first, ranks)
    else:
        text = _several(groups)
    return text + _steps(ranks) + _parting(ranks)


def _together(waiting: Sequence[Seen]) -> list[list[Seen]]:
    """Put ranks that wait in the same call together; the call that is behind comes first."""
    found: dict[object, list[Seen]] = {}
    for seen in waiting:
        call = seen.call
        assert call is not None
        found.setdefault((call.group, call.number, call.kind, call.detail), []).append(seen)
    # Numbers of different groups say nothing of each other. Of calls with the same number, one under a condition is
    # more likely the one that should not be there.
    alone = len({_call(group).group for group in found.values()}) == 1
    return sorted(
        found.values(), key=lambda group: (_call(group).number * alone, not group[0].guard * alone, group[0].rank)
    )


def _call(group: Sequence[Seen]) -> Call:
    call = group[0].call
    assert call is not None
    return call


def _missing(group: Sequence[Seen], ranks: Iterable[Seen]) -> list[Seen]:
    """Who should be in a call, and waits nowhere."""
    members = _call(group).ranks
    return [seen for seen in ranks if not seen.call and (not members or seen.rank in members)]


def _away(group: Sequence[Seen], missing: Sequence[Seen]) -> str:
    call, here = _call(group), _names(group)
    ended = [seen for seen in missing if seen.ended]
    waiting = f"in which {here} {_verb(group, 'waits', 'wait')}, {_at(group[0])}"
    if ended:
        return f"{_names(ended)} {_verb(ended, 'has', 'have')} ended and never entered {call}, {waiting}"
    return f"{_names(missing)} never entered {call}, {waiting}; {_list(missing)}"


def _all_in_one(group: Sequence[Seen], ranks: Iterable[Seen]) -> str:
    call = _call(group)
    elsewhere = sorted(set(call.ranks) - {seen.rank for seen in ranks})
    here = f"{_names(group)} {_verb(group, 'is', 'are')} in {call}, {_at(group[0])}"
    if elsewhere:
        return f"{here}; nothing is known here of rank(s) {', '.join(map(str, elsewhere))}, on other nodes"
    return f"{here}, all in the same call: what carries it does not go on (network, device or process group)"


def _several(groups: Sequence[Sequence[Seen]]) -> str:
    first, *others = groups
    text = f"{_names(first)} {_verb(first, 'is', 'are')} in {_call(first)}, {_at(first[0])}"
    for group in others:
        same = _call(group).group == _call(first).group
        past = " past it" if same and _call(group).number > _call(first).number >= 0 else ""
        of = "" if same else " of another group"
        text += f"; {_names(group)} {_verb(group, 'is', 'are')}{past} in {_call(group)}{of}, {_at(group[0])}"
    return text


def _steps(ranks: Iterable[Seen]) -> str:
    """Say so where ranks have taken different numbers of steps."""
    by_steps: dict[int, list[Seen]] = {}
    for seen in ranks:
        if not seen.silent:
            by_steps.setdefault(seen.steps, []).append(seen)
    if len(by_steps) < 2:
        return ""
    parts = [
        f"{_names(group)} {_verb(group, 'has', 'have')} {_count(steps)}" for steps, group in sorted(by_steps.items())
    ]
    return f" ({', '.join(parts)})"


def _parting(ranks: Sequence[Seen]) -> str:
    """Where ranks brought different calls to the same number earlier on, which nobody noticed then."""
    now = {(seen.rank, seen.call.group, seen.call.number) for seen in ranks if seen.call}
    calls: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for seen in ranks:
        for group, number, what in seen.past:
            calls.setdefault((group, number), []).append((seen.rank, what))
    for (group, number), made in sorted(calls.items()):
        rank, what = made[0]
        other = next(((r, w) for r, w in made if w != what), None)
        if other and not {(rank, group, number), (other[0], group, number)} <= now:
            return (
                f". They parted before: call #{number} of the group was {what} on rank {rank}, "
                f"and {other[1]} on rank {other[0]}"
            )
    return ""


def _row(seen: Seen) -> str:
    if seen.ended:
        return f"{_count(seen.steps)}, has ended"
    if seen.silent:
        return f"did not answer: {_silence(seen)}"
    what = f"waits in {seen.call}" if seen.call else f"waits for no rank, is in {seen.doing or '?'}"
    return f"{_count(seen.steps)}, {what}, {_at(seen)}"


def _list(ranks: Iterable[Seen]) -> str:
    return "; ".join(f"rank {seen.rank} {_state(seen)}" for seen in ranks)


def _state(seen: Seen) -> str:
    if seen.ended:
        return "has ended"
    if seen.silent:
        return f"does not answer: {_silence(seen)}"
    return f"is in {seen.doing or '?'}, {_at(seen)}"


def _silence(seen: Seen) -> str:
    why = seen.doing or "native code holds Python's lock"
    return f"{why}, {seen.place}" if seen.place else why


def _at(seen: Seen) -> str:
    return (seen.place or "?") + (f", under `{seen.guard}`" if seen.guard else "")


def _names(ranks: Sequence[Seen]) -> str:
    numbers = ", ".join(str(seen.rank) for seen in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _verb(ranks: Sequence[Seen], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _count(steps: int) -> str:
    return f"{steps} step" if steps == 1 else f"{steps} steps"
