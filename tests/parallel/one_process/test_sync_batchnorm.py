"""lockstep.SyncBatchNorm inside DataParallel sees the whole batch, and nobody waits in vain."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep


class Net(nn.Module):
    def __init__(self, momentum=0.1, affine=True, around=lambda function, x: function(x)):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(4, 5, 1)
        self.norms = nn.ModuleList(nn.BatchNorm1d(5, momentum=momentum, affine=affine) for _ in range(2))
        self.around = around
        self.double()

    def forward(self, x):
        return self.around(self.inner, x)

    def inner(self, x):
        return self.norms[1](torch.tanh(self.norms[0](self.convolution(x))).pow(2))


def synced(model):
    return lockstep.convert_sync_batchnorm(copy.deepcopy(model))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def results(model, x):
    """Output, gradients of inputs and parameters, of first and second order, buffers."""
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    (slope,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=True)
    (y.pow(3).sum() + slope.square().sum()).backward()
    return [y, leaf.grad, *[p.grad for p in model.parameters()], *model.buffers()]


@settings(max_examples=25)
@given(
    samples=st.integers(1, 9),
    devices=st.integers(2, 4),
    momentum=st.sampled_from([0.1, None]),
    affine=st.booleans(),
)
def test_the_batch_is_that_of_all_replicas(samples, devices, momentum, affine):
    plain = Net(momentum, affine)
    model = lockstep.DataParallel(synced(plain), ["cpu"] * devices)
    x = torch.randn(samples, 4, 3, dtype=torch.float64)

    close(results(model, x), results(plain, x))


def test_inside_a_checkpoint():
    plain = Net(around=lambda function, x: checkpoint(function, x, use_reentrant=False))
    module = synced(plain)
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    for run in (plain, lockstep.DataParallel(module, ["cpu"] * 3)):
        for _ in range(2):
            run(x).pow(3).sum().backward()

    close([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])
    close(list(module.buffers()), list(plain.buffers()))


def test_a_reentrant_checkpoint_is_refused():
    module = synced(Net(around=lambda function, x: checkpoint(function, x, use_reentrant=True)))
    y = lockstep.DataParallel(module, ["cpu"] * 2)(torch.randn(4, 4, 3, dtype=torch.float64).requires_grad_())

    with pytest.raises(lockstep.UsageError, match="use_reentrant=False"):
        y.sum().backward()


def test_gradients_repeat_to_the_bit():
    x, found = torch.randn(40, 4, 3), []
    for _ in range(4):
        module = synced(Net()).float()
        lockstep.DataParallel(module, ["cpu"] * 3)(x).pow(3).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in module.parameters()]))

    assert all(torch.equal(found[0], other) for other in found)


def test_eval_mode_and_one_sample_do_without_the_others():
    plain = Net()
    model, x = lockstep.DataParallel(synced(plain), ["cpu"] * 2), torch.randn(4, 4, 3, dtype=torch.float64)

    close(model(x[:1]), plain(x[:1]))
    close(model.eval()(x), plain.eval()(x))


def test_half_precision_keeps_its_type():
    plain = Net().float()
    model, x = lockstep.DataParallel(synced(plain), ["cpu"] * 2), torch.randn(6, 4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model(x), plain(x)

    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


class Depends(nn.Module):
    """Runs what the first value of its samples says."""

    def __init__(self, choices):
        super().__init__()
        self.layer, self.other = lockstep.SyncBatchNorm(2), lockstep.SyncBatchNorm(2)
        self.choices = choices

    def forward(self, x):
        return self.choices[int(x[0, 0])](self, x)


def fail(model, x):
    raise ArithmeticError("went wrong")


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ((lambda model, x: model.layer(x), fail), ArithmeticError, "went wrong\n.in replica 1 of 2"),
        ((fail, lambda model, x: model.layer(x)), ArithmeticError, "went wrong\n.in replica 0 of 2"),
        (
            (lambda model, x: model.layer(x), lambda model, x: x),
            lockstep.MismatchError,
            "SyncBatchNorm.2. 'layer' waited for replica 1, which ended",
        ),
        (
            (lambda model, x: model.layer(x), lambda model, x: model.other(x)),
            lockstep.MismatchError,
            "replica 0 of 2 is at SyncBatchNorm.2. 'layer', replica 1 at .*'other'",
        ),
    ],
)
def test_nobody_waits_for_a_replica_that_does_not_come(choices, error, message):
    x = torch.tensor([[0.0, 1.0], [0.0, 2.0], [1.0, 3.0], [1.0, 4.0]])

    with pytest.raises(error, match=message):
        lockstep.DataParallel(Depends(choices), ["cpu"] * 2)(x)


def test_one_value_per_channel_over_all_replicas_is_an_error():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        lockstep.DataParallel(nn.Sequential(lockstep.SyncBatchNorm(2)), ["cpu"] * 2)(torch.ones(1, 2))


def on_a_rank(rank):
    model = lockstep.DataParallel(lockstep.SyncBatchNorm(2), ["cpu", "cpu"])
    try:
        model(torch.randn(4, 2))
    except lockstep.UsageError as error:
        return str(error)
    return None


def test_over_ranks_as_well_is_refused_on_every_rank():
    assert all("lockstep run" in message for message in run_ranks(on_a_rank, 2))
