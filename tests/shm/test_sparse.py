"""Sums of sparse tensors: the same as of dense ones, whatever entries each rank has."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

import lockstep

few = settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
cases = st.lists(
    st.tuples(
        st.sampled_from([((7,), ()), ((5, 3), ()), ((6,), (4,)), ((0,), (2,)), ((50, 20), (3,))]),
        st.sampled_from(DTYPES),
        st.integers(0, 40),
        st.booleans(),
    ),
    min_size=10,
    max_size=20,
)


def draw(rank, seed, shape, dtype, most):
    """Some entries, of which some are there twice, other ones on every rank; whole numbers, so that sums are exact."""
    sparse, dense = shape
    numbers = torch.Generator().manual_seed(1000 * seed + rank)
    count = int(torch.randint(most + 1, (), generator=numbers)) if all(sparse) else 0
    index = torch.stack([torch.randint(max(n, 1), (count,), generator=numbers) for n in sparse])
    values = torch.randint(-8, 8, (count, *dense), generator=numbers).to(dtype)
    return torch.sparse_coo_tensor(index, values, (*sparse, *dense), check_invariants=False)


def wrong_sums(rank, drawn):
    found, size = [], dist.get_world_size()
    for seed, (shape, dtype, most, later) in enumerate(drawn):
        x = draw(rank, seed, shape, dtype, most)
        work = dist.all_reduce(x, async_op=later)
        if work is not None:
            work.wait()
        expected = sum(draw(r, seed, shape, dtype, most).to_dense() for r in range(size))
        if x.dtype != dtype or not torch.equal(x.to_dense(), expected):
            found.append(seed)
    return found


@pytest.mark.parametrize("size", [1, 2, 5])
@few
@given(drawn=cases)
def test_sums_of_sparse_tensors_are_those_of_dense_ones(size, drawn):
    assert run_ranks(wrong_sums, size, drawn, backend="shm") == [[]] * size


def disagree(rank):
    with pytest.raises(lockstep.MismatchError) as caught:
        dist.all_reduce(torch.eye(3 + rank).to_sparse())
    y = torch.eye(2).to_sparse()
    dist.all_reduce(y)
    return str(caught.value), y.to_dense().tolist()


def test_other_shapes_are_refused_on_every_rank():
    for said, after in run_ranks(disagree, 2, backend="shm"):
        assert "rank 0 of the group brought shape (3, 3) with 2 sparse dimensions, rank 1 (4, 4) with 2" in said
        assert after == [[2.0, 0.0], [0.0, 2.0]]
