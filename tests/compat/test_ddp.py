"""apex.parallel.DistributedDataParallel in whatever scripts did with it, beside one process in float64."""

import copy
import functools
import pickle
import traceback

import pytest
import torch
import torch.distributed as dist
from faces import apex
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

DDP = apex.parallel.DistributedDataParallel
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def net(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def data(rank, turn=0, dtype=torch.float64):
    return torch.sin(torch.arange(24.0, dtype=torch.float64) * (rank + 2) + turn).reshape(4, 6).to(dtype)


def loss_of(out):
    return out.double().square().mean()


def mean_grads(losses, ranks=2):
    """The mean over ranks of the gradients of ``losses(model, rank)``, in one process."""
    model = net()
    (sum(losses(model, rank) for rank in range(ranks)) / ranks).backward()
    return [param.grad for param in model.parameters()]


def grads(model):
    return [param.grad for param in model.parameters()]


def same(a, b, tolerance=1e-12):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance), (x, y)


@case
def gradients_are_the_mean(rank):
    model = net(seed=rank)
    loss_of(DDP(model)(data(rank))).backward()
    same(mean_grads(lambda m, r: loss_of(m(data(r)))), grads(model))


@case
def bfloat16_gradients_are_reduced_too(rank):
    model = net(torch.bfloat16)
    loss_of(DDP(model)(data(rank, dtype=torch.bfloat16))).backward()
    same(mean_grads(lambda m, r: loss_of(m(data(r)))), grads(model), 2e-2)


@case
def trigger_parameters_end_a_bucket(rank):
    model = net()
    ddp = DDP(model, allreduce_trigger_params=[model[2].weight, model[0].bias], retain_allreduce_buffers=True)
    for _ in range(2):
        model.zero_grad()
        loss_of(ddp(data(rank))).backward()
    same(mean_grads(lambda m, r: loss_of(m(data(r)))), grads(model))
    # Gradients come last layer first: its bias, its weight; the first layer's bias; the rest.
    sizes = sorted(buffer.numel() for buffer in ddp.allreduce_buffers)
    assert len(sizes) == 3 or len(sizes) == 2, sizes
    assert len(sizes) > 1


@case
def small_messages_make_many_buckets(rank):
    model = net()
    ddp = DDP(model, message_size=1, retain_allreduce_buffers=True)
    loss_of(ddp(data(rank))).backward()
    assert 4 == len(ddp.allreduce_buffers)
    assert 1 == len(DDP(net(), message_size=1, delay_allreduce=True, retain_allreduce_buffers=True).allreduce_buffers)
    assert [] == DDP(net()).allreduce_buffers


@case
def kept_buffers_hold_the_gradients(rank):
    model = net()
    ddp = DDP(model, retain_allreduce_buffers=True)
    loss_of(ddp(data(rank))).backward()
    (flat,) = ddp.allreduce_buffers
    flat.zero_()
    assert all((grad == 0).all() for grad in grads(model))


@case
def a_parameter_unused_on_one_rank(rank):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 3).double() for _ in range(3))

        def forward(self, x, both):
            return self.a(x) + (self.b(x) if both else 0)

    torch.manual_seed(0)
    model = Branch()
    ddp = DDP(model)
    for _ in range(3):
        model.zero_grad()
        loss_of(ddp(data(rank), rank == 1)).backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    ((loss_of(alone(data(0), False)) + loss_of(alone(data(1), True))) / 2).backward()
    same(grads(alone), grads(model))
    assert model.c.weight.grad is None


@case
def parameters_freeze_and_thaw_between_steps(rank):
    model = net()
    ddp = DDP(model)
    for frozen in (False, True, False):
        model[0].weight.requires_grad_(not frozen)
        model.zero_grad()
        loss_of(ddp(data(rank))).backward()
        assert frozen == (model[0].weight.grad is None)
    same(mean_grads(lambda m, r: loss_of(m(data(r)))), grads(model))


@case
def two_backwards_after_one_forward(rank):
    model = net()
    out = DDP(model)(data(rank))
    loss_of(out).backward(retain_graph=True)
    out.sum().backward()
    same(mean_grads(lambda m, r: loss_of(m(data(r))) + m(data(r)).sum()), grads(model))


