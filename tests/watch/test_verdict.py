"""The sentence, for what real ranks are rarely caught at."""

import pytest

from lockstep.watch.stacks import conditions
from lockstep.watch.verdict import Call, Seen, find_cause


def call(number, kind="all_reduce", detail="of 4 float32", ranks=(0, 1), group="0"):
    return Call(ranks, group, number, kind, detail)


def test_the_rank_that_is_behind_comes_first():
    ranks = [
        Seen(0, 5, call(419, "barrier", ""), "a.py:7", "if rank == 0"),
        Seen(1, 5, call(418), "a.py:6"),
        Seen(2, 5, call(419, "barrier", ""), "a.py:7", "if rank == 0"),
    ]

    assert find_cause(ranks) == (
        "rank 1 is in all_reduce #418 of 4 float32, a.py:6; "
        "ranks 0, 2 are past it in barrier #419, a.py:7, under `if rank == 0`"
    )


def test_calls_that_differed_before_are_named():
    ranks = [
        Seen(0, 1, call(9), "a.py:6", past=(("0", 3, "barrier"), ("0", 9, "all_reduce of 4 float32"))),
        Seen(1, 1, call(9), "a.py:6", past=(("0", 3, "all_reduce of 1 float32"), ("0", 9, "all_reduce of 4 float32"))),
    ]

    assert "They parted before: call #3 of the group was barrier on rank 0, and all_reduce of 1 float32 on rank 1" in (
        find_cause(ranks)
    )


def test_a_call_that_one_rank_is_past_is_named_if_others_still_wait_in_something_else():
    """A rank that left its epoch early: its metrics were added to the others' gradients."""
    ranks = [
        Seen(0, 3, call(9, detail="of 3 float32"), "a.py:6", past=(("0", 9, "all_reduce of 3 float32"),)),
        Seen(1, 3, call(10), "a.py:6", past=(("0", 9, "all_reduce of 1 float32"), ("0", 10, "all_reduce"))),
    ]

    assert find_cause(ranks).endswith(
        "They parted before: call #9 of the group was all_reduce of 3 float32 on rank 0, and all_reduce of 1 float32 "
        "on rank 1"
    )


def test_calls_of_different_groups_are_told_apart_and_their_numbers_not_compared():
    ranks = [Seen(0, 3, call(7), "a.py:6"), Seen(1, 3, call(2, "barrier", "", group="1"), "a.py:9")]

    assert find_cause(ranks) == (
        "rank 0 is in all_reduce #7 of 4 float32, a.py:6; rank 1 is in barrier #2 of another group, a.py:9"
    )


def test_different_numbers_of_steps_are_said():
    ranks = [Seen(0, 5, call(9), "a.py:6"), Seen(1, 4, ended=True)]

    assert find_cause(ranks).endswith("(rank 1 has 4 steps, rank 0 has 5 steps)")


def test_a_rank_of_another_node_is_missing():
    ranks = [Seen(0, 5, call(9, ranks=(0, 1, 2, 3)), "a.py:6"), Seen(1, 5, call(9, ranks=(0, 1, 2, 3)), "a.py:6")]

    assert find_cause(ranks).endswith("; nothing is known here of rank(s) 2, 3, on other nodes")


def test_a_rank_outside_the_group_is_not_blamed():
    ranks = [Seen(0, 5, call(9), "a.py:6"), Seen(1, 5, call(9), "a.py:6"), Seen(2, 5, None, "a.py:9", "", "f")]

    assert "rank 2" not in find_cause(ranks)


SOURCE = "if a:\n    if rank == 0:\n        f()\n    else:\n        g()\nh()\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [(3, ["if rank == 0", "if a"]), (5, ["else of if rank == 0", "if a"]), (6, [])],
)
def test_conditions_around_a_line(line, found):
    assert conditions(SOURCE, line) == found
