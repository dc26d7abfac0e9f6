"""Ranks that step at other learning rates part without a word in every other tool: here they raise, all of them."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

import lockstep
from lockstep import MismatchError
from lockstep.parallel.rates import differ, short_hash

SCHEDULES = {
    "stepped on rank 0 alone": lambda rank: 0.1 * 0.5 ** (rank == 0),
    "a hair apart": lambda rank: math.nextafter(0.1, rank),
    "no two alike": lambda rank: 0.1 / (rank + 1),
}


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def parted(rank, how, wrapped):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = (lockstep.DistributedDataParallel if wrapped else lockstep.replicate)(model)
    optimizer = torch.optim.SGD([{"params": part.parameters(), "lr": 0.1} for part in model.children()])
    for _ in range(3):
        step(model, optimizer)
    optimizer.param_groups[-1]["lr"] = SCHEDULES[how](rank)
    step(model, optimizer)
    with pytest.raises(MismatchError) as caught:
        step(model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_other_learning_rates_raise_at_the_next_backward(size, how, wrapped):
    for message in run_ranks(parted, size, how, wrapped):
        for rank in range(size):
            last = "" if wrapped else "0.1, "
            assert f"rank {rank}: {last}{SCHEDULES[how](rank):g}" in message
        assert "scheduler.step(lockstep.mean(total, count))" in message


def plateau(rank):
    lockstep.init(device="cpu")
    model = lockstep.replicate(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = lockstep.Update(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def epoch():
        for _ in range(2):
            with update:
                update.backward(model(torch.full((2, 3), 1.0 + rank)).square())
        scheduler.step(9.0 - rank * update.step_count)  # of this rank's own part of the validation

    epoch()
    epoch()
    with pytest.raises(MismatchError) as caught:
        epoch()
    return str(caught.value)


def test_a_plateau_of_each_ranks_own_is_found_out():
    for message in run_ranks(plateau, 2):
        assert "other learning rates on other ranks, so the models parted: rank 0: 0.01; rank 1: 0.1." in message


def sharded(rank):
    """Each rank steps a part of the parameters, at a rate of that part's own, and gives it to the others."""
    model = lockstep.replicate(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model[rank].parameters(), lr=0.1 / (rank + 1))
    for _ in range(3):
        model.zero_grad()
        step(model, optimizer)
        for owner, part in enumerate(model):
            for param in part.parameters():
                dist.broadcast(param.data, owner)
    return [param.detach() for param in model.parameters()]


def test_optimizers_with_a_part_on_each_rank_may_have_other_rates_there():
    first, second = run_ranks(sharded, 2)

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


rates = st.lists(st.floats(0, 1), max_size=3)


@given(st.lists(st.tuples(rates, st.integers(0, 9)), min_size=1, max_size=300))
def test_only_equal_hashes_do_not_differ(ranks):
    numbers = [short_hash(*rank) for rank in ranks]
    sums = (torch.tensor(row, dtype=torch.float32).sum().item() for row in (numbers, [n * n for n in numbers]))

    assert differ(*sums, len(ranks)) == (len(set(numbers)) > 1)