@case
def two_forwards_before_one_backward(rank):
    model = net()
    ddp = DDP(model)
    (loss_of(ddp(data(rank))) + loss_of(ddp(data(rank, 1)))).backward()
    same(mean_grads(lambda m, r: loss_of(m(data(r))) + loss_of(m(data(r, 1)))), grads(model))


@case
def backward_through_the_inner_module(rank):
    model = net()
    ddp = DDP(model)
    loss_of(ddp.module(data(rank))).backward()
    same(mean_grads(lambda m, r: loss_of(m(data(r)))), grads(model))


@case
def accumulation_sends_each_time_or_once(rank):
    wanted = mean_grads(lambda m, r: loss_of(m(data(r))) + loss_of(m(data(r, 1))))
    for way in ("each", "no_sync", "disable"):
        model = net()
        ddp = DDP(model)
        if way == "disable":
            ddp.disable_allreduce()
        if way == "no_sync":
            with ddp.no_sync():
                loss_of(ddp(data(rank))).backward()
        else:
            loss_of(ddp(data(rank))).backward()
        ddp.enable_allreduce()
        loss_of(ddp(data(rank, 1))).backward()
        same(wanted, grads(model))


@case
def sums_that_accumulate_stay_sums(rank):
    """Apex multiplied what was summed before by the number of ranks once more."""
    wanted = [2 * grad for grad in mean_grads(lambda m, r: sum(loss_of(m(data(r, t))) for t in range(3)))]
    for zeroed in ("none", "zeros"):
        model = net()
        ddp = DDP(model, gradient_average=False)
        for turn in range(3):
            loss_of(ddp(data(rank, turn))).backward()
        same(wanted, grads(model))
        model.zero_grad(set_to_none=zeroed == "none")
        with ddp.no_sync():
            loss_of(ddp(data(rank, 0))).backward()
        for turn in (1, 2):
            loss_of(ddp(data(rank, turn))).backward()
        same(wanted, grads(model))


@case
def no_sync_nests(rank):
    ddp = DDP(net())
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync


@case
def checkpoints_reentrant_and_not(rank):
    for reentrant in (True, False):
        model = net()
        ddp = DDP(model)

        class Twice(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

        x = data(rank).requires_grad_()
        for _ in range(2):
            model.zero_grad()
            out = checkpoint(model, x, use_reentrant=reentrant) + checkpoint(model, x, use_reentrant=reentrant)
            loss_of(out).backward()
        assert ddp.module is model
        same(mean_grads(lambda m, r: loss_of(2 * m(data(r)))), grads(model))


@case
def shared_parameters(rank):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model = Tied()
    loss_of(DDP(model)(data(rank))).backward()
    alone = Tied()
    ((loss_of(alone(data(0))) + loss_of(alone(data(1)))) / 2).backward()
    same(grads(alone), grads(model))


@case
def a_copy_and_a_pickle_train_with_the_others(rank):
    ddp = DDP(net(seed=rank))
    loss_of(ddp(data(rank))).backward()
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(ddp.parameters(), other.parameters(), strict=True))
        other.zero_grad()
        loss_of(other(data(rank))).backward()
        same(mean_grads(lambda m, r: loss_of(m(data(r)))), grads(other))


@case
def a_copy_on_one_rank_alone_waits_for_nobody(rank):
    ddp = DDP(net())
    if rank == 0:
        average = copy.deepcopy(ddp).eval()
        assert average(data(rank)).shape == (4, 3)


@case
def modules_without_parameters(rank):
    x = data(rank).requires_grad_()
    DDP(nn.Tanh())(x).sum().backward()
    assert x.grad is not None


@case
def buffers_are_never_sent(rank):
    model = nn.BatchNorm1d(6).double()
    model.running_mean.fill_(rank)
    frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
    model.register_parameter("frozen", frozen)
    ddp = DDP(model)
    assert [rank] * 6 == model.running_mean.tolist()
    loss_of(ddp(data(rank))).backward()
    assert not torch.equal(torch.zeros(6).double(), model.running_mean)
    means = [torch.zeros(6).double() for _ in range(2)]
    dist.all_gather(means, model.running_mean)
    assert not torch.equal(*means)
    assert [0.0, 0.0] == frozen.tolist()  # parameters are rank 0's, frozen ones too


@case
def keys_have_the_prefix(rank):
    assert ["module.weight", "module.bias"] == list(DDP(nn.Linear(1, 1)).state_dict())


