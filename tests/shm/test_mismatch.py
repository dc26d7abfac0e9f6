"""Ranks that bring different things: an error on every rank that names both, and a group that still works."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import lockstep


def attempt(rank, calls):
    """Make this rank's call, then one that all make alike."""
    try:
        calls[rank]()
    except lockstep.MismatchError as error:
        said = str(error)
    else:
        said = None
    x = torch.ones(2)
    dist.all_reduce(x)
    return said, x.tolist()


def h03(rank, later):
    sizes = (4, 8, 4)

    def call():
        work = dist.all_reduce(torch.ones(sizes[rank]), async_op=later)
        if later:
            work.wait()

    return attempt(rank, [call] * 3)


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_h03_different_sizes_raise_on_all_ranks(later):
    """H03: collectives of different sizes corrupt what follows, or hang."""
    for rank, (said, after) in enumerate(run_ranks(h03, 3, later, backend="shm")):
        assert said.startswith(f"rank {rank} of 3: the ranks brought different calls")
        assert "rank 0 called all_reduce (sum) of 4 float32, rank 1 called all_reduce (sum) of 8 float32" in said
        assert after == [3.0, 3.0]


def h04(rank):
    dtype = (torch.float32, torch.int32)[rank]
    return attempt(rank, [lambda: dist.all_reduce(torch.ones(4, dtype=dtype))] * 2)


def test_h04_different_dtypes_raise_on_all_ranks():
    """H04: gloo adds float bits to int bits."""
    for said, after in run_ranks(h04, 2, backend="shm"):
        assert "rank 0 called all_reduce (sum) of 4 float32, rank 1 called all_reduce (sum) of 4 int32" in said
        assert after == [2.0, 2.0]


def sum_of(dtype, *, factor=None):
    op = dist.ReduceOp.BOR if dtype is torch.uint8 else dist.ReduceOp.SUM
    op = op if factor is None else dist._make_nccl_premul_sum(factor)
    dist.all_reduce(torch.ones(4, dtype=dtype), op=op)


def scatter_sum_of(dtype, count):
    dist.reduce_scatter(torch.ones(count, dtype=dtype), [torch.ones(count, dtype=dtype)] * 2)


def one_computation(rank):
    """Calls that differ, and that the core would compute alike."""
    pairs = (
        (lambda: sum_of(torch.bool), lambda: sum_of(torch.uint8)),
        (lambda: sum_of(torch.float32, factor=2.0), lambda: sum_of(torch.float32)),
        (lambda: scatter_sum_of(torch.complex64, 2), lambda: scatter_sum_of(torch.float32, 4)),
        (dist.barrier, lambda: dist.broadcast(torch.empty(0, dtype=torch.float8_e8m0fnu), 0)),
    )
    return [attempt(rank, pair)[0] for pair in pairs]


def test_calls_that_compute_the_same_are_told_apart():
    for bools, scaled, pairs, eighths in run_ranks(one_computation, 2, backend="shm"):
        assert "rank 0 called all_reduce (bor) of 4 bool, rank 1 called all_reduce (bor) of 4 uint8" in bools
        assert "all_reduce (premul-sum) of 4 float32, rank 1 called all_reduce (sum) of 4 float32" in scaled
        assert "reduce_scatter (sum) of 2 complex64, rank 1 called reduce_scatter (sum) of 4 float32" in pairs
        assert "broadcast of 0 float8_e8m0fnu from 0" in eighths


def h05(rank):
    a, b = torch.ones(4), torch.ones(4)
    orders = [(lambda: dist.all_reduce(a), lambda: dist.broadcast(b, 0))]
    orders.append(orders[0][::-1])
    said = []
    for call in orders[rank]:
        try:
            call()
        except lockstep.MismatchError as error:
            said.append(str(error))
    return said


def test_h05_another_order_raises_on_all_ranks():
    """H05: the same collectives in another order add the wrong tensors."""
    for said in run_ranks(h05, 2, backend="shm"):
        assert "rank 0 called all_reduce (sum) of 4 float32, rank 1 called broadcast of 4 float32 from 0" in said[0]
        assert "collective number 2" in said[1]


