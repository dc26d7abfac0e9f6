import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

import lockstep
from lockstep.world import current


@dataclasses.dataclass
class Score:
    hits: int
    loss: torch.Tensor


def total_of_a_container(rank):
    x = {
        "n": rank + 1,
        "loss": 0.5 * rank,
        "right": rank == 1,
        "score": Score(10 * rank, torch.full((2,), float(rank))),
    }
    return lockstep.total(x)


def test_numbers_tensors_and_containers_are_added_up_on_every_rank():
    results = run_ranks(total_of_a_container, 3)

    for result in results:
        assert (result["n"], result["loss"], result["right"], result["score"].hits) == (6, 1.5, 1, 30)
        assert result["score"].loss.tolist() == [3.0, 3.0]
        assert [type(result[key]) for key in ("n", "loss", "right")] == [int, float, int]


def sum_cases(rank, cases):
    return [lockstep.total(case[rank]) for case in cases]


@settings(max_examples=5)
@given(st.data())
def test_integers_are_added_exactly_and_floats_in_float64(data):
    size = data.draw(st.integers(1, 4))
    integers = st.integers(-(2**60), 2**60)
    floats = st.floats(-1e6, 1e6)
    cases = data.draw(
        st.lists(st.lists(st.tuples(integers, floats), min_size=size, max_size=size), min_size=1, max_size=8)
    )

    results = run_ranks(sum_cases, size, cases, backend="gloo" if size > 1 else None)

    for case, got in zip(cases, results[0], strict=True):
        assert got[0] == sum(i for i, _ in case)
        assert got[1] == pytest.approx(sum(f for _, f in case), abs=1e-8)
    assert results == [results[0]] * size


def total_of_dtypes(rank):
    kinds = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
    sums = lockstep.total([torch.ones(2, dtype=kind) for kind in kinds])
    return [(str(x.dtype), x.tolist()) for x in sums]


def test_tensors_keep_their_dtype_and_bools_are_counted():
    expected = [
        ("torch.float16", [3.0, 3.0]),
        ("torch.bfloat16", [3.0, 3.0]),
        ("torch.float64", [3.0, 3.0]),
        ("torch.int8", [3, 3]),
        ("torch.int64", [3, 3]),
        ("torch.complex64", [3.0, 3.0]),
    ]

    assert run_ranks(total_of_dtypes, 3)[2] == expected


def total_of_halves(rank):
    return float(lockstep.total(torch.tensor([2048.0, 1.0, 1.0, 1.0][rank], dtype=torch.float16)))


def test_half_types_are_added_in_float32():
    """In float16 2048 + 1 is 2048, three times; 2051 rounds to 2052."""
    assert run_ranks(total_of_halves, 4) == [2052.0] * 4


def keeps_its_argument(rank):
    x = torch.ones(2, requires_grad=True)
    summed = lockstep.total(x)
    return x.tolist(), summed.requires_grad, summed.tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_the_argument_stays_as_it_is_and_the_sum_carries_no_gradient(size):
    results = run_ranks(keeps_its_argument, size, backend="gloo" if size > 1 else None)

    assert results == [([1.0, 1.0], False, [float(size)] * 2)] * size


def uneven_means(rank):
    batches = [[4.0, 2.0, 0.0, 2.0], [1.0, 3.0, 5.0, 3.0], [6.0]]
    mine = [x for batch in batches[rank::2] for x in batch]
    return lockstep.mean(sum(mine), len(mine)), lockstep.mean(torch.tensor(mine).sum(), len(mine))


def test_m03_the_mean_is_over_all_samples_not_over_ranks_or_batches():
    """Batches of 4, 4 and 1 over 2 ranks: a mean of means counts the last sample four times."""
    for number, tensor in run_ranks(uneven_means, 2):
        assert number == pytest.approx(26 / 9)
        assert float(tensor) == pytest.approx(26 / 9)
        assert tensor.dtype == torch.float32


def mean_without_anything(rank):
    return lockstep.mean(0.0, 0), lockstep.mean(torch.tensor([2.0, 0.0]), torch.tensor([1, 0])).tolist()


