import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

import lockstep

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64),
]


def rows(rank, lengths, shape, dtype):
    """Numbered rows of all ranks, this rank's part."""
    everyone = torch.arange(sum(lengths) * math.prod(shape)) % (2 if dtype == torch.bool else 128)
    start = sum(lengths[:rank])
    return everyone.reshape(sum(lengths), *shape)[start : start + lengths[rank]].to(dtype)


def gather_cases(rank, cases):
    return [lockstep.gather(rows(rank, *case)) for case in cases]


@settings(max_examples=5)
@given(st.data())
def test_m04_rows_of_any_number_dtype_and_shape_come_rank_by_rank(data):
    """all_gather of different sizes raises on gloo; here sizes of 0 work as well."""
    size = data.draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    shapes = st.lists(st.integers(0, 3), max_size=3)
    cases = data.draw(st.lists(st.tuples(lengths, shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8))

    results = run_ranks(gather_cases, size, cases, backend="gloo" if size > 1 else None)

    for i, case in enumerate(cases):
        expected = torch.cat([rows(rank, *case) for rank in range(size)])
        assert [torch.equal(result[i], expected) for result in results] == [True] * size
        assert {result[i].dtype for result in results} == {expected.dtype}


def gather_nested(rank):
    return lockstep.gather({"n": rank, "x": (torch.tensor(float(rank)), torch.arange(rank))})


def test_containers_keep_their_shape_and_numbers_become_vectors():
    for result in run_ranks(gather_nested, 3):
        assert result["n"].tolist() == [0, 1, 2]
        assert result["x"][0].tolist() == [0.0, 1.0, 2.0]
        assert result["x"][1].tolist() == [0, 0, 1]


def gather_from_nothing(rank):
    mine = torch.empty(0) if rank == 0 else torch.full((2, 3), rank)
    return lockstep.gather(mine)


def test_a_rank_without_rows_need_not_know_their_dtype_and_shape():
    for result in run_ranks(gather_from_nothing, 2):
        assert (result.dtype, result.tolist()) == (torch.int64, [[1, 1, 1], [1, 1, 1]])


def try_to_gather(rank, brought):
    try:
        lockstep.gather(brought[rank])
    except lockstep.LockstepError as error:
        return type(error).__name__, str(error)
    return "nothing raised", ""


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], ["(3,) of float32 on rank 0", "(4,) of float32 on rank 1"]),
        ([torch.ones(2), torch.ones(2, dtype=torch.int64)], ["float32 on rank 0", "int64 on rank 1"]),
        ([[torch.ones(2)], [torch.ones(2)] * 2], ["[tensor]", "[tensor, tensor]"]),
        ([torch.ones(2), "text"], ["not str"]),
        ([torch.ones(2), torch.ones(2).to_sparse()], ["sparse"]),
    ],
    ids=["shape", "dtype", "structure", "no-tensor-on-one-rank", "sparse-on-one-rank"],
)
def test_what_differs_between_ranks_raises_on_all_of_them(brought, words):
    results = run_ranks(try_to_gather, 2, brought)

    assert [name for name, _ in results] == ["MismatchError"] * 2
    assert [word for word in words for _, message in results if word not in message] == []


class Given:
    """Stands where a loader would: what this rank was given."""

    def __init__(self, positions):
        self._positions = torch.tensor(positions, dtype=torch.int64)

    def positions(self):
        return self._positions


GIVEN = [[0, 1, 5, 6], [2, 3], [4]]


def gather_in_order(rank):
    mine = torch.tensor(GIVEN[rank])
    return lockstep.gather((mine * 10, mine.float()[:, None]), Given(GIVEN[rank]))


def test_m08_with_a_loader_rows_come_in_the_order_of_the_data_set():
    """Three ranks that hold shares of several batches."""
    for tens, column in run_ranks(gather_in_order, 3):
        assert tens.tolist() == [0, 10, 20, 30, 40, 50, 60]
        assert column.tolist() == [[float(i)] for i in range(7)]


def gather_too_few(rank):
    mine = torch.zeros(4 if rank == 0 else 1)
    try:
        lockstep.gather(mine, Given(GIVEN[rank]))
    except lockstep.LockstepError as error:
        return type(error).__name__, str(error)


def test_rows_that_do_not_match_the_loaders_samples_raise_on_every_rank():
    results = run_ranks(gather_too_few, 2)

    assert [name for name, _ in results] == ["MismatchError"] * 2
    assert ["1 rows, but the loader has given this rank 2 samples" in message for _, message in results] == [True] * 2


def gather_a_million(rank):
    mine = torch.arange(rank, 1_000_000, 2)
    gathered = lockstep.gather({"label": mine, "score": mine.float() / 1e6}, Given(mine.tolist()))
    return bool((gathered["label"] == torch.arange(1_000_000)).all()), gathered["score"].dtype, len(gathered["score"])


def test_m05_a_million_predictions_travel_as_tensors():
    """Gathering them as pickled objects is slow and needs several times the memory."""
    assert run_ranks(gather_a_million, 2) == [(True, torch.float32, 1_000_000)] * 2
