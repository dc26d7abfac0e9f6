"""The layer in a program: modes, options, checkpointing, autocast, groups, and what would hang without a word."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from parallel.batchnorm.cases import Case, assert_joined, reference, results
from ranks import run_ranks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import lockstep


def halves(x, rank):
    return x.tensor_split(2)[rank]


def eval_on_rank_0_only(rank):
    layer = lockstep.SyncBatchNorm(2)
    if rank == 0:
        layer.eval()
        return layer(torch.ones(1, 2)).tolist()
    return None


def test_b05_eval_mode_sends_nothing():
    """B05: rank 0 alone evaluates, and nobody waits."""
    assert run_ranks(eval_on_rank_0_only, 2)[0] == eval_on_rank_0_only(0)


def running_statistics(rank):
    layer = lockstep.SyncBatchNorm(1, momentum=1.0)
    layer(torch.tensor([[1.0], [2.0]]) + 10 * rank)
    return layer.running_mean.item(), layer.running_var.item(), layer.num_batches_tracked.item()


def test_b07_every_rank_keeps_the_statistics_of_all_data():
    """B07: with shifted data on two ranks, plain BN keeps 1.5 on one and 11.5 on the other; pooled it is 6.5."""
    values = torch.tensor([1.0, 2.0, 11.0, 12.0])

    assert run_ranks(running_statistics, 2) == [(6.5, pytest.approx(values.var().item()), 1)] * 2


def one_value_in_all(rank):
    try:
        lockstep.SyncBatchNorm(3)(torch.ones(1 - rank, 3))
    except ValueError as error:
        return str(error)
    return "no error"


def test_one_value_in_the_whole_world_raises_on_every_rank():
    for message in run_ranks(one_value_in_all, 2):
        assert "Expected more than 1 value per channel when training" in message


def nothing_at_all(rank):
    layer = lockstep.SyncBatchNorm(3)
    y = layer(torch.ones(0, 3, 2, requires_grad=True))
    y.sum().backward()
    return y.shape, layer.running_mean.tolist(), layer.num_batches_tracked.item()


def test_a_global_batch_of_nothing_teaches_nothing():
    assert run_ranks(nothing_at_all, 2) == [((0, 3, 2), [0, 0, 0], 1)] * 2


@pytest.mark.parametrize("training", [True, False])
def test_a_world_of_one_is_torchs_layer_bit_for_bit(training):
    case = Case(sizes=(6,), dtype=torch.float32)
    x, dy = case.batch()
    ours, torchs = case.layer(lockstep.SyncBatchNorm), case.layer(torch.nn.BatchNorm2d)
    found, expected = (results(layer.train(training), x.clone().requires_grad_(), dy) for layer in (ours, torchs))

    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_is_a_batch_norm_but_not_the_class_that_ddp_refuses():
    layer = lockstep.SyncBatchNorm(3)

    assert isinstance(layer, _BatchNorm)
    assert not isinstance(layer, torch.nn.SyncBatchNorm)


@pytest.mark.parametrize(
    ("arguments", "dtype", "channel_last", "fuse_relu"),
    [
        ((), torch.float32, False, False),
        (("cpu", torch.float64), torch.float64, False, False),
        ((None, torch.float64), torch.float64, False, False),
        ((True, True), torch.float32, True, True),
        ((True, False, "cpu", torch.float64), torch.float64, True, False),
    ],
)
def test_torchs_and_apexs_order_of_arguments_both_work(arguments, dtype, channel_last, fuse_relu):
    layer = lockstep.SyncBatchNorm(3, 1e-5, 0.1, True, True, None, *arguments)

    assert (layer.weight.dtype, layer.channel_last, layer.fuse_relu) == (dtype, channel_last, fuse_relu)


def apex_style(rank, x, z):
    layer = lockstep.SyncBatchNorm(3, channel_last=True, fuse_relu=True)
    return layer(halves(x, rank), halves(z, rank))


@pytest.mark.parametrize("rest", [(), (4,), (4, 5)])
def test_channel_last_with_a_residual_and_relu(rest):
    x, z = torch.randn(2, 6, *rest, 3, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.SyncBatchNorm(3)  # any number of dimensions, and alone here
    expected = (plain(x.movedim(-1, 1)).movedim(1, -1) + z).relu()

    torch.testing.assert_close(torch.cat(run_ranks(apex_style, 2, x, z)), expected, rtol=1e-5, atol=1e-5)


class Twice(torch.nn.Module):
    """Two layers in a checkpointed stretch."""

    def __init__(self, layer, how):
        super().__init__()
        self.inner = torch.nn.Sequential(layer, torch.nn.Tanh())
        self.how = how

    def forward(self, x):
        return self.inner(x) if self.how is None else checkpoint(self.inner, x, use_reentrant=self.how)


def checkpointed(rank, case, how):
    x, dy = (whole[case.share(rank)] for whole in case.batch())
    return results(Twice(case.layer(lockstep.SyncBatchNorm), how), x.detach().requires_grad_(), dy)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_what_it_gives_in_one_process(reentrant):
    """Running statistics included: torch's layer too sees a recomputed batch twice."""
    case = Case(sizes=(2, 3))
    x, dy = case.batch()
    expected = results(Twice(case.layer(torch.nn.BatchNorm2d), reentrant), x.requires_grad_(), dy)

    assert_joined(case, run_ranks(checkpointed, 2, case, reentrant), expected, 1e-10)


def under_autocast(rank, x):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), lockstep.SyncBatchNorm(3))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(halves(x, rank))
    y.float().square().sum().backward()
    return y, model[0].weight.grad, model[1].weight.grad