def large_and_small(rank):
    sizes = (3_000_000, 5)
    return attempt(rank, [lambda: dist.all_reduce(torch.ones(sizes[rank]))] * 2)


def test_a_large_call_against_a_small_one_raises():
    for said, after in run_ranks(large_and_small, 2, backend="shm"):
        assert "3000000 float32" in said
        assert after == [2.0, 2.0]


def other_roots(rank):
    return attempt(rank, [lambda: dist.broadcast(torch.ones(2), rank)] * 2)


def test_different_roots_raise():
    for said, _ in run_ranks(other_roots, 2, backend="shm"):
        assert "rank 0 called broadcast of 2 float32 from 0, rank 1 called broadcast of 2 float32 from 1" in said


def other_splits(rank):
    give, take = ([1, 2], [1, 1]) if rank == 0 else ([3, 1], [2, 1])
    x, out = torch.ones(sum(give)), torch.empty(sum(take))
    return attempt(rank, [lambda: dist.all_to_all_single(out, x, take, give)] * 2)


def test_splits_that_do_not_fit_raise_on_all_ranks():
    for said, after in run_ranks(other_splits, 2, backend="shm"):
        assert "rank 1 gives 3 elements to rank 0, which takes 1 from it" in said
        assert after == [2.0, 2.0]


def in_a_subgroup(rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    try:
        dist.all_reduce(torch.ones(rank + 1), group=group)
    except lockstep.MismatchError as error:
        return str(error)


def test_messages_name_the_ranks_of_the_world():
    first, _, last = run_ranks(in_a_subgroup, 3, backend="shm")

    assert first.startswith("rank 0 (group of ranks [0, 2]): ")
    assert "rank 0 called all_reduce (sum) of 1 float32, rank 2 called all_reduce (sum) of 3 float32" in last


def wrong_message(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)
        dist.send(torch.ones(2), 1)
        return None
    with pytest.raises(
        lockstep.MismatchError, match=r"recv expected 5 float64, but rank 0 of the group sent 12 bytes of float32"
    ):
        dist.recv(torch.ones(5, dtype=torch.float64), 0)
    x = torch.zeros(2)
    dist.recv(x, 0)
    return x.tolist()


def test_a_message_of_another_size_is_refused_and_the_next_one_is_taken():
    assert run_ranks(wrong_message, 2, backend="shm") == [None, [1.0, 1.0]]


def refused(rank):
    x = torch.ones(3)
    said = []
    for call in (
        lambda: dist.all_reduce(x, op=dist.ReduceOp.BAND),
        lambda: dist.all_gather([torch.ones(2), torch.ones(3)], x),
        lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()),
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), op=dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.ones(3, device="meta")),
        lambda: dist.broadcast(x, group_src=2),
        lambda: dist.reduce(x, group_dst=-1),
        lambda: dist.gather(x, group_dst=2),
        lambda: dist.scatter(x, group_src=2),
        lambda: dist.all_reduce(x.to(torch.float8_e5m2), op=dist.ReduceOp.AVG),
        lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
        lambda: dist.group.WORLD.alltoall([x, x], [x.double(), x.double()]),
        lambda: dist.group.WORLD.alltoall_base(x[:2], x[:2].double(), [], []),
    ):
        with pytest.raises(lockstep.UsageError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_what_cannot_be_done_says_what_to_write():
    for band, sizes, csr, largest, device, *roots, float8, sparse, many, one in run_ranks(refused, 2, backend="shm"):
        assert "shm has no BAND of float32 tensors" in band
        assert "tensor 0 of the list has 2 elements" in sizes
        assert "layout torch.sparse_csr" in csr
        assert "to_dense" in largest
        assert 'init_process_group("cpu:shm,cuda:nccl")' in device
        for root, text in zip((2, -1, 2, 2), roots, strict=True):
            assert f"there is no rank {root} in a group of 2" in text
        assert "Convert the tensor first" in float8
        assert "cannot move a tensor of layout torch.sparse_coo" in sparse
        assert "all_to_all of torch.float32 and torch.float64" in many
        assert "all_to_all of torch.float32 and torch.float64" in one
