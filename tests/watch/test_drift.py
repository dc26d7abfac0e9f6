"""Replicas that part are told, by name and step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import lockstep
from lockstep.collectives.fingerprint import fingerprint
from lockstep.watch.drift import find_drift


def train(rank, changed, steps=6, every=2, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = lockstep.check_in_step(model, every, **options)
    said = None
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if (rank, step) == (1, 3):
            state = model.state_dict()
            if changed:
                state[changed].view(-1)[0] += 1e-6 if state[changed].is_floating_point() else 1
        try:
            optimizer.step()
        except lockstep.MismatchError as error:
            said = said or str(error)
    return said, check.step


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.running_mean", "1.num_batches_tracked"])
def test_a_replica_that_parts_is_named_with_parameter_and_step_on_every_rank(name):
    for rank, (said, steps) in enumerate(run_ranks(train, 3, name)):
        assert said.startswith(
            f"rank {rank} of 3: at step 4 the replicas differ. The first that does is {name!r}: "
            f"rank(s) 1 not as on rank(s) 0, 2."
        )
        assert steps == 6


def test_equal_replicas_pass():
    assert run_ranks(train, 2, None) == [(None, 6)] * 2


def own_statistics(rank):
    return train(rank, "1.running_mean", buffers=False)


def test_buffers_may_differ_where_they_are_each_ranks_own():
    assert run_ranks(own_statistics, 2) == [(None, 6)] * 2


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_buffers_without_plain_values_are_compared_or_left_out():
    quantised = [torch.quantize_per_tensor(torch.tensor([1.0, x]), 0.1, 0, torch.qint8) for x in (2.0, 2.0, 3.0)]
    sums = [fingerprint(each).item() for each in quantised]

    assert sums[0] == sums[1] != sums[2]
    assert fingerprint(torch.ones(3, device="meta")).item() == 0


def other_models(rank):
    model = torch.nn.Linear(2 + rank, 1)
    lockstep.check_in_step(model, 1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_models_of_other_shapes_are_told():
    with pytest.raises(AssertionError, match=r"MismatchError: rank \d of 2: ranks brought different things"):
        run_ranks(other_models, 2)


def test_a_second_call_replaces_the_first_and_remove_ends_it():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = lockstep.check_in_step(model)
    second = lockstep.check_in_step(model, every=7)
    optimizer.step()
    second.remove()
    optimizer.step()

    assert (first.step, second.step) == (0, 1)


def test_of_two_optimizers_only_the_models_own_counts():
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    check = lockstep.check_in_step(model)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    check.remove()

    assert check.step == 1


def test_an_optimizer_of_float32_copies_is_the_models_own():
    """As under O2 of apex and `lockstep.amp`; another network's is not."""
    model, other = torch.nn.Linear(2, 1).bfloat16(), torch.nn.Linear(3, 1)
    check = lockstep.check_in_step(model)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    torch.optim.SGD([parameter.detach().float() for parameter in model.parameters()], lr=0.1).step()
    check.remove()

    assert check.step == 1


def test_every_must_be_a_number_of_steps():
    with pytest.raises(lockstep.UsageError, match="every=0"):
        lockstep.check_in_step(torch.nn.Linear(1, 1), 0)


@given(st.integers(3, 6), st.integers(1, 5), st.data())
def test_one_rank_of_three_or_more_is_found_whichever_it_is(ranks, columns, data):
    odd, at = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, columns - 1))
    rows = [[column + (rank == odd and column >= at) for column in range(columns)] for rank in range(ranks)]

    assert find_drift(rows) == (at, [odd])