@case
def the_attributes_that_scripts_touch(rank):
    model = net()
    ddp = DDP(model, gradient_predivide_factor=2.0, gradient_average_split_factor=2.0, prof=True)
    ddp.needs_refresh = True
    assert ddp.needs_refresh
    loss_of(ddp(data(rank))).backward()
    assert not ddp.needs_refresh
    same(mean_grads(lambda m, r: loss_of(m(data(r)))), grads(model))
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    other = net()
    loss_of(DDP(other, num_allreduce_streams=2, allreduce_communicators=(groups, [None, None]))(data(rank))).backward()
    same(grads(model), grads(other))


@case
def a_hundred_steps_leave_the_ranks_equal(rank):
    model = net(torch.float32, seed=rank)
    ddp = DDP(model, message_size=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for turn in range(100):
        optimizer.zero_grad()
        loss_of(ddp(data(rank, turn, torch.float32))).backward()
        optimizer.step()
    mine = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    everyone = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(everyone, mine)
    assert torch.equal(*everyone)


@case
def other_models_on_another_rank_raise_everywhere(rank):
    with pytest.raises(RuntimeError, match="different models"):
        DDP(nn.Linear(2, 2 + rank))


def run_all(rank):
    found = {}
    for name, function in CASES.items():
        try:
            function(rank)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
    return found


@functools.cache
def outcomes():
    return run_ranks(run_all, 2, timeout=100)


@pytest.mark.parametrize("name", CASES)
def test_ddp(name):
    assert ["", ""] == [found[name] for found in outcomes()]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"shared_param": True}, ValueError, "shared_param"),
        ({"shared_param": False}, ValueError, "shared_param"),
        ({"delay_allreduce": True, "allreduce_trigger_params": [1]}, ValueError, "allreduce_trigger_params"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, ValueError, "num_allreduce_streams"),
        ({"allreduce_communicators": ([], [])}, AssertionError, "num_allreduce_streams"),
        ({"num_allreduce_streams": 2, "allreduce_communicators": ([1], [1])}, AssertionError, "2 groups"),
        ({}, ValueError, "init_process_group"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_and_a_missing_process_group(options, error, said):
    with pytest.raises(error, match=said):
        DDP(nn.Linear(1, 1), **options)


def alone(rank):
    model = net()
    ddp = DDP(model, gradient_average=False, retain_allreduce_buffers=True)
    with ddp.no_sync():
        loss_of(ddp(data(0))).backward()
    apex.parallel.Reducer(model).reduce()
    return grads(model), ddp.allreduce_buffers


def test_a_world_of_one_sends_nothing():
    ((got, buffers),) = run_ranks(alone, 1)

    same(mean_grads(lambda m, r: loss_of(m(data(r))), ranks=1), got)
    assert [] == buffers


def converted(rank):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4), nn.InstanceNorm2d(4)))
    model[1].weight.requires_grad_(False)
    model[2][0].eval()
    seen = []
    model[1].register_forward_hook(lambda *args: seen.append(1))
    before = {name: id(param) for name, param in model.named_parameters()}
    keys = list(model.state_dict())
    group = apex.parallel.create_syncbn_process_group(1)
    out = apex.parallel.convert_syncbn_model(model, process_group=group, channel_last=False)
    out(torch.randn(2, 3, 2, 2))
    same_objects = before == {name: id(param) for name, param in out.named_parameters()}
    kinds = [isinstance(layer, apex.parallel.SyncBatchNorm) for layer in (out[1], out[2][0], out[2][1])]
    root = apex.parallel.convert_syncbn_model(nn.BatchNorm1d(3), channel_last=True)
    kept = (out[1].weight.requires_grad, out[2][0].training, out[1].training)
    whole = apex.parallel.create_syncbn_process_group(0)
    with pytest.raises(AssertionError):
        apex.parallel.create_syncbn_process_group(3)
    sizes = dist.get_world_size(group), len(dist.get_process_group_ranks(group))
    return same_objects, keys == list(out.state_dict()), kinds, root.channel_last, kept, len(seen), whole, sizes


def test_conversion_keeps_parameters_flags_hooks_and_keys():
    wanted = (True, True, [True, True, False], True, (False, False, True), 1, None, (1, 1))

    assert [wanted, wanted] == run_ranks(converted, 2)