def test_under_autocast_it_takes_bf16_and_keeps_float32():
    x = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(1))
    expected, *_ = under_autocast(0, torch.cat((x, x)))
    found, conv, weight = run_ranks(under_autocast, 2, x)[0]

    assert (found.dtype, conv.dtype, weight.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(found, expected[:4], rtol=2e-2, atol=2e-2)


def frozen(rank, case, wants_x):
    layer = case.layer(lockstep.SyncBatchNorm).requires_grad_(False)
    x, dy = (whole[case.share(rank)] for whole in case.batch())
    x = x.detach().requires_grad_(wants_x[rank])
    y = layer(x)
    y.backward(dy)
    return x.grad, layer.weight.grad, layer.bias.grad


def test_frozen_parameters_get_no_gradient_and_inputs_do():
    case = Case(sizes=(2, 3))
    found = run_ranks(frozen, 2, case, (True, True))

    assert [row[1:] for row in found] == [(None, None)] * 2
    torch.testing.assert_close(torch.cat([row[0] for row in found]), reference(case)["dx"])


def test_a_rank_with_nothing_to_learn_comes_to_backward_if_another_waits_there():
    """Without it rank 0 would hang: rank 1's input and parameters need no gradient."""
    case = Case(sizes=(2, 3))
    found = run_ranks(frozen, 2, case, (True, False))

    assert found[1] == (None, None, None)
    torch.testing.assert_close(found[0][0], reference(case)["dx"][:2])


def no_grad_on_one_rank(rank):
    with torch.set_grad_enabled(rank == 0):
        try:
            lockstep.SyncBatchNorm(3)(torch.randn(4, 3, requires_grad=True))
        except lockstep.MismatchError as error:
            return str(error)
    return "no error"


def test_no_grad_on_one_rank_only_raises_on_all():
    first, second = run_ranks(no_grad_on_one_rank, 2)

    assert "records gradients on rank 0 but runs without on rank 1" in first
    assert first.replace("rank 0 of 2", "") == second.replace("rank 1 of 2", "")


def unused_on_rank_1(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    y = lockstep.SyncBatchNorm(3, process_group=group)(torch.randn(4, 3, requires_grad=True))
    if rank == 1:
        dist.barrier()
        return ""
    try:
        y.sum().backward()
    except lockstep.LockstepError as error:
        return str(error)
    finally:
        dist.barrier()
    return "no error"


def test_an_output_that_one_rank_does_not_use_is_reported_when_the_wait_ends():
    message = run_ranks(unused_on_rank_1, 2)[0]

    assert message.startswith("rank 0 of 2: SyncBatchNorm(3) waited in backward")
    assert "0 * output.sum()" in message


def in_groups(rank, x, group_size):
    group = lockstep.create_syncbn_process_group(group_size)
    return lockstep.SyncBatchNorm(3, process_group=group)(x.tensor_split(4)[rank])


@pytest.mark.parametrize("group_size", [1, 2, 4, 0])
def test_groups_of_neighbours_normalise_together(group_size):
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([torch.nn.BatchNorm1d(3)(part) for part in x.split(3 * (group_size or 4))])

    torch.testing.assert_close(torch.cat(run_ranks(in_groups, 4, x, group_size)), expected)


def refused_group(rank, group_size):
    try:
        lockstep.create_syncbn_process_group(group_size)
    except lockstep.UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("group_size", [3, -1, True, 1.0])
def test_groups_that_do_not_fit_are_refused(group_size):
    for message in run_ranks(refused_group, 2, group_size):
        assert "Choose one of 1, 2, or 0" in message


def copied(rank):
    import copy
    import pickle

    layer = lockstep.SyncBatchNorm(2, process_group=lockstep.create_syncbn_process_group(1))
    same = copy.deepcopy(layer).process_group is layer.process_group
    with pytest.raises(lockstep.UsageError, match="state_dict"):
        pickle.dumps(layer)
    return same


def test_a_layer_with_a_group_can_be_copied_but_not_pickled():
    assert run_ranks(copied, 2) == [True, True]


def foreign_group(rank):
    layer = lockstep.SyncBatchNorm(2, process_group=dist.new_group([1]))
    try:
        layer(torch.randn(4, 2))
    except lockstep.UsageError as error:
        return str(error)
    return ""


def test_a_rank_outside_its_group_is_told():
    first, second = run_ranks(foreign_group, 2)

    assert "not in the process_group" in first
    assert second == ""


def test_too_few_dimensions_raise_torchs_error():
    with pytest.raises(ValueError, match="at least 2D"):
        lockstep.SyncBatchNorm(3)(torch.ones(3))


def too_few_channels(rank):
    layer = lockstep.SyncBatchNorm(3, affine=False)
    try:
        layer(torch.ones(4, 1, 2))
    except lockstep.UsageError as error:
        return str(error), layer.running_mean.tolist()
    return "no error"


def test_channels_that_would_be_broadcast_raise_on_every_rank():
    for message, running_mean in run_ranks(too_few_channels, 2):
        assert "got an input of size [4, 1, 2], with 1 channels" in message
        assert running_mean == [0, 0, 0]


def evaluated_without_running_statistics(rank, x):
    return lockstep.SyncBatchNorm(3, track_running_stats=False).eval()(halves(x, rank))


def test_eval_mode_without_running_statistics_normalises_the_local_batch():
    """As torch's layer does: nothing is sent in eval mode."""
    x = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([torch.nn.BatchNorm1d(3, track_running_stats=False)(part) for part in x.chunk(2)])

    torch.testing.assert_close(torch.cat(run_ranks(evaluated_without_running_statistics, 2, x)), expected)
