"""Sums of tensors that all ranks have mapped: the same bits as any other sum, whatever the others bring."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from lockstep.errors import LostRankError, MismatchError
from lockstep.shm import placed, segment
from lockstep.shm.tensors import LATER

few = settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
COUNTS = (1, 70_001, 131_073, 300_000, 1_000_003)  # 256 KiB are the largest message that is not reduced in slices
BRINGS = ("placed", "other", "own")  # the tensor that is placed, another one that is, one that is not


def prepared(tensor, where=None):
    group = dist.group.WORLD
    return lambda: group.sum_again(tensor, group._tensors.prepare_sum(tensor, where), LATER).wait()


def values(count, dtype, rank):
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (drawn * 40).to(dtype)


def differences(rank, cases):
    """Cases in which a rank has other bits than torch's call gives."""
    found = []
    for case, (dtype, count, brings) in enumerate(cases):
        first, second = (placed.place(dist.group.WORLD, count, dtype) for _ in range(2))
        x = values(count, dtype, rank)
        expected = x.clone()
        dist.all_reduce(expected)
        where = {"placed": first, "other": second, "own": None}[brings[rank]]
        mine = where.own if where is not None else torch.empty_like(x)
        again = prepared(mine, where)
        for _ in range(2):
            mine.copy_(x)
            again()
            if not torch.equal(mine, expected):
                found.append(case)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@few
@given(data=st.data())
def test_the_bits_are_those_of_any_other_sum(size, data):
    some = st.lists(st.sampled_from(BRINGS), min_size=size, max_size=size) | st.just(["placed"] * size)
    case = st.tuples(st.sampled_from(DTYPES), st.sampled_from(COUNTS), some)
    cases = data.draw(st.lists(case, min_size=8, max_size=12))
    assert run_ranks(differences, size, cases, backend="shm") == [[]] * size


def without_room(rank):
    if rank == 1:
        placed.room_for = lambda size: os.open("/nowhere", os.O_RDONLY)
    return placed.place(dist.group.WORLD, 10, torch.float32)


def test_one_rank_without_room_and_none_has_any():
    assert run_ranks(without_room, 3, backend="shm") == [None] * 3


def left_behind(rank):
    def here():
        maps = Path("/proc/self/maps").read_text().count("memfd:lockstep")
        return maps, len(list(Path("/proc/self/fd").iterdir()))

    before = here()
    places = [placed.place(dist.group.WORLD, 300_000, torch.float32) for _ in range(3)]
    between = here()
    for each in places:
        prepared(each.own, each)()
    del places, each
    gc.collect()
    return before, between, here()


def test_memory_goes_with_the_last_who_has_it():
    for before, between, after in run_ranks(left_behind, 2, backend="shm"):
        assert after == before
        assert between == (before[0] + 6, before[1])


def different(rank):
    where = placed.place(dist.group.WORLD, 300_000, torch.float32)
    try:
        prepared(where.own, where)() if rank else dist.all_reduce(torch.ones(70_000))
    except MismatchError as error:
        message = str(error)
    where.own.fill_(rank + 1)
    prepared(where.own, where)()
    return message, where.own.unique().tolist()


def test_other_calls_are_told_apart_before_anything_is_written():
    for message, found in run_ranks(different, 2, backend="shm"):
        assert "rank 0 called all_reduce (sum) of 70000 float32, rank 1 called all_reduce (sum) of 300000" in message
        assert found == [3.0]


def left_alone(rank):
    where = placed.place(dist.group.WORLD, 300_000, torch.float32)
    if rank == 1:
        dist.destroy_process_group()
        return None
    where.own.fill_(1)
    try:
        prepared(where.own, where)()
    except LostRankError as error:
        return str(error), where.own.unique().tolist(), placed.place(dist.group.WORLD, 5, torch.float32)


def test_a_rank_that_left_is_named_and_what_is_placed_stays_here():
    (message, found, later), _ = run_ranks(left_alone, 2, backend="shm")
    assert "rank 1 (pid" in message
    assert found == [1.0]
    assert later is None


def test_the_pages_are_private_and_stay_as_large():
    fd = segment.room_for(5000)
    try:
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 100)
    finally:
        os.close(fd)