def test_a_mean_of_nothing_is_nan():
    (number, vector), _ = run_ranks(mean_without_anything, 2)

    assert np.isnan([number, vector[1]]).all()
    assert vector[0] == 2.0


def integer_average(rank):
    return lockstep.mean(torch.tensor([rank, 7]), 1).tolist()


def test_m06_averages_of_integers_are_right():
    """ReduceOp.AVG of integers raises on gloo, and was wrong for floats once."""
    assert run_ranks(integer_average, 2)[1] == [0.5, 7.0]


class CountingRanks:
    """The ranks of the world, counting what is sent."""

    def __init__(self, ranks):
        self.inner, self.size, self.sent = ranks, ranks.size, 0

    def add_up(self, x):
        self.sent += 1
        return self.inner.add_up(x)

    def line_up(self, x):
        self.sent += 1
        return self.inner.line_up(x)


def count_messages(rank):
    world = lockstep.init(device="cpu")
    world.ranks = counting = CountingRanks(world.ranks)
    lockstep.total({f"metric {i}": float(i) for i in range(100)})
    return counting.sent


def test_m07_a_hundred_numbers_travel_in_one_message_beside_the_check():
    """Reducing each logged scalar by itself made 3,902 small collectives an epoch."""
    assert run_ranks(count_messages, 2) == [2, 2]


def bring_something_else(rank, brought):
    try:
        lockstep.total(brought[rank])
    except lockstep.LockstepError as error:
        return type(error).__name__, str(error)
    return "nothing raised", ""


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        ([1, 1.0], ["Rank 0", "int", "rank 1", "float"]),
        ([torch.ones(4), torch.ones(8)], ["float32 (4,)", "float32 (8,)"]),
        ([torch.ones(4), torch.ones(4, dtype=torch.int32)], ["float32 (4,)", "int32 (4,)"]),
        ([{"a": 1}, {"b": 1}], ["'a'", "'b'"]),
        ([1, "one"], ["not str"]),
    ],
    ids=["kind", "shape", "dtype", "keys", "no-number-on-one-rank"],
)
def test_what_differs_between_ranks_raises_on_all_of_them(brought, words):
    results = run_ranks(bring_something_else, 2, brought)

    assert [name for name, _ in results] == ["MismatchError"] * 2
    assert [word for word in words for _, message in results if word not in message] == []


def test_what_is_no_number_on_any_rank_says_what_to_do():
    results = run_ranks(bring_something_else, 2, ["one", "one"])

    assert [(name, "not str" in message, f"rank {r} of 2" in message) for r, (name, message) in enumerate(results)] == [
        ("UsageError", True, True)
    ] * 2


def go_on_after_a_mismatch(rank):
    world = current()
    with pytest.raises(lockstep.MismatchError):
        lockstep.total([1] * (rank + 1))
    world.barrier()
    return lockstep.total(rank)


def test_after_a_mismatch_the_ranks_are_still_in_step():
    assert run_ranks(go_on_after_a_mismatch, 3) == [3, 3, 3]


def total_of_narrow_integers(rank, fits):
    x = torch.tensor([100, 100 if fits else 200], dtype=torch.uint8)
    try:
        return lockstep.total(x).tolist()
    except lockstep.UsageError as error:
        return str(error)


def test_a_sum_that_its_dtype_cannot_hold_raises_on_every_rank():
    assert run_ranks(total_of_narrow_integers, 2, True) == [[200, 200]] * 2
    assert [said[:67] for said in run_ranks(total_of_narrow_integers, 2, False)] == [
        "lockstep.total: a sum is 400, which torch.uint8 cannot hold. Pass x"
    ] * 2


def total_of_a_huge_number(rank):
    try:
        return lockstep.total(2**62)
    except lockstep.UsageError as error:
        return str(error)


def test_python_integers_are_exact_or_refused():
    assert run_ranks(total_of_a_huge_number, 1, backend=None) == [2**62]
    assert ["does not fit into 64 bits" in said for said in run_ranks(total_of_a_huge_number, 2)] == [True, True]


def test_the_mean_of_complex_numbers_is_refused_rather_than_cut():
    with pytest.raises(lockstep.UsageError, match="divides real numbers"):
        lockstep.mean(torch.tensor(1 + 1j), 2)
